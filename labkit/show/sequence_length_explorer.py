"""Explorer of sequence lengths: memory by variant, and the longest of the lengths that fits.

    heads v   ranks v   ...                   controls: they predict anew and launch nothing
    [x] all scores at once [x] tiles          lines side by side; a dashed one at a GPU's memory

The picture is a pure function of (predict, state): predict(variant, tokens, **chosen) -> bytes.
variant: a name.
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

    variants: tuple
    tokens: tuple
    chosen: tuple


def memory_by_length(frame, title=None, capacity=None):
    """Return a Figure of `bytes` over `tokens`, log-log, a line per `variant`. capacity: bytes."""
    variants = list(dict.fromkeys(frame["variant"]))
    colours = style.palette(variants)
    with style.look():
        figure, axes = style.new_figure(8.0, 4.2)
        ends = []
        for variant in variants:
            rows = frame[frame["variant"] == variant]
            xs, ys = draw_line(axes, rows, "tokens", "bytes", colours[variant], marker="o")
            ends.append((xs[-1], ys[-1], style.name(variant), colours[variant]))
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
    """Return a DataFrame: variant, tokens, bytes. ValueError without a variant."""
    need_one(state.variants, "variant")
    chosen = dict(state.chosen)
    return pd.DataFrame(
        {"variant": variant, "tokens": tokens, "bytes": predict(variant, tokens, **chosen)}
        for variant in state.variants
        for tokens in state.tokens
    )


def headline(state):
    return ", ".join(f"{name} {value}" for name, value in state.chosen)


def longest(frame):
    """Return {variant: the longest of its lengths that fits, or None}."""
    fits = frame[frame["bytes"] <= CAPACITY].groupby("variant")["tokens"].max()
    return {variant: fits.get(variant) for variant in dict.fromkeys(frame["variant"])}


def draw(predict, state):
    frame = rows(predict, state)
    fits = {variant: tokens for variant, tokens in longest(frame).items() if tokens}
    most = max(fits.values(), default=0)
    names = [style.name(variant) for variant, tokens in fits.items() if tokens == most]
    message = f"up to {most:,} tokens fit with {' and '.join(names)}" if fits else "nothing fits"
    return memory_by_length(frame, f"{headline(state)}: {message}", CAPACITY)


def takeaway(predict, state):
    """Return one sentence: the longest of the lengths that fits, for each variant."""
    found = []
    for variant, tokens in longest(rows(predict, state)).items():
        words = f"{tokens:,} tokens" if tokens else "none of these lengths"
        found.append(f"{words} for {style.name(variant)}")
    limit = style.quantity(CAPACITY, "bytes")
    longest_of = f"the longest of these lengths that fits into {limit}"
    return f"{headline(state)}: {longest_of} is {', '.join(found)}."


def small(predict, state):
    """Return a DataFrame of texts: a row per length, its bytes by variant."""
    wide = rows(predict, state).pivot(index="tokens", columns="variant", values="bytes")
    texts = wide[list(state.variants)].map(lambda size: style.quantity(size, "bytes"))
    texts.insert(0, "tokens", [f"{tokens:,}" for tokens in wide.index])
    return texts


def read(state, variants, **chosen):
    """Return the state that the controls show."""
    return replace(state, variants=variants, chosen=tuple(chosen.items()))


def explorer(predict, variants, tokens, choices, provenance="predicted"):
    """Show memory over length: figure, takeaway, table, controls. Returns Explorer.

    predict: see above. choices: {name: values of its menu}; the figure shows the first of each.
    """
    state = State(
        tuple(variants), tuple(tokens), tuple((name, choices[name][0]) for name in choices)
    )
    above = {name: controls.menu(name, values, values[0]) for name, values in choices.items()}
    return explore(
        state,
        [above, {"variants": controls.boxes(state.variants)}],
        partial(draw, predict),
        partial(takeaway, predict),
        provenance,
        small(predict, state),
        f"{headline(state)}: bytes at the peak",
        "Move a control: the memory is drawn here.",
        read=read,
    )
