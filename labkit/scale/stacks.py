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
                (Transformer Engine); an interleaved schedule hides its hand-overs. Tokens go
                to experts by DeepEP (moe-token-dispatcher-type flex), beside other micro-batches
                (overlap-moe-expert-parallel-comm), as its README of experts recommends.
megatron-2020   Megatron-LM before FlashAttention and sequence parallelism, fp16: gradients in fp16.
deepspeed       its own estimators (runtime/zero/stage_1_and_2.py, stage3.py): ZeRO-2 2 + 18 / n,
                ZeRO-3 18 / n bytes, with offload 2 and 2 / n: gradients leave as they are reduced;
                its pipeline does not run with ZeRO-2 or 3; Megatron's tp without sequence
                parallelism.
nanotron        eager PyTorch; gradients are accumulated in fp32; a stage takes blocks until it has
                its share of the FLOPs.
"""

from dataclasses import dataclass, field
from difflib import get_close_matches


@dataclass(frozen=True)
class Stack:
    """A training stack. Defaults are those of most stacks."""

    name: str
    frameworks: tuple  # how the `framework` of a published row starts
    axes: tuple  # those that may be larger than 1, beside dp
    zero: tuple  # the stages of ZeRO
    states: dict = field(hash=False)  # {zero: (bytes a parameter on each rank, bytes divided)}
    schedules: tuple = ("1f1b",)  # of pipelines
    gradient_bytes: int = 4  # of a gradient in a message
    bucket_mib: float | None = 25  # of a message of gradients; None: one for each tensor
    hides_gradients: tuple = ()  # the ZeRO stages that send gradients during the backward
    hides_hand_overs: bool = False  # of interleaved pipelines
    hides_experts: bool = False  # all-to-all beside the layers of another micro-batch
    once_a_node: bool = False  # a token goes once to each node that has one of its experts
    cp_shards: bool = True  # cp shards what ZeRO shards
    reshards: bool = True  # under a pipeline, ZeRO-3 gathers for every micro-batch
    fp8_gathers: bool = False  # ZeRO-3 gathers in fp8 if products are in fp8
    fused: bool = False  # kernels of norms, gates, attention; messages of tp and cp overlap
    flash: bool = True  # attention stores no scores
    sequence: bool = True  # sequence parallelism along tp
    selective: str = "op"  # what it recomputes: every "op" but some, or the core of "attention"
    stops_early: bool = False  # recomputation ends at the last tensor that is needed
    balances: bool = False  # stages by FLOPs, not layers; each layer is launched from Python
    parts: tuple = ()  # what it trains of a frozen model (Job.part); "decoder": has encoders, too
    offloads_gradients: bool = False  # to host memory, with the optimizer states
    live: float | None = None  # parameters that ZeRO-3 keeps gathered at most, or one embedding
    logit_bytes: int | None = None  # kept for each logit; None: the constant logits_held

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
        if refused := self.refuses_part(job):
            return refused
        if job.whole_experts and not self.sequence:
            return f"{self.name} does not run ep={job.ep} larger than dp={job.dp}: use ep={job.dp}"
        if self.name == "deepspeed" and job.pp > 1 and job.zero > 1:
            return f"deepspeed's pipeline does not run with ZeRO-{job.zero}: use zero=0 or 1"
        if self.name == "deepspeed" and job.offload and not job.zero:
            return "deepspeed does not offload with ZeRO-0: use zero=1, 2 or 3"
        return ""

    def refuses_part(self, job):
        """Return "" if the stack trains the job's part of a model, else a line."""
        if job.shape.vision and "decoder" not in self.parts:
            known = ", ".join(one.name for one in STACKS.values() if "decoder" in one.parts)
            return f"{self.name} is not planned with an image encoder: use {known}"
        if job.shape.vision and max(job.pp, job.cp) > 1:
            return f"pp={job.pp} and cp={job.cp} are not planned with an image encoder: use 1"
        if job.part and job.part not in self.parts:
            known = ", ".join(stack.name for stack in STACKS.values() if job.part in stack.parts)
            return f"{self.name} does not run {job.part}: use {known}"
        if job.part == "train" and job.pp > 1:
            return f"pp={job.pp} does not run with train: a frozen stage has no backward; use pp=1"
        return ""


