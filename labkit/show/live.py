"""A live view of a run: a picture redrawn in place from the ranks' records.

    view = Live()
    run = launch(program, nproc=4, bar=view)      record(**row) of a rank --> a point in the picture

    loss            parts of a step       time by rank          the newest run only, where
    throughput      exposed, by rank      memory, by rank       records name a "run"

The picture is one widget whose content is replaced at once, so nothing flickers. It is drawn at
most REDRAWS times a second, in at most a QUARTER of a core; training never waits for it. At the end
a static picture stays.
The picture is a pure function of the rows, so it can be tested without a browser.
"""

import html
import io
import sys
import time

import ipywidgets
import pandas as pd
from IPython.display import display
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from labkit.show import style
from labkit.show.bars import stack
from labkit.show.publish import present

REDRAWS = 2.0  # a second
QUARTER = 0.25  # the part of the time that drawing may take
MOST = 4000  # latest rows that are drawn
LATEST = 10  # steps that the bars are the median of
PLACES = {"left": 0.05, "right": 0.98, "bottom": 0.18, "top": 0.86, "hspace": 0.62, "wspace": 0.2}
PARTS = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms", "exposed_comm_ms")
COLOURS = dict(
    zip(PARTS, (style.OLIVE, style.BLUE, style.ORANGE, style.GREY, style.RED), strict=True)
)
NAMES = {"data_ms": "data", "exposed_comm_ms": "waits for messages"}


def parts_of(rows):
    """Return each row's parts of a step in ms, a column for each of PARTS.

    Backward does not include the waiting for messages inside it.
    """
    parts = rows.reindex(columns=PARTS).astype(float).fillna(0.0)
    inside = parts["exposed_comm_ms"].clip(upper=parts["backward_ms"])
    return parts.assign(backward_ms=parts["backward_ms"] - inside)


def draw(rows, title=None):
    """Return a Figure of one run. rows: DataFrame with rank, step and the columns of Monitor."""
    rows = rows.join(parts_of(rows).add_prefix("part_")).sort_values(["step", "rank"])
    with style.look():
        figure = Figure(figsize=(10.0, 4.9))
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, 3, gridspec_kw=PLACES)  # fixed: nothing moves
        over_steps(axes[0, 0], rows, "loss", "loss, mean of the ranks")
        stacked(axes[0, 1], rows)
        by_rank(axes[0, 2], rows)
        over_steps(axes[1, 0], rows, "samples_per_s", "samples/s, all ranks")
        over_steps(axes[1, 1], rows, "exposed_comm_ms", "each waits for messages (ms)", each=True)
        memory = "gpu_peak_bytes" if "gpu_peak_bytes" in rows else "rss_bytes"
        over_steps(axes[1, 2], rows, memory, "memory of each rank (MiB)", 2**20, each=True)
        legend(figure, loc="lower left")
        style.entitle(figure, title)
    return figure


def over_steps(axes, rows, column, words, divisor=1, each=False):
    """Draw a line over the steps: the ranks' mean, or (each) one per rank, numbered at its end."""
    axes.set_title(words, size=9.5, loc="left")
    axes.set_xlabel("step", size=9)
    axes.tick_params(labelsize=8.5)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    if column not in rows or rows[column].isna().all():
        look = {"ha": "center", "va": "center", "size": 9, "color": style.FAINT}
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, **look)
        return
    table = rows.pivot_table(index="step", columns="rank", values=column) / divisor
    lines = table if each else table.mean(axis=1).to_frame("mean")
    look = {"color": style.INK, "linewidth": 1.2}  # the colours of the parts mean no rank
    for _, line in lines.items():
        line = line.dropna()
        axes.plot(line.index, line, marker="." * (len(line) < 30), **look)
    if each:
        axes.set_ylim(0, (lines.max().max() or 1.0) * 1.3)
    axes.grid(axis="y")
    if each and len(lines.columns) <= 8:
        last = lines.ffill().iloc[-1]
        places = style.spread_apart(list(last), 0.13 * (axes.get_ylim()[1] or 1.0))
        for rank, place in zip(lines, places, strict=True):
            style.beside(axes, f"{rank}", (lines.index[-1], place), (5, 0), size=8, weight="bold")


