"""Explorer of plans: memory and step time by model, GPU and number of GPUs.

    memory of a GPU   |states     |activations  |runtime     :  |   dashed: what may be used
    time of a step    |layers                    |messages|bubble|

    explorer: model, GPU, how many of them, precision

A control must answer at once, so few layouts are tried: no context parallelism, no replicas, ZeRO 1
or 3, three numbers of virtual stages, the three smallest micro-batches. labkit.scale.plan tries all
layouts, and its result is never slower than this one.
"""

import html
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice

from labkit.scale import constants
from labkit.scale.cluster import Cluster
from labkit.scale.explain import KINDS, words
from labkit.scale.plan import bill, row_of
from labkit.scale.search import first_to_fit, space_of
from labkit.scale.validate_args import check_precision
from labkit.show import controls, style
from labkit.show.bars import stack
from labkit.show.explorer import Explorer
from labkit.show.publish import present

MICRO_BATCHES = 3
FEW = "the fastest of few layouts"
LEAST = 0.01  # a part smaller than this share of a bar is not drawn
COLOURS = dict(zip(KINDS, style.CYCLE, strict=False))


@dataclass(frozen=True)
class Job:
    """The data of the explorer. batches: {model: sequences per step}. gpus: their names.

    sizes: numbers of GPUs. tokens: of the run. spare: share of memory to leave free.
    """

    batches: dict
    gpus: tuple
    sizes: tuple
    precisions: tuple
    tokens: float
    spare: float = 0.1


@dataclass(frozen=True)
class State:
    """The values of the controls."""

    model: str
    gpu: str
    gpus: int
    precision: str = "bf16"


