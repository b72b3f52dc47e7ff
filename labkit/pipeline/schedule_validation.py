"""Validate a schedule and simulate it in time before anything runs, from the needs of actions.

    0F0 -> 1F0 -> 2F0        sBm needs sFm, and the gradient from (s+1)Bm; sWm needs sBm. Each rank
     |      |      |         runs its own list in order. A schedule that can never finish has a
    0B0 <- 1B0 <- 2B0        cycle, and the error names it.

The simulation is one pass: each action begins when its rank is free and its needs are met.
"""

from typing import NamedTuple

from labkit.pipeline.pipeline_schedules import Action, needs, routes

UNITS = {"F": 1.0, "B": 1.0, "W": 1.0}
WORDS = "(stage, kind, micro-batch)"


class Played(NamedTuple):
    """Result of a simulation. times: {action: (begin, end)}, in the unit of the costs.

    owner: {stage: rank}.
    """

    times: dict
    owner: dict

    @property
    def length(self):
        return max(end for _, end in self.times.values())

    @property
    def bubble(self):
        """The idle fraction of all ranks' time."""
        busy = sum(end - begin for begin, end in self.times.values())
        return 1 - busy / (self.length * len(set(self.owner.values())))


def check(schedule, ranks, micro_batches):
    """Return {stage: rank}. Raises ValueError for a schedule that cannot run.

    schedule: for each rank a list of Action. Errors: an action that is missing or duplicated, a
    stage on two ranks, an action before another that it needs, and ranks that wait for each other
    in a cycle.
    """
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches!r} must be an integer of at least 1")
    if len(schedule) != ranks:
        raise ValueError(f"the schedule is for {len(schedule)} ranks but the group has {ranks}")
    owner = owners(schedule)
    stages = len(owner)
    seen = set()
    if not owner or set(owner) != set(range(stages)):
        raise ValueError(f"stages must be numbered from 0 without a gap: {sorted(owner)}")
    for action in (action for program in schedule for action in program):
        if action.kind not in UNITS or action.micro_batch not in range(micro_batches):
            raise ValueError(f"invalid action for {micro_batches} micro-batches: {action} {WORDS}")
        if action in seen:
            raise ValueError(f"{action} {WORDS} occurs twice")
        seen.add(action)
    split = {action[1:] for action in seen if action.kind == "W"}
    route = routes(schedule)
    length = len(next(iter(route.values())))
    if stages % length:
        raise ValueError(f"{stages} stages cannot be divided into pipelines of {length}")
    for m in range(micro_batches):
        for stage in route.get(m, range(length)):
            for kind in "FBW" if (stage, m) in split else "FB":
                if Action(kind, stage, m) not in seen:
                    missing = f"{Action(kind, stage, m)} {WORDS}"
                    raise ValueError(f"{missing} is missing on rank {owner[stage]}")
    play(schedule)
    return owner


def owners(schedule):
    """Return {stage: its rank}. Raises ValueError for a stage on two ranks."""
    owner = {}
    for rank, program in enumerate(schedule):
        for action in program:
            if owner.setdefault(action.stage, rank) != rank:
                other = owner[action.stage]
                raise ValueError(f"stage {action.stage} is on rank {other} and on rank {rank}")
    return owner


def play(schedule, cost=None, message=0.0):
    """Simulate when each action begins and ends. Return a Played. Raises ValueError for a cycle.

    cost: {kind: time} of "F", "B" and "W", where a B without W costs both; or a function action ->
    time; None: 1 each. message: time from the end on one rank to the beginning on another.
    """
    cost = UNITS if cost is None else cost
    owner = owners(schedule)
    route = routes(schedule)
    flat = {action for program in schedule for action in program}

    def lasts(action):
        if callable(cost):
            return cost(action)
        both = action.kind == "B" and action._replace(kind="W") not in flat
        return cost[action.kind] + (cost["W"] if both else 0.0)

    times = {}
    at = [0] * len(schedule)
    free = [0.0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(schedule):
            while at[rank] < len(program):
                action = program[at[rank]]
                before = needs(action, route[action.micro_batch])
                if not all(need in times for need in before):
                    break
                ready = [times[n][1] + message * (owner[n.stage] != rank) for n in before]
                begin = max([free[rank], *ready])
                free[rank] = begin + lasts(action)
                times[action] = (begin, free[rank])
                at[rank] += 1
                moved = True
    if len(times) < len(flat):
        raise ValueError(circle(schedule, owner, at, times, route))
    return Played(times, owner)


def circle(schedule, owner, at, times, route):
    """Return a sentence about the ranks that wait for each other in a cycle."""
    heads = {r: program[at[r]] for r, program in enumerate(schedule) if at[r] < len(program)}
    waits_for = {
        r: next(need for need in needs(head, route[head.micro_batch]) if need not in times)
        for r, head in heads.items()
    }
    rank = min(heads)
    path = []
    while rank not in path:
        path.append(rank)
        rank = owner[waits_for[rank].stage]
    words = []
    for waiting in path[path.index(rank) :]:
        need = waits_for[waiting]
        if owner[need.stage] == waiting:
            return f"rank {waiting} runs {heads[waiting]} before {need}, which it needs {WORDS}"
        words.append(
            f"rank {waiting} at {heads[waiting]} waits for {need} of rank {owner[need.stage]}"
        )
    return f"this schedule never ends: {'; '.join(words)} {WORDS}"


def most_held(schedule):
    """Return for each rank the largest number of micro-batches whose activations it holds."""
    flat = {action for program in schedule for action in program}
    most = []
    for program in schedule:
        held = 0
        peak = 0
        for action in program:
            last = action.kind == "W" or action._replace(kind="W") not in flat
            held += {"F": 1, "B": -last, "W": -1}[action.kind]
            peak = max(peak, held)
        most.append(peak)
    return most
