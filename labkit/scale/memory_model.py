"""Predict a GPU's peak memory by kind: states, activations, logits, gathered parameters, runtime.

    GiB |  runtime     workspaces and buffers of messages
        |  logits      tokens x vocabulary / tp, on the stage with the output layer
        |  activations layers of the stage x micro-batches in flight, or inputs only (recomputed)
        |  gathered    FSDP: the unsharded parameters of two layers and the embeddings
        |  states      parameters, gradients, master copy, two moments: 16 to 20 bytes a parameter
        +----------------------------------------------------------------------------------------

Stage i of a pipeline stores min(pp - i, micro-batches) micro-batches (1F1B), with v stages a rank
up to (pp - 1)/v more. With zero bubble (ZB-H1) it stores i more, whose weight gradients are
delayed: pp in all, as the first stage of 1F1B. For those i, and for the one in its backward,
recomputation saves nothing. The first stage also has the embeddings, and the last the logits. The
result is the peak of the stage that needs most. ZeRO shards over dp: optimizer states (1),
gradients (2), parameters (3). Offloaded states are in host memory. With LoRA only adapters have
gradients and states; activations stay, because an adapter needs the input of its layer. If only the
last layers are trained, those before them keep no activations. An image encoder that is trained
keeps those of its layers, a frozen one those of a layer in its forward. Without sequence
parallelism, the inputs of norms and of the products behind them are complete on each rank of tp.
Rajbhandari et al., ZeRO, SC 2020, section 3; Korthikanti et al., Reducing Activation
Recomputation, MLSys 2023, section 4; Narayanan et al., SC 2021, section 2.2 (1F1B, interleaved);
Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.1 (ZB-H1).
"""

from dataclasses import dataclass, replace

from labkit.scale.cost import away, device_seconds, host_seconds, image_job
from labkit.scale.messages import crosses
from labkit.scale.recomputation import kept_share, of_attention

GIB = 2**30
INPUTS = 4  # of a layer: of two norms and of the products behind them


@dataclass(frozen=True)
class Peak:
    """GiB of the fullest GPU by kind, and of the fullest node's host.

    memory: GiB of the GPU. limit: the share of it at which a job runs out of memory. runs: False if
    a stage is empty.
    """

    states: float
    gathered: float
    activations: float
    logits: float
    runtime: float
    host: float
    memory: float
    limit: float
    runs: bool

    @property
    def total(self):
        return self.states + self.gathered + self.activations + self.logits + self.runtime

    @property
    def fits(self):
        """Whether the job runs. limit > 1, as a caching allocator can release unused memory."""
        return self.total <= self.limit * self.memory and self.runs

    @property
    def shown(self):
        """GiB that the GPU reports: at most its memory if the job fits."""
        return min(self.total, self.memory) if self.fits else self.total

    @property
    def largest(self):
        """The name of the largest kind."""
        return max(("states", "gathered", "activations", "logits"), key=lambda k: getattr(self, k))


def predict_memory(job, c):
    """Predict the Peak of a Job: that of the stage that needs most."""
    first, last = {}, {}  # among stages with the same contents, one of these two needs most
    for stage, has in enumerate(job.stages):
        first.setdefault(has, stage)
        last[has] = stage
    ends = [first, last] if job.schedule == "zero_bubble" else [first]
    peaks = [stage_peak(job, c, stage, has) for end in ends for has, stage in end.items()]
    fullest = max(peaks, key=lambda peak: peak.total)
    return replace(fullest, host=max(p.host for p in peaks)) if job.offload else fullest


def stage_peak(job, c, stage, has):
    """Return the Peak of a stage. has: one of Job.stages."""
    layers, head, _ = has
    embedding = stage == 0
    ahead = job.pp - stage
    if job.vpp > 1:
        ahead = (2 * (job.pp - 1 - stage) + (job.vpp - 1) * job.pp + 1) / job.vpp
    in_flight = min(ahead, job.grad_accum)
    held = in_flight * kept(job, c)
    if job.schedule == "zero_bubble":
        later = min(stage + 1, job.grad_accum)  # one of them is in its backward
        held = min(ahead - 1, job.grad_accum - later) * kept(job, c)
        held += later * kept(replace(job, recompute="none"), c)
    activations = layers * held
    if job.last is not None:  # at least the forward of one layer
        activations = max(job.last * held, kept(replace(job, recompute="none"), c))
    shape, tokens = job.shape, job.tokens
    activations = with_images(job, c, activations * tokens)
    ends = embedding + head - (shape.tied and embedding and head)
    parameters = layers * shape.layer_parameters + ends * shape.embedding_parameters
    parameters += embedding * shape.input_parameters + head * shape.head_parameters
    experts = layers * shape.expert_weights
    alike = job.held_alike(*job.trained(parameters, experts, layers))
    states = sum(own * state_bytes(job, c, ranks) for own, ranks, _ in alike) / job.tp
    waiting = sum(own * host_bytes(job) / shared_by(job, ranks) for own, ranks, _ in alike) / job.tp
    gathered = 0.0
    if job.zero == 3 and not (job.pp > 1 and not job.stack.reshards):
        root = ends * shape.embedding_parameters / job.tp
        own = sum(h for h, *_ in job.held_alike(shape.layer_parameters, shape.expert_weights))
        gathered = 2 * own / job.tp + root
        if job.stack.live:
            gathered = min(gathered, max(job.stack.live, shape.embedding_parameters / job.tp))
    each = job.stack.logit_bytes or c["logits_held"]
    logits = head * each * shape.vocab / job.tp * tokens
    return Peak(
        states=(states - waiting + frozen_bytes(job, parameters, experts, layers)) / GIB,
        gathered=2 * gathered / GIB,
        activations=activations / GIB,
        logits=logits / GIB,
        runtime=c["runtime"],
        host=waiting * job.gpus_per_node / GIB,
        memory=job.gpu.memory_gib,
        limit=c["limit"],
        runs=all(blocks for _, _, blocks in job.stages),
    )


