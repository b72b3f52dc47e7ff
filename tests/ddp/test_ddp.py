"""The oracle of data parallelism: W ranks on shards train the model that one process trains on the whole batch."""

import copy

import pytest
import torch
import torch.distributed as dist
from oracle_models import SHARD, STEPS, TOLERANCE, batch, build, fit, trained
from tensors import gap, state
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from labkit import comm, models
from labkit.ddp import DDP
from labkit.ddp.bucket import assign_buckets
from labkit.ideas.data_parallel import average_gradients

FORMS = {
    "naive": {"bucket_cap_mb": 0, "overlap": False},
    "overlapped": {"bucket_cap_mb": 0, "overlap": True},
    "bucketed": {"bucket_cap_mb": 0.05, "overlap": True},
}


def sgd(model):
    # Not Adam: it divides by the gradient's size, and would hide a sum in place of a mean.
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05, momentum=0.9)


def one_process(name, dtype, world_size, **overrides):
    """The oracle. Batch statistics exist per shard, so the shards go through one by one and gradients are averaged."""
    model = build(name, dtype, seed=0, **overrides)
    optimizer, loss = sgd(model), models.loss(name)
    for step in range(STEPS):
        inputs, targets = batch(name, dtype, step, world_size)
        optimizer.zero_grad()
        before, first = [b.clone() for b in model.buffers()], None
        for x, y in zip(inputs.split(SHARD), targets.split(SHARD), strict=True):
            for b, value in zip(model.buffers(), before, strict=True):
                b.data.copy_(value)
            (loss(model(x), y) / world_size).backward()
            first = first or [b.clone() for b in model.buffers()]
        for b, value in zip(model.buffers(), first, strict=True):  # rank 0's statistics are everybody's
            b.data.copy_(value)
        optimizer.step()
    return state(model)


def whole_batch(name, dtype, world_size, **overrides):
    """The oracle without batch statistics: nothing but a larger batch."""
    model = build(name, dtype, seed=0, **overrides)
    fit(model, sgd(model), name, dtype, world_size)
    return state(model)


def train(wrap, name, dtype, rank, world_size, **overrides):
    model = build(name, dtype, seed=rank, **overrides)  # other weights on every rank: construction must even them out
    wrapped = wrap(model)
    fit(wrapped, sgd(wrapped), name, dtype, world_size, rank)
    return state(model)


def all_forms(rank, world_size, name, dtype, overrides):
    wraps = {form: lambda m, settings=settings: DDP(m, **settings) for form, settings in FORMS.items()}
    wraps["torch"] = lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True)
    return {form: train(wrap, name, dtype, rank, world_size, **overrides) for form, wrap in wraps.items()}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", models.SIZES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_train_what_one_process_trains(ranks, world_size, name, dtype):
    oracle = one_process(name, dtype, world_size)
    for rank, results in enumerate(ranks(world_size, all_forms, name=name, dtype=dtype, overrides={})):
        for form in FORMS:
            # The same sums in another order: rounding only. Rank r's own statistics differ until the next forward.
            told = results[form] if rank == 0 else {k: v for k, v in results[form].items() if "running" not in k}
            assert gap(told, {k: oracle[k] for k in told}) <= TOLERANCE[dtype], f"rank {rank}, {form}"
            assert gap(results[form], results["torch"]) <= TOLERANCE[dtype], f"rank {rank}, {form}"
            if world_size <= 2:
                # a + b == b + a: with two ranks the order of sums cannot matter, and neither may anything else.
                assert gap(results[form], results["torch"]) == 0.0, f"rank {rank}, {form}"


@pytest.mark.parametrize(("name", "overrides"), [("mlp", {}), ("resnet", {"norm": "group"}), ("gpt", {"tied": False})])
@pytest.mark.parametrize("world_size", [2, 3])
def test_without_batch_statistics_it_is_the_whole_batch_at_once(ranks, world_size, name, overrides):
    oracle = whole_batch(name, torch.float64, world_size, **overrides)
    for rank, results in enumerate(ranks(world_size, all_forms, name=name, dtype=torch.float64, overrides=overrides)):
        for form in FORMS:
            assert gap(results[form], oracle) <= 1e-12, f"rank {rank}, {form}"


