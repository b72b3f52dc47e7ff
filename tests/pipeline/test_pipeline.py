"""A model in stages on several ranks, against one process that holds it all and torch.distributed.pipelining."""

import random
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn import functional as F

from labkit import comm
from labkit.ideas import pipeline as idea
from labkit.pipeline import Action, Pipeline, dual_pipe, gpipe, interleaved, one_f_one_b, v_shaped, zero_bubble
from labkit.pipeline.pipeline_p2p import messages
from labkit.pipeline.pipeline_schedules import needs, routes
from labkit.pipeline.schedule_validation import check, most_held, play
from labkit.recompute import checkpoint_every
from labkit.run import LaunchError, launch

F64, WIDTH, STEPS = torch.float64, 6, 3
SCHEDULES = {one.__name__: one for one in (gpipe, one_f_one_b, interleaved, zero_bubble, v_shaped, dual_pipe)}
A_RANK = {"interleaved": 2, "v_shaped": 2, "dual_pipe": 2}


def runs(*sizes):
    """(ranks, name of a schedule) wherever there is such a schedule."""
    return [(n, name) for n in sizes for name in SCHEDULES if name != "dual_pipe" or n % 2 == 0]


class Layer(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), drop

    def forward(self, x):
        return self.norm(x + F.dropout(self.second(torch.tanh(self.first(x))), self.drop, self.training))


def stage_of(number, stages, drop=0.0, tokens=False):
    """Stage `number`, in values that depend on nothing else. tokens: an embedding that is the output layer too."""
    torch.manual_seed(number)
    parts = [Layer(drop)]
    if tokens and number == 0:
        parts.insert(0, nn.Embedding(11, WIDTH))
    if tokens and number == stages - 1:
        parts.append(nn.Linear(WIDTH, 11, bias=False))
    return Seeded(number, nn.Sequential(*parts)).to(F64)


class Seeded(nn.Module):
    """Draws the same for the n-th micro-batch, on whatever rank. mine, of: those it has of each step."""

    def __init__(self, number, inner):
        super().__init__()
        self.number, self.inner, self.calls, self.mine, self.of = number, inner, 0, [0], 1

    def forward(self, x):
        step, place = divmod(self.calls, len(self.mine))
        self.calls += 1
        torch.default_generator.manual_seed(1000 * self.number + step * self.of + self.mine[place])
        return self.inner(x)


def name_of(stages, tokens, stage, name):
    return "0.inner.0.weight" if tokens and stage == stages - 1 and name == "inner.1.weight" else f"{stage}.{name}"


def batch(step, size, tokens):
    generator = torch.Generator().manual_seed(step)
    if tokens:
        return torch.randint(11, (2, size, 3), generator=generator)
    return torch.randn(2, size, WIDTH, generator=generator, dtype=F64)


def loss_of(tokens):
    return (lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten())) if tokens else F.mse_loss


def trained(step_of, parameters, size, tokens):
    """What some steps of SGD with momentum return."""
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1, momentum=0.9), []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(step_of(*batch(step, size, tokens)))
        optimizer.step()
    return losses


def one_process(stages, micro_batches, drop, tokens):
    """(losses, {name: value}); micro-batches one after another, as dropout has to draw for each."""
    whole = nn.Sequential(*[stage_of(number, stages, drop, tokens) for number in range(stages)])
    if tokens:
        whole[-1].inner[-1].weight = whole[0].inner[0].weight

    def step(x, target):
        total = 0.0
        for part, wanted in zip(x.chunk(micro_batches), target.chunk(micro_batches), strict=True):
            loss = loss_of(tokens)(whole(part), wanted) / micro_batches
            loss.backward()
            total += loss.item()
        return total

    losses = trained(step, whole.parameters(), 2 * micro_batches, tokens)
    return losses, {n: p.detach() for n, p in whole.named_parameters()}


