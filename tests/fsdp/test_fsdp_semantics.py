"""What a user notices: when gradients are averaged, what survives an exception, which models may be wrapped."""

import copy
from collections import namedtuple
from functools import partial

import pytest
import torch
from tensors import noise
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from labkit import comm
from labkit.amp import GradScaler
from labkit.fsdp import FSDP
from labkit.fsdp.wrap_policy import by_size
from labkit.recompute import recompute
from labkit.tensor_parallel import ColwiseParallel, parallelize_module
from labkit.zero import ZeRO1
from labkit.zero.clip import clip_grad_norm_

WIDTH = 5


class Cell(nn.Module):
    """A unit of 2 x 30 + 5 parameters, which 2, 3 and 4 ranks do not divide."""

    def __init__(self, inside=None):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.inside = inside

    def body(self, x):
        return self.scale * self.second(torch.tanh(self.first(x)))

    def forward(self, x):
        return x + (checkpoint(self.body, x, use_reentrant=self.inside) if self.inside is not None else self.body(x))


class Net(nn.Module):
    """head(cells(stem(x))). forward_as: a function of (net, x), for tests with another forward."""

    def __init__(self, seed=0, cells=3, forward_as=None, **cell):
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.cells = nn.ModuleList([Cell(**cell) for _ in range(cells)])
        self.head = nn.Linear(WIDTH, 1)
        self.forward_as = forward_as
        self.double()

    def forward(self, x):
        if self.forward_as is not None:
            return self.forward_as(self, x)
        x = self.stem(x)
        for cell in self.cells:
            x = cell(x)
        return self.head(x)


def data(rank, step=0):
    return noise(3, WIDTH, seed=100 * step + rank).double()


def square(model, x):
    return model(x).square().mean()


def whole_gradients(model):
    """{name: gradient, whole}: the pieces' gradients of all ranks, put together; None where a piece has none."""
    found = {name: p.grad for name, p in model.named_parameters() if any(p is other for other in model.replicated)}
    for flat in model.flats:
        shard = torch.zeros_like(flat.shard)
        views = flat.layout.pieces(shard, flat.rank)
        for name, view, piece in zip(flat.names, views, flat.pieces, strict=True):
            assert piece.grad is None or (piece.grad.shape == piece.shape and piece.grad.dtype == piece.dtype), (
                f"rank {flat.rank}, {name}"
            )
            if piece.grad is not None:
                view.copy_(piece.grad)
        total = shard.new_empty(flat.layout.padded)
        comm.all_gather(total, shard, flat.sharding.group)
        for name, piece, value in zip(flat.names, flat.pieces, flat.layout.views(total), strict=True):
            found[name] = None if piece.grad is None else value.clone()
    return found


def mean_of_ranks(module, loss, world_size):
    """The oracle: the gradients of every rank's loss(module, rank), averaged, in this process."""
    module = copy.deepcopy(module)
    for rank in range(world_size):
        (loss(module, rank) / world_size).backward()
    return {name: p.grad for name, p in module.named_parameters()}


def assert_same(ours, theirs):
    assert sorted(ours) == sorted(theirs)
    for name, theirs_value in theirs.items():
        if theirs_value is None:
            assert ours[name] is None, name
        else:
            assert float((ours[name] - theirs_value).abs().max()) <= 1e-12, name


def at_rest(model):
    """Nothing is gathered, and no memory is held under the wholes."""
    for flat in model.flats:
        assert not flat.whole and flat._gathering is None and flat._reducing is None, f"rank {flat.rank}, {flat.names}"
        assert flat.flat.untyped_storage().nbytes() == 0, f"rank {flat.rank}, {flat.names}"
        assert all(
            getattr(*place) is p for places, p in zip(flat.places, flat.pieces, strict=True) for place in places
        ), f"rank {flat.rank}, {flat.names}"


def one_backward(rank, world_size, build, loss, settings, unit=Cell):
    """One backward of loss(model, rank) is the mean over the ranks of what one process finds, and leaves no trace."""
    model = FSDP(build(seed=rank), unit, **settings)
    state = model.full_state_dict()
    oracle = build()
    oracle.load_state_dict(state)
    expected = mean_of_ranks(oracle, loss, world_size)
    for _ in range(3):  # the second uses the recorded order
        model.zero_grad()
        loss(model, rank).backward()
        assert_same(whole_gradients(model), expected)
        at_rest(model)


