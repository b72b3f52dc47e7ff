"""The picture of two prices: which points are on the front, and what the axes say."""

import pandas as pd
import pytest
from matplotlib.colors import to_hex

from labkit.show import pareto, plots, publish, style

MEASURED = {"keep": (100, 64), "recompute": (130, 20), "both": (140, 20), "half": (115, 42), "slow": (150, 60)}


def measured():
    return pd.DataFrame(
        {"variant": variant, "step_ms": ms + late, "peak_bytes": mib << 20}
        for variant, (ms, mib) in MEASURED.items()
        for late in (-1, 0, 1)
    )


def test_the_front_is_what_nothing_beats_on_both():
    assert pareto.front([(1, 5), (2, 2), (3, 2), (3, 1), (4, 4)]) == [0, 1, 3]
    assert pareto.front([(1, 1), (1, 1)]) == [0, 1]  # neither beats the other


def test_the_front_is_filled_and_the_rest_is_hollow():
    figure = plots.pareto(measured(), "step_ms", "peak_bytes", title="Two prices")
    axes = figure.axes[0]
    points = {tuple(line.get_xydata()[0]): line for line in axes.lines if line.get_marker() == "o"}
    filled = {at for at, line in points.items() if to_hex(line.get_markerfacecolor()) != style.GROUND}
    assert filled == {(100.0, 64.0), (130.0, 20.0), (115.0, 42.0)}
    assert len(points) == len(MEASURED)
    assert axes.get_xlabel() == "step time (ms)"
    assert axes.get_ylabel() == "peak memory per rank (MiB)"
    assert {text.get_text() for text in axes.texts} >= set(MEASURED)
    assert publish.png(figure, dpi=50)


def test_nothing_measured_is_said():
    with pytest.raises(ValueError, match="nothing was measured"):
        plots.pareto(measured().iloc[:0], "step_ms", "peak_bytes")
