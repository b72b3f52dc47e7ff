"""Simulate the queue of a cluster: gangs arrive, wait, start and end; nodes fail and are added.

    arrivals ->  waiting, by priority and arrival  -- policy -->  running  -> done
                    ^   FIFO: the head blocks all others             |
                    |   backfill: others may start, if the head      | preempted, or a node failed
                    +------------------------------------------------+

    held     GPU-seconds of running gangs, as a share of those that the cluster has
    useful   GPU-seconds that the same work needs on the best placement, of the same total

    A placement that makes a job 3 times slower holds its GPUs 3 times as long: held stays high.

Backfill with a reservation (EASY): the head of the queue gets the earliest moment at which the
policy can place it if all running gangs need the time that they asked for. Another gang may start
if it ends before that moment, or leaves the reserved GPUs free. A reservation is made once, so the
head never starts later. Lifka, The ANL/IBM SP Scheduling System, JSSPP 1995; Mu'alem and Feitelson,
Utilization, Predictability, Workloads, and User Runtime Estimates in Scheduling the IBM SP2 with
Backfilling, IEEE TPDS 2001. All results are simulated.
"""

import heapq
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite
from typing import NamedTuple

from labkit.cluster.job_trace import Gang
from labkit.cluster.placement import Inventory


@dataclass(frozen=True)
class Growth:
    """Nodes added while gangs wait: of topology.nodes, only `first` are there at the beginning.

    One more node is ordered for each `waiting` GPUs that gangs wait for, and is there `delay`
    seconds later.
    """

    first: int
    waiting: int
    delay: float = 300.0


class Failure(NamedTuple):
    """Node `node` fails at `time` and is back after `repair` seconds."""

    time: float
    node: int
    repair: float = 3600.0


@dataclass
class Run:
    """A gang on its nodes, once. end: None while it runs. ended: "done", "preempted" or "failed".

    work: seconds of the gang's run time that count: after a failure, only what was saved. lost:
    seconds before the work begins, such as loading a checkpoint. slowdown: of the placement.
    """

    gang: Gang
    placement: dict
    start: float
    slowdown: float
    left: float  # seconds of the gang's run time when it starts
    lost: float = 0.0
    end: float | None = None
    ended: str = ""
    work: float = 0.0

    @property
    def due(self):
        """When the gang is done if nothing happens."""
        return self.start + self.lost + self.left * self.slowdown

    @property
    def latest(self):
        """When it is done at the latest: it may need all the time that its user asked for."""
        asked = self.left + self.gang.limit - self.gang.seconds
        return self.start + self.lost + asked * self.slowdown

    def worked(self, now):
        """Return the seconds of the gang's run time that were done by `now`."""
        return min(self.left, max(0.0, now - self.start - self.lost) / self.slowdown)


@dataclass
class Reservation:
    """The head's GPUs at `time`. after: the Inventory at that time, without them."""

    gang: Gang
    time: float
    placement: dict
    after: Inventory


@dataclass
class Outcome:
    """The result of run_queue(). runs: all Runs, in the order of their starts.

    held, useful: shares of the GPU-seconds between `since` and `until`, in seconds. capacity:
    [(second, GPUs from then on)]. promised: {number of a gang: latest start of its reservation}.
    """

    runs: list
    since: float
    until: float
    capacity: list
    promised: dict = field(default_factory=dict)

    @property
    def available(self):
        """GPU-seconds of the cluster between `since` and `until`."""
        ends = [moment for moment, _ in self.capacity[1:]] + [inf]
        parts = zip(self.capacity, ends, strict=True)
        return sum(gpus * self.between(start, end) for (start, gpus), end in parts)

    @property
    def held(self):
        spans = (run.gang.gpus * self.between(run.start, run.end) for run in self.runs)
        return sum(spans) / self.available

    @property
    def useful(self):
        worked = [run for run in self.runs if run.work]
        shares = (self.between(run.start, run.end) / (run.end - run.start) for run in worked)
        pairs = zip(worked, shares, strict=True)
        return sum(run.gang.gpus * run.work * share for run, share in pairs) / self.available

    @property
    def waiting(self):
        """The share of the time in which at least one gang waits for its first start."""
        changes = [(run.gang.arrival, 1) for run in first_runs(self.runs)]
        changes += [(run.start, -1) for run in first_runs(self.runs)]
        total, count, before = 0.0, 0, 0.0
        for moment, change in sorted(changes):
            total += self.between(before, moment) * (count > 0)
            count, before = count + change, moment
        return total / (self.until - self.since)

    def between(self, start, end):
        """Return the seconds of a span that lie between `since` and `until`."""
        return max(0.0, min(end, self.until) - max(start, self.since))

    @property
    def finished(self):
        """{number of a gang: when it was done}."""
        return {run.gang.number: run.end for run in self.runs if run.ended == "done"}

    @property
    def mean_completion(self):
        """Mean seconds from the arrival of a gang to its end."""
        done = [run.end - run.gang.arrival for run in self.runs if run.ended == "done"]
        return sum(done) / len(done) if done else 0.0

    @property
    def waits(self):
        """Seconds from arrival to the first start: {number of a gang: seconds}."""
        return {run.gang.number: run.start - run.gang.arrival for run in first_runs(self.runs)}


