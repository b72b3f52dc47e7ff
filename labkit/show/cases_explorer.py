"""Published jobs with their predictions, and an explorer of the same job on another GPU.

    GPT-3 175B              <>o    110; 107          o predicted    <> published: the least and
    Llama 3 405B      o  <--->     135; 152 to 165   the most that the reported figure can mean

    explorer: which job, on which GPU: the parts of its step, a trillion tokens in days and money

The picture is a pure function of (course, state). Nothing is launched; a prediction takes a few
milliseconds.
"""

from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
from matplotlib.lines import Line2D

from labkit.scale import constants
from labkit.scale.hardware import find_gpu
from labkit.scale.plan import bill
from labkit.scale.search import Found
from labkit.show import controls, style
from labkit.show.explorer import explore
from labkit.show.stacked_bars import stacked_bars

KINDS = {
    "layers": "layers",
    "output layer": "layers",
    "messages of layers": "messages",
    "gathering parameters": "messages",
    "hand-overs": "messages",
    "gradients": "messages",
    "recomputation": "recomputation",
    "bubble": "bubble",
    "optimizer": "optimizer",
}
TRILLION = 1e12  # tokens


def beside(frame, title=None):
    """Return a Figure with a line per case, log scale; 1: the most its published speed can mean.

    frame: case, predicted, least, most: tokens per second and GPU. Raises ValueError without rows.
    """
    if frame.empty:
        raise ValueError("there is no case, so there is nothing to draw")
    colours = style.palette(("predicted", "published"))
    hollow = {"marker": "D", "linestyle": "", "markersize": 9, "markerfacecolor": style.GROUND}
    hollow |= {"color": colours["published"]}
    dot = {"marker": "o", "linestyle": "", "markersize": 7, "color": colours["predicted"]}
    with style.look():
        figure, axes = style.new_figure(8.0, 1.6 + 0.36 * len(frame))
        for y, row in enumerate(frame.itertuples()):
            predicted = row.predicted / row.most
            least = row.least / row.most
            axes.plot([predicted, 1], [y, y], color=style.FAINT, linewidth=1, zorder=1)
            axes.plot([least, 1], [y, y], color=colours["published"], linewidth=4)
            axes.plot(sorted({least, 1.0}), [y] * len({least, 1.0}), **hollow)
            axes.plot(predicted, y, **dot, zorder=4)
            published = f"{row.least:,.0f}" + f" to {row.most:,.0f}" * (row.least < row.most)
            words = f"{row.predicted:,.0f}; {published}"
            style.beside(axes, words, (1, y), (5, 0), xycoords=("axes fraction", "data"))
        axes.set_xscale("log")
        ratios = frame[["predicted", "least", "most"]].div(frame["most"], axis=0)
        axes.set_xlim(0.85 * ratios.min().min(), 1.3 * ratios.max().max())
        axes.set_xticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
        axes.set_xticks([], minor=True)
        axes.set_ylim(len(frame) - 0.5, -0.7)
        axes.set_yticks(range(len(frame)), frame["case"])
        axes.set_xlabel("speed / published speed (log)")
        both = "predicted; published, tokens/s of a GPU"
        style.beside(axes, both, (1, -0.6), (5, 0), xycoords=("axes fraction", "data"))
        axes.grid(axis="x")
        marks = [
            Line2D([], [], **dot, label="predicted"),
            Line2D([], [], **hollow, label="published (two: FLOPs of attention counted or not)"),
        ]
        figure.legend(handles=marks, loc="outside lower left", ncols=2)
        style.entitle(figure, title)
    return figure


@dataclass(frozen=True)
class State:
    """The values of the controls: a case's name, a GPU's name."""

    case: str
    gpu: str


@dataclass(frozen=True)
class Course:
    """The data of the explorer. cases: {name: Case}. prices: {GPU: assumed price of a GPU-hour}."""

    cases: dict
    prices: dict


def moved(job, gpu):
    """Return the job with the same layout on another GPU, with that GPU's usual network."""
    other = find_gpu(gpu)
    return replace(job, gpu=other, network_gbps=other.network_gbps)


def both(course, state):
    """Return {GPU: Found}: the job on the GPU it ran on, and on that of the controls."""
    case = course.cases[state.case]
    c = constants.values()
    found = {}
    for job in (case.job, moved(case.job, state.gpu)):
        found[job.gpu.name] = Found(job, *replace(case, job=job).predicted(c))
    return found


def rows(course, state):
    """Return a DataFrame with gpu, part, step_seconds, seed: the parts of a step, predicted."""
    found = []
    for gpu, one in both(course, state).items():
        seconds_of = dict.fromkeys(KINDS.values(), 0.0)
        for part, seconds in one.step.parts.items():
            seconds_of[KINDS[part]] += seconds
        found += [
            {"gpu": gpu, "part": kind, "step_seconds": seconds, "seed": 0}
            for kind, seconds in seconds_of.items()
        ]
    return pd.DataFrame(found)


def draw(course, state):
    found = list(both(course, state).values())
    faster = found[0].seconds / found[-1].seconds
    title = f"{state.case}: {faster:.2f} times as fast on {found[-1].job.gpu.name}"
    figure = stacked_bars(rows(course, state), "step_seconds", "gpu", "part", "seed", title)
    figure.axes[0].set_xlabel("a step (s)")
    return figure


def takeaway(course, state):
    """Return the days, GPU-hours, money and memory of a trillion tokens on that GPU, as text."""
    found = list(both(course, state).values())
    own = found[0]
    other = found[-1]
    price = course.prices[state.gpu]
    cost = bill(other, TRILLION, price)
    faster = own.seconds / other.seconds
    fits = "fits" if other.peak.fits else "does not fit, as predicted,"
    return (
        f"{state.case}, its layout on {other.job.gpu.name}: {faster:.2f} times the speed on "
        f"{own.job.gpu.name}. A trillion tokens take {cost['days']:,.1f} days, "
        f"{cost['gpu_hours']:,.0f} GPU-hours, which cost {cost['money']:,.0f} at an assumed "
        f"{price:g} each. {other.peak.total:.0f} GiB {fits} in {other.peak.memory:.0f} GiB."
    )


def explorer(course, state, provenance):
    """Show a job on another GPU: figure, takeaway, table, controls. Returns Explorer.

    provenance: begins with "predicted".
    """
    shown = rows(course, state).pivot(index="gpu", columns="part", values="step_seconds")
    shown = shown[list(dict.fromkeys(KINDS.values()))]
    row = {
        "case": controls.menu("job", list(course.cases), state.case),
        "gpu": controls.menu("on", list(course.prices), state.gpu),
    }
    return explore(
        state,
        [row],
        partial(draw, course),
        partial(takeaway, course),
        provenance,
        shown.map("{:.2f} s".format).reset_index(),
        f"{state.case}, a step",
        "Move a control: the step is drawn here.",
    )
