"""The oracle of sharding: ranks that hold a part of everything train what one process trains that holds all of it."""

import copy
from functools import partial
from tempfile import gettempdir

import oracle_models
import pytest
import torch
from oracle_models import SHARD, STEPS, TOLERANCE
from tensors import gap, state
from torch.distributed.fsdp import fully_shard

from labkit import comm, models
from labkit.ddp import DDP
from labkit.fsdp import FSDP
from labkit.memory.memory_tracker import MemoryTracker
from labkit.mesh import Mesh

FORMS = {
    "full": {},
    "no prefetch": {"prefetch": 0},
    "prefetch 3": {"prefetch": 3},
    "grad_op": {"shard": "grad_op"},
    "small ones persist": {"persistence_threshold": 33},
    "replicate": {"root": "replicate"},
    "offload": {"offload": True},
}
OPTIMIZERS = {
    # Adam divides by the gradient's size and so hides a sum in place of a mean; SGD does not.
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    # eps: a key's bias has no influence on attention; its gradient is rounding alone, which Adam would blow up to 1.
    "adamw": partial(torch.optim.AdamW, lr=1e-3, eps=1e-5, weight_decay=0.1),
}
ODD_SIZES = {"gpt": {"vocab": 31}, "mlp": {"sizes": (8, 33, 33, 33, 10)}, "resnet": {"norm": "group"}}
batch = partial(oracle_models.batch, vocab=31)


def build(name, dtype, seed):
    """The oracle's model with sizes that no number of ranks divides, and no batch statistics."""
    return oracle_models.build(name, dtype, seed, frozen=-3, **ODD_SIZES[name])


def fit(model, name, dtype, optimizer, world_size, rank=None):
    optimizer = OPTIMIZERS[optimizer](oracle_models.trained(model))
    oracle_models.fit(model, optimizer, name, dtype, world_size, rank, vocab=31)


def one_process(name, dtype, optimizer, world_size):
    model = build(name, dtype, seed=0)
    fit(model, name, dtype, optimizer, world_size)
    return state(model)


def trained(rank, world_size, name, dtype, optimizer, forms):
    results = {}
    for form in forms:
        model = build(name, dtype, seed=rank)  # other weights on every rank: construction must even them out
        wrapped = FSDP(model, models.unit(name), **FORMS[form])
        fit(wrapped, name, dtype, optimizer, world_size, rank)
        results[form] = wrapped.full_state_dict()
    model = build(name, dtype, seed=rank)
    ddp = DDP(model)
    fit(ddp, name, dtype, optimizer, world_size, rank)
    results["ddp"] = state(ddp)
    return results


