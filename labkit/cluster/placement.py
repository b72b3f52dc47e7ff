"""Choose the nodes of a gang, and predict how much slower a job runs that spans nodes and leaves.

             spine                      a leaf switch joins `leaf` nodes; its uplinks have
           /       \\                    1 / oversubscription of the bandwidth of its nodes
       leaf 0      leaf 1               a node has `gpus_per_node` GPUs on fast links, and
       /    \\      /    \\               adapters, which its GPUs share equally
    node 0 .. node 7  node 8 ..         a placement: {node: GPUs}

    policy               a gang of 4 on nodes with 2, 8, 4, 8 free GPUs
    round_robin          {0: 1, 1: 1, 2: 1, 3: 1}   one GPU of each node in turn
    first_fit            {0: 2, 1: 2}               all that is free, in the order of the nodes
    single_node_first    {1: 4}                     the first node that holds all of it
    best_fit_by_leaf     {2: 4}                     the node or leaf with the least to spare

A policy is a function (inventory, gpus) -> a placement, or None to wait. It changes nothing. A gang
gets all of its GPUs at once or none: Ousterhout, Scheduling Techniques for Concurrent Systems,
ICDCS 1982. Nodes are kept in buckets by their number of free GPUs, so a policy does not look at
each node. Coffman, Garey, Johnson, Approximation Algorithms for Bin Packing, 1996 (best fit);
Jeon et al., Analysis of Large-Scale Multi-Tenant GPU Clusters, ATC 2019 (locality and waiting).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log2

from labkit.scale import constants
from labkit.scale.collectives import ADDED_UP, NETWORK_SHARE, collective_seconds
from labkit.scale.cost import predict_step
from labkit.scale.hardware import find_gpu
from labkit.scale.job_config import job_of
from labkit.scale.messages import all_trained, beside, messages_of
from labkit.scale.model_row import row_of, whole

BACKWARD = 2 / 3  # of a step's computing: DDP sends gradients meanwhile


@dataclass(frozen=True)
class Topology:
    """Equal nodes below leaf switches, below one spine.

    leaf: nodes of a leaf switch. gpu: a name of labkit.scale.hardware. network_gbps: 10^9 bit/s of
    a node, all adapters together; None: the usual figure of that GPU. oversubscription: bandwidth
    of a leaf's nodes, as a multiple of its uplinks. Raises ValueError, one line.
    """

    nodes: int
    leaf: int = 8
    gpus_per_node: int = 8
    gpu: str = "V100-32GB"
    network_gbps: float | None = None
    oversubscription: float = 1.0

    def __post_init__(self):
        for name in ("nodes", "leaf", "gpus_per_node"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not self.oversubscription >= 1:
            raise ValueError(f"oversubscription must be at least 1, got {self.oversubscription!r}")
        if self.network_gbps is not None and not self.network_gbps > 0:
            raise ValueError(f"network_gbps must be positive or None, got {self.network_gbps!r}")
        find_gpu(self.gpu)

    @property
    def gpus(self):
        return self.nodes * self.gpus_per_node

    @cached_property
    def leaves(self):
        """The nodes of each leaf as the bits of a number: [leaves]."""
        every = (1 << self.nodes) - 1
        one = (1 << self.leaf) - 1
        return [every & (one << start) for start in range(0, self.nodes, self.leaf)]

    def leaves_of(self, placement):
        """Return the numbers of the leaves that a placement uses: a set."""
        return {node // self.leaf for node in placement}


class Inventory:
    """The free GPUs of a cluster. free: of each node, [nodes]; total: of all nodes.

    of_leaf: of each leaf. buckets: the nodes with 0, 1, ... free GPUs, as the bits of a number.
    cursor: the node after the last one that was taken. Nodes that are down have no free GPUs.
    """

    def __init__(self, topology, free=None):
        self.topology = topology
        self.free = [topology.gpus_per_node] * topology.nodes if free is None else list(free)
        self.cursor = 0
        self.total = sum(self.free)
        self.of_leaf = [0] * len(topology.leaves)
        self.buckets = [0] * (topology.gpus_per_node + 1)
        for node, count in enumerate(self.free):
            self.of_leaf[node // topology.leaf] += count
            self.buckets[count] |= 1 << node

    def copy(self):
        other = Inventory(self.topology, self.free)
        other.cursor = self.cursor
        return other

    def set_free(self, node, count):
        """Set the number of free GPUs of a node."""
        change = count - self.free[node]
        self.buckets[self.free[node]] ^= 1 << node
        self.buckets[count] |= 1 << node
        self.free[node] = count
        self.of_leaf[node // self.topology.leaf] += change
        self.total += change

    def take(self, placement):
        """Take the GPUs of a placement. Raises ValueError for GPUs that are not free."""
        for node, count in placement.items():
            if not 0 < count <= self.free[node]:
                raise ValueError(
                    f"a placement takes {count} GPUs of node {node}, which has "
                    f"{self.free[node]} free"
                )
        for node, count in placement.items():
            self.set_free(node, self.free[node] - count)
            self.cursor = (node + 1) % self.topology.nodes

    def give(self, placement):
        """Return the GPUs of a placement."""
        for node, count in placement.items():
            self.set_free(node, self.free[node] + count)

    def at_least(self, gpus):
        """Return the nodes with at least that many free GPUs, as bits."""
        found = 0
        for bucket in self.buckets[gpus:]:
            found |= bucket
        return found

    def most_free(self, among, count):
        """Return up to `count` of the nodes in `among` (bits), those with most free GPUs first."""
        found = []
        for bucket in self.buckets[:0:-1]:
            rest = bucket & among
            while rest and len(found) < count:
                found.append(lowest(rest))
                rest &= rest - 1
        return found


def lowest(bits):
    """Return the number of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1


