"""Runs with jitter and failures: against closed forms, n draws for n ranks, and a walk through every event."""

from math import inf, log, log2, pi, sqrt

import numpy as np
import pytest
import torch
from pytest import approx

from labkit.scale.goodput import (
    DAY,
    Fleet,
    Kind,
    daly,
    expected,
    exponential,
    normal,
    published,
    spent,
    step_seconds,
    survive,
    young,
)

ONE_IN_A_MILLION = 1e-6
STEPS = 4000
LLAMA = Fleet(16384, 1.97e-5, save=30, restart=600, detection=120)


def apart(sample, share_below):
    """The Kolmogorov-Smirnov distance of a sample from a distribution function."""
    xs = np.sort(sample.numpy())
    share, n = share_below(xs), len(xs)
    return max(np.max(np.arange(1, n + 1) / n - share), np.max(share - np.arange(n) / n))


def allowed(n):
    """Dvoretzky, Kiefer, Wolfowitz, with Massart's constant: P(distance > x) <= 2 exp(-2 n x^2)."""
    return sqrt(log(2 / ONE_IN_A_MILLION) / (2 * n))


@pytest.mark.parametrize("ranks", [1, 2, 7, 64])
@pytest.mark.parametrize("tail", ["exponential", "normal"])
def test_one_draw_is_the_slowest_of_n_draws(ranks, tail):
    drawn = getattr(np.random.default_rng(ranks), tail)(size=(STEPS, ranks), **{"scale": 0.5}).max(1)
    ours = step_seconds(
        [Kind(ranks, 3.0, {"exponential": exponential, "normal": normal}[tail](0.5))], STEPS, seed=ranks
    )
    below = np.searchsorted(np.sort(drawn), np.sort(ours.numpy()) - 3.0, side="right") / STEPS
    assert np.abs(below - np.arange(1, STEPS + 1) / STEPS).max() <= 2 * allowed(STEPS)


@pytest.mark.parametrize("ranks", [1, 1000, 100_000, 10**9])
def test_any_number_of_ranks_has_the_distribution_of_its_maximum(ranks):
    ours = step_seconds([Kind(ranks, 0.0, exponential(1.0))], STEPS, seed=1)
    assert apart(ours, lambda x: np.exp(ranks * np.log1p(-np.exp(-x)))) <= allowed(STEPS)
    mean = log(ranks) + np.euler_gamma + 1 / (2 * ranks) - 1 / (12 * ranks**2) if ranks > 1 else 1.0
    assert ours.mean().item() == approx(mean, abs=5 * pi / sqrt(6 * STEPS))  # the variance is at most pi^2 / 6


def test_ranks_are_folded_by_kind():
    one, two = exponential(1.0), Kind(1, 4.0, exponential(1.0))
    ours = step_seconds([Kind(60, 0.0, one), Kind(40, 0.0, one)], STEPS, seed=2)
    assert apart(ours, lambda x: (-np.expm1(-x)) ** 100) <= allowed(STEPS)
    late = step_seconds([Kind(99, 0.0, one), two], STEPS, seed=2)  # a straggler
    assert apart(late, lambda x: (-np.expm1(-x)) ** 99 * -np.expm1(-np.maximum(x - 4, 0))) <= allowed(STEPS)
    assert step_seconds([Kind(10**5 - 1, 1.0), Kind(1, 1.25)], 3).tolist() == [1.25] * 3


def walked(gap, detection, restart, interval, save, write):
    """Simulate one gap between failures second by second: (useful, saves, lost)."""
    now, kept, safe, saves = detection + restart, 0.0, detection + restart, []
    while now < gap:
        now += interval + save
        saves.append((now, now + write))
    for stopped, whole in saves:
        if whole <= gap:
            kept, safe = kept + interval, stopped
    return kept, kept / interval * save, max(0.0, gap - safe)


