"""Pipeline schedules: the actions of every rank, in order, written before anything runs.

    gpipe        rank 0   F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3      F: forward of a micro-batch
                 rank 1   .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..      B: its backward
    one_f_one_b  rank 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3            W: gradients of weights, if B
                 rank 1   .. F0 B0 F1 B1 F2 B2 F3 B3 ..               is for the stage's input only

A schedule is data: for each rank a list of Action(kind, stage, micro_batch), written "0F3": stage,
kind, micro-batch. A B without a separate W does both parts; one stage may have both kinds of B.
The functions raise ValueError for numbers that do not suit the schedule.
For p ranks, M micro-batches, v stages a rank; the bubble is the idle fraction of a rank's step for
F = B = W = 1:

                        bubble                        a rank holds, in activations of its layers
    gpipe               (p-1) / (M + p-1)             M
    one_f_one_b         (p-1) / (M + p-1)             p - rank
    interleaved         (p-1) / (v M + p-1)           p + (p-1 - 2 rank) / v at most
    zero_bubble         (p-1) / (3 M + p-1)           p
    v_shaped            (p-1) / (6 M + p-1), M >= p   p
    dual_pipe           (p-2) / (6 M + p-2)           p + 1, and the parameters of two stages
     as published       (p-2) / (3 M + p-2)           the same; there F&B is one action

dual_pipe has the model twice, as two chains: stages p to 2p-1 are copies of stages 0 to p-1, and a
micro-batch passes through one of the chains. routes() finds out which from its actions.

Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019, Memory-Efficient
Pipeline-Parallel DNN Training, ICML 2021 (1F1B with a flush), and Efficient Large-Scale Language
Model Training, SC 2021, section 2.2; Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024,
sections 2 (ZB-H1) and 6 (ZB-V); DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section
3.2.1, figure 5 and table 2 (DualPipe).
"""

from collections import deque
from itertools import count
from typing import NamedTuple


class Action(NamedTuple):
    """An action of a schedule. kind: "F", "B" or "W". stage and micro_batch count from 0."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self):
        return f"{self.stage}{self.kind}{self.micro_batch}"


def actions(schedule):
    """Convert each (kind, stage, micro_batch) to an Action. Raises ValueError for other values."""
    try:
        return [[Action(*action) for action in program] for program in schedule]
    except TypeError:
        raise ValueError(
            "schedule must be a function such as one_f_one_b, or a list of "
            f"(kind, stage, micro_batch) for each rank: not {schedule!r:.60}"
        ) from None


def gpipe(stages, micro_batches, ranks=None):
    """Return GPipe: all forwards, then all backwards. Stage s is on rank s % ranks."""
    schedule = []
    for own in dealt(stages, ranks or stages):
        forward = [Action("F", s, m) for s in own for m in range(micro_batches)]
        schedule.append(
            forward + [Action("B", s, m) for s in reversed(own) for m in range(micro_batches)]
        )
    return schedule


def one_f_one_b(stages, micro_batches, ranks=None):
    """Return PipeDream's 1F1B with a flush: a rank alternates forward and backward once it can."""
    one_each("one_f_one_b", stages, micro_batches, ranks)
    schedule = []
    for s in range(stages):
        forward = [Action("F", s, m) for m in range(micro_batches)]
        backward = [Action("B", s, m) for m in range(micro_batches)]
        schedule.append(in_turn(forward, backward, stages - s))
    return schedule


def interleaved(stages, micro_batches, ranks=None):
    """Return 1F1B with v thin stages a rank: the pipeline fills in 1/v of the time.

    Stage s is on rank s % ranks. micro_batches must be a multiple of ranks.
    """
    p = ranks or stages
    if micro_batches % p:
        raise ValueError(
            f"interleaved: micro_batches={micro_batches} must be a multiple of {p} ranks"
        )
    schedule = []
    for rank, own in enumerate(dealt(stages, p)):
        rounds = [range(first, first + p) for first in range(0, micro_batches, p)]
        forward = [Action("F", s, m) for turn in rounds for s in own for m in turn]
        backward = [Action("B", s, m) for turn in rounds for s in reversed(own) for m in turn]
        ahead = p - rank if len(own) == 1 else 2 * (p - 1 - rank) + (len(own) - 1) * p + 1
        schedule.append(in_turn(forward, backward, ahead))
    return schedule


def zero_bubble(stages, micro_batches, ranks=None):
    """Return ZB-H1: 1F1B that delays the weights' gradients, on rank r by r micro-batches."""
    schedule = []
    one_each("zero_bubble", stages, micro_batches, ranks)
    for s, program in enumerate(one_f_one_b(stages, micro_batches)):
        split = []
        for action in program:
            split.append(action)
            if action.kind == "B" and action.micro_batch >= s:
                split.append(Action("W", s, action.micro_batch - s))
        left = range(max(0, micro_batches - s), micro_batches)
        schedule.append(split + [Action("W", s, m) for m in left])
    return schedule