def numbers(bits):
    """Yield the numbers of the bits that are set, from the lowest."""
    while bits:
        yield lowest(bits)
        bits &= bits - 1


def fill(inventory, nodes, gpus):
    """Return the placement that takes all free GPUs of the nodes in order, None if too few."""
    found = {}
    for node in nodes:
        found[node] = min(inventory.free[node], gpus)
        gpus -= found[node]
        if not gpus:
            return found
    return None


def round_robin(inventory, gpus):
    """Take one GPU of each node in turn, from where the last gang ended."""
    if gpus > inventory.total:
        return None
    found, node = {}, inventory.cursor
    while gpus:
        if inventory.free[node] > found.get(node, 0):
            found[node] = found.get(node, 0) + 1
            gpus -= 1
        node = (node + 1) % inventory.topology.nodes
    return found


def first_fit(inventory, gpus):
    """Take all free GPUs in the order of the nodes."""
    if gpus > inventory.total:
        return None
    return fill(inventory, numbers(inventory.at_least(1)), gpus)


def single_node_first(inventory, gpus):
    """Take the first node that holds the gang, else the nodes with most free GPUs."""
    if holds := inventory.at_least(gpus):
        return {lowest(holds): gpus}
    if gpus > inventory.total:
        return None
    every = inventory.topology.nodes
    return fill(inventory, inventory.most_free((1 << every) - 1, every), gpus)


def best_fit_by_leaf(inventory, gpus):
    """Use the fewest nodes, the fewest leaves, and among those the ones with the least to spare.

    It waits rather than use more nodes than the gang needs; it does not wait for one leaf.
    """
    if gpus > inventory.total:
        return None
    topology = inventory.topology
    for bucket in inventory.buckets[gpus:]:
        if bucket:
            return {lowest(bucket): gpus}
    needed = ceil(gpus / topology.gpus_per_node)
    order = sorted(range(len(topology.leaves)), key=inventory.of_leaf.__getitem__)
    if 1 < needed <= topology.leaf:
        for leaf in order:  # the one with the fewest free GPUs that holds the gang
            if inventory.of_leaf[leaf] >= gpus:
                nodes = inventory.most_free(topology.leaves[leaf], needed)
                if found := fill(inventory, nodes, gpus):
                    return found
    if needed == 1:
        return None
    return fill(inventory, empty_nodes(inventory, needed), gpus)


def empty_nodes(inventory, needed):
    """Return up to `needed` nodes whose GPUs are all free, on the fewest leaves.

    The largest leaves come first; the rest goes to the leaf that has the least to spare.
    """
    found = []
    left = [leaf & inventory.buckets[-1] for leaf in inventory.topology.leaves]
    while left and len(found) < needed:
        rest = needed - len(found)
        holds = [leaf for leaf in left if leaf.bit_count() >= rest]
        leaf = min(holds, key=int.bit_count) if holds else max(left, key=int.bit_count)
        left.remove(leaf)
        found += list(numbers(leaf))[:rest]
    return found


