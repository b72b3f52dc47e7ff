"""Which nodes a gang gets, policy by policy and by hand; what a placement costs; traces with the published shares."""

import random
from itertools import pairwise

import pytest
from pytest import approx

from labkit.cluster.job_trace import Gang, clusters, shapes, sizes, trace
from labkit.cluster.placement import (
    POLICIES,
    Inventory,
    Slowdown,
    Topology,
    best_fit_by_leaf,
    first_fit,
    round_robin,
    single_node_first,
)
from labkit.scale.collectives import NETWORK_SHARE
from labkit.scale.constants import values

SMALL = Topology(4, leaf=2)
TWO_LEAVES = Topology(16)


def free(*counts, topology=SMALL):
    return Inventory(topology, counts)


def test_the_example_in_the_file():
    found = {name: policy(free(2, 8, 4, 8), 4) for name, policy in POLICIES.items()}
    assert found == {
        "round robin": {0: 1, 1: 1, 2: 1, 3: 1},
        "first fit": {0: 2, 1: 2},
        "single node first": {1: 4},
        "best fit by leaf": {2: 4},
    }


@pytest.mark.parametrize(
    ("policy", "counts", "gpus", "expected"),
    [
        (round_robin, (1, 2, 0, 1), 4, {0: 1, 1: 2, 3: 1}),
        (round_robin, (1, 2, 0, 1), 5, None),
        (first_fit, (0, 3, 0, 8), 5, {1: 3, 3: 2}),
        (first_fit, (0, 3, 0, 1), 5, None),
        (single_node_first, (3, 7, 8, 8), 7, {1: 7}),  # the first that holds it
        (single_node_first, (3, 7, 4, 0), 10, {1: 7, 2: 3}),  # else those with most
        (single_node_first, (3, 7, 4, 0), 15, None),
        (best_fit_by_leaf, (8, 7, 8, 8), 7, {1: 7}),  # the node with the least to spare
        (best_fit_by_leaf, (4, 4, 4, 4), 8, None),  # waits for a node instead of two
        (best_fit_by_leaf, (8, 8, 8, 0), 16, {0: 8, 1: 8}),  # one leaf
        (best_fit_by_leaf, (8, 0, 8, 0), 16, {0: 8, 2: 8}),  # two, if no leaf has it
        (best_fit_by_leaf, (8, 4, 4, 4), 16, None),  # waits for two nodes instead of three
        (best_fit_by_leaf, (7, 7, 8, 8), 14, {0: 7, 1: 7}),  # the leaf with the least to spare
        (best_fit_by_leaf, (8, 8, 8, 8), 32, {0: 8, 1: 8, 2: 8, 3: 8}),  # more than a leaf
    ],
)
def test_placements_by_hand(policy, counts, gpus, expected):
    assert policy(free(*counts), gpus) == expected


def test_round_robin_goes_on_where_it_ended():
    inventory = Inventory(SMALL)
    for expected in ({0: 1, 1: 1, 2: 1}, {3: 1, 0: 1, 1: 1}):
        placement = round_robin(inventory, 3)
        assert placement == expected
        inventory.take(placement)


def test_a_gang_of_several_leaves_gets_the_fewest():
    topology = Topology(9, leaf=3)
    inventory = free(8, 0, 0, 8, 8, 8, 8, 8, 0, topology=topology)
    assert topology.leaves_of(best_fit_by_leaf(inventory, 5 * 8)) == {1, 2}
    assert best_fit_by_leaf(inventory, 4 * 8) == {3: 8, 4: 8, 5: 8, 0: 8}  # leaf 0 has the least to spare


