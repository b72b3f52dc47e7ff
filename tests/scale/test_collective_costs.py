"""The time of collectives: written out, against published ones, and against the lab's own messages."""

from dataclasses import replace

import pytest
from pytest import approx

from labkit.scale.collectives import ALGORITHMS, NODE_SHARE, SWITCH_HOP, Group, all_to_all, collective_seconds
from labkit.scale.constants import values
from labkit.scale.job_config import job_of
from labkit.scale.messages import expert_seconds, gather_seconds, gradient_seconds, hand_over, tensor_seconds

S = 1 << 30  # bytes
# 4 nodes of 8: hops of powers of ten apart, so that a sum of them can be read
GROUP = Group(ranks=32, members=8, nodes=4, inside=4e9 / NODE_SHARE, between=1e9, node_hop=1e-3, network_hop=1.0)
ONE_NODE = replace(GROUP, ranks=8, nodes=1)
ONE_EACH = replace(GROUP, ranks=4, members=1)
OPS = ("all_reduce", "reduce_scatter", "all_gather")


@pytest.mark.parametrize(
    ("algorithm", "op", "hops", "seconds"),
    [
        ("flat", "all_reduce", 8 + 0.054, 2 * 31 / 32 / 1e9),
        ("flat", "all_gather", 4 + 0.027, 31 / 32 / 1e9),
        ("hierarchical", "all_reduce", 6 + 0.014, 2 * (7 / 8 / 4e9 + 3 / 4 / 1e9)),
        ("hierarchical", "reduce_scatter", 3 + 0.007, 7 / 8 / 4e9 + 3 / 4 / 1e9),
        ("tree", "all_reduce", 4 + 0.006, 2 / 1e9),
        ("tree", "all_gather", 4 + 0.027, 31 / 32 / 1e9),
        ("in_switch", "all_reduce", 2 + 2 * SWITCH_HOP, 1 / 1e9),
        ("in_switch", "all_gather", 1 + SWITCH_HOP, 3 / 4 / 1e9),
    ],
)
def test_hops_and_bytes_are_those_of_the_table(algorithm, op, hops, seconds):
    assert ALGORITHMS[algorithm](op, GROUP, 0) == approx(hops, rel=1e-9)
    assert ALGORITHMS[algorithm](op, GROUP, S) == approx(hops + S * seconds)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("op", OPS)
def test_one_level_pays_nothing_for_the_other(algorithm, op):
    took = ALGORITHMS[algorithm]
    slow = {"between": 1.0, "network_hop": 1e9}
    assert took(op, replace(ONE_NODE, **slow), S) == took(op, ONE_NODE, S)
    slow = {"inside": 1e99, "node_hop": 1e9}
    assert took(op, replace(ONE_EACH, **slow), S) == took(op, replace(ONE_EACH, inside=1e99), S)
    assert took(op, GROUP, 2 * S) > took(op, GROUP, S) > took(op, ONE_NODE, S)


def test_who_wins_depends_on_the_size():
    group = Group(1024, 8, 128, 450e9, 292e9, 3.4e-6, 14e-6)
    took = {name: {size: one("all_reduce", group, size) for size in (1e5, 1e11)} for name, one in ALGORITHMS.items()}
    few, many = ({name: times[size] for name, times in took.items()} for size in (1e5, 1e11))
    assert few["in_switch"] < few["tree"] < few["hierarchical"] < few["flat"]
    assert many["in_switch"] == min(many.values()) and many["flat"] < many["hierarchical"]  # no hops to save


# stas00/ml-engineering@744d01e1 network/README.md l.923, l.935: 8 GiB, bus bandwidth in GB/s, by number of GPUs
NVLS = {450: {5: 414.2, 6: 435.6, 7: 460.0, 8: 473.1}, 900: {6: 778.2, 7: 811.2, 8: 838.0}}
RINGS = {450: {4: 363.3, 5: 364.4, 6: 365.1, 7: 365.7, 8: 365.6}, 900: {4: 673.8, 5: 677.8, 6: 677.8, 7: 680.5}}


@pytest.mark.parametrize(("algorithm", "published"), [("in_switch", NVLS), ("flat", RINGS)])
def test_a_node_is_as_fast_as_published(algorithm, published):
    """H200 (450 GB/s) and B200 (900): within a tenth, with the same share of the link bandwidth for both."""
    for wire, rows in published.items():
        for n, bus in rows.items():
            group = Group(n, n, 1, 1e9 * wire, 1.0, 3.4e-6, 14e-6)
            took = ALGORITHMS[algorithm]("all_reduce", group, 8 << 30)
            assert 2 * (n - 1) / n * (8 << 30) / took == approx(1e9 * bus, rel=0.1)


def test_a_switch_beats_the_wire_of_a_ring_the_more_ranks_there_are():
    """Published: 478.9 GB/s x 9/8 of 8 B200 are 466.9 x 7/6 of 6: (n+1)/n of the bytes, to a few per cent."""
    for rows in NVLS.values():
        wire = [bus * n / (2 * (n - 1)) * (n + 1) / n for n, bus in rows.items()]
        assert max(wire) / min(wire) < 1.03


