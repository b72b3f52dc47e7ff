"""What test_poisoned.py relies on: what is read early is NaN, what is touched early is named."""

import threading
from contextlib import contextmanager
from functools import partial
from unittest import mock

import poison
import pytest
import torch
import torch.distributed as dist
from poison import poisoned, under_poison

from labkit import comm, gloo_workarounds

HIDDEN = {torch.float32: float("nan"), torch.int64: 2**63 - 1, torch.uint8: 255, torch.bool: True}


@contextmanager
def held():
    """Nothing arrives before the event that this gives is set."""
    arrive = threading.Event()
    with mock.patch.object(poison, "sleep", lambda _: arrive.wait()):
        yield arrive


def early(rank, n, dtype):
    """What each output holds after the call; after wait(), it must hold what is right."""
    x = torch.full((n,), rank, dtype=dtype)
    y, z, whole = torch.empty_like(x), torch.empty_like(x), torch.zeros(n * n, dtype=dtype)
    whole[rank * n : (rank + 1) * n] = x
    comm.barrier()
    calls = [
        (lambda: dist.broadcast(y.copy_(x), src=0, async_op=True), y, [0] * n),
        (lambda: dist.all_to_all_single(z, x, async_op=True), z, list(range(n))),
        (
            lambda: comm._all_gather(whole, whole[rank * n : (rank + 1) * n], None, True),
            whole,
            [0] * n + [1] * n,
        ),
        (lambda: comm.exchange(x, 1 - rank, y, 1 - rank, async_op=True), y, [1 - rank] * n),
        (lambda: dist.irecv(y, 0) if rank else dist.isend(x, 1), y if rank else x, [0] * n),
    ]
    if dtype in (torch.float32, torch.int64):
        calls += [
            (lambda: dist.all_reduce(z.copy_(x), async_op=True), z, [1] * n),
            (lambda: comm._reduce_scatter(y[:1], x, dist.ReduceOp.SUM, None, True), y[:1], [1]),
        ]
    seen = []
    for call, output, wanted in calls:
        with held() as arrive:
            work = call()
            before = output.tolist()
            assert not work.is_completed()
            arrive.set()
            work.wait()
        assert work.is_completed() and output.tolist() == wanted, output
        seen.append(before)
    return seen


@pytest.mark.parametrize("dtype", HIDDEN, ids=str)
def test_an_output_is_hidden_until_it_has_been_waited_for(ranks, dtype):
    nothing, mine = torch.full((4,), HIDDEN[dtype], dtype=dtype), torch.tensor([0, 1], dtype=dtype)
    hidden = str(nothing[:2].tolist())
    seen = ranks(2, partial(under_poison, early), dtype=dtype)
    zero, one = ([str(before) for before in told] for told in seen)
    # Who sends may read what it sends.
    assert zero[0] == str(mine[:1].repeat(2).tolist()) and one[0] == hidden
    for rank, told in enumerate((zero, one)):
        gathered = nothing.clone()
        gathered[2 * rank : 2 * rank + 2] = rank
        assert told[1:4] == [hidden, str(gathered.tolist()), hidden]
    assert zero[4] == zero[0] and one[4] == hidden
    for told in zero[5:] + one[5:]:
        assert told in (hidden, str(nothing[:1].tolist()))


LARGE = gloo_workarounds.LARGEST  # elements: a smaller all_reduce of two ranks is an all_to_all


def forgotten(arrive):
    comm.all_reduce(torch.ones(LARGE), async_op=True)
    arrive.set()


def forgotten_swap(arrive):
    comm.all_reduce(torch.ones(2), async_op=True)
    arrive.set()


def overwritten(arrive):
    x, y = torch.ones(2), torch.empty(2)
    work = comm.all_to_all(y, x, async_op=True)
    x.zero_()
    arrive.set()
    work.wait()
    assert y.eq(1).all()


def written_to(arrive):
    x = torch.ones(LARGE)
    work = comm.all_reduce(x, async_op=True)
    x.zero_()
    arrive.set()
    work.wait()


def cut_off(arrive):
    x = torch.ones(LARGE)
    work = comm.all_reduce(x, async_op=True)
    x.untyped_storage().resize_(0)
    arrive.set()
    work.wait()


def failing(arrive):
    forgotten(arrive)
    raise KeyError("something else")


def told(rank, n, mistake, words):
    with pytest.raises(AssertionError, match=words), poisoned(rank), held() as arrive:
        mistake(arrive)
    return dist.all_reduce.__module__  # torch's own again


WRONG = {
    forgotten: r"^nobody waited for the all_reduce of test_poison.py:\d+$",
    forgotten_swap: r"^nobody waited for the all_to_all of test_poison.py:\d+$",
    overwritten: r"^a tensor of the all_to_all of test_poison.py:\d+ was written to while",
    written_to: r"^a tensor of the all_reduce of test_poison.py:\d+ was written to while",
    cut_off: r"^memory of the all_reduce of test_poison.py:\d+ was freed while",
    failing: r"^nobody waited for the all_reduce of test_poison.py:\d+$",
}


@pytest.mark.parametrize("mistake", WRONG)
def test_what_is_touched_or_forgotten_is_named(ranks, mistake):
    torchs_own = ["torch.distributed.distributed_c10d"] * 2
    assert ranks(2, told, mistake=mistake, words=WRONG[mistake]) == torchs_own
