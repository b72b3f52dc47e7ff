"""Random state in a checkpoint: this rank's generators, so that dropout continues as before.

saved by n ranks, loaded by n    each rank loads its own
loaded by another number         each rank derives a new stream from rank 0's state and its rank:
                                 the same one whenever that checkpoint is loaded
loaded by another mesh           likewise; ranks along the tp axis, which draw the same numbers,
                                 get the same stream
"""

import hashlib
import json
import random

import numpy as np
import torch
import torch.distributed as dist

from labkit import comm


class RandomState:
    """The generators of torch, numpy, Python and a GPU. device: this rank's.

    mesh: a labkit.mesh.Mesh, if the model is distributed over one.
    """

    def __init__(self, device="cpu", mesh=None):
        self.device = torch.device(device)
        axes = mesh.axes if mesh else {}
        self.mesh = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
        self.alike = mesh.group("tp") if "tp" in axes else None

    def state_dict(self):
        """Return the state as text, which keeps every bit."""
        kind, keys, *rest = np.random.get_state()
        state = {
            "torch": torch.get_rng_state().numpy().tobytes().hex(),
            "numpy": [kind, keys.tolist(), *rest],
            "python": random.getstate(),
        }
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device).numpy().tobytes().hex()
        return {"generators": json.dumps(state)} | ({"mesh": self.mesh} if self.mesh else {})

    def load_state_dict(self, state):
        """Restore the generators of this rank, saved on the same mesh."""
        if state.get("mesh", "") != self.mesh:
            return self.load_of_other_ranks(state, dist.get_rank())
        state = json.loads(state["generators"])
        torch.set_rng_state(as_tensor(state["torch"]))
        np.random.set_state(state["numpy"])
        version, keys, gauss = state["python"]
        random.setstate((version, tuple(keys), gauss))
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(as_tensor(state["cuda"]), self.device)

    def load_of_other_ranks(self, state, rank):
        """Load a state saved by another number of ranks or another mesh. state: of any rank."""
        digest = hashlib.sha256(f"{rank} {state['generators']}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big")
        if self.alike is not None:
            first = torch.tensor(seed, device=self.device)
            comm.broadcast(first, 0, self.alike)
            seed = first.item()
        torch.manual_seed(seed)  # GPUs as well
        np.random.seed(seed)
        random.seed(seed)


def as_tensor(text):
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
