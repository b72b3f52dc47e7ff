"""Analyse a timeline: exposed communication, what a rank did between messages, a pipeline's bubble.

    computing  [---------------)          [----)            exposed communication = network time
    network              [-------------------)              minus the part under which this rank
    hidden               [-----)          [--)              computed
    exposed                    [----------)

    rank 0   |F0|F1|F2|F3|......|B0|......|B1|  ...         bubble = 1 - work / (ranks x step)
    rank 1      .|F0|..|B0|...                              step: from the first span to the last

A span of `backward()` includes the time at its end in which backward waits for the last bucket.
The event log has the waiting time of each operation; it is subtracted from the compute lane and
counts as exposed. A pipeline's bubble includes the time of waiting for messages and of sending.

Intervals are lists of (start, end) in ms. Li et al., PyTorch Distributed: Experiences on
Accelerating Data Parallel Training, VLDB 2020, section 5 (figure 6).
"""

from contextlib import contextmanager

LANES = ("compute", "network")


# ---- overlap: from a Timeline.frame()


def union(intervals):
    """Merge intervals into disjoint, sorted ones."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def subtract(intervals, taken):
    """Return the parts of `intervals` that are not in `taken`, as disjoint intervals."""
    left = union(intervals)
    for start, end in union(taken):
        pieces = [piece for a, b in left for piece in ((a, min(b, start)), (max(a, end), b))]
        left = [(a, b) for a, b in pieces if a < b]
    return left


def lanes_of(frame, rank):
    """Return (computing, network) of a rank: disjoint intervals in ms, computing without waits."""
    of_rank = frame[frame["rank"] == rank]
    compute, network = (of_rank[of_rank["lane"] == lane] for lane in LANES)
    # wait() returns when the operation completes, so the wait is the last part before its end.
    waited = network["waited"].fillna(0.0) * 1e3 if "waited" in network else 0.0 * network["end_ms"]
    blocked = zip(network["end_ms"] - waited, network["end_ms"], strict=True)
    computing = subtract(zip(compute["start_ms"], compute["end_ms"], strict=True), blocked)
    return computing, union(zip(network["start_ms"], network["end_ms"], strict=True))


def exposed(frame, rank):
    """Return the intervals (start_ms, end_ms) in which the network worked and `rank` waited."""
    computing, network = lanes_of(frame, rank)
    return subtract(network, computing)


def overlap(frame):
    """Return a row per rank: compute_ms, network_ms, hidden_ms, exposed_ms, total_ms."""
    import pandas  # imported here, so that training ranks do not wait for it

    rows = []
    for rank in sorted(frame["rank"].unique()):
        of_rank = frame[frame["rank"] == rank]
        computing, network = lanes_of(frame, rank)
        exposed_ms = length(subtract(network, computing))
        rows.append(
            {
                "rank": rank,
                "compute_ms": length(computing),
                "network_ms": length(network),
                "hidden_ms": length(network) - exposed_ms,
                "exposed_ms": exposed_ms,
                "total_ms": of_rank["end_ms"].max() - of_rank["start_ms"].min(),
            }
        )
    return pandas.DataFrame(rows)


def length(intervals):
    """Return the sum of the lengths of disjoint intervals."""
    return sum(end - start for start, end in intervals)


# ---- lanes: from the messages of one step alone


def lanes(events, start, end):
    """Derive what a rank did in a step from its messages: it computes whenever it does not wait.

        messages   all_reduce |=========|      pauses        ^^^^
        rows       compute    |======|    |==|
                   network    |=========|
                   exposed           |====|

    events: a list of labkit.comm.Event. start, end: seconds of the record's clock. Returns rows
    with lane, name, start_ms and end_ms since `start`, like those of labkit.scale.simulate, so that
    one picture can show both. Raises ValueError for an event still in flight.
    """
    rows = []
    free = start
    in_step = [event for event in events if start <= event.start <= end]
    for event in in_step:
        if event.end is None:
            raise ValueError(f"{event.op} is still in flight: wait for it before asking for lanes")
        rows.append(row("network", event.op, event.start, event.end, start))
    for began, ended, op in sorted(span for event in in_step for span in waits(event)):
        if began > free:
            rows.append(row("compute", "compute", free, began, start))
        if ended > max(free, began):
            rows.append(row("exposed", op, max(free, began), ended, start))
        free = max(free, ended)
    if end > free:
        rows.append(row("compute", "compute", free, end, start))
    return rows


def waits(event):
    """Return (start, end, operation) of each wait for an Event; a blocking one is a single wait."""
    if event.pauses is None:
        return [(event.start, event.end, event.op)]
    return [(pause.start, pause.end, event.op) for pause in event.pauses]


def row(lane, name, begin, end, origin):
    times = {"start_ms": 1e3 * (begin - origin), "end_ms": 1e3 * (end - origin)}
    return {"lane": lane, "name": name, **times}


# ---- the bubble of a pipeline


@contextmanager
def watch_pipeline(pipeline, timeline):
    """In the block, record each action of a labkit.pipeline.Pipeline on this rank as a span.

    The span has the action's name in the schedule ("0F3"), and kind, stage, micro_batch and held:
    the number of (stage, micro-batch) pairs whose activations the rank holds after it.
    """
    real = pipeline.compute

    def compute(action, arrived):
        span = timeline.begin(str(action), **action._asdict())
        made = real(action, arrived)
        timeline.end(span)
        span.info["held"] = len(pipeline.held) + len(pipeline.later)
        return made

    pipeline.compute = compute
    try:
        yield timeline
    finally:
        del pipeline.compute


def bubble(frame):
    """Return the idle fraction of all ranks' time. frame: a Timeline.frame() of one step."""
    work = frame[frame["lane"] == "compute"]
    step = work["end_ms"].max() - work["start_ms"].min()
    return 1 - work["duration_ms"].sum() / (step * work["rank"].nunique())