@pytest.mark.parametrize("write", [0.0, 2.5, 7.0])
def test_every_gap_is_spent_as_a_walk_through_it_says(write):
    costs, gaps = (5.0, 3.0, 7.0, 1.5, write), np.random.default_rng(0).exponential(30, 500)
    found = spent(torch.tensor(gaps), torch.full((500,), 5.0, dtype=torch.float64), *costs[1:])
    for i, gap in enumerate(gaps):
        ours = [found[kind][i].item() for kind in ("useful", "saves", "lost")]
        assert ours == approx(walked(gap, *costs), abs=1e-9)
    assert torch.stack(list(found.values())).sum(0).tolist() == approx(gaps.tolist())
    assert found["detection"].tolist() == approx(np.minimum(gaps, 5.0).tolist())


def spread(fleet, interval, seconds):
    """A bound of the goodput's standard deviation, and one of what both ends of a run may change.

    Of saves k in a gap: P(k >= j) = a q^j. Useful time less goodput x gap has no mean; its deviation
    is at most the sum of both, and the gaps are independent.
    """
    M, cycle = fleet.between, interval + fleet.save
    down = fleet.detection + fleet.restart + fleet.write
    a, q = np.exp(-down / M), np.exp(-cycle / M)
    variance = a * q * (1 + q) / (1 - q) ** 2 - (a * q / (1 - q)) ** 2
    of_a_gap = interval * sqrt(variance) + expected(fleet, interval) * M
    return of_a_gap / M / sqrt(seconds / M), (down + 2 * cycle + M) / seconds


FLEETS = {
    "Llama 3's": (LLAMA, 800),
    "written in the background": (Fleet(16384, 1.97e-5, save=3, restart=600, write=400), 500),
    "as good as never saved": (Fleet(1000, 1e-3, save=60, restart=300, detection=900), 7200),
    "hardly ever up": (Fleet(10**5, 1e-3, save=5, restart=60), 30),
}


@pytest.mark.parametrize("fleet", FLEETS)
def test_a_long_run_keeps_what_the_closed_form_says(fleet):
    fleet, interval = FLEETS[fleet]
    seconds = 200_000 * fleet.between
    deviation, ends = spread(fleet, interval, seconds)
    assert deviation < 0.01
    run = survive(fleet, interval, seconds, seed=3)
    assert abs(run.goodput - expected(fleet, interval)) <= 5 * deviation + ends
    assert abs(run.failures - 200_000) <= 5 * sqrt(200_000)  # Poisson's
    assert sum(run.seconds.values()) == approx(seconds)


def test_at_small_rates_losses_are_those_of_young():
    d, R = 10.0, 60.0
    for per_hour in (1e-3, 1e-4, 1e-5):
        fleet = Fleet(1, per_hour, save=d, restart=R)
        t, M = young(d, fleet.between), fleet.between
        first_order = d / t + t / (2 * M) + R / M
        # what the first order leaves out: products of two of its terms
        assert abs(1 / expected(fleet, t) - 1 - first_order) <= 2 * first_order**2


