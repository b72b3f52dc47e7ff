"""The arithmetic of link speed against step time, on numbers that come out even."""

import math

import pytest

from labkit.measure.crossover import Cost, crossover, predicted

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
