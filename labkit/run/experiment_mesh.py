"""The model of an Experiment: its size and experts, and how a mesh of ranks shards it.

    Experiment(experts=4)           model_of   the complete model, identical on all ranks
                                    loss_of    with the load-balancing loss of the experts
    Experiment(tensor=2, expert=2)  mesh_of    pp x dp x cp x ep x tp
                                    compose    the model, sharded over that mesh

`e` is the Experiment throughout; labkit.run.experiment_runner trains the result.
"""

import inspect
from functools import cache, partial
from math import prod

from labkit import models
from labkit.attention import flash_attention
from labkit.mesh import Mesh
from labkit.models import curriculum, plans
from labkit.models.gpt import Network, Stage
from labkit.models.sizes import arguments_of
from labkit.moe import MoE, balanced
from labkit.parallelize import Composed
from labkit.parallelize.parallel_axes import attending
from labkit.pipeline import gpipe, one_f_one_b
from labkit.run.choices import MESHED
from labkit.tensor_parallel import tensor_parallel
from labkit.trainer import LOW, parallelize


def model_of(e):
    """Build the complete module.

    Its initial weights depend on the seed, not on the number of ranks.
    """

    def mixture(width, dropout):
        return MoE(width, e.experts, expert=partial(Network, width, dropout))

    network = {"network": mixture} if e.experts else {}
    module = models.build(e.model, e.size, **sizes_of(e), **network)
    if e.attention == "flash":
        for part in attending(module):
            part.attend = flash_attention
    return module


def sizes_of(e):
    """Return {argument of the model's class: its value}; {} for a custom model."""
    if e.model not in models.SIZES:
        return {}
    return arguments_of(e.model, e.size, e.depth, e.width)


def loss_of(e, module):
    loss = models.loss(e.model)
    return balanced(loss, module) if e.experts else loss


def mesh_of(e, world_size):
    """Make the mesh; ranks on no axis of the Experiment are along dp. Collective."""
    dp = world_size // prod(e.axes.values())
    return Mesh({"pp": 1, "dp": dp, "cp": 1, "ep": 1, "tp": 1} | e.axes)


def compose(module, mesh, e, wrapping):
    """Shard the GPT of an Experiment over its mesh. wrapping: arguments of trainer.parallelize."""
    options = {"sequence": e.sequence_parallel == "on", "experts": e.experts > 0}
    plan = plans.gpt(tensor_parallel, whole_logits=True, **options)
    if e.pipeline == 1:

        def wrap(module, process_group):
            return parallelize(module, *wrapping, process_group, e.nvme_path)

        return Composed(module, mesh, plan, wrap)
    schedule = one_f_one_b if e.accumulation >= e.pipeline else gpipe
    stages = {"stage": Stage, "schedule": schedule, "micro_batches": e.accumulation}
    return Composed(module, mesh, plan, loss=models.loss(e.model), **stages)


def strategies_of(e):
    """Return the strategies that strategy="auto" considers along dp."""
    return ("ddp_naive",) if e.pipeline > 1 else ("ddp_bucketed", "fsdp")


def check(e):
    """Raise ValueError for fields of the model and the mesh that do not fit together."""
    check_size(e)
    check_curriculum(e)
    check_attention(e)
    if e.experts or e.expert > 1:
        check_experts(e)
    if e.axes:
        check_axes(e)
        check_shares(e)


def check_size(e):
    given = f"Experiment(model={e.model!r}, size={e.size!r}, depth={e.depth}, width={e.width})"
    try:
        sizes_of(e)
    except ValueError as error:
        raise ValueError(f"{given}: {error}") from None


def check_curriculum(e):
    given = f"Experiment(curriculum={e.curriculum!r})"
    ends = {"curriculum_from": e.curriculum_from, "curriculum_steps": e.curriculum_steps}
    if e.curriculum == "none":
        for name, value in ends.items():
            if value:
                raise ValueError(f"Experiment({name}={value}): needs curriculum, which is 'none'")
        return
    usual = {"compute": "real", "context": 1, "pipeline": 1, "sequence_parallel": "off"}
    for name, value in ({"model": "gpt"} | usual).items():
        if getattr(e, name) != value:
            raise ValueError(f"{given}: needs {name}={value!r}, not {getattr(e, name)!r}")
    longest = gpt_sizes(e)["context"]
    if not 1 <= e.curriculum_from <= longest:
        raise ValueError(
            f"{given}: curriculum_from={e.curriculum_from} must be from 1 to {longest} tokens"
        )
    if not e.curriculum_steps:
        raise ValueError(f"{given}: curriculum_steps=0 must be at least 1")


