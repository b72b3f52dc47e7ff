import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.memory.memory_tracker import KINDS, MemoryTracker

FLOAT = 4


def small_mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


WEIGHTS = 8 * 16 + 16 + 16 * 4 + 4


def nothing(**held):
    return dict.fromkeys(KINDS, 0) | held


def train_step(model, optimizer, batch=32):
    model(torch.ones(batch, 8)).sum().backward()
    optimizer.step()


def test_a_tracker_that_sees_nothing_counts_nothing():
    with MemoryTracker() as memory:
        pass
    assert memory.current == memory.peak == nothing() and memory.peak_total == 0
    assert memory.samples == [(0.0, nothing())]  # at entry


@pytest.mark.parametrize(
    ("make", "state_bytes"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), FLOAT * WEIGHTS),
        # Two moments per weight, and one float32 step count for each of the four tensors.
        (lambda p: torch.optim.AdamW(p), 2 * FLOAT * WEIGHTS + 4 * FLOAT),
    ],
)
@pytest.mark.parametrize("told", [True, False])
def test_states_of_training_to_the_byte(make, state_bytes, told):
    model = small_mlp()
    optimizer = make(model.parameters())
    with MemoryTracker(*([model, optimizer] if told else [])) as memory:
        train_step(model, optimizer)
    expected = nothing(parameters=FLOAT * WEIGHTS, gradients=FLOAT * WEIGHTS, optimizer_states=state_bytes)
    assert memory.current == expected


def test_states_that_exist_at_entry_count():
    model = small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_step(model, optimizer)
    with MemoryTracker(model, optimizer) as memory:
        held = memory.current
        optimizer.zero_grad()
        after = memory.current
    size = FLOAT * WEIGHTS
    assert held == nothing(parameters=size, gradients=size, optimizer_states=size)
    assert after == nothing(parameters=size, optimizer_states=size)


def test_model_created_inside():
    with MemoryTracker() as memory:
        model = small_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_step(model, optimizer)
    assert memory.current == nothing(parameters=FLOAT * WEIGHTS, gradients=FLOAT * WEIGHTS)


def test_activations_of_a_chain():
    """Linear keeps its input and ReLU its output: of x -> 16 -> relu -> 4 only middle and output are new."""
    model, batch = small_mlp(), 32
    x = torch.ones(batch, 8)  # made outside: not ours
    with MemoryTracker(model) as memory:
        output = model(x)
        assert memory.current["activations"] == FLOAT * batch * (16 + 4)
        # While ReLU runs, its input is alive as well; the output of the last layer is not there yet.
        assert memory.peak["activations"] == 2 * FLOAT * batch * 16
        del output
        assert memory.current == nothing(parameters=FLOAT * WEIGHTS)


def test_peak_of_backward():
    """y = w2 (w1 x): the peak is where dw1 or dw2 is made; a kind learnt late holds from the storage's beginning."""
    w1, w2 = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    x, incoming, size = torch.ones(64, 64), torch.ones(64, 64), FLOAT * 64 * 64
    with MemoryTracker(nn.Sequential(w1, w2)) as memory:
        y = w2(w1(x))
        y.backward(incoming)
    # y is held, w1 x is saved, the gradient passed on is new, and dw2 becomes w2.grad.
    assert memory.peak == nothing(parameters=2 * size, gradients=size, activations=3 * size)
    assert memory.current == nothing(parameters=2 * size, gradients=2 * size, activations=size)


def test_a_storage_counts_once():
    with MemoryTracker() as memory:
        a = torch.empty(100)
        views = [a[10:], a.view(10, 10).t(), a.detach(), a.numpy()]
        assert memory.current == nothing(activations=400)
        del a
        assert memory.current == nothing(activations=400)
        views.clear()
        assert memory.current == nothing()
    assert memory.peak_total == 400


def test_views_of_what_was_made_outside_do_not_count():
    outside = torch.ones(100)
    with MemoryTracker() as memory:
        outside.view(10, 10).t().mul_(2).add_(1)
        assert memory.peak_total == 0


def test_tensors_from_python_and_numpy():
    import numpy

    with MemoryTracker() as memory:
        held = [torch.tensor([1.0, 2.0]), torch.from_numpy(numpy.ones(3)), torch.arange(4, dtype=torch.int16)]
        assert memory.current == nothing(activations=8 + 24 + 8)
        assert len(held) == 3


def test_in_place_resize_and_set():
    with MemoryTracker() as memory:
        a = torch.zeros(10)
        a.add_(1).relu_()
        assert memory.current == nothing(activations=40)
        a.resize_(25)
        assert memory.current == nothing(activations=100)
        a.untyped_storage().resize_(0)
        assert memory.current == nothing()
        a.untyped_storage().resize_(60)
        assert memory.current == nothing(activations=60)
        b = torch.zeros(7)
        a.set_(b)
        assert memory.current == nothing(activations=28)
        a.data = torch.zeros(3)
        assert memory.current == nothing(activations=28 + 12)
        torch.add(torch.zeros(9), 1, out=b.resize_(0))
        assert memory.current == nothing(activations=36 + 12)


def test_tied_parameters_count_once():
    embedding, head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    with MemoryTracker(model) as memory:
        model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    assert memory.current == nothing(parameters=FLOAT * 400, gradients=FLOAT * 400)


def test_buffers_and_frozen_parameters():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    model[0].weight.requires_grad_(False)
    with MemoryTracker(model) as memory:
        model(torch.ones(3, 4)).sum().backward()
    trained = FLOAT * (6 + 12)
    assert memory.current == nothing(parameters=trained + FLOAT * 24, gradients=trained, buffers=2 * 24 + 8)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        square = x * x
        ctx.save_for_backward(x, square)
        return x * square

    @staticmethod
    def backward(ctx, grad):
        square = ctx.saved_tensors[1]
        return grad * 3 * square


