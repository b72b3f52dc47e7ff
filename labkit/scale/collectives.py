"""The time of a collective by algorithm: latency and bandwidth inside a node and between nodes.

    n ranks, g of them in each of k nodes; an all-reduce of S bytes

                    hops in a node   between   byte time
    flat            2 (n - 1 - k)    2 k       2 (n-1)/n S at the slower link: one ring through all
    hierarchical    2 (g - 1)        2 (k-1)   2 (g-1)/g S in a node, then 2 (k-1)/k S between
    tree            2 log2 g         2 log2 k  2 S at the slower link: two trees, each half of S
    in the switch   2                2         (g+1)/g S in a node or S between, the longer of them
    auto            the fastest of flat, tree and, in one node, in the switch

All use the fastest of NCCL's protocols: Simple, LL128 (shorter hops, 0.92 of the bandwidth), LL.

A reduce-scatter or an all-gather takes half the time with rings and with two levels; trees do not
support them. For these two, reductions in the switch save hops, not bytes: a rank still receives,
or sends, all but its share. In an all-reduce in the switch, a rank sends S once and receives S
once, both at the same time.

Hockney, The communication challenge for MPP, 1994 (alpha and beta); Thakur, Rabenseifner, Gropp,
Optimization of Collective Communication Operations in MPICH, IJHPCA 2005, section 3 (rings);
Sanders, Speck, Traeff, Two-Tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan,
Parallel Computing 2009; Klenk et al., An In-Network Architecture for Accelerating Shared-Memory
Multiprocessor Collectives, ISCA 2020, and Graham et al., Scalable Hierarchical Aggregation
Protocol, COMHPC 2016 (switches in and between nodes).
"""

from dataclasses import dataclass
from functools import lru_cache
from math import log2

from labkit.ring_cost import ROUNDS, hops, share

# Achieved shares of the link bandwidth: bus bandwidths in stas00/ml-engineering, network/README.md.
NODE_SHARE = 0.79  # in a node's rings: A100 0.78, H200 0.81, B200 0.76
SWITCH_SHARE = 0.64  # with reductions in the node's switch (NVLS): H200 0.68, B200 0.60
NETWORK_SHARE = 0.73  # of the adapters between nodes: 36.5 of 50 GB/s, 4 nodes of B200
ADDED_UP = ("hopper", "blackwell")  # generations whose NVSwitches reduce: from NVLink 4 on
# Seconds of one step inside a node and between nodes: NCCL's own table, NVIDIA/nccl at 5067397c,
# src/graph/tuning.cc. Simple synchronizes once for a chunk; LL128 sends 8 bytes of flags in 128, LL
# a flag with each 4 bytes.
RINGS = {"Simple": (3.4e-6, 14e-6), "LL128": (1.9e-6, 4e-6), "LL": (6e-7, 2.7e-6)}
TREES = {"Simple": (4e-6, 14e-6), "LL128": (1.25e-6, 8.5e-6), "LL": (6e-7, 5e-6)}
NODE_HOP, NETWORK_HOP = RINGS["Simple"]
# Shares of the bandwidth in a node and between nodes that a protocol reaches: the same file, LL by
# its limits for H100 (141 and 35 GB/s of 450 and 292).
KEPT = {"Simple": (1.0, 1.0), "LL128": (0.92, 0.92), "LL": (0.31, 0.12)}
SWITCH_HOP = 12.5e-6  # to a node's switch, or from it: half of the latency of NVLS


@dataclass(frozen=True)
class Group:
    """The `ranks` of a process group, `members` of them in each of `nodes`.

    inside: link bandwidth of a rank to its node, byte/s. between: achieved byte/s of all members of
    a node to the network. node_hop, network_hop: seconds of a message.
    """

    ranks: int
    members: int
    nodes: int
    inside: float
    between: float
    node_hop: float
    network_hop: float

    @property
    def slower(self):
        """Byte/s of a ring through all ranks."""
        node = self.inside * NODE_SHARE
        return node if self.nodes == 1 else min(node, self.between)


def flat(op, group, size):
    """Return the seconds of one ring.

    size: bytes of the complete message, of all ranks. All algorithms have this signature.
    """
    crossed = min(group.nodes, group.ranks - 1) if group.nodes > 1 else 0
    alpha = (group.ranks - 1 - crossed) * group.node_hop + crossed * group.network_hop
    return ROUNDS[op] * alpha + share(op, group.ranks) * size / group.slower


