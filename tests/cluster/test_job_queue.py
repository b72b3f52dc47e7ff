"""The queue of a cluster: small cases by hand, 200 random traces, published shapes, and real Slurm as the oracle."""

import random
from itertools import pairwise
from statistics import mean

import pytest
from pytest import approx

from labkit.cluster.job_queue import Failure, Growth, run_queue
from labkit.cluster.job_trace import Gang, trace
from labkit.cluster.placement import (
    POLICIES,
    Slowdown,
    Topology,
    best_fit_by_leaf,
    first_fit,
    round_robin,
    single_node_first,
)

TWO = Topology(2, leaf=2)
ONE_EACH = Topology(4, leaf=2, gpus_per_node=1)


def gangs(*rows):
    """Gangs of (arrival, gpus, seconds, ...)."""
    return [Gang(number, *row) for number, row in enumerate(rows)]


def starts(outcome):
    """{number of a gang: its starts}."""
    found = {}
    for run in outcome.runs:
        found.setdefault(run.gang.number, []).append(run.start)
    return found


# By hand


def test_first_in_first_out_lets_the_head_block():
    outcome = run_queue(TWO, gangs((0, 10, 100), (1, 8, 50), (2, 2, 10)), first_fit)
    assert starts(outcome) == {0: [0], 1: [100], 2: [100]}
    assert outcome.finished == {0: 100, 1: 150, 2: 110}
    assert outcome.mean_completion == approx((100 + 149 + 108) / 3)


def test_backfill_starts_what_ends_before_the_reservation():
    """16 GPUs: 10 are held until 100. The head, 8, is promised 100: 4 may run until then, or 4 for longer, not both."""
    rows = [(0, 10, 100), (1, 8, 50), (2, 4, 97), (3, 4, 98), (4, 2, 90)]
    outcome = run_queue(TWO, gangs(*rows), first_fit, backfill=True)
    assert outcome.promised[1] == 100
    assert starts(outcome)[1] == [100]
    assert starts(outcome)[2] == [2]  # ends at 99
    assert starts(outcome)[4] == [4]  # ends at 94
    assert starts(outcome)[3] == [99]  # there was no room before


def test_backfill_starts_what_leaves_the_reserved_gpus_free():
    """The head needs 8 of the 16 GPUs at 100; 8 others may be held for as long as anybody likes."""
    rows = [(0, 10, 100), (1, 8, 50), (2, 6, 1000)]
    outcome = run_queue(TWO, gangs(*rows), first_fit, backfill=True)
    assert starts(outcome) == {0: [0], 1: [100], 2: [2]}
    rows = [(0, 10, 100), (1, 12, 50), (2, 6, 1000)]  # 12 + 6 are more than 16
    outcome = run_queue(TWO, gangs(*rows), first_fit, backfill=True)
    assert starts(outcome) == {0: [0], 1: [100], 2: [150]}


def test_a_reservation_counts_with_the_time_that_users_ask_for():
    """The first gang ends at 100, but may need 200. The third asks for 150 s: it ends before 200, and delays nobody."""
    rows = [(0, 10, 100, 200), (1, 16, 50), (2, 4, 120, 150)]
    outcome = run_queue(TWO, gangs(*rows), first_fit, backfill=True)
    assert outcome.promised[1] == 200
    assert starts(outcome) == {0: [0], 1: [122], 2: [2]}


def test_a_slow_placement_holds_its_gpus_for_longer():
    outcome = run_queue(TWO, gangs((0, 2, 10), (40, 2, 10)), round_robin, lambda p: 2.0 * len(p) - 1, until=40)
    assert [run.slowdown for run in outcome.runs] == [3, 3]
    assert outcome.finished == {0: 30, 1: 70}
    assert outcome.held == approx(2 * 30 / (16 * 40))
    assert outcome.useful == approx(2 * 10 / (16 * 40))


def test_a_share_of_a_run_counts_until_the_end_of_the_window():
    outcome = run_queue(TWO, gangs((0, 16, 100)), first_fit, lambda p: 2.0, until=50)
    assert outcome.held == 1
    assert outcome.useful == approx(0.5)


