import pytest
import torch
import torch.distributed as dist

from labkit import comm


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
def test_every_operation_is_right_and_counted(ranks, n):
    P = 16 * n  # bytes of 4 n floats
    once = [
        ("all_reduce", n, P, 2 * (n - 1) * 16, "derived"),
        ("reduce_scatter", n, P, (n - 1) * 16, "derived"),
        ("all_gather", n, P * n, (n - 1) * P, "derived"),
        ("broadcast", n, P, (n - 1) * 16, "derived"),
        ("all_to_all", n, P, (n - 1) * 16, "derived"),
        ("barrier", n, 0, 0, "counted"),
    ]
    assert ranks(n, every_operation) == [once * 2] * n


def unlogged(rank, n):
    work = comm.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    return type(work) is dist.Work


def test_without_a_record_the_work_is_torchs_own(ranks):
    assert ranks(2, unlogged) == [True, True]
