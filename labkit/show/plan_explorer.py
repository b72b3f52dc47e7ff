"""Explorer of the planner: a model, a number of GPUs, their kind and their network, and the answer.

model v  trained v  documents v  GPUs v  GPU v  network v
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
TRAINED = {  # the options of the command: --lora, --train
    "all parameters": {},
    "LoRA adapters of rank 8": {"lora": 8},
    "LoRA adapters of rank 16": {"lora": 16},
    "LoRA adapters of rank 64": {"lora": 64},
    "all but the image encoder": {"train": "decoder"},
    "the output layer": {"train": "head"},
    "the last 2 layers": {"train": "last:2"},
    "the last 4 layers": {"train": "last:4"},
    "the last 8 layers": {"train": "last:8"},
}
DOCUMENTS = (0, 256, 512, 1024, 2048, 4096)  # tokens, packed: --documents; 0: one a sequence
HINT = "Choose, then press Answer."


@dataclass(frozen=True)
class State:
    """The values of the controls.

    trained: a key of TRAINED. documents: one of DOCUMENTS. network: Gbit/s of each GPU.
    """

    model: str = "llama3-8b"
    trained: str = "all parameters"
    documents: int = 0
    gpus: int = 64
    gpu: str = "h100-80gb"
    network: int = 400


class Plans:
    """The answers so far, by State."""

    def __init__(self):
        self.known = {}

    def plan(self, state):
        """Ask the planner; return a message for the button. Raises ValueError as answer() does."""
        where = {"gpus": state.gpus, "gpu": state.gpu, "network": state.network}
        part = TRAINED[state.trained] | {"documents": state.documents or None}
        told = answer(state.model, **where, **part)
        self.known[state] = told.sentences()
        return "predicted"

    def picture(self, state):
        """Return the sentences of a state as HTML; ValueError if it was not planned."""
        if state not in self.known:
            where = f"{state.gpus:,} x {state.gpu}, {state.network} Gbit/s a GPU"
            part = f", {state.trained}" if TRAINED[state.trained] else ""
            part += f", documents of {state.documents:,} tokens" if state.documents else ""
            raise ValueError(f"{state.model}{part} on {where}: press Answer.")
        return "".join(f"<p>{html.escape(words)}</p>" for words in self.known[state])


def explorer():
    """Return the explorer of the planner, as an Explorer that is not displayed yet."""
    state = State()
    packed = [(f"{n:,} tokens, packed" if n else "one a sequence", n) for n in DOCUMENTS]
    networks = [(f"{speed} Gbit/s a GPU", speed) for speed in NETWORKS]
    menus = {
        "model": controls.menu("model", list(models()), state.model),
        "trained": controls.menu("trained", list(TRAINED), state.trained),
        "documents": controls.menu("documents", packed, state.documents),
        "gpus": controls.menu("GPUs", [(f"{n:,}", n) for n in COUNTS], state.gpus),
        "gpu": controls.menu("GPU", list(GPUS), state.gpu),
        "network": controls.menu("network", networks, state.network),
    }
    plans = Plans()
    return Explorer(state, [menus], plans.picture, HINT, run=plans.plan, words="Answer")
