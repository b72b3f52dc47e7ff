"""The planner with strategy="auto": the job that it is given, the order it returns, and the choice of the ranks."""

import io
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from labkit import models
from labkit.memory import LADDER
from labkit.run import auto_strategy
from labkit.run.context import Context, EventFile
from labkit.run.experiment import Experiment
from labkit.run.experiment_runner import Participant
from labkit.scale import constants
from labkit.scale.hardware import GPUS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BASE = Experiment(model="gpt", batch_size=16, optimizer="adamw", lr=1e-3, strategy="auto")


def ordered(e, ranks, of_node, device):
    seconds = [auto_strategy.step_seconds(e, ranks, of_node, device, rung) for rung in LADDER]
    return auto_strategy.in_order(LADDER, seconds), dict(zip(LADDER, seconds, strict=True))


def test_the_job_is_what_the_experiment_is():
    e = BASE.replace(size="small", tensor=2, pipeline=2, accumulation=2, precision="fp64")
    job = auto_strategy.job(e, 8, 4, CPU, "fsdp_offload", True)
    gpt = models.build("gpt", "small")
    assert (job.dp, job.tp, job.pp, job.cp, job.n_gpus, job.gpus_per_node) == (2, 2, 2, 1, 8, 4)
    assert (job.zero, job.recompute, job.offload, job.dtype) == (3, "full", True, "fp32")
    assert job.step_tokens == 16 * gpt.context and job.grad_accum == 2
    vectors = sum(p.numel() for p in gpt.parameters() if p.dim() == 1)  # biases and norms
    matrices = sum(p.numel() for p in gpt.parameters()) - vectors
    assert matrices < job.shape.parameters < matrices + vectors
    assert auto_strategy.job(BASE, 2, 2, CPU, "ddp_bucketed", False).zero == 0
    assert auto_strategy.job(BASE.replace(recompute="alternate"), 2, 2, CPU, "zero1", False).recompute == "half"


def test_what_is_alike_keeps_its_order():
    assert auto_strategy.error() == pytest.approx(0.071, abs=0.02)
    assert auto_strategy.in_order("abcd", [1.2, 0.97, 0.5, 0.52]) == ["c", "d", "b", "a"]
    assert auto_strategy.in_order("ab", [1.06, 1.0]) == ["a", "b"]


def test_the_order_follows_the_machine_and_the_job(monkeypatch):
    """Long optimizer steps want ZeRO, accumulation no gathers, and a bus recomputation before offload."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert auto_strategy.machine(CUDA).tflops == GPUS["h100-80gb"].tflops
    medium = BASE.replace(size="medium")
    order, seconds = ordered(medium, 8, 8, CUDA)
    assert order[:3] == [("zero1", False), ("zero2", False), ("ddp_bucketed", False)]
    assert order.index(("fsdp", True)) < order.index(("fsdp_offload", False))
    for before, after in pairwise(order):
        assert seconds[before] < seconds[after] * (1 + auto_strategy.error())
    several, _ = ordered(medium.replace(accumulation=2), 8, 8, CUDA)
    assert several[:2] == [("zero1", False), ("ddp_bucketed", False)]
    here, _ = ordered(BASE.replace(size="small", batch_size=64), 2, 2, CPU)
    assert here == list(LADDER)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Radeon")
    assert auto_strategy.machine(CUDA).name == "A100-PCIe"


@pytest.mark.parametrize("strategy", ["ddp_bucketed", "zero1", "fsdp"])
def test_gradients_are_hidden_by_backward_as_far_as_they_leave_in_it(strategy):
    c = constants.values()
    job = auto_strategy.job(BASE.replace(size="medium", batch_size=64), 2, 2, CPU, strategy, False)
    early = {"ddp_bucketed": 1, "zero1": 0.5, "fsdp": None}[strategy]
    share = auto_strategy.exposed_share(job, c)
    assert share == (0 if early is None else pytest.approx(1 - early * (1 - c["exposed"])))
    if early:  # nothing is hidden by a backward that takes no time
        instant = replace(job, gpu=replace(job.gpu, tflops={"fp32": 1e9, "bf16": 1e9}, memory_gbs=1e9))
        assert auto_strategy.exposed_share(instant, c) > 0.99


def settled(rank, world_size, fields, seconds):
    """The chosen strategy. seconds: {strategy: its seconds, given to each rank}, or None: the planner's."""
    context = Context(rank, world_size, 0, 0, CPU, EventFile(io.StringIO()))
    with pytest.MonkeyPatch.context() as patch:
        if seconds:
            patch.setattr(auto_strategy, "step_seconds", lambda *job: 1.0 * seconds.get(job[-1][0], [9, 9])[rank])
        return Participant(context, Experiment.from_dict(fields)).experiment.strategy


@pytest.mark.slow
def test_ranks_take_the_fastest_that_fits_and_the_same(ranks):
    def taken(seconds, **changes):
        return ranks(2, settled, fields=BASE.replace(**changes).to_dict(), seconds=seconds)

    told = {"ddp_bucketed": [2, 1], "zero1": [1, 1], "fsdp": [3, 3]}
    assert taken(told) == ["zero1"] * 2
    assert taken(told | {"zero1": [1, 3]}) == ["ddp_bucketed"] * 2  # the slowest rank's time is the step's
    assert taken(told | {"fsdp": [0.1, 0.1]}, context=2) == ["fsdp"] * 2  # on a mesh
    assert taken(None) == ["ddp_bucketed"] * 2
    for unknown in ({"compute": "emulated", "block_ms": 1.0}, {"model": "mlp"}):
        assert taken(told, **unknown) == ["ddp_bucketed"] * 2
