"""The oracle of the loss scale is torch.amp.GradScaler on the same gradients; of ranks, one process that has all."""

import copy
import random

import pytest
import torch
import torch.distributed as dist

from labkit import comm
from labkit.amp import GradScaler
from labkit.amp.unscale import one_by_one, unscale_and_check

INF, NAN = float("inf"), float("nan")
SETTINGS = [
    {},
    {"init_scale": 8.0, "growth_interval": 1},
    {"init_scale": 1000.0, "growth_factor": 1.3, "backoff_factor": 0.37, "growth_interval": 2},
    {"init_scale": 2.0**126, "growth_interval": 1},  # grows until fp32 itself ends
    {"init_scale": 3.7, "growth_factor": 1.1, "growth_interval": 3},
]


def trainee(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    parameters = [
        torch.nn.Parameter(torch.randn(5, dtype=dtype)) for _ in range(3)
    ]  # the last one never has a gradient
    return parameters, torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def one_step(scaler, parameters, optimizer, inputs, unscale=False):
    optimizer.zero_grad()
    scaler.scale(sum((p * inputs).sum() for p in parameters[:2])).backward()
    if unscale:
        scaler.unscale_(optimizer)
    return scaler.step(optimizer), scaler.update()


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())) or "default")
def test_the_same_skips_and_scales_as_torch_on_the_same_gradients(settings):
    rng = random.Random(0)
    runs = [(scaler("cpu", **settings), *trainee()) for scaler in (GradScaler, torch.amp.GradScaler)]
    skipped = 0
    for step in range(150):
        inputs = torch.randn(5)
        if rng.random() < 0.3:
            inputs[rng.randrange(5)] = rng.choice([INF, -INF, NAN])
            skipped += 1
        for run in runs:
            one_step(*run, inputs, unscale=step % 2 == 0)
        (ours, our_weights, _), (theirs, their_weights, _) = runs
        assert ours.get_scale() == theirs.get_scale(), step
        assert ours.state_dict().items() >= theirs.state_dict().items()
        assert all(torch.equal(a, b) for a, b in zip(our_weights, their_weights, strict=True)), step
    assert 20 < skipped < 80 and all(p.isfinite().all() for p in our_weights)


def test_state_dicts_travel_between_ours_and_torchs():
    ours, theirs = GradScaler("cpu", 64.0, growth_interval=3), torch.amp.GradScaler("cpu", 8.0, growth_interval=5)
    one_step(theirs, *trainee(), torch.ones(5))
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == {**theirs.state_dict(), "_overflows": 0}
    one_step(ours, *trainee(), torch.ones(5))
    theirs.load_state_dict(ours.state_dict())
    assert theirs.get_scale() == ours.get_scale() and theirs.state_dict()["_growth_tracker"] == 2


def test_resumed_it_goes_on_as_if_nothing_had_happened():
    def make():
        return GradScaler("cpu", growth_interval=3, hysteresis=2)

    inputs = [torch.tensor([1.0, 1, 1, 1, bad]) for bad in (1, INF, 1, 1, 1, INF, 1, INF, 1)]
    whole, first, second = make(), make(), make()
    for x in inputs:
        one_step(whole, *trainee(), x)
    for x in inputs[:2]:
        one_step(first, *trainee(), x)
    second.load_state_dict(first.state_dict())
    for x in inputs[2:]:
        one_step(second, *trainee(), x)
    assert second.state_dict() == whole.state_dict()


def test_hysteresis_lets_some_overflows_pass_and_the_minimum_holds():
    scaler = GradScaler("cpu", 16.0, growth_interval=2, hysteresis=2, min_scale=4.0)
    good, bad = torch.ones(5), torch.full((5,), INF)
    seen = []
    for x in (bad, good, bad, bad, bad, bad, good, good, bad, bad):
        one_step(scaler, *trainee(), x)
        seen.append(scaler.get_scale())
    #       16: the first is free; good steps alone do not restore it, growth does: so the bad one after 8 is free again
    assert seen == [16, 16, 8, 4, 4, 4, 4, 8, 8, 4]


def test_a_scale_that_has_fallen_to_zero_is_an_error():
    scaler = GradScaler("cpu", 1.0, backoff_factor=1e-30)
    one_step(scaler, *trainee(), torch.full((5,), NAN))
    with pytest.raises(RuntimeError, match="decreased to 0: the gradients overflow at any scale"):
        one_step(scaler, *trainee(), torch.full((5,), NAN))


def test_clipping_after_unscale_sees_the_true_norm():
    weights = []
    for scaler in (GradScaler("cpu"), torch.amp.GradScaler("cpu"), GradScaler("cpu", enabled=False)):
        parameters, optimizer = trainee()
        scaler.scale(sum((p * 3.0).sum() for p in parameters[:2])).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        torch.testing.assert_close(norm, torch.tensor(90.0).sqrt())  # ten gradients of 3
        scaler.step(optimizer)
        scaler.update()
        weights.append(torch.cat(parameters).detach())
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])  # powers of two scale exactly


