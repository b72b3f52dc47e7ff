import gc
import os
import threading
import time
import uuid
import warnings
from collections import deque
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from labkit import comm, comm_log, gloo_workarounds
from labkit.replicas import gather_bytes


def over_a_cable(body, rank, n, **arguments):
    """As if the ranks were on machines of their own."""
    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="eth0"):
        return body(rank, n, **arguments)


def every_operation(rank, n):
    """One call of each, sync and async; returns (op, size, payload, sent, source, ended, waited <= duration)."""
    x = torch.full((4 * n,), float(rank + 1))
    part, whole = torch.empty(4), torch.empty(16 * n * n)
    total = n * (n + 1) / 2
    with comm.record() as log:
        for async_op in (False, True):
            done = []
            a = x.clone()
            done.append(comm.all_reduce(a, async_op=async_op))
            done.append(comm.reduce_scatter(part, x, async_op=async_op))
            done.append(comm.all_gather(whole[: 4 * n * n], x, async_op=async_op))
            b = x.clone()
            done.append(comm.broadcast(b, src=n - 1, async_op=async_op))
            c = torch.empty_like(x)
            done.append(comm.all_to_all(c, x, async_op=async_op))
            assert all((work is None) != async_op for work in done)
            for work in done:
                if async_op:
                    work.wait()
            comm.barrier()
            assert a.eq(total).all() and part.eq(total).all() and b.eq(n).all()
            assert c.eq(torch.arange(1.0, n + 1).repeat_interleave(4)).all()
            assert whole[: 4 * n * n].eq(torch.arange(1.0, n + 1).repeat_interleave(4 * n)).all()
    assert all(e.end > e.start and e.waited >= 0 for e in log)
    return [(e.op, e.group_size, e.payload_bytes, e.sent_bytes, e.source) for e in log]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("body", [partial(over_a_cable, every_operation), every_operation], ids=["cable", "loopback"])
def test_every_operation_is_right_and_counted(ranks, n, body):
    P = 16 * n  # bytes of 4 n floats
    once = [
        ("all_reduce", n, P, 2 * (n - 1) * 16, "derived"),
        ("reduce_scatter", n, P, (n - 1) * 16, "derived"),
        ("all_gather", n, P * n, (n - 1) * P, "derived"),
        ("broadcast", n, P, (n - 1) * 16, "derived"),
        ("all_to_all", n, P, (n - 1) * 16, "derived"),
        ("barrier", n, 0, 0, "counted"),
    ]
    assert ranks(n, body) == [once * 2] * n


def unlogged(rank, n):
    work = comm.broadcast(torch.ones(2), async_op=True)
    work.wait()
    return type(work) is dist.Work


def test_without_a_record_the_work_is_torchs_own(ranks):
    assert ranks(2, unlogged) == [True, True]


def untimed(rank, n):
    with comm.record(timed=False) as log:
        work = comm.broadcast(torch.ones(2), async_op=True)
        work.wait()
    return type(work) is dist.Work, [(event.op, event.end) for event in log]


def test_an_untimed_record_sees_the_start_and_leaves_torchs_own_work(ranks):
    assert ranks(2, untimed) == [(True, [("broadcast", None)])] * 2


class Opening:
    """A log that notes how each event looked when it was appended."""

    def __init__(self):
        self.seen = []

    def append(self, event):
        self.seen.append((event.op, event.end))


def logs(rank, n):
    with comm.record() as outer:
        comm.barrier()
        with comm.record() as inner, comm.record(deque(maxlen=1)) as last:
            comm.all_reduce(torch.ones(2))
            comm.broadcast(torch.ones(2))
        with pytest.raises(ZeroDivisionError), comm.record() as broken:
            comm.barrier()
            raise ZeroDivisionError
        with comm.record() as one:
            # Two empty lists are equal: closing the inner one must not close the other.
            with comm.record() as empty:
                pass
            comm.barrier()
        with comm.record(Opening()) as opening:
            comm.all_reduce(torch.ones(2))
            comm.all_reduce(torch.ones(2), async_op=True).wait()
    comm.barrier()
    assert opening.seen == [("all_reduce", None)] * 2  # an event is there from the start, so a hang can be named
    assert inner[0] is outer[1]
    assert not comm_log._logs
    return [[e.op for e in log] for log in (outer, inner, last, broken, empty, one)]


def test_logs_nest_and_close(ranks):
    inner = ["all_reduce", "broadcast"]
    outer = ["barrier", *inner, "barrier", "barrier", "all_reduce", "all_reduce"]
    assert ranks(2, logs) == [[outer, inner, ["broadcast"], ["barrier"], [], ["barrier"]]] * 2


