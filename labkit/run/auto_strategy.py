"""strategy="auto": the strategy with the shortest predicted step, of those that fit into memory.

    memory   each candidate's dry run (labkit.memory): on a mesh by every rank, and the fullest
             must fit
    time     Experiment, ranks, device  ->  a Job for each candidate  ->  labkit.scale.cost

    |  DDP   ZeRO-1  |  FSDP  |     |  FSDP, recomputed  |      seconds, logarithmic: candidates in
    +----------------+--------+-----+--------------------+->    one interval keep the order of
    fastest       x 1.07   x 1.15                               labkit.memory: cheap to expensive

The width of an interval is the planner's error: the median over published rows whose sources are
held out of the fit. A CUDA device is looked up in labkit.scale.hardware; an unknown one counts as
an A100-PCIe, and a CPU as CPU_RANK. Nothing is timed, so a restarted job chooses the same strategy.
Only GPTs with real arithmetic have a predicted time: cost.py does not model other layers or
emulated compute. Other models keep the order of labkit.memory.

`participant` is a Participant of labkit.run.experiment_runner, `e` an Experiment, and a rung one of
labkit.memory: (strategy, whether units are recomputed).
"""

import json
import os
from dataclasses import asdict, replace
from functools import partial
from math import log, nan, prod

import torch
import torch.distributed as dist

from labkit import comm, models
from labkit.measure.machine import free_bytes
from labkit.memory import Estimate, choose, first_that_fits, words_of
from labkit.recompute import checkpoint
from labkit.replicas import gather_bytes
from labkit.run.experiment_mesh import gpt_sizes, strategies_of
from labkit.scale import constants
from labkit.scale.collectives import NETWORK_SHARE, NODE_SHARE
from labkit.scale.cost import gradient_seconds, layer_seconds, predict_step
from labkit.scale.fit import errors_kept_out
from labkit.scale.hardware import GPU, find_gpu
from labkit.scale.job_config import job_of

ZERO = {"zero1": 1, "zero2": 2, "fsdp": 3, "fsdp_offload": 3}
RECOMPUTED = {"none": "none", "every": "full", "alternate": "half", "matmul": "selective"}
SAME_SPEED = {"fp16": "bf16", "fp64": "fp32"}  # cost.py has fp16 without fused attention, no fp64
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


def choose_strategy(participant, module, optimizer):
    """Return the Experiment with the chosen strategy; rank 0 prints why. Collective.

    optimizer: function parameters -> Optimizer. Raises MemoryError on every rank if nothing fits.
    """
    e = participant.experiment
    free = int(e.memory_mb * 2**20) or free_bytes(participant.device, participant.world_size)
    least = torch.tensor(free, device=participant.device)
    comm.all_reduce(least, dist.ReduceOp.MIN)  # the ranks must not choose differently
    if e.axes:
        choice = choose_on_mesh(participant, least.item())
    else:
        choice = choose_without_mesh(participant, module, optimizer, least.item())
    if dist.get_rank() == 0:
        print(choice)
    strategy = choice.strategy + ("_offload" if choice.offload else "")
    return e.replace(strategy=strategy, recompute="every" if choice.recompute else e.recompute)


def choose_without_mesh(participant, module, optimizer, memory_bytes):
    """Return a Choice for data parallelism alone."""
    e, begin = participant.experiment, participant.batches.state_dict()
    input, target = participant.complete_batch()
    participant.batches.load_state_dict(begin)  # training gets this batch, too
    memory = memory_bytes - input.nbytes - target.nbytes
    options = {"precision": e.precision, "unit": models.unit(e.model), "recompute": checkpoint}
    options["order"] = partial(order, participant)
    loss, ranks = models.loss(e.model), participant.world_size
    return choose(module, input, memory, ranks, loss, target, optimizer, **options)


def choose_on_mesh(participant, memory_bytes):
    """Return a Choice along dp; the other axes are given."""
    rungs = [(strategy, False) for strategy in strategies_of(participant.experiment)]
    rungs = order(participant, rungs)
    return first_that_fits(rungs, lambda rung: fullest(participant, rung[0]), memory_bytes)