@pytest.mark.parametrize(("policy", "nodes"), [(round_robin, 4), (first_fit, 2), (single_node_first, 1)])
def test_each_policy_places_a_gang_beside_another(policy, nodes):
    """6 GPUs of node 0 are held. A gang of 4 lands on 4, 2 or 1 node."""
    topology = Topology(4)
    _first, second = run_queue(topology, gangs((0, 6, 9), (1, 4, 9)), policy).runs
    assert len(second.placement) == nodes
    assert sum(second.placement.values()) == 4


def test_best_fit_fills_holes_and_keeps_whole_nodes():
    """After 6 and 2 GPUs, best fit has one whole node left for 8; first fit in order has, too; round robin has not."""
    rows = gangs((0, 6, 99), (1, 2, 99), (2, 8, 9))
    assert run_queue(TWO, rows, best_fit_by_leaf).runs[2].placement == {1: 8}
    assert len(run_queue(TWO, rows, round_robin).runs[2].placement) == 2


def test_a_more_urgent_gang_stops_the_youngest_of_the_others():
    rows = [(0, 8, 100), (10, 8, 100), (20, 8, 30, None, 1)]
    outcome = run_queue(TWO, gangs(*rows), best_fit_by_leaf, preempt=True, restart=5)
    assert starts(outcome) == {0: [0], 1: [10, 50], 2: [20]}
    assert [run.ended for run in outcome.runs] == ["done", "preempted", "done", "done"]
    assert outcome.finished[1] == 50 + 5 + 90  # 10 s were done and saved
    waits = run_queue(TWO, gangs(*rows), best_fit_by_leaf)
    assert starts(waits)[2] == [100]


def test_nobody_is_stopped_if_that_does_not_help():
    rows = [(0, 8, 100, None, 2), (0, 4, 100), (20, 16, 30, None, 1)]
    outcome = run_queue(TWO, gangs(*rows), best_fit_by_leaf, preempt=True)
    assert {run.ended for run in outcome.runs} == {"done"}


def test_a_node_lost_while_held_ends_the_whole_gang_which_resumes_from_its_save():
    """16 GPUs on two nodes; node 1 fails at 70, saved every 30: 60 s are kept, and it waits for the repair at 80."""
    failure = Failure(70, 1, repair=10)
    outcome = run_queue(TWO, gangs((0, 16, 100)), first_fit, failures=[failure], save_every=30, restart=4, until=124)
    assert starts(outcome) == {0: [0, 80]}
    assert outcome.finished == {0: 80 + 4 + 40}
    assert [run.work for run in outcome.runs] == [60, 40]
    assert outcome.held == approx((70 + 44) / 124)
    assert outcome.useful == approx(100 / 124)


def test_a_failing_node_that_nobody_uses_is_not_used_until_its_repair():
    rows = gangs((0, 8, 100), (10, 8, 100))
    outcome = run_queue(TWO, rows, first_fit, failures=[Failure(5, 1, repair=45)])
    assert starts(outcome) == {0: [0], 1: [50]}
    assert outcome.runs[1].placement == {1: 8}


def test_nodes_are_added_for_gangs_that_wait():
    """One node at first. 16 GPUs wait at 10: one node is ordered for each 8 of them, and comes 60 s later."""
    topology = Topology(4, leaf=4)
    rows = gangs((0, 8, 1000), (10, 8, 100), (10, 8, 100))
    outcome = run_queue(topology, rows, first_fit, growth=Growth(first=1, waiting=8, delay=60), until=170)
    assert starts(outcome) == {0: [0], 1: [70], 2: [70]}
    assert outcome.capacity == [(0, 8), (70, 16), (70, 24)]
    assert outcome.available == 8 * 70 + 24 * 100


# Random traces


