"""A map of the axes of parallelism: which part of the batch and of the model each rank has.

    data               sharded data       context            pipeline
    [0000]  [    ]     [0000]  [0123]     [0123]  [    ]     [    ]  [0000]
    [1111]  [ all]     [1111]  [0123]     [0123]  [ all]     [ all]  [1111]
    [2222]  [    ]     [2222]  [0123]     [0123]  [    ]     [    ]  [2222]
    batch   model      batch   model      batch   model      batch   model

Rows of the batch are sequences, its columns tokens. Rows of the model are layers.
"""

from matplotlib.patches import Rectangle

from labkit.show import style

RANKS = 4
FILL = (style.BLUE, style.ORANGE, style.PURPLE, style.PALE_BLUE)  # of ranks 0 to 3
ALL = style.lighter(style.GREY, 0.6)  # the same on all ranks
SIDE, GAP = 4.0, 1.2  # of the two squares, in rows; and between them
MODEL = SIDE + GAP  # the left edge of the model
LINE = 0.84  # between two lines of the legend, in rows
CUTS = {  # the words for a cut
    "none": "complete on every rank",
    "rows": "cut in rows",
    "columns": "cut in columns",
    "shards": "stored in shards and gathered to compute",
    "experts": "complete except for the experts, which are divided",
}


def parallelism_map(frame, title=None):
    """Return a Figure with a panel for each row of the frame, and one that says how to read them.

    Columns: axis, notebook, message: text. batch, model: how each is cut, one of CUTS: "none": all
    of it on every rank; "shards": in columns, but gathered to compute; "experts": a part of every
    layer is on all ranks, the experts are in columns. Raises ValueError for any other cut.
    """
    columns = -(-(len(frame) + 1) // 2)
    with style.look():
        figure, grid = style.new_figure(9.4, 4.6, rows=2, columns=columns)
        panels = list(grid.flat)
        for axes in panels:
            axes.axis("off")
            axes.set(xlim=(-0.3, MODEL + SIDE + 0.3), ylim=(SIDE + 2.9, -0.2), aspect="equal")
        for axes, row in zip(panels, frame.itertuples(), strict=False):
            axes.set_title(f"{row.axis}: {row.notebook}", size=10.5, pad=4)
            draw(axes, 0, row.batch)
            draw(axes, MODEL, row.model)
            under(axes, row.message)
        explain(panels[len(frame)])
        style.entitle(figure, title)
    return figure


def in_words(frame):
    """Return the same as text: "data: the batch is cut in rows, the model is ..."."""
    rows = [
        f"{row.axis}: the batch is {CUTS[row.batch]}, the model is {CUTS[row.model]}"
        for row in frame.itertuples()
    ]
    return "; ".join(rows) + "."


def draw(axes, left, cut):
    """Draw a square of the batch or of the model, coloured by the rank that has each part."""
    if cut not in CUTS:
        raise ValueError(f"cut must be one of {', '.join(CUTS)}, got {cut!r}")
    if cut == "none":
        box(axes, left, 0, SIDE, SIDE, ALL, "all ranks")
        return
    for rank in range(RANKS):
        if cut == "rows":
            box(axes, left, rank, SIDE, 1, FILL[rank], rank)
        elif cut == "experts":
            box(axes, left, rank, SIDE / 2, 1, ALL)
            for layer in range(RANKS):
                side = SIDE / 2 / RANKS
                box(axes, left + SIDE / 2 + rank * side, layer, side, 1, FILL[rank])
        else:
            hatch = "////" if cut == "shards" else None
            box(axes, left + rank, 0, 1, SIDE, FILL[rank], hatch=hatch)
            if not hatch:  # above the line between layers
                write(axes, left + rank + 0.5, 1.5, rank, FILL[rank])
    if cut != "rows" and left:
        for layer in range(1, RANKS):
            line = ([left, left + SIDE], [layer, layer])
            axes.plot(*line, color=style.GROUND, linewidth=1.2, solid_capstyle="butt")


def box(axes, left, top, width, height, colour, words="", hatch=None):
    look = {"facecolor": colour, "edgecolor": style.GROUND, "linewidth": 1.2, "hatch": hatch}
    axes.add_patch(Rectangle((left, top), width, height, **look))
    write(axes, left + width / 2, top + height / 2, words, colour)


def write(axes, x, y, words, colour):
    ink = style.text_on(colour)
    axes.text(x, y, str(words), ha="center", va="center", size=9, color=ink)


def under(axes, message):
    """Name the two squares, and write below them what the ranks send."""
    look = {"ha": "center", "va": "top"}
    for left, words in ((0, "batch"), (MODEL, "model")):
        axes.text(left + SIDE / 2, SIDE + 0.15, words, size=8.5, color=style.FAINT, **look)
    axes.text((MODEL + SIDE) / 2, SIDE + 1.1, message, size=9, linespacing=1.25, **look)


def explain(axes):
    """Draw the legend panel: what rows, columns and colours mean."""
    axes.set_title("axis: its notebooks", size=10.5, pad=4, weight="normal")
    swatches = [(colour, f"rank {rank}", None) for rank, colour in enumerate(FILL)]
    swatches += [(ALL, "on all ranks", None), (ALL, "sharded, gathered to use", "////")]
    for place, (colour, words, hatch) in enumerate(swatches):
        box(axes, 0, place * LINE, 0.9, 0.62, colour, hatch=hatch)
        axes.text(1.25, place * LINE + 0.31, words, size=8.5, va="center")
    text = "batch: a row is a sequence,\na column a token;\nmodel: a row is a layer"
    axes.text(0, len(swatches) * LINE + 0.15, text, size=8.5, va="top", linespacing=1.25)