MODES = [
    pytest.param({}, id="full"),
    pytest.param({"prefetch": 0}, id="no-prefetch"),
    pytest.param({"root": "replicate", "prefetch": 9}, id="replicate"),
    pytest.param({"shard": "grad_op"}, id="grad_op"),
    pytest.param({"persistence_threshold": 5}, id="small-ones-persist"),
    pytest.param({"persistence_threshold": 99}, id="all-persist"),
]


def plain_loss(model, rank):
    return square(model, data(rank))


def two_forwards(model, rank):
    return square(model, data(rank)) + 2 * square(model, data(rank, step=1))


def evaluation_between(model, rank):
    value = square(model, data(rank))
    with torch.no_grad():
        model(data(rank, step=1))
    return value


def gradient_penalty(model, rank):
    x = data(rank).requires_grad_()
    value = square(model, x)
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)  # leaves parameters alone
    return value + gradient.square().mean()


def same_cell_twice(net, x):
    for cell in (net.cells[0], net.cells[1], net.cells[0], net.cells[0], net.cells[2]):
        x = cell(x)
    return net.head(net.stem(x))


def branches(net, x):
    x = net.stem(x)
    return net.head(net.cells[0](x) * net.cells[1](x) + net.cells[2](x.detach()))


def no_input_gradient(net, x):
    return net.head(net.cells[0](x) + net.cells[1](x) + net.cells[2](net.stem(x)))


def in_place(net, x):
    x = net.stem(x)
    for cell in net.cells:
        x = cell(x)
        x += 1.0
    return net.head(torch.relu_(x))


def around(reentrant, net, x):
    x = net.stem(x)
    for cell in net.cells:
        x = checkpoint(cell, x, use_reentrant=reentrant)
    return net.head(x)


def to_the_end(net, x):
    with set_checkpoint_early_stop(False):  # the second run then leaves the unit, which backward is about to use
        return around(False, net, x)


def several_in_one(reentrant, net, x):
    x = checkpoint(lambda t: net.cells[1](net.cells[0](t)), net.stem(x), use_reentrant=reentrant)
    return net.head(net.cells[2](x))


def around_by_ours(keep, net, x):
    x = net.stem(x)
    for cell in net.cells:
        x = recompute.checkpoint(cell, x, keep=keep)
    return net.head(x)


def every_cell(seed=0):
    net = Net(seed)
    recompute.checkpoint_every(net, Cell)
    return net


FORWARDS = {
    "plain": None,
    "same cell twice": same_cell_twice,
    "branches": branches,
    "no input gradient": no_input_gradient,
    "in place": in_place,
    "checkpointed units": partial(around, False),
    "checkpointed units, run to the end": to_the_end,
    "checkpointed units, reentrant": partial(around, True),
    "checkpointed units, by ours": partial(around_by_ours, None),
    "checkpointed units, products kept": partial(around_by_ours, "matmul"),
    "checkpoint of two units": partial(several_in_one, False),
    "checkpoint of two units, reentrant": partial(several_in_one, True),
}
LOSSES = {
    "two forwards": two_forwards,
    "evaluation between": evaluation_between,
    "penalty on the gradient of the input": gradient_penalty,
}


@pytest.mark.parametrize("settings", MODES)
@pytest.mark.parametrize("forward", FORWARDS)
def test_gradients_are_the_mean_over_ranks(ranks, forward, settings):
    build = partial(Net, forward_as=FORWARDS[forward])
    ranks(2, one_backward, build=build, loss=plain_loss, settings=settings)


