"""Norms and dropout on shards of the sequence, against one process, DTensor and plain tensor parallelism."""

from collections import Counter, OrderedDict
from functools import partial
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
from tensor_parallel_models import (
    CONTEXT,
    F64,
    VOCAB,
    WIDTH,
    Recorded,
    alone,
    batches,
    by_pytorch,
    furthest,
    gpt,
    split,
    whole_loss,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from labkit import comm
from labkit.fsdp import FSDP
from labkit.ideas.tensor_and_sequence import sequence_parallel_mlp
from labkit.memory.memory_tracker import MemoryTracker
from labkit.models.gpt import Block
from labkit.models.plans import gpt as gpt_plan
from labkit.models.plans import of_blocks
from labkit.recompute import checkpoint_every
from labkit.tensor_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    parallelize_module,
    tensor_parallel,
)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_it_trains_as_one_process(ranks, world_size, tied):
    losses, weights = alone(tied=tied)
    for rank, (found, state) in enumerate(ranks(world_size, split, sequence=True, tied=tied)):
        assert furthest(found, losses) < 1e-12 and furthest(state, weights) < 1e-12, f"rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_trains_as_dtensor(ranks, world_size):
    for rank, (losses, weights) in enumerate(ranks(world_size, by_pytorch, sequence=True)):
        assert losses < 1e-12 and weights < 1e-12, f"rank {rank}"


