"""The planner: nothing better is missed, all it names fits, physics holds, and what it says why is so."""

import itertools
import math
import sys
from dataclasses import replace

import pytest

from labkit.pipeline.pipeline_schedules import interleaved, one_f_one_b, zero_bubble
from labkit.pipeline.schedule_validation import play
from labkit.scale import constants
from labkit.scale.bert_shapes import BERT_LARGE
from labkit.scale.bucket_size_model import MIB, USUAL, bucket_of, choose_bucket
from labkit.scale.cluster import Cluster
from labkit.scale.cost import (
    PERMUTED,
    expert_launches,
    head_seconds,
    layer_seconds,
    optimizer_seconds,
    predict_step,
    product_seconds,
    spared_seconds,
    weights_seconds,
)
from labkit.scale.explain import moved, sensitivity, why_larger, why_slower, words
from labkit.scale.hardware import GPUS
from labkit.scale.job_config import job_of, spans_tp
from labkit.scale.launch_options import launch_options
from labkit.scale.memory_model import kept, predict_memory, stage_peak
from labkit.scale.messages import (
    expert_seconds,
    gather_seconds,
    gradient_seconds,
    hand_over,
    ring_seconds,
    tensor_seconds,
    unit_seconds,
)
from labkit.scale.model_row import row_of
from labkit.scale.plan import bill, main
from labkit.scale.plan import plan as plan_of
from labkit.scale.search import search
from labkit.scale.shapes import Shape
from labkit.scale.stacks import STACKS

C = constants.values()
SMALL = {"layers": 8, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 4096, "vocab": 8192, "seq_len": 2048}
EXPERTS = SMALL | {"experts": 4, "top_k": 2}
BATCH = 16
TIGHT = {"memory_gib": 1.2, "network_gbps": 30.0}


def plan(*model_and_cluster, **asked):
    """plan() with the stack that runs every axis, unless another is asked for."""
    return plan_of(*model_and_cluster, **{"framework": "torchtitan"} | asked)


def cluster(gpus=8, gpu="A100-80GB", **changes):
    return Cluster(gpu, gpus, **{"gpus_per_node": 4, "confirmed": True} | changes)


def every_job(model, where, n, schedules=("1f1b",)):
    """All that can be written down on n GPUs, one by one: (seconds, Job) of those that fit."""
    few, node = (1, 2, 4, 8), min(n, where.gpus_per_node)
    for tp, pp, cp, dp, copies in itertools.product(few, few, (1, 2), few, few):
        if tp * pp * cp * dp * copies != n or tp > 4 or (copies > 1 and dp * tp * cp != node):
            continue
        ranks = dp * copies
        if BATCH % ranks:
            continue
        axes = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "gpu": where.gpu, "n_gpus": n, "gpus_per_node": node}
        plain = job_of(model | axes | {"zero": 3, "framework": "torchtitan"})
        told = {"network_gbps": where.device.network_gbps, "collectives": where.collectives}
        plain = replace(plain, gpu=where.device, **told)
        kinds, homes = ("none", "half", "selective", "full"), (False, True) if where.host_gib else (False,)
        for zero, vpp, ep, micro, kind, home, schedule in itertools.product(
            range(4), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8, 16), kinds, homes, schedules
        ):
            accumulated = BATCH // ranks // micro
            thin = vpp > 1 and (pp == 1 or 8 % (pp * vpp) or accumulated % pp)
            spread = dp % ep and not spans_tp(ep, tp, cp, dp)
            if not accumulated or thin or spread or model.get("experts", 1) % ep or (copies > 1 and zero < 3):
                continue
            if schedule == "zero_bubble" and (pp == 1 or vpp > 1 or accumulated < pp):
                continue
            told = {"zero": zero, "vpp": vpp, "ep": ep, "micro_batch": micro, "grad_accum": accumulated}
            job = replace(plain, **told, recompute=kind, offload=home, schedule=schedule)
            if job.stack.refuses(job):
                continue
            peak = predict_memory(job, C)
            if peak.total <= 0.9 * where.device.memory_gib and peak.host <= 0.9 * (where.host_gib or 0):
                yield predict_step(job, C).seconds, job