@pytest.mark.parametrize("settings", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_whatever_forwards_a_loss_is_made_of(ranks, loss, settings):
    ranks(2, one_backward, build=Net, loss=LOSSES[loss], settings=settings)


@pytest.mark.parametrize("settings", MODES)
@pytest.mark.parametrize("inside", [False, True], ids=["checkpoint", "reentrant"])
def test_recomputation_inside_a_unit(ranks, inside, settings):
    ranks(3, one_backward, build=partial(Net, inside=inside), loss=plain_loss, settings=settings)


@pytest.mark.parametrize("settings", MODES)
def test_every_unit_recomputed_by_ours(ranks, settings):
    ranks(3, one_backward, build=every_cell, loss=plain_loss, settings=settings)


def one_input_for_all(net, x):
    x = net.stem(x)
    return net.head(sum(cell(x) for cell in net.cells))


def messages(rank, world_size, forward, prefetch):
    model = FSDP(Net(seed=rank, forward_as=forward), Cell, prefetch=prefetch)
    for _ in range(2):
        value = square(model, data(rank))
        with comm.record() as log:
            value.backward()
    return [event.op for event in log]


def test_a_unit_is_reduced_as_soon_as_its_own_part_of_backward_is_over(ranks):
    # All cells share an input, whose gradient is complete only after the last of them: nobody waits for that.
    told = ranks(2, messages, forward=one_input_for_all, prefetch=0)
    assert told == [["all_gather", "reduce_scatter"] * 3 + ["reduce_scatter"]] * 2


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_unit_that_is_called_several_times_is_reduced_once(ranks, prefetch):
    for rank, told in enumerate(ranks(2, messages, forward=same_cell_twice, prefetch=prefetch)):
        assert (told.count("all_gather"), told.count("reduce_scatter")) == (3, 4), f"rank {rank}"


def fresh_values(rank, world_size, settings):
    """Gathered for a forward whose backward never came; the next forward must not compute with that."""
    model = FSDP(Net(seed=rank), Cell, **settings)
    before = model(data(0))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    after = model(data(0))
    whole = Net()
    whole.load_state_dict(model.full_state_dict())
    assert torch.allclose(after, whole(data(0)), rtol=0, atol=1e-14) and not torch.allclose(after, before)


@pytest.mark.parametrize("settings", MODES)
def test_a_forward_sees_the_values_of_now(ranks, settings):
    ranks(2, fresh_values, settings=settings)


# ---- averaging or not


def accumulation(rank, world_size, settings):
    torch.manual_seed(rank)
    model = FSDP(Net(seed=rank), Cell, **settings)
    oracle = Net()
    oracle.load_state_dict(model.full_state_dict())

    def three(module, r):
        return sum(square(module, data(r, step)) for step in range(3))

    expected = mean_of_ranks(oracle, three, world_size)
    for number in range(2):
        with comm.record() as log:
            for step in range(2):
                with model.no_sync():
                    square(model, data(rank, step)).backward()
        ops = {event.op for event in log}
        assert ops == {"all_gather"}, f"rank {rank}, round {number}"  # gathers as ever, no reductions
        square(model, data(rank, 2)).backward()
        assert_same(whole_gradients(model), expected)
        at_rest(model)
        model.zero_grad()

    # And without no_sync: three averages add up to the same.
    for step in range(3):
        square(model, data(rank, step)).backward()
    assert_same(whole_gradients(model), expected)


@pytest.mark.parametrize("settings", MODES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_no_sync_keeps_whole_gradients_and_the_next_backward_sends_the_sum(ranks, world_size, settings):
    ranks(world_size, accumulation, settings=settings)


def discarded(rank, world_size, set_to_none):
    model = FSDP(Net(seed=rank), Cell)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    oracle = Net()
    oracle.load_state_dict(model.full_state_dict())
    expected = mean_of_ranks(oracle, plain_loss, world_size)
    with model.no_sync():
        square(model, data(rank, step=7)).backward()
        square(model, data(rank, step=8)).backward()
    optimizer.zero_grad(set_to_none)  # a step given up half-way, by the optimizer, which knows nothing of FSDP
    plain_loss(model, rank).backward()
    assert_same(whole_gradients(model), expected)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_optimizer_that_clears_gradients_clears_what_no_sync_kept(ranks, set_to_none):
    ranks(2, discarded, set_to_none=set_to_none)


def retained(rank, world_size):
    model = FSDP(Net(seed=rank), Cell)
    value = plain_loss(model, rank)
    value.backward(retain_graph=True)
    once = whole_gradients(model)
    value.backward()
    assert_same(whole_gradients(model), {name: 2 * g for name, g in once.items()})
    at_rest(model)


def test_a_graph_may_be_gone_through_twice(ranks):
    ranks(2, retained)


def clipped(rank, world_size, settings, norm_type):
    model = FSDP(Net(seed=rank), Cell, **settings)
    oracle = Net()
    oracle.load_state_dict(model.full_state_dict())
    expected = mean_of_ranks(oracle, plain_loss, world_size)
    for name, p in oracle.named_parameters():
        p.grad = expected[name]
    norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.01, norm_type)
    plain_loss(model, rank).backward()
    ours = model.clip_grad_norm_(0.01, norm_type)
    assert abs(float(ours - norm)) <= 1e-12
    theirs = {name: p.grad for name, p in oracle.named_parameters()}
    assert_same(whole_gradients(model), theirs)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("settings", [{}, {"root": "replicate"}], ids=["shard", "replicate"])
def test_clipping_sees_the_global_norm(ranks, settings, norm_type):
    ranks(3, clipped, settings=settings, norm_type=norm_type)


def clipped_too_early(rank, world_size):
    model = FSDP(Net(seed=rank), Cell)
    with model.no_sync():
        plain_loss(model, rank).backward()
    with pytest.raises(RuntimeError, match="not averaged"):
        model.clip_grad_norm_(1.0)
    for norm_type in (0, -float("inf")):
        with pytest.raises(ValueError, match=f"norm_type={norm_type} of shards is not known: it must be positive"):
            clip_grad_norm_({}, 1.0, norm_type)


def test_clipping_what_no_sync_keeps_is_told(ranks):
    ranks(2, clipped_too_early)


def scaled(rank, world_size):
    """One rank's gradient overflows in its own unit: every rank skips, and then all step together."""
    model = FSDP(Net(seed=rank), Cell)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    before = model.full_state_dict()
    for step in range(2):
        optimizer.zero_grad()
        value = plain_loss(model, rank) * (float("inf") if step == 0 and rank == 1 else 1.0)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        after = model.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in after) == (step == 0), f"rank {rank}, step {step}"
        assert scaler.get_scale() == 2.0, f"rank {rank}, step {step}"
    oracle = Net()
    oracle.load_state_dict(before)
    expected = mean_of_ranks(oracle, plain_loss, world_size)
    for name, value in before.items():
        assert torch.allclose(after[name], value - 0.1 * expected[name], rtol=0, atol=1e-12), f"rank {rank}, {name}"


