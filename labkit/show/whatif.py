"""What if: predict a combination from other cells, measure it, and show the error.

    model v  on v  strategy v  precision v  recompute v  compression v     the combination
    | step time | predicted 75 ms | measured 71 ms | error +6 % |
    (Measure this cell)  [======    ]  (Stop)

The button measures the cell interleaved with its base, in a thread, so that the kernel still
answers. Stop raises KeyboardInterrupt in it, as the kernel's stop button does in a cell, and the
launch ends its ranks.
"""

import ctypes
import html
import threading

import ipywidgets
import pandas as pd

from labkit.measure.stats import interval_name
from labkit.run.cost_model import PEAKS, check, plain, predict, scores, world_fields
from labkit.run.summary import FIELDS, base_in, ratio_of, summary
from labkit.show import controls, style
from labkit.show.dashboard import as_table
from labkit.show.dashboard_words import label

ASKED = {"ratio": "step time / base", "step_ms": "step time", "wait_ms": "of it, waiting"}
ASKED |= {"sent_bytes": "sent per rank and step", "peak_bytes": "peak memory per rank"}
KINDS = {name: f"of it, {style.name(name[len('peak_') : -len('_bytes')])}" for name in PEAKS}


def side_by_side(said, measured=None):
    """Return a DataFrame of texts: predicted, measured and error of each quantity.

    said: of predict(), {} if no other cell predicts this one. measured: a row of summary().
    """
    rows = []
    own = measured | {"wait_ms": measured["exposed_comm_ms"]} if measured else {}
    for name, words in (ASKED | KINDS).items():
        if name in KINDS and not (said or own).get(name):
            continue
        row = {"quantity": words}
        row["predicted"] = in_unit(said[name], name) if said else "by no other cell"
        row["measured"] = in_unit(own[name], name) if own else "not yet"
        row["error"] = error(said[name], own[name]) if said and own else ""
        rows.append(row)
    return pd.DataFrame(rows)


def in_unit(value, name):
    return f"{value:.2f}" if name == "ratio" else style.quantity(value, style.unit_of(name))


def error(predicted, measured):
    return f"{100 * (predicted / measured - 1):+.0f} %" if measured else ""


def errors(table):
    """Return a DataFrame of texts: the error of each prediction of cost_model.scores()."""
    found = scores(table)
    rows = []
    name = interval_name(*found.get("pairs", [0]))
    for row in found.to_dict("records"):
        line = {"what": label(row), "model": style.name(row["model"]), "on": row["world"]}
        line["predicted ratio"] = f"{row['predicted_ratio']:.2f}"
        line[f"measured ratio ({name})"] = ratio_of(row).in_words()
        line["error"] = f"{100 * row['error']:+.0f} %"
        for column in ("sent_bytes", "peak_bytes"):
            words = f"error, {ASKED[column].split(' per')[0]}"
            line[words] = error(row[f"predicted_{column}"], row[column])
        rows.append(line)
    return pd.DataFrame(rows)


def in_a_sentence(table):
    """Return a sentence on the errors of the predictions; empty if no cell can be predicted."""
    found = scores(table)
    if found.empty:
        return ""
    off = 100 * found["error"].abs()
    worst = found.loc[off.idxmax()]
    where = label(worst)
    world = f", {worst['world']}"
    where += "" if where.endswith(world) else world
    return (
        f"What if: over {len(found)} of the cells, each predicted from others, the median error of "
        f"the step time is {off.median():.0f} %, the worst {off.max():.0f} % ({where})."
    )


class Progress:
    """The progress bar of a sweep as a widget; the measuring thread moves it."""

    def __init__(self):
        self.widget = ipywidgets.IntProgress(value=0, max=1, layout={"width": "180px"})

    def update(self, step, total):
        self.widget.max = total
        self.widget.value = step

    def record(self, row):
        """Do nothing: the board draws all rows at the end."""

    def close(self):
        pass


