"""The picture of what is held and what is sent: every value is on it, and nothing that is not there."""

import pandas as pd
import pytest

from labkit.show import plots, style
from labkit.show.publish import png


def rows():
    stages = {"ddp_bucketed": (4, 4, 8, 4), "zero1": (4, 4, 4, 4), "zero2": (4, 2, 4, 4), "fsdp": (2, 2, 4, 6)}
    names = ("parameters", "gradients", "optimizer_states", "sent_bytes")
    return pd.DataFrame(
        [
            {"strategy": one, "buffers": 0, **dict(zip(names, (2**20 * x for x in sizes), strict=True))}
            for one, sizes in stages.items()
        ]
    )


def test_each_stage_says_what_it_holds_and_what_it_sends():
    figure = plots.memory_and_traffic(rows(), "title")
    held, sent = figure.axes
    assert [text.get_text() for text in held.texts] == ["16 MiB", "12 MiB", "10 MiB", "8 MiB"]
    assert [text.get_text() for text in sent.texts] == ["4 MiB", "4 MiB", "4 MiB", "6 MiB"]
    assert [label.get_text() for label in held.get_yticklabels()] == [style.name(one) for one in rows()["strategy"]]
    assert "MiB" in held.get_xlabel() and "MiB" in sent.get_xlabel()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["parameters", "gradients", "optimizer states"]  # no buffers: there are none
    assert png(figure, dpi=50)


@pytest.mark.parametrize("frame", [rows().drop(columns="sent_bytes"), rows()[["strategy", "sent_bytes"]]])
def test_nothing_to_draw_is_said(frame):
    with pytest.raises(ValueError, match=r"no (traffic|bytes) to draw"):
        plots.memory_and_traffic(frame)