class Told:
    """A Work that says in the store, by its key, that its wait() has begun."""

    def __init__(self, work, key):
        self.work, self.key = work, key

    def wait(self):
        _get_default_store().set(self.key, "")
        return self.work.wait()


def times(rank, n, key):
    with comm.record() as log:
        comm.all_reduce(torch.ones(2))
        early = comm.all_reduce(torch.ones(2), async_op=True)
        wait_until(lambda: log[1].end is not None)  # nobody has waited: a callback saw it end
        assert log[1].waited == 0
        ended = log[1].end
        time.sleep(0.02)
        early.wait()
        assert log[1].end == ended

        box = torch.empty(1)
        if rank == 0:
            late = comm.recv(box, 1, async_op=True)
            assert log[2].end is None and log[2].waited == 0
            late.work = Told(late.work, key)
            late.wait()
            assert log[2].waited >= 0.02
        else:
            _get_default_store().wait([key])
            time.sleep(0.05)
            comm.send(torch.ones(1), 0)
    first = log[0]
    assert first.waited == first.end - first.start > 0
    assert all(event.end > event.start for event in log)


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_end_is_known_without_waiting_and_waited_is_the_blocked_time(ranks):
    ranks(2, times, key=uuid.uuid4().hex)


def failures(rank, n):
    with comm.record() as log, pytest.raises(RuntimeError, match="Invalid scalar type"):
        comm.all_reduce(torch.ones(2, dtype=torch.int16))
    assert log[0].op == "all_reduce" and log[0].end is None


def test_what_failed_has_no_end(ranks):
    ranks(2, failures)


def test_an_async_operation_that_failed_has_no_end():
    class Failing:
        def get_future(self):
            future = torch.futures.Future()
            future.set_exception(RuntimeError("peer gone"))
            return future

        def wait(self):
            raise RuntimeError("peer gone")

    event = comm.Event("all_reduce", 2, 8, 8, "derived", 0.0)
    with pytest.raises(RuntimeError, match="peer gone"):
        comm.MeteredWork(Failing(), event).wait()
    assert event.end is None


def from_a_thread(rank, n):
    with comm.record() as log:
        thread = threading.Thread(target=lambda: comm.all_reduce(torch.ones(2)))
        thread.start()
        thread.join()
    return len(log)


def test_events_of_other_threads_are_seen(ranks):
    assert ranks(2, from_a_thread) == [1, 1]


def in_a_group(rank, n):
    """src, dst count within the group: its rank 0 is the world's 1."""
    group = dist.new_group([1, 2])
    x = torch.tensor([float(rank)])
    with comm.record() as log, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that rank 0 is not in the group
        comm.broadcast(x, src=0, group=group)
        comm.all_reduce(x, group=group)
        y = torch.tensor([-1.0])
        if rank == 1:
            comm.send(x, 1, group)
            comm.recv(y, 1, group)
        if rank == 2:
            comm.recv(y, 0, group)
            comm.send(x + 1, 0, group)
    if rank > 0:
        dist.destroy_process_group(group)
    return x.item(), y.item(), [(e.op, e.group_size, e.payload_bytes, e.sent_bytes, e.source) for e in log]


def test_ranks_count_within_the_group(ranks):
    outside, one, two = ranks(3, in_a_group)
    assert outside == (0.0, -1.0, [])
    both = [("broadcast", 2, 4, 2, "derived"), ("all_reduce", 2, 4, 4, "derived")]
    send, recv = ("send", 2, 4, 4, "counted"), ("recv", 2, 4, 0, "counted")
    assert one == (2.0, 3.0, [*both, send, recv])
    assert two == (2.0, 2.0, [*both, recv, send])


def around_the_circle(rank, n, async_op):
    """Large messages: were the sends not matched by posted receives, all ranks would wait for each other."""
    mine, theirs = torch.full((1 << 19,), float(rank)), torch.empty(1 << 19)
    with comm.record() as log:
        work = comm.exchange(mine, (rank + 1) % n, theirs, (rank - 1) % n, async_op=async_op)
        if async_op:
            work.wait()
            assert work.is_completed()
    assert theirs.eq((rank - 1) % n).all()
    (event,) = log
    assert event.end > event.start
    return event.op, event.payload_bytes, event.sent_bytes, event.source


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_exchange(ranks, n, async_op):
    assert ranks(n, around_the_circle, async_op=async_op) == [("exchange", 4 << 19, 4 << 19, "counted")] * n


