"""Full parameters in and out: construction, names, state dicts, resharding, dtypes, the meta device."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from labkit import comm, models
from labkit.fsdp import FSDP
from labkit.fsdp.wrap_policy import by_size, excluding, split_units
from labkit.memory.memory_tracker import MemoryTracker
from labkit.mesh import Mesh
from labkit.models.gpt import Block

TINY = {"vocab": 31, "context": 16}


def gpt(seed=0, **overrides):
    torch.manual_seed(seed)
    return models.build("gpt", "tiny", **TINY, **overrides)


def tokens(rank, step=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    whole = torch.randint(31, (4, 9), generator=generator)
    return whole[:, :-1], whole[:, 1:]


def train(model, rank, steps=2, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = tokens(rank, step)
        models.loss("gpt")(model(inputs), targets).backward()
        optimizer.step()
    return optimizer


def same(ours, theirs):
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


# ---- names and state dicts


class Extra(nn.Linear):
    """With a buffer and extra state."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("seen", torch.zeros(2))
        self.note = "none"

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def names(rank, world_size):
    module = gpt()
    plain = {name: p.clone() for name, p in module.named_parameters()}
    whole = {name: value.clone() for name, value in module.state_dict().items()}
    model = FSDP(module, Block)
    assert model.module is module and list(dict(model.named_parameters())) == list(plain)
    assert list(model.state_dict()) == list(whole)  # both names of the tied matrix too
    held = dict(model.named_parameters())
    assert all(p.dim() == 1 and p.is_leaf and isinstance(p, nn.Parameter) for p in held.values())
    # Every element once, over all ranks; and a rank holds no more than its share and the padding.
    counts = torch.tensor([p.numel() for p in held.values()])
    mine = int(counts.sum())
    comm.all_reduce(counts)
    assert counts.tolist() == [p.numel() for p in plain.values()]
    total = sum(p.numel() for p in plain.values())
    assert mine <= sum(flat.layout.shard_numel for flat in model.flats) <= total / world_size + len(model.flats)
    assert same(model.full_state_dict(), whole)
    model(tokens(rank)[0])  # a forward whose backward never comes leaves the root gathered
    assert all(p is held[name] for name, p in model.named_parameters())
    assert same(model.full_state_dict(), whole)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_names_stay_and_every_element_is_held_once(ranks, world_size):
    ranks(world_size, names)


def save(rank, world_size, settings):
    model = FSDP(gpt(rank), Block, **settings)
    train(model, rank)
    return {"whole": model.full_state_dict(), "own": {k: v.clone() for k, v in model.state_dict().items()}}


def load(rank, world_size, saved, by, settings):
    model = FSDP(gpt(rank + 5), Block, **settings)
    if by == "shards":
        model.load_shards([one["own"] for one in saved])
    else:
        model.load_full_state_dict({f"{by}{name}": value for name, value in saved[0]["whole"].items()})
    assert same(model.full_state_dict(), saved[0]["whole"])
    train(model, rank, steps=1)


RESHARDED = {"shard": {}, "replicate": {"root": "replicate"}, "small ones persist": {"persistence_threshold": 99}}


@pytest.mark.parametrize("settings", RESHARDED.values(), ids=RESHARDED)
@pytest.mark.parametrize("by", ["", "module.", "shards"])
@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 2), (2, 1), (1, 3)])
def test_resharding(ranks, saving, loading, by, settings):
    saved = ranks(saving, save, settings=settings)
    for rank, one in enumerate(saved):
        assert same(one["whole"], saved[0]["whole"]), f"rank {rank}"
    ranks(loading, load, saved=saved, by=by, settings=settings)


def beside_a_gpu(rank, world_size):
    with mock.patch("torch.cuda.is_available", lambda: True), mock.patch("torch.Tensor.pin_memory") as pin_memory:
        FSDP(gpt(), Block, offload=True)
    return pin_memory.called


def test_ranks_on_the_cpu_pin_no_memory_for_a_gpu_that_they_do_not_use(ranks):
    assert ranks(1, beside_a_gpu) == [False]


def own_shards(rank, world_size):
    model = FSDP(gpt(rank), Block)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = model.full_state_dict()
    train(model, rank)
    assert not same(model.full_state_dict(), before)
    model.load_state_dict(state)
    assert same(model.full_state_dict(), before)


