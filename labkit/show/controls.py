"""Controls of the explorers: a menu, check boxes, a row that wraps.

There is no slider: ipywidgets' slider gives a screen reader neither a name nor a value. A menu
gives both; the space bar opens it.
"""

import html

import ipywidgets
from IPython.display import display

from labkit.show import style

WHOLE = {"description_width": "initial"}  # a description is never cut off


def menu(description, options, value):
    """Return a dropdown, disabled if it has one option. options: values, or (text, value) pairs."""
    return ipywidgets.Dropdown(
        options=options,
        value=value,
        description=description,
        style=WHOLE,
        disabled=len(options) < 2,
    )


def speeds(mbit, value):
    """Return a menu of link speeds, Mbit/s."""
    return menu("link speed", [(f"{speed:,g} Mbit/s", speed) for speed in mbit], value)


def boxes(names):
    """Return {name: a ticked box}."""
    return {
        one: ipywidgets.Checkbox(
            value=True, description=style.name(one), indent=False, layout={"width": "auto"}
        )
        for one in names
    }


def ticked(boxes):
    """Return the names of the boxes that are ticked."""
    return tuple(one for one, box in boxes.items() if box.value)


def failure(error):
    """Return the type of an error and the first line of its message, as HTML."""
    return f"<b>{type(error).__name__}</b>: {html.escape(first_line(error))}"


def first_line(error):
    """Return the first line of an error's message."""
    return (str(error).strip() or "no message").splitlines()[0]


def row(controls):
    """Return a box with the widgets side by side, as many as fit."""
    return ipywidgets.Box(
        list(controls), layout={"display": "flex", "flex_flow": "row wrap", "grid_gap": "4px 18px"}
    )


def observe(changed, controls):
    """Call changed whenever one of the controls gets another value."""
    for control in controls:
        control.observe(changed, names="value")


def show(panel):
    """Display the panel; without a kernel (GitHub), one line of text."""
    words = {"text/plain": "Controls: run this notebook in JupyterLab."}
    display(panel._repr_mimebundle_() | words, raw=True)