def uneven(rank, n):
    """Rank r sends j + 1 rows to rank j and keeps r + 1."""
    rows = torch.full((sum(range(1, n + 1)), 2), float(rank))
    received = torch.empty(n * (rank + 1), 2)
    with comm.record() as log:
        comm.all_to_all(received, rows, [rank + 1] * n, list(range(1, n + 1)))
    assert received[:, 0].eq(torch.arange(0.0, n).repeat_interleave(rank + 1)).all()
    return log[0].payload_bytes, log[0].sent_bytes


def test_all_to_all_of_uneven_parts(ranks):
    assert ranks(3, uneven) == [(48, 40), (48, 32), (48, 24)]


def one_way(rank, n):
    """All rows go to the last rank: between two ranks at most one message, to oneself none."""
    rows, received = torch.full((2, 3), rank + 1.0), torch.zeros(2 * n if rank == n - 1 else 0, 3)
    outgoing, incoming = [0] * (n - 1) + [2], [2 if rank == n - 1 else 0] * n
    for _ in range(2):
        comm.all_to_all(received.zero_(), rows, incoming, outgoing)
    return received[:, 0].tolist()


def test_all_to_all_of_parts_without_rows(ranks):
    assert ranks(3, partial(over_a_cable, one_way)) == [[], [], [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]]


def split_wrongly(rank, n):
    """An error before anything is sent: the group can be used afterwards."""
    for output, input, sizes in ((4, 3, None), (3, 4, None), (4, 4, [2, 1]), (4, 4, [4])):
        with pytest.raises((RuntimeError, ValueError)):
            comm.all_to_all(torch.empty(output), torch.empty(input), sizes, None)
    with pytest.raises(ValueError, match="one dtype"):
        comm.all_to_all(torch.empty(n), torch.empty(n).int())
    return uneven(rank, n)


def test_all_to_all_of_parts_that_do_not_fit(ranks):
    assert ranks(2, partial(over_a_cable, split_wrongly)) == [(24, 16), (24, 8)]


def at_once(group=None, rows=2):
    """Of each form with messages of our own on gloo: (name, output, call)."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    x = rank + torch.arange(float(rows * n))
    whole, part, other = x.new_empty(n * n * rows), x.new_empty(rows), torch.empty_like(x)
    total = torch.empty_like(x)
    forms = [
        ("all_gather", whole, lambda: comm.all_gather(whole, x, group, True)),
        ("reduce_scatter", part, lambda: comm.reduce_scatter(part, x, group=group, async_op=True)),
        ("all_to_all", other, lambda: comm.all_to_all(other, x, group=group, async_op=True)),
        ("all_reduce", total, lambda: comm.all_reduce(total.copy_(x), group=group, async_op=True)),
    ]
    return forms if n == 2 else forms[:3]  # only two ranks swap what is summed


def order_of_messages(rank, n):
    told = []

    def noting(name, post):
        def noted(tensor, **arguments):
            told.append((name, arguments.get("group_dst"), arguments.get("group_src"), arguments["tag"] > 1 << 20))
            return post(tensor, **arguments)

        return mock.patch.object(dist, name, noted)

    orders = {}
    for name, _, call in at_once():
        with noting("isend", dist.isend), noting("irecv", dist.irecv):
            call().wait()
        orders[name], told[:] = list(told), []
    return orders


@pytest.mark.parametrize("n", [2, 3])
def test_the_two_directions_do_not_take_turns_on_gloo(ranks, n):
    """A request waits behind a message that is leaving: everything is asked for before anything leaves."""
    for rank, orders in enumerate(ranks(n, partial(over_a_cable, order_of_messages))):
        receives = [("irecv", None, (rank + k) % n, True) for k in range(1, n)]
        sends = [("isend", (rank + k) % n, None, True) for k in range(1, n)]
        assert orders == dict.fromkeys(orders, receives + sends), f"rank {rank}"
        assert len(orders) == (4 if n == 2 else 3)


def many_at_once(rank, n):
    """All forms twice, of other sizes, and a user's own messages between them, which each rank posts elsewhere."""
    expected = {}
    for rows in (2, 3):
        for name, output, call in at_once(rows=rows):
            call().wait()
            expected[name, rows] = output.clone()
    forms = [(name, rows, *rest) for rows in (2, 3) for name, *rest in at_once(rows=rows)]
    left, right = (rank - 1) % n, (rank + 1) % n
    box, anybody, works, mine = torch.empty(3), torch.empty(3), [], torch.full((3,), 10.0 + rank)
    for number, (_, _, _, call) in enumerate(forms):
        if number == rank:
            works += [comm.recv(box, left, async_op=True), dist.irecv(anybody, tag=1)]
        works.append(call())
        if number == n - rank:
            works += [comm.send(mine, right, async_op=True), dist.isend(mine, group_dst=right, tag=1)]
    for work in works if rank % 2 else reversed(works):
        work.wait()
    for name, rows, output, _ in forms:
        assert output.equal(expected[name, rows]), (name, rows)
    return box[0].item(), anybody[0].item()


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("body", [partial(over_a_cable, many_at_once), many_at_once], ids=["cable", "loopback"])
def test_messages_under_way_at_once_do_not_mix(ranks, n, body):
    assert ranks(n, body) == [(10.0 + (rank - 1) % n,) * 2 for rank in range(n)]