def check_attention(e):
    if e.attention != "torch" and (e.model != "gpt" or e.context > 1):
        raise ValueError(
            f"Experiment(attention={e.attention!r}): needs the model gpt and context=1, "
            f"not model={e.model!r} and context={e.context}"
        )
    if e.sequence_parallel == "on" and (e.tensor == 1 or e.experts or e.context > 1):
        raise ValueError(
            "Experiment(sequence_parallel='on'): needs tensor of at least 2, without context and "
            f"experts; got tensor={e.tensor}, context={e.context}, experts={e.experts}"
        )


def check_axes(e):
    fields = " x ".join(f"{axis} {size}" for axis, size in e.axes.items())
    known = ("ddp_naive",) if e.pipeline > 1 else MESHED
    if e.model != "gpt":
        raise ValueError(f"Experiment({fields}): only the model gpt can be sharded, not {e.model}")
    if e.strategy not in (*known, "auto"):
        raise ValueError(
            f"Experiment({fields}): needs one of the strategies {', '.join(known)}, "
            f"not {e.strategy}"
        )
    for name, usual in (("comm_hook", "none"), ("recompute", "none")):
        if getattr(e, name) != usual:
            raise ValueError(
                f"Experiment({fields}): cannot be combined with {name}={getattr(e, name)!r}"
            )
    if e.pipeline > 1 and e.context > 1:
        raise ValueError(
            f"Experiment({fields}): a pipeline supports no context axis; use context=1"
        )
    if e.pipeline > 1 and e.precision in LOW:
        raise ValueError(
            f"Experiment({fields}): a pipeline does not support precision={e.precision!r}; "
            "use fp32 or fp64"
        )


def check_experts(e):
    fields = f"Experiment(experts={e.experts}, expert={e.expert})"
    if e.model != "gpt":
        raise ValueError(f"{fields}: only the model gpt can have experts, not {e.model}")
    if e.experts < 2 or e.experts % e.expert:
        raise ValueError(f"{fields}: experts must be at least 2 and divisible by expert")
    if e.recompute != "none" or e.pipeline > 1:
        raise ValueError(f"{fields}: experts cannot be combined with recompute or a pipeline")
    if e.strategy == "auto":
        raise ValueError(
            f"{fields}: strategy='auto' does not support experts, "
            "whose memory depends on the routing: choose a strategy"
        )
    if e.expert > 1 and e.strategy.startswith("fsdp"):
        raise ValueError(
            f"{fields}: FSDP does not support experts on different ranks: use a DDP strategy"
        )


def gpt_sizes(e):
    """Return {argument of the GPT: its value} for an Experiment."""
    return gpt_defaults() | sizes_of(e)


@cache
def gpt_defaults():
    parameters = inspect.signature(models.CLASSES["gpt"]).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def length_of(e, step):
    """Return the tokens of each sequence in a step, counted from 1, of a GPT."""
    longest = gpt_sizes(e)["context"]
    if e.curriculum == "none":
        return longest
    schedule, _ = curriculum.SCHEDULES[e.curriculum]
    return schedule(step, e.curriculum_from, longest, e.curriculum_steps)


def unfinished_curriculum(e):
    """Return a line that says that the run ends before its curriculum does, else ""."""
    if e.curriculum == "none":
        return ""
    last, longest = length_of(e, e.steps), gpt_sizes(e)["context"]
    if last == longest:
        return ""
    return (
        f"the curriculum ends at step {e.curriculum_steps}, the run at step {e.steps}: "
        f"its last sequences have {last} of {longest} tokens"
    )


def check_shares(e):
    """Raise ValueError if a dimension of the GPT is not divisible by its axis."""
    gpt = gpt_sizes(e)
    shared = (
        ("pipeline", gpt["layers"], "layers"),
        ("tensor", gpt["heads"], "heads"),
        ("tensor", gpt["vocab"], "vocabulary entries"),
        ("context", gpt["context"] // 2, "pairs of tokens"),
    )
    for axis, count, name in shared:
        if count % getattr(e, axis):
            raise ValueError(
                f"Experiment({axis}={getattr(e, axis)}): "
                f"the {count} {name} of this GPT must be divisible by {axis}"
            )
