"""Predict the time of a step: layers by roofline, messages by alpha-beta, pipeline and overlap.

    layer       products / (peak x efficiency by size)  +  bytes moved / bandwidth
                or the host's time to launch the layer, if that is longer
    messages    alpha-beta for each level of the network: collectives.py
    pipeline    sum of the stages / v + (micro-batches - 1/v) x the slowest stage (1F1B)
                ZB-H1: minus the gradients of the weights, W, twice, of each stage but the slowest
    step        pipeline + exposed gradient messages + the optimizer, which with offload also moves
                its states over the bus and back

A product with sides m, n, k reaches 1 / (1 + e/m + e/n + e/k) of the rate of a large one, because
tiles at its edges are partly empty. Process groups of one node share its network adapters.
Williams et al., Roofline, CACM 2009; Narayanan et al., Efficient Large-Scale Language Model
Training on GPU Clusters, SC 2021, section 3 (bubbles); Qi et al., Zero Bubble Pipeline Parallelism,
ICLR 2024, section 2 (ZB-H1); Dao, FlashAttention-2, 2023 (a backward of 2.5 forwards); Luo et al.,
Dissecting the NVIDIA Hopper Architecture, 2024 (the older instructions reach 0.62 of H100's peak).
"""

from dataclasses import dataclass
from math import ceil, log2

from labkit.scale.collectives import ALGORITHMS, NETWORK_SHARE, NODE_SHARE, Group, hop_seconds

OLD_INSTRUCTIONS = 0.62
REPEATED = {"none": 0, "full": 1, "half": 0.5, "selective": 0.25}  # of a forward
OPTIMIZER_BYTES = 30  # fp32 gradient, master and two moments, read; all but the first written; bf16


@dataclass(frozen=True)
class Step:
    """A predicted step. parts: {part: seconds} of the slowest stage. tokens_per_second: per GPU."""

    parts: dict
    tokens_per_second: float

    @property
    def seconds(self):
        return sum(self.parts.values())


def predict_step(job, c):
    """Predict the Step of a Job. c: constants, name to value."""
    by_part, head = layer_parts(job, c), head_seconds(job, c)
    layer = sum(by_part.values())
    work = [layers * layer + heads * head for layers, heads, _ in job.stages]
    slowest = work.index(max(work))
    layers, heads, _ = job.stages[slowest]
    bubble = (sum(work) - work[slowest]) / job.vpp
    if job.schedule == "zero_bubble":
        filled = [weights_seconds(job, has, c) for has in job.stages]
        bubble -= 2 * (sum(filled) - filled[slowest])
    parts = {name: job.grad_accum * layers * seconds for name, seconds in by_part.items()}
    parts["output layer"] = job.grad_accum * heads * head
    parts["hand-overs"] = job.grad_accum * 2 * job.vpp * hand_over(job)
    parts["bubble"] = bubble
    parts["gradients"] = gradient_seconds(job, c)
    parts["optimizer"] = optimizer_seconds(job)
    return Step(parts, job.step_tokens / job.n_gpus / sum(parts.values()))


def optimizer_seconds(job):
    """Return the seconds of one rank's optimizer step: memory traffic, and the bus with offload."""
    alike = job.held_alike(job.shape.parameters, job.shape.layers * job.shape.expert_weights)
    held = sum(parameters / (ranks if job.zero else 1) for parameters, ranks, _ in alike)
    traffic = OPTIMIZER_BYTES / job.gpu.memory_gbs + 2 * away(job) / job.gpu.host_gbs
    return held / job.tp / job.pp * traffic / 1e9


def away(job):
    """Return bytes per parameter in host memory: with offload, master copy and two moments."""
    return 0 if not job.offload else 4 if "pure" in job.precision else 12


def layer_seconds(job, c):
    """Return the seconds of forward and backward of one layer, for one micro-batch on one rank."""
    return sum(layer_parts(job, c).values())


def layer_parts(job, c):
    """Return layer_seconds by part: {part: seconds}."""
    parts = device_parts(job, c)
    parts["layers"] += max(0.0, host_seconds(job, c) - sum(parts.values()))  # the GPU waits
    nodes = ceil(job.tp / job.gpus_per_node)
    parts["messages of layers"] += tensor_passes(job) * (nodes - 1) * 1e-3 * c["straggle"]
    return parts


