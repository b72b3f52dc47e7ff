"""What compression holds: residuals, and in a step no more than a tenth of the gradient besides the messages."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from labkit import comm
from labkit.compression import COMPRESSORS, Cast, OneBit, Quantize, TopK
from labkit.ddp.bucket import Bucket
from labkit.memory.memory_tracker import MemoryTracker

MAKE = {
    **COMPRESSORS,
    "topk_tensor": partial(TopK, 0.01, per="tensor"),
    "fp16_feedback": partial(Cast, torch.float16, feedback=True),
    "bf16_feedback": partial(Cast, torch.bfloat16, feedback=True),
    "quantize8_feedback": partial(Quantize, 8, feedback=True),
    "quantize4_feedback": partial(Quantize, 4, feedback=True),
    "onebit_forgetful": partial(OneBit, feedback=False),
}


def at_once(collective):
    """The collective, complete when it returns: what follows it then runs on this thread, where the tracker looks."""

    def launch(*arguments, **settings):
        work = collective(*arguments, **settings)
        if settings.get("async_op"):
            work.get_future().wait()
        return work

    return launch


def held(rank, world_size, make):
    """(state, the most that a step adds, messages), in bytes over those of the gradient.

    Messages: this rank's own, and where they are gathered those of all ranks.
    """
    compressor, bucket = make(), Bucket([nn.Parameter(torch.zeros(2000, 2000))])
    generator = torch.Generator().manual_seed(rank)
    now = {name: at_once(getattr(comm, name)) for name in ("all_gather", "all_reduce")}
    with mock.patch.multiple(comm, **now):
        for _ in range(2):  # the first compares the settings and makes what stays
            bucket.buffer().copy_(torch.randn(bucket.numel, generator=generator))
            with MemoryTracker() as tracker, comm.record() as log:
                compressor.hook(None, bucket).wait()
    gathered = [1 + 1 / world_size if event.op == "all_gather" else 1 for event in log]
    messages = sum(event.payload_bytes * share for event, share in zip(log, gathered, strict=True))
    state = sum(t.nbytes for t in tree_leaves(compressor.state_dict()) if isinstance(t, torch.Tensor))
    return [size / bucket.nbytes for size in (state, tracker.peak_total, messages)]


@pytest.mark.parametrize("name", MAKE)
def test_besides_state_and_messages_a_step_needs_a_tenth_of_the_gradient(ranks, name):
    for rank, (_, step, messages) in enumerate(ranks(4, held, make=MAKE[name])):
        assert step - messages <= 0.1, f"rank {rank}"


@pytest.mark.parametrize("name", COMPRESSORS)
def test_on_two_ranks_all_of_it_is_a_residual_and_a_tenth(ranks, name):
    for rank, (state, step, _) in enumerate(ranks(2, held, make=MAKE[name])):
        assert state + step <= max(1, state) * 1.1, f"rank {rank}"