def v_shaped(stages, micro_batches, ranks=None):
    """Return ZB-V: rank r has stage r and the r-th stage from the end, so the loss is on rank 0.

    F and B are of stage r, f and b of the other stage. With enough micro-batches to fill all ranks
    (2 p - 1), a rank runs F until the first f arrives, f and F until the first b arrives, f and b
    until the first B arrives, and then one of each. Each W follows its B, except that 2 r of them
    wait until the end. With fewer micro-batches, the later ones are left out, and Ws wait as long
    as the memory allows, r of them until the end.

    For F = B = W = 1 a step takes 6 M + p - 1 units for M >= p micro-batches. For M < p ranks idle
    while the first micro-batch passes forward and back: 4 p + 3 M - 1, or one less if 2 M <= p.
    """
    p = stages // 2
    if stages % 2 or ranks not in (None, p):
        raise ValueError(
            f"v_shaped needs two stages a rank: not {stages} stages on {ranks or p} ranks"
        )
    schedule = []
    filled = micro_batches >= stages - 1
    for rank in range(p):
        near, far = rank, stages - 1 - rank
        text = "F" * (stages - 1 - 2 * rank) + "fF" * rank + "fb" * (p - rank)
        text += "FBfb" * (max(micro_batches - stages + 1, 0) + rank)  # the steady state
        text += "Bfb" * (p - 1 - rank) + "Bb" * rank + "B" * (p - rank)
        program = spelled(text, {"F": near, "B": near, "f": far, "b": far}, p, 0)
        program = [action for action in program if action.micro_batch < micro_batches]
        room, wait = (0, 2 * rank) if filled else (stages, rank)
        schedule.append(with_weights(program, room, wait))
    return schedule


def with_weights(program, room, wait):
    """Add a W for each B, oldest first.

    While Fs are left, a W is added if at least `room` micro-batches are held; after the last F, if
    more than `wait` Ws are delayed. A micro-batch is held from F to W, as in most_held().
    """
    split = []
    put_off = deque()
    held = 0
    forwards_left = sum(action.kind == "F" for action in program)
    for action in program:
        split.append(action)
        if action.kind == "F":
            held += 1
            forwards_left -= 1
        else:
            put_off.append(action._replace(kind="W"))
        while put_off and (held >= room if forwards_left else len(put_off) > wait):
            split.append(put_off.popleft())
            held -= 1
    return split + list(put_off)


def dual_pipe(stages, micro_batches, ranks=None):
    """Return DualPipe: half of the micro-batches enter at each end and fill the others' bubble.

    Rank r has stage r and the copy of stage p-1-r. F and B are of the chain that begins nearer to
    the rank, f and b of the other one; W is the oldest delayed one. A rank is idle for p/2 - 1
    units. Table 2 has p - 2 (for F&B = F + B + W): there an F and a full B are one action, F&B, and
    both results are sent at its end. Here each result is sent at once; DeepSeek's own order then
    also takes p/2 - 1.
    """
    p = stages // 2
    if stages % 4 or ranks not in (None, p):
        raise ValueError(
            "dual_pipe needs an even number of ranks, each with a stage and a copy: "
            f"not {stages} stages on {ranks} ranks"
        )
    if micro_batches % 2 or micro_batches < stages:
        raise ValueError(
            f"dual_pipe: micro_batches={micro_batches} must be even and at least {stages}, "
            "two a rank"
        )
    schedule = []
    half = micro_batches // 2
    for rank in range(p):
        near, far = sorted((rank, stages - 1 - rank), key=lambda stage: stage % p)
        to_end = near % p
        to_middle = p // 2 - 1 - near % p
        text = "FF" * to_middle + "Ff" * (to_end + 1) + "bWf" * to_middle
        text += "FbWfBW" * (half - p + to_end + 1)  # the steady state: one of each, both ways
        text += "bWfBW" * to_middle
        last = ["bB"[i % 2] + "W" * (i <= to_end) for i in range(2 * to_end + 2)]
        text += "".join(last) + "WB" * to_middle + "W" * (to_end + 1)
        schedule.append(spelled(text, {"F": near, "B": near, "f": far, "b": far}, p, half))
    return schedule


def spelled(text, stage, p, half):
    """Return the actions that the letters stand for, on the rank with these stages.

    stage: {letter: its stage}. Each letter counts its micro-batches from 0; from `half` if its
    stage is in the second chain, from stage p on. "W": the oldest delayed one.
    """
    turn = {letter: count(half * (number // p)) for letter, number in stage.items()}
    program = []
    put_off = deque()
    for letter in text:
        if letter == "W":
            program.append(put_off.popleft())
        else:
            program.append(Action(letter.upper(), stage[letter], next(turn[letter])))
        if letter in "Bb":
            put_off.append(program[-1]._replace(kind="W"))
    return program


def routes(schedule):
    """Return {micro-batch: range of the stages that it passes through}, all of one length."""
    met = {}
    for action in (action for program in schedule for action in program):
        met.setdefault(action.micro_batch, set()).add(action.stage)
    length = max((max(stages) - min(stages) + 1 for stages in met.values()), default=0)
    begin = {m: min(stages) // length * length for m, stages in met.items()}
    return {m: range(first, first + length) for m, first in begin.items()}


def needs(action, route):
    """Return the actions that must end before this one begins. route: its micro-batch's."""
    kind, s, m = action
    if kind == "W":
        return [Action("B", s, m)]
    if kind == "B":
        return [Action("F", s, m)] + [Action("B", s + 1, m)] * (s + 1 in route)
    return [Action("F", s - 1, m)] * (s - 1 in route)


def in_turn(forward, backward, ahead):
    """Return `ahead` forwards, then backwards and forwards alternately, then the rest."""
    program = forward[:ahead]
    for number, action in enumerate(backward):
        program += [action, *forward[ahead + number : ahead + number + 1]]
    return program


def dealt(stages, ranks):
    """Return the stages of each rank: stage s is on rank s % ranks."""
    if stages % ranks:
        raise ValueError(f"stages={stages} must be a multiple of {ranks} ranks")
    return [list(range(rank, stages, ranks)) for rank in range(ranks)]


def one_each(name, stages, micro_batches, ranks):
    if ranks not in (None, stages):
        raise ValueError(
            f"{name} needs one stage a rank: {stages} stages need {stages} ranks, not {ranks}"
        )
    if micro_batches < stages:
        raise ValueError(
            f"{name}: micro_batches={micro_batches} must be at least {stages}, the number of "
            "stages; use more, or gpipe"
        )
