"""Recomputation against keeping everything: the same bits, from less memory, whatever the function is and takes."""

import copy
import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from labkit import comm, models
from labkit.ddp import DDP
from labkit.ideas.recompute_and_offload import Recompute
from labkit.memory.memory_tracker import MemoryTracker
from labkit.models.gpt import Block
from labkit.recompute import checkpoint, checkpoint_every

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


class Outside(nn.Sequential):
    """Blocks that are called through checkpoint by the model, as much code out there does it."""

    def forward(self, x):
        for block in self:
            x = checkpoint(block, x)
        return x


def sharded(rank, world_size, how, settings):
    from labkit.fsdp import FSDP

    model = gpt(0.2, seed=rank)
    if how == "inside":
        checkpoint_every(model, Block)
    if how == "products kept":
        checkpoint_every(model, Block, keep="matmul")
    if how == "outside":
        model.blocks = Outside(*model.blocks)
    model = FSDP(model, unit=Block, **settings)
    for turn in range(2):
        torch.manual_seed(10 * turn + rank)
        with comm.record() as log, MemoryTracker(model) as memory:
            models.loss("gpt")(model(tokens(rank)), tokens(rank + 5)).backward()
    return gradients(model), [(event.op, event.payload_bytes) for event in log], memory.peak["activations"]


@pytest.mark.parametrize("how", ["inside", "outside", "products kept"])
@pytest.mark.parametrize("settings", [{}, {"shard": "grad_op"}, {"root": "replicate", "prefetch": 0}], ids=str)
def test_under_fsdp_nothing_is_gathered_or_sent_again(ranks, settings, how):
    oracle = ranks(2, sharded, how="not at all", settings=settings)
    for (found, messages, activations), (expected, as_before, without) in zip(
        ranks(2, sharded, how=how, settings=settings), oracle, strict=True
    ):
        assert same(found, expected)
        assert messages == as_before
        assert activations < without


# ---- functions of all kinds


def mixed(x, scale, options, *, mask=None, mode="plain", extra=()):
    """Dropout, tensors in nests, keyword and non-tensor arguments, several results."""
    y = F.dropout(torch.tanh(x @ options["weight"]), 0.5) * scale
    if mask is not None:
        y = y * mask
    for tensor in extra:
        y = y + tensor.exp()
    return {"y": y if mode == "plain" else -y, "shape": tuple(y.shape)}, y.sum()


def leaves():
    torch.manual_seed(0)
    made = [torch.randn(4, 4, dtype=torch.float64, requires_grad=number != 2) for number in range(4)]
    return made, torch.rand(4, 4, dtype=torch.float64) > 0.5


@pytest.mark.parametrize(
    "wrap", [lambda f: partial(checkpoint, f), lambda f: partial(checkpoint, partial(checkpoint, f))]
)
def test_arguments_of_all_kinds(wrap):
    def run(function):
        (x, w, constant, z), mask = leaves()
        torch.manual_seed(1)
        result, total = function(x, 2.0, {"weight": w}, mask=mask, mode="minus", extra=(z, constant))
        assert result["shape"] == (4, 4)
        (result["y"].square().sum() + total).backward()
        return [t.grad for t in (x, w, z)]

    for ours, plain in zip(run(wrap(mixed)), run(mixed), strict=True):
        assert torch.equal(ours, plain)


def test_no_argument_needs_a_gradient():
    """The first block of a model is given a batch: its parameters alone want gradients."""
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    linear(x).tanh().sum().backward()
    expected = gradients(linear)
    linear.zero_grad()
    checkpoint(lambda x: linear(x).tanh(), x).sum().backward()
    assert same(gradients(linear), expected)


def test_arguments_without_tensors_and_none_at_all():
    w = torch.randn(3, requires_grad=True)
    checkpoint(lambda power: (w**power).sum(), 3).backward()
    expected = 3 * w.detach() ** 2
    assert torch.equal(w.grad, expected)
    checkpoint(lambda: (w**3).sum()).backward()
    assert torch.equal(w.grad, 2 * expected)


def test_without_gradients_it_is_a_plain_call():
    runs = []
    with torch.no_grad():
        assert checkpoint(lambda x: runs.append(1) or x + 1, torch.zeros(1)).item() == 1
    assert checkpoint(lambda x: x + 1, torch.zeros(1)).requires_grad is False
    assert runs == [1]


