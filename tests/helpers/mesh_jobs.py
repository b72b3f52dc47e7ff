"""GPTs on meshes of several axes, and their batches."""

from functools import cache, partial

import torch

from labkit import models
from labkit.attention.context_parallel import ulysses_attention
from labkit.fsdp import FSDP
from labkit.models import plans
from labkit.models.gpt import GPT, Block, Network, Stage
from labkit.moe import MoE, Routing
from labkit.pipeline import dual_pipe, gpipe, interleaved, zero_bubble
from labkit.tensor_parallel import tensor_parallel

F64, BATCH, LENGTH, STEPS = torch.float64, 8, 16, 3
LOSS = models.loss("gpt")
FSDP_BLOCKS = partial(FSDP, unit=Block)
PIPELINED = {"stage": Stage, "micro_batches": 4, "loss": LOSS}
MIXED, BY_BIAS = {"mixture": {}}, {"mixture": {"balance": "bias", "routing": Routing("sigmoid")}}


def plan(mixture=None):
    """The plan of tensor parallelism of gpt(), with whole logits."""
    return plans.gpt(tensor_parallel, whole_logits=True, experts=mixture is not None)


def gpt(seed, mixture=None):
    """A float64 GPT with weights drawn from the seed. mixture: options of MoE, in place of each block's network."""
    torch.manual_seed(seed)
    network = Network if mixture is None else partial(experts, **mixture)
    return GPT(vocab=257, context=LENGTH, layers=4, heads=4, width=16, network=network).to(F64)


def experts(width, dropout, number=4, **options):
    """A mixture of networks as a block has one."""
    return MoE(width, number, expert=partial(Network, width, dropout), **options)


@cache
def text(step):
    """Tokens and targets of a step's global batch, (BATCH, LENGTH) each."""
    data = models.data.load("stdlib_text", "gpt")
    rows = [data[BATCH * step + number] for number in range(BATCH)]
    return torch.stack([row[0][:LENGTH] for row in rows]), torch.stack([row[1][:LENGTH] for row in rows])


def part_of_batch(model, mesh):
    """This rank's samples and tokens of a step's batch."""

    def batch_of(step):
        axes = [axis for axis in ("dp", "ep") if axis in mesh.axes]
        parts, place = (mesh.size(*axes), mesh.rank(*axes)) if axes else (1, 0)
        return [model.own_tokens(whole.chunk(parts)[place]) for whole in text(step)]

    return batch_of


JOBS = {
    "dp 2 x pp 2 x tp 2": ({"pp": 2, "dp": 2, "tp": 2}, PIPELINED),
    "fsdp 2 x tp 2": ({"dp": 2, "tp": 2}, {"wrap": FSDP_BLOCKS}),
    "fsdp 2 x tp 2, one unit": ({"dp": 2, "tp": 2}, {"wrap": partial(FSDP, shard="grad_op")}),
    "dp 2 x tp 2": ({"dp": 2, "tp": 2}, {}),
    "cp 2 x tp 2": ({"cp": 2, "tp": 2}, {}),
    "dp 2 x cp 2": ({"dp": 2, "cp": 2}, {"attend": ulysses_attention}),
    "pp 2 x dp 2": ({"pp": 2, "dp": 2}, PIPELINED | {"schedule": gpipe}),
    "pp 2 x dp 2, from both ends": ({"pp": 2, "dp": 2}, PIPELINED | {"schedule": dual_pipe, "stages": 4}),
    "pp 2 x tp 2": ({"pp": 2, "tp": 2}, PIPELINED | {"schedule": zero_bubble}),
    "pp 2 x tp 2, two stages a rank": ({"pp": 2, "tp": 2}, PIPELINED | {"schedule": interleaved, "stages": 4}),
    "fsdp 2 x cp 2 x tp 2": ({"dp": 2, "cp": 2, "tp": 2}, {"wrap": FSDP_BLOCKS}),
    "tp 2": ({"tp": 2}, {}),
    "ep 2": ({"ep": 2}, MIXED),
    "ep 4, by bias": ({"ep": 4}, BY_BIAS),
    "dp 2 x ep 2": ({"dp": 2, "ep": 2}, MIXED),
    "dp 2 x ep 2, in two parts": ({"dp": 2, "ep": 2}, {"mixture": {"balance": None}, "accumulation": 2}),
    "cp 2 x ep 2": ({"cp": 2, "ep": 2}, MIXED),
    "dp 2 x ep 2 x tp 2": ({"dp": 2, "ep": 2, "tp": 2}, MIXED),
    "fsdp 2 with experts": ({"dp": 2}, MIXED | {"wrap": FSDP_BLOCKS}),
}