def test_what_an_autograd_function_saves():
    x = torch.ones(10, requires_grad=True)
    with MemoryTracker() as memory:
        y = Cube.apply(x)
        assert memory.current == nothing(activations=80)  # y and the saved square; x was there before
        y.sum().backward()
        del y
        gc.collect()
        assert memory.current["gradients"] == 0 and memory.current["activations"] == 40  # x is no nn.Parameter


def test_gradients_dropped_inside_still_count_as_gradients():
    model = small_mlp()
    with MemoryTracker(model) as memory:
        model(torch.ones(1, 8)).sum().backward()
        model.zero_grad(set_to_none=True)
    assert memory.current["gradients"] == 0
    assert max(kinds["gradients"] for _, kinds in memory.samples) == FLOAT * WEIGHTS


def test_marks_win():
    with MemoryTracker() as memory:
        staging, kept = torch.empty(10), torch.empty(5)
        memory.mark(staging, "communication")
        with pytest.raises(ValueError, match="kind='scratch' must be one of parameters"):
            memory.mark(kept, "scratch")
    assert memory.current == nothing(communication=40, activations=20)


def test_samples_end_at_current_and_reach_the_peak():
    model = small_mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryTracker(model, optimizer) as memory:
        train_step(model, optimizer)
    moments = [moment for moment, _ in memory.samples]
    assert moments == sorted(moments) and moments[0] >= 0
    assert memory.samples[-1][1] == memory.current
    assert max(sum(kinds.values()) for _, kinds in memory.samples) == memory.peak_total == sum(memory.peak.values())


def test_nothing_is_left_behind():
    model, before = small_mlp(), torch.UntypedStorage.resize_
    memory = MemoryTracker(model)
    for _ in range(2):
        with memory:
            model(torch.ones(1, 8)).sum().backward()
        assert memory.current == nothing(parameters=FLOAT * WEIGHTS, gradients=FLOAT * WEIGHTS)
    frozen = memory.current
    model.zero_grad()
    torch.zeros(1000)
    assert memory.current == frozen
    assert torch.UntypedStorage.resize_ is before
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def one_step_of_torch_ddp(rank, world_size, views):
    model = small_mlp()
    with MemoryTracker(model) as memory:
        ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
        ddp(torch.ones(4, 8)).sum().backward()
        held = memory.current
        del ddp
    return held


@pytest.mark.parametrize("views", [False, True])
def test_torch_ddp_keeps_buckets(ranks, views):
    size = FLOAT * WEIGHTS
    for rank, held in enumerate(ranks(2, one_step_of_torch_ddp, views=views)):
        assert (held["parameters"], held["gradients"]) == (size, size), f"rank {rank}"
        # Without views the reducer holds a second copy of the gradients; what is left is the reducer's bookkeeping.
        assert 0 <= held["communication"] - (0 if views else size) < size, f"rank {rank}"


def one_step_of_fully_shard(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryTracker(model, optimizer) as memory:
        start = memory.current
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
    return start, memory.current, max(kinds["parameters"] for _, kinds in memory.samples)


def test_fully_shard_counts_local_shards(ranks):
    size = FLOAT * 2 * 64 * 64
    for rank, (start, held, most) in enumerate(ranks(2, one_step_of_fully_shard)):
        assert start == nothing(parameters=size // 2), f"rank {rank}"
        assert (held["parameters"], held["gradients"]) == (size // 2, size // 2), f"rank {rank}"
        assert held["optimizer_states"] == size + 2 * FLOAT, f"rank {rank}"
        assert most == size // 2 + size // 2, f"rank {rank}"  # the shards, and one layer gathered at a time


def bucket_as_gradients(rank, world_size):
    """Gradients that are views of one flat buffer, all-reduced in place: once, and gradients."""
    model = small_mlp()
    flat = torch.zeros(WEIGHTS)
    offset = 0
    for p in model.parameters():
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    with MemoryTracker(model) as memory:
        model(torch.ones(4, 8)).sum().backward()
        dist.all_reduce(flat)
        scratch = torch.zeros(10)
        dist.all_reduce(scratch)
    return memory.current


def test_a_bucket_counts_once_as_gradients(ranks):
    for rank, held in enumerate(ranks(2, bucket_as_gradients)):
        assert held == nothing(parameters=FLOAT * WEIGHTS, gradients=FLOAT * WEIGHTS, communication=40), f"rank {rank}"


@pytest.mark.gpu
def test_the_same_on_cuda():
    def held(device):
        model = small_mlp().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.ones(32, 8, device=device)
        with MemoryTracker(model, optimizer, device=device) as memory:
            model(x).sum().backward()
            optimizer.step()
        return memory

    torch.cuda.init()
    on_cpu, on_cuda = held("cpu"), held("cuda")
    assert on_cpu.current == on_cuda.current and on_cuda.cuda_peak >= on_cuda.peak_total


def one_step_of_our_ddp(rank, world_size, **form):
    from labkit.ddp import DDP

    model = small_mlp()
    with MemoryTracker(model) as memory:
        ddp = DDP(model, **form)
        ddp(torch.ones(4, 8)).sum().backward()
        held = memory.current
        del ddp
    return held


@pytest.mark.parametrize("form", [{}, {"bucket_cap_mb": 0}, {"bucket_cap_mb": 0, "overlap": False}])
def test_our_ddp_holds_gradients_once(ranks, form):
    for rank, held in enumerate(ranks(2, one_step_of_our_ddp, **form)):
        assert held["parameters"] == held["gradients"] == FLOAT * WEIGHTS, f"rank {rank}"
        assert held["communication"] == 0, f"rank {rank}"  # no second copy of the gradients
