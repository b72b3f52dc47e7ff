"""FLOPs by hand, by the closed form and by the counter; and the utilization that is made of them."""

from math import isnan, nan
from time import sleep

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from labkit import comm, models
from labkit.measure import flops
from labkit.measure.flops import mfu, peak_flops, step_flops, token_flops
from labkit.run.compare import compare
from labkit.run.experiment import Experiment

LAYERS, WIDTH, VOCAB, CONTEXT, BATCH = 3, 32, 50, 16, 4


def counted(name, input, target, device="cpu", **shape):
    with torch.device(device):
        module = models.build(name, **shape)
    return step_flops(module, input.to(device), target.to(device), models.loss(name))


def gpt(device="cpu", length=CONTEXT, **changes):
    shape = {"layers": LAYERS, "heads": 2, "width": WIDTH, "vocab": VOCAB, "context": CONTEXT}
    tokens = torch.zeros(BATCH, length, dtype=torch.int64)
    return counted("gpt", tokens, tokens, device, **(shape | changes))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_mlp_by_hand(device):
    input, target = torch.zeros(BATCH, 5), torch.zeros(BATCH, dtype=torch.int64)
    forward = 2 * BATCH * (5 * 7 + 7 * 11 + 11 * 3)
    # Backward is the same twice, but nobody wants the gradient of the input of the first layer.
    by_hand = 3 * forward - 2 * BATCH * 5 * 7
    assert counted("mlp", input, target, device, sizes=(5, 7, 11, 3)) == by_hand


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("length", [CONTEXT, CONTEXT // 2])
def test_a_gpt_by_hand(device, tied, length):
    tokens, block = BATCH * length, WIDTH * (3 * WIDTH + WIDTH + 4 * WIDTH + 4 * WIDTH)
    products = 2 * tokens * (LAYERS * block + WIDTH * VOCAB)
    # Per sample, scores [s, s] from s x h, and s x h from them: heads cut h, and do not change the sum.
    attention = LAYERS * BATCH * 2 * (2 * length * length * WIDTH)
    assert gpt(device, length, tied=tied) == 3 * (products + attention)


def test_the_closed_form_is_the_count_where_n_is_what_is_multiplied():
    per_token = token_flops(12 * LAYERS * WIDTH**2 + WIDTH * VOCAB, LAYERS, WIDTH, CONTEXT)
    assert gpt("meta") == BATCH * CONTEXT * per_token


@pytest.mark.parametrize("size", ["tiny", "small", "medium"])
def test_six_n_of_all_parameters_is_off_by_what_is_derived(size):
    shape = models.SIZES["gpt"][size]
    layers, width, context = shape["layers"], shape["width"], 64
    tokens = torch.zeros(2, context, dtype=torch.int64)
    per_token = counted("gpt", tokens, tokens, "meta", **shape) / tokens.numel()
    every = sum(p.numel() for p in models.build("gpt", size).parameters())
    # Positions, and in a layer 9 h of biases and 4 h of norms, 2 h in the last one: parameters that no product has.
    idle = width * context + layers * 13 * width + 2 * width
    assert 6 * every - per_token == 6 * idle - 12 * layers * width * context
    # 12 L h s compared with 72 L h^2: a share of s / 6 h at most, and the idle part is less than that.
    assert abs(6 * every / per_token - 1) <= context / (6 * width)


def test_a_fused_kernel_is_not_what_is_counted():
    """As a CPU runs it, attention has no formula in the counter; as a GPU does, it has five products in backward."""
    tokens = torch.zeros(BATCH, CONTEXT, dtype=torch.int64)
    module = models.build("gpt", layers=LAYERS, heads=2, width=WIDTH, vocab=VOCAB, context=CONTEXT)
    with FlopCounterMode(display=False) as counter:
        models.loss("gpt")(module(tokens), tokens).backward()
    assert counter.get_total_flops() != gpt()


@pytest.mark.slow
def test_recomputation_does_not_count_twice():
    plain, again = (Experiment(model="gpt", recompute=which) for which in ("none", "every"))
    records = compare({"plain": plain, "again": again}, rounds=1, steps_per_round=1, quiet=True).records
    assert records["flops"].nunique() == 1  # not mfu: it is NaN where the peak was measured on busy cores


def test_mfu_is_work_by_time_by_peak():
    assert mfu(3e9, 100.0, 60e9) == pytest.approx(0.5)
    assert mfu(6e9, 100.0, 60e9) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("flops", "step_ms", "peak"),
    [(1e9, nan, 1e9), (1e9, 0.0, 1e9), (1e9, 9.0, nan), (nan, 9, 1), (6.1e9, 100.0, 60e9)],
)
def test_what_was_not_measured_or_cannot_be_has_no_mfu(flops, step_ms, peak):
    assert isnan(mfu(flops, step_ms, peak))


def everyones_peak(rank, world_size):
    device = torch.device("cpu")
    return peak_flops(device, torch.float32), peak_flops(device, torch.float64, working=rank == 0)


def test_all_ranks_agree_on_the_peak(ranks):
    first, second = ranks(2, everyones_peak)
    assert first == second and min(first) > 0


def late_peak(rank, world_size):
    barrier = comm.barrier

    def held_up():
        barrier()
        sleep(0.2 * rank)  # as where ranks share a core: it returns while others compute

    comm.barrier = held_up
    return peak_flops(torch.device("cpu"), torch.float32, repetitions=2)


def test_a_rank_that_computes_after_the_others_is_not_taken_to_compute_beside_them(ranks):
    assert max(ranks(2, late_peak)) <= 2 * 2 * 256**3 / 0.2


def test_the_peak_of_16_bits_is_that_of_fp32_where_this_is_faster(monkeypatch):
    """A processor without arithmetic of 16 bits is slower in it, and its MFU would be above 1."""
    reached = {torch.float16: 1.0, torch.bfloat16: 9.0, torch.float32: 4.0, torch.float64: 2.0}
    monkeypatch.setattr(flops, "measured_peak", lambda device, dtype, working, repetitions: reached[dtype])
    assert [peak_flops("cpu", dtype) for dtype in reached] == [4.0, 9.0, 4.0, 2.0]


@pytest.mark.slow
def test_rows_have_the_share_of_the_peak_and_sleeping_models_none():
    small = Experiment(model="mlp", batch_size=16)
    kinds = {"all": small, "alone": small.replace(strategy="single")}
    kinds["sleeping"] = small.replace(compute="emulated", block_ms=0.1)
    records = compare(kinds, rounds=2, steps_per_round=1, quiet=True).records
    assert records.loc[records["label"] == "sleeping", "mfu"].isna().all()
    awake = records[records["label"] != "sleeping"]
    assert ((awake["mfu"] > 0) | awake["mfu"].isna()).all()  # NaN: the peak was measured on busy cores
    by_hand = 2 * 16 * (3 * (64 * 256 + 256 * 256 + 256 * 10) - 64 * 256)  # of the batch, whoever computes it
    assert set(awake["flops"]) == {by_hand}
    for _, rows in awake[awake["mfu"] > 0].groupby("label"):
        work = rows["mfu"] * rows["step_ms"]  # FLOPs by the label's peak, which is one number
        assert work.max() == pytest.approx(work.min())
