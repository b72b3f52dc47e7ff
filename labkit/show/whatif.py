"""What if: predict a combination from its single changes, measure it, and show the error.

    model v  on v  strategy v  precision v  recompute v  compression v     the combination
    | step time | predicted 75 ms | measured 71 ms | error +6 % |
    (Measure this cell)  [======    ]  (Stop)

The button measures the cell interleaved with its base, in a thread, so that the kernel still
answers. Stop raises KeyboardInterrupt in it, as the kernel's stop button does in a cell, and the
launch ends its ranks.
"""

import ctypes
import threading

import ipywidgets
import pandas as pd

from labkit.measure.stats import interval_name
from labkit.run.summary import (
    FIELDS,
    WORLD,
    base_in,
    held_against,
    predict,
    ratio_of,
    singles,
    summary,
)
from labkit.show import controls, style
from labkit.show.dashboard import as_table, plain
from labkit.show.dashboard_words import change

ASKED = {"ratio": "step time / base", "step_ms": "step time"}
ASKED |= {"sent_bytes": "sent per rank and step", "peak_bytes": "peak memory per rank"}


def side_by_side(said, measured=None):
    """Return a DataFrame of texts: predicted, measured and error of each quantity."""
    rows = []
    for name, words in ASKED.items():
        own = measured[name] if measured else None
        row = {"quantity": words, "predicted": in_unit(said[name], name)}
        row["measured"] = "not yet" if own is None else in_unit(own, name)
        row["error"] = "" if own is None else error(said[name], own)
        rows.append(row)
    return pd.DataFrame(rows)


def in_unit(value, name):
    return f"{value:.2f}" if name == "ratio" else style.quantity(value, style.unit_of(name))


def error(predicted, measured):
    return f"{100 * (predicted / measured - 1):+.0f} %" if measured else ""


def errors(table):
    """Return a DataFrame of texts: the error of each prediction, by summary.held_against()."""
    found = held_against(table)
    rows = []
    name = interval_name(*found.get("pairs", [0]))
    for row in found.to_dict("records"):
        what = " + ".join(change(name, value) for name, value in row["changes"])
        line = {"what": what, "model": style.name(row["model"]), "on": row["world"]}
        line["predicted ratio"] = f"{row['predicted_ratio']:.2f}"
        line[f"measured ratio ({name})"] = ratio_of(row).in_words()
        line["error"] = f"{100 * row['error']:+.0f} %"
        for column in ("sent_bytes", "peak_bytes"):
            words = f"error, {ASKED[column].split(' per')[0]}"
            line[words] = error(row[f"predicted_{column}"], row[f"measured_{column}"])
        rows.append(line)
    return pd.DataFrame(rows)


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
        base = bases.iloc[0]
        changed = {}
        for field, value in singles(table, model):
            changed.setdefault(field, [base[field]]).append(value)
        self.fields = {
            field: controls.menu(
                style.name(field), [(words(value), value) for value in values], values[0]
            )
            for field, values in changed.items()
            if field != "seed"
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
        said = predict(self.table, self.model, self.world.value, changes)
        own = self.measured(changes)
        self.answer.value = as_table(side_by_side(said, own))
        self.button.disabled = own is not None or self.running()

    def running(self):
        return self.thread is not None and self.thread.is_alive()

    def start(self, button=None):
        base, changes = self.asked()
        fields = {name: base[name] for name in (*FIELDS, *WORLD)}
        if base["nodes"] == 1:
            fields["link_mbit"] = None
        self.message.value = "measuring, interleaved with its base …"
        self.button.disabled = True
        self.stop_button.disabled = False
        fields = {name: plain(value) for name, value in fields.items()}
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


def words(value):
    if value == "none":  # style.name gives "no compression"
        return "none"
    return style.name(value) if isinstance(value, str) else f"{value:g}"


def row_of(table, model, world, changes):
    """Return the cell's row of summary() as a dict, or None if it was not measured."""
    mine = table[(table["model"] == model) & (table["world"] == world)]
    return next((row for row in mine.to_dict("records") if row["changes"] == changes), None)