@pytest.mark.parametrize("name", POLICIES)
def test_a_placement_is_whole_of_free_gpus_and_changes_nothing(name):
    rng = random.Random(name)
    for _ in range(300):
        topology = Topology(rng.randint(1, 12), leaf=rng.randint(1, 5), gpus_per_node=rng.choice((1, 2, 4, 8)))
        counts = [rng.randint(0, topology.gpus_per_node) for _ in range(topology.nodes)]
        inventory = Inventory(topology, counts)
        gpus = rng.randint(1, topology.gpus)
        placement = POLICIES[name](inventory, gpus)
        assert inventory.free == counts
        if placement is None:
            assert gpus > sum(counts) or name == "best fit by leaf"
            continue
        assert sum(placement.values()) == gpus
        assert all(0 < n <= counts[node] for node, n in placement.items())
        inventory.take(placement)
        assert inventory.total == sum(counts) - gpus
        again = Inventory(topology, inventory.free)  # buckets and sums are kept up to date
        assert (again.buckets, again.of_leaf, again.total) == (inventory.buckets, inventory.of_leaf, inventory.total)
        inventory.give(placement)
        assert inventory.free == counts


@pytest.mark.parametrize("name", POLICIES)
def test_every_gang_has_a_place_on_an_empty_cluster(name):
    for topology in (Topology(7, leaf=3), Topology(16, leaf=4, gpus_per_node=1)):
        for gpus in range(1, topology.gpus + 1):
            assert POLICIES[name](Inventory(topology), gpus) is not None


def test_gpus_that_are_not_free_cannot_be_taken():
    inventory = free(2, 8, 8, 8)
    with pytest.raises(ValueError, match="a placement takes 3 GPUs of node 0, which has 2 free"):
        inventory.take({1: 8, 0: 3})
    assert inventory.free == [2, 8, 8, 8]  # nothing was taken


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"nodes": 0}, "nodes must be a whole number of at least 1, got 0"),
        ({"nodes": 2, "leaf": 1.5}, "leaf must be a whole number"),
        ({"nodes": 2, "oversubscription": 0.5}, "oversubscription must be at least 1"),
        ({"nodes": 2, "network_gbps": 0}, "network_gbps must be positive"),
        ({"nodes": 2, "gpu": "V1000"}, "unknown GPU 'V1000'"),
    ],
)
def test_a_topology_that_cannot_be(arguments, words):
    with pytest.raises(ValueError, match=words):
        Topology(**arguments)


# What a placement costs


def test_the_bandwidth_of_a_placement_by_hand():
    """V100: 100 Gbit/s a node. 2 of 8 GPUs on each of 4 nodes, in 2 leaves with half of the uplinks."""
    slowdown = Slowdown(Topology(16, leaf=2, oversubscription=2))
    crowding = 1 + 2 * values()["crowding"]
    assert slowdown.bandwidth(4, 2, 2) == approx(12.5e9 * 2 / 8 * NETWORK_SHARE / crowding / 2)
    assert slowdown.bandwidth(4, 2, 1) == approx(12.5e9 * 2 / 8 * NETWORK_SHARE / crowding)


def test_a_step_by_hand():
    """Two GPUs on two nodes: 336 M gradients of 4 bytes at an eighth of an adapter, beside the last backward."""
    slowdown, c = Slowdown(Topology(16)), values()
    assert slowdown.gradient_bytes == approx(4 * 336e6, rel=0.01)
    wire = slowdown.gradient_bytes / (12.5e9 / 8 * NETWORK_SHARE / (1 + c["crowding"]))  # 2 (n-1)/n = 1
    assert slowdown.message_seconds(2, 2, 1, 1) == approx(wire, rel=0.02)  # and some latency
    once, twice = (Slowdown(Topology(16), batch=8 * n).step_seconds(1, 1, 1, 1) for n in (1, 2))
    micro, optimizer = twice - once, 2 * once - twice
    compute = 16 * micro + optimizer  # 256 sequences: 128 a GPU, in 16 micro-batches of 8
    hidden = 2 / 3 * compute / 16
    step = compute + max(hidden, wire) + c["exposed"] * min(hidden, wire) - hidden
    assert slowdown.step_seconds(2, 2, 1, 1) == approx(step, rel=0.02)


def test_a_batch_is_the_published_one_or_given():
    assert Slowdown(TWO_LEAVES).batch == 256
    assert Slowdown(TWO_LEAVES, batch=64).batch == 64
    # More GPUs than sequences: each has one.
    small = Slowdown(TWO_LEAVES, batch=1)
    assert small.step_seconds(8, 1, 8, 1) > small.step_seconds(1, 1, 1, 1)
    with pytest.raises(ValueError, match="layers=2,hidden=256 has no published batch: pass batch, in sequences"):
        Slowdown(TWO_LEAVES, "layers=2,hidden=256")