def narrowed(space, n, c):
    """Return (the fastest Found of few layouts on n GPUs or None, the smallest refused or None).

    refused: (Peak, Job) of a job that does not fit.
    """
    best = None
    refused = []
    for layout in space.layouts(n):
        thinnest = layout.shape.layers // layout.pp
        for jobs in () if layout.zero == 2 else space.batches(layout):
            for job in islice(jobs, MICRO_BATCHES):
                if job.vpp not in (1, thinnest // 2, thinnest):
                    break
                within = best.seconds if best else float("inf")
                found = first_to_fit(space, job, c, within, refused)
                if found is None:
                    break
                best = found or best
    return best, min(refused, key=lambda one: one[0].total, default=None)


@lru_cache
def planned(model, batch, gpu, gpus, precision, spare):
    """Return narrowed() of a named model on `gpus` GPUs. ValueError if they lack the precision."""
    cluster = Cluster(gpu, gpus)
    check_precision(precision, cluster.device)
    space = space_of(row_of(model), cluster, global_batch=batch, spare=spare,
                     uneven=False, precision=precision, framework="", cp=1, replicas=1)  # fmt: skip
    return narrowed(space, gpus, constants.values())


def answer(job, state):
    """Return narrowed() of the state: (Found or None, (Peak, Job) or None)."""
    batch = job.batches[state.model]
    return planned(state.model, batch, state.gpu, state.gpus, state.precision, job.spare)


def memory(peaks, spare, title=None):
    """Return a Figure: GiB by kind for each {name: Peak}, a GPU's memory and its usable part."""
    with style.look():
        figure, axes = style.new_figure(8.0, 1.9 + 0.42 * len(peaks))
        draw_memory(axes, peaks, spare)
        style.entitle(figure, title)
    return figure


def draw_memory(axes, peaks, spare):
    has = next(iter(peaks.values())).memory
    stacks = {name: {kind: getattr(peak, kind) for kind in KINDS} for name, peak in peaks.items()}
    draw_stacks(axes, stacks, COLOURS, "GiB")
    axes.axvline(has, color=style.RED, linewidth=1.6)
    axes.axvline((1 - spare) * has, color=style.RED, linewidth=1.2, linestyle="--")
    axes.set_xlim(0, 1.12 * max(has, *(peak.total for peak in peaks.values())))
    axes.set_xlabel(f"memory of a GPU (GiB); red: its {has:g}, dashed: {1 - spare:.0%} of it")


def draw_stacks(axes, stacks, colours, unit):
    """Draw bars of {name: {part: size}}, totals at the right. colours: {part: colour}."""
    parts, small = {}, [0.0] * len(stacks)
    for part, colour in colours.items():
        sizes = [of_stack.get(part, 0.0) for of_stack in stacks.values()]
        if max(sizes) > LEAST * max(sum(of_stack.values()) for of_stack in stacks.values()):
            parts[part] = (sizes, colour)
        else:
            small = [both + size for both, size in zip(small, sizes, strict=True)]
    if any(small):
        parts["other"] = (small, style.FAINT)
    stack(axes, range(len(stacks)), parts, 0.62)
    for row, sizes in enumerate(stacks.values()):
        end = sum(sizes.values())
        right = {"xycoords": ("axes fraction", "data"), "size": 10, "weight": "bold"}
        style.beside(axes, f"{end:,.3g} {unit}", (1, row), (4, 0), **right)
    axes.set_yticks(range(len(stacks)), list(stacks))
    axes.set_ylim(len(stacks) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    look = {"handlelength": 0.9, "columnspacing": 1.2, "handletextpad": 0.5}
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False, **look)


def headline(state):
    return f"{state.model} on {state.gpus:,} x {state.gpu}, {state.precision}"


def draw(job, state):
    """Return a Figure: memory by kind and the parts of a step; if none fits, the least memory."""
    found, refused = answer(job, state)
    peak = found.peak if found else refused[0]
    with style.look():
        figure, axes = style.new_figure(8.0, 3.6 if found else 2.3, rows=2 if found else 1)
        above = axes[0] if found else axes
        draw_memory(above, {"memory": peak}, job.spare)
        if found:
            spent = found.step.parts
            draw_stacks(axes[1], {"step": spent}, style.palette(spent), "s")
            axes[1].set_xlim(0, 1.12 * found.seconds)
            axes[1].set_xlabel("time of a step (s)")
        style.entitle(figure, f"{headline(state)}, predicted: {FEW if found else 'too large'}")
    return figure


def takeaway(job, state):
    """Return as text the fastest layout with its memory and time; or why there is none."""
    try:
        found, refused = answer(job, state)
    except ValueError as error:  # the GPU does not have the precision
        return f"{headline(state)}: {error}."
    if found is None:
        peak, least = refused
        usable = (1 - job.spare) * peak.memory
        more = f"{peak.largest} alone {getattr(peak, peak.largest):.1f}"
        return (
            f"{headline(state)}: none of the few layouts tried fits; the least is "
            f"{peak.total:.1f} GiB a GPU ({more}) of the {usable:.1f} to be used: {words(least)}."
        )
    cost = bill(found, job.tokens)
    return (
        f"{headline(state)}, {FEW}: {words(found.job)}; "
        f"{style.quantity(found.seconds, 's')} a step, {found.peak.total:.1f} GiB a GPU, "
        f"{cost['days']:,.3g} days and {cost['gpu_hours']:,.0f} GPU-hours for "
        f"{job.tokens:.3g} tokens."
    )


def picture(job, state):
    """Return the same as `draw`, as HTML, which is faster than matplotlib."""
    try:
        found, refused = answer(job, state)
    except ValueError:
        return f"<p>{html.escape(takeaway(job, state))}</p>"
    peak = found.peak if found else refused[0]
    held = {kind: getattr(peak, kind) for kind in KINDS}
    bars = [bar(held, COLOURS, "GiB", max(peak.memory, peak.total), (1 - job.spare) * peak.memory)]
    if found:
        spent = found.step.parts
        bars.append(bar(spent, style.palette(spent), "s", found.seconds))
    return f"{''.join(bars)}<p>{html.escape(takeaway(job, state))}</p>"


def bar(sizes, colours, unit, whole, limit=None):
    """Return one bar of parts as HTML, named beneath. limit: where a red line is drawn."""
    shown = {part: size for part, size in sizes.items() if size > LEAST * sum(sizes.values())}
    pieces = "".join(
        f'<div style="width:{100 * size / whole:.2f}%;background:{colours[part]}"></div>'
        for part, size in shown.items()
    )
    line = "" if limit is None else f"left:{100 * limit / whole:.2f}%;border-left:2px dashed "
    line = line and f'<div style="position:absolute;height:28px;{line}{style.RED}"></div>'
    names = " &emsp; ".join(
        f'<span style="color:{colours[part]}">&#9632;</span> {part} {size:.3g} {unit}'
        for part, size in shown.items()
    )
    outline = "position:relative;display:flex;max-width:760px;height:28px;border:1px solid #8888"
    words = f"{sum(sizes.values()):.3g} {unit}, dashed: {limit:.3g}" if limit else f"{whole:.3g} s"
    return f'<div style="{outline}">{pieces}{line}</div><p><b>{words}</b> &emsp; {names}</p>'


def explorer(job, state, provenance):
    """Show a plan: figure, takeaway, controls. Returns Explorer.

    provenance: begins with "predicted".
    """
    words = takeaway(job, state)
    present(draw(job, state), words, provenance, words)
    counts = [(f"{size:,}", size) for size in job.sizes]
    row = {
        "model": controls.menu("model", list(job.batches), state.model),
        "gpu": controls.menu("GPU", job.gpus, state.gpu),
        "gpus": controls.menu("how many", counts, state.gpus),
        "precision": controls.menu("precision", job.precisions, state.precision),
    }
    hint = "Move a control: the plan is drawn here."
    return Explorer(state, [row], partial(picture, job), hint).show()