def fullest(participant, strategy):
    """Return the Estimate of the rank that needs most memory under a strategy. Collective."""
    own = json.dumps(asdict(participant.estimate_with(strategy))).encode()
    everyone = gather_bytes(own, device=participant.device)
    estimates = [Estimate(**json.loads(one)) for one in everyone]
    return max(estimates, key=lambda one: one.peak_total)


def order(participant, rungs):
    """Return the rungs, the fastest by prediction first; rank 0 prints why. Collective."""
    e, ranks, device = participant.experiment, participant.world_size, participant.device
    if not has_terms_for(e):
        return rungs
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    each = [step_seconds(e, ranks, local, device, rung) for rung in rungs]
    slowest = torch.tensor(each, device=device)
    comm.all_reduce(slowest, dist.ReduceOp.MAX)  # the ranks must not choose differently
    seconds = slowest.tolist()
    if dist.get_rank() == 0:
        times = ", ".join(f"{words_of(r)} {s:.3g} s" for r, s in zip(rungs, seconds, strict=True))
        print(f"A step is predicted to take: {times}; less than {error():.1%} is no difference.")
    return in_order(rungs, seconds)


def in_order(rungs, seconds):
    """Sort the rungs by seconds; rungs that differ by less than the error keep their order."""
    step, fastest = log(1 + error()), min(seconds)
    interval = {r: int(log(s / fastest) / step) for r, s in zip(rungs, seconds, strict=True)}
    return sorted(rungs, key=interval.get)


def error():
    """Return the median error of the planner's time."""
    return errors_kept_out()["time", "source"]


def has_terms_for(e):
    """Return whether labkit.scale.cost can predict the time of an Experiment."""
    return e.model == "gpt" and e.compute == "real"


def step_seconds(e, ranks, ranks_of_node, device, rung):
    """Return the predicted seconds of a step of Experiment e under a rung."""
    step, c = job(e, ranks, ranks_of_node, device, *rung), constants.values()
    return predict_step(step, c | {"data_exposed": exposed_share(step, c)}).seconds


def exposed_share(job, c):
    """Return the share of the gradients' messages that a rank waits for.

    data_exposed applies to stacks that send gradients after backward. The lab's classes send them
    during backward, as FSDP does (see c["exposed"]); ZeRO gathers parameters after it.
    """
    messages = gradient_seconds(job, c | {"data_exposed": 1.0})
    if not messages:
        return 0.0
    times = job.grad_accum if job.zero == 2 else 1
    early = messages if job.zero == 0 else messages * times / (1 + times)
    backward = times * 2 / 3 * job.shape.layers / job.pp * layer_seconds(job, c)
    return 1 - (1 - c["exposed"]) * min(early, backward) / messages


def job(e, ranks, ranks_of_node, device, strategy, recomputed):
    """Return the labkit.scale Job of a step."""
    gpt, dp = gpt_sizes(e), ranks // prod(e.axes.values())
    model = {"hidden": gpt["width"], "ffn": 4 * gpt["width"], "seq_len": gpt["context"]}
    model |= {name: gpt[name] for name in ("layers", "heads", "vocab", "tied")}
    return job_of(
        {
            **model,
            "n_gpus": ranks,
            "gpus_per_node": ranks_of_node,
            "dp": dp,
            "tp": e.tensor,
            "pp": e.pipeline,
            "cp": e.context,
            "zero": ZERO.get(strategy, 0),
            "micro_batch": e.batch_size // dp // e.accumulation,
            "grad_accum": e.accumulation,
            "gpu": machine(device),
            "recompute": "full" if recomputed else RECOMPUTED[e.recompute],
            "offload": strategy.endswith("_offload"),
            "precision": SAME_SPEED.get(e.precision, e.precision),
            "stack": "torch-fsdp",
        }
    )


def machine(device):
    """Return the GPU (labkit.scale.hardware) of a device, with links at half their speed.

    The lab sends gradients in 32 bits an element, and cost.py counts 16.
    """
    gpu = CPU_RANK
    if device.type == "cuda":
        try:
            gpu = find_gpu(torch.cuda.get_device_name(device))
        except ValueError:
            gpu = find_gpu("A100-PCIe")
    return replace(gpu, node_gbs=gpu.node_gbs / 2, network_gbps=gpu.network_gbps / 2)
