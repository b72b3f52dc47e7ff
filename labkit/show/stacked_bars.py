"""Parts of a total: a thin bar for each repetition, its parts one after the other.

cold   [ start processes, import torch          |join |.]
       [ start processes, import torch     |join |.]           median 4.1 s
       [ start processes, import torch           |join|.]
warm   [.|.]                                                    median 0.2 s
"""

import numpy as np

from labkit.measure.stats import summary
from labkit.show import style
from labkit.show.bars import finish, stack

THIN = 0.84  # of one repetition's height
GAP = 0.7  # between two categories, in repetitions


def stacked_bars(frame, value, category, part, repetition, title=None, unit=None):
    """Return a Figure with a thin bar per category and repetition, cut into its parts.

    frame: one row per (category, repetition, part), `value` in seconds, bytes, ...; unit: by
    default that of the column's name. Next to each category is the median of its totals; parts
    keep their order of appearance.
    """
    unit = style.unit_of(value) if unit is None else unit
    parts = list(dict.fromkeys(frame[part]))
    colours = style.palette(parts)
    totals = frame.groupby([category, repetition])[value].sum()
    divisor, shown_unit = style.byte_scale(totals.max()) if unit == "bytes" else (1, unit)
    with style.look():
        figure, axes = style.new_figure(8.0, 1.6 + 0.24 * len(totals))
        y = 0.0
        middles = {}
        for one in dict.fromkeys(frame[category]):
            mine = (
                frame[frame[category] == one]
                .pivot(index=repetition, columns=part, values=value)
                .fillna(0.0)
            )
            rows = y + np.arange(len(mine))
            mine = mine.reindex(columns=parts, fill_value=0.0) / divisor
            left = stack(axes, rows, {part: (mine[part], colours[part]) for part in parts}, THIN)
            middles[one] = rows.mean()
            words = style.quantity(summary(left * divisor).median, unit)
            style.beside(axes, words, (left.max(), rows.mean()), (7, 0), size=10, weight="bold")
            y += len(mine) + GAP
        axes.set_xlim(0, totals.max() / divisor * 1.14)
        axes.set_ylim(y - GAP, -1)
        style.name_rows(axes, list(middles.values()), [style.name(one) for one in middles])
        axes.set_xlabel(style.axis_label(value, shown_unit))
        style.legend_below(figure, *axes.get_legend_handles_labels())
        finish(figure, axes, title)
    return figure
