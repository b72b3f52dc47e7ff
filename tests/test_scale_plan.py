"""The planner: nothing better is missed, all it names fits, physics holds, and what it says why is so."""

import itertools
import sys
from dataclasses import replace

import pytest

from labkit.parts.schedules import interleaved
from labkit.scale import constants
from labkit.scale.cost import gather_seconds, gradient_seconds, parts, predict_step, tensor_seconds
from labkit.scale.explain import moved, sensitivity, why_larger, why_slower
from labkit.scale.hardware import Cluster
from labkit.scale.job import job_of
from labkit.scale.memory import predict_memory, stage_peak
from labkit.scale.plan import bill, main, plan
from labkit.scale.search import search

C = constants.values()
SMALL = {"layers": 8, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 4096, "vocab": 8192, "seq_len": 2048}
EXPERTS = SMALL | {"experts": 4, "top_k": 2}
BATCH = 16


def cluster(gpus=8, **changes):
    return Cluster("A100-80GB", gpus, **{"gpus_per_node": 4, "confirmed": True} | changes)


def every_job(model, where, n):
    """All that can be written down on n GPUs, one by one: (seconds, Job) of those that fit."""
    few, node = (1, 2, 4, 8), min(n, where.gpus_per_node)
    for tp, pp, cp, dp, copies in itertools.product(few, few, (1, 2), few, few):
        if tp * pp * cp * dp * copies != n or tp > 4 or (copies > 1 and dp * tp * cp != node):
            continue
        ranks = dp * copies
        if BATCH % ranks:
            continue
        axes = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "gpu": where.gpu, "n_gpus": n, "gpus_per_node": node}
        plain = job_of(model | axes | {"zero": 3})
        plain = replace(plain, gpu=where.device, network_gbps=where.device.network_gbps)
        for zero, vpp, ep, micro, kind in itertools.product(
            range(4), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8, 16), ("none", "half", "selective", "full")
        ):
            accumulated = BATCH // ranks // micro
            thin = vpp > 1 and (pp == 1 or 8 % (pp * vpp) or accumulated % pp)
            if not accumulated or thin or dp % ep or model.get("experts", 1) % ep or (copies > 1 and zero < 3):
                continue
            told = {"zero": zero, "vpp": vpp, "ep": ep, "micro_batch": micro, "grad_accum": accumulated}
            job = replace(plain, **told, recompute=kind)
            if predict_memory(job, C).total <= 0.9 * where.device.memory_gib:
                yield predict_step(job, C).seconds, job


@pytest.mark.parametrize(
    ("model", "figures"),
    [
        (SMALL, {}),
        (SMALL, {"memory_gib": 2.1, "network_gbps": 100.0}),
        (EXPERTS, {"memory_gib": 3.7, "network_gbps": 30.0}),
    ],
    ids=["all fit", "few fit", "experts"],
)
def test_nothing_better_is_missed(model, figures):
    where = cluster(**figures)
    found = plan(model, where, global_batch=BATCH)
    best = {n: min((s for s, _ in every_job(model, where, n)), default=None) for n in (1, 2, 4, 8)}
    assert found.fastest.seconds == pytest.approx(best[8], rel=1e-12)
    fit = {n: seconds for n, seconds in best.items() if seconds}
    assert found.smallest.job.n_gpus == min(fit)
    assert found.smallest.seconds == pytest.approx(fit[min(fit)], rel=1e-12)
    assert found.cheapest.gpu_seconds == pytest.approx(min(n * s for n, s in fit.items()), rel=1e-12)


def test_all_that_is_named_fits():
    found = plan(SMALL, cluster(memory_gib=2.1), global_batch=BATCH)
    for one in (found.fastest, found.cheapest, found.smallest, found.runner_up, *found.contenders):
        peak = predict_memory(one.job, C)
        assert peak.fits and peak.total <= 0.9 * 2.1 and peak == one.peak
        assert one.job.step_tokens == BATCH * 2048
    seconds = [one.seconds for one in found.contenders]
    assert seconds == sorted(seconds) and found.contenders[0] is found.fastest