@pytest.mark.parametrize(
    ("model", "figures", "schedules"),
    [
        (SMALL, {}, ["1f1b"]),
        (SMALL, {"memory_gib": 1.0, "network_gbps": 30.0}, ["1f1b"]),
        (SMALL, {"memory_gib": 1.6, "network_gbps": 30.0}, ["1f1b"]),
        (EXPERTS, {"memory_gib": 1.6, "network_gbps": 30.0}, ["1f1b"]),
        (SMALL, {"memory_gib": 0.9, "network_gbps": 30.0, "host_gib": 1.5}, ["1f1b"]),
        (SMALL, {"memory_gib": 1.6, "network_gbps": 30.0}, ["1f1b", "zero_bubble"]),
        (SMALL, {"gpu": "H100", "gpus_per_node": 1, "network_gbps": 400.0, "collectives": "in_switch"}, ["1f1b"]),
    ],
    ids=["all fit", "few fit", "some fit", "experts", "offloaded", "schedules", "in the switch"],
)
def test_nothing_better_is_missed(model, figures, schedules):
    where = cluster(**figures)
    found = plan(model, where, global_batch=BATCH, schedule="1f1b" if len(schedules) == 1 else "free")
    best = {n: min((s for s, _ in every_job(model, where, n, schedules)), default=None) for n in (1, 2, 4, 8)}
    assert found.fastest.seconds == pytest.approx(best[8], rel=1e-12)
    fit = {n: seconds for n, seconds in best.items() if seconds}
    assert found.smallest.job.n_gpus == min(fit)
    assert found.smallest.seconds == pytest.approx(fit[min(fit)], rel=1e-12)
    assert found.cheapest.gpu_seconds == pytest.approx(min(n * s for n, s in fit.items()), rel=1e-12)


@pytest.mark.parametrize(("gpu", "chosen"), [("H100-80GB", "fp8"), ("A100-80GB", "bf16")])
def test_a_precision_that_is_free_is_the_best_of_all(gpu, chosen):
    where = cluster(gpu=gpu, **TIGHT)
    dtypes = ("free", "bf16", "fp8") if where.device.has("fp8") else ("free", "bf16")
    told = {dtype: plan(SMALL, where, global_batch=BATCH, precision=dtype) for dtype in dtypes}
    free, best = told["free"], min(found.fastest.seconds for found in told.values())
    assert free.fastest.job.precision == chosen
    assert free.fastest.seconds == pytest.approx(best, rel=1e-3)  # casts take a little of a small product
    if chosen == "fp8":
        assert free.cheapest.gpu_seconds < told["bf16"].cheapest.gpu_seconds


@pytest.mark.parametrize("framework", ["", "PyTorch FSDP2", "nanotron"])
def test_fp8_never_takes_longer_nor_more_memory(framework):
    """nanotron's layers may wait for the host in both precisions: then the times are equal, but their parts, which
    are not, are added up with another rounding.
    """
    for name, gpu in GPUS.items():
        for axes in ({"tp": 2, "pp": 2, "n_gpus": 16}, {"n_gpus": 16, "zero": 3}):
            row = SMALL | axes | {"gpu": name, "framework": framework, "micro_batch": 2}
            plain, fast = (job_of(row | {"precision": dtype}) for dtype in ("bf16", "fp8"))
            assert predict_memory(fast, C).total <= predict_memory(plain, C).total
            before, after = predict_step(plain, C).seconds, predict_step(fast, C).seconds
            if framework == "nanotron":
                assert after <= before * (1 + 1e-12), name
            else:
                assert after < before if "fp8" in gpu.tflops else after == before, name


def test_all_that_is_named_fits():
    found = plan(SMALL, cluster(**TIGHT), global_batch=BATCH)
    for one in (found.fastest, found.cheapest, found.smallest, found.runner_up, *found.contenders):
        peak = predict_memory(one.job, C)
        assert peak.fits and peak.total <= 0.9 * 1.2 and peak == one.peak
        assert one.job.step_tokens == BATCH * 2048
    seconds = [one.seconds for one in found.contenders]
    assert seconds == sorted(seconds) and found.contenders[0] is found.fastest


def test_more_memory_never_slows_the_fastest_nor_does_a_faster_network():
    larger = [plan(SMALL, cluster(memory_gib=gib), global_batch=BATCH).fastest.seconds for gib in (1.0, 1.2, 1.6, 79.1)]
    assert larger == sorted(larger, reverse=True) and larger[0] > larger[-1]
    slower = [
        plan(SMALL, cluster(memory_gib=1.2, network_gbps=gbps), global_batch=BATCH).fastest.seconds
        for gbps in (6400, 1600, 200, 25, 2)
    ]
    assert slower == sorted(slower) and slower[0] < slower[-1]


