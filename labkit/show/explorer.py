"""One explorer for all notebooks: controls, the state that they hold, and a picture of that state.

    [ figure ] one-line takeaway, table     ordinary outputs: GitHub, batch runs, offline too
    ranks v   precision v                   a row of controls: they draw again and launch nothing
    [x] DDP   [x] FSDP                      a row of boxes
    ( Run it )                              only with run=: the one control that launches ranks
    [ image ] its sentence                  a pure function of the state

Explorers differ only in functions: figures, a takeaway, and how controls become a state.
"""

import html
from dataclasses import replace

import ipywidgets

from labkit.show import controls
from labkit.show.notebook import table
from labkit.show.publish import as_html, present


class Explorer:
    """Controls and a picture of their state. `.panel` is the widget, `.image` its picture.

    state: the first choice, a frozen dataclass; `.state` is the one that is shown.
    rows: rows of controls, each {name: widget, or a dict of controls.boxes()}.
    picture: function state -> HTML. Its ValueError is shown as text.
    hint: the text of `.image` until a control changes.
    read: function (state, **value by control name) -> state; boxes give the tuple of the ticked
        names. By default each control is a field of the state.
    run: function state -> message, called by a button; words: the button's label. The message, or
        the first line of an error, is shown beside the button (`.message`).
    """

    def __init__(self, state, rows, picture, hint, read=replace, run=None, words=None):
        self.state = state
        self.picture = picture
        self.read = read
        self.controls = {name: control for row in rows for name, control in row.items()}
        self.image = ipywidgets.HTML(f"<p>{hint}</p>")
        lines = [widgets_of(row) for row in rows]
        controls.observe(self.changed, [widget for line in lines for widget in line])
        parts = [controls.row(line) for line in lines]
        if run is not None:
            self.run = run
            self.button = ipywidgets.Button(
                description=words, icon="play", button_style="primary", layout={"width": "auto"}
            )
            self.button.on_click(self.clicked)
            self.message = ipywidgets.HTML()
            self.output = ipywidgets.Output()
            parts += [ipywidgets.HBox([self.button, self.message]), self.output]
        self.panel = ipywidgets.VBox([*parts, self.image])

    def changed(self, change=None):
        """Read the controls and draw their state."""
        values = {name: value_of(control) for name, control in self.controls.items()}
        try:
            self.state = self.read(self.state, **values)
            self.image.value = self.picture(self.state)
        except ValueError as error:
            self.image.value = f"<p>{html.escape(str(error))}</p>"

    def clicked(self, button=None):
        """Run the state of the controls, then draw it."""
        self.button.disabled = True
        self.message.value = "running …"
        with self.output:  # what a launch prints; in a kernel it also keeps exceptions
            self.message.value = outcome(self.run, self.state)
        self.button.disabled = False
        self.output.outputs = ()
        self.changed()

    def show(self):
        """Display the controls; return the Explorer."""
        controls.show(self.panel)
        return self


def widgets_of(row):
    """Return the widgets of a row of controls, in order."""
    found = []
    for control in row.values():
        found += control.values() if isinstance(control, dict) else [control]
    return found


def value_of(control):
    """Return a widget's value; of boxes the names that are ticked."""
    return controls.ticked(control) if isinstance(control, dict) else control.value


def outcome(run, *arguments):
    """Return the message of run(), or the first line of its error, as HTML."""
    try:
        return run(*arguments)
    except (Exception, KeyboardInterrupt) as error:
        return controls.failure(error)


def need_one(names, what):
    """Raise ValueError if no box is ticked."""
    if not names:
        raise ValueError(f"Tick at least one {what}.")


def explore(state, rows, draw, takeaway, provenance, small, caption, hint, more=None, **options):
    """Show figure, takeaway and table of the first state, then the controls. Returns the Explorer.

    draw: function state -> Figure. takeaway: function state -> one sentence, which is the alt text.
    provenance: as in publish.present(). small: DataFrame for the table; caption: above provenance.
    more: function state -> more figures, which only the widget shows. options: those of Explorer.
    """

    def picture(state):
        figures = [draw(state), *(more(state) if more else [])]
        return as_html(takeaway(state), *figures)

    words = takeaway(state)
    present(draw(state), words, provenance, words)
    table(small, f"{caption}; {provenance}")
    return Explorer(state, rows, picture, hint, **options).show()
