import pandas as pd

from labkit.show import plots, publish

ROWS = [("in order", 0, 0, 10), ("in order", 1, 0, 10), ("in order", 0, 1, 0), ("in order", 1, 1, 16)]
ROWS += [("zig-zag", 0, 0, 9), ("zig-zag", 1, 0, 9), ("zig-zag", 0, 1, 8), ("zig-zag", 1, 1, 8)]


def test_a_round_lasts_as_long_as_its_busiest_rank():
    frame = pd.DataFrame(ROWS, columns=["order", "rank", "round", "tiles"])
    figure = plots.ring_load(frame.sample(frac=1, random_state=0).sort_values("order"), "who works")
    said = [axes.get_xlabel() for axes in figure.axes]
    assert said == ["busiest, over all rounds: 26 tiles", "busiest, over all rounds: 17 tiles"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["10", "10", "0", "16"]
    framed = [sum(not patch.get_fill() for patch in axes.patches) for axes in figure.axes]
    assert framed == [1, 0]  # whom others wait for
    assert publish.png(figure, dpi=50)
