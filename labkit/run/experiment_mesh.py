"""What an Experiment says of the model itself: its experts, and how a mesh of ranks splits it.

    Experiment(experts=4)           model_of   whole, on every rank the same
                                    loss_of    with what balances the experts
    Experiment(tensor=2, expert=2)  mesh_of    pp x dp x cp x ep x tp
                                    compose    the model, spread over that mesh

`e` is the Experiment throughout; labkit.run.experiment_runner trains what comes out.
"""

import inspect
from functools import partial
from math import prod

from labkit import models
from labkit.mesh import Mesh
from labkit.models import plans
from labkit.models.gpt import Network, Stage
from labkit.moe import MoE, balanced
from labkit.parallelize import Composed
from labkit.pipeline import gpipe, one_f_one_b
from labkit.run.choices import MESHED
from labkit.tensor_parallel import tensor_parallel
from labkit.trainer import LOW, parallelize


def model_of(e):
    """The whole module: what a seed makes of it does not depend on ranks."""
    if not e.experts:
        return models.build(e.model, e.size)

    def mixture(width, dropout):
        return MoE(width, e.experts, expert=partial(Network, width, dropout))

    return models.build(e.model, e.size, network=mixture)


def loss_of(e, module):
    loss = models.loss(e.model)
    return balanced(loss, module) if e.experts else loss


def mesh_of(e, world_size):
    """Ranks that no axis of the Experiment takes are along dp. Collective."""
    dp = world_size // prod(e.axes.values())
    return Mesh({"pp": 1, "dp": dp, "cp": 1, "ep": 1, "tp": 1} | e.axes)


def compose(module, mesh, e, wrapping):
    """The GPT of an Experiment on its mesh. wrapping: arguments of trainer.parallelize."""
    plan = plans.gpt(tensor_parallel, whole_logits=True, experts=e.experts > 0)
    if e.pipeline == 1:
        return Composed(
            module, mesh, plan, lambda m, process_group: parallelize(m, *wrapping, process_group)
        )
    schedule = one_f_one_b if e.accumulation >= e.pipeline else gpipe
    stages = {"stage": Stage, "schedule": schedule, "micro_batches": e.accumulation}
    return Composed(module, mesh, plan, loss=models.loss(e.model), **stages)


def strategies_of(e):
    """What strategy="auto" looks at along dp."""
    return ("ddp_naive",) if e.pipeline > 1 else ("ddp_bucketed", "fsdp")


def check(e):
    """Raise ValueError for experts or axes that cannot be, or do not go with the rest."""
    if e.experts or e.expert > 1:
        check_experts(e)
    if e.axes:
        check_axes(e)
        check_shares(e)


def check_axes(e):
    said = " x ".join(f"{axis} {size}" for axis, size in e.axes.items())
    known = ("ddp_naive",) if e.pipeline > 1 else MESHED
    if e.model != "gpt":
        raise ValueError(f"Experiment({said}): the model gpt can be split, not {e.model}")
    if e.strategy not in (*known, "auto"):
        raise ValueError(f"Experiment({said}): goes with {', '.join(known)}, not {e.strategy}")
    for name, usual in (("comm_hook", "none"), ("recompute", "none")):
        if getattr(e, name) != usual:
            raise ValueError(f"Experiment({said}): does not go with {name} yet")
    if e.pipeline > 1 and (e.context > 1 or e.precision in LOW):
        raise ValueError(f"Experiment({said}): a pipeline takes no context axis, and fp32 or fp64")


def check_experts(e):
    said = f"Experiment(experts={e.experts}, expert={e.expert})"
    if e.model != "gpt":
        raise ValueError(f"{said}: the model gpt can have experts, not {e.model}")
    if e.experts < 2 or e.experts % e.expert:
        raise ValueError(f"{said}: two experts or more, which the ranks along ep share alike")
    if e.recompute != "none" or e.pipeline > 1:
        raise ValueError(f"{said}: does not go with recompute or a pipeline yet")
    if e.strategy == "auto":
        raise ValueError(
            f'{said}: strategy="auto" does not support experts, whose memory depends on the '
            "routing: choose a strategy"
        )
    if e.expert > 1 and e.strategy.startswith("fsdp"):
        raise ValueError(f"{said}: experts on ranks of their own are not sharded: take DDP")


def gpt_sizes(e):
    """{argument of the GPT: what an Experiment's has}."""
    defaults = inspect.signature(models.CLASSES["gpt"]).parameters
    return {name: one.default for name, one in defaults.items()} | models.SIZES["gpt"][e.size]


def check_shares(e):
    """Raise ValueError for what the ranks of an axis cannot share alike."""
    gpt = gpt_sizes(e)
    shared = (
        ("pipeline", gpt["layers"], "layers"),
        ("tensor", gpt["heads"], "heads"),
        ("tensor", gpt["vocab"], "words"),
        ("context", gpt["context"] // 2, "pairs of tokens"),
    )
    for axis, many, what in shared:
        if many % getattr(e, axis):
            raise ValueError(
                f"Experiment({axis}={getattr(e, axis)}): so many ranks cannot share the "
                f"{many} {what} of a GPT of size {e.size} alike"
            )
