"""Explorer of the planner: a model, a number of GPUs, their kind and their network, and the answer.

model v  GPUs v  GPU v  network v
( Answer )                         plans in up to four seconds; a control alone plans nothing
1. FSDP over 64 GPUs, ...          the sentences of labkit.scale.answer, all predicted
"""

import html
from dataclasses import dataclass

from labkit.scale.answer import answer
from labkit.scale.hardware import GPUS
from labkit.scale.model_row import models
from labkit.show import controls
from labkit.show.explorer import Explorer

COUNTS = (1, 8, 16, 64, 128, 256, 512, 1024, 4096, 16384)
NETWORKS = (25, 50, 100, 200, 400, 800)  # Gbit/s of a GPU
HINT = "Choose, then press Answer."


@dataclass(frozen=True)
class State:
    """The values of the controls. network: Gbit/s of each GPU."""

    model: str = "llama3-8b"
    gpus: int = 64
    gpu: str = "h100-80gb"
    network: int = 400


class Plans:
    """The answers so far, by State."""

    def __init__(self):
        self.known = {}

    def plan(self, state):
        """Ask the planner; return a message for the button. Raises ValueError as answer() does."""
        told = answer(state.model, gpus=state.gpus, gpu=state.gpu, network=state.network)
        self.known[state] = told.sentences()
        return "predicted"

    def picture(self, state):
        """Return the sentences of a state as HTML; ValueError if it was not planned."""
        if state not in self.known:
            where = f"{state.gpus:,} x {state.gpu}, {state.network} Gbit/s a GPU"
            raise ValueError(f"{state.model} on {where}: press Answer.")
        return "".join(f"<p>{html.escape(words)}</p>" for words in self.known[state])


def explorer():
    """Return the explorer of the planner, as an Explorer that is not displayed yet."""
    state = State()
    networks = [(f"{speed} Gbit/s a GPU", speed) for speed in NETWORKS]
    menus = {
        "model": controls.menu("model", list(models()), state.model),
        "gpus": controls.menu("GPUs", [(f"{n:,}", n) for n in COUNTS], state.gpus),
        "gpu": controls.menu("GPU", list(GPUS), state.gpu),
        "network": controls.menu("network", networks, state.network),
    }
    plans = Plans()
    return Explorer(state, [menus], plans.picture, HINT, run=plans.plan, words="Answer")
