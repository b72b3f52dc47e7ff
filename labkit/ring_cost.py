"""Bytes and hops of each collective in a ring: the one formula behind logs, fits and predictions.

    operation                    sent by each of n ranks, payload P     messages in a row
    all_reduce                   2 (n-1)/n P                            2 (n-1)
    reduce_scatter, all_gather     (n-1)/n P                              n-1
    broadcast, all_to_all          (n-1)/n P                              n-1
    send, exchange                         P                              1
    recv, barrier                          0                              0, n-1

On gloo, two ranks of labkit.comm reduce at most 1 MiB in one message (gloo_workarounds.py), which
no formula here knows.
The payload is the tensor before it is cut or after it is put together. A broadcast's bytes are the
mean over the ranks: n-1 of them must get P.
Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009;
Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, IJHPCA
2005, section 3.
"""

ROUNDS = {  # how many times the data go around the ring
    "all_reduce": 2,
    "reduce_scatter": 1,
    "all_gather": 1,
    "broadcast": 1,
    "all_to_all": 1,
}


def sent_bytes(op, n, payload):
    """Bytes that one of n ranks sends, rounded down. payload: bytes."""
    if op in ("send", "exchange"):
        return payload
    if op in ("recv", "barrier"):
        return 0
    return ROUNDS[op] * (n - 1) * payload // n


def sent_of_splits(payload, sizes, rank):
    """Bytes that a rank sends in an all_to_all: all but its own part. sizes: rows for each rank."""
    return payload - payload * sizes[rank] // max(1, sum(sizes))


def share(op, n):
    """Bytes that one of n ranks sends, as a multiple of the payload: a float."""
    return ROUNDS[op] * (n - 1) / n


def hops(op, n):
    """Messages that follow one another: each costs a latency."""
    if op == "recv":
        return 0
    if op in ("send", "exchange"):
        return 1
    return ROUNDS.get(op, 1) * (n - 1)
