"""Placements and queues in pictures: each box is a held GPU, each share is the simulation's."""

from itertools import pairwise

import pandas as pd
import pytest
from pytest import approx

from labkit.cluster.job_queue import run_queue
from labkit.cluster.job_trace import Gang
from labkit.cluster.placement import Topology, first_fit, round_robin
from labkit.show import placement_explorer, publish

SMALL = Topology(2, leaf=2, gpus_per_node=4)
GANGS = [Gang(0, 0, 2, 600), Gang(1, 0, 3, 1200), Gang(2, 0, 4, 600), Gang(3, 60, 1, 60)]
JOB = placement_explorer.Job(jobs=40, nodes=4)


POLICIES = {"round robin": round_robin, "first fit": first_fit}


def outcomes():
    return {name: run_queue(SMALL, GANGS, policy, len) for name, policy in POLICIES.items()}


def test_boxes_hold_every_gpu_once():
    for outcome in outcomes().values():
        held = {}
        for run, node, first, count in placement_explorer.boxes(outcome.runs, SMALL):
            for gpu in range(first, first + count):
                held.setdefault((node, gpu), []).append((run.start, run.end))
                held[run.gang.number] = held.get(run.gang.number, 0) + 1
        for number, gang in enumerate(GANGS):
            assert held.pop(number) == gang.gpus
        for spans in held.values():
            spans.sort()
            assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_the_parts_over_time_add_up_to_the_shares():
    (outcome, _) = outcomes().values()
    outcome.until = 1200.0
    frame = placement_explorer.over_time(outcome, SMALL)
    assert frame["held"].mean() / SMALL.gpus == approx(outcome.held)
    assert frame["useful"].mean() / SMALL.gpus == approx(outcome.useful)
    assert frame["held"].max() <= SMALL.gpus


def test_pictures():
    figure = placement_explorer.gantt(outcomes(), SMALL, "title")
    assert publish.png(figure, dpi=50)
    frame = pd.DataFrame({"way": ["a", "b"], "seed": 0, "held": [0.9, 0.8], "useful": [0.3, 0.7], "hours": [40, 3]})
    assert publish.png(placement_explorer.held_and_useful(frame, "title"), dpi=50)
    with pytest.raises(ValueError, match="nothing to draw"):
        placement_explorer.gantt({}, SMALL)
    with pytest.raises(ValueError, match="nothing to draw"):
        placement_explorer.held_and_useful(frame[:0])


def test_shares_name_the_minutes_that_they_count():
    one = run_queue(SMALL, GANGS, first_fit, len, until=600)
    figure = placement_explorer.gantt({"first fit": one}, SMALL)
    written = [text.get_text() for text in figure.axes[0].texts]
    assert f"0 to 10 min: held {one.held:.0%}, useful {one.useful:.0%}" in written


def test_words_say_what_the_simulation_found():
    state = placement_explorer.State("round robin", backfill=False, load=0.7)
    outcome = placement_explorer.outcome_of(JOB, state)
    words = placement_explorer.takeaway(JOB, state)
    assert words.startswith("Round robin, first in, first out, load 0.7, leaves of 4 nodes: ")
    assert f"{outcome.held:.0%} of the GPU-hours are held, {outcome.useful:.0%} are useful" in words


def test_the_controls_draw_anew():
    shown = placement_explorer.explorer(JOB, placement_explorer.State(), "simulated")
    for name, value in {"policy": "first fit", "backfill": False, "load": 0.5, "leaf": 2}.items():
        shown.controls[name].value = value
    assert shown.state == placement_explorer.State("first fit", False, 0.5, 2)
    assert "First fit, first in, first out, load 0.5, leaves of 2 nodes" in shown.image.value
