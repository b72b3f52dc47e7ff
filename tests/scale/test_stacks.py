"""What each training stack keeps, sends, hides and refuses, against its own documents."""

from dataclasses import replace

import pytest

from labkit.scale import constants
from labkit.scale.job_config import job_of
from labkit.scale.memory_model import predict_memory, state_bytes
from labkit.scale.messages import gather_seconds, gradient_seconds, unit_seconds
from labkit.scale.stacks import STACKS, stack_of_row

C = constants.values()
SMALL = {"layers": 8, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 8192, "seq_len": 2048}
ROW = SMALL | {"gpu": "H100", "n_gpus": 64}


@pytest.mark.parametrize(
    ("stack", "zero", "expected"),
    [
        ("megatron", 0, 18),  # docs/dist_optimizer.md: bf16 parameters, fp32 gradients
        ("megatron", 1, 6 + 12 / 16),  # over dp x cp
        ("megatron-2020", 0, 16),
        ("deepspeed", 2, 2 + 18 / 8),  # stage_1_and_2.py; memory.rst has the older 4 P + 16 P / n
        ("deepspeed", 3, 18 / 16),  # memory.rst: 18 P / n and the largest layer
        ("torchtitan", 3, 16 / 16),  # fp32 parameters, gradients and moments, over dp x cp
        ("torch-fsdp", 2, 2 + 16 / 16),
    ],
)
def test_states_are_those_of_the_stacks_own_documents(stack, zero, expected):
    job = job_of(ROW | {"stack": stack, "zero": zero, "dp": 8, "cp": 2, "n_gpus": 16})
    assert state_bytes(job, C, 8) == pytest.approx(expected)


def test_deepspeeds_estimator_for_t5_3b_on_8_gpus():
    """6.10 GB, a little more than the states: docs/code-docs/source/memory.rst, 2851M parameters."""
    job = job_of(ROW | {"stack": "deepspeed", "zero": 3, "n_gpus": 8})
    assert 2851e6 * state_bytes(job, C, 8) / 2**30 == pytest.approx(6.1, rel=0.025)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stack": "megatron", "zero": 3}, "megatron does not run ZeRO-3: use one of 0, 1"),
        ({"stack": "torch-fsdp", "tp": 2}, "torch-fsdp does not run tp=2: use tp=1"),
        ({"stack": "nanotron", "cp": 2}, "nanotron does not run cp=2"),
        ({"stack": "deepspeed", "pp": 2, "zero": 2}, "deepspeed's pipeline does not run with ZeRO-2"),
        ({"stack": "torchtitan", "pp": 2, "zero": 3}, ""),
    ],
)
def test_a_stack_refuses_what_it_does_not_run(changes, said):
    job = job_of(ROW | changes)
    refused = job.stack.refuses(job)
    assert refused.startswith(said) and bool(said) == bool(refused)


@pytest.mark.parametrize(
    ("framework", "precision", "name"),
    [
        ("nanotron", "bf16", "nanotron"),
        ("PyTorch FSDP1", "amp_bf16", "llm-foundry"),
        ("PyTorch FSDP2", "bf16", "torch-fsdp"),
        ("Megatron-LM", "fp16", "megatron-2020"),
        ("Megatron-LM", "fp8", "megatron"),
        ("", "bf16", "megatron"),
        ("Nanotron", "bf16", "nanotron"),
    ],
)
def test_a_framework_is_a_stack(framework, precision, name):
    assert stack_of_row("", framework, precision).name == name


def test_a_stack_that_is_named_decides_and_fp16_is_no_year():
    assert stack_of_row("megatron", "nanotron", "fp16") is STACKS["megatron"]
    with pytest.raises(ValueError, match=r"stack must be one of torch-fsdp, .*; did you mean megatron"):
        stack_of_row("megatorn", "", "bf16")


def test_gradients_are_sent_in_the_stacks_dtype_and_hidden_where_it_hides_them():
    job = job_of(ROW | {"stack": "nanotron", "zero": 1})
    half = replace(job, stack=replace(job.stack, gradient_bytes=2))
    assert gradient_seconds(job, C) > gradient_seconds(half, C)
    megatron = replace(job, stack=STACKS["megatron"])
    all_of_it = gradient_seconds(megatron, C, busy=0)
    assert gradient_seconds(megatron, C, busy=2 * all_of_it) == pytest.approx(C["exposed"] * all_of_it)


def test_torchtitan_gathers_once_a_step_under_a_pipeline():
    row = ROW | {"stack": "torchtitan", "zero": 3, "pp": 4, "grad_accum": 8}
    kept, again = job_of(row), job_of(row)
    again = replace(again, stack=replace(again.stack, reshards=True))
    own = 2 * kept.shape.layer_parameters
    gather, reduce = (gather_seconds(kept, 16, 1, k * own, C) for k in (1, 2))
    assert unit_seconds(kept, C) == pytest.approx((gather + reduce) / 8)
    assert unit_seconds(again, C) == pytest.approx(2 * gather + reduce)
    assert predict_memory(kept, C).states > predict_memory(again, C).states


def test_selective_means_the_core_of_attention_or_every_op():
    for name, saves in (("megatron", False), ("torchtitan", True), ("megatron-2020", True)):
        row = ROW | {"stack": name, "zero": 0, "grad_accum": 1}
        none, selective = (predict_memory(job_of(row | {"recompute": kind}), C) for kind in ("none", "selective"))
        assert (selective.activations < none.activations) is saves