def first_runs(runs):
    """Return the first run of each gang."""
    found = {}
    for run in runs:
        found.setdefault(run.gang.number, run)
    return list(found.values())


class Waiting:
    """The gangs that wait, in buckets of one size and one limit."""

    def __init__(self):
        self.buckets = {}
        self.gpus = 0

    def add(self, gang):
        heapq.heappush(self.buckets.setdefault((gang.gpus, gang.limit), []), (rank(gang), gang))
        self.gpus += gang.gpus

    def pop(self, gang):
        """Remove a gang, the first of its bucket."""
        bucket = self.buckets[gang.gpus, gang.limit]
        heapq.heappop(bucket)
        if not bucket:
            del self.buckets[gang.gpus, gang.limit]
        self.gpus -= gang.gpus

    def first(self):
        """Return the gang whose turn it is, or None."""
        if not self.buckets:
            return None
        return min(bucket[0] for bucket in self.buckets.values())[1]

    def firsts(self, most):
        """Return the first gang of each bucket of at most that many GPUs, by rank."""
        firsts = (bucket[0] for (gpus, _), bucket in self.buckets.items() if gpus <= most)
        return [gang for _, gang in sorted(firsts)]


def rank(gang):
    """Return the place of a gang in the queue; the lowest is first."""
    return -gang.priority, gang.arrival, gang.number