def test_a_block_used_twice_gets_both_gradients():
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(2, 4)
    block(block(x)).sum().backward()
    expected = gradients(block)
    block.zero_grad()
    checkpoint(block, checkpoint(block, x)).sum().backward()
    assert same(gradients(block), expected)


def test_backward_twice_and_gradients_of_gradients():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    y = checkpoint(lambda x: (x.sin() * x.exp()).sum(), x)
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y, x)[0])
    assert torch.autograd.gradgradcheck(lambda x: checkpoint(lambda x: x.sin() * x.exp(), x), x)


def test_a_function_that_runs_a_backward_of_its_own():
    def penalised(x):
        y = (x.sin() * x.exp()).sum()
        return y + torch.autograd.grad(y, x, create_graph=True)[0].square().sum()

    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(penalised(x), x)[0]
    assert torch.equal(torch.autograd.grad(checkpoint(penalised, x), x)[0], expected)


def test_a_part_of_the_graph_is_enough():
    """Two results of one call, of which only the first leads to the loss; and then the second."""
    x = torch.randn(3, requires_grad=True)
    first, second = checkpoint(lambda x: (x.sin(), x.exp()), x)
    assert torch.equal(torch.autograd.grad(first.sum(), x)[0], x.cos())
    assert torch.equal(torch.autograd.grad(second.sum(), x)[0], x.exp())


@pytest.mark.parametrize("keep", [None, "matmul"])
def test_the_random_state_matters(keep):
    def loss(preserve):
        torch.manual_seed(0)
        x = torch.ones(64, 64, requires_grad=True)
        y = checkpoint(lambda x: F.dropout(x @ x, 0.5), x, preserve_rng_state=preserve, keep=keep)
        y.sum().backward()
        return y, x.grad

    y, gradient = loss(True)
    x = torch.ones(64, 64, requires_grad=True)
    (x @ x).backward(2.0 * (y != 0))  # the mask of forward
    assert torch.equal(gradient, x.grad)
    assert not torch.equal(loss(False)[1], x.grad)  # so the test above can fail


def test_what_is_held_draws_no_second_time_and_the_rest_draws_as_before():
    def draws(operator):
        return operator in (torch.ops.aten.rand_like.default, torch.ops.aten.mm.default)

    def function(x):
        return (x @ torch.rand_like(x)).tanh() * torch.randn_like(x)

    def run(function):
        torch.manual_seed(0)
        x = torch.ones(8, 8, requires_grad=True)
        function(x).sum().backward()
        return x.grad

    assert torch.equal(run(partial(checkpoint, function, keep=draws)), run(function))


@pytest.mark.parametrize("where", ["backward outside", "backward inside", "switched off inside"])
def test_under_our_own_autocast(where):
    from labkit.amp import autocast

    def run(prepare):
        model = gpt(0.2)
        prepare(model)
        torch.manual_seed(2)
        low = autocast("cpu", torch.bfloat16)
        with low, autocast("cpu", enabled=False) if where == "switched off inside" else nullcontext():
            loss = models.loss("gpt")(model(tokens()), tokens(3))
            if where == "backward inside":
                loss.backward()
        if where != "backward inside":
            loss.backward()
        return gradients(model)

    expected = run(lambda model: None)
    assert same(run(lambda model: checkpoint_every(model, Block)), expected)
    assert same(run(lambda model: checkpoint_every(model, Block, keep="matmul")), expected)
    assert same(step(gpt(0.2))[1], expected) == (where == "switched off inside")  # in fp32 they are others


def test_autocast_is_given_back_and_its_casts_are_forgotten():
    linear = nn.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(linear, torch.randn(2, 8))
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            linear.weight.zero_()
        assert linear(torch.randn(2, 8)).abs().max() == linear.bias.to(torch.bfloat16).abs().max()


# ---- memory, exactly


def held_after_forward(prepare, **changes):
    model = gpt(**changes)
    prepare(model)
    with MemoryTracker(model) as memory:
        output = model(tokens())
        held = memory.current["activations"]
        output.sum().backward()
    most = max(sizes["activations"] for _, sizes in memory.samples)
    return held, most, memory.current["activations"] - output.nbytes


