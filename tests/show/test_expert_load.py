"""The picture of experts' load, and what a capacity would have dropped of it."""

import numpy as np
import pandas as pd
import pytest

from labkit.show import expert_capacity_explorer, plots
from labkit.show.expert_load import shares
from labkit.show.publish import png

FRAME = pd.DataFrame(
    [{"run": "none", "step": step, "load": [8, 0, 0, 0]} for step in range(3)]
    + [{"run": "bias", "step": step, "load": [2, 2, 2, 2]} for step in range(3)]
)


def test_the_map_shows_loads_over_an_even_share():
    figure = plots.load_map(FRAME, "Load")
    alone, even = (axes.images[0] for axes in figure.axes[:2])
    assert np.array_equal(alone.get_array(), shares(FRAME)["none"].T) and alone.get_array().max() == 4
    assert (even.get_array() == 1).all()
    assert alone.get_clim() == even.get_clim() == (0, 2) and alone.norm(1.0) == 0.5  # an even share: the middle
    assert [axes.get_title(loc="left") for axes in figure.axes[:2]] == ["none", "bias"]
    assert png(figure, dpi=50)


def test_nothing_recorded_is_said():
    with pytest.raises(ValueError, match="no load was recorded"):
        plots.load_map(FRAME.iloc[:0])


def test_what_is_beyond_the_capacity_is_dropped():
    assert expert_capacity_explorer.small(FRAME, (1.0, 3.0)).to_dict("list") == {
        "run": ["none", "bias"],
        "capacity 1": ["75.0 %", "0.0 %"],
        "capacity 3": ["25.0 %", "0.0 %"],
    }


def test_the_controls_draw_anew(capsys):
    shown = expert_capacity_explorer.explorer(FRAME, "none", "predicted from counted loads")
    shown.controls["run"].value = "bias"
    shown.controls["capacity"].value = 0.5
    assert "Run bias: 50.0 % of the recorded rows are beyond a capacity factor of 0.5." in shown.image.value


def test_every_run_is_named_and_the_largest_capacity_drops_nothing():
    state = expert_capacity_explorer.State("none", 1.0)
    axes = expert_capacity_explorer.draw(FRAME, state).axes[0]
    assert [text.get_text() for text in axes.texts] == ["none", "bias"]
    offered = expert_capacity_explorer.offered(FRAME, 1.0)
    assert offered == [0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4]
    assert not expert_capacity_explorer.dropped(shares(FRAME)["none"], offered[-1]).any()
