"""Explorer of sequence lengths: memory by variant, and the longest of the lengths that fits.

    heads v   ranks v   ...                   controls: they predict anew and launch nothing
    [x] all scores at once [x] tiles          lines side by side; a dashed one at a GPU's memory

The picture is a pure function of (predict, state): predict(form, tokens, **chosen) -> bytes. form:
the name of a variant.
"""

from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator

from labkit.show import controls, style
from labkit.show.curves import close, draw_line, label_sizes
from labkit.show.explorer import explore, need_one

CAPACITY = 80 * 2**30  # bytes of a large GPU


@dataclass(frozen=True)
class State:
    """The values of the controls. chosen: (name, value) pairs, such as ("heads", 8)."""

    forms: tuple
    tokens: tuple
    chosen: tuple


def memory_by_length(frame, title=None, capacity=None):
    """Return a Figure of `bytes` over `tokens`, log-log, a line per `form`. capacity: bytes."""
    forms = list(dict.fromkeys(frame["form"]))
    colours = style.palette(forms)
    with style.look():
        figure, axes = style.new_figure(8.0, 4.2)
        ends = []
        for form in forms:
            rows = frame[frame["form"] == form]
            xs, ys = draw_line(axes, rows, "tokens", "bytes", colours[form], marker="o")
            ends.append((xs[-1], ys[-1], style.name(form), colours[form]))
        axes.set_xscale("log", base=2)
        label_sizes(axes, sorted(frame["tokens"].unique()), "")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_locator(LogLocator(base=4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: style.quantity(y, "bytes")))
        axes.set_xlabel("length (tokens)")
        axes.set_ylabel("peak memory")
        if capacity:
            axes.axhline(capacity, color=style.RED, linestyle=(0, (4, 2)), linewidth=1.4)
        note = f"dashed: {style.quantity(capacity, 'bytes')}" if capacity else None
        close(figure, axes, ends, title, note)
    return figure


def rows(predict, state):
    """Return a DataFrame: form, tokens, bytes. ValueError without a form."""
    need_one(state.forms, "form")
    chosen = dict(state.chosen)
    return pd.DataFrame(
        {"form": form, "tokens": tokens, "bytes": predict(form, tokens, **chosen)}
        for form in state.forms
        for tokens in state.tokens
    )


def headline(state):
    return ", ".join(f"{name} {value}" for name, value in state.chosen)


def draw(predict, state):
    return memory_by_length(rows(predict, state), headline(state), CAPACITY)


def takeaway(predict, state):
    """Return one sentence: the longest of the lengths that fits, for each form."""
    frame = rows(predict, state)
    longest = []
    for form, of_form in frame.groupby("form", sort=False):
        fits = of_form[of_form["bytes"] <= CAPACITY]["tokens"]
        words = f"{fits.max():,} tokens" if len(fits) else "none of these lengths"
        longest.append(f"{words} for {style.name(form)}")
    limit = style.quantity(CAPACITY, "bytes")
    longest_of = f"the longest of these lengths that fits into {limit}"
    return f"{headline(state)}: {longest_of} is {', '.join(longest)}."


def small(predict, state):
    """Return a DataFrame of texts: a row per length, its bytes by form."""
    wide = rows(predict, state).pivot(index="tokens", columns="form", values="bytes")
    texts = wide[list(state.forms)].map(lambda size: style.quantity(size, "bytes"))
    texts.insert(0, "tokens", [f"{tokens:,}" for tokens in wide.index])
    return texts


def read(state, forms, **chosen):
    """Return the state that the controls show."""
    return replace(state, forms=forms, chosen=tuple(chosen.items()))


def explorer(predict, forms, tokens, choices, provenance="predicted"):
    """Show memory over length: figure, takeaway, table, controls. Returns Explorer.

    predict: see above. choices: {name: values of its menu}; the figure shows the first of each.
    """
    state = State(tuple(forms), tuple(tokens), tuple((name, choices[name][0]) for name in choices))
    above = {name: controls.menu(name, values, values[0]) for name, values in choices.items()}
    return explore(
        state,
        [above, {"forms": controls.boxes(state.forms)}],
        partial(draw, predict),
        partial(takeaway, predict),
        provenance,
        small(predict, state),
        f"{headline(state)}: bytes at the peak",
        "Move a control: the memory is drawn here.",
        read=read,
    )
