"""Randomness as part of a checkpoint: this rank's generators, so that dropout goes on as it would.

saved by n ranks, loaded by n    each takes its own
loaded by another number         each starts a stream of its own, from rank 0's state and its
                                 rank: new, but the same whenever that checkpoint is loaded
"""

import hashlib
import json
import random

import numpy as np
import torch


class RandomState:
    """torch's, numpy's and Python's generators, and a GPU's. device: this rank's."""

    def __init__(self, device="cpu"):
        self.device = torch.device(device)

    def state_dict(self):
        """As text, which keeps every bit."""
        kind, keys, *rest = np.random.get_state()
        state = {
            "torch": torch.get_rng_state().numpy().tobytes().hex(),
            "numpy": [kind, keys.tolist(), *rest],
            "python": random.getstate(),
        }
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device).numpy().tobytes().hex()
        return {"generators": json.dumps(state)}

    def load_state_dict(self, state):
        """Takes the generators as they were on this rank."""
        state = json.loads(state["generators"])
        torch.set_rng_state(as_tensor(state["torch"]))
        np.random.set_state(state["numpy"])
        version, keys, gauss = state["python"]
        random.setstate((version, tuple(keys), gauss))
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(as_tensor(state["cuda"]), self.device)

    def load_of_other_ranks(self, state, rank):
        """Where another number of ranks has saved. state: rank 0's."""
        told = hashlib.sha256(f"{rank} {state['generators']}".encode()).digest()
        seed = int.from_bytes(told[:4], "big")
        torch.manual_seed(seed)  # GPUs as well
        np.random.seed(seed)
        random.seed(seed)


def as_tensor(text):
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