def test_loss_scaling_sees_every_shard(ranks):
    ranks(3, scaled)


# ---- parameters of all kinds


class Adapted(nn.Module):
    """A frozen matrix and a trained branch in parallel: its gradients arrive before the frozen matrix is needed."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*[Adapted() for _ in range(3)], nn.Linear(WIDTH, 1)).double()


def frozen_unit(seed=0):
    net = Net(seed)
    net.cells[1].requires_grad_(False)
    return net


def test_frozen_parameters_beside_trained_ones(ranks):
    ranks(2, one_backward, build=adapted, loss=plain_loss, settings={}, unit=Adapted)


def test_a_frozen_unit_between_trained_ones(ranks):
    ranks(3, one_backward, build=frozen_unit, loss=plain_loss, settings={})


def unused(rank, world_size):
    model = FSDP(Net(seed=rank, forward_as=skip_second), Cell)
    square(model, data(rank)).backward()
    found = whole_gradients(model)
    # Its unit was not called: as in one process, no gradient.
    assert all(value is None for name, value in found.items() if name.startswith("cells.1."))
    # Unused in a unit that has gradients: zero.
    assert all(not found[f"stem.{name}"].any() for name in ("weight", "bias"))
    assert found["head.weight"].any() and found["cells.2.scale"].any()
    at_rest(model)
    square(model, data(rank)).backward()


def skip_second(net, x):
    return net.head(net.cells[2](net.cells[0](x)))


def unused_on_one_rank(rank, world_size):
    def forward(net, x):
        return net.head(net.cells[1](net.cells[0](x if rank else net.stem(x))))

    model = FSDP(Net(seed=rank, forward_as=forward), Cell)
    oracle = Net()
    oracle.load_state_dict(model.full_state_dict())

    def loss(module, r):
        x = data(r)
        return module.head(module.cells[1](module.cells[0](x if r else module.stem(x)))).square().mean()

    expected = mean_of_ranks(oracle, loss, world_size)
    for _ in range(2):
        model.zero_grad()
        square(model, data(rank)).backward()
        assert_same(whole_gradients(model), expected)


def test_unused_parameters(ranks):
    ranks(2, unused)
    ranks(3, unused_on_one_rank)


def outputs_of_all_cells(net, x):
    x = net.stem(x)
    y = net.cells[0](x)
    z = net.cells[1](y)
    return y, z, net.head(net.cells[2](x)) + net.cells[0](y)


def left_out(chosen, model, rank):
    """On each rank the loss is of other outputs: the last rank leaves out most."""
    outputs = model(data(rank))
    return sum(output.square().mean() for number, output in enumerate(outputs) if number in chosen[rank])


def left_out_of_one_forward(model, rank):
    first, second = model(data(rank)), model(data(rank, step=1))
    return first[1].square().mean() + second[0 if rank else 2].square().mean()


@pytest.mark.parametrize("settings", MODES)
@pytest.mark.parametrize("chosen", [({0, 1, 2}, {2}), ({1, 2}, {0}), ({1}, {2})], ids=str)
def test_a_loss_that_leaves_units_out_on_one_rank(ranks, chosen, settings):
    build = partial(Net, forward_as=outputs_of_all_cells)
    ranks(2, one_backward, build=build, loss=partial(left_out, chosen), settings=settings)


def test_a_loss_that_leaves_units_of_one_forward_out(ranks):
    build = partial(Net, forward_as=outputs_of_all_cells)
    ranks(2, one_backward, build=build, loss=left_out_of_one_forward, settings={})


Pair = namedtuple("Pair", "left right")


class Nested(nn.Module):
    """Takes and gives tensors in containers, by keyword too."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, pair, *, scales):
        return {"pair": Pair(self.left(pair.left) * scales[0], self.right(pair.right)), "text": "as it is"}


