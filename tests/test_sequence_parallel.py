"""Norms and dropout on shards of the sequence, against one process, DTensor and plain tensor parallelism."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_tensor_parallel import CONTEXT, F64, OURS, VOCAB, WIDTH, alone, furthest, gpt, train, whole_loss
from torch import nn
from torch.nn import functional as F

from labkit import comm
from labkit.measure.memory import MemoryTracker
from labkit.sequence_parallel import SequenceParallel, network
from labkit.tensor_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    Shard,
    VocabularyParallelCrossEntropy,
    full_state_dict,
    parallelize_module,
)


def plan(styles, head=True):
    """Every matrix of a GPT, and on shards of the sequence what is between them."""
    column, row, shard = styles.ColwiseParallel, styles.RowwiseParallel, styles.Shard
    on_shards, whole = styles.SequenceParallel(use_local_output=True), styles.Replicate()
    return {
        "token_embedding": row(input_layouts=whole, output_layouts=shard(1)),
        "position_embedding": row(input_layouts=whole, output_layouts=shard(0)),
        "blocks.*.attention_norm": on_shards,
        "blocks.*.attention": styles.PrepareModuleInput(input_layouts=shard(1), desired_input_layouts=whole),
        "blocks.*.attention.query_key_value": column(),
        "blocks.*.attention.output": row(output_layouts=shard(1)),
        "blocks.*.network_norm": on_shards,
        "blocks.*.network.0": column(input_layouts=shard(1)),
        "blocks.*.network.2": row(output_layouts=shard(1)),
        "norm": on_shards,
        "head": column(input_layouts=shard(1), **({} if head else {"output_layouts": whole})),
    }


def split(rank, world_size, **options):
    model = parallelize_module(gpt(rank, **options), None, plan(OURS))
    losses = train(model, VocabularyParallelCrossEntropy())
    return losses, full_state_dict(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_it_trains_as_one_process(ranks, world_size, tied):
    losses, weights = alone(tied=tied)
    for found, state in ranks(world_size, split, tied=tied):
        assert furthest(found, losses) < 1e-12 and furthest(state, weights) < 1e-12


def by_pytorch(rank, world_size):
    """The same plan, run by DTensor."""
    from torch.distributed import tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    model = gpt(0, tied=False)
    styles = SimpleNamespace(**{**vars(tensor), **vars(parallel)})
    parallel.parallelize_module(model, init_device_mesh("cpu", (world_size,)), plan(styles, head=False))
    losses = train(model, whole_loss)
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}
    ours = parallelize_module(gpt(0, tied=False), None, plan(OURS, head=False))
    return furthest(train(ours, whole_loss), losses), furthest(full_state_dict(ours), whole)


@pytest.mark.parametrize("world_size", [2, 3])
def test_it_trains_as_dtensor(ranks, world_size):
    for losses, weights in ranks(world_size, by_pytorch):
        assert losses < 1e-12 and weights < 1e-12