def test_activations_of_checkpointed_blocks_fall_to_their_inputs():
    plain = {layers: held_after_forward(lambda model: None, layers=layers)[0] for layers in (2, 3)}
    block = plain[3] - plain[2]
    inputs = BATCH * TOKENS * WIDTH * 4  # one [B, T, C] in fp32
    for layers in (2, 3, 6):
        held, _, _ = held_after_forward(lambda model: checkpoint_every(model, Block), layers=layers)
        # Without any block's inside; but what the last block gives is the norm's input, and the first block's input is
        # held only because of the block: it was a term of the sum inside.
        assert held == plain[2] - 2 * (block - inputs) + (layers - 2) * inputs
        second, _, _ = held_after_forward(lambda model: checkpoint_every(model, Block, 2), layers=layers)
        assert second == held + (layers // 2) * (block - inputs)


def test_the_peak_is_the_inputs_and_one_block():
    peaks = [held_after_forward(lambda model: checkpoint_every(model, Block), layers=n)[1] for n in (3, 4, 5)]
    assert peaks[1] - peaks[0] == peaks[2] - peaks[1] == BATCH * TOKENS * WIDTH * 4


def test_memory_is_no_more_than_with_pytorchs():
    def theirs(model):
        for block in model.blocks:
            block.forward = partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)

    assert held_after_forward(lambda model: checkpoint_every(model, Block)) <= held_after_forward(theirs)


@pytest.mark.parametrize("form", FORMS)
def test_after_backward_nothing_is_left(form):
    gc.collect()
    gc.disable()  # no cycles: unneeded tensors are freed at once, not at some later time
    try:
        assert held_after_forward(FORMS[form])[2] == 0
    finally:
        gc.enable()


def test_a_graph_that_is_retained_drops_its_activations_again():
    model = gpt()
    checkpoint_every(model, Block)
    with MemoryTracker(model) as memory:
        loss = model(tokens()).sum()
        before = memory.current["activations"]
        loss.backward(retain_graph=True)
        assert memory.current["activations"] == before
        loss.backward()


def test_a_graph_that_is_dropped_leaves_nothing():
    model = gpt()
    checkpoint_every(model, Block)
    gc.collect()
    gc.disable()
    try:
        with MemoryTracker(model) as memory:
            model(tokens())
        assert memory.current["activations"] == 0
    finally:
        gc.enable()


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.ran.append(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))


def test_the_second_run_ends_with_the_last_tensor_needed():
    """A block has four products in its linear layers; the last one's result is no one's input but the sum's."""

    def products(prepare):
        model = gpt(layers=2)
        prepare(model)
        loss = model(tokens()).sum()
        with Count() as count:
            loss.backward()
        return count.ran.count("addmm")

    assert products(lambda model: None) == 0
    assert products(lambda model: checkpoint_every(model, Block)) == 2 * 3
    assert products(lambda model: checkpoint_every(model, Block, keep="matmul")) == 0


def test_keeping_products_holds_them_and_nothing_else():
    def held(**options):
        return held_after_forward(lambda model: checkpoint_every(model, Block, **options))[0]

    rows = BATCH * TOKENS * 4  # bytes of one channel
    products = 3 * WIDTH + WIDTH + 4 * WIDTH + WIDTH  # query, key, value; output; the network's two layers
    attention = WIDTH + HEADS  # its result, and the logarithms of its sums
    assert held(keep="matmul") - held() == 4 * rows * products + 4 * rows * attention
    only = [torch.ops.aten.gelu.default]
    assert held(keep=lambda operator: operator in only) - held() == 4 * rows * 4 * WIDTH


# ---- errors


def test_another_function_the_second_time_is_told():
    runs = []

    def fickle(x):
        runs.append(1)
        return x.exp() if len(runs) == 1 else x.exp().double().sin()

    x = torch.ones(3, requires_grad=True)
    fewer = checkpoint(lambda x: x.exp().sin() if not runs else x.clone(), x)
    shape = checkpoint(fickle, x)
    with pytest.raises(RuntimeError, match="saved 2 tensors in forward, but 0 when it ran again"):
        fewer.sum().backward()
    runs.clear()
    shapes = checkpoint(lambda x: (runs.append(1) or x[: 2 * len(runs) - 1]).exp(), x)
    with pytest.raises(RuntimeError, match=r"saved a tensor \(\(1,\), torch.float32.*when it ran again"):
        shapes.sum().backward()
    assert shape is not None