class NestedNet(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.stem, self.cells = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Nested(), Nested()])
        self.double()

    def forward(self, x):
        pair = Pair(self.stem(x), x)
        for cell in self.cells:
            pair = cell(pair, scales=[pair.right.mean(), None])["pair"]
        return pair.left * pair.right


def test_tensors_in_containers(ranks):
    ranks(2, one_backward, build=NestedNet, loss=plain_loss, settings={}, unit=Nested)


class Opaque:
    def __init__(self, value):
        self.value = value


class Hiding(Cell):
    def forward(self, x):
        return Opaque(super().forward(x))


def hiding(rank, world_size):
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(Hiding()).double(), Hiding)
    with pytest.raises(TypeError, match=r"'0' returns Opaque, in which FSDP finds no tensor"):
        model(data(rank))
    with torch.no_grad():
        assert model(data(rank)).value.shape == (3, WIDTH)


def test_an_output_in_which_no_tensor_is_found_is_told(ranks):
    ranks(2, hiding)


def smaller_than_the_group(rank, world_size):
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False)).double()
    model = FSDP(module, nn.Linear)
    oracle = copy.deepcopy(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False)).double())
    oracle.load_state_dict(model.full_state_dict())
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, oracle))
    x = torch.arange(4.0).double().view(4, 1, 1)
    for _ in range(3):
        for m, optimizer, inputs in ((model, ours, x[rank]), (oracle, theirs, x.view(4, 1)[:world_size])):
            optimizer.zero_grad()
            m(inputs).square().mean().backward()
            optimizer.step()
    told = model.full_state_dict()
    assert all(torch.allclose(told[name], value, atol=1e-12, rtol=0) for name, value in oracle.state_dict().items())
    assert sum(p.numel() == 0 for p in model.parameters()) >= 1


def test_fewer_elements_than_ranks(ranks):
    ranks(4, smaller_than_the_group)


# ---- exceptions


def raises_half_way(rank, world_size, settings):
    model = FSDP(Net(seed=rank, forward_as=fragile), Cell, **settings)
    oracle = Net()
    oracle.load_state_dict(model.full_state_dict())
    expected = mean_of_ranks(oracle, plain_loss, world_size)
    for _ in range(2):
        model.module.broken = True
        with pytest.raises(ArithmeticError):
            model(data(rank))
        at_rest(model)
        model.module.broken = False
        model.zero_grad()
        plain_loss(model, rank).backward()
        assert_same(whole_gradients(model), expected)


