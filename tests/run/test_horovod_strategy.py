"""Strategy horovod trains what ddp_bucketed trains, bit for bit, and their checkpoints are the same."""

import io

import pytest
import torch
from train_command import lines, run

from labkit import models
from labkit.horovod import Compression, compressed_average
from labkit.run import frameworks
from labkit.run.context import Context, EventFile
from labkit.run.experiment import Experiment
from labkit.run.experiment_runner import Participant, estimate
from labkit.run.training import weights_sha256
from labkit.trainer import parallelize

BASE = Experiment(strategy="horovod", batch_size=16, lr=0.01)
CASES = [
    {},
    {"accumulation": 4},
    {"clip": 0.05},
    {"precision": "fp16"},
    {"precision": "fp16", "accumulation": 2, "clip": 0.05},
    {"precision": "bf16", "optimizer": "adamw", "weight_decay": 0.1},
    {"precision": "fp64", "warmup_steps": 2, "schedule": "cosine"},
    {"comm_hook": "fp16"},
    {"comm_hook": "fp16", "accumulation": 2, "clip": 0.05},
    {"bucket_cap_mb": 0.05, "accumulation": 2},
    {"model": "resnet"},
    {"model": "resnet", "recompute": "every", "accumulation": 2},
    {"model": "gpt", "depth": 3},
    {"model": "gpt", "precision": "fp16", "recompute": "every", "clip": 0.1},
    {"model": "gpt", "curriculum": "fixed_linear", "curriculum_from": 8, "curriculum_steps": 4},
    {"model": "gpt", "attention": "flash"},
]


def trained(rank, world_size, fields):
    """[(loss, gradient norm, loss scale)] of each step, the bytes and messages of one, and a hash of the weights."""
    context = Context(rank, world_size, rank, 0, torch.device("cpu"), EventFile(io.StringIO()))
    experiment = Experiment.from_dict(fields)
    as_horovod = experiment.strategy == "ddp_bucketed" and experiment.comm_hook == "fp16"
    participant = Participant(context, experiment.replace(comm_hook="none") if as_horovod else experiment)
    trainer, found = participant.trainer, []
    if as_horovod:  # whose sums have 16 bits; those of labkit.compression have more
        trainer.model.register_comm_hook((Compression.fp16, None), compressed_average)
    for _ in range(6):
        loss, events = participant.advance()
        norm = trainer.gradient_norm
        gradients = [event for event in events if event.op != "broadcast"]  # DDP sends buffers of BatchNorm, too
        sent = sum(event.sent_bytes for event in gradients), len(gradients)
        found.append((loss.item(), None if norm is None else norm.item(), trainer.scaler.get_scale(), *sent))
    parameters = torch.nn.ParameterList(trainer.model.parameters())
    return found, weights_sha256(parameters)


# A mean over 3 ranks is rounded, one over 2 is not.
ON_3_RANKS = [{}, {"accumulation": 4}, {"comm_hook": "fp16", "accumulation": 2, "clip": 0.05}, {"model": "resnet"}]
ON_3_RANKS.append({"model": "gpt", "precision": "fp16", "recompute": "every", "clip": 0.1})


@pytest.mark.parametrize(
    ("changes", "world_size"), [*((case, 2) for case in CASES), *((case, 3) for case in ON_3_RANKS)], ids=str
)
def test_it_trains_what_ddp_trains(ranks, changes, world_size):
    experiment = BASE.replace(batch_size=24, **changes)
    ours = ranks(world_size, trained, fields=experiment.to_dict())
    ddp = ranks(world_size, trained, fields=experiment.replace(strategy="ddp_bucketed").to_dict())
    assert ours == ddp
    assert len({digest for _, digest in ours}) == 1 and ours[0][0][0][0] != ours[0][0][-1][0]


def begun(rank, world_size):
    torch.manual_seed(rank)
    return weights_sha256(parallelize(models.build("resnet"), "horovod"))


def test_all_ranks_begin_with_the_weights_of_rank_0(ranks):
    torch.manual_seed(0)
    assert ranks(3, begun) == [weights_sha256(models.build("resnet"))] * 3


@pytest.mark.slow
def test_either_goes_on_from_a_checkpoint_of_the_other(tmp_path):
    """horovod, ddp_bucketed, horovod: after each step the other one, and the log is that of one run."""
    words = ("--model", "gpt", "--precision", "fp16", "--accumulation", 2)
    whole, broken, places = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl", tmp_path / "places"
    code, _, error = run(2, *words, "--steps", 4, "--log", whole)
    assert code == 0, error
    options = (*words, "--steps", 4, "--log", broken, "--checkpoint-dir", places, "--checkpoint-every", 1)
    for strategy in ("horovod", "ddp_bucketed"):
        code, _, error = run(2, *options, "--strategy", strategy, "--stop-after", "0")
        assert code == 0, error
    code, out, error = run(2, *options, "--strategy", "horovod")
    assert code == 0 and "resumes after step 2" in out, error
    same = ("step", "loss", "gradient_norm", "weights_sha256")
    ours, theirs = ([{name: line.get(name) for name in same} for line in lines(log)] for log in (broken, whole))
    assert ours == theirs and ours[-1]["weights_sha256"]


@pytest.mark.parametrize("changes", [{}, {"accumulation": 2, "optimizer": "adamw"}, {"model": "gpt"}], ids=str)
def test_its_memory_is_that_of_ddp(changes):
    experiment = BASE.replace(**changes)
    for ours, ddp in zip(
        estimate(experiment, 2), estimate(experiment.replace(strategy="ddp_bucketed"), 2), strict=True
    ):
        assert (ours.peak, ours.held, ours.moment) == (ddp.peak, ddp.held, ddp.moment)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"comm_hook": "topk"}, r"comm_hook='topk'\): horovod takes none or fp16"),
        ({"model": "gpt", "tensor": 2}, "needs one of the strategies ddp_naive, ddp_overlapped, ddp_bucketed"),
        ({"model": "gpt", "experts": 4}, "needs one of the strategies"),
    ],
    ids=str,
)
def test_what_it_cannot_have_is_named(fields, words):
    with pytest.raises(ValueError, match=words):
        BASE.replace(**fields)


def test_its_calls_are_those_of_ddp():
    ours = frameworks.write(BASE.replace(comm_hook="fp16", accumulation=2, clip=0.5), "horovod", 4)
    ddp = BASE.replace(comm_hook="fp16", accumulation=2, clip=0.5, strategy="ddp_bucketed")
    assert ours.config == frameworks.write(ddp, "horovod", 4).config
    for framework in ("deepspeed", "accelerate", "torchtitan", "megatron"):
        with pytest.raises(ValueError, match=r"Experiment\(strategy='horovod'\): .* cannot express it"):
            frameworks.write(BASE, framework, 4)