MIXED = {0: (18, 0), 1: (6, 12), 2: (2, 16), 3: (0, 18)}  # bf16, fp32 gradients and states
HALF = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}  # fp16 with fp16 gradients
DEEPSPEED = {0: (16, 0), 1: (4, 12), 2: (2, 18), 3: (0, 18)}
FULL = {0: (16, 0), 1: (8, 8), 2: (2, 16), 3: (0, 16)}  # fp32 parameters, cast when gathered
MODEL_AXES = ("tp", "pp", "cp", "ep", "vpp")

TORCH_FSDP = Stack(
    name="torch-fsdp",
    frameworks=("pytorch", "fsdp"),
    axes=("replicas",),
    zero=(0, 1, 2, 3),
    states=FULL,
    hides_gradients=(0, 1, 2),
    stops_early=True,
    parts=("lora", "train", "decoder"),  # adapters of Hugging Face's PEFT
)
LLM_FOUNDRY = Stack(
    name="llm-foundry",
    frameworks=("pytorch fsdp1", "llm-foundry", "composer"),
    axes=("replicas",),
    zero=(2, 3),
    states=FULL,
    gradient_bytes=2,
    hides_gradients=(2,),
    stops_early=True,
    logit_bytes=4,
)
TORCHTITAN = Stack(
    name="torchtitan",
    frameworks=("torchtitan",),
    axes=(*MODEL_AXES, "replicas"),
    zero=(0, 2, 3),
    states=FULL,
    schedules=("1f1b", "zero_bubble"),
    hides_gradients=(0, 2),
    reshards=False,
    fp8_gathers=True,
    stops_early=True,
)
MEGATRON = Stack(
    name="megatron",
    frameworks=("megatron", "nemo", ""),
    axes=MODEL_AXES,
    zero=(0, 1),
    states=MIXED,
    bucket_mib=150,
    hides_gradients=(0, 1),
    hides_hand_overs=True,
    hides_experts=True,
    once_a_node=True,
    fused=True,
    selective="attention",
    parts=("lora",),  # of Megatron Bridge
)
MEGATRON_2020 = Stack(
    name="megatron-2020",
    frameworks=("megatron-lm 2020",),
    axes=("tp", "pp", "vpp"),
    zero=(0,),
    states=HALF,
    gradient_bytes=2,
    cp_shards=False,
    flash=False,
    sequence=False,
    selective="attention",
)
DEEP_SPEED = Stack(
    name="deepspeed",
    frameworks=("deepspeed",),
    axes=("tp", "pp", "ep"),
    zero=(0, 1, 2, 3),
    states=DEEPSPEED,
    gradient_bytes=2,
    bucket_mib=950,
    hides_gradients=(1, 2),
    cp_shards=False,
    sequence=False,
    selective="attention",
    offloads_gradients=True,
    live=1e9,  # stage3_max_live_parameters
    parts=("lora", "train", "decoder"),  # adapters of Hugging Face's PEFT
)
NANOTRON = Stack(
    name="nanotron",
    frameworks=("nanotron",),
    axes=("tp", "pp"),
    zero=(0, 1),
    states=MIXED,
    bucket_mib=None,
    hides_gradients=(0,),
    cp_shards=False,
    balances=True,
)
STACKS = {
    stack.name: stack
    for stack in (
        TORCH_FSDP, LLM_FOUNDRY, TORCHTITAN, MEGATRON, MEGATRON_2020, DEEP_SPEED, NANOTRON,
    )
}  # fmt: skip
DEFAULT = MEGATRON


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
    return MEGATRON_2020 if found is DEFAULT and "fp16" in precision else found