def test_two_optimizers_and_one_scale():
    results = []
    for scaler in (GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        (a, first), (b, second) = trainee(0), trainee(1)
        for x in (torch.ones(5), torch.tensor([INF, 1, 1, 1, 1]), torch.ones(5)):
            losses = [(a[0] * x).sum(), b[0].sum()]
            for loss in scaler.scale(losses):
                loss.backward()
            scaler.step(first)
            scaler.step(second)  # its gradients are finite: it steps, though the other does not
            scaler.update()
            first.zero_grad(), second.zero_grad()
        results.append([scaler.get_scale(), *(p.detach() for p in (*a, *b))])
    assert results[0][0] == results[1][0] == 2.0**15
    assert all(torch.equal(p, q) for p, q in zip(results[0][1:], results[1][1:], strict=True))


def test_an_fp16_loss_is_scaled_in_fp32():
    for scaler in (GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        assert scaler.scale(torch.tensor(3.0, dtype=torch.float16)).tolist() == 3 * 65536  # fp16 would be inf
        scaled = scaler.scale((torch.ones(2), [torch.ones(1, dtype=torch.float16)]))
        assert [scaled[0].dtype, scaled[1][0].dtype] == [torch.float32, torch.float16]


def test_gradients_of_other_kinds():
    embedding = torch.nn.Embedding(6, 2, sparse=True)
    double = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    empty, half = torch.nn.Parameter(torch.ones(0)), torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    parameters = [embedding.weight, double, empty, half]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = GradScaler("cpu", 4.0)
    loss = embedding(torch.tensor([1, 1, 3])).sum() + double.sum() + half.float().sum() + empty.sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert embedding.weight.grad.to_dense().sum(1).tolist() == [0, 4, 0, 2, 0, 0]
    assert double.grad.tolist() == half.grad.tolist() == [1, 1]
    scaler.update()
    half.grad[1] = NAN
    scaler.step(optimizer)
    assert half.tolist() == [1, 1]  # skipped


ORDERS = {
    "unscale before scale": lambda s, o: s.unscale_(o),
    "step before scale": lambda s, o: s.step(o),
    "update before scale": lambda s, o: s.update(),
    "update without step": lambda s, o: (scaled(s, o), s.update()),
    "unscale twice": lambda s, o: (scaled(s, o), s.unscale_(o), s.unscale_(o)),
    "unscale after step": lambda s, o: (scaled(s, o), s.step(o), s.unscale_(o)),
    "step twice": lambda s, o: (scaled(s, o), s.step(o), s.step(o)),
    "closure": lambda s, o: (scaled(s, o), s.step(o, closure=lambda: 0)),
    "no gradients": lambda s, o: (s.scale(torch.ones(1)), s.step(o)),
    "fp16 gradients": lambda s, o: (half(o), s.scale(torch.ones(1)), s.step(o)),
    "empty state": lambda s, o: s.load_state_dict({}),
    "not a tensor": lambda s, o: s.scale(3.0),
}


def scaled(scaler, optimizer):
    scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()


def half(optimizer):
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    parameter.grad = torch.ones(1, dtype=torch.float16)
    optimizer.add_param_group({"params": [parameter]})


@pytest.mark.parametrize("order", ORDERS)
def test_what_torch_refuses_is_refused(order):
    with pytest.raises((RuntimeError, AssertionError, ValueError)):
        ORDERS[order](torch.amp.GradScaler("cpu"), trainee()[1])
    with pytest.raises((RuntimeError, ValueError)) as error:
        ORDERS[order](GradScaler("cpu"), trainee()[1])
    assert "\n" not in str(error.value)


def test_arguments_that_cannot_be_are_refused(monkeypatch):
    for wrong in ({"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}, {"hysteresis": 0}):
        with pytest.raises(ValueError, match="they must be above 1, between 0 and 1"):
            GradScaler("cpu", **wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match='found no CUDA device: pass device="cpu"'):
        GradScaler()
    GradScaler(enabled=False)


def test_not_enabled_it_does_nothing():
    scaler = GradScaler(enabled=False)
    parameters, optimizer = trainee()
    loss = parameters[0].sum()
    assert scaler.scale(loss) is loss and not scaler.is_enabled() and scaler.state_dict() == {}
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({})
    assert scaler.get_scale() == 1.0 and parameters[0].grad.tolist() == [1.0] * 5


def test_the_scale_can_be_set():
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.update(128.0)
    assert scaler.get_scale() == 128
    scaler.update(torch.tensor(32.0))
    scaler.set_growth_factor(4.0), scaler.set_backoff_factor(0.25), scaler.set_growth_interval(1)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4, 0.25, 1)
    one_step(scaler, *trainee(), torch.ones(5))
    assert scaler.get_scale() == 128 and scaler.scale(torch.ones(1)).item() == 128


# ---- on ranks: each holds a share of the parameters, as under ZeRO and FSDP, and sees only its own gradients


def shards(rank, world_size, bad, empty):
    """Every rank trains parameters of its own; bad: {step: rank whose gradient is inf}; empty: a rank without any."""
    scaler = GradScaler("cpu", 1024.0, growth_interval=3)
    generator = torch.Generator().manual_seed(rank)
    parameters = [torch.nn.Parameter(torch.randn(4, generator=generator)) for _ in range(0 if rank == empty else 2)]
    optimizer = torch.optim.SGD(parameters or [torch.nn.Parameter(torch.zeros(0))], lr=0.1, momentum=0.9)
    seen = []
    for step in range(8):
        optimizer.zero_grad()
        loss = sum((p * (step + 1)).sum() for p in parameters) if parameters else torch.zeros(())
        scaled_loss = scaler.scale(loss)
        if parameters:
            scaled_loss.backward()
            if bad.get(step) == rank:
                parameters[1].grad[2] = INF
        with comm.record() as log:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), [p.tolist() for p in parameters], [(e.op, e.payload_bytes) for e in log]))
    return seen


