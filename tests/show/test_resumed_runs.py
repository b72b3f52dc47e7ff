"""The picture of broken runs: on the unbroken one where they agree, and below it by how much they do not."""

import pandas as pd
import pytest

from labkit.show import plots
from labkit.show.publish import png
from labkit.show.resumed_runs import differences

ROWS = [("never broken", step, 4.0 - step) for step in (1, 2, 3)]
ROWS += [("same ranks", step, 4.0 - step) for step in (1, 2, 2, 3)]
ROWS += [("fewer ranks", step, loss) for step, loss in ((1, 3.0), (2, 2.004), (2, 2.002), (3, 1.01))]
MARKS = [(1, "saved", "left"), (2, "killed", "right")]


def frame(rows=ROWS):
    return pd.DataFrame(rows, columns=["run", "step", "loss"])


def test_every_time_that_a_step_was_taken_is_held_against_the_first_run():
    off = differences(frame()).groupby("run", sort=False)["off"].apply(list)
    assert off["never broken"] == [0, 0, 0] and off["same ranks"] == [0, 0, 0, 0]
    assert off["fewer ranks"] == pytest.approx([0, 0.002, 0.001, 0.01])


def test_losses_above_differences_below_with_0_on_the_axis():
    figure = plots.broken(frame(), MARKS, rounding=2**-8, title="Broken")
    above, below = figure.axes
    assert above.get_ylabel() == "loss (cross-entropy, nats)"
    drawn = {line.get_label(): line for line in above.lines}
    assert list(drawn["fewer ranks"].get_ydata()) == [3.0, 2.002, 1.01]
    assert drawn["never broken"].get_linewidth() > drawn["fewer ranks"].get_linewidth()
    same, fewer = (line.get_ydata() for line in below.lines[:2])
    assert list(same) == [0, 0, 0] and list(fewer) == pytest.approx([0, 0.002, 0.01])
    low, high = below.get_ylim()
    assert low < 0 < 0.01 < high and "0" in [text.get_text() for text in below.get_yticklabels()]
    assert {text.get_text() for text in above.texts} == {"saved", "killed"}
    assert [text.get_text() for text in below.texts] == ["rounding: 3.9e-03"]
    assert png(figure, dpi=50)


def test_no_losses_are_said():
    with pytest.raises(ValueError, match="no losses"):
        plots.broken(frame([]))