MODEL = {"layers": 8, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 8192, "gpu": "H100"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_jobs_pay_for_the_algorithm_they_have(algorithm):
    c = values() | {"crowding": 0.0, "data_exposed": 1.0, "tensor_exposed": 1.0}
    job = job_of(MODEL | {"n_gpus": 64, "collectives": algorithm, "stack": "megatron-2020"})
    job = replace(job, gpu=replace(job.gpu, hop=5e-6), stack=replace(job.stack, bucket_mib=1e6))
    group = Group(64, 8, 8, 450e9, 3200e9 / 8 * 0.73, 5e-6, 5e-6)
    took = ALGORITHMS[algorithm]
    size = 2 * job.shape.parameters
    assert gradient_seconds(job, c) == approx(took("all_reduce", group, size))
    sharded = gradient_seconds(replace(job, zero=1), c)
    assert sharded == approx(took("reduce_scatter", group, size) + took("all_gather", group, size))
    split = replace(job, dp=8, tp=8)  # 2 all-reduces forward, 2 backward
    node = Group(8, 8, 1, 450e9, 1.0, 5e-6, 5e-6)
    assert tensor_seconds(split, c) == approx(4 * took("all_reduce", node, 2 * split.tokens * 1024))


LEAVES = MODEL | {"leaf": 4, "oversubscription": 4, "stack": "torchtitan"}


def test_only_groups_that_span_more_than_a_leaf_pay_for_its_uplinks():
    """4 nodes of 8 a leaf, 4:1. Without hops, the bytes between leaves take 4 times as long, and no others do."""
    c = values() | {"crowding": 0.0}
    size, links = 1e15, (450e9, 3200e9 / 8 * 0.73)
    for gpus, slower in ((8, 1), (32, 1), (64, 4)):
        job = job_of(LEAVES | {"n_gpus": gpus})
        inside, between = links[0] * NODE_SHARE, links[1] / slower
        expected = (gpus - 1) / gpus * size / (inside if gpus == 8 else min(inside, between))
        assert gather_seconds(job, gpus, 1, size, c) == approx(expected, rel=1e-6)
    strided = job_of(LEAVES | {"n_gpus": 64, "tp": 8})  # 8 ranks, one in each node: an eighth of a node's adapters
    assert gather_seconds(strided, 8, 8, size, c) == approx(7 / 8 * size / (links[1] / 8 / 4), rel=1e-6)


def test_all_to_all_and_hand_overs_pay_for_the_uplinks():
    many = {"experts": 64, "top_k": 2, "ep": 64, "n_gpus": 64, "micro_batch": 64, "zero": 0}
    slow, fast = (job_of(LEAVES | many | {"oversubscription": factor}) for factor in (4, 1))
    hop = 4e-6 * 4  # of both ways, forward and backward
    c = values()
    assert expert_seconds(slow, c) - hop == approx(4 * (expert_seconds(fast, c) - hop), rel=1e-3)
    slow, fast = (job_of(LEAVES | {"n_gpus": 64, "pp": 8, "oversubscription": factor}) for factor in (4, 1))
    assert hand_over(slow) - 14e-6 == approx(4 * (hand_over(fast) - 14e-6))
    inside = [hand_over(job_of(LEAVES | {"n_gpus": 32, "pp": 4, "oversubscription": factor})) for factor in (4, 1)]
    assert inside[0] == inside[1]


def test_the_fastest_protocol_is_taken():
    """Of 1,024 ranks: LL's hops for a byte, LL128's for 100 MiB, Simple's bytes for a large message."""
    links = (1024, 8, 128, 450e9, 292e9, None)
    hops = {size: collective_seconds("flat", "all_gather", size, False, *links) for size in (0, 100 << 20, 1 << 36)}
    byte = 1023 / 1024 / (450e9 * NODE_SHARE), 1023 / 1024 / 292e9
    assert hops[0] == approx(895 * 0.6e-6 + 128 * 2.7e-6)
    assert hops[100 << 20] == approx(895 * 1.9e-6 + 128 * 4e-6 + max(byte) * (100 << 20) / 0.92)
    assert hops[1 << 36] == approx(895 * 3.4e-6 + 128 * 14e-6 + max(byte) * (1 << 36))
    auto = collective_seconds("auto", "all_reduce", 25 << 20, True, *links)
    assert auto == min(collective_seconds(one, "all_reduce", 25 << 20, True, *links) for one in ("flat", "tree"))


def test_tokens_go_to_their_experts_over_each_gpus_own_adapter():
    """64 ranks, 8 a node: 56 of 64 parts leave the node over one adapter, 7 stay in it."""
    size = 1e9
    assert all_to_all(size, 64, 8, 8, 300e9, 36.5e9, None) == approx(size * 56 / 64 / 36.5e9 + 4e-6)
    assert all_to_all(size, 8, 8, 1, 300e9, 36.5e9, None) == approx(size * 7 / 8 / 300e9 + 1.9e-6)


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(ValueError, match="must be one of auto, flat, hierarchical, tree, in_switch, got 'star'"):
        job_of(MODEL | {"collectives": "star"})
    with pytest.raises(ValueError, match="in_switch needs switches that reduce, which nodes of A100-80GB do not have"):
        job_of(MODEL | {"gpu": "A100", "collectives": "in_switch"})