@pytest.mark.parametrize(
    ("name", "optimizer", "dtype"),
    [
        (name, optimizer, dtype)
        for name in models.SIZES
        for optimizer, dtype in [("sgd", torch.float64), ("sgd", torch.float32), ("adamw", torch.float32)]
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_train_what_one_process_trains(ranks, world_size, name, optimizer, dtype):
    oracle = one_process(name, dtype, optimizer, world_size)
    for rank, results in enumerate(
        ranks(world_size, trained, name=name, dtype=dtype, optimizer=optimizer, forms=list(FORMS))
    ):
        for form in FORMS:
            # The same sums in another order: rounding only.
            assert gap(results[form], oracle) <= TOLERANCE[dtype], f"rank {rank}, {form}"
            if world_size <= 2:
                # a + b == b + a: with two ranks the order of sums cannot matter, and DDP divides at the same place.
                assert gap(results[form], results["ddp"]) == 0.0, f"rank {rank}, {form}"


def hybrid(rank, world_size, axes, name, root, dtype, optimizer):
    mesh = Mesh(axes)
    wrapped = FSDP(build(name, dtype, seed=rank), models.unit(name), mesh=mesh, shard="hybrid", root=root)
    fit(wrapped, name, dtype, optimizer, world_size, rank)
    own = state(wrapped)
    with comm.record() as log:
        inputs, targets = (t.split(SHARD)[rank] for t in batch(name, dtype, 0, world_size))
        models.loss(name)(wrapped(inputs), targets).backward()
        norm = wrapped.clip_grad_norm_(1e9)
    return {
        "whole": wrapped.full_state_dict(),
        "own": own,
        "place": (mesh.rank("replicate"), mesh.rank("shard")),
        "events": [(event.op, event.group_size) for event in log if event.group_size > 1],
        "norm": float(norm),
    }


@pytest.mark.parametrize("root", ["shard", "replicate"])
@pytest.mark.parametrize(
    ("name", "optimizer", "dtype"),
    [("mlp", "sgd", torch.float64), ("gpt", "sgd", torch.float64), ("gpt", "sgd", torch.float32)]
    + [(name, "adamw", torch.float32) for name in models.SIZES],
    ids=str,
)
@pytest.mark.parametrize("axes", [(2, 2), (1, 3), (2, 1), (4, 1)], ids=str)
def test_hybrid_shards_along_one_axis_and_replicates_along_the_other(ranks, axes, name, root, dtype, optimizer):
    replicas, shards = axes
    world_size = replicas * shards
    oracle = one_process(name, dtype, optimizer, world_size)
    form = {"name": name, "root": root, "dtype": dtype, "optimizer": optimizer}
    results = ranks(world_size, hybrid, axes={"replicate": replicas, "shard": shards}, **form)
    for rank, told in enumerate(results):
        assert gap(told["whole"], oracle) <= TOLERANCE[dtype], f"rank {rank}"
        alike = [other for other in results if other["place"][1] == told["place"][1]]
        assert all(gap(other["own"], told["own"]) == 0.0 for other in alike) and len(alike) == replicas, f"rank {rank}"
        assert told["norm"] == pytest.approx(results[0]["norm"], abs=1e-12), f"rank {rank}"
        # Gathers and scatters stay within the shard axis; across it only sums of shards travel.
        sizes = {(op, size) for op, size in told["events"] if op in ("all_gather", "reduce_scatter")}
        assert sizes == ({("all_gather", shards), ("reduce_scatter", shards)} if shards > 1 else set()), f"rank {rank}"


# ---- what is sent


def recorded(rank, world_size, settings):
    torch.manual_seed(rank)
    model = FSDP(models.build("gpt", "tiny", vocab=31, context=16, layers=4), models.unit("gpt"), **settings)
    inputs, targets = (t.split(SHARD)[rank] for t in batch("gpt", torch.float32, 0, world_size))
    logs = []
    for _ in range(2):  # the order of the units is known from the first
        with comm.record() as log:
            value = models.loss("gpt")(model(inputs), targets)
            forward = len(log)
            value.backward()
        logs.append([(event.op, event.payload_bytes) for event in log])
    with comm.record() as evaluation, torch.no_grad():
        model(inputs)
    return {
        "forward": logs[1][:forward],
        "backward": logs[1][forward:],
        "same": logs[0] == logs[1],
        "evaluation": [(event.op, event.payload_bytes) for event in evaluation],
        "bytes": [sum(flat.layout.padded * 4 for flat in unit.flats) for unit in model.units],
        "sent": sum(event.sent_bytes for event in log),
    }


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("shard", ["full", "grad_op"])
def test_one_gather_per_unit_and_pass_one_reduction_per_unit_and_nothing_else(ranks, world_size, shard, prefetch):
    results = ranks(world_size, recorded, settings={"shard": shard, "prefetch": prefetch})
    told = results[0]
    for rank, other in enumerate(results):
        assert other == told, f"rank {rank}"  # the same on all ranks, in the same order
    root, *blocks = told["bytes"]
    assert told["same"] and len(blocks) == 4
    assert told["forward"] == [("all_gather", size) for size in (root, *blocks)] == told["evaluation"]
    gathers = [event for event in told["backward"] if event[0] == "all_gather"]
    assert gathers == ([] if shard == "grad_op" else [("all_gather", size) for size in blocks])
    reductions = [event for event in told["backward"] if event[0] == "reduce_scatter"]
    assert reductions == [("reduce_scatter", size) for size in (*reversed(blocks), root)]
    assert len(told["backward"]) == len(gathers) + len(reductions)
    passes = 2 * root + (2 if shard == "grad_op" else 3) * sum(blocks)
    assert told["sent"] == (world_size - 1) * passes // world_size


def recorded_twice(rank, world_size, threshold):
    """Messages without and with a threshold, and the bytes that are full between forward and backward."""
    found = {
        "without": recorded(rank, world_size, {}),
        "with": recorded(rank, world_size, {"persistence_threshold": threshold}),
    }
    model = FSDP(
        models.build("gpt", "tiny", vocab=31, context=16, layers=4), models.unit("gpt"), persistence_threshold=threshold
    )
    full = lambda: [sum(flat.flat.untyped_storage().nbytes() for flat in unit.flats) for unit in model.units]  # noqa: E731
    loss = model(torch.zeros(1, 8, dtype=torch.int64)).sum()
    found["between"] = full()
    loss.backward()
    found["after"] = full()
    found["small"] = [flat.layout.padded * 4 for flat in model.units[0].flats]
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parameters_below_the_threshold_are_gathered_once_with_the_root(ranks, world_size):
    threshold = 128  # all biases and norms, but no matrix
    parts = dict(models.build("gpt", "tiny", vocab=31, context=16, layers=4).named_parameters())
    of_blocks = {name: p for name, p in parts.items() if name.startswith("blocks")}
    small = sum(p.nbytes for p in parts.values() if p.numel() <= threshold)
    moved = sum(p.nbytes for p in of_blocks.values() if p.numel() <= threshold)
    for rank, told in enumerate(ranks(world_size, recorded_twice, threshold=threshold)):
        before, now, (own, kept) = told["without"], told["with"], told["small"]
        assert 0 <= kept - small < 4 * world_size, f"rank {rank}"
        root, *blocks = now["bytes"]
        assert root == own + kept and now["same"], f"rank {rank}"
        assert now["forward"] == [("all_gather", size) for size in (own, kept, *blocks)], f"rank {rank}"
        again = [size for op, size in now["backward"] if op == "all_gather"]
        reduced = [size for op, size in now["backward"] if op == "reduce_scatter"]
        assert again == blocks and reduced == [*reversed(blocks), own, kept], f"rank {rank}"
        assert now["sent"] == (world_size - 1) * (2 * root + 3 * sum(blocks)) // world_size, f"rank {rank}"
        # One pass less of what the blocks gave away; the sizes differ by padding.
        saved = (world_size - 1) * moved / world_size
        assert before["sent"] - now["sent"] == pytest.approx(saved, abs=3 * 4 * world_size * 6), f"rank {rank}"
        assert told["between"] == [root, 0, 0, 0, 0] and told["after"] == [0] * 5, f"rank {rank}"


def replicated_messages(rank, world_size):
    model = FSDP(build("gpt", torch.float32, rank), models.unit("gpt"), root="replicate")
    inputs, targets = (t.split(SHARD)[rank] for t in batch("gpt", torch.float32, 0, world_size))
    with comm.record() as log:
        models.loss("gpt")(model(inputs), targets).backward()
    assert [event.op for event in log].count("all_reduce") == 1 == (log[-1].op == "all_reduce")
    whole = {name: p for name, p in model.named_parameters() if not name.startswith("blocks")}
    assert whole["token_embedding.weight"].shape == (31, 32)
    assert log[-1].payload_bytes == sum(p.nbytes for p in whole.values() if p.requires_grad)


def test_a_replicated_root_is_averaged_in_one_message_at_the_end(ranks):
    ranks(2, replicated_messages)


# ---- what is held


def by_torch(module, unit):
    is_unit = (lambda part: isinstance(part, unit)) if isinstance(unit, type) else unit
    for part in [part for part in module.modules() if part is not module and is_unit(part)]:
        fully_shard(part)
    return fully_shard(module)


def step_of(model, name, dtype, rank, world_size):
    inputs, targets = (t.split(SHARD)[rank] for t in batch(name, dtype, 0, world_size))
    # Not Adam, whose temporaries are as large as the largest piece: that would compare where the shards are cut.
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), models.loss(name)

    def step():
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def held(rank, world_size, name, overrides):
    torch.manual_seed(0)
    module = models.build(name, "tiny", **overrides)
    wholes = sum(p.nbytes for p in module.parameters())
    peaks = {}
    for form, wrapped in {
        "ours": FSDP(copy.deepcopy(module), models.unit(name)),
        "grad_op": FSDP(copy.deepcopy(module), models.unit(name), shard="grad_op"),
        "torch": by_torch(copy.deepcopy(module), models.unit(name)),
    }.items():
        step = step_of(wrapped, name, torch.float32, rank, world_size)
        step()
        with MemoryTracker(wrapped) as memory:
            step()
        peaks[form] = memory.peak_total
        if form != "torch":
            rest = sum(flat.layout.shard_numel * 4 for flat in wrapped.flats)
            # At rest: one shard of parameters and one of gradients, to the byte; padding is less than n elements each.
            assert (memory.current["parameters"], memory.current["gradients"]) == (rest, rest), f"rank {rank}, {form}"
            assert 0 <= rest * world_size - wholes < 4 * world_size * len(wrapped.flats), f"rank {rank}, {form}"
    return peaks


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("mlp", {"sizes": (8, 64, 64, 64, 64, 10)}),
        ("gpt", {"vocab": 31, "context": 16, "layers": 4}),
        ("resnet", {"norm": "group", "depth": 14}),
    ],
    ids=["mlp", "gpt", "resnet"],
)
def test_the_peak_is_at_most_that_of_fully_shard(ranks, world_size, name, overrides):
    for rank, peaks in enumerate(ranks(world_size, held, name=name, overrides=overrides)):
        assert peaks["ours"] <= peaks["torch"], f"rank {rank}"
        assert peaks["ours"] <= peaks["grad_op"], f"rank {rank}"


