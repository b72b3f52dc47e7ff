import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from labkit.measure import machine
from labkit.measure.stats import Summary, paired_ratio, shuffled_rounds, summary


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


def test_interval_covers_the_truth_about_as_often_as_it_says():
    noise = np.random.default_rng(3)
    hits = sum(
        ratio.low <= 1 <= ratio.high
        for ratio in (paired_ratio(np.exp(0.1 * noise.standard_normal(40)), np.ones(40), 500) for _ in range(200))
    )
    assert 180 <= hits <= 200


@pytest.mark.parametrize(("a", "b"), [([], []), ([1], [1, 2]), ([1], [0]), ([np.inf], [1])])
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
