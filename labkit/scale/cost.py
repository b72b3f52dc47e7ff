"""Predict the time of a step: layers by roofline, messages by alpha-beta, pipeline and overlap.

    layer       products / (peak x efficiency by size)  +  bytes moved / bandwidth
                or the host's time to launch the layer, if that is longer
    messages    alpha-beta for each level of the network: messages.py, collectives.py
    pipeline    sum of the stages / v + (micro-batches - 1/v) x the slowest stage (1F1B)
                ZB-H1: minus the gradients of the weights, W, twice, of each stage but the slowest
    hand-overs  of each micro-batch, and while the pipeline fills and drains
    frozen      a layer before all that are trained costs its forward, and keeps nothing
    images      the layers of an image encoder, before those of the decoder
    step        pipeline + exposed gradient messages + the optimizer, which with offload also moves
                its states over the bus and back

A product with sides m, n, k reaches 1 / (1 + e/m + e/n + e/k) of the rate of a large one, because
tiles at its edges are partly empty. Process groups of one node share its network adapters.
Williams et al., Roofline, CACM 2009; Narayanan et al., Efficient Large-Scale Language Model
Training on GPU Clusters, SC 2021, section 3 (bubbles); Qi et al., Zero Bubble Pipeline Parallelism,
ICLR 2024, section 2 (ZB-H1); Dao, FlashAttention-2, 2023 (a backward of 2.5 forwards); Luo et al.,
Dissecting the NVIDIA Hopper Architecture, 2024 (the older instructions reach 0.62 of H100's peak).
"""

from dataclasses import dataclass, replace
from math import ceil

from labkit.scale.messages import (
    all_trained,
    beside,
    crosses,
    expert_seconds,
    gradient_seconds,
    hand_over_seconds,
    ring_seconds,
    tensor_passes,
    tensor_seconds,
    unit_messages,
    unit_seconds,
)
from labkit.scale.recomputation import of_attention, repeated

OLD_INSTRUCTIONS = 0.62
CAST = 4  # bytes an input of a product in fp8: read in bf16, written, and written transposed
LAUNCHED = 6  # products of an expert: two in the forward, four in the backward
ROUTED = 60  # kernels of routing, sorting and counting a layer's tokens, forward and backward
PERMUTED = 8  # bytes a routed element: in bf16 read and written, to its expert and back
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
    by_part, head = mean_parts(job, c), head_seconds(job, c)
    layer = sum(by_part.values())
    work = [layers * layer + heads * head for layers, heads, _ in job.stages]
    images = image_seconds(job, c)
    work[0] += images
    slowest = work.index(max(work))
    layers, heads, _ = job.stages[slowest]
    bubble = (sum(work) - work[slowest]) / job.vpp
    if job.schedule == "zero_bubble":
        filled = [weights_seconds(job, has, c) for has in job.stages]
        bubble -= 2 * (sum(filled) - filled[slowest])
    parts = {name: job.grad_accum * layers * seconds for name, seconds in by_part.items()}
    parts["output layer"] = job.grad_accum * heads * head
    if images:  # on one stage: stacks.py
        parts["image encoder"] = job.grad_accum * images
    parts["hand-overs"] = hand_over_seconds(job, c)
    parts["bubble"] = bubble
    busy = layers * layer if job.last is None else job.last * layer_seconds(job, c)
    parts["gradients"] = gradient_seconds(job, c, busy)
    parts["optimizer"] = optimizer_seconds(job) + 1e-3 * c["once"] * job.stack.balances
    return Step(parts, job.step_tokens / job.n_gpus / sum(parts.values()))


def image_job(job):
    """Return the job of a job's image encoder alone, with its images as sequences."""
    encoder = job.shape.vision
    alone = {"shape": encoder, "context": encoder.positions, "documents": None}
    alone |= {"lora": 0, "last": None, "only_decoder": False}
    return replace(job, micro_batch=job.micro_batch * job.shape.images, **alone)


def image_seconds(job, c):
    """Return the seconds of the image encoder and its projector for one micro-batch.

    A frozen encoder has only its forward; 0 without an encoder.
    """
    if not job.shape.vision:
        return 0.0
    alone = image_job(job)
    layer = frozen_parts(alone, c) if job.part else layer_parts(alone, c)
    passes = 1 if job.part else 3
    tokens = alone.micro_batch * alone.shape.tokens
    patches = passes * alone.tokens * alone.shape.patch_weights
    flops = 2 * (patches + 3 * tokens * alone.shape.projector) / job.tp
    return alone.shape.layers * sum(layer.values()) + flops / of_job(job, job.dtype, c)