def one_unit_at_a_time(rank, world_size):
    """What is gathered while each block runs: itself, the root, and `prefetch` more."""
    torch.manual_seed(rank)
    seen = {}
    for prefetch in (0, 1, 2):
        model = FSDP(models.build("gpt", "tiny", layers=5), models.unit("gpt"), prefetch=prefetch)

        def look(module, *_, model=model, prefetch=prefetch):
            full = [bool(flat.flat.untyped_storage().nbytes()) for flat in model.flats]
            seen.setdefault(prefetch, []).append(full)

        for block in model.module.blocks:
            block.attention_norm.register_forward_hook(look)  # first in forward, last in backward
            block.attention_norm.register_full_backward_hook(look)
        inputs = torch.randint(256, (2, 8))
        model(inputs).mean().backward()
        assert not any(flat.flat.untyped_storage().nbytes() for flat in model.flats), f"rank {rank}, {prefetch=}"
    return {prefetch: [sum(full) for full in found] for prefetch, found in seen.items()}


def test_gathered_are_the_root_the_unit_at_work_and_those_ahead(ranks):
    for rank, told in enumerate(ranks(2, one_unit_at_a_time)):
        for prefetch, found in told.items():
            ahead = [min(prefetch, left) for left in (4, 3, 2, 1, 0)]
            assert found == [2 + more for more in ahead + ahead], f"rank {rank}, {prefetch}"  # forward, then backward