def random_case(seed):
    rng = random.Random(seed)
    topology = Topology(rng.randint(1, 9), leaf=rng.randint(1, 4), gpus_per_node=rng.choice((1, 2, 8)))
    now, rows = 0.0, []
    for number in range(rng.randint(1, 60)):
        now += rng.choice((0, 1, 5, 20)) * rng.random()
        gpus = rng.choice((1, 2, 4, 8, rng.randint(1, topology.gpus)))
        seconds = rng.choice((0, 1, 10, 100)) * rng.random()
        limit = seconds * rng.choice((1, 1, 2, 10))
        rows.append(Gang(number, now, min(gpus, topology.gpus), seconds, limit, rng.choice((0, 0, 0, 1))))
    options = {"backfill": rng.random() < 0.7, "preempt": rng.random() < 0.3, "save_every": 7.0, "restart": 2.0}
    if rng.random() < 0.3:
        options["failures"] = [
            Failure(rng.uniform(0, 2 * now + 10), rng.randrange(topology.nodes), rng.uniform(0, 50)) for _ in range(4)
        ]
    return topology, rows, rng.choice(list(POLICIES)), options


def held_at_most(topology, runs):
    """Assert that no node has more GPUs held than it has, at any moment."""
    changes = []
    for run in runs:
        for node, count in run.placement.items():
            changes += [(run.start, 1, node, count), (run.end, 0, node, -count)]  # ends before starts
    held = [0] * topology.nodes
    for _, _, node, count in sorted(change for change in changes):
        held[node] += count
        assert 0 <= held[node] <= topology.gpus_per_node


@pytest.mark.parametrize("block", range(10))
def test_random_traces(block):
    """20 traces each: no GPU twice, gangs whole, all end, work is conserved, promises are kept."""
    for seed in range(20 * block, 20 * block + 20):
        topology, rows, policy, options = random_case(seed)
        slowdown = Slowdown(topology)
        outcome = run_queue(topology, rows, POLICIES[policy], slowdown, **options)
        runs = [run for run in outcome.runs if run.end > run.start]  # the others hold nothing for any time
        held_at_most(topology, runs)
        assert set(outcome.finished) == {gang.number for gang in rows}  # nobody starves
        for run in outcome.runs:
            assert sum(run.placement.values()) == run.gang.gpus
            assert run.start >= run.gang.arrival
            assert run.end <= run.due + 1e-6
            if run.ended == "done":
                assert run.end == approx(run.due)
        for gang in rows:
            mine = [run for run in outcome.runs if run.gang is gang]
            assert sum(run.work for run in mine) == approx(gang.seconds, abs=1e-9)
            assert [run.ended for run in mine].count("done") == 1
            assert all(a.end <= b.start for a, b in pairwise(mine))  # never twice at once
        if outcome.until > 0:
            assert outcome.useful <= outcome.held * (1 + 1e-9) and outcome.held <= 1 + 1e-9
        if "failures" not in options and len({gang.priority for gang in rows}) == 1:
            for number, moment in outcome.promised.items():
                assert starts(outcome)[number][0] <= moment + 1e-6


def test_backfill_without_priorities_keeps_every_promise():
    for seed in range(40):
        topology, rows, policy, _ = random_case(1000 + seed)
        rows = [Gang(g.number, g.arrival, g.gpus, g.seconds, g.limit) for g in rows]
        outcome = run_queue(topology, rows, POLICIES[policy], Slowdown(topology), backfill=True)
        for number, moment in outcome.promised.items():
            assert starts(outcome)[number][0] <= moment + 1e-6


def test_a_gang_never_waits_while_it_could_be_placed_first_in_first_out():
    """The head starts at its arrival, at the start of the gang before it, or at an end of another."""
    for seed in range(40):
        topology, rows, policy, _ = random_case(2000 + seed)
        rows = [Gang(g.number, g.arrival, g.gpus, g.seconds) for g in rows]
        runs = run_queue(topology, rows, POLICIES[policy]).runs
        assert [run.gang.number for run in runs] == sorted(run.gang.number for run in runs)
        ends = {run.end for run in runs}
        for before, run in zip([None, *runs], runs, strict=False):
            moments = {run.gang.arrival, *ends} | ({before.start} if before else set())
            assert run.start in moments


# Published shapes