def as_futures(rank, n):
    """A future returns the result of wait(), also if it is read twice or after wait()."""
    for name, output, call in at_once():
        work = call()
        if name == "reduce_scatter":
            with pytest.raises(RuntimeError, match="only when wait"):
                work.get_future()
            work.wait()
            continue
        seen = work.get_future().then(lambda done: done.value()[0].clone())
        assert work.get_future().then(lambda done: done.value()[0].clone()).wait().equal(seen.wait())
        work.wait()
        work.wait()
        assert work.is_completed() and seen.wait().equal(output)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("body", [partial(over_a_cable, as_futures), as_futures], ids=["cable", "loopback"])
def test_futures_of_our_own_forms(ranks, n, body):
    ranks(n, body)


def left_alone(rank, n, asked):
    """The last rank exits: the others notice by their connection to it, before the group's timeout."""
    for form in range(len(at_once())):
        group = dist.new_group()
        _, _, call = at_once(group)[form]
        work = call() if rank < n - 1 else None
        future = work.get_future() if work and asked and form != 1 else None
        comm.barrier()
        if rank == n - 1:
            dist.destroy_process_group(group)
            del group, call
            gc.collect()
        else:
            for waits in (work.wait, *([future.wait] if future else []), work.wait):
                with pytest.raises(RuntimeError, match=r"closed|reset|Broken pipe"):
                    waits()
        comm.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_who_is_left_alone_is_told_at_once(ranks, n, asked):
    ranks(n, partial(over_a_cable, left_alone), asked=asked)


@pytest.mark.parametrize("async_op", [False, True])
def test_arguments_reach_torch(ranks, async_op):
    assert ranks(2, maximum, async_op=async_op) == [2.0, 2.0]


def maximum(rank, n, async_op):
    results = []
    for recorded in (False, True):
        x, part = torch.tensor([rank + 1.0, 0.0]), torch.empty(1)
        with comm.record() if recorded else nullcontext():
            for work in (
                comm.reduce_scatter(part, x.clone(), op=dist.ReduceOp.MAX, async_op=async_op),
                comm.all_reduce(x, op=dist.ReduceOp.MAX, async_op=async_op),
            ):
                assert (work is not None) == async_op
                if async_op:
                    work.wait()
        assert part.item() == (2.0 if rank == 0 else 0.0)
        results.append(x[0].item())
    assert results[0] == results[1]
    return results[0]


def sums_out_of_place(rank, n):
    """The sum is torch's own, bit for bit, and the input is unchanged."""
    generator = torch.Generator().manual_seed(rank)
    pair = dist.new_group([0, n - 1]) if n > 2 else None
    forms = [
        *(torch.randn(3, 5, generator=generator).to(kind) for kind in (torch.float16, torch.float32, torch.float64)),
        torch.arange(6) + rank,
        torch.randn((), generator=generator),
        torch.zeros(0),
        torch.randn(4, 6, generator=generator).t(),
    ]
    for group in (None, pair):
        if group is pair and n > 2 and rank not in (0, n - 1):
            continue
        for mine in forms:
            before, expected = mine.clone(), mine.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(expected, group=group)
            with comm.record() as log:
                total = comm.summed(mine, group)
            assert total.equal(expected) and total.dtype == mine.dtype and total.is_contiguous()
            assert mine.equal(before) and (total.data_ptr() != mine.data_ptr() or not mine.numel())
            size = n if group is None else 2
            sent = 2 * (size - 1) * mine.nbytes // size
            assert [(e.op, e.payload_bytes, e.sent_bytes) for e in log] == [("all_reduce", mine.nbytes, sent)]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_sum_out_of_place_is_torchs_own(ranks, n):
    ranks(n, sums_out_of_place)