def hierarchical(op, group, size):
    """Return the seconds of a ring in each node, then one ring per member between nodes."""
    g, k = group.members, group.nodes
    within = hops(op, g) * group.node_hop + share(op, g) * size / (group.inside * NODE_SHARE)
    across = hops(op, k) * group.network_hop + share(op, k) * size / group.between
    return within + across


def tree(op, group, size):
    """Return the seconds of a reduce and a broadcast along two trees, pipelined in small chunks."""
    if op != "all_reduce":
        return flat(op, group, size)
    latency = log2(group.members) * group.node_hop + log2(group.nodes) * group.network_hop
    return 2 * (latency + (group.ranks > 1) * size / group.slower)


def in_switch(op, group, size):
    """Return the seconds with reductions in the switches of node and network, pipelined."""
    g, k = group.members, group.nodes
    latency = ROUNDS[op] * ((g > 1) * SWITCH_HOP + (k > 1) * group.network_hop)
    if op == "all_reduce":
        inside = (g > 1) * (g + 1) / g / (group.inside * SWITCH_SHARE)
        return latency + size * max(inside, (k > 1) / group.between)
    inside = (g - 1) / g / (group.inside * NODE_SHARE)
    return latency + size * max(inside, (k - 1) / k / group.between)


ALGORITHMS = {"flat": flat, "hierarchical": hierarchical, "tree": tree, "in_switch": in_switch}
AUTO = "auto"  # the fastest that NCCL has without switches that reduce between nodes


@lru_cache(maxsize=4096)
def groups(algorithm, ranks, members, nodes, inside, between, hop):
    """Return the Group for each protocol. hop: measured seconds of a message; None: NCCL's."""
    if hop is not None:
        return (Group(ranks, members, nodes, inside, between, hop, hop),)
    protocols = TREES if algorithm == "tree" else RINGS
    if algorithm == "in_switch":
        protocols = {"Simple": RINGS["Simple"]}
    return tuple(
        Group(ranks, members, nodes, inside * KEPT[name][0], between * KEPT[name][1], *hops)
        for name, hops in protocols.items()
    )


def collective_seconds(algorithm, op, size, reduces, *links):
    """Return the seconds of the fastest protocol, and with "auto" of the fastest algorithm.

    reduces: whether the switches of the node reduce. links: the arguments of groups().
    """
    names = (algorithm,)
    if algorithm == AUTO:
        one_node = links[2] == 1
        names = ("flat", "tree") if op == "all_reduce" else ("flat",)
        names += ("in_switch",) if reduces and one_node else ()
    ways = ((ALGORITHMS[name], group) for name in names for group in groups(name, *links))
    return min(took(op, group, size) for took, group in ways)


def all_to_all(size, ranks, members, nodes, node, adapter, hop, crossing=1.0):
    """Return the seconds in which each rank sends `size` bytes, an equal share to every rank.

    Each GPU sends over its own adapter and, at the same time, inside its node. node, adapter:
    achieved byte/s of one rank. hop: measured seconds of a message; None: NCCL's. crossing: the
    share of the bytes for other nodes that is sent to them; the rest is copied there.
    """
    near, far = RINGS["LL128"] if hop is None else (hop, hop)
    copied = members if crossing < 1 else ranks  # of them, members - 1 parts move inside the node
    inside = (members - 1) / copied * size / node
    across = crossing * (ranks - members) / ranks * size / adapter
    return (far if nodes > 1 else near) + max(inside, across)


def check_algorithm(name, gpu):
    """Raise ValueError, one line, for an unknown algorithm or a GPU without the needed switch."""
    if name not in (AUTO, *ALGORITHMS):
        known = ", ".join((AUTO, *ALGORITHMS))
        raise ValueError(f"collectives must be one of {known}, got {name!r}")
    if name == "in_switch" and gpu.generation not in ADDED_UP:
        raise ValueError(
            f"collectives=in_switch needs switches that reduce, which nodes of {gpu.name} do not "
            "have: choose flat, hierarchical or tree, or H100 and later"
        )