def test_what_is_given_stays():
    given = {"tp": 2, "pp": 2, "zero": 2, "micro_batch": 2, "recompute": "full", "vpp": 2}
    found = plan(SMALL, cluster(), global_batch=BATCH, **given)
    assert all(getattr(one.job, name) == value for one in found.contenders for name, value in given.items())
    uneven = plan(SMALL | {"layers": 6}, cluster(), global_batch=BATCH, pp=4, uneven=True)
    assert [layers for layers, *_ in uneven.fastest.job.stages] == [2, 2, 1, 1]
    assert plan(SMALL, cluster(6), global_batch=BATCH).fastest.job.n_gpus == 4  # nothing divides into 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "gpt3-157b"}, "unknown model 'gpt3-157b'; did you mean gpt3-175b"),
        ({"model": {}}, "no model: give layers and hidden, or params"),
        ({"model": SMALL | {"hidden": "nan"}}, "hidden must be a number of at least 1, got nan"),
        ({"gpu": "A1000"}, "unknown GPU 'A1000'; did you mean A10"),
        ({"gpus": 0}, "gpus must be a whole number of at least 1, got 0"),
        ({"host_gib": -1}, "host_gib must be a positive number, got -1"),
        ({"gpus": float("nan")}, "gpus must be a whole number of at least 1, got nan"),
        ({"network_gbps": -100.0}, "network_gbps must be a positive number, got -100.0"),
        ({"network_gbps": 0.1}, "network_gbps=0.1 is about 1/8000 of what A100-80GB usually has, 800 Gbit/s"),
        ({"network_gbps": 8e5}, "network_gbps=800000 is about 1000 times what A100-80GB usually has"),
        ({"node_gbs": 2400.0}, "node_gbs=2400 is about 8 times what A100-80GB usually has, 300 GB/s"),
        ({"memory_gib": 81920.0}, "pass confirmed=True (--confirm)"),
        ({"global_batch": 0}, "global_batch must be a number of at least 1, got 0"),
        ({"global_batch": None}, "global_batch is missing: how many sequences has a step?"),
        ({"spare": float("nan")}, "spare must be a share of memory, from 0 to less than 1, got nan"),
        ({"dp": 2, "tp": 2, "pp": 1, "cp": 1}, "dp 2 x tp 2 x pp 1 x cp 1 = 4 ranks, but there are 8 GPUs"),
        ({"tp": 3}, "tp=3 does not divide the 8 GPUs"),
        ({"tp": 8}, "tp=8 does not divide kv_heads=4"),
        ({"gpus": 48, "tp": 3}, "tp=3 does not divide heads=8"),
        ({"gpus": 48, "pp": 3}, "pp=3 does not divide layers=8: use one of 1, 2, 4, 8, or uneven stages"),
        ({"pp": 4, "vpp": 4}, "pp x vpp = 4 x 4 does not divide layers=8"),
        ({"gpus": 48, "model": SMALL | {"kv_heads": 8}, "tp": 8}, "tp=8 does not divide gpus_per_node=4"),
        ({"micro_batch": 3}, "no layout of 8 GPUs or fewer has micro_batch=3 given: dp times micro_batch must divide"),
        ({"cp": 4}, "cp must leave 1024 of 2048 tokens at least"),
        ({"tp": -2}, "tp must be a whole number of at least 1, got -2"),
        ({"zero": 4}, "zero must be 0, 1, 2 or 3, got 4"),
        ({"zero": -1}, "zero must be a whole number of at least 0, got -1"),
        ({"ep": 2}, "ep=2 does not divide experts=1"),
        ({"recompute": "sometimes"}, "recompute must be none"),
        ({"model": "ResNet-50"}, "ResNet-50 cannot be planned, a decoder, an encoder or a ViT can: cost.py has"),
        ({"model": SMALL | {"architecture": "mamba"}}, "mamba cannot be planned, a decoder, an encoder or a ViT can"),
        ({"model": EXPERTS | {"architecture": "encoder"}}, "experts must not be given for an encoder"),
        ({"gpu": "V100"}, "V100-32GB does not have bf16: use fp16 or fp32, or a GPU that has it: A10, A100-80GB"),
        ({"precision": "fp8"}, "A100-80GB does not have fp8: use bf16 or fp16 or tf32 or fp32"),
        ({"model": SMALL | {"head": 8}}, "unknown column 'head' of a model; did you mean heads"),
        ({"schedule": "gpipe"}, "schedule must be free or one of 1f1b, zero_bubble, got 'gpipe'"),
        ({"schedule": "zero_bubble", "vpp": 2}, "schedule=zero_bubble needs vpp=1, got 2: use 1f1b"),
        ({"precision": "fp4"}, "precision must be free or one of bf16, fp8, fp16, tf32, fp32, got 'fp4'"),
        ({"ddp": 2}, "unknown setting 'ddp': known are cp, dp, ep"),
        ({"gpus": 1, "memory_gib": 1.5}, "GiB more than the 1.4 GiB to be used; it fits on 2 of them"),
        ({"gpus": 1, "memory_gib": 0.02}, "nor does it on more of them"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(changes, said):
    arguments = {"model": SMALL, "gpu": "A100-80GB", "gpus": 8, "global_batch": BATCH} | changes
    figures = {n: arguments.pop(n) for n in ("network_gbps", "node_gbs", "memory_gib", "host_gib") if n in arguments}
    with pytest.raises(ValueError) as error:
        plan(arguments.pop("model"), Cluster(arguments.pop("gpu"), arguments.pop("gpus"), 4, **figures), **arguments)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_figure_that_is_meant_is_taken():
    assert Cluster("A100-80GB", 8, network_gbps=200.0, confirmed=True).device.network_gbps == 200


def test_the_bill():
    found = plan(SMALL, cluster(), global_batch=BATCH).fastest
    cost = bill(found, 1e9, price=2.0, watts=500)
    steps = 1e9 / (BATCH * 2048)
    assert cost["days"] == pytest.approx(steps * found.seconds / 86400)
    assert cost["gpu_hours"] == pytest.approx(8 * 24 * cost["days"])
    assert (cost["money"], cost["kwh"]) == pytest.approx((2 * cost["gpu_hours"], cost["gpu_hours"] / 2))
    assert bill(found, 1e9)["kwh"] == pytest.approx(0.4 * cost["gpu_hours"])  # 400 W of an A100
    for wrong in ({"tokens": -1}, {"tokens": float("nan")}, {"tokens": 1, "price": 0}, {"tokens": 1, "watts": -3}):
        with pytest.raises(ValueError, match="must be a positive number"):
            bill(found, **wrong)


def step_by_hand(job):
    """The seconds of a torchtitan step in bf16, term by term: neither Step.parts nor a sum of them."""
    shape, gpu, exposed = job.shape, job.gpu, C["exposed"]
    again = {"none": 0, "selective": 1 / 4, "half": 1 / 2, "full": 1}[job.recompute]
    products = product_seconds(job, C)
    flops = shape.attention_flops(job.context) * job.tokens / job.tp
    attention = flops / (1e12 * gpu.tflops["bf16"] * C["attention"])
    moved = C["traffic"] * shape.moved_bytes() + PERMUTED * shape.hidden * shape.top_k
    moving = moved * job.tokens / job.tp / (1e9 * gpu.memory_gbs)
    layer = (3 + again) * (products + moving) + (3.5 + again) * attention + tensor_seconds(job, C)
    layer += ring_seconds(job, C) + expert_launches(job, C) + expert_seconds(job, C)
    layer -= again * spared_seconds(job, products)
    if job.zero == 3:
        gathers = unit_seconds(job, C)
        layer = max(layer, gathers) + exposed * min(layer, gathers)
    work = [layers * layer + heads * head_seconds(job, C) for layers, heads, _ in job.stages]
    bubble = (sum(work) - max(work)) / job.vpp
    if job.schedule == "zero_bubble":
        later = [weights_seconds(job, has, C) for has in job.stages]
        bubble -= 2 * (sum(later) - later[work.index(max(work))])
    hand_overs = 2 * hand_over(job) * (job.grad_accum * job.vpp + job.pp - 1)
    layers = job.stages[work.index(max(work))][0]
    gradients = gradient_seconds(job, C, layers * layer)
    return job.grad_accum * max(work) + hand_overs + bubble + gradients + optimizer_seconds(job)


def test_the_parts_of_a_step_add_up_and_say_who_lost_by_what():
    found = plan(EXPERTS, cluster(memory_gib=1.6, network_gbps=30.0), global_batch=BATCH)
    for one in found.contenders[::50]:
        expected = pytest.approx(step_by_hand(one.job), rel=1e-12)
        assert expected == math.fsum(one.step.parts.values()), words(one.job)
        assert expected == one.seconds and all(part >= 0 for part in one.step.parts.values()), words(one.job)
    slow = replace(found.fastest.job, grad_accum=1, vpp=1, pp=8, dp=1, tp=1, ep=1, micro_batch=BATCH)
    told = why_slower(replace(found.fastest, job=slow, step=predict_step(slow, C)), found.fastest)
    assert "bubble +" in told and "% of a step" in told
    assert found.larger.seconds < found.fastest.seconds and not found.space.fits(found.larger.peak)
    assert "GiB of 1.4: activations 0.4, not 0.2" in why_larger(found.larger, found.fastest, 0.1)


@pytest.mark.parametrize(
    ("name", "end", "gib"),
    [
        ("edge", "low", 1.2),
        ("crowding", "high", 1.2),
        ("data_exposed", "low", 1.2),
        ("runtime", "high", 1.6),
        ("logits_held", "low", 1.6),
    ],
)
def test_a_constant_at_the_end_of_its_spread_is_as_if_planned_with_it(name, end, gib):
    found = plan(SMALL, cluster(memory_gib=gib, network_gbps=30.0), global_batch=BATCH)
    constant = next(k for k in constants.read() if k.name == name)
    value = getattr(constant, end)
    fit, _ = search(found.space, 8, C | {name: value})
    what = moved(found, constant, value)
    assert what.best.seconds == min(one.seconds for one in fit)
    assert what.same.seconds == predict_step(found.fastest.job, C | {name: value}).seconds
    assert what.changes == (what.best.job != found.fastest.job)


def test_a_constant_can_make_all_of_them_too_large():
    found = plan(SMALL, cluster(**TIGHT), global_batch=BATCH)
    runtime = next(k for k in constants.read() if k.name == "runtime")
    what = moved(found, runtime, 1.1)
    assert what.best is None and what.changes


def test_every_constant_is_moved_to_both_its_ends():
    few = plan(SMALL, cluster(2), global_batch=BATCH, tp=2)
    ends = {(what.constant.name, what.value) for what in sensitivity(few)}
    assert ends == {(k.name, end) for k in constants.read() for end in (k.low, k.high) if end != k.value}


def test_thin_stages_hold_what_their_schedule_holds():
    job = job_of(SMALL | {"gpu": "A100", "n_gpus": 4, "pp": 4, "grad_accum": 8})
    for vpp in (1, 2):
        tried = replace(job, vpp=vpp)
        for stage, program in enumerate(interleaved(4 * vpp, 8, 4)):
            alive = list(itertools.accumulate({"F": 1, "B": -1}[action.kind] for action in program))
            one = stage_peak(replace(tried, grad_accum=1), C, stage, tried.stages[stage]).activations
            many = stage_peak(tried, C, stage, tried.stages[stage]).activations
            assert many / one == pytest.approx(max(alive) / vpp)


@pytest.mark.parametrize(("name", "schedule"), [("1f1b", one_f_one_b), ("zero_bubble", zero_bubble)])
@pytest.mark.parametrize(("vocab", "exact"), [(1, True), (200_000, False)], ids=["alike", "a heavy last stage"])
def test_a_schedule_takes_what_it_takes_when_it_is_played(name, schedule, vocab, exact):
    row = SMALL | {"gpu": "A100", "n_gpus": 4, "pp": 4, "grad_accum": 8, "micro_batch": 2, "vocab": vocab}
    job = replace(job_of(row), schedule=name)
    work = [layers * layer_seconds(job, C) + heads * head_seconds(job, C) for layers, heads, _ in job.stages]
    later = [weights_seconds(job, has, C) for has in job.stages]

    def cost(action):
        s = action.stage
        both = (work[s] - later[s]) / 2  # of F and B
        whole = action.kind == "B" and name == "1f1b"
        return later[s] if action.kind == "W" else both + whole * later[s]

    played = play(schedule(4, 8), cost).length
    step = predict_step(job, C)
    told = step.seconds - step.parts["gradients"] - step.parts["optimizer"] - step.parts["hand-overs"]
    assert played <= told * (1 + 1e-9)
    assert not exact or played == pytest.approx(told, rel=1e-3)


def test_zero_bubble_holds_what_its_schedule_holds():
    """In flight a micro-batch has what recomputing leaves; once its B is done its W wants all the inputs."""
    job = replace(job_of(SMALL | {"gpu": "A100", "n_gpus": 4, "pp": 4, "grad_accum": 8}), schedule="zero_bubble")
    for kind, (stage, program) in itertools.product(("none", "full"), enumerate(zero_bubble(4, 8))):
        again = replace(job, recompute=kind)
        less, all_of_it = kept(again, C), kept(job, C)
        sizes = {"F": less, "B": all_of_it - less, "W": -all_of_it}
        most = max(itertools.accumulate(sizes[action.kind] for action in program))
        told = stage_peak(again, C, stage, job.stages[stage]).activations * 2**30
        assert told == pytest.approx(2 * most * 2048)
    assert predict_memory(job, C).activations == predict_memory(replace(job, schedule="1f1b"), C).activations


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_the_fullest_stage_counts(schedule):
    """Of 2, 2, 1, 1 layers: the first of the thick ones, or with zero bubble the second, which puts off more."""
    row = SMALL | {"gpu": "A100", "n_gpus": 4, "pp": 4, "grad_accum": 8, "layers": 6, "vocab": 1, "recompute": "full"}
    job = replace(job_of(row), schedule=schedule)
    totals = [stage_peak(job, C, stage, has).total for stage, has in enumerate(job.stages)]
    assert totals.index(max(totals)) == (schedule == "zero_bubble")
    assert predict_memory(job, C).total == max(totals)


def test_zero_bubble_is_taken_where_it_is_asked_for_and_has_micro_batches():
    told = {"global_batch": BATCH, "pp": 4, "vpp": 1}
    plain, free, asked = (plan(SMALL, cluster(), **told, schedule=s) for s in ("1f1b", "free", "zero_bubble"))
    assert {one.job.schedule for one in plain.contenders} == {"1f1b"}
    assert free.fastest.job.schedule == "zero_bubble" and free.fastest.seconds < plain.fastest.seconds
    assert all(one.job.schedule == "zero_bubble" and one.job.grad_accum >= 4 for one in asked.contenders)
    assert ", zero bubble (ZB-H1), " in words(free.fastest.job) and "zero" not in words(plain.fastest.job)


def test_experts_shared_out_hold_less_and_send_their_tokens():
    row = EXPERTS | {"gpu": "A100", "n_gpus": 8, "dp": 8, "zero": 1, "micro_batch": 2}
    whole, shared = job_of(row), job_of(row | {"ep": 4})
    one = 8 * shared.shape.expert_weights  # of all layers
    saved = predict_memory(whole, C).states - predict_memory(shared, C).states
    assert saved * 2**30 == pytest.approx(one * (6 + 12 / 8) - one / 4 * (6 + 12 / 2))
    sent = 2 * shared.tokens * 1024 * 2  # 16 bits, each token to two
    in_node = sent * 3 / 4 / (300e9 * 0.79)  # a quarter stays
    plain = replace(shared, stack=STACKS["torchtitan"])  # sends a token to each of its experts
    assert expert_seconds(plain, C) == pytest.approx(4 * in_node, rel=0.05)
    far = replace(plain, gpus_per_node=2)  # half of the tokens leave the node over the GPU's own adapter
    assert expert_seconds(far, C) == pytest.approx(4 * sent / 2 / (1600e9 / 8 / 2 * 0.73), rel=0.05)
    assert gradient_seconds(shared, C) < gradient_seconds(whole, C)
    with pytest.raises(ValueError, match="ep=3 does not divide dp=8"):
        job_of(row | {"ep": 3})


def test_whole_experts_are_spread_over_dp_and_tp():
    """ep = 8 on dp x tp = 2 x 4: a rank has one whole expert, which it shares with no other, and no part of others."""
    row = EXPERTS | {"experts": 8, "gpu": "H100", "n_gpus": 8, "tp": 4, "dp": 2, "zero": 1, "stack": "torchtitan"}
    halved, spread = job_of(row | {"ep": 2}), job_of(row | {"ep": 8})
    one = 8 * spread.shape.expert_weights / 8  # of all layers, as 4 of 8 experts divided over 4
    assert halved.held_alike(0, 8 * one)[1] == (4 * one, 1, 8)  # callers divide by tp
    assert spread.held_alike(0, 8 * one)[1] == (4 * one, 1, 8)
    assert predict_memory(halved, C).states == predict_memory(spread, C).states
    # a token's messages around its experts are those of ep alone, and its products are wider
    assert 2 * tensor_seconds(spread, C) == pytest.approx(tensor_seconds(halved, C))
    assert product_seconds(spread, C) < product_seconds(halved, C)
    sent = 2 * spread.tokens / 4 * 1024 * 2 * 7 / 8 / (450e9 * 0.79) + 1.9e-6
    assert expert_seconds(spread, C) == pytest.approx(4 * sent)
    assert "expert_tensor_parallel_degree 1" in " ".join(launch_options(spread))
    assert "expert_tensor_parallel_degree 4" in " ".join(launch_options(halved))
    alone = replace(spread, stack=STACKS["deepspeed"])
    assert alone.stack.refuses(alone) == "deepspeed does not run ep=8 larger than dp=2: use ep=2"
    with pytest.raises(ValueError, match="ep=4 does not divide dp=2"):
        job_of(row | {"ep": 4, "tp": 8, "n_gpus": 16})


def test_states_offloaded_take_the_bus_and_the_hosts_memory():
    row = SMALL | {"gpu": "A100", "n_gpus": 8, "zero": 1}
    here, there = job_of(row), job_of(row | {"offload": "True"})
    held, moved_away = predict_memory(here, C), predict_memory(there, C)
    own = 12 * here.shape.parameters / 8
    assert (held.states - moved_away.states) * 2**30 == pytest.approx(own, rel=1e-3)  # but for the last norm
    assert moved_away.host == pytest.approx(8 * (held.states - moved_away.states)) and held.host == 0
    longer = predict_step(there, C).parts["optimizer"] - predict_step(here, C).parts["optimizer"]
    assert longer == pytest.approx(2 * own / 31.5e9)
    alone = plan(SMALL, cluster(1, memory_gib=1.5, host_gib=4), global_batch=BATCH).fastest
    assert alone.job.offload and alone.peak.host <= 0.9 * 4  # without a host's memory it does not fit: see above
    with pytest.raises(ValueError, match="nothing fits"):
        plan(SMALL, cluster(1, memory_gib=1.5, host_gib=1), global_batch=BATCH)


def test_zero_2_scatters_every_micro_batch_and_replicas_add_up_their_shards():
    row = SMALL | {"gpu": "A100", "n_gpus": 16, "gpus_per_node": 4, "grad_accum": 5, "stack": "deepspeed"}
    one, two = (gradient_seconds(job_of(row | {"zero": zero}), C) for zero in (1, 2))
    assert two == pytest.approx(3 * one)  # 5 scatters and a gather, not one of each
    assert gradient_seconds(job_of(row | {"zero": 3}), C) == 0
    hybrid = job_of(row | {"zero": 3, "dp": 4})
    shards = 2 * hybrid.shape.parameters / 4
    assert gradient_seconds(hybrid, C) == pytest.approx(
        C["data_exposed"] * gather_seconds(hybrid, 4, 4, shards, C, "all_reduce")
    )


def test_a_bucket_pays_few_starts_and_a_short_last_one():
    job = job_of(SMALL | {"gpu": "A100", "n_gpus": 64, "zero": 1, "layers": 64})
    best = choose_bucket(job, C)
    total, alpha = 4 * job.shape.parameters, gather_seconds(job, 64, 1, 0, C)
    for mb in (1, 7, USUAL, best.mb, 100, 1000, 10**6):
        bucket = bucket_of(job, mb, C)
        assert bucket.count == max(1, -(-total // (mb * MIB)))
        assert bucket.starts == pytest.approx(bucket.count * alpha)
        last = gather_seconds(job, 64, 1, total / bucket.count, C) - alpha
        assert bucket.last == pytest.approx(last)
        assert best.exposed <= 1.08 * bucket.exposed  # it is a power of two
    beta = (gather_seconds(job, 64, 1, total, C) - alpha) / total
    assert 0.7 < total / best.count / (total * alpha / beta) ** 0.5 < 1.42


def test_a_bucket_grows_with_the_ranks_and_shrinks_with_a_slower_network():
    row = SMALL | {"gpu": "A100", "layers": 64}
    grown = [choose_bucket(job_of(row | {"n_gpus": n, "zero": 1}), C).mb for n in (8, 64, 512, 4096)]
    assert grown == sorted(grown) and grown[-1] > 8 * grown[0]
    slow = [choose_bucket(job_of(row | {"n_gpus": 64, "inter_gbps": gbps}), C).mb for gbps in (25, 400, 3200)]
    assert slow == sorted(slow) and slow[-1] > slow[0]
    whole, shared = (choose_bucket(job_of(EXPERTS | {"gpu": "A100", "dp": 8, "n_gpus": 8, "ep": e}), C) for e in (1, 4))
    assert whole.exposed > shared.exposed  # experts' gradients go to fewer ranks


def test_what_has_no_bucket_gets_none():
    assert choose_bucket(job_of(SMALL | {"gpu": "A100"}), C) is None
    assert choose_bucket(job_of(SMALL | {"gpu": "A100", "n_gpus": 8, "zero": 3}), C) is None
    one, every = (
        choose_bucket(job_of(SMALL | {"gpu": "A100", "n_gpus": 8, "zero": z, "grad_accum": 4}), C) for z in (1, 2)
    )
    assert every.mb == one.mb and every.exposed == pytest.approx(4 * one.exposed)  # ZeRO-2: after each micro-batch


def test_bert_is_planned_as_what_it_is():
    """The unmasked half of attention and the head for masked words are all that a decoder does not have."""
    row = row_of("bert-large") | {"gpu": "A100", "n_gpus": 8, "zero": 1, "micro_batch": 8}
    bert = job_of(row)
    assert bert.shape == replace(BERT_LARGE, masked_words=True)
    fits = replace(bert, zero=0, dp=1)
    assert job_of(row | {"architecture": "BertModel"}).shape == job_of(row | {"architecture": ""}).shape != bert.shape
    states = predict_memory(fits, C).states * 2**30
    assert states == pytest.approx(18 * bert.shape.parameters, rel=1e-9)
    plain = replace(
        bert, shape=Shape(24, 1024, 16, 16, 4096, 30522, gated=False, tied=True, positions=512, biases=True)
    )
    peak = 1e12 * 312 * C["attention"]
    unmasked = 3.5 * 2 * bert.context * 1024 * bert.tokens / peak
    assert layer_seconds(bert, C) - layer_seconds(plain, C) == pytest.approx(unmasked, rel=1e-6)
    head = head_seconds(bert, C) - head_seconds(plain, C)
    assert head == pytest.approx(6 * 1024**2 * bert.tokens / (1e12 * 312 * 0.869 * C["matmul_ampere"]), rel=1e-6)
    assert predict_memory(bert, C).activations == predict_memory(plain, C).activations
    found = plan("bert-large", Cluster("A100-80GB", 16))
    for one in (found.fastest, found.cheapest, found.smallest, found.runner_up):
        assert one.job.shape == bert.shape and one.job.step_tokens == 256 * 512
        assert one.peak.total <= 0.9 * 79.1


def test_an_encoder_says_that_none_was_published(monkeypatch, capsys):
    said = []
    for name in ("bert-base", "gpt2-1.5b"):
        monkeypatch.setattr(sys, "argv", f"plan --model {name} --gpus 8 --gpu a100-80gb --tokens 1e9".split())
        main()
        said.append("none of them of an encoder" in capsys.readouterr().out)
    assert said == [True, False]


def test_the_command(monkeypatch, capsys):
    told = ",".join(f"{name}={value}" for name, value in SMALL.items())
    command = f"plan --model {told} --gpus 8 --gpu a100-80gb --tokens 1e9 --global-batch 16 --price 2 --sensitivity"
    fsdp = [*command.split(), "--framework", "torchtitan", "--zero", "3"]
    monkeypatch.setattr(sys, "argv", fsdp)
    main()
    said = capsys.readouterr().out
    for word in ("fastest", "cheapest", "smallest", "GPU-hours", "money", "runner-up", "kept out of the fit", "edge"):
        assert word in said
    monkeypatch.setattr(sys, "argv", [*command.split(), "--zero", "1"])
    main()
    assert "bucket of gradients: " in capsys.readouterr().out and "bucket" not in said  # FSDP's are its layers
    monkeypatch.setattr(sys, "argv", [*command.split(), "--tp", "3"])
    with pytest.raises(SystemExit, match=r"labkit\.scale\.plan: tp=3 does not divide the 8 GPUs"):
        main()
