"""The dashboard: every cell of a sweep in one table, and pictures of what the controls let through.

    model v  strategy v  precision v  compression v  ranks v  link v     filters
    sort by v  picture v                                                 one picture at a time
    [ picture of the first cells, in this order ]
    | what | on | step time | ratio to the base | ... |                  the same cells, as a table

Rows are summed up once, when it opens; a control picks rows of that table and draws few of them.
What is drawn is a pure function of (table, curves, state), to be tested without a browser.
"""

import base64
import html
import io
from dataclasses import dataclass, replace

import ipywidgets
import matplotlib
import pandas as pd

from labkit.run.summary import curves, summary
from labkit.show import controls, style
from labkit.show.dashboard_pictures import BARS, LINES, PICTURES, scaled
from labkit.show.dashboard_words import in_words, label, link_of

ANY = "any"
FILTERS = {
    "model": "model",
    "strategy": "strategy",
    "precision": "precision",
    "compression": "comm_hook",
    "ranks": "ranks",
    "link": "link",
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


@dataclass(frozen=True)
class State:
    """What the controls say: a value of each filter's column, or ANY; sort and picture by name."""

    model: object = ANY
    strategy: object = ANY
    precision: object = ANY
    compression: object = ANY
    ranks: object = ANY
    link: object = ANY
    sort: str = "step time"
    picture: str = "step time by phase"


def opened(rows):
    """(table, curves) of a sweep's rows: a row a cell with its label and link in words."""
    table = summary(rows)
    table["label"] = [label(row) for row in table.to_dict("records")]
    table["link"] = [link_of(row) for row in table.to_dict("records")]
    return table, curves(rows)


def first_state(table, model, ranks, **more):
    """The state of a model on so many ranks of this machine, where such was measured."""
    there = table[(table["model"] == model) & (table["ranks"] == ranks) & (table["nodes"] == 1)]
    if there.empty:
        return State(**more)
    return State(model=model, ranks=ranks, link="this machine", **more)


def chosen(table, state):
    """The rows that the filters let through, in the order that the state asks for."""
    for name, column in FILTERS.items():
        wanted = getattr(state, name)
        if wanted != ANY and not (state.picture == "scaling" and name == "ranks"):
            table = table[table[column] == wanted]
    column = SORTED[state.sort]
    return table.sort_values(column, ascending=column not in MORE_IS_BETTER, kind="stable")


def draw(table, curves, state, most=BARS):
    """Figure of the state's picture; ValueError where the filters let nothing through."""
    rows = chosen(table, state)
    if rows.empty:
        raise ValueError("nothing was measured that these controls let through")
    return PICTURES[state.picture](named(rows), curves, most)


def named(rows):
    """The rows, labelled so that no two of them read alike."""
    words = rows["label"]
    for column in ("model", "world"):
        if rows[column].nunique() > 1:
            words = words + ", " + rows[column].map(style.name)
    return rows.assign(label=words, short=rows["label"])


def words_of(table, state, most=BARS):
    """One sentence on what the state shows, for those who cannot see it."""
    rows, column = chosen(table, state), SORTED[state.sort]
    if state.picture == "scaling" and (lines := scaled(rows)):
        rows = rows[rows["cell"].isin(pd.concat(lines)["cell"])]
    ends = named(rows).iloc[[0, -1]]
    sizes = [style.quantity(value, style.unit_of(column)) for value in ends[column]]
    first, last = (f"{words} {size}" for words, size in zip(ends["label"], sizes, strict=True))
    said = f"{state.picture[0].upper()}{state.picture[1:]}, {len(rows)} of {len(table)} cells, "
    said += f"by {state.sort}: {first}" + (f" to {last}" if len(rows) > 1 else "")
    drawn = LINES if state.picture.startswith("loss") else most
    if drawn < len(rows) and state.picture != "scaling":
        said += f"; the first {drawn} are drawn"
    return f"{said}."


def as_table(words):
    """The texts as an HTML table."""
    look = "style='text-align:right;padding:0 .6em;white-space:nowrap'"
    head = "".join(f"<th {look} scope='col'>{html.escape(name)}</th>" for name in words)
    lines = (
        "".join(f"<td {look}>{html.escape(text)}</td>" for text in row)
        for row in words.head(LISTED).itertuples(index=False, name=None)
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<div style='overflow-x:auto'><table><tr>{head}</tr>{body}</table></div>"


def as_image(figure, words):
    """The figure as HTML. The browser sets its letters: that takes a quarter of the time."""
    held = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "labkit"}):
        figure.savefig(held, format="svg", metadata={"Date": None})
    image = base64.b64encode(held.getvalue().encode()).decode()
    said = html.escape(words, quote=True)
    source = f'src="data:image/svg+xml;base64,{image}"'
    return f'<img style="max-width:100%" alt="{said}" {source}><p>{said}</p>'


class Dashboard:
    """The controls over (table, curves). `.panel` is the widget; nothing in it measures."""

    def __init__(self, table, curves, state=None):
        self.table, self.curves, self.state = table, curves, state or State()
        self.words = in_words(table)
        self.menus = {}
        for name, column in FILTERS.items():
            values = sorted(table[column].unique())
            options = [(ANY, ANY), *((style.name(value), value) for value in values)]
            self.menus[name] = controls.menu(name, options, getattr(self.state, name))
        self.menus["sort"] = controls.menu("sort by", list(SORTED), self.state.sort)
        self.menus["picture"] = controls.menu("picture", list(PICTURES), self.state.picture)
        controls.observe(self.changed, self.menus.values())
        self.image, self.list = ipywidgets.HTML(), ipywidgets.HTML()
        self.panel = ipywidgets.VBox([controls.row(self.menus.values()), self.image, self.list])
        self.changed()

    def changed(self, change=None):
        """Read the controls, draw anew and list anew."""
        values = {name: menu.value for name, menu in self.menus.items()}
        self.state = replace(self.state, **values)
        rows = chosen(self.table, self.state)
        if rows.empty:
            self.image.value = "<p>Nothing was measured that these controls let through.</p>"
            self.list.value = ""
            return
        figure = draw(self.table, self.curves, self.state)
        self.image.value = as_image(figure, words_of(self.table, self.state))
        more = f"<p>The first {LISTED} of {len(rows)}.</p>" if len(rows) > LISTED else ""
        self.list.value = as_table(self.words.loc[rows.index]) + more
