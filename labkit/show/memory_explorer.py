"""Explorer of memory by kind: stage, world size, precision and batch.

    model v   ranks v   precision v   batch v   GPU v     controls: they launch nothing
    [x] DDP [x] ZeRO-1 [x] ZeRO-2 [x] FSDP    stages side by side; a line where a rank's memory ends

The picture is a pure function of (predict, state):
predict(stage, world_size, precision, batch) -> bytes by kind. With several models there is one
such function for each.
"""

import functools
from dataclasses import dataclass

import pandas as pd

from labkit.memory import PRECISIONS, estimate
from labkit.memory.memory_tracker import KINDS
from labkit.show import controls, style
from labkit.show.bars import memory_bars
from labkit.show.explorer import explore, need_one

STAGES = ("ddp_bucketed", "zero1", "zero2", "fsdp")


@dataclass(frozen=True)
class State:
    """The values of the controls. batch: samples per rank. capacity: bytes of a rank, or None.

    model: a key of `predict` if that is a dict, else None.
    """

    stages: tuple
    world_size: int
    precision: str
    batch: int
    capacity: int | None = None
    model: str | None = None


def predictor(module, batch_of, loss=None, unit=None, device=None, **options):
    """Return a function (stage, world_size, precision, batch) -> bytes by kind at the peak.

    batch_of: function batch size -> (input, target), which may be on the meta device.
    unit, device, options: those of labkit.memory.estimate.
    """

    @functools.cache
    def predict(stage, world_size, precision, batch):
        input, target = batch_of(batch)
        how = {"precision": precision, "target": target, "unit": unit, "device": device}
        return estimate(module, input, loss, stage, world_size, **how, **options).peak

    return predict


def rows(predict, state):
    """Return a DataFrame with a row per stage: its bytes by kind and their sum, `total`."""
    predict = predict if state.model is None else predict[state.model]
    found = [
        {"stage": one, **predict(one, state.world_size, state.precision, state.batch)}
        for one in state.stages
    ]
    frame = pd.DataFrame(found)
    return frame.assign(total=frame[list(KINDS)].sum(axis=1))


def headline(state):
    ranks = "1 rank" if state.world_size == 1 else f"{state.world_size} ranks"
    samples = "1 sample" if state.batch == 1 else f"{state.batch} samples"
    model = "" if state.model is None else f"{state.model}, "
    return f"{model}{ranks}, {state.precision}, {samples} each"


def draw(predict, state):
    """Return a Figure with a stacked bar per stage and a line at the capacity.

    Raises ValueError without a stage.
    """
    need_one(state.stages, "stage")
    shown = rows(predict, state)
    capacity = state.capacity or 0
    columns = shown[["stage", *KINDS]]
    figure = memory_bars(columns, title=headline(state), label="stage", up_to=capacity)
    if state.capacity is not None:
        axes = figure.axes[0]
        at = state.capacity / style.byte_scale(shown["total"].max())[0]
        axes.axvline(at, color=style.RED, linewidth=1.6, zorder=2)  # over the bars, under the words
        line = axes.transData.transform((at, 0))[0]
        for words in axes.texts:
            words.set_zorder(5)
            box = words.get_window_extent()
            if words.get_weight() == "bold" and box.x0 - 4 < line < box.x1 + 4:
                right, up = words.xyann  # move a sum behind the line that would cross it
                words.xyann = (right + (line - box.x0) * 72 / figure.dpi + 6, up)
        words = f"a rank has {style.quantity(state.capacity, 'bytes')}"
        place = {"xytext": (4, 3), "textcoords": "offset points", "color": style.RED, "size": 9}
        axes.annotate(words, (at, axes.get_ylim()[1]), annotation_clip=False, **place)
    return figure


def takeaway(predict, state):
    """Return as text the most and the least bytes, and the first stage that fits."""
    frame = rows(predict, state)
    most = frame.loc[frame["total"].idxmax()]
    least = frame.loc[frame["total"].idxmin()]
    words = (
        f"{headline(state)}: {style.quantity(most['total'], 'bytes')} a rank "
        f"for {style.name(most['stage'])}"
    )
    if most["total"] > least["total"]:
        words += f", {style.quantity(least['total'], 'bytes')} for {style.name(least['stage'])}"
        words += f", {most['total'] / least['total']:.1f} times less"
    if state.capacity is None:
        return words + "."
    fits = frame[frame["total"] <= state.capacity]
    room = style.quantity(state.capacity, "bytes")
    first = (
        f"The first to fit into {room} is {style.name(fits['stage'].iloc[0])}." if len(fits) else ""
    )
    return f"{words}. {first or f'None of them fits into {room}.'}"


def explorer(
    predict,
    world_size=4,
    precision="fp32",
    batch=8,
    capacity=None,
    stages=STAGES,
    world_sizes=(1, 2, 4, 8, 16, 64),
    precisions=tuple(PRECISIONS),
    batches=(1, 2, 4, 8, 16, 32, 64),
    model=None,
    capacities=None,
):
    """Show memory by kind and stage: figure, takeaway, table, then the controls. Returns Explorer.

    predict: from predictor(), or any function (stage, world_size, precision, batch) -> bytes by
    kind; or {name of a model: such a function}, of which `model` is the first choice. Results are
    cached.
    The controls offer world_sizes, precisions and batches, to which the first choice is added.
    capacity: bytes of a rank. capacities: {text: bytes} of a menu; None: no menu.
    """
    if model is None:
        predict = functools.cache(predict)
    else:
        predict = {name: functools.cache(function) for name, function in predict.items()}
    state = State(tuple(stages), world_size, precision, batch, capacity, model)
    precisions = list(dict.fromkeys([*precisions, precision]))
    above = {
        "world_size": controls.menu("ranks", sorted({*world_sizes, world_size}), world_size),
        "precision": controls.menu("precision", precisions, precision),
        "batch": controls.menu("samples a rank", sorted({*batches, batch}), batch),
    }
    if model is not None:
        above = {"model": controls.menu("model", list(predict), model), **above}
    if capacities is not None:
        offered = list(capacities.items())
        above["capacity"] = controls.menu("memory of a GPU", offered, capacity)
    return explore(
        state,
        [above, {"stages": controls.boxes(state.stages)}],
        functools.partial(draw, predict),
        functools.partial(takeaway, predict),
        "predicted",
        small(rows(predict, state)),
        f"{headline(state)}: bytes of a rank at the peak",
        "Move a control: the memory of your choice is drawn here.",
    )


def small(frame):
    """Return a DataFrame of texts: a row per stage, its bytes by kind."""
    texts = pd.DataFrame({"stage": [style.name(one) for one in frame["stage"]]})
    for kind in (*[k for k in KINDS if frame[k].max() > 0], "total"):
        texts[style.name(kind)] = [style.quantity(value, "bytes") for value in frame[kind]]
    return texts
