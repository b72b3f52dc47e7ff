"""Read a training job from a row of a table: model, GPUs, axes, with defaults for missing columns.

    row["layers"], row["hidden"], row["ffn"] ...    -> Shape    model_row.py
    row["gpu"], row["inter_gbps"] ...               -> GPU      with its usual network by default
    row["dp"], row["tp"], row["micro_batch"] ...    -> Job      dp x tp x pp x cp x replicas = GPUs

ep is the number of ranks that share the experts of a layer. If it divides dp, each expert is also
divided over tp. If it is larger than dp, it spans tp and cp and divides dp x tp: experts are whole.

Defaults of the job: 2,048 tokens, 8 GPUs a node, tp = pp = cp = 1, dp all remaining GPUs,
micro_batch 1 or the value that global_batch and grad_accum imply, grad_accum the value that
global_batch implies, no ZeRO (3 if the framework is FSDP or torchtitan), no recomputation, bf16,
not compiled. A pipeline runs 1F1B; collectives are NCCL's fastest. The columns are those of the
published table. An impossible value raises ValueError, which names the column.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from labkit.scale.collectives import check_algorithm
from labkit.scale.documents import Documents, documents_of
from labkit.scale.hardware import GPU, find_gpu
from labkit.scale.model_row import number, shape_of, text, whole
from labkit.scale.shapes import Shape
from labkit.scale.stacks import DEFAULT, Stack, stack_of_row
from labkit.scale.vit_shapes import ViT

RECOMPUTED = {
    "half": ("half", "layer"),
    "selective": ("selective", "attention", "op"),
    "full": ("full", "true", "uniform", "block"),
    "none": ("", "none", "false"),
}
CONTEXT, NODE = 2048, 8
SCHEDULES = {"1f1b": "1F1B", "zero_bubble": "zero bubble (ZB-H1)"}


@dataclass(frozen=True)
class Job:
    """A training step to predict.

    dp, tp, pp, cp, ep, replicas: numbers of ranks; see above for ep. dp also shards if zero > 0.
    schedule: a key of SCHEDULES, for pipelines; 1F1B is interleaved if vpp > 1. collectives: a key
    of ALGORITHMS, for all messages. lora: the rank of adapters, which alone are trained; 0: none.
    last: the number of last layers that are trained, with the output layer unless it is the
    embedding, while all others are frozen; None: no layer is frozen. documents: packed into the
    sequences; None: a sequence is one document. only_decoder: the image encoder is frozen, all else
    is trained. leaf: nodes below a leaf switch; None: all. oversubscription: of its uplinks.
    """

    shape: Shape
    gpu: GPU
    n_gpus: int
    gpus_per_node: int
    network_gbps: float
    context: int
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    vpp: int
    replicas: int
    zero: int
    micro_batch: int
    grad_accum: int
    recompute: str
    offload: bool
    precision: str
    compiled: bool
    stack: Stack = DEFAULT
    schedule: str = "1f1b"
    collectives: str = "auto"
    lora: int = 0
    last: int | None = None
    documents: Documents | None = None
    only_decoder: bool = False
    leaf: int | None = None
    oversubscription: float = 1.0

    @property
    def part(self):
        """What is trained of the model: "lora", "train" for the last layers, "" for all of it.

        "decoder" if only the image encoder is frozen, as it is in all but the last.
        """
        if self.lora:
            return "lora"
        if self.last is not None:
            return "train"
        return "decoder" if self.only_decoder else ""

    @property
    def tokens(self):
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * self.context / self.cp

    @property
    def reach(self):
        """Tokens among which a token attends: its sequence, or the document of a mean token."""
        return self.documents.reach if self.documents else self.context

    @property
    def step_tokens(self):
        """Tokens of one optimizer step of the whole job."""
        sequences = self.micro_batch * self.grad_accum * self.dp * self.replicas
        return sequences * self.context

    def held_alike(self, parameters, experts):
        """Return (parameters, ranks of dp with identical ones, stride between ranks) of one rank.

        One tuple for dense parameters, and with ep > 1 another for the rank's share of the experts.
        parameters: of one replica, of which `experts` are in experts.
        """
        if self.ep == 1:
            return ((parameters, self.dp, self.tp),)
        own = (experts / self.ep, self.dp // self.ep, self.tp * self.ep)
        if self.whole_experts:  # not divided over tp: callers divide by it
            own = (experts * self.tp / self.ep, self.dp * self.tp // self.ep, self.ep)
        return ((parameters - experts, self.dp, self.tp), own)

    @property
    def whole_experts(self):
        """Whether ep spans tp, so that no expert is divided."""
        return self.ep > self.dp

    def trained(self, parameters, experts, layers):
        """Return what is trained of parameters, `experts` of them in experts, in `layers` layers.

        (parameters, of which in experts): with LoRA those of the adapters, with `last` those of the
        last layers and of the output layer, else all. An image encoder is part of `parameters`.
        """
        if not self.part:
            return parameters, experts
        if self.part == "decoder":
            return parameters - self.shape.vision.parameters, experts
        found, own = self.trained_in_layer
        if self.lora:
            return layers * found, layers * own
        return self.last * found + self.shape.own_head, self.last * own

    @property
    def trained_in_layer(self):
        """What is trained of a layer that is not frozen: (parameters, of which in experts)."""
        if self.lora:
            return self.shape.adapters(self.lora)
        return self.shape.layer_parameters, self.shape.expert_weights

    @property
    def head_passes(self):
        """Products with the matrix of the output layer: 3, or fewer in a part of a model.

        The gradient of its input is needed if a layer is trained, that of the matrix if that is.
        """
        if self.part in ("", "decoder"):
            return 3
        return 1 + (self.last != 0) + (not self.lora and not self.shape.tied)

    @cached_property
    def stages(self):
        """The contents of each stage, [pp]: (layers, output layers, blocks of any kind).

        Stages have the same number of layers, and the last one has the output layer. nanotron
        balances FLOPs: a stage takes blocks until it has its share of them. There, casting the
        logits and the loss are blocks, too.
        """
        layers, pp = self.shape.layers, self.pp
        if not self.stack.balances:
            counts = [layers // pp + (stage < layers % pp) for stage in range(pp)]
            return [(n, int(i == pp - 1), n) for i, n in enumerate(counts)]
        costs = [self.shape.layer_products] * layers + [self.shape.embedding_parameters, 0, 0]
        found, stage, done, total = [[0, 0, 0] for _ in range(pp)], 0, 0, sum(costs)
        for block, cost in enumerate(costs):
            found[stage][0] += block < layers
            found[stage][1] += block == layers
            found[stage][2] += 1
            done += cost
            if done * pp >= total * (stage + 1) and stage < pp - 1:
                stage += 1
        return [tuple(one) for one in found]

    @property
    def fused(self):
        """Whether the stack has fused kernels for the GPU: those for Hopper and later."""
        return self.stack.fused and self.gpu.generation in ("hopper", "blackwell")

    @property
    def flash(self):
        """Whether attention stores no scores; FlashAttention does not run on Volta."""
        return self.stack.flash and self.gpu.generation != "volta"

    @property
    def dtype(self):
        """The dtype of matrix products."""
        for name in ("fp8", "fp32", "tf32"):
            if name in self.precision:
                return name.replace("tf32", "fp32")
        return "bf16"


def job_of(row):
    """Return the Job of a row (a mapping of column to text or number; unknown columns are ignored).

    Raises ValueError, one line that names the column, if a figure is impossible.
    """
    context = whole(row, "seq_len", CONTEXT)
    shape = shape_of(row, context)
    if isinstance(shape, ViT):
        context = shape.positions
    if not text(row, "gpu"):
        raise ValueError("gpu is missing: name one, such as H100-80GB")
    gpu = find_gpu(row["gpu"])
    collectives = text(row, "collectives") or "auto"
    check_algorithm(collectives, gpu)
    layout = layout_of(row)
    check_divides("tp", layout["tp"], {"heads": shape.heads, "ffn": shape.ffn})
    ep = whole(row, "ep", 1)
    if not spans_tp(ep, *(layout[name] for name in ("tp", "cp", "dp"))):
        check_divides("ep", ep, {"dp": layout["dp"]})
    check_divides("ep", ep, {"experts": shape.experts})
    micro_batch, grad_accum = batches_of(row, layout["dp"] * layout["replicas"])
    job = Job(
        shape=shape,
        gpu=gpu,
        network_gbps=network_of(row, gpu),
        gpus_per_node=min(layout["n_gpus"], whole(row, "gpus_per_node", NODE)),
        context=context,
        **layout,
        ep=ep,
        vpp=whole(row, "vpp", 1),
        micro_batch=micro_batch,
        grad_accum=grad_accum,
        recompute=recomputed(text(row, "recompute")),
        offload=text(row, "offload").lower() == "true",
        precision=text(row, "precision").lower() or "bf16",
        compiled=text(row, "compile").lower() == "true",
        stack=stack_of_row(text(row, "stack"), text(row, "framework"), text(row, "precision")),
        collectives=collectives,
        lora=whole(row, "lora", 0, least=0),
        last=last_of(row, shape, layout["pp"]),
        leaf=whole(row, "leaf"),
        oversubscription=number(row, "oversubscription", 1.0),
        documents=documents_of(text(row, "documents"), context),
        only_decoder=text(row, "train").lower() == "decoder",
    )
    if job.documents:
        check_packing(job)
    return job


def check_packing(job):
    """Raise ValueError if the attention of a job cannot be kept inside documents."""
    if isinstance(job.shape, ViT):
        raise ValueError("documents are of text, but a vision transformer has images: leave it out")
    if not job.flash:
        raise ValueError(
            f"documents needs FlashAttention, which {job.stack.name} on {job.gpu.name} does not "
            "have: leave it out, or use another stack or GPU"
        )


def last_of(row, shape, pp):
    """Return how many of the last layers a row trains: head is 0, last:4 is 4, all is None."""
    said = text(row, "train").lower()
    if said == "decoder" and not shape.vision:
        raise ValueError("train=decoder freezes an image encoder, but the model has none: use all")
    if said not in ("", "all") and whole(row, "lora", 0, least=0):
        raise ValueError("lora and train cannot be combined: use one of them")
    if said in ("", "all", "decoder"):
        return None
    found = re.fullmatch(r"head|last:([1-9]\d*)", said)
    last = int(found[1] or 0) if found else -1
    if not 0 <= last <= shape.layers:
        raise ValueError(
            f"train must be all, head or last:N with N from 1 to {shape.layers}, got {said!r}"
        )
    if last == 0 and not shape.own_head:
        raise ValueError(
            "train=head trains nothing: the output layer is the embedding (tied), which is frozen; "
            "use train=last:1 or lora"
        )
    if pp > 1:
        raise ValueError(f"pp={pp} does not run with train: use pp=1")
    return last


def spans_tp(ep, tp, cp, dp):
    """Return whether ep ranks are complete groups of tp x cp, and more than dp."""
    return ep > dp and ep % (tp * cp) == 0 and dp * tp % ep == 0


def layout_of(row):
    """Return {field of Job: number}: GPUs, the axes except ep, replicas and the stage of ZeRO."""
    axes = {name: whole(row, name, 1) for name in ("tp", "pp", "cp")}
    inner = axes["tp"] * axes["pp"] * axes["cp"]
    dp = whole(row, "dp")
    n_gpus = whole(row, "n_gpus", (dp or 1) * inner)
    dp = dp or max(1, n_gpus // inner)
    ranks = dp * inner
    zero = zero_of(row)
    if n_gpus % ranks or (ranks != n_gpus and not zero):
        raise ValueError(
            f"dp x tp x pp x cp = {dp} x {axes['tp']} x {axes['pp']} x {axes['cp']} = "
            f"{ranks} ranks, but n_gpus is {n_gpus}"
        )
    return axes | {"n_gpus": n_gpus, "dp": dp, "replicas": n_gpus // ranks, "zero": zero}


def zero_of(row):
    """Return the stage of ZeRO: without one, 3 for a framework that shards the parameters."""
    named = (text(row, "stack") or text(row, "framework")).lower()
    sharded = any(word in named for word in ("fsdp", "torchtitan", "llm-foundry"))
    zero = whole(row, "zero", 3 if sharded else 0, least=0)
    if zero > 3:
        raise ValueError(f"zero must be 0, 1, 2 or 3, got {zero}")
    return zero


def check_divides(axis, ranks, counts):
    """Raise ValueError if the ranks of an axis do not divide all of {name: count}."""
    for name, count in counts.items():
        if count % ranks:
            raise ValueError(f"{axis}={ranks} does not divide {name}={count}")


def batches_of(row, ranks):
    """Return (micro_batch, grad_accum); the global batch determines those that the row lacks."""
    total = number(row, "global_batch")
    micro = whole(row, "micro_batch")
    accumulated = whole(row, "grad_accum")
    if not micro:
        micro = max(1, round(total / ranks / (accumulated or 1))) if total else 1
    if not accumulated:
        accumulated = max(1, round(total / ranks / micro)) if total else 1
    return micro, accumulated


def network_of(row, gpu):
    """Return the Gbit/s of a node: those of the row, else those that are usual for the GPU."""
    network = number(row, "inter_gbps", gpu.network_gbps, least=0)
    if text(row, "inter_gbps") and not 1 <= network <= 30000:
        raise ValueError(
            f"inter_gbps={network:g} must be the Gbit/s of a node, usually 10 to 6400; "
            "is it in Mbit/s or Gbyte/s?"
        )
    return network


def recomputed(said):
    """Return the kind of recomputation in the backward: "none", "half", "selective" or "full"."""
    for kind, words in RECOMPUTED.items():
        if said.lower() in words or any(word and word in said.lower() for word in words):
            return kind
    raise ValueError(f"recompute must be none, selective-op, selective-layer or full, got {said!r}")