def product_seconds(job, c):
    """Return the seconds of a layer's matrix products in the forward of a micro-batch.

    In the backward, the gradients of the inputs take as long, and so do those of the weights.
    """
    shape, tokens = job.shape, job.tokens
    _, rate = of_job(job, job.dtype, c)
    edge = job.gpu.edge.get(job.dtype, c["edge"])
    products = 0.0
    met = tokens * shape.top_k / shape.experts * job.ep  # tokens of one expert
    for weights, side, rows in (
        (shape.attention_weights, shape.hidden / job.tp, tokens),
        (shape.layer_products - shape.attention_weights, shape.ffn / job.tp, met),
    ):
        edges = 1 + edge * (1 / shape.hidden + 1 / side + 1 / rows)
        products += 2 * weights / job.tp * tokens * edges / rate
    return products


def weights_seconds(job, has, c):
    """Return a stage's seconds of weight gradients for one micro-batch. has: one of Job.stages."""
    layers, heads, _ = has
    head = 2 * job.shape.head_weights / job.tp * job.tokens / of_job(job, "bf16", c)[1]
    return layers * product_seconds(job, c) + heads * head


def device_seconds(job, c):
    """Return the seconds of forward and backward of one layer if the host launches in time."""
    return sum(device_parts(job, c).values())


def device_parts(job, c):
    """Return device_seconds by part: {part: seconds}."""
    shape, tokens = job.shape, job.tokens
    generation, rate = of_job(job, job.dtype, c)
    products = product_seconds(job, c)
    attention = 0.0
    moved = shape.moved_bytes() * (1 if job.compiled else c["traffic"])
    if job.stack.flash:
        peak = 1e12 * job.gpu.tflops["bf16"] * c["attention"]
        peak *= OLD_INSTRUCTIONS if generation == "hopper" else 1
        attention = shape.attention_flops(job.context) / job.tp * tokens / peak
    else:
        products += 2 * shape.attention_flops(job.context) / job.tp * tokens / rate
        moved += 12 * shape.heads * job.context  # scores: written, masked, softmax, dropout, read
    split = job.tp if sequence_split(job) else (job.tp + 1) / 2
    moving = moved * tokens / split / (1e9 * job.gpu.memory_gbs)
    forward = products + attention + moving
    backward = 2 * products + 2.5 * attention + 2 * moving
    spared = 0.0
    if job.stack.stops_early:  # the last product's output is not needed again
        spared = products * shape.top_k * shape.hidden * shape.ffn / shape.layer_products
    parts = {
        "layers": forward + backward,
        "messages of layers": tensor_seconds(job, c),
        "recomputation": REPEATED[job.recompute] * (forward - spared),
        "gathering parameters": 0.0,
    }
    if job.zero == 3:
        busy, gathers = sum(parts.values()), unit_seconds(job, c)
        overlapped = max(busy, gathers) + c["exposed"] * min(busy, gathers)
        parts["gathering parameters"] = overlapped - busy
    return parts


def of_job(job, dtype, c):
    """Return (generation, FLOP/s of large products); generations without a fit get the peak."""
    generation = job.gpu.generation.replace("blackwell", "hopper")
    return generation, job.gpu.peak(dtype) * c.get(f"matmul_{generation}", 1.0)


def crosses(job):
    """Return whether the pipeline's messages leave the node."""
    return job.pp > 1 and job.n_gpus > job.gpus_per_node


def host_seconds(job, c):
    """Return the host's seconds to launch a layer; 0 except for eager stacks that split layers."""
    if not job.stack.balances:
        return 0.0
    more = c["contention"] * job.tp if crosses(job) and job.tp > 1 else 0.0
    return 1e-3 * (c["host"] * (1 if job.tp > 1 else 0.5) + more)


def head_seconds(job, c):
    """Return the seconds of forward and backward of the output layer and the loss."""
    _, rate = of_job(job, "bf16", c)
    flops = 6 * job.shape.head_weights / job.tp * job.tokens
    moved = c["logits"] * job.shape.vocab / job.tp * job.tokens
    return flops / rate + moved / (1e9 * job.gpu.memory_gbs)


def sequence_split(job):
    """Return whether sequence parallelism is used along tp."""
    return job.stack.sequence


