"""What a rank holds, and beside it what it sends: a row per stage, two scales.

          held per rank                        sent per rank and step
DDP       [ P ][ G ][    S    ]  16 MiB        [======]     2 x
ZeRO-1    [ P ][ G ][ S/2 ]      12 MiB        [======]     2 x
FSDP      [P/2][G/2][ S/2 ]       8 MiB        [=========]  3 x
"""

import numpy as np

from labkit.memory.memory_tracker import KINDS
from labkit.show import style
from labkit.show.bars import THICK, finish


def memory_and_traffic(frame, title=None, label="strategy"):
    """Figure: a row per `label`: left its bytes held, stacked by kind, right its bytes sent.

    frame: columns named after KINDS (bytes held; all-zero ones are left out) and sent_bytes.
    """
    kinds = [kind for kind in KINDS if kind in frame and frame[kind].max() > 0]
    if not kinds or "sent_bytes" not in frame:
        raise ValueError(
            f"nothing to draw: give sent_bytes and some of the columns {', '.join(KINDS)}"
        )
    totals = frame[kinds].sum(axis=1).to_numpy(float)
    with style.look():
        figure, (held, sent) = style.new_figure(
            9.0, 1.7 + 0.5 * len(frame), columns=2, sharey=True, width_ratios=(3, 2)
        )
        divisor, unit = style.byte_scale(totals.max())
        left = np.zeros(len(frame))
        for kind in kinds:
            sizes = frame[kind].to_numpy(float) / divisor
            look = {"color": style.COLOURS[kind], "edgecolor": style.GROUND, "linewidth": 0.5}
            held.barh(range(len(frame)), sizes, THICK, left=left, label=style.name(kind), **look)
            left += sizes
        write_values(held, totals, divisor)
        held.set_xlabel(f"held per rank ({unit})")
        traffic = frame["sent_bytes"].to_numpy(float)
        divisor, unit = style.byte_scale(traffic.max())
        sent.barh(range(len(frame)), traffic / divisor, THICK, color=style.SLATE)
        write_values(sent, traffic, divisor)
        sent.set_xlabel(f"sent per rank and step ({unit})")
        held.set_yticks(range(len(frame)), [style.name(one) for one in frame[label]])
        held.invert_yaxis()
        place = {
            "loc": "outside lower left",
            "ncols": len(kinds),
            "handlelength": 0.9,
            "columnspacing": 1.3,
        }
        figure.legend(*held.get_legend_handles_labels(), handletextpad=0.5, **place)
        for axes in (held, sent):
            finish(figure, axes, title)
    return figure


def write_values(axes, values, divisor):
    """Each bar's value behind its end."""
    for y, value in enumerate(values):
        style.beside(axes, style.quantity(value, "bytes"), (value / divisor, y), weight="bold")
    axes.set_xlim(0, (values.max() / divisor or 1) * 1.3)
