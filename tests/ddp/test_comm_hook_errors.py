"""A comm hook that raises ends the step on all ranks, with its own message, and leaves the next step to be taken."""

import time
import uuid
from unittest import mock

import pytest
import torch
from ddp_models import data, net
from pool import TIMEOUT
from tensors import gap, grads, mean_of_ranks
from torch.distributed.distributed_c10d import _get_default_store

from labkit import comm
from labkit.ddp import DDP, comm_hook_errors
from labkit.run import LaunchError, launch
from labkit.run.report import explain, read_ends

SETTINGS = [{}, {"overlap": False}, {"find_unused_parameters": True}, {"static_graph": True}]


def hook_that_raises(where, fails, world_size):
    """For bucket 2, while fails() says so: in the call, or in what follows when its future is done."""

    def hook(state, bucket):
        if where == "call" and bucket.index() == 2 and fails():
            raise KeyError("words of its own")
        future = comm.all_reduce(bucket.buffer(), async_op=True).get_future()
        failing = where == "then" and bucket.index() == 2 and fails()

        def average(done):
            if failing:
                raise KeyError("words of its own")
            return done.value()[0] / world_size

        return future.then(average)

    return hook


def raising(rank, world_size, where, who, settings, meeting=None):
    """In the second of four steps. Returns what was raised, and the gap in the other steps.

    meeting: a key of the store, where the ranks that raise wait for the others to have raised, too.
    """
    module = net()
    wrapped, step = DDP(module, bucket_cap_mb=0, **settings), 0
    wrapped.register_comm_hook(None, hook_that_raises(where, lambda: step == 1 and rank in who, world_size))
    told, worst = "", 0.0
    with mock.patch.object(comm_hook_errors, "PATIENCE", 0.1):
        for step in range(4):
            module.zero_grad()
            try:
                wrapped(data(rank, step)).sum().backward()
            except (KeyError, RuntimeError) as error:
                told = f"step {step} {type(error).__name__} {error}"
                if meeting:
                    meet(meeting, world_size)
            if step != 1:
                expected = mean_of_ranks(module, lambda m, r: m(data(r, step)).sum(), world_size)  # noqa: B023
                worst = max(worst, gap(grads(module), expected))
    return told, worst


