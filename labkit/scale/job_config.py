"""A training job as a row of a table: the model, the GPUs, the axes; what is missing has a default.

    row["layers"], row["hidden"] ...           -> Shape   see row.py
    row["gpu"], row["inter_gbps"] ...          -> GPU     its usual network, where none is told
    row["dp"], row["tp"], row["micro_batch"] ... -> Job   dp x tp x pp x cp x replicas = GPUs

ep, the ranks that share out the experts of a layer, lies inside dp.

Defaults: 2,048 tokens, 8 GPUs a node, every axis 1 and dp what is left, micro_batch 1 unless the
global batch tells it, grad_accum what the global batch leaves, no ZeRO (3 where the framework is
FSDP or torchtitan), nothing recomputed, bf16, not compiled; a pipeline runs 1F1B; collectives are
flat rings. Columns: the published table's.
"""

from dataclasses import dataclass
from functools import cached_property

from labkit.scale.collectives import check_algorithm
from labkit.scale.hardware import GPU, find_gpu
from labkit.scale.row import number, recomputed, shape_of, text, whole
from labkit.scale.shapes import Shape

CONTEXT, NODE = 2048, 8
SCHEDULES = {"1f1b": "1F1B", "zero_bubble": "zero bubble (ZB-H1)"}


@dataclass(frozen=True)
class Job:
    """A training step to be predicted. Axes count ranks; dp shards where zero > 0; ep is in it.

    schedule: of a pipeline, a key of SCHEDULES: 1F1B is interleaved where vpp > 1. collectives: a
    key of ALGORITHMS, for all messages.
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
    framework: str
    schedule: str = "1f1b"
    collectives: str = "flat"

    @property
    def tokens(self):
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * self.context / self.cp

    @property
    def step_tokens(self):
        """Tokens of one optimizer step of the whole job."""
        sequences = self.micro_batch * self.grad_accum * self.dp * self.replicas
        return sequences * self.context

    def held_alike(self, parameters, experts):
        """(parameters, ranks of dp that hold the same, ranks from one to the next) of one rank.

        parameters: of one replica, `experts` of them in experts, of which a rank has its share.
        """
        if self.ep == 1:
            return ((parameters, self.dp, self.tp),)
        own = (experts / self.ep, self.dp // self.ep, self.tp * self.ep)
        return ((parameters - experts, self.dp, self.tp), own)

    @cached_property
    def stages(self):
        """What each stage has, [pp]: (layers, output layers, blocks of any kind).

        Equally many layers, the output layer on the last. nanotron weighs it: a stage takes blocks
        until it has its share of the products; casting the logits and the loss are blocks, too.
        """
        layers, pp = self.shape.layers, self.pp
        if self.framework != "nanotron":
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
    def dtype(self):
        """What products are computed in."""
        for name in ("fp8", "fp32", "tf32"):
            if name in self.precision:
                return name.replace("tf32", "fp32")
        return "bf16"


def job_of(row):
    """The Job of a row (a mapping of column to text or number; unknown columns are ignored).

    Raises ValueError, one line that names the column, where a figure is impossible.
    """
    context = whole(row, "seq_len", CONTEXT)
    shape = shape_of(row, context)
    if not text(row, "gpu"):
        raise ValueError("gpu is missing: name one, such as H100-80GB")
    gpu = find_gpu(row["gpu"])
    collectives = text(row, "collectives") or "flat"
    check_algorithm(collectives, gpu)
    axes = {name: whole(row, name, 1) for name in ("tp", "pp", "cp")}
    inner = axes["tp"] * axes["pp"] * axes["cp"]
    dp = whole(row, "dp")
    n_gpus = whole(row, "n_gpus", (dp or 1) * inner)
    dp = dp or max(1, n_gpus // inner)
    sharded = any(word in text(row, "framework").lower() for word in ("fsdp", "torchtitan"))
    zero = whole(row, "zero", 3 if sharded else 0, least=0)
    if zero > 3:
        raise ValueError(f"zero must be 0, 1, 2 or 3, got {zero}")
    if n_gpus % (dp * inner) or (dp * inner != n_gpus and not zero):
        raise ValueError(
            f"dp x tp x pp x cp = {dp} x {axes['tp']} x {axes['pp']} x {axes['cp']} = "
            f"{dp * inner} ranks, but n_gpus is {n_gpus}"
        )
    replicas = n_gpus // (dp * inner)
    for name, count in (("heads", shape.heads), ("ffn", shape.ffn)):
        if count % axes["tp"]:
            raise ValueError(f"tp={axes['tp']} does not divide {name}={count}")
    ep = whole(row, "ep", 1)
    for name, count in (("dp", dp), ("experts", shape.experts)):
        if count % ep:
            raise ValueError(f"ep={ep} does not divide {name}={count}")
    ranks, total = dp * replicas, number(row, "global_batch")
    micro = whole(row, "micro_batch")
    accumulated = whole(row, "grad_accum")
    if not micro:
        micro = max(1, round(total / ranks / (accumulated or 1))) if total else 1
    if not accumulated:
        accumulated = max(1, round(total / ranks / micro)) if total else 1
    network = number(row, "inter_gbps", gpu.network_gbps, least=0)
    if text(row, "inter_gbps") and not 1 <= network <= 30000:
        raise ValueError(
            f"inter_gbps={network:g}: Gbit/s of a node are meant, 10 to 6400 being usual; "
            "is it in Mbit/s or Gbyte/s?"
        )
    return Job(
        shape=shape,
        gpu=gpu,
        n_gpus=n_gpus,
        gpus_per_node=min(n_gpus, whole(row, "gpus_per_node", NODE)),
        network_gbps=network,
        context=context,
        dp=dp,
        **axes,
        ep=ep,
        vpp=whole(row, "vpp", 1),
        replicas=replicas,
        zero=zero,
        micro_batch=micro,
        grad_accum=accumulated,
        recompute=recomputed(text(row, "recompute")),
        offload=text(row, "offload").lower() == "true",
        precision=text(row, "precision").lower() or "bf16",
        compiled=text(row, "compile").lower() == "true",
        framework=text(row, "framework"),
        collectives=collectives,
    )