def test_fewer_nodes_and_leaves_are_never_slower():
    slowdown = Slowdown(Topology(16, leaf=4, oversubscription=4))
    assert slowdown({0: 1}) == slowdown({0: 8}) == slowdown({0: 8, 1: 8}) == 1
    assert 1 < slowdown({0: 8, 4: 8}) < slowdown({0: 4, 1: 4, 4: 4, 5: 4})  # leaves, then nodes
    assert slowdown({0: 4, 1: 4}) < slowdown({0: 7, 1: 1}) < slowdown(dict.fromkeys(range(8), 1))
    rng = random.Random(0)
    for _ in range(200):
        nodes = rng.sample(range(16), rng.randint(1, 16))
        assert slowdown({node: rng.randint(1, 8) for node in nodes}) >= 1


def test_a_faster_network_makes_placement_matter_less():
    spread = dict.fromkeys(range(8), 1)
    slow, fast = (Slowdown(Topology(8, network_gbps=gbps))(spread) for gbps in (100, 3200))
    assert slow > 2 * fast


# Traces


def test_gangs_have_the_published_sizes_and_mean_run_time():
    gangs = trace("Helios", jobs=40_000, gpus=2048, seed=1)
    one = sum(gang.gpus == 1 for gang in gangs) / len(gangs)
    assert one == approx(0.722, abs=0.01)
    assert sum(gang.gpus <= 8 for gang in gangs) / len(gangs) == approx(0.947, abs=0.01)
    time_of_one = sum(gang.seconds for gang in gangs if gang.gpus == 1) / sum(g.gpus * g.seconds for g in gangs)
    assert time_of_one == approx(0.054, abs=0.02)


@pytest.mark.parametrize("cluster", clusters())
def test_a_trace_is_in_order_seeded_and_as_loaded_as_it_was_asked(cluster):
    gangs = trace(cluster, jobs=2000, gpus=64, load=0.5, seed=3)
    assert gangs == trace(cluster, jobs=2000, gpus=64, load=0.5, seed=3)
    assert gangs != trace(cluster, jobs=2000, gpus=64, load=0.5, seed=4)
    assert all(a.arrival <= b.arrival for a, b in pairwise(gangs))
    assert max(gang.gpus for gang in gangs) <= 32
    assert all(gang.seconds <= gang.limit for gang in gangs)
    work = sum(gang.gpus * gang.seconds for gang in gangs)
    assert work / 64 / gangs[-1].arrival == approx(0.5, rel=0.1)


def test_the_published_shares_end_at_100_and_have_a_source():
    assert set(clusters()) == {"Seren", "Kalos", "Philly", "Helios"}
    for points in shapes().values():
        assert points[-1][1] == approx(100, abs=0.5)
    assert sum(share for share, _ in sizes("Helios", 1024).values()) == approx(100)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cluster": "Helio"}, "cluster must be one of Seren, Kalos, Philly, Helios, got 'Helio'"),
        ({"jobs": 0}, "jobs must be positive, got 0"),
        ({"load": -1}, "load must be positive, got -1"),
    ],
)
def test_a_trace_that_cannot_be(arguments, words):
    with pytest.raises(ValueError, match=words):
        trace(**arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((7, 0, 0, 10), "gang 7: gpus must be a whole number of at least 1, got 0"),
        ((7, 0, 1.5, 10), "gang 7: gpus must be a whole number of at least 1, got 1.5"),
        ((7, -1, 1, 10), "gang 7: arrival must be a number of at least 0, got -1"),
        ((7, 0, 1, float("nan")), "gang 7: seconds must be a number of at least 0, got nan"),
        ((7, 0, 1, 10, 5), "gang 7: limit must be a number of at least 10, got 5"),
    ],
)
def test_a_gang_that_cannot_be(arguments, words):
    with pytest.raises(ValueError, match=words):
        Gang(*arguments)
