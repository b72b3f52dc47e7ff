"""The oracle tests of the CPU, run again on a GPU: their own bodies, with what they and the models make put there.

Random numbers are drawn on the CPU and moved, so that a body sees the same ones on both.
"""

import datetime
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map_only

TESTS = str(Path(__file__).resolve().parents[1])  # with their helpers
MADE_BY = ("torch.nn.modules", "labkit.models")  # the rest of labkit says where its tensors are to be
RANDOM = {getattr(torch.Tensor, name) for name in ("uniform_", "normal_", "random_", "bernoulli_")}


class Elsewhere(TorchFunctionMode):
    """Tensors that are made without a device are made on this one."""

    def __init__(self, device):
        super().__init__()
        self.device, self.constructors = device, _device_constructors() | {torch.from_numpy, torch.frombuffer}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":  # comes once, with the whole initialiser
            return drawn_on_the_cpu(function, **kwargs)
        if function in RANDOM and args[0].device.type != "cpu":
            return args[0].copy_(function(torch.empty_like(args[0], device="cpu"), *args[1:], **kwargs))
        made = function(*args, **kwargs)
        caller = sys._getframe(1)
        ours = caller.f_code.co_filename.startswith(TESTS) or caller.f_globals["__name__"].startswith(MADE_BY)
        if function not in self.constructors or kwargs.get("device") is not None or not ours:
            return made
        return made.detach().to(self.device).requires_grad_(made.requires_grad)


@torch.no_grad()
def drawn_on_the_cpu(initialiser, tensor, **kwargs):
    return tensor.copy_(initialiser(tensor.to("cpu", copy=True), **kwargs))


@contextmanager
def group_of_one(device, folder):
    """ranks(n, body, **arguments), as of conftest.py, but one rank whatever n: this process. On a GPU with NCCL."""
    on_cuda = device == "cuda"
    store = dist.FileStore(str(folder / uuid.uuid4().hex), 1)
    where = {"device_id": torch.device("cuda", 0)} if on_cuda else {}
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("nccl" if on_cuda else "gloo", store=store, rank=0, world_size=1, timeout=timeout, **where)

    def ranks(n, body, **arguments):
        torch.manual_seed(0)
        return [body(0, 1, **arguments)]

    try:
        with Elsewhere(device), torch.backends.cudnn.flags(deterministic=True):  # bodies compare bitwise
            yield ranks
    finally:
        dist.destroy_process_group()


def on_the_same_gpu(rank, world_size, body, arguments):
    """A body for a rank of tests/pool.py, whose gloo then sends CUDA tensors. Its result is returned on the CPU."""
    torch.cuda.set_device(0)
    with Elsewhere("cuda"):
        told = body(rank, world_size, **arguments)
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, told)
