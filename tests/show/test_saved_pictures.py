"""What a saved picture says can be read: no text lies on another one, leaves the canvas, or is small in README."""

import re
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import test_bandwidth_explorer
import test_cases_explorer
import test_collective_chunks as chunks
import test_dashboard
import test_gradients
import test_memory_and_traffic
import test_memory_explorer as budgets
import test_parallelism_map
import test_pareto
import test_roofline
import test_scaling
import test_show
import test_time_to_loss_curves
import test_unit_residency
import test_with_and_without
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from labkit.measure.machine import ROOT
from labkit.measure.timeline import Timeline
from labkit.show import (
    bandwidth_explorer,
    cases_explorer,
    formats,
    fsdp_explorer,
    gradients,
    memory_explorer,
    overview,
    plots,
)
from labkit.show.memory_timeline import memory_timelines
from labkit.show.unit_residency import residency

TOUCHING = 1.0  # points that two boxes may share: a box has room for letters that its text does not have
SMALLEST = 7.0  # points
README_WIDTH = 634.5  # points: 846 pixels, what GitHub gives a README on a large screen; wider pictures shrink
TEXT_SIZE = re.compile(r"scale\(([\d.]+) -[\d.]+\)")  # matplotlib writes each text as paths of a font of 100 points
NOTE = "counted on one process, with everything that has to be said about where these numbers come from"


def launches():
    return pd.DataFrame(
        {"launch": one, "phase": phase, "repetition": turn, "wall_clock_seconds": seconds}
        for one, parts in (("cold torchrun", (4.4, 0.1, 1.0)), ("warm agent", (0.2, 0.03, 0.1)))
        for phase, seconds in zip(("start processes, import torch", "join the group", "leave"), parts, strict=True)
        for turn in range(3)
    )


def compared():
    return test_show.compared().assign(exposed_comm_ms=3.0, peak_bytes=5 << 20)


CROWD = [f"{run} again {turn}" for run in ("H = 4", "H = 16") for turn in (1, 2)]


def crowded_race():
    """Each run three times, and all end near each other."""
    rows = test_time_to_loss_curves.measured()
    return pd.concat(
        rows.assign(run=rows["run"] + f" again {turn}", seconds=rows["seconds"] * (1 + turn / 50)) for turn in range(3)
    )


def pictures():
    bands = {
        name: Timeline.from_rows(test_unit_residency.step(ahead)).frame() for name, ahead in (("a", False), ("b", True))
    }
    samples = {f"run {i}": test_unit_residency.samples(1, 5 + i, 2) for i in range(3)}
    race, links_of = test_time_to_loss_curves.measured(), test_bandwidth_explorer.rows_of
    recorded, state = test_gradients.recorded(), test_gradients.STATE
    every = bandwidth_explorer.State(tuple(test_bandwidth_explorer.COSTS), 100.0, "none")
    return test_show.pictures() | {
        "overview": lambda: overview.overview(compared(), "A title"),
        "stacked bars": lambda: plots.stacked_bars(
            launches(), "wall_clock_seconds", "launch", "phase", "repetition", "A title"
        ),
        "stages": lambda: plots.memory_and_traffic(test_memory_and_traffic.rows(), "A title"),
        "memory timelines": lambda: memory_timelines(samples, "A title"),
        "residency": lambda: residency(bands, "A title"),
        "choices": lambda: fsdp_explorer.draw(test_unit_residency.sweep(), test_unit_residency.FIRST),
        "pareto": lambda: plots.pareto(test_pareto.measured(), "step_ms", "peak_bytes", title="A title"),
        "roofline": lambda: plots.roofline(test_roofline.CEILINGS, test_roofline.POINTS, "A title"),
        "links": lambda: plots.step_over_link(links_of(), "none", title="A title", at=200),
        "bars of a link": lambda: bandwidth_explorer.bars(links_of(), every),
        "race": lambda: plots.race(race, test_time_to_loss_curves.TARGET, "A title", ["H = 4", "H = 16"]),
        "crowded race": lambda: plots.race(crowded_race(), test_time_to_loss_curves.TARGET, "A title", CROWD),
        "switched": test_with_and_without.figure,
        "efficiency": test_scaling.picture,
        "budgets": lambda: memory_explorer.draw(budgets.predict, budgets.state(capacity=64 << 20)),
        "parallelism map": lambda: plots.parallelism_map(test_parallelism_map.axes(), "A title"),
        "cases": lambda: cases_explorer.beside(test_cases_explorer.frame(), "A title"),
        "dashboard": lambda: test_dashboard.figure("ratio to the base"),
        "dashboard in parts": lambda: test_dashboard.figure("memory by kind"),
        "transmitted": lambda: gradients.transmitted(recorded, state),
        "catching up": lambda: gradients.catching_up(recorded, state),
        "bits": lambda: formats.bit_layout(0.1),
        "reach": lambda: formats.reach(np.logspace(-12, 1, 500), "fp16"),
        "side by side": lambda: plots.side_by_side(
            pd.DataFrame([{"algorithm": "ring", **row} for row in chunks.state(4, chunks.whole(4))])
        ),
    }


@pytest.fixture
def drawn(monkeypatch):
    """[(words, box)] of the texts that the last figure was drawn with, and its canvas behind them."""
    seen, draw_figure, draw_text = [], Figure.draw, Text.draw

    def begin(figure, renderer):
        seen[:] = []
        draw_figure(figure, renderer)
        seen.append(("canvas", figure.bbox.frozen()))

    def note(text, renderer, *arguments, **settings):
        if text.get_visible() and text.get_text().strip():
            seen.append((text.get_text(), Text.get_window_extent(text, renderer)))
        draw_text(text, renderer, *arguments, **settings)

    monkeypatch.setattr(Figure, "draw", begin)
    monkeypatch.setattr(Text, "draw", note)
    return seen


def smallest_in_readme(svg):
    """Points of the smallest text where README shows the picture."""
    width = float(re.search(r'width="([\d.]+)pt"', svg)[1])
    return 100 * min(map(float, TEXT_SIZE.findall(svg))) * min(1, README_WIDTH / width)


@pytest.mark.parametrize("name", pictures())
def test_no_text_of_a_saved_picture_lies_on_another_or_leaves_the_canvas(name, drawn, tmp_path):
    figure = pictures()[name]()
    path = plots.save(figure, "saved", [], {}, NOTE, "A picture.", folder=tmp_path)
    *texts, (_, canvas) = drawn
    assert NOTE in [words for words, _ in texts]
    assert smallest_in_readme(path.read_text()) >= SMALLEST
    for words, box in texts:
        inside = canvas.x0 <= box.x0 and box.x1 <= canvas.x1 and canvas.y0 <= box.y0 and box.y1 <= canvas.y1
        assert inside, f"{words!r} leaves the canvas"
    for (words, box), (other, behind) in combinations(texts, 2):
        shared = Bbox.intersection(box, behind)
        assert shared is None or min(shared.size) <= TOUCHING, f"{words!r} lies on {other!r}"


@pytest.mark.parametrize("path", sorted((ROOT / "figures").glob("*.svg")), ids=lambda path: path.stem)
def test_every_text_of_the_courses_figures_can_be_read_in_readme(path):
    assert smallest_in_readme(path.read_text()) >= SMALLEST