def fragile(net, x):
    x = net.cells[0](net.stem(x))
    if getattr(net, "broken", False):
        raise ArithmeticError("half-way")
    return net.head(net.cells[2](net.cells[1](x)))


@pytest.mark.parametrize("settings", MODES)
def test_after_a_forward_that_raises_half_way_the_next_step_works(ranks, settings):
    ranks(2, raises_half_way, settings=settings)


def raises_in_backward(rank, world_size, settings):
    model = FSDP(Net(seed=rank), Cell, **settings)
    oracle = Net()
    oracle.load_state_dict(model.full_state_dict())
    expected = mean_of_ranks(oracle, plain_loss, world_size)

    def explode(gradient):
        raise ArithmeticError("in backward")

    for _ in range(2):
        handle = model.module.cells[1].register_forward_hook(lambda m, a, out: out.register_hook(explode) and None)
        with pytest.raises(ArithmeticError):
            plain_loss(model, rank).backward()
        handle.remove()
        model.zero_grad()
        plain_loss(model, rank).backward()
        assert_same(whole_gradients(model), expected)
        at_rest(model)


@pytest.mark.parametrize("settings", MODES)
def test_after_a_backward_that_raises_the_next_step_works(ranks, settings):
    ranks(2, raises_in_backward, settings=settings)


def stale(rank, world_size):
    model = FSDP(Net(seed=rank), Cell)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_loss(model, rank).backward()
    value = plain_loss(model, rank)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"parameters of .* were changed between forward and backward"):
        value.backward()
    value = plain_loss(model, rank)
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):  # there is no forward left: torch's own words
        value.backward()
    model.zero_grad()
    plain_loss(model, rank).backward()
    at_rest(model)


def test_backward_without_its_forward_is_told(ranks):
    ranks(2, stale)


def moved(rank, world_size):
    model = FSDP(Net(seed=rank), Cell)
    name = f"cells.1.{('first', 'second')[rank]}.weight"  # of each, this rank has some
    weight = dict(model.named_parameters())[name]
    before = weight.data
    weight.data = before.clone()
    with pytest.raises(RuntimeError, match=f"'{name}' was given other storage behind FSDP"):
        model(data(rank))
    weight.data = before
    model(data(rank))
    weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=f"'{name}' was frozen after"):
        model(data(rank))
    weight.requires_grad_(True)
    model.module.cells[0].scale = nn.Parameter(torch.ones(WIDTH).double())
    with pytest.raises(RuntimeError, match=r"'cells.0.scale' was replaced behind FSDP"):
        model(data(rank))


def test_changing_parameters_behind_fsdp_is_told(ranks):
    ranks(2, moved)


class Attending(nn.Module):
    """nn.MultiheadAttention reads the weight of its out_proj, and does not call it."""

    def __init__(self):
        super().__init__()
        self.first, self.attention = nn.Linear(4, 4), nn.MultiheadAttention(4, 2)

    def forward(self, x):
        return self.attention(*[self.first(x)] * 3)[0]

    def encode(self, x):
        return self.first(x)


def read_elsewhere(rank, world_size):
    told, x = [], torch.ones(2, 1, 4)
    for unit in (nn.Linear, by_size(16)):
        with pytest.raises(RuntimeError) as caught:
            FSDP(Attending(), unit)(x)
        told.append(str(caught.value))
    model = FSDP(Attending(), (nn.MultiheadAttention,))
    model(x).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        model.module.encode(x)
    told.append(str(caught.value))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):  # an error of the model's own stays what it is
        model(torch.ones(2, 1, 5))
    assert model(x).shape == x.shape
    return told


def test_a_parameter_read_outside_its_unit_is_named(ranks):
    for rank, (linear, size, method) in enumerate(ranks(2, read_elsewhere)):
        for told in (linear, size):
            assert (
                "'attention.out_proj.weight' was read outside the forward of its unit" in told and "\n" not in told
            ), f"rank {rank}"
        assert "'first' was called outside the forward of the root" in method and "\n" not in method, f"rank {rank}"