# ---- PyTorch's own


def beside_torch(rank, world_size, name):
    results = {}
    for form in ("ours", "torch"):
        # Ours takes the values of rank 0; fully_shard takes each rank's own, so they must be equal before.
        model = build(name, torch.float64, seed=rank if form == "ours" else 0)
        unit = models.unit(name)
        wrapped = FSDP(model, unit) if form == "ours" else by_torch(model, unit)
        fit(wrapped, name, torch.float64, "sgd", world_size, rank)
        if form == "ours":
            results[form] = wrapped.full_state_dict()
        else:
            results[form] = {key: value.full_tensor() for key, value in wrapped.state_dict().items()}
    return results


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", models.SIZES)
def test_it_trains_as_fully_shard_does(ranks, world_size, name):
    for rank, results in enumerate(ranks(world_size, beside_torch, name=name)):
        assert gap(results["ours"], results["torch"]) <= 1e-12, f"rank {rank}"


@pytest.mark.gpu
def test_on_gpus_with_offload(ranks):
    from labkit.run import launch

    launch("test_fsdp:gpu_body", nproc=torch.cuda.device_count(), device="cuda", quiet=True)


def gpu_body(context):
    rank, world_size = context.rank, context.world_size
    for offload in (False, True, gettempdir()):
        wrapped = FSDP(build("gpt", torch.float64, seed=rank), models.unit("gpt"), offload=offload)
        optimizer, loss = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9), models.loss("gpt")
        for step in range(STEPS):
            inputs, targets = (t.split(SHARD)[rank].cuda() for t in batch("gpt", torch.float64, step, world_size))
            optimizer.zero_grad()
            loss(wrapped(inputs), targets).backward()
            optimizer.step()
        assert {p.device.type for p in wrapped.parameters()} == {"cpu" if offload else "cuda"}, (
            f"rank {rank}, {offload=}"
        )
        oracle = one_process("gpt", torch.float64, "sgd", world_size)
        assert gap({k: v.cpu() for k, v in wrapped.full_state_dict().items()}, oracle) <= 1e-10, (
            f"rank {rank}, {offload=}"
        )