@pytest.fixture(scope="module")
def helios():
    """{way: Outcomes of three seeds}: 512 V100 in 64 nodes; arrivals bring 1.5 times what they can do at best.

    The cluster starts empty, so shares are those of the second half of the arrivals, when somebody always waits.
    """
    topology = Topology(64, oversubscription=2)
    slowdown = Slowdown(topology)
    found = {"round robin": [], "best fit and backfill": []}
    for seed in range(3):
        rows = trace("Helios", jobs=6000, gpus=512, load=1.5, seed=seed)
        half = rows[-1].arrival / 2
        found["round robin"].append(run_queue(topology, rows, round_robin, slowdown, since=half))
        found["best fit and backfill"].append(
            run_queue(topology, rows, best_fit_by_leaf, slowdown, backfill=True, since=half)
        )
    return found


@pytest.mark.slow
def test_on_helios_shapes_round_robin_wastes_half_and_best_fit_with_backfill_does_not(helios):
    assert all(outcome.waiting > 0.99 for outcomes in helios.values() for outcome in outcomes)  # saturated
    assert all(outcome.useful <= 0.45 for outcome in helios["round robin"])
    assert all(outcome.useful >= 0.78 for outcome in helios["best fit and backfill"])
    for slow, fast in zip(*helios.values(), strict=True):
        assert fast.mean_completion <= slow.mean_completion / 10


@pytest.mark.slow
def test_held_says_little(helios):
    """Round robin holds nearly all GPUs, and does less than half of the work."""
    assert mean(outcome.held for outcome in helios["round robin"]) > 0.7


# Bad input


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([(0, 17, 1)], "gang 0 needs 17 GPUs, but the cluster has 16"),
        ([(5, 1, 1), (3, 1, 1)], "gang 1 arrives at 3 s, before gang 0 at 5 s: sort the trace by arrival"),
    ],
)
def test_traces_that_cannot_be(rows, words):
    with pytest.raises(ValueError, match=words):
        run_queue(TWO, gangs(*rows), first_fit)


def test_a_gang_in_the_trace_twice():
    with pytest.raises(ValueError, match="gang 3 is in the trace twice"):
        run_queue(TWO, [Gang(3, 0, 1, 1), Gang(3, 1, 1, 1)], first_fit)


def test_a_policy_that_never_places_a_gang_is_named_before_it_blocks_the_queue():
    def one_node_only(inventory, gpus):
        return best_fit_by_leaf(inventory, gpus) if gpus <= 8 else None

    with pytest.raises(ValueError, match="does not place gang 1 of 16 GPUs even on an empty cluster"):
        run_queue(TWO, gangs((0, 1, 1), (1, 16, 1)), one_node_only)


def test_a_policy_that_gives_a_part_of_a_gang():
    def half(inventory, gpus):
        return {0: gpus // 2}

    with pytest.raises(ValueError, match="gave gang 0 2 GPUs, but it needs 4: return a complete placement, or None"):
        run_queue(TWO, gangs((0, 4, 1)), half)


def test_a_policy_that_stops_placing():
    def once(inventory, gpus):
        return None if inventory.cursor else first_fit(inventory, gpus)

    with pytest.raises(ValueError, match="gang 1 of 4 GPUs waits for ever: no gang runs"):
        run_queue(TWO, gangs((0, 8, 10), (20, 4, 1)), once)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"failures": [Failure(1, 2)]}, "node 2 fails, but there are only nodes 0 to 1"),
        ({"failures": [Failure(float("nan"), 1)]}, "a failure must have a time"),
        ({"save_every": 0}, "save_every must be positive"),
        ({"growth": Growth(3, 1)}, "growth must begin with 1 to 2 nodes"),
    ],
)
def test_options_that_cannot_be(options, words):
    with pytest.raises(ValueError, match=words):
        run_queue(TWO, gangs((0, 1, 1)), first_fit, **options)


def test_shares_are_those_of_the_window():
    """16 GPUs: 8 are held until 10, all until 20, and one gang waits from 5 to 20."""
    rows = gangs((0, 8, 10), (5, 16, 10), (6, 8, 5))
    outcome = run_queue(TWO, rows, first_fit, since=5, until=25)
    assert outcome.held == approx((8 * 5 + 16 * 10 + 8 * 5) / (16 * 20))
    assert outcome.waiting == approx(15 / 20)


def test_an_empty_trace():
    outcome = run_queue(TWO, [], first_fit, until=10)
    assert outcome.runs == [] and outcome.held == 0 and outcome.mean_completion == 0
