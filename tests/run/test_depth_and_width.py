"""Depth and width of an Experiment: the model, its estimates, its identity and Megatron's arguments."""

import io
from functools import partial

import pytest
import torch
from losses_of import losses_of
from torch.utils.data import default_collate

from labkit import models
from labkit.measure.flops import step_flops
from labkit.run import auto_strategy, frameworks
from labkit.run import training as train
from labkit.run.context import Context, EventFile
from labkit.run.experiment import Experiment
from labkit.run.experiment_mesh import model_of
from labkit.run.experiment_runner import Participant, estimate

CASES = [
    ("mlp", "tiny", 3, 0, {"sizes": (64, 256, 256, 256, 10)}),
    ("mlp", "small", 2, 96, {"sizes": (64, 96, 96, 10)}),
    ("resnet", "small", 14, 0, {"depth": 14, "width": 32}),
    ("resnet", "tiny", 0, 6, {"depth": 8, "width": 6}),
    ("gpt", "tiny", 3, 48, {"layers": 3, "heads": 3, "width": 48}),
    ("gpt", "small", 0, 64, {"layers": 4, "heads": 2, "width": 64}),
    ("gpt", "tiny", 0, 0, {"layers": 2, "heads": 2, "width": 32}),
]
MEGATRON = {"micro-batch-size": 4, "lr-decay-style": "cosine", "train-iters": 9}
SHAPE = {"num-layers": 12, "hidden-size": 768, "num-attention-heads": 12}
SHAPE |= {"seq-length": 64, "max-position-embeddings": 64, "vocab-size": 256}


def named(case):
    model, size, depth, width, _ = case
    return Experiment(model=model, size=size, depth=depth, width=width, batch_size=8)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_model_is_its_class_with_these_arguments(case):
    torch.manual_seed(3)
    ours = model_of(named(case)).state_dict()
    torch.manual_seed(3)
    wanted = models.CLASSES[case[0]](**case[-1]).state_dict()
    assert list(ours) == list(wanted) and all(torch.equal(ours[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_and_flops_are_of_that_model(ranks, case):
    experiment, model, arguments = named(case), case[0], case[-1]
    numel = sum(p.numel() for p in models.CLASSES[model](**arguments).parameters())
    for rank in estimate(experiment, 2):
        assert rank.held["parameters"] == 4 * numel
    batch = default_collate([models.data.load("auto", model)[0]] * 4)
    with torch.device("meta"):
        module = models.CLASSES[model](**arguments)
    of_a_rank = step_flops(module, *(part.to("meta") for part in batch), models.loss(model))
    assert ranks(2, flops, fields=experiment.to_dict()) == [2 * of_a_rank] * 2


def flops(rank, world_size, fields):
    context = Context(rank, world_size, 0, 0, torch.device("cpu"), EventFile(io.StringIO()))
    return Participant(context, Experiment.from_dict(fields)).flops


def test_auto_compares_jobs_of_that_model():
    experiment = Experiment(model="gpt", depth=5, width=64, batch_size=8)
    shape = auto_strategy.job(experiment, 2, 2, torch.device("cpu"), "fsdp", False).shape
    assert (shape.layers, shape.hidden, shape.heads, shape.ffn) == (5, 64, 4, 256)


def test_its_ranks_train_what_one_process_trains(ranks):
    """4 layers of 4 heads on 4 ranks, which the size's own 2 of 2 could not be divided into."""
    base = Experiment(model="gpt", depth=4, width=64, batch_size=16, precision="fp64")
    mean = partial(losses_of, ranks=ranks, world_size=4, steps=3)
    wanted = mean(base.replace(strategy="single"))
    for changes in ({"strategy": "fsdp"}, {"tensor": 4}, {"pipeline": 4, "strategy": "ddp_naive", "accumulation": 4}):
        assert mean(base.replace(**changes)) == pytest.approx(wanted, abs=1e-12), changes


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "gpt", "width": 40}, "width=40 must be a multiple of 16, the width of a head"),
        ({"model": "gpt", "size": "medium", "width": 96}, "width=96 must be a multiple of 64"),
        ({"model": "resnet", "depth": 9}, r"depth=9 must be 6n \+ 2"),
        ({"model": "mine:task", "depth": 3}, "a custom model has its own data, size, depth and width"),
        ({"model": "mine:task", "width": 3}, "leave them at their defaults"),
        ({"depth": 1}, "depth=1 must be at least 2: a unit is a layer that keeps its width"),
        ({"depth": -1}, r"Experiment\(depth=-1\): must be at least 0"),
        ({"model": "gpt", "depth": 3, "pipeline": 2, "strategy": "ddp_naive"}, "the 3 layers of this GPT must be"),
        ({"model": "gpt", "width": 48, "tensor": 2}, "the 3 heads of this GPT must be divisible by tensor"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_one_line(fields, words):
    with pytest.raises(ValueError, match=words) as said:
        Experiment(**fields)
    assert "\n" not in str(said.value)


def test_another_depth_is_another_run_and_older_checkpoints_load():
    usual = train.Run(Experiment(), {})
    old = usual.state_dict()
    old["fields"] = {name: was for name, was in old["fields"].items() if name not in train.NEWER}
    assert usual.problems(old) == []
    assert train.Run(Experiment(depth=3), {}).problems(old) == ["depth was 0, is now 3"]
    wide = train.Run(Experiment(width=8), {})
    assert usual.problems(wide.state_dict()) == ["width was 8, is now 0"]


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, {"size": "medium", "depth": 12, "width": 768}),
        ({"num-layers": 6}, {"size": "medium", "depth": 0, "width": 768}),
        ({"hidden-size": 192}, {"size": "tiny", "depth": 12, "width": 192}),
        ({"hidden-size": 1536}, {}),  # heads of 128 channels
        ({"seq-length": 1024, "max-position-embeddings": 1024}, {"size": "medium", "depth": 12, "width": 768}),
        ({"vocab-size": None, "swiglu": True}, {"size": "medium", "depth": 12, "width": 768}),
        ({"num-layers": None}, {}),
        ({"num-layers": "$LAYERS"}, {}),
    ],
    ids=str,
)
def test_megatrons_sizes_hold_if_the_lab_has_such_heads(changes, fields):
    base = Experiment(size="small")
    found = frameworks.read(MEGATRON | SHAPE | changes, "megatron", 2, base=base).experiment
    wanted = {"size": "small", "depth": 0, "width": 0} | fields
    assert {name: getattr(found, name) for name in wanted} == wanted