class Simulation:
    """The state of a simulated queue; run_queue() describes the arguments."""

    def __init__(self, topology, place, slowdown, backfill, preempt, growth, save_every, restart):
        self.topology, self.place, self.slowdown = topology, place, slowdown
        self.backfill, self.preempt, self.growth = backfill, preempt, growth
        self.save_every, self.restart = save_every, restart
        self.inventory = Inventory(topology)
        self.waiting = Waiting()
        self.running = {}  # number of a gang -> Run
        self.left = {}  # number of a gang -> seconds that it still needs, if it ran before
        self.down = set()
        self.events = []  # (time, order of entry, function, argument)
        self.entered = 0
        self.unfinished = 0  # gangs
        self.reservation = None
        self.nodes = topology.nodes
        if growth is not None:
            self.nodes = growth.first
            for node in range(growth.first, topology.nodes):
                self.down.add(node)
                self.inventory.set_free(node, 0)
        self.ordered = self.nodes
        self.outcome = Outcome([], 0.0, 0.0, [(0.0, self.nodes * topology.gpus_per_node)])
        self.now = 0.0

    def at(self, time, function, argument):
        heapq.heappush(self.events, (time, self.entered, function, argument))
        self.entered += 1

    def advance(self):
        """Go to the next moment, handle all its events, and start what can start."""
        self.now = self.events[0][0]
        while self.events and self.events[0][0] == self.now:
            *_, function, argument = heapq.heappop(self.events)
            function(argument)
        self.schedule()

    # Events

    def arrive(self, gang):
        self.waiting.add(gang)

    def finish(self, run):
        if run.end is None:  # it was not preempted, and no node failed
            self.stop(run, "done", run.left)
            self.unfinished -= 1

    def fail(self, failure):
        """Stop the gangs of a node, and keep it out of use until it is repaired."""
        node = failure.node
        if node in self.down:
            return
        for run in [run for run in self.running.values() if node in run.placement]:
            self.stop(run, "failed", saved(run.worked(self.now), self.save_every))
        self.down.add(node)
        self.inventory.set_free(node, 0)
        self.reservation = None
        self.at(self.now + failure.repair, self.repair, node)

    def repair(self, node):
        """Put a node into use: repaired, or new."""
        self.down.discard(node)
        self.inventory.set_free(node, self.topology.gpus_per_node)
        self.reservation = None

    def add_node(self, node):
        self.repair(node)
        self.nodes += 1
        self.outcome.capacity.append((self.now, self.nodes * self.topology.gpus_per_node))

    # Gangs

    def start(self, gang, placement):
        if sum(placement.values()) != gang.gpus:
            raise ValueError(
                f"the policy gave gang {gang.number} {sum(placement.values())} GPUs, "
                f"but it needs {gang.gpus}: return a complete placement, or None to wait"
            )
        self.waiting.pop(gang)
        self.inventory.take(placement)
        again = gang.number in self.left
        left = self.left.pop(gang.number, gang.seconds)
        lost = self.restart if again else 0.0
        run = Run(gang, placement, self.now, self.slowdown(placement), left, lost)
        self.running[gang.number] = run
        self.outcome.runs.append(run)
        self.at(run.due, self.finish, run)
        if self.reservation is not None and rank(gang) <= rank(self.reservation.gang):
            self.reservation = None  # it is used, or one of higher priority may hold its GPUs

    def stop(self, run, why, work):
        """End a run after `work` seconds that count; a gang that is not done waits again."""
        run.end, run.ended, run.work = self.now, why, work
        del self.running[run.gang.number]
        self.inventory.give(run.placement)
        if why != "done":
            self.left[run.gang.number] = run.left - work
            self.waiting.add(run.gang)

    # Decisions

    def schedule(self):
        """Start gangs in order; if the head must wait, preempt for it, or backfill."""
        while head := self.waiting.first():
            placement = self.place(self.inventory, head.gpus) or self.reserved(head)
            if placement is None and self.preempt:
                placement = self.make_room(head)
            if placement is None:
                break
            self.start(head, placement)
        if head is not None and self.backfill:
            self.fill_around(head)
        if self.growth is not None:
            self.order_nodes()

    def reserved(self, head):
        """Return the reserved placement of the head if its GPUs are free."""
        mine = self.reservation
        if mine is None or mine.gang is not head:
            return None
        free = all(self.inventory.free[node] >= n for node, n in mine.placement.items())
        return mine.placement if free else None

    def reserve(self, head):
        """Return the Reservation of the head; None if it must wait for a repair."""
        later = self.inventory.copy()
        for run in sorted(self.running.values(), key=lambda run: run.latest):
            later.give(run.placement)
            if later.total >= head.gpus and (placement := self.place(later, head.gpus)):
                later.take(placement)
                self.outcome.promised.setdefault(head.number, run.latest)
                return Reservation(head, run.latest, placement, later)
        return None

    def fill_around(self, head):
        """Start gangs behind the head that do not delay it."""
        if self.reservation is None or self.reservation.gang is not head:
            self.reservation = self.reserve(head)
        while found := self.next_to_fill(head):
            gang, placement = found
            self.start(gang, placement)
            mine = self.reservation
            if mine and self.running[gang.number].latest > mine.time:
                mine.after.take(placement)

    def next_to_fill(self, head):
        """Return (gang, placement) of the first gang that may start beside the reservation."""
        now, beside, unreserved = {head.gpus: None}, {}, None
        for gang in self.waiting.firsts(self.inventory.total):
            if gang.gpus not in now:
                now[gang.gpus] = self.place(self.inventory, gang.gpus)
            if (placement := now[gang.gpus]) is None:
                continue
            if self.ends_in_time(gang, placement):
                return gang, placement
            if gang.gpus not in beside:
                unreserved = unreserved or self.unreserved()
                beside[gang.gpus] = self.place(unreserved, gang.gpus)
            if beside[gang.gpus] is not None:
                return gang, beside[gang.gpus]
        return None

    def ends_in_time(self, gang, placement):
        """Whether a gang that starts now ends before the reservation."""
        if self.reservation is None:
            return True
        asked = self.left.get(gang.number, gang.seconds) + gang.limit - gang.seconds
        again = self.restart if gang.number in self.left else 0.0
        return self.now + again + asked * self.slowdown(placement) <= self.reservation.time

    def unreserved(self):
        """Return the Inventory of GPUs that are free now and not reserved."""
        pairs = zip(self.inventory.free, self.reservation.after.free, strict=True)
        return Inventory(self.topology, [min(pair) for pair in pairs])

    def make_room(self, head):
        """Stop gangs of lower priority, the youngest first, until the head can be placed.

        Return its placement, or None if that does not help. They save first, and lose no work.
        """
        later = self.inventory.copy()
        lower = [run for run in self.running.values() if run.gang.priority < head.priority]
        youngest = sorted(lower, key=lambda run: (run.gang.priority, -run.start))
        for count, run in enumerate(youngest, 1):
            later.give(run.placement)
            if later.total >= head.gpus and (placement := self.place(later, head.gpus)):
                for victim in youngest[:count]:
                    if placement.keys() & victim.placement.keys():
                        self.stop(victim, "preempted", victim.worked(self.now))
                return placement
        return None

    def order_nodes(self):
        """Order nodes for the GPUs that gangs wait for."""
        wanted = self.waiting.gpus // self.growth.waiting - (self.ordered - self.nodes)
        for _ in range(min(wanted, self.topology.nodes - self.ordered)):
            self.at(self.now + self.growth.delay, self.add_node, self.ordered)
            self.ordered += 1


