"""What a rank did in a step, from its messages alone: where it does not wait for one, it computes.

    messages   all_reduce |=========|      pauses        ^^^^
    rows       compute    |======|    |==|
               network    |=========|
               exposed           |====|

The same rows as labkit.scale.simulate makes of a rehearsal, so that both lie on one picture.
"""


def lanes(events, start, end):
    """Rows with lane, name, start_ms, end_ms since `start`: of a list of labkit.comm.Event.

    start, end: seconds of the record's clock. Raises ValueError for an event still in flight.
    """
    rows, free = [], start
    within = [event for event in events if start <= event.start <= end]
    for event in within:
        if event.end is None:
            raise ValueError(f"{event.op} is still in flight: wait for it before asking for lanes")
        rows.append(row("network", event.op, event.start, event.end, start))
    for began, ended, op in sorted(span for event in within for span in waits(event)):
        if began > free:
            rows.append(row("compute", "compute", free, began, start))
        if ended > max(free, began):
            rows.append(row("exposed", op, max(free, began), ended, start))
        free = max(free, ended)
    if end > free:
        rows.append(row("compute", "compute", free, end, start))
    return rows


def waits(event):
    """(start, end, operation) of each wait for an Event; of one that blocks, all of it."""
    if event.pauses is None:
        return [(event.start, event.end, event.op)]
    return [(pause.start, pause.end, event.op) for pause in event.pauses]


def row(lane, name, begin, end, origin):
    times = {"start_ms": 1e3 * (begin - origin), "end_ms": 1e3 * (end - origin)}
    return {"lane": lane, "name": name, **times}
