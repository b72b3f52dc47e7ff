"""Explorer of number formats: a value's bits, and the effect of a format on real gradients.

bit_layout(0.1)                 one row per format: its bits, the number they stand for, the error
reach(gradients, "fp16", 2^16)  how large gradients are, how far each format reaches, what is lost
explorer(gradients)             both, with controls: value, loss scale, format
"""

import math
from dataclasses import dataclass
from functools import partial

import ipywidgets
import numpy as np
import pandas as pd
from matplotlib.patches import Rectangle

from labkit.show import controls, style
from labkit.show.explorer import Explorer
from labkit.show.notebook import table
from labkit.show.numbers import FORMATS, fate
from labkit.show.publish import as_html, present

PARTS = {"sign": style.GREY, "exponent": style.ORANGE, "fraction": style.BLUE}
FATES = {
    "normal": style.BLUE,
    "subnormal": style.PALE_BLUE,
    "zero": style.RED,
    "overflow": style.PURPLE,
}
WORDS = {
    "normal": "full precision",
    "subnormal": "bits lost (subnormal)",
    "zero": "becomes zero",
    "overflow": "beyond the largest",
}


@dataclass(frozen=True)
class State:
    """The values of the controls. scale: the loss scale, which multiplies the gradients."""

    value: float = 0.1
    scale: float = 1.0
    format: str = "fp16"


def number(value):
    """Return a number as people read it, to four digits."""
    return f"{value:.4g}".replace("inf", "infinity").replace("nan", "not a number")


def error_words(value, stored):
    if not math.isfinite(stored):
        return "overflow"
    if value == 0 or stored == value:
        return "exact"
    return "all of it" if stored == 0 else f"{abs(stored / value - 1):.1e}"


def bit_layout(value, title=None):
    """Return a Figure of the value's bits in each format, the number stored, and its error."""
    with style.look():
        figure, axes = style.new_figure(9.5, 0.95 + 0.42 * len(FORMATS))
        heading = {"va": "center", "size": 9, "color": style.FAINT}
        for row, one in enumerate(FORMATS.values()):
            place = 0
            for (part, colour), digits in zip(PARTS.items(), one.bits(value), strict=True):
                for digit in digits:
                    draw_bit(axes, place, row, digit, colour)
                    place += 1
                if row == 0:
                    axes.text(place - len(digits) / 2, -0.75, part, ha="center", **heading)
            stored = float(one.round(value))
            error = error_words(value, stored)
            bad = error in ("overflow", "all of it")
            ink = {"va": "center_baseline", "size": 9.5, "color": style.RED if bad else style.INK}
            axes.text(33, row, number(stored), weight="bold", **ink)
            axes.text(39.5, row, error, **ink)
        for x, words in ((33, "stored"), (39.5, "relative error")):
            axes.text(x, -0.75, words, **heading)
        axes.set_xlim(-0.2, 45)
        axes.set_ylim(len(FORMATS) - 0.4, -1.1)
        axes.set_yticks(range(len(FORMATS)), list(FORMATS))
        axes.tick_params(axis="y", length=0)
        axes.set_xticks([])
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        style.entitle(figure, title or f"{number(value)} in six formats")
    return figure


def draw_bit(axes, place, row, digit, colour):
    """Draw one bit: dark for 1, pale for 0, so that the pattern is visible at a glance."""
    one = digit == "1"
    look = {"facecolor": colour if one else style.lighter(colour, 0.75), "linewidth": 0}
    axes.add_patch(Rectangle((place, row - 0.36), 0.92, 0.72, **look))
    ink = {"size": 8, "color": style.text_on(colour) if one else style.INK}
    axes.text(place + 0.46, row, digit, ha="center", va="center_baseline", **ink)


def reach(gradients, name="fp16", scale=1.0, title=None):
    """Return a Figure: the sizes of the gradients x scale, and the range of each format.

    Above, the gradients per power of two, coloured by their fate in format `name`.
    gradients: an array, or its powers(). Raises ValueError if none is finite and nonzero.
    """
    counts = gradients if isinstance(gradients, dict) else powers(gradients)
    one = FORMATS[name]
    with style.look():
        layout = {"sharex": True, "gridspec_kw": {"height_ratios": [1.5, 1]}}
        figure, (above, below) = style.new_figure(9.5, 5.2, rows=2, **layout)
        draw_gradients(above, counts, one, scale)
        draw_formats(below, name)
        mark_end(above, below, one.smallest / 2, "zero  ", "right")
        mark_end(above, below, one.largest, "  overflow", "left")
        style.entitle(figure, title or f"Gradients x {scale:g} in {name}")
    return figure


def draw_gradients(axes, counts, one, scale):
    """Draw the share of the gradients in each power of two, coloured by their fate."""
    shift = math.log2(scale)
    total = sum(counts.values())
    for fate_name, members in by_fate(counts, one, scale).items():
        heights = [100 * counts[power] / total for power in members]
        middles = [power + shift + 0.5 for power in members]
        label = f"{WORDS[fate_name]}: {sum(heights):.3g} %"
        axes.bar(middles, heights, 0.9, color=FATES[fate_name], label=label)
    axes.set_ylabel("share of the gradients (%)")
    axes.legend(loc="upper left", handlelength=0.9)
    axes.grid(axis="y")


