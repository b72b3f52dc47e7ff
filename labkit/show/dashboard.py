"""The dashboard: every cell of a sweep in one table, and pictures of the rows that are chosen.

    model v  strategy v  precision v  compression v  ranks v  link v     filters
    sort by v  picture v                                                 one picture at a time
    [x] single  [x] DDP, naive  [x] DDP                                  with boxes: what to compare
    (Measure this choice)                                                with measure=: runs ranks
    [ picture of the first cells, in this order ]
    | what | on | step time | ratio to the base | ... |                  the same cells, as a table

The table has a row per cell and is made when the board opens and after a measurement; a control
selects rows. The picture is a pure function of (table, curves, state).
"""

import base64
import html
import io
from dataclasses import dataclass, replace
from functools import partial

import matplotlib
import pandas as pd

from labkit.run.cost_model import plain, world_fields
from labkit.run.experiment import Experiment
from labkit.run.summary import FIELDS, base_in, curves, summary
from labkit.run.sweep import Cell
from labkit.show import controls, style
from labkit.show.conclusions import title_of, verdicts
from labkit.show.dashboard_pictures import BARS, PICTURES, scaled, with_base
from labkit.show.dashboard_words import in_words, label, legend, link_of, topic, what
from labkit.show.explorer import Explorer, need_one
from labkit.show.notebook import table as show_table
from labkit.show.publish import present

ANY = "any"
FILTERS = {
    "topic": "topic",
    "model": "model",
    "strategy": "strategy",
    "precision": "precision",
    "compression": "comm_hook",
    "ranks": "ranks",
    "link": "link",
    "buckets": "bucket_cap_mb",
}
SORTED = {
    "step time": "step_ms",
    "ratio to the base": "ratio",
    "exposed communication": "exposed_comm_ms",
    "sent bytes": "sent_bytes",
    "peak memory": "peak_bytes",
    "throughput": "samples_per_s",
    "MFU": "mfu",
    "loss": "loss",
}
MORE_IS_BETTER = ("samples_per_s", "mfu")
LISTED = 40  # rows of the table below the controls; the CSV has all
NOTHING = "Nothing was measured that these controls let through."


@dataclass(frozen=True)
class State:
    """The values of the controls: one of each filter's column, or ANY; sort and picture by name.

    buckets: MiB. whats: names of the column `what`, or ANY.
    """

    topic: object = ANY
    model: object = ANY
    strategy: object = ANY
    precision: object = ANY
    compression: object = ANY
    ranks: object = ANY
    link: object = ANY
    buckets: object = ANY
    whats: object = ANY
    sort: str = "step time"
    picture: str = "step time by phase"


def opened(rows):
    """Return (table, curves) of a sweep's rows: summary() with names, topic, link and verdict."""
    table = summary(rows)
    cells = table.to_dict("records")
    table["label"] = [label(cell) for cell in cells]
    table["what"] = [what(cell) for cell in cells]
    table["topic"] = [topic(cell) for cell in cells]
    table["link"] = [link_of(cell) for cell in cells]
    table["verdict"] = verdicts(table)
    return table, curves(rows)


def first_state(table, model, ranks, **more):
    """Return the State of a model on `ranks` ranks of this machine, unfiltered if not measured."""
    there = table[(table["model"] == model) & (table["ranks"] == ranks) & (table["nodes"] == 1)]
    if there.empty:
        return State(**more)
    return State(model=model, ranks=ranks, link="this machine", **more)


def chosen(table, state):
    """Return the rows that the filters let through, in the order that the state asks for."""
    for name, column in FILTERS.items():
        wanted = getattr(state, name)
        if wanted != ANY and not (state.picture == "scaling" and name == "ranks"):
            kept = table[column] == wanted
            if name == "topic":  # with what its rows are compared with
                kept |= table["cell"] == table["base"]
            table = table[kept]
    if state.whats != ANY:
        table = table[table["what"].isin(state.whats)]
    column = SORTED[state.sort]
    return table.sort_values(column, ascending=column not in MORE_IS_BETTER, kind="stable")


def draw(table, curves, state, most=BARS):
    """Return the Figure of the state's picture. ValueError if no row passes the filters."""
    rows = chosen(table, state)
    if rows.empty:
        raise ValueError(NOTHING)
    rows = named(rows)
    title = title_of(state.picture, rows.head(most), curves, scaled(rows))
    return PICTURES[state.picture](rows, curves, most, title)


def named(rows):
    """Return the rows, with model and world in the labels if they differ; short: the old labels."""
    words = rows["label"]
    for column in ("model", "world"):
        if rows[column].nunique() > 1:
            words = words + ", " + rows[column].map(style.name)
    return rows.assign(label=words, short=rows["label"])


def words_of(table, curves, state, most=BARS):
    """Return the message of the state's picture and what it shows, for alt text."""
    rows = chosen(table, state)
    title = title_of(state.picture, named(rows).head(most), curves, scaled(named(rows)))
    column = SORTED[state.sort]
    if state.picture == "scaling" and (lines := scaled(rows)):
        rows = rows[rows["cell"].isin(pd.concat(lines)["cell"])]
    ends = named(rows).iloc[[0, -1]]
    sizes = [style.quantity(value, style.unit_of(column)) for value in ends[column]]
    first, last = (f"{words} {size}" for words, size in zip(ends["label"], sizes, strict=True))
    said = f"{state.picture[0].upper()}{state.picture[1:]}, {len(rows)} of {len(table)} cells, "
    said += f"by {state.sort}: {first}" + (f" to {last}" if len(rows) > 1 else "")
    lines = with_base(rows) if state.picture.startswith("loss") else rows.head(most)
    if len(lines) < len(rows) and state.picture != "scaling":
        more = lines["cell"].iloc[-1] != rows["cell"].iloc[len(lines) - 1]
        first = f"{len(lines) - more}" + " and the base" * more
        said += f"; the first {first} are drawn"
    return f"{title}. {said}."