def by_the_idea(rank, world_size):
    torch.manual_seed(0)
    up, down, norm = nn.Linear(WIDTH, 48).to(F64), nn.Linear(48, WIDTH, bias=False).to(F64), nn.LayerNorm(WIDTH).to(F64)
    whole = torch.randn(CONTEXT, WIDTH, dtype=F64, requires_grad=True)
    x = whole.detach().chunk(world_size)[rank].requires_grad_()
    A, a = (one.detach().chunk(world_size)[rank].requires_grad_() for one in (up.weight, up.bias))
    B = down.weight.detach().chunk(world_size, 1)[rank].requires_grad_()
    found = torch.autograd.grad(sequence_parallel_mlp(x, norm, A, a, B).square().sum(), [x, A, a, B, norm.weight])
    comm.all_reduce(found[-1])
    expected = (whole + down(F.gelu(up(norm(whole))))).square().sum()
    expected = torch.autograd.grad(expected, [whole, up.weight, up.bias, down.weight, norm.weight])
    dims = (0, 0, 0, 1)
    theirs = [one.chunk(world_size, dim)[rank] for one, dim in zip(expected, dims, strict=False)] + [expected[-1]]
    return max((a - b).abs().max().item() for a, b in zip(found, theirs, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_idea_is_two_layers(ranks, world_size):
    assert max(ranks(world_size, by_the_idea)) < 1e-11


def one_step(rank, world_size, sequence, dropout=0.0):
    """Of blocks: activations held after forward, and at most; and what is sent."""
    blocks = parallelize_module(gpt(0, dropout=dropout).blocks, None, of_blocks(gpt_plan(tensor_parallel, sequence)))
    x = torch.randn(2, CONTEXT, WIDTH, dtype=F64)
    x = x.chunk(world_size, 1)[rank] if sequence else x
    with MemoryTracker(blocks) as memory, comm.record() as log:
        y = blocks(x.clone().requires_grad_())
        held = memory.current["activations"]
        y.square().mean().backward()
    sent = Counter()
    for event in log:
        sent[event.op, event.payload_bytes] += 1
    return held, memory.peak["activations"], sent, sum(event.sent_bytes for event in log)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_same_bytes_and_fewer_activations(ranks, world_size):
    size, layers = 2 * CONTEXT * WIDTH * 8, 2
    (whole, peak, _, bytes_whole), *_ = ranks(world_size, one_step, sequence=False, dropout=0.1)
    for rank, (held, most, sent, sent_bytes) in enumerate(ranks(world_size, one_step, sequence=True, dropout=0.1)):
        small = {("all_reduce", 6 * WIDTH * 8): layers}  # two norms and two biases
        assert sent == small | {("all_gather", size): 4 * layers, ("reduce_scatter", size): 4 * layers}, f"rank {rank}"
        assert sent_bytes == bytes_whole + 6 * layers * 2 * (world_size - 1) * WIDTH * 8 // world_size, f"rank {rank}"
        # of the other ranks' tokens a rank has no more, a block: the inputs of both norms, with mean and deviation,
        # and both masks of dropout; and the output
        numbers = 2 * CONTEXT * (layers * (2 * WIDTH + 2 * 2 + 2 * WIDTH) + WIDTH)
        assert whole - held == 8 * numbers * (world_size - 1) // world_size, f"rank {rank}"
        assert most < peak, f"rank {rank}"


def masks(rank, world_size):
    """Dropout on shards, and where the sequence is whole again."""
    torch.manual_seed(rank)
    on_shards, whole = Recorded(0.5), Recorded(0.5)
    layers = {"up": nn.Linear(8, 8), "down": nn.Linear(8, 8), "shards": on_shards, "last": nn.Linear(8, 8)}
    model = nn.Sequential(OrderedDict(layers | {"back": nn.Linear(8, 8), "whole": whole}))
    styles = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "shards": SequenceParallel(),
        "last": ColwiseParallel(input_layouts=Shard(1)),
        "back": RowwiseParallel(),
    }
    parallelize_module(model, None, styles)
    for _ in range(2):
        model(torch.ones(1, 8, 8))
    return on_shards.masks, whole.masks


def test_dropout_on_shards_differs(ranks):
    (mine, alike), (theirs, other) = ranks(2, masks)
    assert all(map(torch.equal, alike, other)) and not torch.equal(*alike)
    assert not any(torch.equal(a, b) for a, b in combinations([*mine, *theirs], 2))


def run_again(rank, world_size, form):
    """Gradients of blocks that run again, where other forwards come before the backward; and the ranks' draws."""
    found = []
    for how in (None, form):
        model = parallelize_module(gpt(0, dropout=0.3), None, gpt_plan(tensor_parallel, sequence=True))
        if how == "labkit":
            checkpoint_every(model, Block)
        elif how == "torch":
            for block in model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        torch.manual_seed(5)
        losses = [model(tokens).square().mean() for tokens, _ in batches(3, VOCAB)]
        with torch.no_grad():
            model(batches(1, VOCAB)[0][0])
        for loss in (losses[0], losses[2], losses[1]):
            loss.backward()
        found.append([*losses, *(p.grad for p in model.parameters())])
    return all(map(torch.equal, *found)), torch.rand(1).item()


@pytest.mark.parametrize("form", ["torch", "labkit"])
def test_blocks_run_again_after_other_forwards(ranks, form):
    (one, drawn), (other, also) = ranks(2, run_again, form=form)
    assert one and other and drawn == also


def in_units(rank, world_size, classes):
    """The gradients, with and without FSDP around modules of these classes, whose parameters come and go."""
    own = [dist.new_group([r]) for r in range(world_size)][rank]
    found = []
    for wrapped in (False, True):
        plan = gpt_plan(tensor_parallel, sequence=True, whole_logits=True)
        model = parallelize_module(gpt(0, tied=False), None, plan)
        if wrapped:
            model = FSDP(model, lambda part: isinstance(part, classes), process_group=own)
        for tokens, targets in batches(2, VOCAB):
            whole_loss(model(tokens), targets).backward()
        found.append({name.removeprefix("module."): p.grad for name, p in model.named_parameters()})
    plain, units = found
    return max((plain[name].reshape(-1) - units[name].reshape(-1)).abs().max().item() for name in plain)


@pytest.mark.parametrize("classes", [(Block,), (nn.Linear, nn.LayerNorm), (nn.LayerNorm,)])
def test_fsdp_around_blocks_or_single_layers_has_the_same_gradients(ranks, classes):
    assert max(ranks(2, in_units, classes=classes)) < 1e-12


def norms(blocks, x):
    """The gradients of norms: one is frozen in part, one has run without its block."""
    blocks[0].network_norm.bias.requires_grad_(False)
    (blocks[0](x).square().sum() + blocks[1].attention_norm(x).square().sum()).backward()
    return {name: p.grad for name, p in blocks.named_parameters() if "norm" in name and p.grad is not None}


def norms_on_shards(rank, world_size):
    x = torch.randn(2, CONTEXT, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(3))
    blocks = parallelize_module(gpt(0).blocks, None, of_blocks(gpt_plan(tensor_parallel, sequence=True)))
    return furthest(norms(blocks, x.chunk(world_size, 1)[rank]), norms(gpt(0).blocks, x))


def test_frozen_parameters_and_layers_without_their_block(ranks):
    assert max(ranks(3, norms_on_shards)) < 1e-11


def wrong(rank, world_size, case):
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))
    plans = {"batch": {"0": SequenceParallel()}, "length": {"1": RowwiseParallel(output_layouts=Shard(1))}}
    try:
        parallelize_module(model, None, plans[case])
        model[1](torch.ones(1, 5, 4))
    except ValueError as error:
        return str(error)


def test_what_cannot_be(ranks):
    assert ranks(2, wrong, case="batch") == ["0 is a BatchNorm1d: SequenceParallel supports norms and dropout"] * 2
    assert ranks(2, wrong, case="length") == ["dim 1 of [1, 5, 8] must be divisible by 2, the number of ranks"] * 2
