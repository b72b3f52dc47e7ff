"""A model whose matrices are split over ranks, against one process that has them whole, and against DTensor."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from labkit import comm, sequence_parallel, tensor_parallel
from labkit.ddp import DDP
from labkit.mesh import Mesh
from labkit.models.gpt import GPT
from labkit.tensor_parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    VocabularyParallelCrossEntropy,
    full_state_dict,
    load_full_state_dict,
    parallelize_module,
    vocabulary_parallel_cross_entropy,
)

F64 = torch.float64
VOCAB, CONTEXT, BATCH, WIDTH, LAYERS = 24, 12, 2, 24, 2
OURS = SimpleNamespace(**{**vars(sequence_parallel), **vars(tensor_parallel)})


def gpt(seed, **options):
    torch.manual_seed(seed)
    settings = {"vocab": VOCAB, "context": CONTEXT, "layers": LAYERS, "heads": 12, "width": WIDTH}
    return GPT(**(settings | options)).to(F64)


def plan(styles, head=True):
    """Every matrix of a GPT, in the words of either library."""
    column, row = styles.ColwiseParallel, styles.RowwiseParallel
    return {
        "token_embedding": row(input_layouts=styles.Replicate()),
        "blocks.*.attention.query_key_value": column(),
        "blocks.*.attention.output": row(),
        "blocks.*.network.0": column(),
        "blocks.*.network.2": row(),
        "head": column() if head else column(output_layouts=styles.Replicate()),
    }


def batches(steps):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (steps, BATCH, CONTEXT + 1), generator=generator)
    return [(one[:, :-1], one[:, 1:]) for one in tokens]


def train(model, loss, steps=4):
    """Losses of SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for tokens, targets in batches(steps):
        optimizer.zero_grad()
        found = loss(model(tokens), targets)
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses


def whole_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def furthest(ours, theirs):
    """The largest difference of two state dicts, or lists."""
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def alone(**options):
    model = gpt(0, **options)
    losses = train(model, whole_loss)
    return losses, model.state_dict()


def split(rank, world_size, **options):
    """Other weights on every rank at first; rank 0's are the ones that count."""
    model = parallelize_module(gpt(rank, **options), None, plan(OURS))
    losses = train(model, VocabularyParallelCrossEntropy())
    return losses, full_state_dict(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_it_trains_as_one_process(ranks, world_size, tied):
    losses, weights = alone(tied=tied)
    for found, state in ranks(world_size, split, tied=tied):
        assert furthest(found, losses) < 1e-12 and furthest(state, weights) < 1e-12
