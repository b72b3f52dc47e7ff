"""What ranks hold before and after a collective: a row a rank, a box a chunk.

A chunk is one number with a digit for every rank, the first for rank 0. Rank r fills chunk i with
the digit i+1 in its own place, so that the digits of a sum show which ranks were added:

            chunk 0  chunk 1  chunk 2             rank 1's digit is drawn on rank 1's colour
    rank 0    100      200      300
    rank 1     10       20       30               110: chunk 0 of ranks 0 and 1, not yet of rank 2
    rank 2      1        2        3               222: the whole sum of chunk 1
"""

from matplotlib.patches import FancyBboxPatch, Rectangle

from labkit.show import style

# of a box, and what separates two of them
WIDE = 1.16
HIGH = 0.8
GAP = 0.17
ARROW = 1.1  # room for the arrow from before to after
BETWEEN = 1.7  # room between two panels
INCH = 0.345  # of one unit of the above
COLOURS = (
    style.BLUE,
    style.ORANGE,
    style.PURPLE,
    style.BROWN,
    style.OLIVE,
    style.SLATE,
    style.PALE_BLUE,
    style.GREY,
)
EMPTY, ZERO = "#e8ebee", "#b3bac1"


def before_after(frame, columns=2, title=None):
    """Return a Figure: per operation, the chunks of all ranks before it and after it.

    frame: a row per operation and rank: operation, rank, before, after (lists of numbers as above).
    Raises ValueError without rows.
    """
    panels = [
        (operation, [list(rows["before"]), list(rows["after"])])
        for operation, rows in by_rank(frame, "operation")
    ]
    return draw(panels, columns, title)


def step_by_step(frame, phases, title=None):
    """Return a Figure: the chunks of all ranks after every step; changed chunks are framed.

    frame: a row per step and rank, with columns step, rank, holds; step 0 is the start.
    phases: the name of each phase, a row of the figure; all have the same number of steps. Raises
    ValueError without rows.
    """
    states = [list(rows["holds"]) for _, rows in by_rank(frame, "step")]
    length = (len(states) - 1) // len(phases)
    panels = []
    framed = {}
    names = {}
    for phase, words in enumerate(phases):
        first = phase * length
        panels.append((f"after step {first}" if phase else "start", [states[first]]))
        names[len(panels)] = words
        for step in range(first + 1, first + length + 1):
            framed |= {
                (len(panels), 0, *box): style.INK
                for box in different(states[step], states[step - 1])
            }
            panels.append((f"step {step}", [states[step]]))
    return draw(panels, 1 + length, title, framed, names)


def side_by_side(frame, title=None):
    """Return a Figure: the chunks of all ranks after each algorithm; wrong chunks have a red frame.

    frame: a row per algorithm and rank, with columns algorithm, rank, holds; the first algorithm is
    the reference. Raises ValueError without rows.
    """
    ends = {algorithm: list(rows["holds"]) for algorithm, rows in by_rank(frame, "algorithm")}
    right = next(iter(ends.values()))
    framed = {
        (panel, 0, *box): style.RED
        for panel, end in enumerate(ends.values())
        for box in different(end, right)
    }
    return draw(
        [(style.name(algorithm), [end]) for algorithm, end in ends.items()],
        len(ends),
        title,
        framed,
    )


def by_rank(frame, column):
    """Return [(value of column, its rows sorted by rank)], values in order of appearance."""
    if frame.empty:
        raise ValueError("nothing was recorded, so there is nothing to draw")
    return [
        (one, frame[frame[column] == one].sort_values("rank"))
        for one in dict.fromkeys(frame[column])
    ]


def different(table, other):
    """Return (rank, chunk) of the boxes in which two tables differ."""
    return [
        (rank, chunk)
        for rank, held in enumerate(table)
        for chunk, x in enumerate(held)
        if x != other[rank][chunk]
    ]


