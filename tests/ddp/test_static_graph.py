"""static_graph=True: what the first backward has shown is not asked again, and a backward that differs is named."""

import copy
from unittest import mock

import pytest
from ddp_models import FORMS, Branches, Checkpointed, data, net
from tensors import error_of, gap, grads, mean_of_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit import comm
from labkit.ddp import DDP


def same_plan(rank, world_size, settings, set_to_none, find):
    """Some branches are used on all ranks, some on one, some on none."""
    module, plan = Branches(), [[0, 1], [0, 2], [0]]
    wrapped = DDP(module, **settings, static_graph=True, find_unused_parameters=find)
    anywhere = {i for branches in plan[:world_size] for i in branches}
    asked, messages, worst = [], [], 0.0
    for step in range(4):
        module.zero_grad(set_to_none=set_to_none)
        before = grads(module)
        search = mock.patch("torch._C._will_engine_execute_node", lambda node: asked.append(step))  # noqa: B023
        with search, comm.record() as log:
            wrapped(data(rank, step), plan[rank]).sum().backward()
        messages.append(len(log))
        expected = mean_of_ranks(module, lambda m, r: m(data(r, step), plan[r]).sum(), world_size)  # noqa: B023
        expected = [g if i // 2 in anywhere else old for i, (g, old) in enumerate(zip(expected, before, strict=True))]
        worst = max(worst, gap(grads(module), expected))
    return worst, asked, messages, len(wrapped.buckets)


@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("settings", FORMS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_unused_parameters_are_asked_for_once(ranks, world_size, settings, set_to_none, find):
    arguments = {"settings": settings, "set_to_none": set_to_none, "find": find}
    for rank, (worst, asked, messages, buckets) in enumerate(ranks(world_size, same_plan, **arguments)):
        assert worst <= 1e-14, f"rank {rank}"
        assert asked == [], f"rank {rank}"
        assert messages == [buckets + 1, buckets, buckets, buckets], f"rank {rank}"


def early_launch(rank, world_size):
    """From the second step on full buckets leave during backward, those that nobody fills among them."""
    module = Branches()
    wrapped = DDP(module, bucket_cap_mb=0, static_graph=True)
    launched = []
    module.branches[0].bias.register_hook(lambda _: launched.append(len(log)))
    for step in range(2):
        out = wrapped(module.branches[0](data(rank, step)), [1, 2])
        with comm.record() as log:
            out.sum().backward()
    return launched


def test_messages_leave_early_from_the_second_step_on(ranks):
    assert ranks(2, early_launch) == [[0, 6], [0, 6]]


def checkpointed(rank, world_size, settings, reentrant, wrap):
    module = Checkpointed(reentrant, shared=True)
    wrapped = (DDP if wrap == "ours" else DistributedDataParallel)(module, **settings, static_graph=True)
    worst = 0.0
    for step in range(4):
        module.zero_grad(set_to_none=step % 2)
        wrapped(data(rank, step)).sum().backward()
        expected = mean_of_ranks(module, lambda m, r: m(data(r, step)).sum(), world_size)  # noqa: B023
        worst = max(worst, gap(grads(module), expected))
    return worst


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("settings", FORMS)
def test_the_same_parameters_may_be_checkpointed_several_times(ranks, settings, reentrant):
    assert max(ranks(2, checkpointed, settings=settings, reentrant=reentrant, wrap="ours")) <= 1e-14
    if not settings:
        assert max(ranks(2, checkpointed, settings={}, reentrant=reentrant, wrap="torch")) <= 1e-14


def changed(rank, world_size, settings, plans):
    wrapped = DDP(Branches(), **settings, static_graph=True)
    for plan in plans[:-1]:
        wrapped(data(rank), plan).sum().backward()
    told = error_of(RuntimeError, lambda: wrapped(data(rank), plans[-1]).sum().backward())
    wrapped.module.zero_grad()
    wrapped(data(rank), plans[0]).sum().backward()  # and the next step works
    expected = mean_of_ranks(wrapped.module, lambda m, r: m(data(r), plans[0]).sum(), world_size)
    used = [i // 2 in plans[0] for i in range(8)]
    ours = [g for g, keep in zip(grads(wrapped.module), used, strict=True) if keep]
    return told, gap(ours, [g for g, keep in zip(expected, used, strict=True) if keep])


@pytest.mark.parametrize("settings", FORMS)
@pytest.mark.parametrize(
    ("plans", "named", "count"),
    [([[0, 1], [0, 1], [0]], "'branches.1.weight'", "0 gradients, not 1"), ([[0], [0, 1]], "'branches.1.bias'", "1 ")],
)
def test_a_graph_that_changes_is_named(ranks, settings, plans, named, count):
    for rank, (told, difference) in enumerate(ranks(2, changed, settings=settings, plans=plans)):
        assert f"{named} got {count}" in told, f"rank {rank}"
        assert "find_unused_parameters" in told and "branches.0" not in told, f"rank {rank}"
        assert difference <= 1e-15, f"rank {rank}"


def accumulated(rank, world_size, settings):
    """A branch that is used in no_sync only."""
    module = Branches()
    wrapped = DDP(module, **settings, static_graph=True)
    worst = 0.0
    for _ in range(3):
        module.zero_grad()
        with wrapped.no_sync():
            wrapped(data(rank), [0, 1]).sum().backward()
        wrapped(data(rank, 1), [0, 2]).sum().backward()
        expected = mean_of_ranks(module, lambda m, r: (m(data(r), [0, 1]) + m(data(r, 1), [0, 2])).sum(), world_size)
        worst = max(worst, gap(grads(module), expected))
    return worst


@pytest.mark.parametrize("settings", FORMS)
def test_no_sync_is_not_what_is_learned(ranks, settings):
    assert max(ranks(2, accumulated, settings=settings)) <= 1e-14


def failed_at_first(rank, world_size, everybody):
    """The first backward, from which all is learned, raises on some ranks."""
    module = Branches()
    wrapped = DDP(module, bucket_cap_mb=0, static_graph=True)
    if everybody or rank == 1:
        fails = module.branches[0].bias.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            wrapped(data(rank), [0, 1]).sum().backward()
        fails.remove()
    else:
        wrapped(data(rank), [0, 1]).sum().backward()
    worst = 0.0
    for step in range(3):
        module.zero_grad()
        wrapped(data(rank, step), [0, 1]).sum().backward()
        expected = mean_of_ranks(module, lambda m, r: m(data(r, step), [0, 1]).sum(), world_size)  # noqa: B023
        worst = max(worst, gap(grads(module)[:4], expected[:4]))
    return worst


@pytest.mark.parametrize("everybody", [False, True])
def test_a_first_step_that_fails_is_not_learned_from(ranks, everybody):
    assert max(ranks(2, failed_at_first, everybody=everybody)) <= 1e-14


def moved_and_joined(rank, world_size):
    """to() begins anew; and a rank without data from the start takes part in what is asked in the first step."""
    module = Branches().float()
    wrapped = DDP(module, static_graph=True)
    wrapped(data(rank).float(), [0, 1]).sum().backward()
    wrapped.double()
    twin = copy.deepcopy(wrapped)
    module.zero_grad()
    wrapped(data(rank), [0, 2]).sum().backward()
    expected = mean_of_ranks(module, lambda m, r: m(data(r), [0, 2]).sum(), world_size)
    expected[2:4] = expected[6:8] = [None, None]
    worst = gap(grads(module), expected)
    with twin.join():
        for step in range(3 * rank):
            twin.zero_grad()
            twin(data(rank, step), [0]).sum().backward()
    twin.zero_grad()
    twin(data(rank), [0]).sum().backward()
    expected = mean_of_ranks(twin.module, lambda m, r: m(data(r), [0]).sum(), world_size)[:2] + [None] * 6
    return max(worst, gap(grads(twin.module), expected))


def test_moving_begins_anew_and_join_takes_part(ranks):
    assert max(ranks(2, moved_and_joined)) <= 1e-15


def with_a_hook(rank, world_size):
    module = net()
    wrapped, seen = DDP(module, bucket_cap_mb=0, static_graph=True), []

    def hook(state, bucket):
        seen.append(bucket.index())
        future = comm.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / world_size)

    wrapped.register_comm_hook(None, hook)
    worst = 0.0
    for step in range(3):
        module.zero_grad()
        wrapped(data(rank, step)).sum().backward()
        expected = mean_of_ranks(module, lambda m, r: m(data(r, step)).sum(), world_size)  # noqa: B023
        worst = max(worst, gap(grads(module), expected))
    return worst, seen


def test_hooks_see_the_same_buckets(ranks):
    for rank, (worst, seen) in enumerate(ranks(2, with_a_hook)):
        assert worst <= 1e-15 and seen == [0, 1, 2, 3] * 3, f"rank {rank}"


def differs(rank, world_size):
    return error_of(ValueError, lambda: DDP(nn.Linear(2, 2), static_graph=rank == 1))


def test_ranks_that_disagree_are_told(ranks):
    for rank, told in enumerate(ranks(2, differs)):
        assert "static_graph=True" in told, f"rank {rank}"
