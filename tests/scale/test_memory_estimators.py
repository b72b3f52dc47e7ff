"""Megatron-LM's and DeepSpeed's own estimators of memory agree with the planner, job by job.

memory_estimates.csv has the bytes that their functions returned, with the commit: Megatron Core 0.20, DeepSpeed 0.19.6.

    Megatron-LM   megatron/training/theoretical_memory_usage.py: compute_weight_and_optimizer_memory (states),
                  compute_activation_memory (activations), compute_activation_memory_without_sp (without sp)
    DeepSpeed     deepspeed/runtime/zero/stage_1_and_2.py and stage3.py: estimate_zero2_model_states_mem_needs
                  and estimate_zero3_model_states_mem_needs, with zero_init and without offloaded parameters

The vocabulary is not padded. Where they and the planner differ, a test names the difference and adds it.
"""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from labkit.scale import constants
from labkit.scale.job_config import job_of
from labkit.scale.memory_model import GIB, kept, stage_peak
from labkit.scale.model_row import row_of

C = constants.values()
TABLE = Path(__file__).with_name("memory_estimates.csv")
AXES = ("tp", "pp", "cp", "dp", "ep", "vpp")
STACKS = {"Megatron-LM": "megatron", "DeepSpeed": "deepspeed"}


def estimates(estimator, *kinds):
    """Return the rows of an estimator with one of the kinds, as parameters of a test."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["estimator"] == estimator and row["kind"] in kinds]
    assert rows
    columns = ("model", *AXES, "zero", "kind")
    return [pytest.param(row, id=" ".join(f"{name}={row[name]}" for name in columns)) for row in rows]


def job_from(row, stack=None):
    ranks = {name: int(row[name]) for name in AXES}
    gpus = ranks["tp"] * ranks["pp"] * ranks["cp"] * ranks["dp"]
    sizes = {name: int(row[name]) for name in ("micro_batch", "grad_accum", "seq_len", "zero")}
    where = {"gpu": "H100", "n_gpus": gpus, "stack": stack or STACKS[row["estimator"]], "recompute": "selective"}
    return job_of(row_of(row["model"]) | ranks | sizes | where | {"offload": row["offload"]})


def first_stage(job):
    """The peak of the first stage: the one that the estimators compute."""
    return stage_peak(job, C, 0, job.stages[0])


@pytest.mark.parametrize("row", estimates("Megatron-LM", "states"))
def test_states_are_megatrons(row):
    """They leave out cp (we shard over dp x cp) and learned positions, and divide no norm or router over tp.

    Uneven stages: they give each its mean number of layers, we the larger.
    """
    job = job_from(row)
    ours = first_stage(replace(job, cp=1)).states * GIB
    uneven = max(layers for layers, *_ in job.stages) * job.pp / job.shape.layers
    assert 0.997 <= ours / float(row["bytes"]) <= 1.003 * uneven
    assert (first_stage(job).states * GIB < ours) is (job.cp > 1)


@pytest.mark.parametrize("row", estimates("Megatron-LM", "activations", "without sp"))
def test_activations_are_megatrons(row):
    """They count dropout (two masks of a byte in a layer, one of the embedding), token numbers and fp32 logits.

    They leave out gates (a third factor of 2 bytes) and take keys and values to be as wide as queries. Without
    sequence parallelism masks are complete on each rank, logits have 2 bytes, and 5 % are added to the sum.
    """
    split = row["kind"] == "activations"
    job = job_from(row, "megatron" if split else "megatron-2020")
    shape, tokens, peak = job.shape, job.tokens, first_stage(job)
    layers = peak.activations * GIB / kept(job, C) / tokens  # times the micro-batches in flight
    masks = 2 * shape.hidden / (job.tp if split else 1)
    keys = 4 * (shape.hidden - shape.key_width) / job.tp
    gate = 2 * shape.ffn * shape.gated / job.tp
    flights = layers * job.pp / shape.layers
    ours = layers * (kept(job, C) + masks + keys - gate) + flights * (8 + shape.hidden) / (job.tp if split else 1)
    if job.pp == 1:
        logits = shape.vocab / job.tp
        ours += 4 * (shape.hidden / job.tp + logits) if split else 2 * (shape.hidden + logits)
    assert tokens * ours * (1 if split else 1.05) == pytest.approx(float(row["bytes"]), rel=0.001)


@pytest.mark.parametrize("row", estimates("DeepSpeed", "states"))
def test_states_are_deepspeeds(row):
    """ZeRO-3: they add 4 bytes for each parameter of the largest matrix, we count what is gathered."""
    peak = first_stage(job_from(row))
    matrix = 4 * int(row["largest"]) if row["zero"] == "3" else 0
    assert peak.states * GIB == pytest.approx(float(row["bytes"]) - matrix, rel=0.001)
    if matrix:
        assert 0.5 <= peak.gathered * GIB / matrix <= 1.1


@pytest.mark.parametrize("row", estimates("DeepSpeed", "host"))
def test_the_hosts_memory_is_deepspeeds(row):
    """They add half, their additional_buffer_factor, for pinned buffers."""
    assert 1.5 * first_stage(job_from(row)).host * GIB == pytest.approx(float(row["bytes"]), rel=0.001)
