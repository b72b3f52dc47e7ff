"""Simulate a step: take a dry run and add the predicted time of its messages.

    dry run     compute  |= block 1 =|= block 0 =|w           messages take no time: what lies
                                     ^launched   ^waited for  between them is compute
    simulated   compute  |= block 1 =|= block 0 =|. waits .|
                network              |===== all_reduce ====|

A message begins when it is launched and its channel is free. A rank that waits for it, and all that
the rank does later, is delayed by the rest of the message's time. One simulated rank represents all
ranks that do the same, with one event for each message. The ranks of a pipeline differ: for those,
labkit.pipeline.schedule_validation.play simulates the schedule.

    alpha-beta   all_reduce of P bytes by n ranks, ring: 2 (n-1) alpha + 2 (n-1)/n P beta

Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, 2005,
section 3.1. The order of launches and waits comes from the code itself: labkit.memory.dry_run.
"""

from operator import itemgetter
from typing import NamedTuple

from labkit.ring_cost import hops


def alpha_beta(alpha, beta):
    """Return a cost function for simulate(), with one channel.

    alpha: seconds per message; beta: seconds per byte.
    """

    def cost(event):
        latency = hops(event.op, event.group_size) * alpha
        return "network", latency + event.sent_bytes * beta

    return cost


class Simulated(NamedTuple):
    """A simulated step.

    seconds: of the step. exposed: seconds in which the rank waits for messages. rows: dicts with
    lane, name, start_ms, end_ms since the step began, with the lanes of measured timelines.
    """

    seconds: float
    exposed: float
    rows: list


def simulate(events, start, end, cost):
    """Simulate one rank's step; return a Simulated.

    events: of a dry run, from `start` to `end`, in seconds of time.perf_counter(). cost: function
    event -> (channel, seconds); messages of one channel are sent one after the other.
    """
    late, free, arrives, rows, worked = 0.0, {}, {}, [], start
    for moment, number, launched in marks(events, start, end):
        event, now = events[number], moment + late
        if moment > worked:
            rows.append(row("compute", "compute", worked + late, now, start))
        worked = moment
        if launched:
            channel, seconds = cost(event)
            begin = max(now, free.get(channel, now))
            arrives[number] = free[channel] = begin + seconds
            rows.append(row("network", event.op, begin, begin + seconds, start))
        if (not launched or event.pauses is None) and arrives[number] > now:
            rows.append(row("exposed", event.op, now, arrives[number], start))
            late += arrives[number] - now
    rows.append(row("compute", "compute", worked + late, end + late, start))
    return Simulated(end - start + late, late, rows)


def marks(events, start, end):
    """Return (moment, index of the event, whether it is launched or waited for), in order."""
    found = []
    for number, event in enumerate(events):
        if start <= event.start <= end:
            found.append((event.start, number, True))
            found += [(pause.start, number, False) for pause in event.pauses or ()]
    return sorted(found, key=itemgetter(0))


def row(lane, name, begin, end, origin):
    times = {"start_ms": 1e3 * (begin - origin), "end_ms": 1e3 * (end - origin)}
    return {"lane": lane, "name": name, **times}
