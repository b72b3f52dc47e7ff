"""The arithmetic of link speed against step time, on numbers that come out even."""

import math

import pytest

from labkit.measure.crossover import Cost, crossover, fit, predicted

WHOLE = Cost(busy_ms=20.0, wire_bytes=5_000_000)  # 40 megabits: 400 ms at 100 Mbit/s
SMALL = Cost(busy_ms=30.0, wire_bytes=1_250_000)  # 10 megabits, and 10 ms more to compute


def test_a_step_is_work_and_bits_over_the_link_speed():
    assert predicted(*WHOLE, 100) == 420.0
    assert predicted(*SMALL, 1000) == 40.0
    assert [predicted(*SMALL, mbit) for mbit in (10, 100)] == [1030.0, 130.0]


def test_both_are_equally_fast_at_the_crossover():
    speed = crossover(WHOLE, SMALL)
    assert speed == 3000.0  # 30 megabits fewer for 10 ms more
    assert predicted(*WHOLE, speed) == predicted(*SMALL, speed)
    assert predicted(*WHOLE, speed / 2) > predicted(*SMALL, speed / 2)
    assert predicted(*WHOLE, speed * 2) < predicted(*SMALL, speed * 2)


@pytest.mark.parametrize(
    ("b", "speed"),
    [
        ((20.0, 1_000_000), math.inf),  # fewer bytes for the same work
        ((10.0, 1_000_000), math.inf),
        ((10.0, 5_000_000), math.inf),  # less work for the same bytes
        ((20.0, 5_000_000), 0.0),  # the same: not faster
        ((30.0, 5_000_000), 0.0),
        ((30.0, 6_000_000), 0.0),
        ((20.0, 6_000_000), 0.0),
        ((10.0, 6_000_000), 0.0),  # it wins above a speed, not below
    ],
)
def test_where_the_lines_do_not_cross_so(b, speed):
    assert crossover(WHOLE, b) == speed


def test_what_wins_above_a_speed_is_asked_the_other_way_round():
    assert crossover(SMALL, WHOLE) == 0.0 and crossover(WHOLE, SMALL) == 3000.0


def test_a_fit_finds_what_exact_times_were_made_of():
    speeds = [10, 100, 1000, 10_000]
    for cost in (WHOLE, SMALL):
        assert fit(speeds, [predicted(*cost, mbit) for mbit in speeds]) == pytest.approx(cost, rel=1e-9)
    fits = [fit(speeds, [predicted(*cost, mbit) for mbit in speeds]) for cost in (WHOLE, SMALL)]
    assert crossover(*fits) == pytest.approx(3000.0, rel=1e-6)


def test_slow_links_do_not_decide_alone():
    """Ten per cent too long on the slowest link: absolute errors would put a third of a second into busy_ms."""
    speeds = [1, 100, 1000, 10_000]
    times = [predicted(*SMALL, mbit) for mbit in speeds]
    times[0] *= 1.1
    busy_ms, wire_bytes = fit(speeds, times)
    assert busy_ms == pytest.approx(SMALL.busy_ms, rel=0.06)
    assert SMALL.wire_bytes < wire_bytes < 1.1 * SMALL.wire_bytes


@pytest.mark.parametrize(
    ("speeds", "times", "words"),
    [
        ([100, 100], [10, 11], "at least two link speeds"),
        ([], [], "at least two link speeds"),
        ([100, 200], [10], "link_mbit and step_ms must have equal lengths"),
        ([100, 0], [10, 11], "above 0"),
        ([100, 200], [10, -1], "above 0"),
        ([100, 200], [10, math.nan], "above 0"),
        ([100, math.inf], [10, 11], "above 0"),
    ],
)
def test_what_cannot_be_fitted_is_refused(speeds, times, words):
    with pytest.raises(ValueError, match=words):
        fit(speeds, times)
