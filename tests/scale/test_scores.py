"""The scores that a user cares for hold: chosen over best, errors by group, intervals."""

from statistics import median

import pytest

from labkit.scale import cases, constants
from labkit.scale.intervals import CRAWLED, interval
from labkit.scale.job_config import job_of
from labkit.scale.published_rows import gib, mark_trouble, published, speed
from labkit.scale.scores import (
    by_group,
    chosen_over_best,
    groups_of_speed,
    held,
    kept_groups,
    out_of_memory,
)

C = constants.values()
TABLE_1 = cases.CASES.with_name("narayanan_table_1.csv")
MODEL = {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 32000, "seq_len": 4096}


def test_the_chosen_layout_is_nearly_the_best_published_one():
    found = chosen_over_best(published(), C)
    assert median(found.values()) >= 0.9
    assert min(found.values()) >= 0.6


def test_errors_of_speed_by_group():
    most = {
        "nanotron, 64 GPUs": 0.10,
        "nanotron, 128 GPUs": 0.10,
        "nanotron, 256 GPUs": 0.25,
        "fused kernels, H100 and later": 0.12,
        "16k tokens and more": 0.20,
        "A100": 0.05,
    }
    for groups in (groups_of_speed, kept_groups):
        found = by_group(published(), "tok_s_gpu", speed, C, groups)
        assert {name: found[name][1] for name, limit in most.items() if found[name][1] > limit} == {}


def test_memory_by_stack_and_what_runs_out_of_it():
    found = by_group(published(), "mem_gib", gib, C, lambda row: [row["job"].stack.name])
    assert found["nanotron"][1] <= 0.1 and found["torchtitan"][1] <= 0.1
    share, alarms = out_of_memory(published(), C)
    assert share >= 0.85 and alarms <= 0.02


def test_narayanans_table_1_from_32_to_3072_gpus():
    """1.7 billion to a trillion parameters, published in 2021, in no fit."""
    off = {name: low - 1 for name, (low, _) in cases.ratios(cases.read(TABLE_1), C).items()}
    assert len(off) == 10
    assert {name: ratio for name, ratio in off.items() if abs(ratio) > 0.1} == {}


def test_intervals_hold_eight_of_ten_rows_that_they_have_not_seen():
    found = held(published(), C)
    rows = sum(count for count, _ in found.values())
    assert rows > 300
    assert sum(count * share for count, share in found.values()) / rows >= 0.78


def test_an_interval_says_what_it_is_from_and_warns():
    row = MODEL | {"gpu": "H100", "n_gpus": 32, "zero": 1, "stack": "nanotron", "tp": 4}
    low, high, rows, warning = interval(job_of(row))
    assert low < speed(job_of(row), C) * 1.1 and low < high
    assert "published rows kept out of the fit: nanotron, hopper, up to 32 GPUs" in rows and warning == ""
    *_, warning = interval(job_of(row | {"gpu": "B200", "stack": "megatron"}))
    assert warning.startswith("fewer than 8 published rows are like this job (megatron, blackwell")
    assert warning.endswith("so rows of a wider class are used")
    full = job_of(row | {"micro_batch": 4, "tp": 1})
    assert CRAWLED in interval(full)[3]


def test_trouble_is_a_step_that_is_longer_with_no_more_work():
    row = MODEL | {"gpu": "H100", "n_gpus": 16, "tp": 8, "global_batch": 64, "source": "s", "model": "m"}
    row |= {"recompute": "none", "precision": "bf16", "compile": ""}
    rows = [row | {"dp": dp, "n_gpus": 8 * dp, "micro_batch": m, "tok_s_gpu": v}
            for dp, m, v in ((2, 2, 1000), (2, 1, 600), (2, 1, 300), (4, 2, 320))]  # fmt: skip
    rows = [row | {"job": job_of(row)} for row in rows]
    mark_trouble(rows)
    # 600: twice the micro-batches; 300: more than that; 320: half the work in 1.6 of the time
    assert [row["trouble"] for row in rows] == [False, False, True, True]


@pytest.mark.parametrize("stack", ["megatron", "torchtitan"])
def test_blackwell_is_faster_than_hopper(stack):
    row = MODEL | {"n_gpus": 8, "stack": stack, "zero": 0}
    assert speed(job_of(row | {"gpu": "B200"}), C) > 1.5 * speed(job_of(row | {"gpu": "H100"}), C)