def group(job, size, stride, c):
    """Return the Group of `size` ranks, `stride` apart; its bandwidth falls as its nodes double."""
    members = max(1, min(size, job.gpus_per_node // stride))
    nodes = ceil(size / members)
    share = min(1.0, members / job.gpus_per_node)
    network = 1e9 / 8 * job.network_gbps * share * NETWORK_SHARE
    network /= 1 + c["crowding"] * log2(nodes)
    return Group(size, members, nodes, 1e9 * job.gpu.node_gbs, network, *hop_seconds(job.gpu))


def gather_seconds(job, size, stride, total, c, op="all_gather"):
    """Return seconds of an all-gather, reduce-scatter or all-reduce of `total` bytes in a group."""
    if size == 1:
        return 0.0
    return ALGORITHMS[job.collectives](op, group(job, size, stride, c), total)


def tensor_passes(job):
    """Count a layer's all-gathers and reduce-scatters over tp, for its 4 all-reduces and more."""
    if job.tp == 1:
        return 0
    return 8 + 4 * REPEATED[job.recompute] + 2 * sequence_split(job)


def tensor_seconds(job, c):
    """Return seconds of a layer's messages: over tp, keys and values over cp, tokens over ep."""
    whole = 2 * job.tokens * job.shape.hidden
    # without sequence parallelism an all-reduce replaces each reduce-scatter and all-gather
    op, a_pass = ("all_gather", 1) if sequence_split(job) else ("all_reduce", 1 / 2)
    split = a_pass * tensor_passes(job) * gather_seconds(job, job.tp, 1, whole, c, op)
    keys = 2 * 2 * job.tokens * job.cp * job.shape.key_width / job.tp
    ring = (3 + REPEATED[job.recompute]) * gather_seconds(job, job.cp, job.tp, keys, c)
    sent = whole * job.shape.top_k / (job.tp if sequence_split(job) else 1)
    there_and_back = 2 * (2 + REPEATED[job.recompute])
    experts = there_and_back * gather_seconds(job, job.ep, job.tp * job.cp, sent, c)
    return c["tensor_exposed"] * split + ring + experts


def unit_seconds(job, c):
    """Return the seconds of FSDP's messages for a layer and micro-batch.

    These are two all-gathers and a reduce-scatter.
    """
    alike = job.held_alike(job.shape.layer_parameters, job.shape.expert_weights)
    return 3 * sum(
        gather_seconds(job, ranks * job.cp, stride, 2 * parameters / job.tp, c)
        for parameters, ranks, stride in alike
    )


def gradient_seconds(job, c):
    """Return the exposed seconds of the gradients' messages over dp in a step.

    ZeRO-2 keeps no complete gradients, so it reduces those of every micro-batch. FSDP's messages
    are part of its layers (unit_seconds); several replicas of it also all-reduce their shards.
    """
    once = 0.0
    for total, size, stride in summed_gradients(job):
        if job.zero == 3:
            once += gather_seconds(job, job.replicas, size * stride, total / size, c, "all_reduce")
        elif job.zero == 0:
            once += gather_seconds(job, size * job.replicas, stride, total, c, "all_reduce")
        else:
            times = 1 + (job.grad_accum if job.zero == 2 else 1)
            once += times * gather_seconds(job, size * job.replicas, stride, total, c)
    return c["data_exposed"] * once


def summed_gradients(job):
    """Return (bytes, ranks, stride between ranks) of each part of a rank's gradients."""
    width = job.stack.gradient_bytes
    alike = job.held_alike(job.shape.parameters, job.shape.layers * job.shape.expert_weights)
    return [(width * p / job.tp / job.pp, ranks * job.cp, stride) for p, ranks, stride in alike]


def hand_over(job):
    """Return the seconds to send a micro-batch's activations from one stage to the next."""
    if job.pp == 1:
        return 0.0
    inside = job.n_gpus <= job.gpus_per_node
    share = job.network_gbps / 8 / job.gpus_per_node * NETWORK_SHARE
    bandwidth = 1e9 * (job.gpu.node_gbs * NODE_SHARE if inside else share)
    total = 2 * job.tokens * job.shape.hidden / (job.tp if sequence_split(job) else 1)
    return hop_seconds(job.gpu)[0 if inside else 1] + total / bandwidth
