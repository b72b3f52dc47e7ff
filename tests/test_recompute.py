"""Recomputation against keeping everything: the same bits, from less memory, whatever the function is and takes."""

from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit import comm, models
from labkit.ddp import DDP
from labkit.models.gpt import Block
from labkit.recompute import checkpoint_every

WIDTH, HEADS, TOKENS, BATCH = 32, 2, 16, 3


def gpt(dropout=0.0, layers=4, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return models.build(
        "gpt", "tiny", layers=layers, width=WIDTH, heads=HEADS, context=TOKENS, vocab=64, dropout=dropout
    ).to(dtype)


def tokens(seed=1, batch=BATCH):
    return torch.randint(64, (batch, TOKENS), generator=torch.Generator().manual_seed(seed))


def gradients(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def step(model, precision=None):
    """The loss, the gradients, and the next random number: what must not change by recomputing."""
    torch.manual_seed(2)
    with torch.autocast("cpu", precision, enabled=precision is not None):
        loss = models.loss("gpt")(model(tokens()), tokens(3))
    loss.backward()
    return loss.item(), gradients(model), torch.rand(1).item()


FORMS = {
    "every block": lambda m: checkpoint_every(m, Block),
    "every second block": lambda m: checkpoint_every(m, Block, 2),
    "products kept": lambda m: checkpoint_every(m, Block, keep="matmul"),
    "nested": lambda m: [checkpoint_every(m, Block), checkpoint_every(m, nn.Sequential, 2)],
    "nested in depth": lambda m: [checkpoint_every(m, kind) for kind in (nn.Linear, Block, type(m.blocks))],
    "nested, products kept": lambda m: [checkpoint_every(m, Block, keep="matmul"), checkpoint_every(m.blocks, Blocks)],
}


def Blocks(part):
    return isinstance(part, nn.Sequential) and isinstance(part[0], Block)


@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("form", FORMS)
def test_recomputing_changes_no_bit(form, dropout, precision):
    oracle = step(gpt(dropout), precision)
    model = gpt(dropout)
    FORMS[form](model)
    loss, found, drawn = step(model, precision)
    assert loss == oracle[0]
    assert same(found, oracle[1])
    assert drawn == oracle[2]  # backward has given the random state back


def averaged(rank, world_size, wrap, options):
    model = gpt(0.2, seed=rank)
    if options is not None:
        checkpoint_every(model, Block, **options)
    model = wrap(model)
    for turn in range(2):
        torch.manual_seed(10 * turn + rank)
        with comm.record() as log:
            models.loss("gpt")(model(tokens(rank)), tokens(rank + 5)).backward()
    return gradients(model), [(event.op, event.payload_bytes) for event in log]


@pytest.mark.parametrize("options", [{}, {"k": 2}, {"keep": "matmul"}], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_under_ddp_every_gradient_arrives_once(ranks, world_size, options):
    wrap = partial(DDP, bucket_cap_mb=0.02)
    oracle = ranks(world_size, averaged, wrap=wrap, options=None)
    for (found, messages), (expected, as_before) in zip(
        ranks(world_size, averaged, wrap=wrap, options=options), oracle, strict=True
    ):
        assert same(found, expected)
        assert messages == as_before  # recomputation sends nothing


def test_under_pytorchs_ddp(ranks):
    oracle = ranks(2, averaged, wrap=DistributedDataParallel, options=None)
    for found, expected in zip(ranks(2, averaged, wrap=DistributedDataParallel, options={}), oracle, strict=True):
        assert same(found[0], expected[0])