def test_own_shards_load_again(ranks):
    ranks(2, own_shards)


def foreign(rank, world_size):
    model = FSDP(gpt(), Block)
    before = model.full_state_dict()
    other = dict(before)
    del other["norm.weight"], other["blocks.1.attention.output.bias"]
    other |= {"extra.weight": torch.ones(2), "norm.bias": torch.ones(3), "lm_head.bias": torch.ones(2)}
    with pytest.raises(RuntimeError) as caught:
        model.load_full_state_dict(other)
    told = str(caught.value)
    for words in (
        "missing 'norm.weight'",
        "missing 'blocks.1.attention.output.bias'",
        "unexpected 'extra.weight'",
        "unexpected 'lm_head.bias'",
        "'norm.bias' is [3] and should be [32]",
    ):
        assert words in told, f"rank {rank}: {told}"
    assert same(model.full_state_dict(), before)
    del other["norm.bias"]
    result = model.load_full_state_dict(other, strict=False)
    assert sorted(result.missing_keys) == ["blocks.1.attention.output.bias", "norm.bias", "norm.weight"]
    with pytest.raises(RuntimeError, match=r"these 1 state dicts have .*: give that of every rank"):
        model.load_shards([model.state_dict()])


def test_a_state_dict_of_another_model_is_told_by_every_name(ranks):
    ranks(2, foreign)


def extras(rank, world_size):
    module = nn.Sequential(Extra(), Extra())
    model = FSDP(module, Extra)
    module[0].note, module[1].seen[0] = "told", rank + 1.0
    state = model.full_state_dict()
    assert state["0._extra_state"] == "told" and state["1.seen"].tolist() == [1.0, 0.0]  # of rank 0, on every rank
    other = nn.Sequential(Extra(), Extra())
    other.load_state_dict(state)  # loads without FSDP
    fresh = FSDP(nn.Sequential(Extra(), Extra()), Extra)
    fresh.load_full_state_dict(other.state_dict())
    assert fresh.module[0].note == "told" and fresh.module[1].seen[0] == 1.0
    with pytest.raises(TypeError, match="FSDP cannot be copied"):
        copy.deepcopy(fresh)


def test_buffers_and_extra_state_travel_with_it(ranks):
    ranks(2, extras)


# ---- units and policies


def test_units_own_what_is_innermost():
    model = gpt(tied=False)
    units = split_units(model, (Block, nn.Linear))
    inner = ("attention.query_key_value", "attention.output", "network.0", "network.2")
    assert [unit.name for unit in units][1:6] == ["blocks.0", *(f"blocks.0.{name}" for name in inner)]
    assert [places[0][0] for places in units[1].own_parameters().values()] == [
        f"blocks.0.{norm}_norm.{part}" for norm in ("attention", "network") for part in ("weight", "bias")
    ]
    owned = [name for unit in units for places in unit.own_parameters().values() for name, _, _ in places]
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters())


def test_policies():
    model = gpt(tied=False)
    found = lambda unit: [unit.name for unit in split_units(model, unit)[1:]]  # noqa: E731
    assert found(Block) == found((Block,)) == found(lambda m: isinstance(m, Block)) == ["blocks.0", "blocks.1"]
    assert found(by_size(10000)) == ["blocks.0", "blocks.1"]
    # Two halves of a network's 8352 parameters are large enough alone; of an attention's 4224 neither is.
    halves = ("attention", "network.0", "network.2")
    assert found(by_size(4000)) == [f"blocks.{i}.{half}" for i in (0, 1) for half in halves]
    assert found(excluding(Block, model.blocks[0])) == ["blocks.1"]
    assert "head" in found(nn.Linear) and "head" not in found(excluding(nn.Linear, model.head))
    assert found(excluding((Block, nn.Embedding), nn.Embedding)) == ["blocks.0", "blocks.1"]
    assert found(None) == []


def test_a_unit_that_matches_nothing_is_told_with_what_there_is():
    with pytest.raises(ValueError, match=r"no part of the model matches unit .*; its parts are Attention, Block"):
        split_units(gpt(), nn.Conv2d)
    with pytest.raises(TypeError, match="unit must be module classes or a function"):
        split_units(gpt(), 3)