def trained_as_something_else(rank, world_size):
    told = []
    for wrap in (FSDP, lambda module: ZeRO1(module.parameters(), torch.optim.SGD, lr=0.1)):
        tied = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
        tied[1].weight.data = tied[0].weight.data
        with pytest.raises(ValueError, match="are two parameters that share memory") as caught:
            wrap(tied)
        told.append(str(caught.value))
        tied[1].weight = tied[0].weight
        wrap(tied)
    split = parallelize_module(nn.Linear(4, 6), None, {"": ColwiseParallel()})
    refused = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)
    for model, classes in ((FSDP(nn.Linear(4, 6)), refused[:2]), (split, refused)):  # Muon takes matrices only
        for optimizer_class in classes:
            optimizer = optimizer_class([p for p in model.parameters() if p.dim() > 1] or model.parameters(), lr=0.1)
            model.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            with pytest.raises(ValueError, match=f"{optimizer_class.__name__} is not elementwise") as caught:
                optimizer.step(lambda: 0.0)
            told.append(str(caught.value))
        for optimizer_class in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad):
            optimizer_class(model.parameters(), lr=0.1).step()
    torch.optim.Adafactor(nn.Linear(4, 6).parameters()).step()  # what is whole may have any
    return told


def test_what_would_train_something_else_is_refused(ranks):
    for rank, told in enumerate(ranks(2, trained_as_something_else)):
        assert not any("\n" in one for one in told) and len(told) == 7, f"rank {rank}"


def shared_scale(seed):
    """A tied parameter, a frozen one, and a buffer that an initialiser changes."""
    model = Net(seed)
    model.cells[2].second.weight = model.cells[2].first.weight
    model.stem.bias.requires_grad_(False)
    model.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
    return model


def initialise(module):
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
        module.bias.data = torch.randn(module.bias.shape, dtype=torch.float64)
    if isinstance(module, Cell):
        module.scale.data.normal_()
    if isinstance(module, Net):
        module.seen.normal_()


def applied(rank, world_size, settings):
    model = FSDP(shared_scale(rank), unit=Cell, **settings)
    model(data(rank)).sum().backward()  # something may still be gathered
    torch.manual_seed(7 + rank)
    assert model.apply(initialise) is model
    at_rest(model)
    return model.full_state_dict(), [p.numel() for p in model.parameters()]


@pytest.mark.parametrize("settings", [{}, {"root": "replicate"}, {"shard": "grad_op"}], ids=str)
def test_apply_draws_what_one_process_draws(ranks, settings):
    alone = shared_scale(0)
    torch.manual_seed(7)
    wanted = alone.apply(initialise).state_dict()
    for rank, (found, sizes) in enumerate(ranks(3, applied, settings=settings)):
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted), (
            f"rank {rank}"
        )
        assert sum(sizes) < sum(p.numel() for p in alone.parameters()), f"rank {rank}"


class NotDrawn(Exception):
    pass


def initialise_and_raise(module):
    initialise(module)
    if isinstance(module, Net):
        raise NotDrawn


def apply_raised(rank, world_size, settings):
    model, oracle = FSDP(shared_scale(rank), unit=Cell, **settings), shared_scale(0)
    square(model, data(rank)).backward()  # something may still be gathered
    model.zero_grad()
    before = dict(model.full_state_dict())
    torch.manual_seed(7 + rank)
    with pytest.raises(NotDrawn):
        model.apply(initialise_and_raise)
    at_rest(model)
    after = model.full_state_dict()
    del before["seen"]  # a buffer, drawn in place
    assert all(torch.equal(after[name], value) for name, value in before.items()), f"rank {rank}"
    square(model, data(rank)).backward()
    expected = mean_of_ranks(oracle, lambda module, r: square(module, data(r)), world_size)
    assert_same(whole_gradients(model), expected)
    torch.manual_seed(7 + rank)
    model.apply(initialise)
    return model.full_state_dict()


@pytest.mark.parametrize("settings", [{}, {"shard": "grad_op"}], ids=str)
def test_after_an_error_of_apply_the_values_are_those_of_before(ranks, settings):
    """apply is collective, so all ranks raise: if one rank alone raised, the others would wait in its broadcast."""
    alone = shared_scale(0)
    torch.manual_seed(7)
    wanted = alone.apply(initialise).state_dict()
    for rank, found in enumerate(ranks(3, apply_raised, settings=settings)):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), f"rank {rank}"