@pytest.mark.parametrize(("minutes", "told"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_daly_as_he_says(minutes, told):
    """The captions of his figures 3 to 5, for a save of 5 minutes; and the closed form is best there."""
    assert round(daly(5, minutes), 1 if told < 10 else None) == told
    fleet = Fleet(60, 1 / minutes, save=300, restart=600)  # 60 GPUs: per minute
    kept = [expected(fleet, 60 * daly(5, minutes) * r) for r in (0.95, 1, 1.05)]
    assert max(kept) == kept[1]


def test_the_best_of_simulated_intervals_is_youngs():
    fleet, around = LLAMA, young(LLAMA.save, LLAMA.between)
    intervals = around * 2 ** np.linspace(-2, 2, 17)
    seconds = 40_000 * fleet.between
    best = max(intervals, key=lambda t: survive(fleet, t, seconds, seed=4).goodput)
    noise = max(5 * deviation + ends for deviation, ends in (spread(fleet, t, seconds) for t in intervals))
    assert expected(fleet, best) >= max(expected(fleet, t) for t in intervals) - 2 * noise
    assert abs(log2(best / around)) <= 0.5
    assert expected(fleet, around) >= expected(fleet, daly(fleet.save, fleet.between)) - 1e-4


def test_without_failures_it_is_a_sum():
    never = Fleet(100_000, 0.0, save=5, restart=20, detection=7, write=30)
    run = survive(never, 100, 20 + 105 * 8 + 40)  # eight saves, and 40 s that no failure loses
    told = {"useful": 840.0, "saves": 40.0, "lost": 0.0, "detection": 0.0, "restart": 20.0}
    assert run == (told, 0) and run.goodput == 840 / 900
    assert survive(never, 100, 20 + 105 * 8 + 102).seconds["saves"] == 42  # it ends within a save
    assert survive(never, 100, 15).goodput == 0 and never.between == inf
    assert expected(never, 100) == 100 / 105


def test_a_seed_is_a_run():
    runs = [survive(LLAMA, t, 54 * DAY, seed) for t, seed in ((600, 0), (600, 0), (900, 0), (600, 1))]
    assert runs[0] == runs[1] != runs[3] and runs[0].failures == runs[2].failures
    assert runs[0].seconds != runs[2].seconds and abs(runs[0].failures - 419) < 5 * sqrt(419)
    jitter = [step_seconds([Kind(8, 1.0, normal(0.1))], 5, seed).tolist() for seed in (0, 0, 1)]
    assert jitter[0] == jitter[1] != jitter[2]


def test_saves_that_training_does_not_wait_for_keep_more():
    waited = Fleet(16384, 1.97e-5, save=60, restart=600)
    copied = Fleet(16384, 1.97e-5, save=3, restart=600, write=57)
    best = [max(survive(fleet, t, 54 * DAY).goodput for t in range(100, 2000, 100)) for fleet in (waited, copied)]
    assert best[1] > best[0] + 0.02


def test_published_rates_have_a_source_and_say_what_their_authors_say():
    rows = {row["job"]: row for row in published()}
    assert all(row["source"] and 1e-5 < row["per_gpu_hour"] < 1e-4 for row in rows.values())
    hours = {job: Fleet(16384, row["per_gpu_hour"], 0, 0).between / 3600 for job, row in rows.items()}
    assert round(hours["Llama 3 405B"]) == 3  # "one in three hours"
    assert round(hours["RSC-1"], 1) == 1.8  # the authors' own projection


FINE = {"gpus": 8, "per_gpu_hour": 1e-5, "save": 1.0, "restart": 1.0}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Fleet(**FINE | {"gpus": 0}), "gpus must be a whole number of at least 1, got 0"),
        (lambda: Fleet(**FINE | {"gpus": 1.5}), "gpus must be a whole number of at least 1, got 1.5"),
        (lambda: Fleet(**FINE | {"gpus": inf}), "gpus must be a whole number of at least 1, got inf"),
        (lambda: Fleet(**FINE | {"save": float("nan")}), "save must be a number of at least 0, got nan"),
        (lambda: Fleet(**FINE | {"per_gpu_hour": -1}), "per_gpu_hour must be a number of at least 0, got -1"),
        (lambda: Fleet(**FINE, write=inf), "write must be a number of at least 0, got inf"),
        (lambda: survive(Fleet(**FINE), 0, DAY), "interval must be a number greater than 0, got 0"),
        (lambda: survive(Fleet(**FINE), 60, float("nan")), "seconds must be a number greater than 0, got nan"),
        (lambda: survive(Fleet(**FINE, write=90), 60, DAY), "at least the 90 s that it takes to write a save"),
        (lambda: expected(Fleet(**FINE, write=90), 60), "that it takes to write a save, got 60"),
        (
            lambda: survive(Fleet(10**5, 8760, 1, 1), 60, 365 * DAY),
            "7.7e+12 failures in 365 days: is the rate per hour",
        ),
        (lambda: Kind(0, 1.0), "ranks must be a whole number of at least 1, got 0"),
        (lambda: Kind(1, -1.0), "seconds must be a number of at least 0, got -1.0"),
        (lambda: exponential(float("nan")), "mean must be a number of at least 0, got nan"),
        (lambda: normal(-1), "deviation must be a number of at least 0, got -1"),
        (lambda: step_seconds([], 5), "kinds must be a whole number of at least 1, got 0"),
        (lambda: step_seconds([Kind(1, 1.0)], 0), "steps must be a whole number of at least 1, got 0"),
    ],
)
def test_it_refuses_in_one_line(call, said):
    with pytest.raises(ValueError) as error:
        call()
    assert said in str(error.value) and "\n" not in str(error.value)