def test_a_parameter_of_two_units_is_told_with_both_names():
    with pytest.raises(ValueError, match=r"'token_embedding.weight' in 'token_embedding' and 'head.weight' in 'head'"):
        split_units(gpt(), (nn.Embedding, nn.Linear))
    with pytest.raises(ValueError, match=r"'token_embedding.weight' in the root and 'head.weight' in 'head'"):
        split_units(gpt(), nn.Linear)
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared), nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"module '1.0' lies in '0' and in '1'"):
        split_units(model, lambda m: isinstance(m, nn.Sequential))


def bad_arguments(rank, world_size):
    def error(kind, **arguments):
        with pytest.raises(kind) as caught:
            FSDP(gpt(), **{"unit": Block, **arguments})
        return str(caught.value)

    assert error(ValueError, shard="zero3") == "shard is 'full', 'grad_op', 'hybrid', not 'zero3'"
    assert 'root must be "shard" or "replicate"' in error(ValueError, root="keep")
    assert "prefetch must be a number of units" in error(ValueError, prefetch=-1)
    assert "persistence_threshold must be a number" in error(ValueError, persistence_threshold=1e5)
    assert 'needs root="shard"' in error(ValueError, persistence_threshold=9, root="replicate")
    assert "needs a mesh of two axes" in error(ValueError, shard="hybrid")
    assert "param_dtype is a floating-point dtype" in error(ValueError, param_dtype=torch.int8)
    mesh = Mesh({"a": world_size, "b": 1})
    assert "give a mesh of one axis" in error(ValueError, mesh=mesh)
    assert "not both" in error(ValueError, mesh=mesh, process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"the model differs between ranks: .*norm\.weight"):
        module = gpt()
        module.norm = nn.LayerNorm(32 + rank)
        FSDP(module, Block)
    once = FSDP(gpt(), Block)
    for again in (once, once.module, nn.Sequential(once.module.blocks[0], nn.Linear(2, 2))):
        with pytest.raises(ValueError, match="sharded already: wrap the whole model once"):
            FSDP(again)
    with pytest.raises(ValueError, match="settings"):
        FSDP(gpt(), Block, prefetch=rank)


def test_arguments_that_do_not_fit(ranks):
    ranks(2, bad_arguments)


# ---- dtypes


def low_precision(rank, world_size, settings):
    """Ours and fully_shard in bf16 with fp32 masters: the same arithmetic, to a few of bf16's steps."""
    oracle = gpt()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=settings["reduce_dtype"])
    for block in oracle.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(oracle, mp_policy=policy)
    model = FSDP(gpt(), Block, param_dtype=torch.bfloat16, **settings)
    inputs, targets = tokens(rank)
    for m in (model, oracle):
        output = m(inputs)
        assert output.dtype == torch.bfloat16, f"rank {rank}, {type(m).__name__}"
        models.loss("gpt")(output.float(), targets).backward()
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in model.parameters())
    found = whole_gradients(model)
    for name, p in oracle.named_parameters():
        theirs = p.grad.full_tensor()
        # bf16 has 8 bits; the sums of n gradients are rounded in another order. (A key's bias has none: only rounding.)
        assert float((found[name] - theirs).abs().max()) <= 2**-6 * float(theirs.abs().max()) + 1e-7, name
    with comm.record() as log:
        models.loss("gpt")(model(inputs).float(), targets).backward()
    low = sum(flat.layout.padded for flat in model.flats) * 2  # bytes in bf16
    root = sum(flat.layout.padded for flat in model.units[0].flats) * 2
    gathered = sum(event.payload_bytes for event in log if event.op == "all_gather")
    reduced = sum(event.payload_bytes for event in log if event.op == "reduce_scatter")
    assert gathered == 2 * low - root
    assert reduced == low * (2 if settings["reduce_dtype"] == torch.float32 else 1)


def whole_gradients(model):
    found = {}
    for flat in model.flats:
        shard = torch.zeros_like(flat.shard)
        for view, piece in zip(flat.layout.pieces(shard, flat.rank), flat.pieces, strict=True):
            view.copy_(piece.grad)
        total = shard.new_empty(flat.layout.padded)
        comm.all_gather(total, shard, flat.sharding.group)
        found |= dict(zip(flat.names, flat.layout.views(total), strict=True))
    return found