def draw(panels, columns, title, framed=None, names=None):
    """Return a Figure of panels (heading, [table, ...]), `columns` in a row.

    framed: {(panel, table, rank, chunk): colour of its frame}. names: {panel: words over a line
    that begins at this panel and ends with its row}.
    """
    framed = framed or {}
    names = names or {}
    wide = max(map(width, (tables for _, tables in panels))) + BETWEEN
    tall = max(len(table) for _, tables in panels for table in tables) * (HIGH + GAP) + (
        2.3 if names else 1.7
    )
    rows = -(-len(panels) // columns)
    with style.look():
        figure, axes = style.new_figure(
            INCH * (columns * wide + 0.6), INCH * rows * tall + (0.45 if title else 0.1)
        )
        axes.set_axis_off()
        axes.set_aspect("equal")
        for index, (heading, tables) in enumerate(panels):
            left = index % columns * wide
            top = -(index // columns) * tall
            axes.text(left, top + 0.32, heading, weight="bold", size=10)
            if index in names:
                right = (columns - 1) * wide + width(panels[-1][1])
                line_over(axes, left, right, top + 1.05, names[index])
            for place, table in enumerate(tables):
                if place:
                    arrow(axes, left + ARROW / 2 - GAP, top - len(table) * (HIGH + GAP) / 2)
                    left += ARROW
                draw_table(
                    axes,
                    left,
                    top,
                    table,
                    place == 0,
                    {key[2:]: framed[key] for key in framed if key[:2] == (index, place)},
                )
                left += max(map(len, table)) * (WIDE + GAP)
        axes.set_xlim(-2.0, (columns - 1) * wide + wide - BETWEEN + 0.1)
        axes.set_ylim(-(rows - 1) * tall - tall + (1.7 if names else 1.1), 1.75 if names else 1.0)
        style.entitle(figure, title)
    return figure


def width(tables):
    return sum(max(map(len, table)) * (WIDE + GAP) for table in tables) + ARROW * (len(tables) - 1)


def draw_table(axes, left, top, table, named, framed):
    for rank, held in enumerate(table):
        y = top - (rank + 1) * (HIGH + GAP) + GAP / 2
        if named:
            axes.text(
                left - 0.18,
                y + HIGH / 2,
                f"rank {rank}",
                ha="right",
                va="center_baseline",
                size=8,
                color=style.FAINT,
            )
        for chunk, value in enumerate(held):
            draw_box(
                axes,
                left + chunk * (WIDE + GAP),
                y,
                f"{value:0{len(table)}d}",
                framed.get((rank, chunk)),
            )


def draw_box(axes, x, y, digits, frame):
    """Draw one chunk: a strip for each rank's digit, coloured where it is not 0."""
    look = {"boxstyle": "round,pad=0,rounding_size=0.14", "linewidth": 0}
    ground = axes.add_patch(FancyBboxPatch((x, y), WIDE, HIGH, facecolor=EMPTY, **look))
    strip = WIDE / len(digits)
    for rank, digit in enumerate(digits):
        colour = COLOURS[rank % len(COLOURS)]
        if digit != "0":
            axes.add_patch(
                Rectangle((x + rank * strip, y), strip, HIGH, facecolor=colour, linewidth=0)
            ).set_clip_path(ground)
        ink = (
            {"weight": "bold", "color": style.text_on(colour)} if digit != "0" else {"color": ZERO}
        )
        axes.text(
            x + (rank + 0.5) * strip,
            y + HIGH / 2,
            digit,
            ha="center",
            va="center_baseline",
            size=8.5,
            **ink,
        )
    if frame:
        look = {"boxstyle": "round,pad=0.03,rounding_size=0.16", "linewidth": 2.2}
        axes.add_patch(FancyBboxPatch((x, y), WIDE, HIGH, fill=False, edgecolor=frame, **look))


def arrow(axes, x, y):
    look = {"arrowstyle": "-|>", "color": style.FAINT, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (x + 0.34, y), (x - 0.34, y), arrowprops=look)


def line_over(axes, left, right, y, words):
    axes.plot([left, right], [y, y], color=style.FAINT, linewidth=1)
    axes.text(left, y + 0.14, words, size=9.5, color=style.FAINT, style="italic")
