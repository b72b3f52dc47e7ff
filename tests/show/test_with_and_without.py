"""The picture of the same thing without and with something: hollow and filled points, arrows, what diverged."""

import math

import pandas as pd
import pytest
from matplotlib.colors import to_hex

from labkit.show import plots, style
from labkit.show.publish import png

ROWS = [
    ("none", 8192, 0.1, True),
    ("fp16", 4096, 0.1, False),
    ("fp16", 4096, 0.1, True),
    ("topk", 256, 0.4, False),
    ("topk", 256, 0.12, True),
    ("randomk", 128, math.nan, False),
    ("randomk", 128, 0.5, True),
]


def figure(rows=ROWS):
    frame = pd.DataFrame(rows, columns=["compressor", "sent_bytes", "loss", "error_feedback"])
    return plots.switched(frame, "sent_bytes", "loss", "compressor", "error_feedback", "none", "Bytes and loss")


def marks(axes, kind):
    """{(x, y): its fill} of the points drawn with a marker."""
    points = [line for line in axes.lines if line.get_marker() == kind]
    return {tuple(line.get_xydata()[0]): to_hex(line.get_markerfacecolor()) for line in points}


def test_with_it_is_filled_and_without_it_is_hollow():
    axes = figure().axes[0]
    points = marks(axes, "o")
    assert points[256.0, 0.4] == style.GROUND and points[256.0, 0.12] == style.COLOURS["topk"]
    assert points[8192.0, 0.1] == style.COLOURS["none"]
    assert {text.get_text() for text in axes.texts} >= {"no compression", "fp16", "top 1 %", "random 1 %"}
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert axes.get_ylabel() == "loss (cross-entropy, nats)"
    assert png(axes.figure, dpi=50)


def test_an_arrow_leads_from_without_to_with_where_they_differ():
    axes = figure().axes[0]
    arrows = [(text.xyann, text.xy) for text in axes.texts if text.arrow_patch is not None]
    top = max(y for _, y in marks(axes, "^"))
    assert arrows == [((256, 0.4), (256, 0.12)), ((128, top), (128, 0.5))]  # none for fp16


def test_what_diverged_is_a_triangle_above_all_that_did_not():
    axes = figure().axes[0]
    ((x, y),) = marks(axes, "^")
    assert x == 128 and y > 0.5
    assert any("triangle: diverged" in text.get_text() for text in axes.texts)
    assert not any("triangle" in text.get_text() for text in figure(ROWS[:5]).axes[0].texts)


def test_nothing_measured_is_said():
    with pytest.raises(ValueError, match="nothing was measured"):
        figure([])