def beside_one_process(rank, world_size, schedule, stages, micro_batches, drop=0.0, tokens=False, recompute=False):
    """(how far losses and weights are from those of one process; ranks with other values of a tied weight)."""
    lists = SCHEDULES[schedule](stages, micro_batches, world_size) if isinstance(schedule, str) else schedule
    owner, route = check(lists, world_size, micro_batches), routes(lists)
    last = len(route[0]) - 1
    losses, values = one_process(last + 1, micro_batches, drop, tokens)
    own = {s: stage_of(s % (last + 1), last + 1, drop, tokens) for s, place in owner.items() if place == rank}
    for stage, one in own.items():
        one.mine, one.of = [m for m in range(micro_batches) if stage in route[m]], micro_batches
        if recompute:
            checkpoint_every(one, Layer)
        copied = one.parameters() if stage > last else [one.inner[-1].weight] if tokens and stage == last else ()
        for p in copied:  # begins with other values, on purpose
            nn.init.normal_(p)
    names = partial(name_of, last + 1, tokens)
    pipeline = Pipeline(own, None, lists, micro_batches, loss_of(tokens), names)

    def step(x, target):
        loss = pipeline.step(x, target)
        assert (loss is None) == all(stage % (last + 1) != last for stage in own)
        return 0.0 if loss is None else loss.item()

    ours = torch.tensor(trained(step, pipeline.parameters(), 2 * micro_batches, tokens), dtype=F64)
    comm.all_reduce(ours)
    found = pipeline.full_state_dict()
    assert found.keys() == values.keys()
    apart = (ours - torch.tensor(losses, dtype=F64)).abs().tolist()
    apart += [(found[n] - t).abs().max().item() for n, t in values.items()]
    apart += [(p - values[n]).abs().max().item() for n, p in pipeline.named_parameters()]
    return max(apart)


@pytest.mark.parametrize(("world_size", "name"), runs(1, 2, 3, 4))
def test_it_is_the_training_of_one_process(ranks, world_size, name):
    stages = A_RANK.get(name, 1) * world_size
    given = {"schedule": name, "stages": stages, "micro_batches": 2 * world_size}
    assert max(ranks(world_size, beside_one_process, **given)) < 1e-12


ROUNDS = [(n, name) for n, name in runs(1, 2, 3) if n * A_RANK.get(name, 1) > 1]


@pytest.mark.parametrize(("world_size", "name"), ROUNDS)
def test_with_tied_embeddings_dropout_and_recomputation(ranks, world_size, name):
    stages = A_RANK.get(name, 1) * world_size
    given = {"schedule": name, "stages": stages, "micro_batches": 2 * world_size, "drop": 0.3, "tokens": True}
    assert max(ranks(world_size, beside_one_process, recompute=True, **given)) < 1e-12


def test_gpipe_does_with_fewer_micro_batches_than_stages_and_with_several_stages_a_rank(ranks):
    assert max(ranks(3, beside_one_process, schedule="gpipe", stages=3, micro_batches=1)) < 1e-12
    assert max(ranks(2, beside_one_process, schedule="gpipe", stages=6, micro_batches=3)) < 1e-12


def at_random(ranks, stages, micro_batches, seed):
    """A schedule that nobody would write: stages anywhere, whatever can be done next, some backwards in two parts."""
    draw = random.Random(seed)
    owner = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
    draw.shuffle(owner)
    left = [
        Action(k, s, m)
        for s in range(stages)
        for m in range(micro_batches)
        for k in draw.choice(["FB", "FBW"])  # also of one stage
    ]
    lists, done = [[] for _ in range(ranks)], set()
    while left:
        action = draw.choice([a for a in left if all(need in done for need in needs(a, range(stages)))])
        left.remove(action)
        done.add(action)
        lists[owner[action.stage]].append(action)
    return lists


@pytest.mark.parametrize("seed", range(8))
def test_any_order_that_can_be_done_is_the_same_training(ranks, seed):
    n, stages, micro_batches = 2 + seed % 3, 4 + seed % 2, 3 + seed % 4
    lists = at_random(n, stages, micro_batches, seed)
    assert max(ranks(n, beside_one_process, schedule=lists, stages=stages, micro_batches=micro_batches)) < 1e-12


HALVES = [(p, M, "ScheduleDualPipeV") for p, M in ((1, 2), (1, 3), (2, 4), (2, 5), (3, 7), (4, 8))]
HALVES += [(p, M, "DualPipe") for p, M in ((2, 4), (2, 6), (4, 8))]


@pytest.mark.parametrize(("p", "micro_batches", "name"), HALVES)
def test_whole_and_split_backwards_in_one_stage_are_the_same_training(ranks, p, micro_batches, name):
    lists = deepseeks(p, micro_batches) if name == "DualPipe" else of_pytorch(name, p, micro_batches)
    given = {"schedule": flat(lists), "stages": 2 * p, "micro_batches": micro_batches}
    assert max(ranks(p, beside_one_process, **given)) < 1e-12


