"""A step simulated and the same step measured, one below the other.

    DDP                                          simulated 512 ms, measured 529 ms
    rank 0 computes   simulated  :: compute ::|xx waits xx|
                      measured   |  compute  |xxx waits xxx|
    its messages      simulated     :: all_reduce ::::::::|
                      measured      |  all_reduce         |

Simulated bars are pale with a dashed rim, and their rows are named so.
"""

from matplotlib.patches import Patch

from labkit.show import style
from labkit.show.gantt import box, canvas, finish, head, legend

COLOURS = {"compute": style.BLUE, "network": style.PURPLE, "exposed": style.RED}
WORDS = {"compute": "computes", "network": "a message is under way", "exposed": "waits for one"}
SOURCES = ("simulated", "measured")
BOX = 0.82  # of one row's height


def simulated_vs_measured(steps, title=None):
    """Return a Figure with a band per step. steps: {name: frame}.

    A frame has source ("simulated" or "measured"), row (its name), lane (of COLOURS), start_ms,
    end_ms. Of rows with the same name, the simulated one is above. Raises ValueError if a frame
    lacks one of the two sources.
    """
    for name, frame in steps.items():
        missing = set(SOURCES) - set(frame["source"])
        if missing:
            raise ValueError(f"{name}: no row is {missing.pop()}; give rows of both sources")
    count = sum(2 * frame["row"].nunique() + 1.4 for frame in steps.values())
    end = max(frame["end_ms"].max() for frame in steps.values())
    with style.look():
        figure, axes = canvas(9.0, 1.2 + 0.27 * count, end, -0.5, count - 0.4)
        top = 0.0
        ticks = {}
        for name, frame in steps.items():
            top = draw_step(axes, name, frame, top, ticks, end)
        seen = [k for k in COLOURS if any((f["lane"] == k).any() for f in steps.values())]
        shown = [Patch(color=COLOURS[lane], label=WORDS[lane]) for lane in seen]
        pale = style.lighter(style.GREY, 0.6)
        shown.append(Patch(facecolor=pale, edgecolor=style.FAINT, ls="--", label="pale: simulated"))
        legend(figure, shown)
        finish(figure, axes, ticks, title)
    return figure


def draw_step(axes, name, frame, top, ticks, end):
    """Draw one band: its name and both lengths above its rows. Return the top of the next one."""
    lengths = frame.groupby("source")["end_ms"].max()
    words = ", ".join(f"{s} {style.quantity(lengths[s], 'ms')}" for s in SOURCES)
    head(axes, top, end, name, words)
    y = top + 1.0
    for row in dict.fromkeys(frame["row"]):
        for source in SOURCES:
            mine = frame[(frame["row"] == row) & (frame["source"] == source)]
            for span in mine.itertuples():
                draw_span(axes, span, y, source == "simulated")
            ticks[y] = f"{row}, {source}"
            y += 1.0
    return y + 0.4


def draw_span(axes, span, y, pale):
    colour = COLOURS[span.lane]
    look = {"facecolor": colour, "edgecolor": style.GROUND, "linewidth": 0.7}
    if pale:
        look = {"facecolor": style.lighter(colour, 0.62), "edgecolor": colour, "linestyle": "--"}
        look["linewidth"] = 0.7
    height = BOX * (0.55 if span.lane == "exposed" else 1.0)
    box(axes, y, span.start_ms, span.end_ms, height, **look)
