"""How long the planner thinks that a step takes under each strategy: the order of strategy="auto".

    Experiment, ranks, device  ->  a Job for each strategy  ->  labkit.scale.cost  ->  seconds

    |  DDP   ZeRO-1  |  FSDP  |     |  FSDP, recomputed  |      seconds, logarithmic: what lies in
    +----------------+--------+-----+--------------------+->    one step of the planner's error is
    fastest       x 1.07   x 1.15                               alike and keeps its given order

The error is that of published rows whose sources are in no fit: their median. A CUDA device is
looked up in hardware.py, and taken for an A100-PCIe where it is not there; a CPU is CPU_RANK.
Nothing is timed: a job that is started again chooses what it chose. Known are GPTs with real
arithmetic: cost.py has no term for other layers, nor for the sleep that emulates them.
"""

from dataclasses import replace
from math import log, nan, prod

import torch

from labkit.memory import words_of
from labkit.run.experiment_mesh import gpt_sizes
from labkit.scale import constants
from labkit.scale.collectives import NETWORK_SHARE, NODE_SHARE
from labkit.scale.cost import gradient_seconds, layer_seconds, predict_step
from labkit.scale.fit import errors_kept_out
from labkit.scale.hardware import GPU, find_gpu
from labkit.scale.job_config import job_of

ZERO = {"zero1": 1, "zero2": 2, "fsdp": 3, "fsdp_offload": 3}
RECOMPUTED = {"none": "none", "every": "full", "alternate": "half", "matmul": "selective"}
ALIKE = {"fp16": "bf16", "fp64": "fp32"}  # cost.py: fp16 is older than fused attention, no fp64
CPU_RANK = GPU(
    name="a rank on a CPU",
    generation="measured",
    tflops={"fp32": 0.08, "bf16": 0.08},
    achievable={"fp32": 1.0, "bf16": 1.0},
    memory_gib=nan,
    memory_gbs=11,
    node_gbs=1 / NODE_SHARE,
    host_gbs=11,
    network_gbps=1 / NETWORK_SHARE,
    watts=nan,
    source="51_planner on 2 cores; links assumed: 8 Gbit/s in a node, 1 between, 0.1 ms a hop",
    edge={"fp32": 17.0, "bf16": 17.0},
    hop=1e-4,
)


def knows(e):
    """Has the planner terms for an Experiment?"""
    return e.model == "gpt" and e.compute == "real"


def in_order(rungs, seconds):
    """The rungs by their seconds; those that the planner cannot tell apart stay as they are."""
    step, fastest = log(1 + error()), min(seconds)
    where = {r: int(log(s / fastest) / step) for r, s in zip(rungs, seconds, strict=True)}
    return sorted(rungs, key=where.get)


def told(rungs, seconds):
    """What rank 0 prints: a line."""
    each = ", ".join(f"{words_of(r)} {s:.3g} s" for r, s in zip(rungs, seconds, strict=True))
    return f"A step is predicted to take: {each}; less than {error():.1%} is no difference."


def error():
    """Median error of the planner's time."""
    return errors_kept_out()["time", "source"]


def step_seconds(e, ranks, ranks_of_node, device, rung):
    """Of Experiment e under a rung of labkit.memory: (strategy, units recomputed)."""
    step, c = job(e, ranks, ranks_of_node, device, *rung), constants.values()
    return predict_step(step, c | {"data_exposed": waited_for(step, c)}).seconds


def waited_for(job, c):
    """The share of gradients' messages that is waited for.

    data_exposed is of stacks whose gradients travel after backward. The lab's leave in it, as those
    of FSDP do, of which c["exposed"] tells; ZeRO gathers parameters after it.
    """
    messages = gradient_seconds(job, c | {"data_exposed": 1.0})
    if not messages:
        return 0.0
    times = job.grad_accum if job.zero == 2 else 1
    early = messages if job.zero == 0 else messages * times / (1 + times)
    backward = times * 2 / 3 * job.shape.layers / job.pp * layer_seconds(job, c)
    return 1 - (1 - c["exposed"]) * min(early, backward) / messages


def job(e, ranks, ranks_of_node, device, strategy, recomputed):
    """The labkit.scale Job of a step."""
    gpt, dp = gpt_sizes(e), ranks // prod(e.axes.values())
    layout = {"n_gpus": ranks, "gpus_per_node": ranks_of_node, "dp": dp, "tp": e.tensor}
    layout |= {"pp": e.pipeline, "cp": e.context, "zero": ZERO.get(strategy, 0)}
    batch = {"micro_batch": e.batch_size // dp // e.accumulation, "grad_accum": e.accumulation}
    model = {"hidden": gpt["width"], "ffn": 4 * gpt["width"], "seq_len": gpt["context"]}
    model |= {name: gpt[name] for name in ("layers", "heads", "vocab", "tied")}
    return job_of(
        model
        | layout
        | batch
        | {
            "gpu": machine(device),
            "recompute": "full" if recomputed else RECOMPUTED[e.recompute],
            "offload": strategy.endswith("_offload"),
            "precision": ALIKE.get(e.precision, e.precision),
        }
    )


def machine(device):
    """The GPU that a device is, at half the speed of its links: the lab sends 32 bits an element.

    cost.py counts 16, as its jobs do.
    """
    gpu = CPU_RANK
    if device.type == "cuda":
        try:
            gpu = find_gpu(torch.cuda.get_device_name(device))
        except ValueError:
            gpu = find_gpu("A100-PCIe")
    return replace(gpu, node_gbs=gpu.node_gbs / 2, network_gbps=gpu.network_gbps / 2)
