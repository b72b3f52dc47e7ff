"""A rehearsal: the lab's own code as one rank of n, with nobody at the other end and no data.

    rank 5 of 1,024     DDP(gpt) --> all_reduce [tensor without data] --> PyTorch's fake group
                                                                          returns at once
    told: every message in its order, with its group and bytes; what is alive at most, by kind

Nothing is computed and nothing is sent, so one process on a laptop can be any rank of any number;
what is counted is what the code does there, not a formula. It takes Python's share of the step, and
the memory of messages that hold no numbers of the model (their hashes, their names).

Not seen: times; what depends on values (which expert a token goes to, a loss that overflows); what
a backend holds for itself. Attention is the kernel of CPUs, where these have one. Nobody tells a
pipeline's stages what they will be sent: they work it out in their first step, a forward of all.
"""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # messages of tensors without data
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed import fake_pg  # noqa: F401  the backend "fake"

from labkit import comm
from labkit.measure.memory_tracker import MemoryTracker

BACKEND = "cpu:fake,meta:fake"


class Fused(TorchFunctionMode):
    """Attention on the meta device, which would keep its weights, as on a CPU without."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        options = kwargs or {}
        if function is F.scaled_dot_product_attention and args[0].is_meta:
            given = {name: value for name, value in options.items() if value}
            if len(args) == 3 and given.keys() <= {"is_causal", "scale"}:
                kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
                return kernel(*args, **given)[0]
        return function(*args, **options)


@dataclass(frozen=True)
class Rehearsed:
    """What one rank does.

    events: [labkit.comm.Event], in order, without times. peak: {kind: bytes} at the moment when
    most is alive. result: what the job returned.
    """

    events: list
    peak: dict
    result: object

    @property
    def sent_bytes(self):
        """Of this rank, in all."""
        return sum(event.sent_bytes for event in self.events)

    def totals(self):
        """{(operation, size of its group): (messages, bytes sent)}."""
        found = {}
        for event in self.events:
            key = event.op, event.group_size
            messages, sent = found.get(key, (0, 0))
            found[key] = messages + 1, sent + event.sent_bytes
        return found


def rehearse(job, ranks, rank=0, **arguments):
    """Call job(device="meta", **arguments) as rank `rank` of `ranks`; returns a Rehearsed.

    job: builds a model on the device, wraps it and steps, as it would under torchrun. It finds its
        rank by torch.distributed.
    Raises ValueError for a rank that is not one of them, RuntimeError in a process that has met
    other ranks already.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks}")
    if dist.is_initialized():
        raise RuntimeError("this process is a rank already: rehearse in one that is not")
    with ExitStack() as stack:
        store = dist.HashStore()
        dist.init_process_group(BACKEND, rank=rank, world_size=ranks, store=store)
        stack.callback(dist.destroy_process_group)
        # without it each group warns that it has no default
        dist.group.WORLD._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        events = stack.enter_context(comm.record())
        stack.enter_context(Fused())
        tracker = stack.enter_context(MemoryTracker(device="meta"))
        result = job(device="meta", **arguments)
    return Rehearsed(events, tracker.peak, result)
