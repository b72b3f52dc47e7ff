"""This machine as a GPU: the fit recovers the rates of a simulated clock, and the planner accepts the result."""

from math import isfinite, isnan

import numpy as np
import pandas as pd
import pytest
from pytest import approx
from torch.utils.flop_counter import FlopCounterMode

from labkit.scale import calibrate
from labkit.scale.cluster import Cluster
from labkit.scale.collectives import NETWORK_SHARE, NODE_SHARE, flat, groups
from labkit.scale.constants import values
from labkit.scale.cost import device_seconds
from labkit.scale.hardware import find_gpu
from labkit.scale.job_config import job_of
from labkit.scale.messages import links
from labkit.scale.plan import plan
from labkit.scale.search import space_of

PEAK, EDGE, COPY = 4e9, 25.0, 0.02  # FLOP/s, elements, seconds of a copy
ALPHA, BETA = 3e-4, 1.6e-7  # seconds of a message, of a byte: 50 Mbit/s
SMALL = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 1000, "seq_len": 1024}


@pytest.fixture
def rows(monkeypatch):
    """The rows of two ranks whose clock follows the rates above, with one slow round of three."""

    def seconds_of(work, device):
        with FlopCounterMode(display=False) as counter:
            work()
        flops = counter.get_total_flops()
        return flops / PEAK * (1 + 3 * EDGE / (flops / 2) ** (1 / 3)) if flops else COPY

    monkeypatch.setattr(calibrate, "seconds_of", seconds_of)
    monkeypatch.setattr(calibrate, "COPIED", {"cpu": 1 << 16})
    alone = pd.DataFrame(calibrate.measure("cpu", sides=(16, 32, 64), rounds=3))
    sizes = calibrate.MESSAGES
    told = [
        {"what": "message", "round": r, "size": s, "seconds": 2 * ALPHA + s * BETA} for r in range(3) for s in sizes
    ]
    rows = pd.concat([alone, pd.DataFrame(told)] * 2, ignore_index=True)
    rows["seconds"] *= np.where(rows["round"] == 1, 2.0, 1.0)
    return rows


def test_known_rates_are_found_again_and_a_slow_round_does_not_decide(rows):
    assert calibrate.products(rows, "fp32") == approx((PEAK, EDGE))
    assert calibrate.link(rows) == approx((ALPHA, BETA))
    copies = calibrate.moved(rows, "copy")
    assert (copies.median, copies.low, copies.n) == approx(((1 << 16) / COPY, 0.625 * (1 << 16) / COPY, 6))


def test_what_was_measured_is_what_the_cost_model_gets(rows):
    here = calibrate.machine(rows)
    assert here.name == "this machine" and here.source.startswith("measured here: ")
    assert here.peak("fp32") == here.peak("bf16") == approx(PEAK)
    assert here.memory_gbs == here.host_gbs == approx(2e-9 * (1 << 16) / COPY)
    assert isnan(here.watts) and here.memory_gib > 0 and find_gpu(here) is here
    row = SMALL | {"gpu": here, "precision": "fp32", "n_gpus": 2, "dp": 2}
    for per_node in (1, 2):  # a message over either link takes what it took
        (pair,) = groups("flat", *links(job_of(row | {"gpus_per_node": per_node}), 2, 1, {"crowding": 0.0}))
        alpha = flat("all_gather", pair, 0)
        assert (1 / pair.slower, alpha) == approx((BETA, ALPHA))
    assert here.node_gbs * NODE_SHARE == approx(here.network_gbps / 8 * NETWORK_SHARE)


def test_a_layer_takes_its_products_at_the_rate_of_their_size(rows):
    """Nothing but products: forward and twice that backward, each with the edges of its sides."""
    here = calibrate.machine(rows)
    job = job_of(SMALL | {"gpu": here, "precision": "fp32", "micro_batch": 1})
    c = values() | {"traffic": 0.0, "attention": float("inf"), "edge": 1e9}  # the last: of other GPUs
    sizes = {job.shape.hidden: job.shape.attention_weights, job.shape.ffn: 8 * job.shape.hidden**2}
    edges = {side: 1 + EDGE * (1 / job.shape.hidden + 1 / side + 1 / 1024) for side in sizes}
    wanted = sum(3 * 2 * weights * 1024 * edges[side] / PEAK for side, weights in sizes.items())
    assert device_seconds(job, c) == approx(wanted)


def test_the_planner_can_be_asked_about_this_machine(rows):
    cluster = Cluster(calibrate.machine(rows), 2, gpus_per_node=1)
    space = space_of(SMALL, cluster, global_batch=8, spare=0.1, uneven=False, precision="fp32", framework="")
    assert space.job.network_gbps == approx(8e-9 / BETA / NETWORK_SHARE)  # 0.07 Gbit/s, and not refused
    found = plan(SMALL, cluster, global_batch=8, precision="fp32")
    assert found.fastest.job.n_gpus == 2 and isfinite(found.fastest.seconds) and found.fastest.seconds > 0


@pytest.mark.parametrize("fit", [calibrate.fit_products, calibrate.fit_link])
@pytest.mark.parametrize(
    ("sizes", "seconds", "said"),
    [
        ((64,), (0.1,), "of at least two sizes are needed"),
        ((64, 64), (0.1, 0.2), "of at least two sizes are needed"),
        ((64, 128), (0.1, float("nan")), "must be finite"),
        ((64, float("inf")), (0.1, 0.2), "must be finite"),
    ],
)
def test_what_cannot_be_fitted_is_one_line(fit, sizes, seconds, said):
    with pytest.raises(ValueError, match=said) as caught:
        fit(sizes, seconds)
    assert "\n" not in str(caught.value)


def test_neither_cost_is_below_nothing():
    assert calibrate.fit_link((1000, 2000), (1.0, 4.0)) == approx([0.0, 1.2e-3])
    # 4 times the rate at twice the side: 8,000 is the fastest; the mean of e = 10 and 0
    assert calibrate.fit_products((10, 20), (1.0, 2.0)) == approx((8000, (3 * 10 / 3 + 0) / 2))


def test_rows_that_tell_nothing_are_refused(rows):
    with pytest.raises(ValueError, match="no products were measured"):
        calibrate.machine(rows[rows["what"] != "product"])
    with pytest.raises(ValueError, match="messages of at least two sizes are needed"):
        calibrate.link(rows[rows["what"] == "product"])
    assert calibrate.machine(rows[rows["what"] != "message"]).hop == 0.0


def test_a_message_that_seems_to_cost_nothing_costs_a_copy(rows):
    rows.loc[rows["what"] == "message", "seconds"] = ALPHA * 2  # of any size: as noise may have it
    here = calibrate.machine(rows)
    assert here.node_gbs * NODE_SHARE == approx(here.memory_gbs) and here.hop == approx(ALPHA)


def calibrated(rank, world_size):
    import torch

    torch.set_num_threads(1)
    return list(calibrate.measure("cpu", sides=(64, 128, 256), messages=(1 << 8, 1 << 18), rounds=2))


def test_on_this_machine_all_is_positive_and_finite(ranks):
    told = pd.DataFrame([row for rows in ranks(2, calibrated) for row in rows])
    here = calibrate.machine(told)
    figures = [here.memory_gib, here.memory_gbs, here.host_gbs, here.node_gbs, here.network_gbps, here.tflops["fp32"]]
    assert all(isfinite(one) and one > 0 for one in figures)
    assert isfinite(here.edge["fp32"]) and here.edge["fp32"] >= 0 and isfinite(here.hop) and here.hop >= 0
    assert set(told["what"]) == {"memory", "product", "copy", "message"}