def one_step_recorded(rank, world_size, name, settings):
    wrapped = DDP(build(name, torch.float32, seed=rank), **settings)
    inputs, targets = (t.split(SHARD)[rank] for t in batch(name, torch.float32, 0, world_size))
    output = wrapped(inputs)
    value = models.loss(name)(output, targets)
    with comm.record() as log:
        value.backward()
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    return {
        "events": [(event.op, event.payload_bytes) for event in log],
        "parameters": len(trained),
        "bytes": sum(p.nbytes for p in trained),
        "buckets": [bucket.nbytes for bucket in wrapped.buckets],
        "complete": all(event.end is not None for event in log),
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", models.SIZES)
def test_every_gradient_is_sent_exactly_once(ranks, name, form):
    results = ranks(2, one_step_recorded, name=name, settings=FORMS[form])
    assert results[0] == results[1]  # the same operations in the same order
    told = results[0]
    assert [op for op, _ in told["events"]] == ["all_reduce"] * len(told["events"])
    assert sum(payload for _, payload in told["events"]) == told["bytes"]
    assert [payload for _, payload in told["events"]] == told["buckets"]
    assert told["complete"]
    if form == "bucketed":
        assert len(told["events"]) < told["parameters"]
    else:
        assert len(told["events"]) == told["parameters"]


def storages(rank, world_size, settings, passes):
    wrapped = DDP(build("mlp", torch.float32, seed=rank), **settings)
    inputs, targets = (t.split(SHARD)[rank] for t in batch("mlp", torch.float32, 0, world_size))
    for number in range(2):
        wrapped.zero_grad(set_to_none=number == 0)
        for _ in range(passes - 1):
            with wrapped.no_sync():
                models.loss("mlp")(wrapped(inputs), targets).backward()
        models.loss("mlp")(wrapped(inputs), targets).backward()
        trained = [p for p in wrapped.parameters() if p.requires_grad]
        held = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in trained}
        if settings["bucket_cap_mb"]:
            assert held.keys() == {bucket.buffer().untyped_storage().data_ptr() for bucket in wrapped.buckets}, (
                f"rank {rank}, backward {number}"
            )
        assert sum(held.values()) == sum(p.nbytes for p in trained), f"rank {rank}, backward {number}"


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_the_buckets_memory_and_there_is_no_second_copy(ranks, form, passes):
    ranks(2, storages, settings=FORMS[form], passes=passes)


def naive_idea(rank, world_size):
    model = build("mlp", torch.float64, seed=0)
    inputs, targets = (t.split(SHARD)[rank] for t in batch("mlp", torch.float64, 0, world_size))
    wrapped = DDP(copy.deepcopy(model))
    for m in (model, wrapped):
        models.loss("mlp")(m(inputs), targets).backward()
    average_gradients(model.parameters())
    return [float((p.grad - q.grad).abs().max()) for p, q in zip(*map(trained, (model, wrapped)), strict=True)]


def test_the_six_line_idea_gives_the_same_gradients(ranks):
    assert max(max(told) for told in ranks(3, naive_idea)) <= 1e-15


def test_buckets_follow_backward_and_hold_one_dtype():
    sizes = [(10, torch.float32), (10, torch.float64), (30, torch.float32), (10, torch.float32), (0, torch.float32)]
    first, second, third, fourth, fifth = parameters = [torch.nn.Parameter(torch.zeros(n, dtype=d)) for n, d in sizes]

    def groups(cap_bytes):
        return [[id(p) for p in members] for members in assign_buckets(parameters, cap_bytes)]

    def ids(*lists):
        return [[id(p) for p in members] for members in lists]

    assert groups(0) == ids([fifth], [fourth], [third], [second], [first])
    assert groups(40) == ids([fifth, fourth], [third], [second], [first])  # one gradient may be larger
    assert groups(160) == ids([fifth, fourth, third], [second], [first])
    assert groups(10**6) == ids([second], [fifth, fourth, third, first])  # in order of completion


@pytest.fixture
def nccl(tmp_path):
    """A group of one rank: enough for streams, futures and buffers on the device to be the real ones."""
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def gradients_on_cuda(wrap):
    wrapped = wrap(build("resnet", torch.float32, seed=0).cuda())
    inputs, targets = (t.cuda() for t in batch("resnet", torch.float32, 0, 1))
    for _ in range(2):
        wrapped.zero_grad()
        models.loss("resnet")(wrapped(inputs), targets).backward()
    return [p.grad for p in trained(wrapped)]


@pytest.mark.gpu
@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_on_cuda_gradients_are_the_mean_too(nccl, form, find):
    ours = gradients_on_cuda(lambda m: DDP(m, find_unused_parameters=find, **FORMS[form]))
    torch.testing.assert_close(ours, gradients_on_cuda(lambda m: m))


@pytest.mark.gpu
def test_on_cuda_a_hooks_future_is_waited_for(nccl):
    def wrap(model):
        wrapped = DDP(model, bucket_cap_mb=0.05)
        wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped

    torch.testing.assert_close(gradients_on_cuda(wrap), gradients_on_cuda(lambda m: m), rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
def test_on_cuda_the_model_may_move_after_it_was_wrapped(nccl):
    def wrap(model):
        return DDP(model.cpu().cuda()).double().float()

    torch.testing.assert_close(gradients_on_cuda(wrap), gradients_on_cuda(lambda m: m))
