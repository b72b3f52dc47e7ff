"""The oracle of ZeRO: ranks that hold a part of the states train what one process trains that holds them all."""

import pytest
import torch
import torch.distributed as dist
from oracle_models import SHARD, STEPS, TOLERANCE, batch, build, trained
from tensors import gap, state
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from labkit import comm, models
from labkit.ddp import DDP
from labkit.memory.memory_tracker import MemoryTracker
from labkit.zero import ZeRO1, ZeRO2
from labkit.zero.flat_shards import Layout

FORMS = {  # several buckets, one for everything, one a parameter; the last has fewer elements than ranks in some
    "zero1": (ZeRO1, 0.005),
    "zero1 in one message": (ZeRO1, 25),
    "zero2": (ZeRO2, 0.005),
    "zero2 parameter by parameter": (ZeRO2, 0),
}
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    # A gradient that is zero but for rounding, as a key's bias has, becomes noise of size lr if eps does not stop it.
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3}),
}


def groups(model):
    """Two groups, as for a decay of matrices only, out of the order of backward; the frozen parameter is among them."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}]


def train(model, optimizer, name, dtype, shards, world_size, forward=None):
    """Some steps on these shards of each batch, whose gradients add up; returns the parameters."""
    loss, forward = models.loss(name), forward or model
    for step in range(STEPS):
        inputs, targets = batch(name, dtype, step, world_size)
        optimizer.zero_grad()
        for shard in shards:
            mine = slice(shard * SHARD, (shard + 1) * SHARD)
            value = loss(forward(inputs[mine]), targets[mine])
            (value / len(shards)).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def one_process(name, dtype, kind, world_size):
    model = build(name, dtype, seed=0)
    optimizer_class, options = OPTIMIZERS[kind]
    optimizer = optimizer_class(groups(model), **options)
    return train(model, optimizer, name, dtype, range(world_size), world_size)


def all_forms(rank, world_size, name, dtype, kind):
    optimizer_class, options = OPTIMIZERS[kind]
    told = {}
    for form, (zero, cap) in FORMS.items():
        model = build(name, dtype, seed=rank)  # other weights on every rank: construction must even them out
        optimizer = zero(groups(model), optimizer_class, bucket_cap_mb=cap, **options)
        told[form] = train(model, optimizer, name, dtype, [rank], world_size)
    for form, wrap in (("ours", DDP), ("torch", DistributedDataParallel)):
        model = build(name, dtype, seed=rank)
        ddp = wrap(model)
        optimizer = optimizer_class(groups(model), **options)
        if form == "torch":  # it takes one group, and nothing frozen
            chosen = [{"params": [p for p in g["params"] if p.requires_grad]} for g in groups(model)]
            optimizer = ZeroRedundancyOptimizer(chosen[0]["params"], optimizer_class, **options)
            optimizer.add_param_group({**chosen[1], "weight_decay": 0.0})
        told[form] = train(model, optimizer, name, dtype, [rank], world_size, ddp)
    return told


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("name", "world_size"), [("resnet", 2), *((name, n) for name in ("mlp", "gpt") for n in (1, 2, 3, 4))]
)
def test_ranks_train_what_one_process_trains(ranks, world_size, name, dtype, kind):
    oracle = one_process(name, dtype, kind, world_size)
    for rank, told in enumerate(ranks(world_size, all_forms, name=name, dtype=dtype, kind=kind)):
        for form in FORMS:
            # The same sums in another order: rounding only.
            assert gap(told[form], oracle) <= TOLERANCE[dtype], f"rank {rank}, {form}"
            assert gap(told[form], told["torch"]) <= TOLERANCE[dtype], f"rank {rank}, {form}"
            if world_size <= 2:
                # a + b == b + a, and the update of an element does not depend on its neighbours.
                assert gap(told[form], told["ours"]) == 0.0, f"rank {rank}, {form}"


CLASSES = {
    "Adadelta": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "Adamax": {},
    "ASGD": {"t0": 2},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
}


def any_class(rank, world_size, kind):
    optimizer_class, options = getattr(torch.optim, kind), CLASSES[kind]
    plain, sharded = (build("mlp", torch.float64, seed=0) for _ in range(2))
    ours = ZeRO2(sharded.parameters(), optimizer_class, bucket_cap_mb=0.005, **options)
    theirs = optimizer_class(plain.parameters(), **options)
    shards = range(world_size)
    largest = gap(
        train(sharded, ours, "mlp", torch.float64, [rank], world_size),
        train(plain, theirs, "mlp", torch.float64, shards, world_size),
    )
    told, expected = ours.state_dict(), theirs.state_dict()
    assert told["param_groups"] == expected["param_groups"]
    frozen = [i for i, p in enumerate(plain.parameters()) if not p.requires_grad]
    assert told["state"].keys() == expected["state"].keys() - frozen  # Adagrad makes a state for these, too
    for i, entries in expected["state"].items():
        if i in frozen:
            continue
        assert told["state"][i].keys() == entries.keys(), f"rank {rank}, parameter {i}"
        for key, value in entries.items():
            torch.testing.assert_close(told["state"][i][key], value, rtol=0, atol=1e-12, msg=key)
    return largest


@pytest.mark.parametrize("kind", CLASSES)
def test_any_elementwise_class_of_torch_optim_will_do(ranks, kind):
    # Rprop multiplies by signs: gradients that differ by rounding only must not change theirs.
    assert max(ranks(2, any_class, kind=kind)) <= 1e-12


def one_step_recorded(rank, world_size, name, form):
    zero, cap = FORMS[form]
    model = build(name, torch.float32, seed=rank)
    optimizer = zero(model.parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=cap)
    inputs, targets = (t.split(SHARD)[rank] for t in batch(name, torch.float32, 0, world_size))
    with comm.record() as log:
        models.loss(name)(model(inputs), targets).backward()
        inside = len(log)
        optimizer.step()
    held = [bucket.layout.padded for bucket in optimizer.buckets]
    return {
        "backward": [(event.op, event.payload_bytes) for event in log[:inside]],
        "step": [(event.op, event.payload_bytes) for event in log[inside:]],
        "sent": sum(event.sent_bytes for event in log),
        "complete": all(event.end is not None for event in log),
        "buckets": [4 * padded for padded in held],
        "padding": sum(held) - sum(p.numel() for p in trained(model)),
        "numel": sum(p.numel() for p in trained(model)),
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", models.SIZES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gradient_travels_once_and_a_parameter_once(ranks, world_size, name, form):
    results = ranks(world_size, one_step_recorded, name=name, form=form)
    told = results[0]
    for rank, other in enumerate(results):
        assert other == told, f"rank {rank}"  # the same operations in the same order
    assert told["backward"] == [("reduce_scatter", size) for size in told["buckets"]]
    assert told["step"] == [("all_gather", size) for size in told["buckets"]]
    assert told["complete"]
    assert told["padding"] < world_size * len(told["buckets"])
    n, padded = world_size, sum(told["buckets"])
    # DDP's 2 (n-1)/n G, exactly, but for the padding; every message is rounded down to whole bytes.
    assert 0 <= 2 * (n - 1) * padded / n - told["sent"] < 2 * len(told["buckets"])


def held_after(rank, world_size, zero):
    model = build("gpt", torch.float32, seed=rank)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    optimizer = zero(model.parameters(), torch.optim.AdamW, bucket_cap_mb=0.01)
    inputs, targets = (t.split(SHARD)[rank] for t in batch("gpt", torch.float32, 0, world_size))
    for _ in range(2):
        optimizer.zero_grad()
        with MemoryTracker(model, optimizer) as memory:
            models.loss("gpt")(model(inputs), targets).backward()
            optimizer.step()
    padded = [4 * bucket.layout.padded for bucket in optimizer.buckets]
    pieces = [piece for bucket in optimizer.buckets for piece in bucket.pieces if piece is not None]
    held = {kind: size for kind, size in memory.current.items() if size}
    whole = sum(padded)
    assert held == {
        "parameters": whole + frozen,
        "gradients": whole if zero is ZeRO1 else whole // world_size,
        # Two moments an element, and a float32 count of steps a piece. Padding has no states.
        "optimizer_states": sum(2 * piece.nbytes + 4 for piece in pieces),
    }
    return memory.peak, whole, max(padded)


@pytest.mark.parametrize("zero", [ZeRO1, ZeRO2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_held_to_the_byte_states_fall_as_one_over_n_and_gradients_with_them(ranks, world_size, zero):
    for rank, (peak, whole, largest) in enumerate(ranks(world_size, held_after, zero=zero)):
        assert peak["optimizer_states"] < 2 * whole / world_size + 1000, f"rank {rank}"
        if zero is ZeRO2:
            # Its shard, and of the buckets on their way: one being filled, two leaving, each with the parts received.
            assert peak["gradients"] + peak["communication"] <= whole / world_size + 5 * largest, f"rank {rank}"


def in_flight(rank, world_size):
    """The most bytes of full gradients that ZeRO-2 stores at once during backward."""
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(12)])
    optimizer = ZeRO2(model.parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=0)
    alive = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(b._flat.nbytes for b in optimizer.buckets if b._flat is not None))
        )
    model(torch.ones(2, 64)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(bucket._flat is None for bucket in optimizer.buckets)
    return max(alive) // model[0].weight.nbytes


def test_zero2_never_holds_more_than_the_buckets_on_their_way(ranks):
    assert ranks(2, in_flight) == [1, 1]  # the one that has just left; the one before has been freed


def test_parameters_become_views_of_buffers_that_a_layout_cuts(ranks):
    assert ranks(2, views) == [True, True]


def views(rank, world_size):
    model = build("mlp", torch.float32, seed=0)
    before = state(model)
    optimizer = ZeRO1(model.parameters(), torch.optim.SGD, lr=0.1, bucket_cap_mb=0.01)
    for number, bucket in enumerate(optimizer.buckets):
        layout = Layout([p.shape for p in bucket.members], world_size)
        assert layout.padded == bucket.values.numel(), f"rank {rank}, bucket {number}"
        for p, view in zip(bucket.members, layout.views(bucket.values), strict=True):
            assert p.data_ptr() == view.data_ptr(), f"rank {rank}, bucket {number}"
    pieces = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(p.dim() == 1 and p.numel() for p in pieces)
    numel = torch.tensor(float(sum(p.numel() for p in pieces)))
    dist.all_reduce(numel)
    assert numel == sum(p.numel() for p in trained(model))  # every element is exactly one rank's
    return gap(state(model), before) == 0.0


@pytest.fixture
def nccl(tmp_path):
    """A group of one rank: enough for streams and buffers on the device to be the real ones."""
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_on_cuda_it_trains_what_the_plain_optimizer_trains(nccl, form, options):
    zero, cap = FORMS[form]
    told = []
    for make in (lambda p: torch.optim.AdamW(p, **options), lambda p: zero(p, torch.optim.AdamW, None, cap, **options)):
        model = build("gpt", torch.float32, seed=0).cuda()
        optimizer = make(model.parameters())
        for step in range(STEPS):
            inputs, targets = (t.cuda() for t in batch("gpt", torch.float32, step, 1))
            optimizer.zero_grad()
            models.loss("gpt")(model(inputs), targets).backward()
            optimizer.step()
        told.append(state(model))
        optimizer.load_state_dict(optimizer.state_dict())
    assert gap(*told) <= 1e-6
