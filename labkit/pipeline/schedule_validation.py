"""A schedule checked, and played in time, before anything runs: from what each action waits for.

    0F0 -> 1F0 -> 2F0        sBm needs sFm, and the gradient from (s+1)Bm; sWm needs sBm. Each rank
     |      |      |         goes through its own list. A schedule that nobody can finish has a
    0B0 <- 1B0 <- 2B0        circle in it: that is what the error names.

Playing is one pass over all actions: each begins when its rank is free and what it needs is there.
"""

from typing import NamedTuple

from labkit.pipeline.pipeline_schedules import Action, needs, routes

UNITS = {"F": 1.0, "B": 1.0, "W": 1.0}
WORDS = "(stage, kind, micro-batch)"


class Played(NamedTuple):
    """times: {action: (begin, end)}. owner: {stage: rank}. Unit: that of the costs."""

    times: dict
    owner: dict

    @property
    def length(self):
        return max(end for _, end in self.times.values())

    @property
    def bubble(self):
        """The part of all ranks' time in which they stand still."""
        busy = sum(end - begin for begin, end in self.times.values())
        return 1 - busy / (self.length * len(set(self.owner.values())))


def check(schedule, ranks, micro_batches):
    """{stage: rank}. Raises ValueError where so many ranks could not run it on so many parts.

    What is refused: an action missing or there twice, a stage on two ranks, one action before
    another that it needs, and ranks that wait for each other in a circle, which is named.
    """
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches!r} must be an integer of at least 1")
    if len(schedule) != ranks:
        raise ValueError(f"the schedule is for {len(schedule)} ranks, and there are {ranks}")
    owner = owners(schedule)
    stages, seen = len(owner), set()
    if not owner or set(owner) != set(range(stages)):
        raise ValueError(f"stages count from 0 without a gap: not {sorted(owner)}")
    for action in (action for program in schedule for action in program):
        if action.kind not in UNITS or action.micro_batch not in range(micro_batches):
            raise ValueError(f"no action of {micro_batches} micro-batches: {action} {WORDS}")
        if action in seen:
            raise ValueError(f"{action} {WORDS} is there twice")
        seen.add(action)
    split = {action[1:] for action in seen if action.kind == "W"}
    route = routes(schedule)
    length = len(next(iter(route.values())))
    if stages % length:
        raise ValueError(f"a micro-batch goes through {length} stages: {stages} are no such chains")
    for m in range(micro_batches):
        for stage in route.get(m, range(length)):
            for kind in "FBW" if (stage, m) in split else "FB":
                if Action(kind, stage, m) not in seen:
                    missing = f"{Action(kind, stage, m)} {WORDS}"
                    raise ValueError(f"{missing} is missing on rank {owner[stage]}")
    play(schedule)
    return owner


def owners(schedule):
    """{stage: the rank it is on}."""
    owner = {}
    for rank, program in enumerate(schedule):
        for action in program:
            if owner.setdefault(action.stage, rank) != rank:
                other = owner[action.stage]
                raise ValueError(f"stage {action.stage} is on rank {other} and on rank {rank}")
    return owner


def play(schedule, cost=None, message=0.0):
    """When each action begins and ends: a Played. Raises ValueError for a circle.

    cost: {"F", "B", "W": time of one}, or a function action -> time; a B without W costs both.
    message: what passes from the end on one rank to the beginning on another.
    """
    cost, owner = UNITS if cost is None else cost, owners(schedule)
    route = routes(schedule)
    flat = {action for program in schedule for action in program}

    def lasts(action):
        if callable(cost):
            return cost(action)
        whole = action.kind == "B" and action._replace(kind="W") not in flat
        return cost[action.kind] + (cost["W"] if whole else 0.0)

    times, at, free = {}, [0] * len(schedule), [0.0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(schedule):
            while at[rank] < len(program):
                action = program[at[rank]]
                before = needs(action, route[action.micro_batch])
                if not all(need in times for need in before):
                    break
                there = [times[n][1] + message * (owner[n.stage] != rank) for n in before]
                begin = max([free[rank], *there])
                free[rank] = begin + lasts(action)
                times[action] = (begin, free[rank])
                at[rank], moved = at[rank] + 1, True
    if len(times) < len(flat):
        raise ValueError(circle(schedule, owner, at, times, route))
    return Played(times, owner)


def circle(schedule, owner, at, times, route):
    """Who waits for whom, from one rank round to the same."""
    heads = {r: program[at[r]] for r, program in enumerate(schedule) if at[r] < len(program)}
    waits_for = {
        r: next(need for need in needs(head, route[head.micro_batch]) if need not in times)
        for r, head in heads.items()
    }
    rank, path = min(heads), []
    while rank not in path:
        path.append(rank)
        rank = owner[waits_for[rank].stage]
    words = []
    for one in path[path.index(rank) :]:
        need = waits_for[one]
        if owner[need.stage] == one:
            order = f"rank {one} does {heads[one]} before {need}, which it needs"
            return f"{order} {WORDS}"
        words.append(f"rank {one} at {heads[one]} waits for {need} of rank {owner[need.stage]}")
    return f"this schedule never ends: {'; '.join(words)} {WORDS}"


def most_held(schedule):
    """By rank: of how many micro-batches it holds the activations of one stage, at most."""
    flat, most = {action for program in schedule for action in program}, []
    for program in schedule:
        held, peak = 0, 0
        for action in program:
            last = action.kind == "W" or action._replace(kind="W") not in flat
            held += {"F": 1, "B": -last, "W": -1}[action.kind]
            peak = max(peak, held)
        most.append(peak)
    return most