@pytest.mark.parametrize("threshold", [0, 99, 10**6])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_low_precision_with_full_precision_masters(ranks, world_size, reduce_dtype, threshold):
    ranks(world_size, low_precision, settings={"reduce_dtype": reduce_dtype, "persistence_threshold": threshold})


def low_beside_replicated(rank, world_size):
    model = FSDP(gpt(rank), Block, root="replicate", param_dtype=torch.bfloat16)
    seen = []
    for block in model.module.blocks:
        block.attention.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    inputs, targets = tokens(rank)
    output = model(inputs)
    assert output.dtype == torch.float32 and seen == [torch.bfloat16] * 2  # the root computes in its own dtype
    models.loss("gpt")(output, targets).backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_units_in_low_precision_beside_a_replicated_root(ranks):
    ranks(2, low_beside_replicated)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.single, self.double_ = nn.Linear(3, 3), nn.Linear(3, 3).double()

    def forward(self, x):
        return self.double_(self.single(x.float()).double())


def mixed_dtypes(rank, world_size):
    torch.manual_seed(rank)
    model = FSDP(nn.Sequential(Mixed(), Mixed()), Mixed)
    assert len(model.flats) == 4 and {p.dtype for p in model.parameters()} == {torch.float32, torch.float64}
    model(torch.randn(2, 3)).sum().backward()
    assert all(p.grad.dtype == p.dtype for p in model.parameters())


def test_parameters_of_several_dtypes_in_one_unit(ranks):
    ranks(2, mixed_dtypes)


def moved(rank, world_size):
    model = FSDP(gpt(rank), Block)
    optimizer = train(model, rank)
    pieces = list(model.parameters())
    state = model.full_state_dict()
    assert model.double() is model
    assert all(p is q and p.dtype == torch.float64 for p, q in zip(pieces, model.parameters(), strict=True))
    assert same({k: v.float() for k, v in model.full_state_dict().items()}, state)
    inputs, targets = tokens(rank)
    optimizer.zero_grad()
    output = model(inputs)
    assert output.dtype == torch.float64
    models.loss("gpt")(output, targets).backward()
    optimizer.step()
    assert not same({k: v.float() for k, v in model.full_state_dict().items()}, state)


def test_a_model_that_moves_to_another_dtype_takes_its_shards_along(ranks):
    ranks(2, moved)


# ---- the meta device


def from_meta(rank, world_size, threshold):
    with torch.device("meta"):
        module = models.build("gpt", "tiny", layers=6, **TINY)
    real = models.build("gpt", "tiny", layers=6, **TINY)
    whole = sum(p.nbytes for p in real.parameters())
    block = sum(p.nbytes for p in real.blocks[0].parameters())
    with MemoryTracker() as memory:
        model = FSDP(module, Block, persistence_threshold=threshold)
    # A unit's values and their flat copy, in addition to the shards: never the full model.
    assert memory.peak_total <= (whole + block) / world_size + 2 * block + 1024
    assert memory.peak_total < 0.9 * whole
    assert model.module.head.weight is model.module.token_embedding.weight
    state = model.full_state_dict()
    assert not any(value.is_meta for value in state.values())
    assert state["blocks.0.attention.query_key_value.weight"].std() > 0
    assert torch.equal(state["blocks.3.network_norm.weight"], torch.ones(32))
    model.load_full_state_dict(real.state_dict())
    train(model, rank)
    return state


@pytest.mark.parametrize("threshold", [0, 32])
def test_a_model_on_the_meta_device_is_built_unit_by_unit(ranks, threshold):
    results = ranks(2, from_meta, threshold=threshold)
    assert same(*results)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def bare_on_meta(rank, world_size):
    with torch.device("meta"):
        module = nn.Sequential(Bare(), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"'0' \(Bare\) is on the meta device and has no reset_parameters\(\)"):
        FSDP(module, nn.Linear)


def test_a_module_that_cannot_give_itself_values_is_told(ranks):
    ranks(2, bare_on_meta)
