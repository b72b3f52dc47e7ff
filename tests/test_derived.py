"""What labkit.comm derives, the bytes that a collective of the backend sends, against counters of real interfaces.

Each node has one rank, so that every byte between ranks passes an interface, and the interface counts it: headers,
acknowledgements and all. `python tests/test_derived.py` prints the table.
"""

import pytest

from labkit.run import launch

MIB = 4
REPEATS = 3  # on a busy machine packets are sent again, which only adds: the fewest bytes are the operation's
OVERHEAD = 1.05  # headers of jumbo frames (0.8 %), acknowledgements of what arrives, the barriers around


def every_collective(context, mib, repeats):
    import torch

    from labkit import comm
    from labkit.run.nodes import counters

    n, rank = context.world_size, context.rank
    whole = torch.ones(mib * 2**18 // n * n)
    part, other = torch.ones(whole.numel() // n), torch.empty_like(whole)
    operations = {
        "all_reduce": lambda: comm.all_reduce(whole),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole),
        "all_gather": lambda: comm.all_gather(whole, part),
        "broadcast": lambda: comm.broadcast(whole, src=0),
        "all_to_all": lambda: comm.all_to_all(other, whole),
        "exchange": lambda: comm.exchange(whole, (rank + 1) % n, other, (rank - 1) % n),
    }
    for name, operation in operations.items():
        operation()  # connections are made
        for repeat in range(repeats):
            comm.barrier()
            before = counters()[0]
            with comm.record() as events:
                operation()
            comm.barrier()
            (event,) = events
            sent = {"said": event.sent_bytes, "counted": counters()[0] - before}
            context.record(op=name, source=event.source, repeat=repeat, **sent)


def measured(n):
    run = launch(every_collective, nodes=n, nproc=1, quiet=True, mib=MIB, repeats=REPEATS, collective_timeout=60)
    if run.network["how"] == "loopback":
        pytest.skip(run.network["notes"][0])
    means = run.records.groupby(["op", "source", "repeat"], sort=False)[["said", "counted"]].mean()  # of the ranks
    fewest = means.groupby(["op", "source"], sort=False).min()
    return fewest.assign(ratio=fewest["counted"] / fewest["said"])


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4])
def test_an_interface_counts_what_is_derived(n):
    ratios = measured(n)["ratio"]
    assert ratios.between(1.0, OVERHEAD).all(), ratios


if __name__ == "__main__":
    for n in (2, 3, 4):
        print(f"{n} nodes of one rank\n{measured(n)}\n")