@pytest.mark.parametrize(("world_size", "empty"), [(1, None), (2, None), (3, 0), (4, 3)])
def test_one_ranks_inf_skips_the_step_on_all(ranks, world_size, empty):
    last = world_size - 1 if empty != world_size - 1 else 0
    bad = {1: last, 4: (1 if world_size > 1 else 0), 5: last}
    results = ranks(world_size, shards, bad=bad, empty=empty)
    message = [("all_reduce", 16)] if world_size > 1 else []  # four fp32 numbers
    for step in range(8):
        assert {result[step][0] for result in results} == {results[0][step][0]}
        for rank, result in enumerate(results):
            before = result[step - 1][1] if step else None
            assert (result[step][1] == before) == (step in bad) or not result[step][1], f"rank {rank}, {step}"
            assert result[step][2] == message, f"rank {rank}, {step}"
    # the oracle: torch's scaler in one process that holds all the gradients
    oracle, (parameters, optimizer) = torch.amp.GradScaler("cpu", 1024.0, growth_interval=3), trainee()
    for step in range(8):
        one_step(oracle, parameters, optimizer, torch.full((5,), INF if step in bad else 1.0))
        assert oracle.get_scale() == results[0][step][0]


def alone(rank, world_size):
    """A group of one for each rank: nobody asks the others."""
    group = [dist.new_group([r]) for r in range(world_size)][rank]
    scaler = GradScaler("cpu", 4.0, process_group=group)
    with comm.record() as log:
        one_step(scaler, *trainee(), torch.full((5,), INF if rank else 1.0))
    return scaler.get_scale(), len(log)


def test_the_process_group_says_who_agrees(ranks):
    assert ranks(2, alone) == [(4.0, 0), (2.0, 0)]


def scales_differ(rank, world_size):
    scaler = GradScaler("cpu", 2.0 ** (4 + rank))
    with pytest.raises(RuntimeError, match="loss scale differs between ranks, from 16 to 32: load the same state"):
        one_step(scaler, *trainee(), torch.ones(5))


def nobody_has_gradients(rank, world_size):
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(1))
    with pytest.raises(RuntimeError, match="no rank has a gradient"):
        scaler.step(trainee()[1])


@pytest.mark.parametrize("body", [scales_differ, nobody_has_gradients])
def test_what_is_wrong_on_one_rank_is_told_on_all(ranks, body):
    ranks(2, body)


@pytest.mark.parametrize("value", [1.0, INF, NAN])
@pytest.mark.parametrize("inverse", [1 / 3, 2.0**-16])
def test_bf16_gradients_one_by_one_as_in_one_pass(value, inverse):
    torch.manual_seed(0)
    gradients = [torch.randn(100).bfloat16() for _ in range(3)]
    gradients[1][7] = value
    told = []
    for unscale in (unscale_and_check, one_by_one):
        copies, found = [g.clone() for g in gradients], torch.zeros(1)
        unscale(copies, torch.tensor([inverse]), found)
        told.append((torch.cat(copies).nan_to_num(1e30), found))
    assert all(map(torch.equal, *told))


@pytest.mark.gpu
def test_on_a_gpu_the_same_as_torch():
    runs = []
    for scaler in (GradScaler("cuda", growth_interval=2), torch.amp.GradScaler("cuda", growth_interval=2)):
        parameters = [torch.nn.Parameter(p.detach().cuda()) for p in trainee()[0]]
        runs.append((scaler, parameters, torch.optim.SGD(parameters, lr=0.1)))
    for bad in (1, 1, INF, 1, NAN, 1, 1, 1):
        for run in runs:
            one_step(*run, torch.tensor([1.0, 1, 1, 1, bad], device="cuda"))
        assert runs[0][0].get_scale() == runs[1][0].get_scale()
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_a_copy_is_independent():
    scaler = GradScaler("cpu", 8.0)
    scaler.scale(torch.ones(1))
    twin = copy.deepcopy(scaler)
    twin.update(2.0)
    assert scaler.get_scale() == 8