class WhatIf:
    """The controls of one model. `.panel` is the widget; `.thread` measures while it is alive.

    sweep: function (list of grids, bar) -> rows of sweep.results(), called by the button.
    """

    def __init__(self, table, model, sweep):
        self.table = table
        self.model = model
        self.sweep = sweep
        self.thread = None
        self.found = {}
        bases = table[(table["model"] == model) & (table["cell"] == table["base"])]
        self.world = controls.menu("on", list(bases["world"]), bases["world"].iloc[0])
        self.fields = {
            field: controls.menu(
                style.name(field), [(words(value), value) for value in values], values[0]
            )
            for field, values in offered(table, model).items()
        }
        self.answer = ipywidgets.HTML()
        self.message = ipywidgets.HTML()
        self.button = ipywidgets.Button(
            description="Measure this cell", icon="play", button_style="primary"
        )
        self.stop_button = ipywidgets.Button(description="Stop", icon="stop", disabled=True)
        self.progress = Progress()
        self.button.on_click(self.start)
        self.stop_button.on_click(self.stop)
        menus = [self.world, *self.fields.values()]
        controls.observe(self.changed, menus)
        act = controls.row([self.button, self.progress.widget, self.stop_button, self.message])
        self.panel = ipywidgets.VBox([controls.row(menus), self.answer, act])
        self.changed()

    def asked(self):
        """Return (base, changes) that the controls show."""
        base = base_in(self.table, self.model, self.world.value)
        values = {name: menu.value for name, menu in self.fields.items()}
        names = [name for name in FIELDS if name in values and values[name] != base[name]]
        return base, tuple((name, values[name]) for name in names)

    def measured(self, changes):
        """Return the row of the cell, if it was measured, in the sweep or by the button."""
        world = self.world.value
        return self.found.get((world, changes)) or row_of(self.table, self.model, world, changes)

    def changed(self, change=None):
        """Predict for the controls, and show the prediction next to the measured values."""
        _, changes = self.asked()
        own = self.measured(changes)
        cell = own["cell"] if own else None
        words = ""
        said = {}
        try:
            said = predict(self.table, self.model, self.world.value, changes, without=cell)
        except ValueError as error:  # a measured cell is shown, even if no other cell predicts it
            words = f"<p>{html.escape(str(error))}</p>"
        self.answer.value = as_table(side_by_side(said, own)) if said or own else words
        self.button.disabled = own is not None or self.running() or not self.runs(changes)

    def runs(self, changes):
        """Return whether the combination is one that Experiment accepts."""
        try:
            check(base_in(self.table, self.model, self.world.value), changes)
        except ValueError:
            return False
        return True

    def running(self):
        return self.thread is not None and self.thread.is_alive()

    def start(self, button=None):
        base, changes = self.asked()
        fields = {name: plain(base[name]) for name in FIELDS} | world_fields(base)
        self.message.value = "measuring, interleaved with its base …"
        self.button.disabled = True
        self.stop_button.disabled = False
        grids = [fields, fields | dict(changes)]
        asked = (grids, self.world.value, changes)
        self.thread = threading.Thread(target=self.work, args=asked, daemon=True)
        self.thread.start()

    def work(self, grids, world, changes):
        """Measure, keep the row and write the result in one line; runs in the thread."""
        try:
            found = summary(self.sweep(grids, self.progress))
            self.found |= {(world, changes): row_of(found, self.model, world, changes)}
            self.message.value = "measured"
        except KeyboardInterrupt:
            self.message.value = "stopped: no rank is left"
        except Exception as error:  # shown next to the button
            self.message.value = controls.failure(error)
        self.thread = None
        self.stop_button.disabled = True
        self.progress.update(0, 1)
        self.changed()

    def stop(self, button=None):
        if self.running():
            self.message.value = "stopping …"
            raised = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident), raised)


def offered(table, model):
    """Return {field: values}, the base's first, of all changes that were measured for the model."""
    rows = table[table["model"] == model]
    base = rows[rows["cell"] == rows["base"]].iloc[0]
    changed = {}
    for field, value in dict.fromkeys(change for changes in rows["changes"] for change in changes):
        changed.setdefault(field, [base[field]]).append(value)
    return {field: values for field, values in changed.items() if field != "seed"}


def words(value):
    if value == "none":  # style.name gives "no compression"
        return "none"
    return style.name(value) if isinstance(value, str) else f"{value:g}"


def row_of(table, model, world, changes):
    """Return the cell's row of summary() as a dict, or None if it was not measured."""
    mine = table[(table["model"] == model) & (table["world"] == world)]
    return next((row for row in mine.to_dict("records") if row["changes"] == changes), None)
