"""The timeline: two lanes a rank, compute and network, on one clock; and what all bands share.

rank 0  compute  [ forward ][     backward      |//waiting//][opt]
        network                 [ bucket 1 ][ bucket 0 ######]      ####: exposed, nobody computes
"""

from matplotlib import patheffects

from labkit.measure.timeline_analysis import LANES, exposed, length, subtract
from labkit.show import style

BAR = 0.8  # of one row's height
SINCE = "time since the step began (ms)"
SHORT = {"optimizer": "opt", "forward": "fwd", "backward": "bwd"}


def timeline(frame, title=None):
    """Return a Figure of a Timeline.frame(): named bars, exposed time hatched and summed.

    Spans that overlap within a lane get a row each; spans with unit=True get separate, paler rows.
    Raises ValueError without spans.
    """
    if frame.empty:
        raise ValueError("an empty timeline cannot be drawn")
    ranks = sorted(frame["rank"].unique())
    rows = place(frame, ranks)
    count = 1 + max(row for _, row in rows.values())
    with style.look():
        heights = {key: y for key, (y, _) in rows.items()}
        height = 1.3 + 0.42 * count + 0.15 * len(ranks)
        ends = (min(heights.values()) - 0.75, max(heights.values()) + 0.75)
        figure, axes = canvas(9.0, height, frame["end_ms"].max(), *ends)
        labels = []
        for rank in ranks:
            mine = frame[frame["rank"] == rank]
            bare = exposed(frame, rank)
            for index, span in mine.iterrows():
                labels += draw_span(axes, span, heights[index], bare)
            write_exposed(axes, mine, bare, heights)
        axes.grid(axis="x")
        finish(figure, axes, lanes_of(frame, ranks, heights), title, labels, "time (ms)", size=None)
    return figure


def canvas(width, height, end, top, bottom):
    """Return (figure, axes) of bands: time from 0 to end, rows from top down to bottom."""
    figure, axes = style.new_figure(width, height)
    axes.set_xlim(0, end * 1.005)
    axes.set_ylim(bottom, top)
    return figure, axes


def finish(figure, axes, rows, title, labels=(), words=SINCE, size=9):
    """Name the rows, {y: name}, and the axis of time; shorten labels that do not fit."""
    style.name_rows(axes, list(rows), list(rows.values()), size=size)
    axes.set_xlabel(words)
    style.entitle(figure, title)
    if labels:
        figure.draw_without_rendering()
    for label in labels:
        fit(label, axes)


def legend(figure, handles):
    """Explain the colours of the bars in one line below the axes."""
    look = {"loc": "outside lower center", "frameon": False, "fontsize": 9}
    figure.legend(handles=handles, ncols=len(handles), **look)


def head(axes, y, end, name, words):
    """Write the head of a band: its name at the left, a result at the right."""
    look = {"va": "center_baseline", "size": 10}
    axes.text(0, y, name, weight="bold", ha="left", **look)
    axes.text(end, y, words, ha="right", **look)


def from_zero(frame):
    """Return the frame with its first span at 0 ms."""
    origin = frame["start_ms"].min()
    return frame.assign(start_ms=frame["start_ms"] - origin, end_ms=frame["end_ms"] - origin)


def box(axes, y, start, end, height=BAR, **look):
    """Draw one bar of a row, from start to end in ms."""
    axes.barh(y, end - start, height, left=start, **look)


def inner(frame):
    """Return a bool per span: whether it is a unit's, within forward or backward."""
    if "unit" not in frame:
        return frame["rank"] < 0
    return frame["unit"].fillna(False).astype(bool)


