"""Only the last layers or the output layer are trained: states, messages, time and activations, and what refuses."""

import json
from dataclasses import replace

import pytest
import torch
from autograd_bytes import kept_bytes
from torch import nn

from labkit.models.gpt import Block
from labkit.scale import constants
from labkit.scale.answer import answer
from labkit.scale.cost import frozen_parts, layer_parts, predict_step
from labkit.scale.job_config import job_of
from labkit.scale.launch_options import launch_options
from labkit.scale.memory_model import GIB, predict_memory
from labkit.scale.stacks import STACKS

C = constants.values()
LLAMA = {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 32000, "gated": "true", "tied": "false"}
ROW = LLAMA | {"gpu": "A100-80GB", "n_gpus": 8, "stack": "torch-fsdp", "seq_len": 2048}
SMALL = "layers=8,hidden=1024,heads=8,kv_heads=4,ffn=4096,vocab=8192,seq_len=2048"
TRAINED = ("head", "last:1", "last:2", "last:16", "last:32", "all")


def job(**changes):
    return job_of(ROW | changes)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_trained_parameters_have_states_and_frozen_ones_two_bytes(zero):
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    trained, ends = 4 * layer + 32000 * 4096, 2 * 32000 * 4096
    frozen = 32 * layer + ends - trained
    each = {0: 16, 2: 2 + 16 / 8, 3: 16 / 8}[zero]  # torch-fsdp on 8 GPUs
    expected = each * trained + frozen * (2 / 8 if zero == 3 else 2)
    assert predict_memory(job(train="last:4", zero=zero), C).states * GIB == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_more_that_is_trained_takes_more_time_and_memory(zero, recompute):
    jobs = [job(train=what, zero=zero, recompute=recompute) for what in TRAINED]
    seconds = [predict_step(one, C).seconds for one in jobs]
    peaks = [predict_memory(one, C) for one in jobs]
    assert seconds == sorted(set(seconds))
    assert [peak.states for peak in peaks] == sorted({peak.states for peak in peaks})
    assert [peak.activations for peak in peaks] == sorted(peak.activations for peak in peaks)


def test_all_layers_cost_what_they_cost_without_a_frozen_embedding():
    whole, last = (predict_step(job(train=what, zero=3), C).parts for what in ("all", "last:32"))
    for name in ("layers", "messages of layers", "recomputation", "gathering parameters", "output layer"):
        assert last[name] == whole[name]


def test_a_frozen_layer_costs_its_forward():
    """Its products are a third of a trained layer's; FSDP gathers it once and reduces nothing."""
    one = job(zero=3, micro_batch=8)
    one = replace(one, network_gbps=1e6)
    frozen, whole = frozen_parts(one, C), layer_parts(one, C)
    assert 0.28 < frozen["layers"] / whole["layers"] < 1 / 3  # attention's backward takes 2.5 forwards
    assert 4 * frozen["gathering parameters"] == pytest.approx(whole["gathering parameters"], rel=0.1)  # 2 of 8 bytes
    split = replace(one, stack=STACKS["deepspeed"], tp=8, dp=1, zero=0)
    sent = layer_parts(split, C)["messages of layers"]
    assert 2 * frozen_parts(split, C)["messages of layers"] == pytest.approx(sent)


def test_gradients_are_those_of_the_trained_layers():
    row = {"zero": 0, "n_gpus": 64, "inter_gbps": 100}
    whole, last = (predict_step(job(train=what, **row), C).parts["gradients"] for what in ("all", "last:4"))
    shape = job().shape
    share = (4 * shape.layer_parameters + shape.embedding_parameters) / shape.parameters
    assert last == pytest.approx(share * whole, rel=0.25)  # less of a shorter backward hides them


def test_layers_before_those_that_are_trained_keep_nothing():
    module, x = nn.Sequential(*(Block(64, 4) for _ in range(4))).eval(), torch.randn(2, 32, 64)
    whole = kept_bytes(module, x)
    module[:2].requires_grad_(False)
    assert 2 * kept_bytes(module, x) == whole
    found = [predict_memory(job(train=what), C).activations for what in ("last:16", "all")]
    assert 2 * found[0] == found[1]


def test_at_least_one_layer_is_in_its_forward():
    head, one = (predict_memory(job(train=what, recompute="full"), C) for what in ("head", "last:1"))
    assert head.activations == one.activations > predict_memory(job(recompute="full"), C).activations / 32


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"train": "tail"}, "train must be all, head or last:N with N from 1 to 32, got 'tail'"),
        ({"train": "last:33"}, "train must be all, head or last:N with N from 1 to 32, got 'last:33'"),
        ({"train": "last:0"}, "train must be all, head or last:N"),
        ({"train": "head", "tied": "true"}, "train=head trains nothing: the output layer is the embedding"),
        ({"train": "last:2", "lora": 8}, "lora and train cannot be combined: use one of them"),
        ({"train": "last:2", "stack": "deepspeed", "pp": 2}, "pp=2 does not run with train: use pp=1"),
    ],
)
def test_what_cannot_be_trained_is_one_line(changes, line):
    with pytest.raises(ValueError) as error:
        job(**changes)
    assert str(error.value).startswith(line)


def test_a_stack_that_cannot_freeze_refuses():
    for name in ("megatron", "torchtitan", "nanotron"):
        with pytest.raises(ValueError, match=f"{name} does not run train: use torch-fsdp, deepspeed"):
            answer(SMALL, 8, "h100", stack=name, train="last:2")
    pipeline = replace(job(stack="deepspeed", zero=0, train="head"), pp=2)
    assert pipeline.stack.refuses(pipeline).startswith("pp=2 does not run with train: a frozen stage has no backward")


@pytest.mark.parametrize("stack", ["torch-fsdp", "deepspeed"])
def test_the_answer_says_what_is_trained_and_how(stack):
    found = answer(SMALL, 8, "h100", stack=stack, train="last:2", changes=False)
    shape = found.best.job.shape
    trained = 2 * shape.layer_parameters + shape.own_head
    assert json.loads(found.to_json())["trained_parameters"] == trained
    parts = "the last 2 layers" + (" and the output layer" if shape.own_head else "")
    assert f"frozen, with {trained / 1e6:.4g} million trained in {parts}" in found.sentences()[0]
    assert "requires_grad_(False) on all of the model but model.layers[-2:]" in launch_options(found.best.job)[-1]
    assert found.best.job.pp == 1 and "no published row trains a part of the model" in found.sentences()[-1]


def test_frozen_layers_fit_where_all_do_not():
    assert answer("llama3-70b", 8, "h100", train="last:4", changes=False).best.job.last == 4