def test_one_stage_with_a_whole_and_a_split_backward(ranks):
    lists = [[Action(*one) for one in (("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1), ("W", 0, 1))]]
    assert most_held(lists) == [2] and play(lists).length == 6
    assert max(ranks(1, beside_one_process, schedule=lists, stages=1, micro_batches=2)) < 1e-12


def by_the_idea(rank, world_size, name):
    micro_batches = 4
    losses, values = one_process(world_size, micro_batches, 0.0, False)
    program, stage = getattr(idea, name)(rank, world_size, micro_batches), stage_of(rank, world_size)
    assert program == [(one.kind, one.micro_batch) for one in SCHEDULES[name](world_size, micro_batches)[rank]]

    def step(x, target):
        return sum(
            idea.run_actions(program, stage, x.chunk(micro_batches), target.chunk(micro_batches), F.mse_loss),
            torch.zeros(()),
        ).item()

    ours = trained(step, stage.parameters(), 2 * micro_batches, False)
    apart = [abs(a - b) for a, b in zip(ours, losses, strict=True)] if rank == world_size - 1 else []
    return max(apart + [(p - values[f"{rank}.{n}"]).abs().max().item() for n, p in stage.named_parameters()])


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_idea_is_the_training_too(ranks, world_size, name):
    assert max(ranks(world_size, by_the_idea, name=name)) < 1e-12


def beside_pytorch(rank, world_size, name, a_rank):
    """The furthest that our weights are from those of PyTorch's class, on the same stages."""
    from torch.distributed import pipelining

    theirs = {
        "gpipe": pipelining.ScheduleGPipe,
        "one_f_one_b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
    }[name]
    stages, micro_batches = a_rank * world_size, 2 * world_size
    own = range(rank, stages, world_size)
    modules = {s: stage_of(s, stages) for s in own}
    parts = [pipelining.PipelineStage(m, s, stages, torch.device("cpu")) for s, m in modules.items()]
    schedule = theirs(parts if a_rank > 1 else parts[0], micro_batches, loss_fn=F.mse_loss)

    def their_step(x, target):
        given = (x,) if rank == 0 else ()
        schedule.step(*given, **({"target": target} if stages - 1 in own else {}))

    trained(their_step, [p for m in modules.values() for p in m.parameters()], 2 * micro_batches, False)
    ours = Pipeline({s: stage_of(s, stages) for s in own}, None, SCHEDULES[name], micro_batches, F.mse_loss)
    trained(lambda x, target: ours.step(x, target), ours.parameters(), 2 * micro_batches, False)
    wanted = {f"{s}.{n}": p for s, m in modules.items() for n, p in m.named_parameters()}
    return max((p - wanted[n]).abs().max().item() for n, p in ours.named_parameters())


@pytest.mark.parametrize(("name", "a_rank"), [("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_it_is_the_training_of_pytorchs_class(ranks, world_size, name, a_rank):
    assert max(ranks(world_size, beside_pytorch, name=name, a_rank=a_rank)) < 1e-12


# ---- what a schedule says


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_the_bubble_is_the_formulas(p, rounds):
    M = rounds * p
    for lists, fill in (
        (gpipe(p, M), M),
        (one_f_one_b(p, M), M),
        (interleaved(2 * p, M, p), 2 * M),
        (interleaved(3 * p, M, p), 3 * M),
        (zero_bubble(p, M), 3 * M),
    ):
        assert play(lists).bubble == pytest.approx((p - 1) / (fill + p - 1))
    if p % 2 == 0 and rounds > 1:
        assert play(dual_pipe(2 * p, M)).bubble == pytest.approx((p - 2) / (6 * M + p - 2))


@pytest.mark.parametrize("p", [2, 3, 4])
def test_what_is_held_is_the_formulas(p):
    M = 3 * p
    assert most_held(gpipe(p, M)) == [M] * p
    assert most_held(one_f_one_b(p, M)) == [p - rank for rank in range(p)]
    assert most_held(zero_bubble(p, M)) == [p] * p
    assert most_held(interleaved(3 * p, M, p)) == [3 * p + p - 1 - 2 * rank for rank in range(p)]
    if p % 2 == 0:
        assert most_held(dual_pipe(2 * p, M)) == [p + 1] * p


@pytest.mark.parametrize("p", range(1, 17))
def test_a_v_is_at_its_formula_from_a_micro_batch_a_rank_on(p):
    for M in [*range(1, 2 * p), *range(2 * p, 6 * p + 1, max(1, p // 4))]:
        lists, too_few = v_shaped(2 * p, M), p > M
        played = play(lists)
        assert played.owner == {s: min(s, 2 * p - 1 - s) for s in range(2 * p)}, f"{M=}"
        assert played.length == (4 * p + 3 * M - 1 - (p >= 2 * M) if too_few else 6 * M + p - 1), f"{M=}"
        assert most_held(lists) == [2 * min(p, M)] * p, f"{M=}"


def test_a_long_v_is_written_at_once():
    begin = time.process_time()
    v_shaped(32, 128)
    assert time.process_time() - begin < 1  # 0.03 s; a search took 9


def of_pytorch(name, p, micro_batches):
    """The rows of torch.distributed.pipelining: for each rank a list of actions, each a list of ours."""
    kinds = {"F": "F", "I": "B", "B": "B", "W": "W"}  # "I": of the input only
    given = SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=micro_batches)
    rows = [getattr(torch_schedules, name)._calculate_single_rank_operations(given, rank) for rank in range(p)]

    def ours(action):
        parts = action.sub_actions or (action,)
        return [Action(kinds[one.computation_type.value], one.stage_index, one.microbatch_index) for one in parts]

    return [[ours(action) for action in row if action is not None] for row in rows]


def flat(rows):
    return [[one for actions in row for one in actions] for row in rows]


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8, 16])
def test_a_v_is_pytorchs_order(p):
    for M in sorted({1, p, 2 * p - 1, 2 * p, 3 * p + 1, 6 * p}):
        ours, theirs = v_shaped(2 * p, M), flat(of_pytorch("ScheduleZBVZeroBubble", p, M))
        check(ours, p, M)
        assert play(ours).length <= play(theirs).length, f"{M=}"  # less with few, as PyTorch's Ws do not wait
        for mine, other in zip(ours, theirs, strict=True):
            assert [a for a in mine if a.kind != "W"] == [a for a in other if a.kind != "W"], f"{M=}"


def deepseeks(p, micro_batches):
    """DualPipe as published, of which PyTorch's DualPipeV is one half: rank p-1-r mirrors rank r."""
    half = micro_batches // 2

    def placed(action, mirrored):
        kind, stage, m = action
        copy = (stage >= p // 2) != mirrored
        return Action(kind, stage + p * copy, m + half * copy)

    rows = of_pytorch("ScheduleDualPipeV", p // 2, half)
    both = [(row, False) for row in rows] + [(row, True) for row in reversed(rows)]
    return [[[placed(one, mirrored) for one in actions] for actions in row] for row, mirrored in both]


def leaving_together(rows):
    """How long a step lasts where what the actions of a pair have made leaves at its end."""
    route, end = routes(flat(rows)), {}
    split = {one for row in flat(rows) for one in row if one.kind == "W"}
    at, free = [0] * len(rows), [0] * len(rows)
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        for rank, row in enumerate(rows):
            pair = row[at[rank]] if at[rank] < len(row) else []
            before = [need for one in pair for need in needs(one, route[one.micro_batch])]
            if pair and all(need in end for need in before):
                whole = sum(one.kind == "B" and one._replace(kind="W") not in split for one in pair)
                free[rank] = max([free[rank], *(end[need] for need in before)]) + len(pair) + whole
                end.update(dict.fromkeys(pair, free[rank]))
                at[rank] += 1
    return max(free)


@pytest.mark.parametrize("p", [2, 4, 6, 8, 16])
def test_dual_pipe_is_at_half_of_what_is_published(p):
    for M in (2 * p, 3 * p, 5 * p):
        rows = deepseeks(p, M)
        check(flat(rows), p, M)
        assert leaving_together(rows) == 3 * M + p - 2, f"{M=}"  # table 2's bubble
        assert play(flat(rows)).length == play(dual_pipe(2 * p, M)).length == 3 * M + p // 2 - 1, f"{M=}"
        assert most_held(flat(rows)) == most_held(dual_pipe(2 * p, M)) == [p + 1] * p, f"{M=}"


def counted(rank, world_size, name):
    """(most micro-batches of a stage held at a moment, bytes sent in a second step)."""
    a_rank, micro_batches = A_RANK.get(name, 1), 2 * world_size
    lists = SCHEDULES[name](a_rank * world_size, micro_batches, world_size)
    own = {a.stage: stage_of(a.stage, 0) for a in lists[rank]}
    pipeline = Pipeline(own, None, lists, micro_batches, F.mse_loss)
    real, held = pipeline.compute, []

    def compute(action, arrived):
        made = real(action, arrived)
        held.append(len(pipeline.held) + len(pipeline.later))
        return made

    pipeline.compute = compute
    for _ in range(2):
        with comm.record() as log:
            pipeline.step(*batch(0, 2 * micro_batches, False))
    return max(held), held[-1], sum(event.sent_bytes for event in log)


@pytest.mark.parametrize(("world_size", "name"), [run for run in runs(3, 4) if run[0] == 3 or "dual" in run[1]])
def test_ranks_hold_and_send_what_the_schedule_says(ranks, world_size, name):
    lists = SCHEDULES[name](world_size * A_RANK.get(name, 1), 2 * world_size, world_size)
    told = ranks(world_size, counted, name=name)
    assert [most for most, _, _ in told] == most_held(lists)
    assert [left for _, left, _ in told] == [0] * world_size
    there = messages(lists, check(lists, world_size, 2 * world_size))
    sent = sum(map(len, there.values())) * 2 * WIDTH * 8
    if name == "dual_pipe":  # the gradients of each stage, from either copy to the other
        sent += 2 * world_size * sum(p.nbytes for p in stage_of(0, 0).parameters())
    assert sum(sent for _, _, sent in told) == sent


def swapped(lists, rank, i, j):
    lists[rank][i], lists[rank][j] = lists[rank][j], lists[rank][i]


def own_chain(lists):
    """Micro-batch 1 passes through a stage of its own, and no other."""
    for program in lists:
        program[:] = [action for action in program if action.micro_batch == 0]
    lists[0] += [Action("F", 2, 1), Action("B", 2, 1)]


WRONG = {
    "deadlock": (
        lambda lists: [lists[0].sort(key=lambda a: a.micro_batch), lists[1].sort(key=lambda a: a.kind == "B")],
        "this schedule never ends: rank 0 at 0B0 waits for 1B0 of rank 1; rank 1 at 1F1 waits for 0F1 of rank 0",
    ),
    "backward first": (lambda lists: swapped(lists, 1, 0, 1), "rank 1 runs 1B0 before 1F0, which it needs"),
    "missing": (lambda lists: lists[0].pop(), "0B1 (stage, kind, micro-batch) is missing on rank 0"),
    "twice": (lambda lists: lists[0].append(lists[0][0]), "0F0 (stage, kind, micro-batch) occurs twice"),
    "two ranks": (lambda lists: lists[0].append(lists[1].pop()), "stage 1 is on rank 0 and on rank 1"),
    "a gap": (lambda lists: lists.__setitem__(1, [a._replace(stage=2) for a in lists[1]]), "gap: [0, 2]"),
    "ranks": (lambda lists: lists.append([]), "the schedule is for 3 ranks but the group has 2"),
    "kind": (lambda lists: lists[0].append(Action("X", 0, 0)), "invalid action for 2 micro-batches: 0X0"),
    "chains": (own_chain, "3 stages cannot be divided into pipelines of 2"),
    "W first": (
        lambda lists: (lists[0].insert(2, Action("W", 0, 0)), lists[0].append(Action("W", 0, 1))),
        "rank 0 runs 0W0 before 0B0, which it needs",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_schedule_that_cannot_be_is_refused(case):
    lists = one_f_one_b(2, 2)
    check(lists, 2, 2)
    change, words = WRONG[case]
    change(lists)
    with pytest.raises(ValueError) as told:
        check(lists, 2, 2)
    assert words in str(told.value)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (
            lambda: one_f_one_b(4, 3),
            "one_f_one_b: micro_batches=3 must be at least 4, the number of stages; use more, or gpipe",
        ),
        (lambda: zero_bubble(4, 8, 2), "zero_bubble needs one stage a rank: 4 stages need 4 ranks, not 2"),
        (lambda: interleaved(4, 7, 2), "interleaved: micro_batches=7 must be a multiple of 2 ranks"),
        (lambda: gpipe(5, 2, 2), "stages=5 must be a multiple of 2 ranks"),
        (lambda: v_shaped(3, 6), "v_shaped needs two stages a rank: not 3 stages on 1 ranks"),
        (lambda: v_shaped(4, 6, 4), "v_shaped needs two stages a rank: not 4 stages on 4 ranks"),
        (
            lambda: dual_pipe(6, 12, 3),
            "dual_pipe needs an even number of ranks, each with a stage and a copy: not 6 stages on 3 ranks",
        ),
        (
            lambda: dual_pipe(8, 9),
            "dual_pipe: micro_batches=9 must be even and at least 8, two a rank",
        ),
    ],
)
def test_a_schedule_that_is_not_for_these_numbers(write, words):
    with pytest.raises(ValueError) as told:
        write()
    assert str(told.value) == words


# ---- the class


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"steps": 3}

    def set_extra_state(self, state):
        pass


def wrong(rank, world_size, case):
    """What the ranks say; nobody waits for the others in these."""
    own, schedule, loss, size = {rank: stage_of(rank, 0)}, one_f_one_b, F.mse_loss, 8
    names = (lambda stage, name: name) if case in ("names", "trainable") else None
    if case == "stages":
        own = {1 - rank: stage_of(rank, 0)}
    elif case == "other schedules":
        schedule = [gpipe, one_f_one_b][rank](2, 4)
    elif case == "names":
        own = {rank: nn.Linear(WIDTH, WIDTH + rank, dtype=F64)}
    elif case == "no loss":
        loss = None
    elif case == "trainable":
        own = {rank: nn.Linear(WIDTH, WIDTH, dtype=F64).requires_grad_(rank == 0)}
    elif case == "batch":
        size = 10
    elif rank == 1 and case == "one schedule":
        schedule = [[], []]
    elif rank == 1 and case == "one function":
        schedule = lambda *counts: {}["not there"]  # noqa: E731
    elif rank == 1 and case == "no dict":
        own = [None]
    elif rank == 1 and case == "no lists":
        schedule = "1F1B"
    elif rank == 1 and case == "extra state":
        own = {1: Extra(WIDTH, WIDTH)}
    elif rank == 1 and case == "one naming":
        names = lambda stage, name: {}[name]  # noqa: E731
    try:
        Pipeline(own, None, schedule, 4, loss, names).cut(torch.zeros(size, WIDTH), {rank}, "input")
    except (ValueError, KeyError) as error:
        return str(error)


def both(words):
    return [f"rank 1: {words}", words]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("stages", ["rank 0 has stages [1]; by the schedule it has [0]"] * 2),
        ("other schedules", ["ranks 0 and 1 have different schedules"] * 2),
        ("names", ["'weight' is [6, 6] torch.float64 in one stage, [7, 6] torch.float64 in another"] * 2),
        (
            "trainable",
            ["'weight' is [6, 6] torch.float64 in one stage, [6, 6] torch.float64 (requires_grad=False) in another"]
            * 2,
        ),
        ("no loss", both("stage 1 is the last: rank 1 needs a loss")),
        ("batch", ["input: 10 samples must be divisible by 4 micro-batches"] * 2),
        ("one schedule", both("stages must be numbered from 0 without a gap: []")),
        ("one function", both("'not there'")),
        ("one naming", both("'inner.0.first.weight'")),
        ("no dict", ["stages on rank 1 must be a dict: number -> module"] * 2),
        (
            "no lists",
            both(
                "schedule must be a function such as one_f_one_b, or a list of "
                "(kind, stage, micro_batch) for each rank: not '1F1B'"
            ),
        ),
        (
            "extra state",
            both(
                "stage 1: '_extra_state' is not a parameter or buffer, and a pipeline supports only "
                "those: remove get_extra_state"
            ),
        ),
    ],
)
def test_bad_input(ranks, case, words):
    assert ranks(2, wrong, case=case) == words


def given_in_two_ways(rank, world_size):
    own, schedule = {rank: stage_of(rank, 0)}, [one_f_one_b, one_f_one_b(2, 4)][rank]
    return Pipeline(own, None, schedule, 4, F.mse_loss).owner


def test_a_function_on_one_rank_and_its_lists_on_another_are_one_schedule(ranks):
    assert ranks(2, given_in_two_ways) == [{0: 0, 1: 1}] * 2


class Uneven(nn.Module):
    """Gives fewer rows for the second micro-batch."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x[: len(x) - (self.calls == 2)]


def uneven(rank, world_size):
    """The first rank says what is wrong; the second takes what was sent before, so that nothing is left on the way."""
    pipeline = Pipeline({rank: Uneven()}, None, gpipe, 3, lambda output, target: output.mean())
    if rank == 0:
        try:
            pipeline.step(torch.zeros(6, WIDTH, requires_grad=True))
        except ValueError as error:
            pipeline.mail.end()
            return str(error)
    else:
        pipeline.mail.take(Action("F", 1, 0))


def test_stages_whose_shapes_differ_between_micro_batches(ranks):
    said = ranks(2, uneven)[0]
    assert said == (
        "0F1 (stage, kind, micro-batch) made [1, 6] torch.float32 but before [2, 6] torch.float32: "
        "all must have one shape and dtype"
    )


def around(rank, world_size, name):
    """evaluate() between steps; the input's gradient; a whole state, loaded."""
    micro_batches = 2 * world_size
    lists = SCHEDULES[name](A_RANK.get(name, 1) * world_size, micro_batches, world_size)
    stages = len(routes(lists)[0])
    whole = nn.Sequential(*[stage_of(s, stages) for s in range(stages)])
    own = {a.stage: stage_of(a.stage + 50, stages) for a in lists[rank]}
    pipeline = Pipeline(own, None, lists, micro_batches, F.mse_loss)
    pipeline.load_state_dict(whole.state_dict())
    x, target = (one.clone().requires_grad_() for one in batch(0, 2 * micro_batches, False))
    apart = []
    for step in range(2):  # with twice as many samples as a step has
        inputs, wanted = batch(step, 4 * micro_batches, False)
        found = pipeline.evaluate(inputs, wanted)
        comm.all_reduce(found := torch.zeros((), dtype=F64) if found is None else found)
        apart.append((found - F.mse_loss(whole(inputs), wanted)).abs().item())
    assert all(p.grad is None for p in pipeline.parameters())
    for _ in range(2):  # gradients add up
        pipeline.step(x, target.detach(), scale=0.5)
    oracle = x.detach().clone().requires_grad_()
    F.mse_loss(whole(oracle), target.detach()).backward()
    comm.all_reduce(found := torch.zeros_like(x) if x.grad is None else x.grad)
    apart.append((found - oracle.grad).abs().max().item())
    grads = {n: p.grad for n, p in whole.named_parameters()}
    apart += [(p.grad - grads[n]).abs().max().item() for n, p in pipeline.named_parameters()]
    apart += [
        0.0 if torch.equal(pipeline.state_dict()[n], whole.state_dict()[n]) else 1.0 for n in pipeline.state_dict()
    ]
    try:
        pipeline.load_state_dict({n: t[:1] for n, t in whole.state_dict().items()})
    except RuntimeError as error:
        return max(apart), "expected" in str(error)


@pytest.mark.parametrize("name", SCHEDULES)
def test_evaluation_input_gradients_and_states(ranks, name):
    for rank, (apart, said) in enumerate(ranks(2, around, name=name)):
        assert apart < 1e-12 and said, f"rank {rank}"


def dies(context):
    import os

    import torch
    from torch import nn

    from labkit.pipeline import Pipeline, one_f_one_b

    class Mortal(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if context.rank == 1 and self.calls == 3:
                os._exit(7)
            return super().forward(x)

    pipeline = Pipeline({context.rank: Mortal(4, 4)}, None, one_f_one_b, 6, nn.functional.mse_loss)
    pipeline.step(torch.zeros(12, 4), torch.zeros(12, 4))


@pytest.mark.slow
def test_a_rank_that_dies_in_the_middle_ends_all():
    with pytest.raises(LaunchError) as told:
        launch(dies, nproc=3, device="cpu", quiet=True, timeout=120)
    assert "rank 1" in str(told.value).splitlines()[0]  # and not the time limit


# ---- what a stage may be, and what is left after a failure

PLAIN = {
    "itself": nn.Identity,
    "nothing": nn.Sequential,
    "no dropout now": lambda: nn.Dropout().eval(),
    "a view of itself": lambda: nn.Flatten(1),
}


def handed_on(rank, world_size, kind, name):
    """The gradient of the first of three stages, of which the second hands on what it gets; that of one process."""
    torch.manual_seed(0)
    first, last = nn.Linear(WIDTH, WIDTH, dtype=F64), nn.Linear(WIDTH, WIDTH, dtype=F64)
    x, target = batch(0, 6, False)
    F.mse_loss(last(first(x)), target).backward()
    wanted, first.weight.grad = first.weight.grad, None
    own = {rank: [first, PLAIN[kind](), last][rank]}
    Pipeline(own, None, SCHEDULES[name], 3, F.mse_loss).step(x, target)
    return (first.weight.grad - wanted).abs().max().item() if rank == 0 else 0.0


@pytest.mark.parametrize("name", ["one_f_one_b", "zero_bubble"])
@pytest.mark.parametrize("kind", PLAIN)
def test_a_stage_may_hand_on_its_input(ranks, kind, name):
    assert max(ranks(3, handed_on, kind=kind, name=name)) < 1e-12


def interrupted(rank, world_size):
    """The gradients of a tied parameter before a step whose loss raises, and after."""

    def fails(output, target):
        raise ZeroDivisionError

    own = {0: stage_of(0, 2, tokens=True), 1: stage_of(1, 2, tokens=True)}
    pipeline = Pipeline(own, None, gpipe, 1, loss_of(True), partial(name_of, 2, True))
    x, target = batch(0, 2, True)
    pipeline.step(x, target)
    before = [p.grad.clone() for p in pipeline.parameters()]
    pipeline.loss = fails
    try:
        pipeline.step(x, target)
    except ZeroDivisionError:
        return all(torch.equal(p.grad, g) for p, g in zip(pipeline.parameters(), before, strict=True))


def test_a_step_that_raises_leaves_the_gradients_of_tied_parameters(ranks):
    assert ranks(1, interrupted) == [True]


def not_a_step(rank, world_size):
    loss = F.mse_loss
    pipeline, x = Pipeline({0: stage_of(0, 1)}, None, gpipe, 2, loss), torch.zeros(4, WIDTH, dtype=F64)
    told = []
    for input, target, criterion, grad in (
        ([x, x, x], x, loss, True),
        ((x, x), x, loss, True),
        (x, {"labels": x}, loss, True),
        (x.sum(), x, loss, True),
        (x, x, partial(loss, reduction="none"), True),
        (x, x, loss, False),
    ):
        pipeline.loss = criterion
        try:
            with torch.set_grad_enabled(grad):
                pipeline.step(input, target)
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
    return told


def test_what_is_no_step(ranks):
    assert ranks(1, not_a_step) == [
        [
            "input is a list of 3 for 2 micro-batches",
            "input is a tuple: it must be a tensor to split along dim 0, or a list of 2 micro-batches",
            "target is a dict: it must be a tensor to split along dim 0, or a list of 2 micro-batches",
            "input is a number: it must be a tensor to split along dim 0, or a list of 2 micro-batches",
            "the loss must be a scalar: it has shape [2, 6]",
            "step() needs gradients, which are off: use evaluate()",
        ]
    ]


class Pair(nn.Module):
    def forward(self, x):
        return x, x


def refused(rank, world_size):
    """Errors for a stage that returns two tensors, for further inputs and for no micro-batches."""
    x, told = torch.zeros(4, WIDTH, dtype=F64), []
    for use in (
        lambda: Pipeline({0: Pair()}, None, gpipe, 2, F.mse_loss).step(x, x),
        lambda: Pipeline({0: stage_of(0, 1)}, None, gpipe, 2, F.mse_loss).step(x, x, x),
        lambda: Pipeline({0: stage_of(0, 1)}, None, gpipe, 2, F.mse_loss).step(x, x, mask=x),
        lambda: Pipeline({0: stage_of(0, 1)}, None, gpipe, 2, F.mse_loss).step(x, x, weights=[1.0]),
        lambda: Pipeline({0: stage_of(0, 1)}, None, gpipe, 0, F.mse_loss),
        lambda: Pipeline({0: stage_of(0, 1)}, None, [[]], 2.0, F.mse_loss),
    ):
        try:
            use()
        except (ValueError, TypeError) as error:
            told.append(str(error))
    return told


def test_what_is_refused_is_one_clear_line(ranks):
    assert ranks(1, refused) == [
        [
            "stage 0 returned a tuple: it must return one tensor",
            "Pipeline.step() takes from 1 to 3 positional arguments but 4 were given",
            "Pipeline.step() got an unexpected keyword argument 'mask'",
            "weights has 1 numbers for 2 micro-batches",
            "micro_batches=0 must be an integer of at least 1",
            "micro_batches=2.0 must be an integer of at least 1",
        ]
    ]


def of_kind(rank, world_size, dtype):
    """What the second stage gets of the first, which makes whole numbers."""
    first = nn.Identity()
    first.forward = lambda x: (x[:, 0] > 0).to(dtype)
    second = nn.Embedding(2, 1)
    second.forward = lambda kinds: kinds.double().requires_grad_()
    pipeline = Pipeline({rank: [first, second][rank]}, None, gpipe, 2, lambda output, target: output.mean())
    batch = torch.tensor([[1.0], [-1.0], [1.0], [1.0]])
    mean = pipeline.evaluate(batch, batch)
    return None if mean is None else mean.item()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16])
def test_what_is_handed_over_may_be_of_any_kind(ranks, dtype):
    assert ranks(2, of_kind, dtype=dtype) == [None, 0.75]