POLICIES = {
    "round robin": round_robin,
    "first fit": first_fit,
    "single node first": single_node_first,
    "best fit by leaf": best_fit_by_leaf,
}


class Slowdown:
    """How much longer a data-parallel job takes on a placement than on the best one.

    slowdown(placement) >= 1. The best: the fewest nodes, equal parts, the fewest leaves, and no
    other job. A step computes, all-reduces its gradients once, and hides part of that behind the
    last backward, as torch's DDP does; labkit.scale predicts both. Assumed: all jobs train this
    model with the same global batch; a job gets the share of a node's adapters that it has of its
    GPUs, whether the other GPUs send or not; a leaf's uplinks are shared in the same way; the
    slowest part of the ring sets its speed.

    model: a name of `./scripts/lab plan --list-models`. batch: sequences of a step of the whole
    job, at least one a GPU; None: the published one of the model. micro_batch: the most sequences
    of a GPU at a time. Raises ValueError for an unknown model, and one without a published batch.
    """

    def __init__(self, topology, model="bert-large", batch=None, micro_batch=8):
        self.topology, self.micro_batch = topology, micro_batch
        self.constants = constants.values()
        row = row_of(model)
        self.batch = batch or whole(row, "global_batch")
        if not self.batch:
            raise ValueError(f"{model} has no published batch: pass batch, in sequences")
        bf16 = find_gpu(topology.gpu).has("bf16")
        alone = {"gpu": topology.gpu, "n_gpus": 1, "gpus_per_node": 1, "dp": 1, "zero": 0}
        alone |= {"stack": "torch-fsdp", "precision": "bf16" if bf16 else "fp16"}
        self.job = job_of(row | alone | {"micro_batch": 1, "grad_accum": 1})
        parameters, _ = all_trained(self.job)
        self.gradient_bytes = self.job.stack.gradient_bytes * parameters
        self.found = {}

    def __call__(self, placement):
        gpus = sum(placement.values())
        leaves = len(self.topology.leaves_of(placement))
        key = gpus, len(placement), min(placement.values()), leaves
        if key not in self.found:
            self.found[key] = max(1.0, self.step_seconds(*key) / self.best_seconds(gpus))
        return self.found[key]

    def best_seconds(self, gpus):
        """Return the seconds of a step on the best placement of that many GPUs."""
        nodes = ceil(gpus / self.topology.gpus_per_node)
        return self.step_seconds(gpus, nodes, gpus // nodes, ceil(nodes / self.topology.leaf))

    def step_seconds(self, gpus, nodes, members, leaves):
        """Return the seconds of a step. members: GPUs of the job on the node with the fewest."""
        sequences = max(1, round(self.batch / gpus))
        micro = min(self.micro_batch, sequences)
        job = replace(self.job, micro_batch=micro, grad_accum=ceil(sequences / micro))
        compute = predict_step(job, self.constants).seconds
        if gpus == 1:
            return compute
        hidden = BACKWARD * compute / job.grad_accum
        messages = self.message_seconds(gpus, nodes, members, leaves)
        return compute + beside(hidden, messages, self.constants["exposed"])

    def message_seconds(self, gpus, nodes, members, leaves):
        """Return the seconds of the all-reduces of a step's gradients."""
        count = messages_of(self.job, self.gradient_bytes)
        links = gpus, members, nodes, 1e9 * self.job.gpu.node_gbs
        links += self.bandwidth(nodes, members, leaves), self.job.gpu.hop
        size = self.gradient_bytes / count
        reduces = self.job.gpu.generation in ADDED_UP
        return count * collective_seconds("auto", "all_reduce", size, reduces, *links)

    def bandwidth(self, nodes, members, leaves):
        """Return the byte/s between nodes that the members of a node achieve together."""
        topology = self.topology
        gbps = topology.network_gbps or self.job.gpu.network_gbps * topology.gpus_per_node / 8
        share = min(1.0, members / topology.gpus_per_node)
        crowding = 1 + self.constants["crowding"] * log2(nodes)
        uplinks = topology.oversubscription if leaves > 1 else 1
        return 1e9 / 8 * gbps * share * NETWORK_SHARE / crowding / uplinks
