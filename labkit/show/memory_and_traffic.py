"""The memory of a rank and the bytes that it sends: a row per stage, two scales.

          held per rank                        sent per rank and step
DDP       [ P ][ G ][    S    ]  16 MiB        [======]     2 x
ZeRO-1    [ P ][ G ][ S/2 ]      12 MiB        [======]     2 x
FSDP      [P/2][G/2][ S/2 ]       8 MiB        [=========]  3 x
"""

from labkit.show import style
from labkit.show.bars import THICK, finish, kinds_of, stack


def memory_and_traffic(frame, title=None, label="strategy"):
    """Return a Figure with a row per `label`: left the bytes held by kind, right the bytes sent.

    frame: columns named after KINDS (bytes held; all-zero ones are left out) and sent_bytes. Raises
    ValueError if one of the two is missing.
    """
    if "sent_bytes" not in frame:
        raise ValueError(f"no traffic to draw: a column sent_bytes, not {', '.join(frame)}")
    kinds = kinds_of(frame)
    totals = sum(sizes for sizes, _ in kinds.values())
    with style.look():
        figure, (held, sent) = style.new_figure(
            9.0, 1.7 + 0.5 * len(frame), columns=2, sharey=True, width_ratios=(3, 2)
        )
        divisor, unit = style.byte_scale(totals.max())
        parts = {kind: (sizes / divisor, colour) for kind, (sizes, colour) in kinds.items()}
        stack(held, range(len(frame)), parts, edgecolor=style.GROUND, linewidth=0.5)
        write_values(held, totals, divisor)
        held.set_xlabel(f"held per rank ({unit})")
        traffic = frame["sent_bytes"].to_numpy(float)
        divisor, unit = style.byte_scale(traffic.max())
        sent.barh(range(len(frame)), traffic / divisor, THICK, color=style.SLATE)
        write_values(sent, traffic, divisor)
        sent.set_xlabel(f"sent per rank and step ({unit})")
        held.set_yticks(range(len(frame)), [style.name(one) for one in frame[label]])
        held.invert_yaxis()
        style.legend_below(figure, *held.get_legend_handles_labels())
        for axes in (held, sent):
            finish(figure, axes, title)
    return figure


def write_values(axes, values, divisor):
    """Write each bar's value behind its end."""
    for y, value in enumerate(values):
        style.beside(axes, style.quantity(value, "bytes"), (value / divisor, y), weight="bold")
    axes.set_xlim(0, (values.max() / divisor or 1) * 1.3)