def payloads(rank, n):
    """Bytes of any length; what is equal on all ranks is not sent."""
    everywhere = b"x" * 1000
    own = b"y" * 7 * rank
    with comm.record() as log:
        assert gather_bytes(everywhere) == [everywhere] * n
        assert gather_bytes(b"") == [b""] * n
    assert [event.payload_bytes for event in log] == [40 * n] * 2  # a length and a SHA-256
    assert gather_bytes(own) == [b"y" * 7 * r for r in range(n)]
    same_length = bytes([rank] * 9)
    assert gather_bytes(same_length) == [bytes([r] * 9) for r in range(n)]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_payloads_are_sent_only_where_they_differ(ranks, n):
    ranks(n, payloads)


KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


def as_torch_does(rank, n):
    """Every operation and dtype, of tensors small and large, contiguous or not: the same bits as torch's."""
    dice = torch.Generator().manual_seed(rank)
    operations = [getattr(dist.ReduceOp, name) for name in ("SUM", "MAX", "MIN", "PRODUCT")]
    shapes = [(), (1,), (3, 5), (0,), (gloo_workarounds.LARGEST // 8 + 1,)]
    seen = set()
    for op in operations:
        for dtype in KINDS:
            for shape in shapes:
                x = (10 * torch.randn(shape, generator=dice)).abs().to(dtype)
                for ours in (x.clone(), x.clone().t().contiguous().t() if x.dim() == 2 else x.clone()):
                    theirs = ours.clone()
                    seen.add(gloo_workarounds.swaps(ours, op))
                    comm.all_reduce(ours, op)
                    dist.all_reduce(theirs, op)
                    assert ours.equal(theirs), (op, dtype, shape)
    assert seen == ({True, False} if n == 2 else {False})
    leaf = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        comm.all_reduce(leaf)
    assert leaf.tolist() == [n, n]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("body", [partial(over_a_cable, as_torch_does), as_torch_does], ids=["cable", "loopback"])
def test_all_reduce_is_torchs(ranks, n, body):
    ranks(n, body)


def like_torchs_own(rank, n):
    """Any mode of autograd, and a Work that is polled or waited for with a limit."""
    with torch.inference_mode():
        x, whole, part = torch.ones(4), torch.ones(4), torch.empty(4 // n)
    with comm.record():
        comm.all_reduce(x, async_op=True).wait(timeout=timedelta(seconds=60))
    until(comm.all_reduce(x, async_op=True).is_completed)
    assert x.tolist() == [n * n] * 4
    with torch.inference_mode():
        gathered, exchanged = torch.empty(4 * n), torch.empty(4)
    comm.all_to_all(exchanged, x)
    comm.all_gather(gathered, torch.ones(4, requires_grad=True))
    assert exchanged.equal(x) and not gathered.requires_grad and gathered.eq(1).all()
    leaf, its = torch.ones(4, requires_grad=True), torch.empty(4 // n, requires_grad=True)
    for output, input in ((part, whole), (its, leaf)):
        work = comm.reduce_scatter(output, input, async_op=True)
        work.wait()
        assert work.is_completed() and output.tolist() == [n] * (4 // n)
    assert not gloo_workarounds.swaps(torch.eye(2).to_sparse(), dist.ReduceOp.SUM)


def until(true):
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("body", [partial(over_a_cable, like_torchs_own), like_torchs_own], ids=["cable", "loopback"])
def test_our_own_forms_allow_what_torchs_do(ranks, n, body):
    ranks(n, body)


def polled(work):
    assert not work.is_completed()
    return work


def itself(rank, n):
    for call in (comm.send, comm.recv):
        with pytest.raises(ValueError, match=f"rank {rank} cannot send to itself"):
            call(torch.ones(1), rank)


def test_no_rank_sends_to_itself(ranks):
    ranks(2, itself)


def nobody_comes(rank, n):
    """The group's timeout becomes shorter after it was made, as when launch() has all ranks."""
    x = torch.ones(3)
    for call in (
        lambda group: comm.recv(x, 0, group),
        lambda group: comm.recv(x, 0, group, async_op=True).wait(),
        lambda group: comm.exchange(x, 0, x.clone(), 0, group),
        lambda group: polled(comm.all_reduce(x, group=group, async_op=True)).wait(timedelta(seconds=0.5)),
    ):
        group = dist.new_group(timeout=timedelta(seconds=20))
        _set_pg_timeout(timedelta(seconds=1), group)
        start = time.monotonic()
        if rank:
            with pytest.raises(RuntimeError, match="Timed out"):
                call(group)
        assert time.monotonic() - start < 15
        comm.barrier()


def test_messages_wait_as_long_as_the_group_says_today(ranks):
    ranks(2, nobody_comes)