def draw_formats(axes, name):
    """Draw a row per format from its smallest number to its largest; that of `name` is blue."""
    for row, (key, one) in enumerate(FORMATS.items()):
        draw_reach(axes, row, one, key == name)
    axes.set_yticks(range(len(FORMATS)), list(FORMATS))
    axes.set_ylim(len(FORMATS) - 0.5, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(-50, 20)
    ticks = range(-48, 20, 8)
    axes.set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
    axes.set_xlabel("size: gradient x loss scale (dark: normal numbers, pale: subnormal ones)")


def mark_end(above, below, size, words, side):
    """Draw a line across both axes where a format ends, with words on one side of it."""
    at = math.log2(size)
    for axes in (above, below):
        axes.axvline(at, color=style.INK, linewidth=1, linestyle=(0, (4, 3)))
    look = {"va": "bottom", "ha": side, "size": 9, "color": style.FAINT}
    place = {"xycoords": ("data", "axes fraction"), "annotation_clip": True}
    above.annotate(words, (at, 1), **place, **look)


def draw_reach(axes, row, one, chosen):
    """Draw one format from its smallest number to its largest, as far as the axis shows."""
    ends = [math.log2(x) for x in (one.smallest, one.smallest_normal, one.largest)]
    low, middle, high = (max(-50, end) for end in ends)
    colour = style.BLUE if chosen else style.GREY
    axes.barh(row, middle - low, 0.5, low, color=style.lighter(colour, 0.6))
    axes.barh(row, min(20, high) - middle, 0.5, middle, color=colour)
    if high > 20:
        style.beside(axes, "to $2^{127}$", (20, row), (4, 0), va="center", size=8.5)


def powers(values):
    """Return {power: number of values with a size from 2^power to below 2^(power + 1)}.

    Zeros and non-finite values do not count. Raises ValueError if there is no other.
    """
    values = np.abs(np.asarray(values, dtype=np.float64).ravel())
    found = np.frexp(values[(values > 0) & np.isfinite(values)])[1] - 1
    if not found.size:
        raise ValueError("no gradient is finite and different from zero")
    sizes, counts = np.unique(found, return_counts=True)
    return dict(zip(sizes.tolist(), counts.tolist(), strict=True))


def by_fate(counts, one, scale):
    """Return {fate: [powers]}: by the middle of each power of two; empty fates are left out."""
    found = {}
    for power in sorted(counts):
        shares = fate([1.5 * 2.0**power], one.name, scale)
        found.setdefault(max(shares, key=shares.get), []).append(power)
    return {key: found[key] for key in FATES if key in found}


def facts():
    """Return a DataFrame: bits, largest, smallest normal, smallest and epsilon of each format."""
    return pd.DataFrame(
        {
            "format": one.name,
            "exponent": one.exponent_bits,
            "fraction": one.fraction_bits,
            "largest": number(one.largest),
            "smallest normal": number(one.smallest_normal),
            "smallest": number(one.smallest),
            "from 1 to the next": number(one.epsilon),
        }
        for one in FORMATS.values()
    )


def takeaway(counts, state):
    """Return one sentence on the gradients' fate."""
    found = by_fate(counts, FORMATS[state.format], state.scale)
    total = sum(counts.values())
    zero, over = (sum(map(counts.get, found.get(key, []))) for key in ("zero", "overflow"))
    zero = 100 * zero / total
    over = 100 * over / total
    return (
        f"In {state.format}, with a loss scale of {state.scale:g}, "
        f"{zero:.3g} % of these gradients become zero "
        f"and {over:.3g} % overflow."
    )


def picture(counts, state):
    """Return the widget's images as HTML: the value's bits, and the reach of the format."""
    words = f"The bits of {number(state.value)} in each of the formats."
    bits = as_html(words, bit_layout(state.value))
    return bits + as_html(takeaway(counts, state), reach(counts, state.format, state.scale))


def explorer(gradients, provenance):
    """Show figure and table of the formats, then the controls. Returns the Explorer.

    gradients: array of real gradients. provenance: where they come from, as in present().
    """
    counts = powers(gradients)
    state = State()
    words = takeaway(counts, state)
    present(reach(counts, state.format, state.scale), words, provenance, words)
    table(facts(), "predicted: from the bits of each format")
    scales = [(f"2^{power}", 2.0**power) for power in range(0, 33, 2)]
    value = ipywidgets.FloatText(value=state.value, description="value", style=controls.WHOLE)
    row = {
        "value": value,
        "scale": controls.menu("loss scale", scales, state.scale),
        "format": controls.menu("format", list(FORMATS), state.format),
    }
    hint = "Change a control: the pictures for your choice are drawn here, "
    hint += "from the saved gradients."
    return Explorer(state, [row], partial(picture, counts), hint).show()
