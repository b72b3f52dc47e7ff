"""The model of an Experiment: its experts, and how a mesh of ranks shards it.

    Experiment(experts=4)           model_of   the complete model, identical on all ranks
                                    loss_of    with the load-balancing loss of the experts
    Experiment(tensor=2, expert=2)  mesh_of    pp x dp x cp x ep x tp
                                    compose    the model, sharded over that mesh

`e` is the Experiment throughout; labkit.run.experiment_runner trains the result.
"""

import inspect
from functools import partial
from math import prod

from labkit import models
from labkit.attention import flash_attention
from labkit.mesh import Mesh
from labkit.models import plans
from labkit.models.gpt import Network, Stage
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

    module = models.build(e.model, e.size, **({"network": mixture} if e.experts else {}))
    if e.attention == "flash":
        for part in attending(module):
            part.attend = flash_attention
    return module


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
    """Raise ValueError for experts or axes that are invalid or do not fit other fields."""
    check_attention(e)
    if e.experts or e.expert > 1:
        check_experts(e)
    if e.axes:
        check_axes(e)
        check_shares(e)


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
    if e.pipeline > 1 and (e.context > 1 or e.precision in LOW):
        raise ValueError(
            f"Experiment({fields}): a pipeline supports no context axis, and only fp32 and fp64"
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
    defaults = inspect.signature(models.CLASSES["gpt"]).parameters
    return {name: parameter.default for name, parameter in defaults.items()} | models.SIZES["gpt"][
        e.size
    ]


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
                f"the {count} {name} of a GPT of size {e.size} must be divisible by {axis}"
            )
