"""How much of the network's time was hidden under computing: sets of moments, added and taken away.

    computing  [---------------)          [----)
    network              [-------------------)
    hidden               [-----)          [--)
    exposed                    [----------)

    exposed communication = network time - the part of it under which this rank computed

A span of `backward()` includes the moments at its end in which backward waits for the last bucket.
The event log says how long each operation kept its caller waiting, so these moments leave the
compute lane and count as exposed.

A set of moments is a list of intervals (start, end) in ms. Li et al., PyTorch Distributed:
Experiences on Accelerating Data Parallel Training, VLDB 2020, section 5 (figure 6).
"""

LANES = ("compute", "network")


def union(intervals):
    """The same set of moments as disjoint, sorted intervals."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def subtract(intervals, taken):
    """The moments in `intervals` that are not in `taken`, as disjoint intervals."""
    left = union(intervals)
    for start, end in union(taken):
        pieces = [piece for a, b in left for piece in ((a, min(b, start)), (max(a, end), b))]
        left = [(a, b) for a, b in pieces if a < b]
    return left


def lanes_of(frame, rank):
    """(computing, network) of a rank: disjoint intervals in ms; computing leaves out waiting."""
    mine = frame[frame["rank"] == rank]
    compute, network = (mine[mine["lane"] == lane] for lane in LANES)
    # wait() returns as the operation completes: its moments are the last before that end.
    waited = network["waited"].fillna(0.0) * 1e3 if "waited" in network else 0.0 * network["end_ms"]
    blocked = zip(network["end_ms"] - waited, network["end_ms"], strict=True)
    computing = subtract(zip(compute["start_ms"], compute["end_ms"], strict=True), blocked)
    return computing, union(zip(network["start_ms"], network["end_ms"], strict=True))


def exposed(frame, rank):
    """Intervals (start_ms, end_ms) in which `rank` had the network at work and did not compute."""
    computing, network = lanes_of(frame, rank)
    return subtract(network, computing)


def overlap(frame):
    """A row per rank: compute_ms, network_ms, hidden_ms (under compute), exposed_ms, total_ms."""
    import pandas  # ranks that train need not wait for it

    rows = []
    for rank in sorted(frame["rank"].unique()):
        mine = frame[frame["rank"] == rank]
        computing, network = lanes_of(frame, rank)
        bare = length(subtract(network, computing))
        rows.append(
            {
                "rank": rank,
                "compute_ms": length(computing),
                "network_ms": length(network),
                "hidden_ms": length(network) - bare,
                "exposed_ms": bare,
                "total_ms": mine["end_ms"].max() - mine["start_ms"].min(),
            }
        )
    return pandas.DataFrame(rows)


def length(intervals):
    return sum(end - start for start, end in intervals)
