"""Explorer of a checkpoint's cost for a rank: more ranks, a larger model, other strategies.

    ranks v   parameters v                  controls: they predict and save nothing
    [x] DDP [x] ZeRO-1 [x] FSDP             copied to host memory, written to the disk

The picture is a pure function of (predict, state):
predict(strategy, world_size, parameters) -> (bytes that a rank copies, bytes that it writes).
"""

from dataclasses import dataclass
from functools import partial

import pandas as pd

from labkit.show import controls, style
from labkit.show.bars import grouped_bars
from labkit.show.explorer import explore, need_one

RANKS = (1, 2, 4, 8, 16, 64, 256, 1024)
PARAMETERS = (10**6, 10**8, 10**9, 7 * 10**9, 70 * 10**9)


@dataclass(frozen=True)
class State:
    """The values of the controls."""

    strategies: tuple
    world_size: int
    parameters: int


def rows(predict, state):
    """Return a DataFrame with strategy, what ("copied", "written"), per_rank_bytes."""
    found = []
    for one in state.strategies:
        sizes = predict(one, state.world_size, state.parameters)
        for what, size in zip(("copied", "written"), sizes, strict=True):
            found.append({"strategy": one, "what": what, "per_rank_bytes": size})
    return pd.DataFrame(found)


def in_words(parameters):
    word, unit = ("billion", 10**9) if parameters >= 10**9 else ("million", 10**6)
    return f"{parameters / unit:.3g} {word}"


def headline(state):
    ranks = "1 rank" if state.world_size == 1 else f"{state.world_size:,} ranks"
    return f"{ranks}, {in_words(state.parameters)} parameters"


def draw(predict, state):
    """Return a Figure with two bars for each strategy. ValueError without a strategy."""
    need_one(state.strategies, "strategy")
    shown = rows(predict, state)
    return grouped_bars(shown, "per_rank_bytes", group="what", title=headline(state))


def takeaway(predict, state):
    """Return the bytes that training waits for, by strategy, and the bytes written, as text."""
    frame = rows(predict, state)
    sizes = {what: mine.set_index("strategy") for what, mine in frame.groupby("what")}
    words = [
        f"{style.quantity(size, 'bytes')} under {style.name(one)}"
        for one, size in sizes["copied"]["per_rank_bytes"].items()
    ]
    most = style.quantity(sizes["written"]["per_rank_bytes"].max(), "bytes")
    return f"{headline(state)}: a rank copies {'; '.join(words)}. It writes {most}."


def explorer(predict, strategies, world_size, parameters):
    """Show copied and written bytes: figure, takeaway, table, controls. Returns Explorer.

    predict: see above. strategies, world_size, parameters: the first choice.
    """
    state = State(tuple(strategies), world_size, parameters)
    small = rows(predict, state).pivot(index="strategy", columns="what", values="per_rank_bytes")
    small = small.loc[list(strategies)].map(lambda size: style.quantity(size, "bytes"))
    small.index = [style.name(one) for one in small.index]
    sizes = [(in_words(size), size) for size in sorted({*PARAMETERS, parameters})]
    above = {
        "world_size": controls.menu("ranks", sorted({*RANKS, world_size}), world_size),
        "parameters": controls.menu("parameters", sizes, parameters),
    }
    return explore(
        state,
        [above, {"strategies": controls.boxes(state.strategies)}],
        partial(draw, predict),
        partial(takeaway, predict),
        "predicted",
        small.reset_index(names="strategy"),
        f"{headline(state)}: bytes of a rank",
        "Move a control: your choice is drawn here.",
    )
