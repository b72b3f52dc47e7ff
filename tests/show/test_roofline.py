"""The roofline: two ceilings that meet at the ridge, and every point where its FLOPs and bytes put it."""

import pandas as pd
import pytest

from labkit.show import plots, publish, roofline

CEILINGS = pd.DataFrame(
    [("GPU", 312e12, 2e12), ("core", 100e9, 10e9)], columns=["machine", "flop_per_s", "bytes_per_s"]
)
COLUMNS = ["machine", "variant", "flop_per_byte", "flop_per_s", "name"]
POINTS = pd.DataFrame(
    [
        ("GPU", "plain", 63.0, 126e12, ""),
        ("GPU", "tiles", 63.5, 127e12, "tiles of 64"),
        ("GPU", "tiles", 248.0, 312e12, "tiles of 256"),
        ("core", "plain", 7.1, 30e9, ""),
        ("core", "plain", 7.9, 29e9, "2,048"),
        ("core", "tiles", 60.0, 20e9, "2,048"),
    ],
    columns=COLUMNS,
)


def test_the_ceilings_meet_at_the_ridge():
    figure = plots.roofline(CEILINGS, POINTS, "title")
    assert len(figure.axes) == 2 and figure.get_suptitle() == "title"
    for axes, roof, turn in zip(figure.axes, CEILINGS.itertuples(), (156, 10), strict=True):
        (left, top_left), (x, y), (right, top) = axes.lines[0].get_xydata()
        assert x == turn == roofline.ridge(roof)
        assert top_left / left == pytest.approx(roof.bytes_per_s)  # memory: slope 1 on the log-log axes
        assert y == top == roof.flop_per_s and right > turn
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert "byte" in axes.get_xlabel()
    assert "FLOP/s" in figure.axes[0].get_ylabel()
    notes = [axes.texts[0].get_text() for axes in figure.axes]
    assert notes == ["GPU: 312 TFLOP/s, 2 TB/s, ridge at 156", "core: 100 GFLOP/s, 10 GB/s, ridge at 10"]


def test_each_point_is_on_its_machine_with_its_name():
    figure = plots.roofline(CEILINGS, POINTS)
    for axes, machine in zip(figure.axes, CEILINGS["machine"], strict=True):
        mine = POINTS[POINTS["machine"] == machine]
        drawn = [tuple(map(float, xy)) for line in axes.lines[2:] for xy in line.get_xydata()]
        assert drawn == list(zip(mine["flop_per_byte"], mine["flop_per_s"], strict=True))
        assert [text.get_text() for text in axes.texts[1:]] == mine["name"].tolist()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["plain", "tiles"]
    shapes = [line.get_marker() for line in figure.axes[0].lines[2:]]
    assert len(set(shapes)) == len(shapes)  # without colours, too
    assert publish.png(figure, dpi=50)
