"""Engines of DeepSpeed (from the JSON that the lab writes), PyTorch and Accelerate: the lab's weights, to the bit."""

from functools import partial

import engines
import pytest
import torch
from engines import STRATEGIES, Job
from installed_frameworks import FOLDER, MISSING

from labkit.run import launch

pytestmark = [pytest.mark.slow, pytest.mark.skipif(FOLDER is None, reason=MISSING)]
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
PLAIN = {
    "torch DDP": engines.torch_ddp,
    "torch ZeroRedundancyOptimizer": engines.torch_zero,
    "torch fully_shard": engines.torch_fsdp,
    "Accelerate": engines.accelerates_ddp,
    "lab zero2, states in a file": engines.labs_offload,
}
PAIRS = {"lab": engines.labs, "DeepSpeed": engines.deepspeeds}


def gap(weights, others):
    """The largest difference of parameters; NaN for a NaN. others may have more."""
    assert len(weights) >= 2
    return torch.stack([(value - others[name]).abs().max() for name, value in weights.items()]).max().item()


def with_one_process(job):
    """Yield (engine, gap to one process that adds up the gradients of the ranks' halves)."""
    halves = engines.one_process(job(), parts=2)
    yield "no training", gap(engines.weights_of(job().model()), halves)
    for name, engine in PLAIN.items():
        yield name, gap(engine(job()), halves)
    for name, engine in PAIRS.items():
        for strategy in (*STRATEGIES, "fsdp_offload"):
            yield f"{name} {strategy}", gap(engine(job(strategy=strategy)), halves)
    yield "lab fsdp_nvme", gap(engines.labs(job(strategy="fsdp_nvme")), halves)
    for strategy in STRATEGIES[1:]:
        yield f"DeepSpeed {strategy}, offload", gap(engines.deepspeeds(job(strategy=strategy), **OFFLOAD), halves)


def with_each_other(job, **changes):
    """Yield (strategy, gap of DeepSpeed to the lab)."""
    for strategy in STRATEGIES:
        ours, theirs = (engine(job(strategy=strategy, **changes)) for engine in PAIRS.values())
        yield strategy, gap(theirs, ours)


def pipelines():
    """Yield (engine, gap to one process that adds up the gradients of four micro-batches)."""
    job = Job(0, 1, accumulation=4)  # both ranks have the complete batch
    parts = engines.one_process(job, parts=4)
    yield "lab", gap(engines.labs_pipeline(job), parts)
    yield "DeepSpeed", gap(engines.deepspeeds_pipeline(job), parts)


def train_all(context, folder):
    engines.start_deepspeed(folder)
    job = partial(Job, context.rank, context.world_size)
    cases = {
        "engines": with_one_process(job),
        "accumulation": with_each_other(job, accumulation=2),
        "clip": with_each_other(job, clip=0.5),
        "pipeline": pipelines(),
    }
    for case, rows in cases.items():
        for engine, found in rows:
            context.record(case=case, engine=engine, gap=found)


@pytest.fixture(scope="module")
def gaps():
    """{case: {engine: [gap on each rank]}}, from one launch."""
    records = launch("test_deepspeed:train_all", folder=FOLDER, device="cpu", quiet=True).records
    return {case: rows.groupby("engine")["gap"].apply(list).to_dict() for case, rows in records.groupby("case")}


def test_engines_train_the_weights_of_one_process_to_the_bit(gaps):
    """Ten and more: also with offload, and from weights that training has changed."""
    found = gaps["engines"]
    assert min(found.pop("no training")) > 0.01
    assert len(found) == 19
    assert {name: of_ranks for name, of_ranks in found.items() if of_ranks != [0.0, 0.0]} == {}


def test_pipelines_of_two_stages_train_the_weights_of_one_process_to_the_bit(gaps):
    assert gaps["pipeline"] == {"lab": [0.0, 0.0], "DeepSpeed": [0.0, 0.0]}


def test_accumulation_and_clipping_add_up_in_another_order(gaps):
    """DeepSpeed's stages 2 and 3 average each micro-batch; the lab adds micro-batches first."""
    for strategy in STRATEGIES:
        found = gaps["accumulation"][strategy]
        exact = strategy in ("ddp_bucketed", "zero1")
        assert found == [0.0, 0.0] if exact else 0.0 < max(found) < 1e-5, strategy
        assert max(gaps["clip"][strategy]) < 1e-5, strategy
