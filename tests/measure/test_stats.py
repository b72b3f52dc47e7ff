import itertools
import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from labkit.measure import machine
from labkit.measure.stats import (
    Ratio,
    Summary,
    interval_name,
    median_interval,
    miss,
    paired_accuracy,
    paired_ratio,
    shuffled_rounds,
    summary,
)


def test_summary_is_median_and_quartiles_after_warmup():
    assert summary([100, 1, 2, 3, 4, 5], warmup=1) == Summary(3.0, 2.0, 4.0, 5)
    assert summary([7]) == Summary(7.0, 7.0, 7.0, 1)


@pytest.mark.parametrize(("values", "message"), [([1], "no values left"), ([1, float("nan")], "finite")])
def test_summary_refuses(values, message):
    with pytest.raises(ValueError, match=message):
        summary(values, warmup=1)


def test_ratio_of_identical_code_contains_one_and_repeats():
    noise = np.random.default_rng(1)
    shared = 1 + 0.3 * noise.random(40)  # a slow second slows both
    a, b = (shared * (1 + 0.02 * noise.standard_normal(40)) for _ in range(2))
    ratio = paired_ratio(a, b)
    assert ratio.low <= 1 <= ratio.high and ratio.high - ratio.low < 0.05 and ratio.n == 40
    assert ratio == paired_ratio(a, b)


def test_ratio_finds_ten_per_cent():
    noise = np.random.default_rng(2)
    b = 1 + 0.3 * noise.random(60)
    ratio = paired_ratio(0.9 * b * (1 + 0.02 * noise.standard_normal(60)), b)
    assert ratio.low <= 0.9 <= ratio.high and ratio.at_most(0.95) and not ratio.at_most(0.9)


def test_a_ratio_is_the_median_over_the_pairs():
    ratio = paired_ratio([3, 8, 50], [2, 1, 5])  # pairs 1.5, 8, 10; of the minima 3, of the medians 4, of the sums 7.6
    assert (ratio.median, ratio.n) == (8, 3)


@pytest.mark.parametrize("n", [6, 7, 9, 12, 20, 41])
def test_an_interval_covers_the_truth_as_often_as_it_says(n):
    noise = np.random.default_rng(n)
    a, b = (np.exp(0.1 * noise.standard_cauchy((2000, n)).clip(-50, 50)) for _ in range(2))
    ratios = [paired_ratio(*pair) for pair in zip(a, b, strict=True)]
    misses = sum(not ratio.low <= 1 <= ratio.high for ratio in ratios) / 2000
    assert misses <= 0.05 + 0.015  # a bootstrap of 7 pairs: 0.12
    assert misses == pytest.approx(miss(n)[1], abs=0.015)


def test_the_order_statistics_are_those_of_published_tables():
    ranks = {n: median_interval(range(1, n + 1)) for n in (6, 8, 9, 12, 15, 20, 25)}  # of the sign test
    assert ranks == {6: (1, 6), 8: (1, 8), 9: (2, 8), 12: (3, 10), 15: (4, 12), 20: (6, 15), 25: (8, 18)}


def test_few_pairs_are_never_called_95_per_cent():
    few, enough = (paired_ratio([0.9, 0.8, 0.7] * often, [1.0] * 3 * often) for often in (1, 2))
    assert str(few) == "0.800 (smallest 0.700, largest 0.900, n=3)"
    assert few.in_words() == "0.80 (smallest 0.70, largest 0.90)"
    assert str(enough) == "0.800 (95 %: 0.700 to 0.900, n=6)" and enough.in_words() == "0.80 (0.70 to 0.90)"
    assert [interval_name(*pairs) for pairs in ((6, 40), (3, 5), (5, 6))] == ["95 %", "range", "95 % or range"]
    assert enough.at_most(0.9) and not few.at_most(0.9)
    assert (enough.verdict(), few.verdict()) == ("faster", "cannot tell")
    assert few.verdict_in_words((1, 1)) == few.claim((1, 1)) == "too few rounds to tell"


