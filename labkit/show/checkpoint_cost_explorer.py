"""What a checkpoint costs a rank, in the hand: more ranks, a larger model, other strategies.

    [ figure ] one-line takeaway, table     ordinary outputs: GitHub, batch runs, offline too
    ranks v   parameters v                  controls: what they ask is predicted, nothing is saved
    [x] DDP [x] ZeRO-1 [x] FSDP             copied to host memory, written to the disk

What is drawn is a pure function of (predict, state):
predict(strategy, world_size, parameters) -> (bytes that a rank copies, bytes that it writes).
"""

from dataclasses import dataclass, replace

import ipywidgets
import pandas as pd

from labkit.show import controls, style
from labkit.show.bars import grouped_bars
from labkit.show.notebook import table
from labkit.show.publish import as_html, present

RANKS = (1, 2, 4, 8, 16, 64, 256, 1024)
PARAMETERS = (10**6, 10**8, 10**9, 7 * 10**9, 70 * 10**9)


@dataclass(frozen=True)
class State:
    """What the controls say."""

    strategies: tuple
    world_size: int
    parameters: int


def rows(predict, state):
    """DataFrame strategy, what ("copied", "written"), per_rank_bytes."""
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
    """Figure: two bars for each strategy. ValueError without a strategy."""
    if not state.strategies:
        raise ValueError("no strategy to draw: choose at least one")
    shown = rows(predict, state)
    return grouped_bars(shown, "per_rank_bytes", group="what", title=headline(state))


def takeaway(predict, state):
    """One sentence: what each strategy lets training wait for, and what a rank writes."""
    frame = rows(predict, state)
    sizes = {what: mine.set_index("strategy") for what, mine in frame.groupby("what")}
    words = [
        f"{style.quantity(size, 'bytes')} under {style.name(one)}"
        for one, size in sizes["copied"]["per_rank_bytes"].items()
    ]
    most = style.quantity(sizes["written"]["per_rank_bytes"].max(), "bytes")
    return f"{headline(state)}: a rank copies {'; '.join(words)}. It writes {most}."


def picture(predict, state):
    """The widget's image as HTML with alt text; a sentence where there is nothing to draw."""
    if not state.strategies:
        return "<p>Tick at least one strategy.</p>"
    return as_html(takeaway(predict, state), draw(predict, state))


class Explorer:
    """The controls and their state. `.panel` is the widget, `.image` what it shows."""

    def __init__(self, predict, state):
        self.predict, self.state = predict, state
        ranks, sizes = sorted({*RANKS, state.world_size}), sorted({*PARAMETERS, state.parameters})
        self.world_size = controls.menu("ranks", ranks, state.world_size)
        named = [(in_words(size), size) for size in sizes]
        self.parameters = controls.menu("parameters", named, state.parameters)
        self.boxes = controls.boxes(state.strategies)
        above = (self.world_size, self.parameters)
        controls.observe(self.changed, (*above, *self.boxes.values()))
        self.image = ipywidgets.HTML("<p>Move a control: your choice is drawn here.</p>")
        parts = [controls.row(above), controls.row(self.boxes.values()), self.image]
        self.panel = ipywidgets.VBox(parts)

    def changed(self, change=None):
        """Read the controls and draw anew."""
        self.state = replace(
            self.state,
            strategies=controls.ticked(self.boxes),
            world_size=self.world_size.value,
            parameters=self.parameters.value,
        )
        self.image.value = picture(self.predict, self.state)


def explorer(predict, strategies, world_size, parameters):
    """Show copied and written bytes: figure, takeaway, table, then the controls. An Explorer."""
    state = State(tuple(strategies), world_size, parameters)
    words = takeaway(predict, state)
    present(draw(predict, state), words, "predicted", words)
    small = rows(predict, state).pivot(index="strategy", columns="what", values="per_rank_bytes")
    small = small.loc[list(strategies)].map(lambda size: style.quantity(size, "bytes"))
    small.index = [style.name(one) for one in small.index]
    table(small.reset_index(names="strategy"), f"{headline(state)}: bytes of a rank; predicted")
    shown = Explorer(predict, state)
    controls.show(shown.panel)
    return shown