def optimizer_seconds(job):
    """Return the seconds of one rank's optimizer step: memory traffic, and the bus with offload."""
    alike = job.held_alike(*all_trained(job))
    held = sum(parameters / (ranks if job.zero else 1) for parameters, ranks, _ in alike)
    traffic = OPTIMIZER_BYTES / job.gpu.memory_gbs + 2 * away(job) / job.gpu.host_gbs
    return held / job.tp / job.pp * traffic / 1e9


def away(job):
    """Return bytes per parameter in host memory: with offload, master copy and two moments."""
    return 0 if not job.offload else 4 if "pure" in job.precision else 12


def layer_seconds(job, c):
    """Return the seconds of forward and backward of one layer, for one micro-batch on one rank."""
    return sum(layer_parts(job, c).values())


def mean_parts(job, c):
    """Return the seconds of a layer by part, the mean over those that are frozen and the others."""
    whole = layer_parts(job, c)
    if job.last is None:
        return whole
    frozen, share = frozen_parts(job, c), job.last / job.shape.layers
    return {name: share * whole[name] + (1 - share) * frozen[name] for name in whole}


def frozen_parts(job, c):
    """Return layer_parts of a frozen layer before all that are trained: its forward alone.

    Its messages are those that recomputation of the whole layer would add.
    """
    once, again = (replace(job, recompute=kind) for kind in ("none", "full"))
    tensor, ring, experts = (
        seconds(again, c) - seconds(once, c)
        for seconds in (tensor_seconds, ring_seconds, expert_seconds)
    )
    attention, moving, _ = other_seconds(job, c)
    layers = product_seconds(job, c) + attention + moving + expert_launches(job, c) / 3
    if job.stack.fused:
        ring = beside(attention, ring, c["exposed"])
    if job.stack.hides_experts:
        experts = beside(layers, experts, c["exposed"])
    messages = tensor + ring + experts
    gathered = unit_messages(job, c)[0] if job.zero == 3 else 0.0
    return {
        "layers": layers,
        "messages of layers": messages,
        "recomputation": 0.0,
        "gathering parameters": beside(layers + messages, gathered, c["exposed"]),
    }


def layer_parts(job, c):
    """Return layer_seconds by part: {part: seconds}."""
    parts = device_parts(job, c)
    parts["layers"] += beside(sum(parts.values()), host_seconds(job, c), c["waits"])
    nodes = ceil(job.tp / job.gpus_per_node)
    parts["messages of layers"] += tensor_passes(job) * (nodes - 1) * 1e-3 * c["straggle"]
    return parts


def product_seconds(job, c):
    """Return the seconds of a layer's matrix products in the forward of a micro-batch.

    In the backward, the gradients of the inputs take as long, and so do those of the weights.
    """
    shape, tokens = job.shape, job.tokens
    rate = of_job(job, job.dtype, c)
    edge = job.gpu.edge.get(job.dtype, c["edge"])
    products = 0.0
    met = tokens * shape.top_k / shape.experts * job.ep  # tokens of one expert
    wide = shape.ffn / job.tp
    if job.whole_experts:
        met, wide = met / job.tp, shape.ffn
    for weights, side, rows in (
        (shape.attention_weights, shape.hidden / job.tp, tokens),
        (shape.layer_products - shape.attention_weights, wide, met),
    ):
        edges = 1 + edge * (1 / shape.hidden + 1 / side + 1 / rows)
        products += 2 * weights / job.tp * tokens * edges / rate
    return products


def weights_seconds(job, has, c):
    """Return a stage's seconds of weight gradients for one micro-batch. has: one of Job.stages."""
    if job.lora:  # those of the adapters are too short to fill a bubble
        return 0.0
    layers, heads, _ = has
    head = 2 * job.shape.head_weights / job.tp * job.tokens / of_job(job, "bf16", c)
    return layers * product_seconds(job, c) + heads * head


def device_seconds(job, c):
    """Return the seconds of forward and backward of one layer if the host launches in time."""
    return sum(device_parts(job, c).values())