def saved(work, save_every):
    """Return the part of the work that is in the last checkpoint."""
    return work // save_every * save_every


def same_speed(placement):
    return 1.0


def run_queue(
    topology,
    gangs,
    place,
    slowdown=same_speed,
    *,
    backfill=False,
    preempt=False,
    failures=(),
    growth=None,
    save_every=1800.0,
    restart=120.0,
    since=0.0,
    until=None,
):
    """Simulate the queue until all gangs are done; return an Outcome.

    gangs: in the order of arrival. place: a policy of placement.py. slowdown: function placement ->
    factor of the run time, such as placement.Slowdown(topology). backfill: with a reservation for
    the head. preempt: gangs of higher priority stop others. failures: a list of Failure. growth: a
    Growth, or None. save_every: seconds of work between checkpoints, which a failure goes back to.
    restart: seconds that a gang loses when it starts again. since, until: seconds between which the
    shares are taken; None: the last arrival. Raises ValueError, one line, for gangs out of order, a
    gang that is larger than the cluster, and one that the policy never places.
    """
    check(topology, gangs, place, failures, growth)
    if not (save_every > 0 and restart >= 0):
        raise ValueError(
            f"save_every must be positive and restart not negative, got {save_every!r}, {restart!r}"
        )
    costs = save_every, restart
    state = Simulation(topology, place, slowdown, backfill, preempt, growth, *costs)
    state.unfinished = len(gangs)
    for gang in gangs:
        state.at(gang.arrival, state.arrive, gang)
    for failure in failures:
        state.at(failure.time, state.fail, failure)
    while state.unfinished:
        if not state.events:
            head = state.waiting.first()
            raise ValueError(
                f"gang {head.number} of {head.gpus} GPUs waits for ever: no gang runs, and the "
                "policy does not place it"
            )
        state.advance()
    last = gangs[-1].arrival if gangs else 0.0
    state.outcome.since, state.outcome.until = since, last if until is None else until
    return state.outcome


def check(topology, gangs, place, failures, growth):
    """Raise ValueError for gangs and failures that cannot be simulated."""
    for before, after in pairwise(gangs):
        if after.arrival < before.arrival:
            raise ValueError(
                f"gang {after.number} arrives at {after.arrival:g} s, before gang {before.number} "
                f"at {before.arrival:g} s: sort the trace by arrival"
            )
    counts = defaultdict(int)
    for gang in gangs:
        counts[gang.number] += 1
    if twice := [number for number, count in counts.items() if count > 1]:
        raise ValueError(f"gang {twice[0]} is in the trace twice: number the gangs")
    empty = Inventory(topology)
    for gpus, gang in {gang.gpus: gang for gang in gangs}.items():
        if gpus > topology.gpus:
            raise ValueError(
                f"gang {gang.number} needs {gpus} GPUs, but the cluster has {topology.gpus}"
            )
        if place(empty, gpus) is None:
            raise ValueError(
                f"the policy does not place gang {gang.number} of {gpus} GPUs even on an empty "
                "cluster: it would wait for ever"
            )
    for failure in failures:
        if not 0 <= failure.node < topology.nodes:
            last = topology.nodes - 1
            raise ValueError(f"node {failure.node} fails, but there are only nodes 0 to {last}")
        if not (isfinite(failure.time) and failure.time >= 0 and isfinite(failure.repair)):
            raise ValueError(f"a failure must have a time and a repair in seconds, got {failure}")
    if growth is not None and not (1 <= growth.first <= topology.nodes and growth.waiting >= 1):
        raise ValueError(
            f"growth must begin with 1 to {topology.nodes} nodes and add one for at least 1 "
            f"waiting GPU, got {growth}"
        )