def place(frame, ranks):
    """Return {index: (y, row)} by rank and lane; a span is in the first free row of its lane."""
    rows = {}
    row = 0
    y = 0.0
    for rank in ranks:
        mine = frame[frame["rank"] == rank]
        lanes = [*LANES, *(lane for lane in mine["lane"].unique() if lane not in LANES)]
        for lane in lanes:
            spans = mine[mine["lane"] == lane]
            units = inner(spans)
            for part in (spans[~units], spans[units]):
                ends = []
                for index, span in part.sort_values("start_ms").iterrows():
                    free = next(
                        (i for i, end in enumerate(ends) if end <= span["start_ms"] + 1e-6),
                        len(ends),
                    )
                    ends[free : free + 1] = [span["end_ms"]]
                    rows[index] = (y + free, row + free)
                y = y + len(ends)
                row = row + len(ends)
        y += 0.5
    return rows


def colour_of(span):
    words = span["name"].split()
    if span["lane"] == "network":
        return style.COLOURS["network"]
    known = next((word for word in reversed(words) if word in style.COLOURS), None)
    unit = span.get("unit") is True
    base = style.COLOURS[known] if known else style.COLOURS["forward"] if unit else style.OLIVE
    return style.lighter(base) if unit else base


def draw_span(axes, span, y, bare):
    """Draw one bar, hatched while exposed (network) or waiting (compute); return its texts."""
    colour = colour_of(span)
    whole = [(span["start_ms"], span["end_ms"])]
    free = subtract(whole, bare)
    hatched = subtract(whole, free)
    network = span["lane"] == "network"
    waiting = style.RED if network else style.lighter(colour, 0.75)
    for pieces, face, hatch in ((free, colour, None), (hatched, waiting, "////")):
        for start, end in pieces:
            line = style.lighter(style.RED, 0.35) if network else colour
            box(axes, y, start, end, facecolor=face, hatch=hatch, edgecolor=line, linewidth=0)
    box(axes, y, *whole[0], fill=False, edgecolor=style.GROUND, linewidth=0.9)
    lies_in_hatched = not free or (network and length(hatched) > length(free))
    names = [
        (span["name"], hatched if lies_in_hatched else free, waiting if lies_in_hatched else colour)
    ]
    if not network and free and span.get("unit") is not True:
        names.append(("waits", hatched, waiting))
    return [
        write(axes, words, max(pieces, key=size), y, face)
        for words, pieces, face in names
        if pieces
    ]


def size(piece):
    return piece[1] - piece[0]


def write(axes, words, piece, y, face):
    """Write a name in the middle of a piece of bar, with a rim over the hatch; return the text."""
    rim = [patheffects.withStroke(linewidth=2.5, foreground=face)]
    place = {
        "ha": "center",
        "va": "center_baseline",
        "size": 8.5,
        "color": style.text_on(face),
        "path_effects": rim,
    }
    text = axes.text(sum(piece) / 2, y, words, **place)
    text.room = size(piece)
    return text


def fit(text, axes):
    """Shorten a name that does not fit ("bucket 3" -> "3", "optimizer" -> "opt"), or drop it."""
    origin, end = axes.transData.transform([(0, 0), (text.room, 0)])
    words = text.get_text()
    short = words.removesuffix(" backward").split()[-1]
    for shorter in (words, short, SHORT.get(short, ""), ""):
        text.set_text(shorter)
        if not shorter or text.get_window_extent().width <= end[0] - origin[0] - 3:
            return


def write_exposed(axes, mine, bare, heights):
    """Write the exposed ms next to the network lane."""
    network = [heights[i] for i in mine.index[mine["lane"] == "network"]]
    if network:
        total = length(bare)
        words = f"exposed\n{style.quantity(total, 'ms')}" if total else "nothing\nexposed"
        look = {"va": "center", "color": style.RED, "weight": "bold", "size": 9}
        middle = (1, sum(network) / len(network))
        style.beside(axes, words, middle, (8, 0), xycoords=("axes fraction", "data"), **look)


def lanes_of(frame, ranks, heights):
    """Return {y: name} of the lanes of all ranks."""
    rows = {}
    for rank in ranks:
        mine = frame[frame["rank"] == rank]
        for lane in mine["lane"].unique():
            ys = [heights[i] for i in mine.index[mine["lane"] == lane]]
            rows[(min(ys) + max(ys)) / 2] = f"rank {rank}  {lane}"
    return rows