def with_images(job, c, activations):
    """Return the bytes of activations of a decoder, with those of its image encoder if it has one.

    A frozen encoder frees its own before the decoder begins.
    """
    if not job.shape.vision:
        return activations
    alone = image_job(job)
    if job.part:
        return max(activations, alone.tokens * kept(replace(alone, recompute="none"), c))
    return activations + alone.shape.layers * alone.tokens * kept(alone, c)


def frozen_bytes(job, parameters, experts, layers):
    """Return the bytes of a rank's frozen parameters, in 16 bits: with LoRA all but the adapters.

    FSDP shards them, other stages of ZeRO do not. parameters: of a replica's stage of `layers`
    layers, of which `experts` are in experts.
    """
    if not job.part:
        return 0.0
    if not job.lora:
        trained, own = job.trained(parameters, experts, layers)
        parameters, experts = parameters - trained, experts - own
    alike = job.held_alike(parameters, experts)
    return (
        sum(2 * own / (shared_by(job, n) if job.zero == 3 else 1) for own, n, _ in alike) / job.tp
    )


def shared_by(job, ranks):
    """Return over how many ranks ZeRO shards optimizer states, of `ranks` along dp."""
    over_cp = job.zero == 3 or job.stack.cp_shards
    return ranks * (job.cp if over_cp else 1) if job.zero else 1


def state_bytes(job, c, ranks):
    """Return bytes per parameter of the stage, after ZeRO has sharded over `ranks` of dp."""
    whole, divided = job.stack.states[job.zero]
    if job.zero == 3 and job.pp > 1 and not job.stack.reshards:
        whole += 2 + job.stack.gradient_bytes  # both unsharded from micro-batch to micro-batch
    if job.stack.balances and job.zero == 0:
        whole += 2 * (ranks > 1)  # DDP's buckets
    elif job.stack.balances:
        whole, divided = c["whole"], whole + divided - c["whole"]
    if job.offload and job.stack.offloads_gradients:  # no 16-bit gradients stay on the GPU
        whole, divided = (0, 18) if job.zero == 3 else (2, 16)
    if "pure" in job.precision:  # bf16 parameters, gradients and moments
        whole, divided = whole * 8 / (whole + divided), divided * 8 / (whole + divided)
    return whole + divided / shared_by(job, ranks)


def host_bytes(job):
    """Return the bytes per parameter in host memory, the sum of the ranks that share it."""
    gradients = 4 if job.offload and job.stack.offloads_gradients else 0
    return away(job) + (0 if "pure" in job.precision else gradients)


def kept(job, c):
    """Return the bytes per token that a layer keeps until its backward."""
    sequence = job.tp if job.stack.sequence else 1
    inputs = 2 * job.shape.hidden / sequence
    copies = c["saved"] if job.stack.balances else 1.0
    outside = INPUTS * 2 * job.shape.hidden  # of the products that tp divides
    inside = job.shape.saved_bytes() - outside
    everything = copies * (outside / sequence + inside / job.tp)
    if job.stack.fused and job.shape.gated:  # SiLU's output is computed again in the backward
        everything -= 2 * job.shape.ffn * job.shape.top_k / job.tp
    if job.shape.experts > 1:  # tokens in the order of their experts
        everything += inputs * job.shape.top_k
    if job.stack.balances and job.tp > 1:
        # inputs of split layers stay gathered, unless the GPU waits for its host and frees them
        waiting = crosses(job) and host_seconds(job, c) > device_seconds(job, c)
        everything += 0 if waiting else 2 * 2 * job.shape.hidden
    if not job.flash and not of_attention(job):  # scores before and after dropout
        everything += 5 * job.shape.heads * job.context / job.tp
    share = kept_share(job)
    return share * everything + (1 - share) * inputs