def test_an_input_that_was_changed_is_noticed():
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    z = checkpoint(torch.exp, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_a_saved_tensor_that_the_function_changes_is_noticed():
    def careless(x):
        y = x * 2
        z = y.sin()
        y.add_(1)
        return z.exp()

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        careless(x).sum().backward()  # as plain autograd notices
    with pytest.raises(RuntimeError, match="changed in place by the checkpointed function"):
        checkpoint(careless, x).sum().backward()


def test_a_kept_result_that_is_changed_in_place_is_noticed():
    linear = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match=r"aten\.addmm\.default was changed in place, so it cannot be kept"):
        checkpoint(lambda x: F.relu(linear(x), inplace=True), torch.ones(2, 3), keep="matmul")
    checkpoint(lambda x: F.relu(linear(x), inplace=True), torch.ones(2, 3)).sum().backward()


def test_a_function_that_raises_leaves_nothing_behind():
    def failing(x):
        x.exp()
        raise KeyError("mine")

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(KeyError):
        checkpoint(failing, x)
    x.exp().sum().backward()  # autograd saves as ever
    runs = []

    def failing_later(x):
        runs.append(1)
        if len(runs) > 1:
            raise KeyError("mine")
        return x.exp()

    y = checkpoint(failing_later, x)
    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_wrong_arguments_are_told_at_once():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        checkpoint(torch.exp, x, use_reentrant=True)
    with pytest.raises(ValueError, match="keep='products' must be None, \"matmul\""):
        checkpoint(torch.exp, x, keep="products")
    with pytest.raises(ValueError, match=r"no module matches unit=.*: choose among .*Block"):
        checkpoint_every(gpt(), nn.Conv2d)
    with pytest.raises(ValueError, match="k=0 must be at least 1"):
        checkpoint_every(gpt(), Block, 0)
    model = gpt()
    assert checkpoint_every(model, Block, 2) == [model.blocks[0], model.blocks[2]]
    with pytest.raises(ValueError, match="Block is checkpointed already"):
        checkpoint_every(model, Block)


def test_a_checkpointed_model_is_copied_and_saved_as_ever():
    model = gpt(0.2)
    checkpoint_every(model, Block)
    twin = copy.deepcopy(model)
    assert list(model.state_dict()) == list(gpt().state_dict())
    expected = step(model)[1]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert same(step(twin)[1], expected)  # the copy runs its own blocks


# ---- the whole idea, in one autograd function


class Twice(nn.Module):
    """One layer, used twice, each time recomputed by `apply`."""

    def __init__(self, apply):
        super().__init__()
        self.layer, self.apply_to = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), apply

    def forward(self, x):
        return self.apply_to(self.layer, self.apply_to(self.layer, x))


def twice(rank, world_size, apply):
    torch.manual_seed(0)
    model = DDP(Twice(apply))
    x = torch.randn(2, 4, requires_grad=True)
    try:
        model(x).sum().backward()
    except RuntimeError as error:
        return str(error)
    return gradients(model)


def plainly(layer, x):
    return layer(x)


def test_an_autograd_function_is_enough_for_one_process_but_its_gradients_come_in_pieces(ranks):
    def run(apply):
        torch.manual_seed(0)
        model, x = Twice(apply), torch.randn(2, 4, requires_grad=True)
        model(x).sum().backward()
        return gradients(model) | {"x": x.grad}

    assert same(run(Recompute.apply), run(plainly))
    told = ranks(2, twice, apply=Recompute.apply)[0]
    assert "got a second gradient in one backward" in told
    assert same(ranks(2, twice, apply=checkpoint)[0], ranks(2, twice, apply=plainly)[0])


@pytest.mark.gpu
def test_the_same_on_cuda():
    def run(prepare):
        model = gpt(0.2).cuda()
        prepare(model)
        torch.manual_seed(2)
        with torch.autocast("cuda", torch.bfloat16):
            loss = models.loss("gpt")(model(tokens().cuda()), tokens(3).cuda())
        loss.backward()
        return gradients(model), torch.rand(1, device="cuda").item()

    torch.use_deterministic_algorithms(True, warn_only=True)
    expected = run(lambda model: None)
    for form in FORMS.values():
        found = run(form)
        assert same(found[0], expected[0])
        assert found[1] == expected[1]