def device_parts(job, c):
    """Return device_seconds by part: {part: seconds}."""
    products = product_seconds(job, c)
    attention, moving, scores = other_seconds(job, c)
    forward = products + attention + moving
    launches = expert_launches(job, c) + adapter_seconds(job, c)
    passes = 2 if job.lora else 3  # a frozen weight has no gradient
    parts = {
        "layers": passes * products + 3.5 * attention + 3 * moving + launches,
        "messages of layers": tensor_seconds(job, c),
        "recomputation": repeated(job) * (forward - spared_seconds(job, products)),
        "gathering parameters": 0.0,
    }
    if of_attention(job):
        parts["recomputation"] = attention + scores
    ring, experts = ring_seconds(job, c), expert_seconds(job, c)
    if job.stack.fused:  # a chunk of keys travels beside the attention to the one before
        ring = beside(3.5 * attention, ring, c["exposed"])
    if job.stack.hides_experts:  # beside the layers of another micro-batch
        experts = beside(parts["layers"], experts, c["exposed"])
    parts["messages of layers"] += ring + experts
    if job.zero == 3:
        busy = sum(parts.values())
        parts["gathering parameters"] = beside(busy, unit_seconds(job, c), c["exposed"])
    return parts


def other_seconds(job, c):
    """Return the seconds of a layer's forward in attention's products, memory traffic, and scores.

    The last are part of the memory traffic: scores that attention stores if it is not fused.
    """
    shape, tokens = job.shape, job.tokens
    flops = shape.attention_flops(job.reach) / job.tp * tokens
    traffic = "traffic_fused" if job.fused else "traffic"
    scores = 0 if job.flash else 12 * shape.heads * job.context
    moved = shape.moved_bytes() * (1 if job.compiled else c[traffic])
    if shape.experts > 1:
        moved += PERMUTED * shape.hidden * shape.top_k
    if job.dtype == "fp8" and "fp8" in job.gpu.tflops:
        moved += CAST * (3 * shape.hidden + shape.ffn * shape.top_k)
    peak = 1e12 * job.gpu.tflops["bf16"]
    if job.fused:
        attention = flops / (peak * c["attention_fused"])
    elif job.flash:
        peak *= OLD_INSTRUCTIONS if generation(job) == "hopper" else 1
        attention = flops / (peak * c["attention"])
    else:
        attention = 2 * flops / of_job(job, job.dtype, c)
        moved += scores  # written, masked, softmax, dropout, read
    split = job.tp if job.stack.sequence else (job.tp + 1) / 2
    each = tokens / split / (1e9 * job.gpu.memory_gbs)
    return attention, moved * each, scores * each


def spared_seconds(job, products):
    """Return the seconds of a forward that its recomputation does not need.

    The output of the last product is not needed again.
    """
    if not job.stack.stops_early:
        return 0.0
    return products * job.shape.top_k * job.shape.hidden * job.shape.ffn / job.shape.layer_products


def adapter_seconds(job, c):
    """Return the seconds of a layer's LoRA adapters, forward and backward; 0 without LoRA.

    Their products are as narrow as the rank, so that most of a tile is empty.
    """
    if not job.lora:
        return 0.0
    parameters, experts = job.shape.adapters(job.lora)
    met = parameters - experts * (1 - job.shape.top_k / job.shape.experts)
    edges = 1 + job.gpu.edge.get("bf16", c["edge"]) / job.lora
    return 6 * met / job.tp * job.tokens * edges / of_job(job, "bf16", c)


def expert_launches(job, c):
    """Return the seconds to launch a layer's routing and the products of a rank's experts."""
    if job.shape.experts == 1:
        return 0.0
    return 1e-6 * c["launch"] * (ROUTED + LAUNCHED * job.shape.experts / job.ep)


def generation(job):
    """Return the GPU's generation in the names of constants: that of Hopper for later ones."""
    return job.gpu.generation.replace("blackwell", "hopper")


def of_job(job, dtype, c):
    """Return the FLOP/s of large products; generations without a fit get the peak."""
    name = "matmul_fused" if job.fused else f"matmul_{generation(job)}"
    return job.gpu.peak(dtype) * c.get(name, 1.0)


def host_seconds(job, c):
    """Return the host's seconds to launch a layer; 0 except for eager stacks that split layers."""
    if not job.stack.balances:
        return 0.0
    more = c["contention"] * job.tp if crosses(job) and job.tp > 1 else 0.0
    return 1e-3 * (c["host"] * (1 if job.tp > 1 else 0.5) + more)


def head_seconds(job, c):
    """Return the seconds of forward and backward of the output layer and the loss."""
    rate = of_job(job, "bf16", c)
    flops = 2 * job.head_passes * job.shape.head_weights / job.tp * job.tokens
    moved = c["logits"] * job.shape.vocab / job.tp * job.tokens
    return flops / rate + moved / (1e9 * job.gpu.memory_gbs)
