"""The time of a job's messages, axis by axis, and how much of it the stack hides.

    tp     all-gathers and reduce-scatters of activations, in every layer
    cp     keys and values around a ring
    ep     tokens to their experts and back: all-to-all, each GPU over its own adapter
    dp     gradients, in the buckets of the stack; FSDP's parameters, layer by layer
    pp     activations to the next stage

A group that spans more nodes than a leaf switch has the bandwidth of its adapters, divided by the
oversubscription of the uplinks. This assumes ranks in no order of leaves, so that most bytes cross
the uplinks. A ring in the order of leaves crosses each uplink once, and is faster.
What runs beside other work costs the longer of both, plus the share `exposed` of the shorter.
Narayanan et al., SC 2021, section 3; Rajbhandari et al., DeepSpeed-MoE, ICML 2022 (all-to-all).
"""

from math import ceil, log2

from labkit.scale.collectives import (
    ADDED_UP,
    NETWORK_SHARE,
    NODE_SHARE,
    RINGS,
    all_to_all,
    collective_seconds,
)
from labkit.scale.recomputation import repeated

TENSORS = 6  # of a layer: two norms, queries with keys and values, output, two of the network


def links(job, size, stride, c):
    """Return (ranks, members of a node, nodes, byte/s inside, between, hop) of a process group.

    It has `size` ranks, `stride` apart. Groups of a node share its adapters; bandwidth falls as
    the number of nodes doubles.
    """
    members = max(1, min(size, job.gpus_per_node // stride))
    nodes = ceil(size / members)
    share = min(1.0, members / job.gpus_per_node)
    network = 1e9 / 8 * job.network_gbps * share * NETWORK_SHARE
    network /= (1 + c["crowding"] * log2(nodes)) * uplinks(job, size * stride)
    return size, members, nodes, 1e9 * job.gpu.node_gbs, network, job.gpu.hop


def uplinks(job, gpus):
    """Return by how much the bandwidth between nodes is divided in a group over `gpus` GPUs."""
    nodes = ceil(gpus / job.gpus_per_node)
    return 1.0 if job.leaf is None or nodes <= job.leaf else job.oversubscription


def gather_seconds(job, size, stride, total, c, op="all_gather"):
    """Return seconds of an all-gather, reduce-scatter or all-reduce of `total` bytes in a group."""
    if size == 1:
        return 0.0
    reduces = job.gpu.generation in ADDED_UP
    return collective_seconds(job.collectives, op, total, reduces, *links(job, size, stride, c))


def beside(busy, other, exposed):
    """Return the seconds that other work adds to `busy` seconds beside which it runs.

    exposed: the share of the shorter that is not hidden.
    """
    return max(busy, other) + exposed * min(busy, other) - busy


def tensor_passes(job):
    """Count a layer's all-gathers and reduce-scatters over tp, for its 4 all-reduces and more.

    Half of them are around the network; whole experts without shared ones need none of these.
    """
    if job.tp == 1:
        return 0
    shape, halves = job.shape, 1.0
    if job.whole_experts and not shape.shared_ffn:
        halves -= (1 - shape.dense_layers / shape.layers) / 2
    return halves * (8 + 4 * repeated(job) + 2 * job.stack.sequence)


def tensor_seconds(job, c):
    """Return seconds of a layer's messages over tp."""
    whole = 2 * job.tokens * job.shape.hidden
    # without sequence parallelism an all-reduce replaces each reduce-scatter and all-gather
    op, a_pass = ("all_gather", 1) if job.stack.sequence else ("all_reduce", 1 / 2)
    split = a_pass * tensor_passes(job) * gather_seconds(job, job.tp, 1, whole, c, op)
    hidden = "_fused" if job.fused else ""
    return c[f"tensor_exposed{hidden}"] * split


def ring_seconds(job, c):
    """Return the seconds of a layer's keys and values over cp, in all passes."""
    keys = 2 * 2 * job.tokens * job.cp * job.shape.key_width / job.tp
    return (3 + repeated(job)) * gather_seconds(job, job.cp, job.tp, keys, c)


def expert_seconds(job, c):
    """Return the seconds in which a layer's tokens go to their experts and back, in all passes."""
    if job.ep == 1:
        return 0.0
    sent = 2 * job.tokens * job.shape.hidden * job.shape.top_k
    sent /= job.tp if job.stack.sequence else 1
    stride = 1 if job.whole_experts else job.tp * job.cp
    ranks, members, nodes, *_, hop = links(job, job.ep, stride, c)
    adapter = 1e9 / 8 * job.network_gbps / job.gpus_per_node * NETWORK_SHARE
    adapter /= uplinks(job, job.ep * stride)
    node = 1e9 * job.gpu.node_gbs * NODE_SHARE
    crossing = 1.0
    if job.stack.once_a_node:  # a token goes once to each node that has one of its experts
        crossing = nodes * (1 - (1 - 1 / nodes) ** job.shape.top_k) / job.shape.top_k
    once = all_to_all(sent, ranks, members, nodes, node, adapter, hop, crossing)
    return 2 * (2 + repeated(job)) * once


def unit_seconds(job, c):
    """Return the seconds of FSDP's messages for a layer and micro-batch.

    These are two all-gathers and a reduce-scatter. A stack that does not reshard under a pipeline
    gathers and reduces once a step.
    """
    gather, reduce = unit_messages(job, c)
    if job.pp > 1 and not job.stack.reshards:
        return (gather + reduce) / job.grad_accum
    return 2 * gather + reduce


def unit_messages(job, c):
    """Return the seconds of FSDP's (all-gather, reduce-scatter) of a layer that is not frozen."""
    alike = job.held_alike(job.shape.layer_parameters, job.shape.expert_weights)
    trained = job.held_alike(*job.trained_in_layer)
    width = 1 if job.dtype == "fp8" and job.stack.fp8_gathers else 2
    gather = reduce = 0.0
    for (parameters, ranks, stride), (changed, *_) in zip(alike, trained, strict=True):
        size, sent = ranks * job.cp, job.stack.gradient_bytes * changed / job.tp
        gather += gather_seconds(job, size, stride, width * parameters / job.tp, c)
        reduce += gather_seconds(job, size, stride, sent, c)
    return gather, reduce


def gradient_seconds(job, c, busy=0.0):
    """Return the exposed seconds of the gradients' messages over dp in a step.

    busy: seconds of a micro-batch's layers, forward and backward, beside which some stacks send:
    gradients in the backward, ZeRO's parameters in the next forward. FSDP's messages are part of
    its layers (unit_seconds); several replicas of it also all-reduce their shards.
    """
    messages = sum(part_seconds(job, c, *part) for part in summed_gradients(job))
    if job.zero in job.stack.hides_gradients:
        times = {0: 2 / 3, 2: job.grad_accum}.get(job.zero, 1)
        return beside(times * busy, messages, c["exposed"])
    return c["data_exposed"] * messages


def part_seconds(job, c, parameters, size, stride):
    """Return the seconds of the messages of `parameters` gradients of a rank in a step."""
    sent = job.stack.gradient_bytes * parameters
    if job.zero == 3:
        return gather_seconds(job, job.replicas, size * stride, sent / size, c, "all_reduce")
    size *= job.replicas
    count = messages_of(job, sent)
    if job.zero == 0:
        return count * gather_seconds(job, size, stride, sent / count, c, "all_reduce")
    reduce = count * gather_seconds(job, size, stride, sent / count, c)
    # ZeRO-2 keeps no complete gradients, so it reduces those of every micro-batch
    times = job.grad_accum if job.zero == 2 else 1
    return times * reduce + count * gather_seconds(job, size, stride, 2 * parameters / count, c)


def messages_of(job, size):
    """Return in how many messages a rank sends `size` bytes of gradients."""
    if job.stack.bucket_mib is None:
        return max(1, TENSORS * job.shape.layers / job.pp)
    return max(1, ceil(size / job.stack.bucket_mib / 2**20))


def summed_gradients(job):
    """Return (parameters, ranks, stride between ranks) of each part of a rank's gradients."""
    alike = job.held_alike(*all_trained(job))
    return [(p / job.tp / job.pp, ranks * job.cp, stride) for p, ranks, stride in alike]


def all_trained(job):
    """Return (parameters, of which in experts) that are trained in the whole model."""
    shape = job.shape
    return job.trained(shape.parameters, shape.layers * shape.expert_weights, shape.layers)


def crosses(job):
    """Return whether the pipeline's messages leave the node."""
    return job.pp > 1 and job.n_gpus > job.gpus_per_node


def hand_over(job):
    """Return the seconds to send a micro-batch's activations from one stage to the next."""
    if job.pp == 1:
        return 0.0
    inside = not crosses(job)
    share = job.network_gbps / 8 / job.gpus_per_node * NETWORK_SHARE / uplinks(job, job.n_gpus)
    bandwidth = 1e9 * (job.gpu.node_gbs * NODE_SHARE if inside else share)
    total = 2 * job.tokens * job.shape.hidden / (job.tp if job.stack.sequence else 1)
    hop = RINGS["Simple"][0 if inside else 1] if job.gpu.hop is None else job.gpu.hop
    return hop + total / bandwidth


def hand_over_seconds(job, c):
    """Return the exposed seconds of a step's hand-overs, both passes.

    A stage waits for 2 vpp of them in each micro-batch, and for pp - 1 more in each pass while the
    pipeline fills and drains.
    """
    if job.pp == 1:
        return 0.0
    once = hand_over(job) + 1e-3 * c["metadata"] * job.stack.balances
    hidden = job.stack.hides_hand_overs and job.vpp > 1
    steady = job.grad_accum * job.vpp * once * (c["exposed"] if hidden else 1)
    return 2 * (steady + (job.pp - 1) * once)