def meet(key, world_size):
    """Raises TimeoutError after half the time after which the group would end what waits in it."""
    store, deadline = _get_default_store(), time.monotonic() + TIMEOUT / 4
    present = store.add(key, 1)
    while present < world_size:
        if time.monotonic() > deadline:
            raise TimeoutError("the others are still waiting for the rank whose hook has raised")
        time.sleep(0.02)
        present = store.add(key, 0)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_hook_that_raises_on_one_rank_ends_the_step_on_all(ranks, world_size, settings):
    arguments = {"where": "call", "who": [1], "settings": settings, "meeting": uuid.uuid4().hex}
    for rank, (told, worst) in enumerate(ranks(world_size, raising, **arguments)):
        if rank == 1:
            assert told == "step 1 KeyError 'words of its own'", f"rank {rank}"
        else:
            assert told == "step 1 RankFailed the comm hook of rank 1 raised KeyError: 'words of its own'", (
                f"rank {rank}"
            )
        assert worst <= 1e-15, f"rank {rank}"


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("where", ["call", "then"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_hook_that_raises_on_all_ranks(ranks, world_size, where, settings):
    results = ranks(world_size, raising, where=where, who=range(world_size), settings=settings)
    for rank, (told, worst) in enumerate(results):
        assert told.startswith("step 1 ") and "KeyError" in told and "words of its own" in told, f"rank {rank}"
        assert worst <= 1e-15, f"rank {rank}"


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("world_size", [2, 4])
def test_when_what_follows_raises_the_others_have_all_they_need(ranks, world_size, settings):
    """The messages had all been sent: only the rank whose own average failed is without it."""
    results = ranks(world_size, raising, where="then", who=[1], settings=settings)
    for rank, (told, worst) in enumerate(results):
        assert bool(told) == (rank == 1), f"rank {rank}"
        assert rank != 1 or "KeyError: 'words of its own'" in told, f"rank {rank}"
        assert worst <= 1e-15, f"rank {rank}"


def heard_by_the_next(rank, world_size):
    """After a model whose hook has raised, another, which is late in the same step."""
    raising(rank, world_size, "call", [1], {})
    wrapped, step = DDP(net(), bucket_cap_mb=0), 0

    def hook(state, bucket):
        if rank == 1 and step == 1:
            time.sleep(0.3)
        return comm.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    wrapped.register_comm_hook(None, hook)
    with mock.patch.object(comm_hook_errors, "PATIENCE", 0.1):
        for step in range(2):
            wrapped(data(rank, step)).sum().backward()


def test_the_next_model_is_not_told_of_it(ranks):
    ranks(2, heard_by_the_next)


def all_buckets_are_waited_for(rank, world_size):
    """The hook of the first bucket fails at once: the others' messages must be over when backward raises."""
    wrapped, futures = DDP(net(), bucket_cap_mb=0), []

    def hook(state, bucket):
        futures.append(torch.futures.Future())
        if bucket.index():
            work = comm.all_reduce(bucket.buffer(), async_op=True).get_future()
            work.add_done_callback(lambda done, mine=futures[-1]: (time.sleep(0.1), mine.set_result(done.value()[0])))
        else:
            futures[-1].set_exception(KeyError("words of its own"))
        return futures[-1]

    wrapped.register_comm_hook(None, hook)
    with pytest.raises(Exception, match="words of its own"):
        wrapped(data(rank)).sum().backward()
    return len(futures), all(future.done() for future in futures)


def test_after_an_error_nothing_is_under_way(ranks):
    assert ranks(2, all_buckets_are_waited_for) == [(4, True), (4, True)]


def launched(context, where, who, settings):
    import torch
    from test_comm_hook_errors import hook_that_raises

    from labkit.ddp import DDP

    layers = [torch.nn.Linear(8, 8) for _ in range(2)]
    model = DDP(torch.nn.Sequential(*layers), bucket_cap_mb=0, **settings)
    model.register_comm_hook(None, hook_that_raises(where, lambda: context.rank in who, context.world_size))
    for _ in range(3):
        model(torch.randn(2, 8)).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"overlap": False}], ids=str)
@pytest.mark.parametrize("where", ["call", "then"])
@pytest.mark.parametrize(("nproc", "who"), [(2, [1]), (4, [2]), (2, [0, 1])])
def test_launch_names_the_rank_and_its_words(nproc, who, where, settings):
    start = time.monotonic()
    arguments = {"where": where, "who": who, "settings": settings}
    with pytest.raises(LaunchError) as caught:
        launch(
            "test_comm_hook_errors:launched", nproc=nproc, quiet=True, collective_timeout=150, timeout=200, **arguments
        )
    headline, *_ = str(caught.value).splitlines()
    assert any(headline.startswith(f"rank {rank} raised ") for rank in who)
    assert "KeyError: 'words of its own'" in headline
    assert time.monotonic() - start < 100  # not the group's timeout


def test_a_rank_that_was_told_is_not_blamed_though_it_reports_first(tmp_path):
    told = {"kind": "error", "type": "RankFailed", "line": "x", "lineno": 1, "traceback": ""}
    words = ["the comm hook of rank 1 raised KeyError: 'words'", "'words'"]
    errors = [told | {"time": time, "message": message} for time, message in enumerate(words)]
    events = [[{"kind": "start", "pid": rank}, errors[rank]] for rank in (0, 1)]
    cause, text = explain(read_ends(tmp_path, 2, events, {0: 1, 1: 1}))
    assert cause.rank == 1 and text.startswith("rank 1 raised")
