"""What an Experiment says of the model itself: its experts, and how a mesh of ranks splits it.

    Experiment(experts=4)           model_of   whole, on every rank the same
                                    loss_of    with what balances the experts
    Experiment(tensor=2, expert=2)  mesh_of    pp x dp x cp x ep x tp
                                    compose    the model, spread over that mesh

`e` is the Experiment throughout; labkit.run.participant trains what comes out.
"""

from functools import partial
from math import prod

from labkit import models, tensor_parallel
from labkit.composition import Composed
from labkit.mesh import Mesh
from labkit.models import plans
from labkit.models.gpt import Network, Stage
from labkit.moe import MoE, balanced
from labkit.pipeline import gpipe, one_f_one_b
from labkit.trainer import parallelize


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
