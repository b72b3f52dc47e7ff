"""A rank's step from its messages alone; a simulated and a measured step on one picture."""

import pandas as pd
import pytest
from pytest import approx

from labkit.comm_log import Event, Pause
from labkit.measure.timeline_analysis import lanes
from labkit.scale.simulate import simulate
from labkit.show import plots, publish


def message(start, end, *pauses):
    found = [Pause(begin, stop) for begin, stop in pauses]
    return Event("all_reduce", 2, 8, 8, "derived", start, end, found or None)


def spans(rows, lane):
    return [(row["start_ms"], row["end_ms"]) for row in rows if row["lane"] == lane]


def test_who_does_not_wait_computes():
    rows = lanes([message(1.0, 4.0, (3.0, 4.0)), message(5.0, 6.0)], 1.0, 7.0)
    assert spans(rows, "compute") == [(0.0, 2000.0), (3000.0, 4000.0), (5000.0, 6000.0)]
    assert spans(rows, "exposed") == [(2000.0, 3000.0), (4000.0, 5000.0)]
    assert spans(rows, "network") == [(0.0, 3000.0), (4000.0, 5000.0)]


def test_two_waits_at_once_are_one():
    rows = lanes([message(0.0, 3.0, (1.0, 3.0)), message(0.0, 4.0, (2.0, 4.0))], 0.0, 4.0)
    assert spans(rows, "exposed") == [(1000.0, 3000.0), (3000.0, 4000.0)]
    assert spans(rows, "compute") == [(0.0, 1000.0)]


def test_of_other_steps_nothing_is_seen_and_what_is_in_flight_is_refused():
    assert lanes([message(0.0, 1.0)], 2.0, 3.0) == [
        {"lane": "compute", "name": "compute", "start_ms": 0.0, "end_ms": 1000.0}
    ]
    with pytest.raises(ValueError, match="all_reduce is still in flight"):
        lanes([message(0.0, None, (0.0, 1.0))], 0.0, 1.0)


def test_lanes_of_what_was_simulated_are_the_same():
    """A message that takes what the simulator says it takes lies where the simulator puts it."""
    told = simulate([message(1.0, 1.0, (2.0, 2.0))], 0.0, 3.0, lambda event: ("network", 1.5))
    real = lanes([message(1.0, 2.5, (2.0, 2.5))], 0.0, 3.5)
    for lane in ("compute", "network", "exposed"):
        theirs = [span for span in spans(told.rows, lane) if span[1] > span[0]]
        assert sum(e - s for s, e in spans(real, lane)) == approx(sum(e - s for s, e in theirs))
    assert max(row["end_ms"] for row in real) == approx(1e3 * told.seconds)


def frame(*sources):
    row = {"row": "rank 0", "lane": "compute", "start_ms": 0.0}
    return pd.DataFrame([row | {"source": s, "end_ms": 10.0 + i} for i, s in enumerate(sources)])


def test_each_row_says_which_of_the_two_it_is():
    figure = plots.simulated_vs_measured(
        {"DDP": frame("simulated", "measured"), "FSDP": frame("measured", "simulated")}
    )
    axes = figure.axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["rank 0, simulated", "rank 0, measured"] * 2
    said = [text.get_text() for text in axes.texts]
    assert said == ["DDP", "simulated 10 ms, measured 11 ms", "FSDP", "simulated 11 ms, measured 10 ms"]
    rims = [bar.get_linestyle() for bar in axes.patches]
    assert rims == ["--", "solid"] * 2
    assert [bar.get_width() for bar in axes.patches] == [10.0, 11.0, 11.0, 10.0]
    assert publish.png(figure, dpi=50)


def test_one_of_the_two_alone_is_refused():
    with pytest.raises(ValueError, match="DDP: no row is measured"):
        plots.simulated_vs_measured({"DDP": frame("simulated")})
