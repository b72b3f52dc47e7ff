"""The map of the axes of parallelism: each part has the colour of the rank that has it."""

import pandas as pd
import pytest
from matplotlib.colors import to_hex

from labkit.show import parallelism_map, plots

CUTS = [("rows", "none"), ("rows", "shards"), ("none", "columns"), ("columns", "columns"), ("columns", "none")]
CUTS += [("none", "rows"), ("rows", "experts")]


def axes():
    names = ["axis", "notebook", "message", "batch", "model"]
    rows = [("sharded data", "12, 13", "sends parameters and\ngradients, by layer", *cuts) for cuts in CUTS]
    return pd.DataFrame(rows, columns=names)


def area(panel, left):
    """{colour: area} of the boxes of the square whose left edge is there."""
    found = {}
    for box in panel.patches:
        if left <= box.get_x() < left + parallelism_map.SIDE:
            colour = to_hex(box.get_facecolor())
            found[colour] = found.get(colour, 0) + box.get_width() * box.get_height()
    return found


@pytest.mark.parametrize(("place", "cut"), list(enumerate(CUTS)))
def test_all_ranks_have_equal_parts(place, cut):
    panel = plots.parallelism_map(axes()).axes[place]
    for left, kind in zip((0, parallelism_map.MODEL), cut, strict=True):
        parts = area(panel, left)
        ranks = [parts.get(to_hex(colour), 0) for colour in parallelism_map.FILL]
        assert len({round(part, 9) for part in ranks}) == 1
        assert (ranks[0] > 0) == (kind != "none")
        assert (to_hex(parallelism_map.ALL) in parts) == (kind in ("none", "experts"))


def test_an_unknown_cut_is_refused():
    with pytest.raises(ValueError, match="got 'depth'"):
        plots.parallelism_map(axes().assign(model="depth"))
