"""The training stacks: what each keeps in memory, sends, hides and can run.

    STACKS["megatron"]          job.stack           a published row's framework   -> stack_of_row
      .states[zero]             (6, 12): 6 + 12 / ranks bytes a parameter
      .refuses(job)             "" or why the stack cannot run the layout

What is taken as true of each stack:

torch-fsdp      DDP, SHARD_GRAD_OP and fully_shard, also hybrid, of fp32 parameters under mixed
                precision; gradients are reduced in fp32, the default of MixedPrecisionPolicy.
llm-foundry     MosaicML's FSDP1, mixed_precision PURE: gradients are reduced in bf16; its loss
                writes the gradients of the logits over the logits.
torchtitan      fully_shard with fp32 reduction; without resharding after the forward if there is a
                pipeline (torchtitan/distributed/fsdp.py); "selective" recomputes every op but half
                of the products; recomputation stops at the last tensor that the backward needs.
megatron        Megatron-LM in bf16 accumulates and reduces gradients in fp32 unless told otherwise
                (arguments.py); the distributed optimizer shards over dp x cp, 6 + 12 / ranks bytes
                (docs/dist_optimizer.md); "selective" recomputes the core of attention; its FSDP,
                still marked experimental, is not planned: ZeRO-0 or 1. Kernels are fused
                (Transformer Engine); an interleaved schedule hides its hand-overs.
megatron-2020   Megatron-LM before FlashAttention and sequence parallelism, fp16: gradients in fp16.
deepspeed       its own estimators (docs/code-docs/source/memory.rst): ZeRO-2 4 + 16 / n, ZeRO-3
                18 / n bytes; its pipeline does not run with ZeRO-2 or 3; Megatron's tp without
                sequence parallelism.
nanotron        eager PyTorch; gradients are accumulated in fp32; a stage takes blocks until it has
                its share of the FLOPs.
"""

from dataclasses import dataclass, field
from difflib import get_close_matches


@dataclass(frozen=True)
class Stack:
    """A training stack.

    frameworks: how the `framework` column of published rows starts. axes: those that may be larger
    than 1. zero: the ZeRO stages. states: {zero: (bytes a parameter on each rank, bytes divided
    over the ranks)}. gradient_bytes: of a gradient in a message. cp_shards: whether cp shards what
    ZeRO shards. reshards: whether ZeRO-3 gathers for each micro-batch of a pipeline again. fp8_gathers: in fp8, if products are.
    selective: "attention" (its core) or "op". fused: kernels of norms, gates, attention and tensor
    parallelism that overlap. bucket_mib: of a message of gradients; None: one message for each tensor.
    hides_gradients: the ZeRO stages whose gradients are sent during the backward. hides_hand_overs: of interleaved pipelines. flash: no stored attention
    scores. sequence: sequence parallelism along tp. stops_early: recomputation ends at the last
    tensor needed. balances: stages by FLOPs, not layers; launches each layer from Python.
    logit_bytes: kept for each logit; None: the constant logits_held. schedules: of pipelines.
    """

    name: str
    frameworks: tuple
    axes: tuple
    zero: tuple
    states: dict = field(hash=False)
    gradient_bytes: int = 4
    cp_shards: bool = True
    reshards: bool = True
    fp8_gathers: bool = False
    selective: str = "op"
    fused: bool = False
    bucket_mib: float | None = 25
    hides_gradients: tuple = ()
    hides_hand_overs: bool = False
    flash: bool = True
    sequence: bool = True
    stops_early: bool = False
    balances: bool = False
    logit_bytes: int | None = None
    schedules: tuple = ("1f1b",)

    def refuses(self, job):
        """Return "" if the stack runs the job's layout, else a line that says why not."""
        for axis in ("tp", "pp", "cp", "ep", "vpp", "replicas"):
            if getattr(job, axis) > 1 and axis not in self.axes:
                return f"{self.name} does not run {axis}={getattr(job, axis)}: use {axis}=1"
        if job.zero not in self.zero:
            known = ", ".join(map(str, self.zero))
            return f"{self.name} does not run ZeRO-{job.zero}: use one of {known}"
        if job.pp > 1 and job.schedule not in self.schedules:
            return f"{self.name} does not run the schedule {job.schedule}"
        if self.name == "deepspeed" and job.pp > 1 and job.zero > 1:
            return f"deepspeed's pipeline does not run with ZeRO-{job.zero}: use zero=0 or 1"
        return ""


FSDP_STATES = {0: (16, 0), 1: (8, 8), 2: (2, 16), 3: (0, 16)}
MIXED = {0: (18, 0), 1: (6, 12), 2: (2, 16), 3: (0, 18)}
HALF = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}  # fp16 gradients
MODEL_AXES = ("tp", "pp", "cp", "ep", "vpp")
STACKS = {
    stack.name: stack
    for stack in (
        Stack("torch-fsdp", ("pytorch", "fsdp"), ("replicas",), (0, 1, 2, 3), FSDP_STATES,
              hides_gradients=(0, 2), stops_early=True),
        Stack("llm-foundry", ("pytorch fsdp1", "llm-foundry", "composer"), ("replicas",), (2, 3),
              FSDP_STATES, gradient_bytes=2, hides_gradients=(2,), stops_early=True, logit_bytes=4),
        Stack("torchtitan", ("torchtitan",), (*MODEL_AXES, "replicas"), (0, 2, 3), FSDP_STATES,
              hides_gradients=(0, 2), reshards=False, fp8_gathers=True, stops_early=True, schedules=("1f1b", "zero_bubble")),
        Stack("megatron", ("megatron", "nemo", ""), MODEL_AXES, (0, 1), MIXED,
              selective="attention", fused=True, bucket_mib=150, hides_gradients=(0, 1), hides_hand_overs=True),
        Stack("megatron-2020", ("megatron-lm 2020",), ("tp", "pp", "vpp"), (0,), HALF,
              gradient_bytes=2, cp_shards=False, selective="attention", flash=False,
              sequence=False),
        Stack("deepspeed", ("deepspeed",), ("tp", "pp", "ep"), (0, 1, 2, 3),
              {0: (16, 0), 1: (4, 12), 2: (4, 16), 3: (0, 18)}, gradient_bytes=2,
              bucket_mib=950, hides_gradients=(1, 2), cp_shards=False, selective="attention",
              sequence=False),
        Stack("nanotron", ("nanotron",), ("tp", "pp"), (0, 1), MIXED, bucket_mib=None,
              hides_gradients=(0,), cp_shards=False, balances=True),
    )
}  # fmt: skip
DEFAULT = STACKS["megatron"]


def find_stack(name):
    """Return the Stack of that name. Raises ValueError, one line, for an unknown name."""
    written = str(name).strip().lower()
    if written in STACKS:
        return STACKS[written]
    near = get_close_matches(written, STACKS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"stack must be one of {', '.join(STACKS)}, got {name!r}{hint}")


def stack_of_row(stack, framework, precision):
    """Return the Stack of a row: that of its column `stack`, else of its framework.

    The longest beginning that fits decides; other frameworks are taken as the default. Published
    rows in fp16 of Megatron, OneFlow and of no named stack are older than FlashAttention; a row
    that means fp16 on today's Megatron says stack=megatron.
    """
    if stack:
        return find_stack(stack)
    written = framework.lower()
    fitting = [(len(start), one) for one in STACKS.values() for start in one.frameworks
               if written.startswith(start)]  # fmt: skip
    found = max(fitting, key=lambda pair: pair[0])[1]
    return STACKS["megatron-2020"] if found is DEFAULT and "fp16" in precision else found