def test_a_verdict_does_not_depend_on_which_copy_is_called_the_first():
    noise = np.random.default_rng(5)
    a, b, c = (np.exp(0.1 * noise.standard_normal(9)) for _ in range(3))
    one, other = paired_ratio(a, b), paired_ratio(b, a)
    assert (one.low, one.high) == pytest.approx((1 / other.high, 1 / other.low))
    assert one.noise_band() == pytest.approx(other.noise_band()) and one.noise_band()[0] < 1 < one.noise_band()[1]
    apart, twin = Ratio(1.12, 1.01, 1.37, 40), Ratio(0.92, 0.84, 0.96, 40)
    assert twin.noise_band() == pytest.approx((0.84, 1 / 0.84)) and apart.verdict() == "slower"
    assert apart.verdict(twin.noise_band()) == "cannot tell"
    assert apart.verdict_in_words(twin.noise_band()) == "undecided"
    assert Ratio(1.12, 1.01, 1.18, 40).verdict_in_words(twin.noise_band()) == "within noise"
    assert Ratio(1.12, 1.01, 1.18, 5).verdict_in_words(twin.noise_band()) == "too few rounds to tell"
    assert apart.claim(twin.noise_band()) == "no difference above 37 %" and apart.claim((1, 1)) == "slower"
    assert Ratio(0.92, 0.8, 1.1, 40).claim((0.9, 1.1)) == "no difference above 25 %"
    assert twin.band_in_words() == "0.84 to 1.19" and apart.band_in_words() == "0.73 to 1.37"
    for first, second, word in ((1.3 * c, c, "slower"), (c, 1.3 * c, "faster")):
        assert paired_ratio(first, second).verdict((0.9, 1 / 0.9)) == word


def test_an_interval_misses_by_chance():
    assert miss(6) == (0, 2 / 2**6)
    assert miss(9) == (1, 2 * (1 + 9) / 2**9)


def test_accuracies_over_the_same_samples_are_compared_in_pairs():
    first = np.ones(297, dtype=bool)
    second = first.copy()
    second[:8] = False
    found = paired_accuracy(first, second)
    assert (found.first_only, found.second_only, found.n) == (8, 0, 297) and found.p == 2 / 2**8
    assert found.differs() and found.points == pytest.approx(800 / 297)
    assert paired_accuracy(second, first).p == found.p and paired_accuracy(second, first).points == -found.points
    same = paired_accuracy([1, 1, 0], [1, 1, 0])
    assert (same.points, same.p) == (0, 1) and not same.differs()
    even = paired_accuracy([3, 0, 1, 2], [0, 3, 1, 2])  # right in so many seeds
    assert (even.first_only, even.second_only, even.p) == (1, 1, 1)


@pytest.mark.parametrize("only", [0, 1, 3, 4])
def test_the_p_value_is_the_share_of_all_splits_that_are_as_uneven(only):
    of = 9
    right = [1] * only + [0] * (of - only)
    splits = [sum(signs) for signs in itertools.product((0, 1), repeat=of)]
    as_uneven = [split for split in splits if abs(2 * split - of) >= abs(2 * only - of)]
    assert paired_accuracy(right, [1 - one for one in right]).p == len(as_uneven) / len(splits)


@pytest.mark.parametrize(("first", "second"), [([], []), ([1], [1, 0])])
def test_the_same_samples_are_needed(first, second):
    with pytest.raises(ValueError, match="need the same samples"):
        paired_accuracy(first, second)


@pytest.mark.parametrize(("a", "b"), [([], []), ([1], [1, 2]), ([1], [0]), ([0], [1]), ([np.inf], [1])])
def test_ratio_refuses(a, b):
    with pytest.raises(ValueError):
        paired_ratio(a, b)


def test_rounds_hold_every_name_once_and_are_the_same_everywhere():
    rounds = list(shuffled_rounds("abc", 50, seed=4))
    assert rounds == list(shuffled_rounds("abc", 50, seed=4))
    orders = ["".join(name for number, name in rounds if number == n) for n in range(50)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders) and len(set(orders)) == 6


def test_the_card_names_a_class_of_machine_and_not_the_machine():
    card = machine.card()
    text = json.dumps(card) + machine.describe(card) + machine.host_class(card)
    assert card["cores"] >= 1 and card["memory_gib"] > 0 and "gloo" in card["backends"]
    assert "torch" in machine.host_class() and len(machine.describe().splitlines()) == 5
    for private in (socket.gethostname(), str(Path.home()), os.getcwd()):
        assert len(private) < 4 or private not in text