def stacked(axes, rows):
    """Draw the parts of a step over the steps, means over the ranks."""
    axes.set_title("parts of a step (ms), mean of the ranks", size=9.5, loc="left")
    table = rows.groupby("step")[[f"part_{part}" for part in PARTS]].mean()
    axes.stackplot(table.index, table.T, colors=COLOURS.values(), step="mid", linewidth=0)
    axes.margins(x=0)
    axes.set_xlabel("step", size=9)
    axes.tick_params(labelsize=8.5)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))


def by_rank(axes, rows):
    """Draw the parts of a step of each rank, medians of its latest steps."""
    axes.set_title(f"by rank (ms), median of {LATEST} steps", size=9.5, loc="left")
    columns = [f"part_{part}" for part in PARTS]
    table = rows.groupby("rank").tail(LATEST).groupby("rank")[columns].median()
    parts = {part: (table[f"part_{part}"], COLOURS[part]) for part in PARTS}
    stack(axes, range(len(table)), parts, 0.75)
    axes.set_yticks(range(len(table)), [f"rank {rank}" for rank in table.index], size=8.5)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8.5)


def legend(figure, more=None, loc="outside lower left"):
    """Draw a legend of the parts' colours, and of {name: colour} more."""
    colours = COLOURS | (more or {})
    names = [NAMES.get(part, style.name(part)) for part in colours]
    handles = [Patch(color=colour) for colour in colours.values()]
    figure.legend(handles, names, loc=loc, ncols=len(names), handlelength=0.9)


def takeaway(rows, run=None):
    """Return one sentence: the step reached, the time of a step, and how much of it is waiting."""
    latest = rows[rows["step"] > rows["step"].max() - LATEST]
    ms = latest["step_ms"].median()
    waits = latest["exposed_comm_ms"].median()
    words = f"run {run}: " if run is not None else ""
    words += f"{rows['rank'].nunique()} ranks, step {rows['step'].max():.0f}; a step takes "
    words += f"{ms:.1f} ms, and {waits:.1f} ms of it a rank waits for messages"
    return words + "."


def as_svg(figure, words):
    """Return the figure as inline SVG with its alt text.

    A PNG would flicker, because the page decodes it first.
    """
    held = io.StringIO()
    with style.look():
        figure.savefig(held, format="svg")
    words = html.escape(words, quote=True)
    about = f'<svg role="img" aria-label="{words}" style="max-width:100%;height:auto" '
    return about + held.getvalue().partition("<svg ")[2]


class Live:
    """A bar for launch(bar=...) that draws the ranks' records as they arrive.

    provenance: of the static picture, as in present(); keep: whether it stays at the end.
    by: the column that names the runs of a launch; the newest is shown.
    """

    def __init__(self, provenance="measured", by="run", keep=True):
        self.provenance = provenance
        self.by = by
        self.keep = keep
        self.rows = []
        self.next = 0.0
        self.handle = None
        self.broken = None
        self.image = ipywidgets.HTML()

    def update(self, step, total):
        """Do nothing: the records contain the step."""

    def record(self, row):
        self.rows.append(row)
        if self.broken is None and time.monotonic() >= self.next:
            self.guarded(self.redraw)

    def guarded(self, show):
        """Draw; print the first error and go on training."""
        try:
            start = time.monotonic()
            show()
            took = time.monotonic() - start
            self.next = start + max(1 / REDRAWS, took / QUARTER)
        except Exception as error:
            self.broken = error
            print(f"labkit: live view: {type(error).__name__}: {error}", file=sys.stderr)

    def newest(self):
        """Return (rows of the newest run, its name or None)."""
        rows = pd.DataFrame(row for row in self.rows[-MOST:] if "step_ms" in row)
        if self.by not in rows or rows.empty:
            return rows, None
        name = rows[self.by].iloc[-1]
        return rows[rows[self.by] == name].dropna(axis=1, how="all"), name

    def redraw(self):
        rows, name = self.newest()
        if rows.empty:
            return
        words = takeaway(rows, name)
        self.image.value = as_svg(draw(rows, words), words)
        if self.handle is None:
            content = self.image._repr_mimebundle_() | {"text/plain": words}
            self.handle = display(content, raw=True, display_id=True)

    def close(self):
        """Replace the view by a static picture of its last state."""
        if self.handle is not None:  # in plain Python there is no view to remove
            self.handle.update({"text/plain": ""}, raw=True)
        self.image.close()
        if self.keep and self.broken is None:
            self.guarded(self.present)

    def present(self):
        rows, name = self.newest()
        if not rows.empty:
            words = takeaway(rows, name)
            present(draw(rows), words, self.provenance, words)