def as_table(words):
    """Return the texts as an HTML table."""
    look = "style='text-align:right;padding:0 .6em;white-space:nowrap'"
    head = "".join(f"<th {look} scope='col'>{html.escape(name)}</th>" for name in words)
    lines = (
        "".join(f"<td {look}>{html.escape(text)}</td>" for text in row)
        for row in words.head(LISTED).itertuples(index=False, name=None)
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<div style='overflow-x:auto'><table><tr>{head}</tr>{body}</table></div>"


def as_image(figure, words):
    """Return the figure as HTML; the browser draws its text, which takes a quarter of the time."""
    held = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "labkit"}):
        figure.savefig(held, format="svg", metadata={"Date": None})
    image = base64.b64encode(held.getvalue().encode()).decode()
    said = html.escape(words, quote=True)
    source = f'src="data:image/svg+xml;base64,{image}"'
    return f'<img style="max-width:100%" alt="{said}" {source}><p>{said}</p>'


class Cells:
    """The measured cells of a board, from its sweep and its button. .rows: as sweep.results()."""

    def __init__(self, rows):
        self.open(rows)

    def open(self, rows):
        """Make the table of these rows."""
        self.rows = rows
        self.table, self.curves = opened(rows)
        self.words = in_words(self.table)

    def picture(self, state):
        """Return the board's picture and table as HTML; ValueError if no row is left."""
        need_one(state.whats, "strategy")
        rows = chosen(self.table, state)
        measured = set(rows["what"])
        absent = [one for one in state.whats if state.whats != ANY and one not in measured]
        note = f"Not measured for this choice: {'; '.join(absent)}." if absent else ""
        if rows.empty:
            raise ValueError(f"{NOTHING} {note}".strip())
        figure = draw(self.table, self.curves, state)
        shown = as_image(figure, words_of(self.table, self.curves, state))
        shown += as_table(self.words.loc[rows.index])
        if len(rows) > LISTED:
            shown += f"<p>The first {LISTED} of {len(rows)}.</p>"
        if note:
            shown += f"<p>{html.escape(note)}</p>"
        return shown

    def measure(self, launch, state):
        """Add the rows of launch(cells to measure); return a message."""
        rows = launch(to_measure(self.table, state))
        self.open(pd.concat([self.rows, rows], ignore_index=True))
        return f"measured: {len(rows)} rows added"


def to_measure(table, state):
    """Return [Cell]: the base of the state's model and link, then each ticked cell.

    Ticked cells get the chosen bucket size. Raises ValueError unless one model and one link are
    chosen.
    """
    if ANY in (state.model, state.link):
        raise ValueError("choose one model and one link: cells are compared with their base")
    world = table[table["link"] == state.link].iloc[0]
    ticked = table[table["what"].isin(state.whats)].drop_duplicates("what")
    changes = {"model": state.model}
    if state.buckets != ANY:
        changes["bucket_cap_mb"] = state.buckets
    fields = [row | changes for row in ticked.to_dict("records")]
    if ((table["model"] == state.model) & (table["world"] == world["world"])).any():
        fields.insert(0, base_in(table, state.model, world["world"]))
    found = [cell_of(one, world) for one in fields]
    return list({cell.key: cell for cell in found}.values())


def cell_of(fields, world):
    """Return the Cell of an experiment's fields in a world, both rows of the table."""
    own = {name: plain(fields[name]) for name in FIELDS}
    return Cell(Experiment.from_dict(own), **world_fields(world))


def board(rows, state=None, measure=None, **offers):
    """Return the dashboard over a sweep's rows, as an Explorer that is not displayed yet.

    measure: function [Cell] -> rows as from sweep.as_rows(). It adds a box for each `what`, and a
    button that measures the ticked ones with the chosen model, link and bucket size.
    offers: {filter: values} that can be chosen and measured in addition to those of the rows.
    """
    cells = Cells(rows)
    state = state or State()
    menus = {}
    boxed = ("strategy", "compression", "ranks") if measure else ()  # set by boxes and link
    for name, column in FILTERS.items():
        values = sorted({*cells.table[column], *offers.get(name, ())})
        options = [(ANY, ANY), *((style.name(value), value) for value in values)]
        if len(values) > 1 and name not in boxed:
            menus[name] = controls.menu(name, options, getattr(state, name))
    menus["sort"] = controls.menu("sort by", list(SORTED), state.sort)
    menus["picture"] = controls.menu("picture", list(PICTURES), state.picture)
    lines = [menus]
    options = {}
    if measure is not None:
        names = tuple(dict.fromkeys(cells.table["what"]))
        state = replace(state, whats=names)
        lines.append({"whats": controls.boxes(names)})
        options = {"run": partial(cells.measure, measure), "words": "Measure this choice"}
    shown = Explorer(state, lines, cells.picture, "", **options)
    shown.cells = cells
    shown.changed()
    return shown


def explorer(rows, state, provenance, measure, **offers):
    """Show the first state's picture and table, then the board. Returns the Explorer."""
    table, lines = opened(rows)
    words = words_of(table, lines, state)
    present(draw(table, lines, state), words, provenance, words)
    found = chosen(table, state)
    show_table(in_words(table).loc[found.index], f"{provenance}; {legend(table)}")
    return board(rows, state, measure, **offers).show()
