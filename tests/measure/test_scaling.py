"""Scaling: the arithmetic on rows and costs that come out even, and efficiencies of real ranks, paired by round."""

from math import inf

import pandas as pd
import pytest

from labkit.measure import scaling
from labkit.measure.scaling import Costs
from labkit.run.sweep import sweep
from labkit.show import efficiency, explorer


def rows(ranks, batch_size, step_ms):
    """Two ranks' worth of rows a round: a world's step is their mean."""
    return pd.DataFrame(
        {"round": turn, "ranks": ranks, "batch_size": batch_size, "step_ms": ms + late}
        for turn, ms in enumerate(step_ms)
        for late in (-1.0, 1.0)
    )


ALONE = rows(1, 16, [100.0, 200.0, 110.0])  # the second round was slow, for both


def test_weak_is_the_same_step_and_strong_an_nth_of_it():
    weak = scaling.efficiency(ALONE, rows(4, 64, [125.0, 250.0, 137.5]), "weak")
    assert (weak.median, weak.low, weak.high, weak.n) == pytest.approx((0.8, 0.8, 0.8, 3))
    strong = scaling.efficiency(ALONE, rows(4, 16, [50.0, 100.0, 55.0]), "strong")
    assert (strong.median, strong.low, strong.high, strong.n) == pytest.approx((0.5, 0.5, 0.5, 3))
    ideal = scaling.efficiency(ALONE, rows(4, 16, [25.0, 50.0, 27.5]), "strong")
    assert ideal.median == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("kind", "batch_size", "words"),
    [
        ("weak", 16, "batch_size of 4 ranks must be 64 for weak scaling from 16, not 16"),
        ("strong", 64, "batch_size of 4 ranks must be 16 for strong scaling from 16, not 64"),
    ],
)
def test_steps_of_another_batch_are_refused(kind, batch_size, words):
    with pytest.raises(ValueError, match=words):
        scaling.efficiency(ALONE, rows(4, batch_size, [100.0] * 3), kind)


def test_rounds_that_do_not_pair_are_refused():
    with pytest.raises(ValueError, match="must be pairs"):
        scaling.efficiency(ALONE, rows(4, 64, [100.0] * 2), "weak")


def test_a_ring_sends_nearly_twice_the_tensor_in_messages_that_wait_for_each_other():
    assert [scaling.ring(n) for n in (1, 2, 4, 8)] == [(0, 0.0), (2, 1.0), (6, 1.5), (14, 1.75)]


def test_a_double_tree_has_few_messages_and_sends_the_tensor_twice():
    assert [scaling.tree(n) for n in (1, 2, 8, 12, 1024)] == [(0, 0.0), (2, 2.0), (6, 2.0), (8, 2.0), (20, 2.0)]


COSTS = Costs(alpha_ms=0.25, beta_ms=2e-6)


def test_an_all_reduce_is_messages_and_bytes():
    size = 4_000_000  # 8 ms a time through
    assert scaling.all_reduce_ms(COSTS, 1, size) == 0.0
    assert scaling.all_reduce_ms(COSTS, 2, size) == pytest.approx(2 * 0.25 + 8)
    assert scaling.all_reduce_ms(COSTS, 8, size) == pytest.approx(14 * 0.25 + 14)
    assert scaling.all_reduce_ms(COSTS, 8, size, algorithm=scaling.tree) == pytest.approx(6 * 0.25 + 16)


def test_ranks_without_a_core_each_take_turns():
    assert [scaling.turns(n, 2) for n in (1, 2, 4, 8)] == [1.0, 1.0, 2.0, 4.0]
    alone = scaling.all_reduce_ms(COSTS, 8, 4_000_000)
    assert scaling.all_reduce_ms(COSTS, 8, 4_000_000, cores=2) == pytest.approx(4 * alone)
    assert scaling.all_reduce_ms(COSTS, 8, 4_000_000, cores=8) == alone


def test_a_link_counts_where_it_is_slower_than_the_cores():
    # 100 Mbit/s: 8e-5 ms a byte. The cores of 8 ranks on 2: 8e-6, and the messages 4 times 0.25 ms.
    assert scaling.all_reduce_ms(COSTS, 8, 4_000_000, 2, mbit=100) == pytest.approx(14 + 1.75 * 320)
    assert scaling.all_reduce_ms(COSTS, 8, 4_000_000, 2, mbit=2000) == scaling.all_reduce_ms(COSTS, 8, 4_000_000, 2)


@pytest.mark.parametrize(("n", "cores"), [(2, inf), (4, inf), (4, 2)])
def test_a_fit_finds_what_exact_steps_were_made_of(n, cores):
    measured = [(size, scaling.all_reduce_ms(COSTS, n, size, cores)) for size in (4_000, 300_000, 4_000_000)]
    assert scaling.fit(n, measured, cores) == pytest.approx(COSTS)


@pytest.mark.parametrize("measured", [[(1000, 3.0)], [(1000, 3.0), (1000, 4.0)], []])
def test_one_size_cannot_tell_messages_from_bytes(measured):
    with pytest.raises(ValueError, match="all-reduces of at least two sizes are needed"):
        scaling.fit(2, measured)


@pytest.mark.parametrize(
    ("measured", "costs"),
    [
        ([(1000, 1.0), (2000, 4.0)], Costs(0.0, 1.2e-3)),  # bytes alone: 1000 b = 1 (1 - e), 2000 b = 4 (1 + e)
        ([(1000, 4.0), (2000, 2.0)], Costs(1.2, 0.0)),
    ],
)
def test_no_message_costs_less_than_nothing(measured, costs):
    assert scaling.fit(2, measured) == pytest.approx(costs)


def test_what_backward_hides_is_taken_off():
    # Full at 10, 20, 30 of 30 ms; each takes 8: the last is sent at 30 and is all that is exposed.
    assert scaling.exposed_ms([8, 8, 8], [10, 20, 30], 30) == 8
    # Each takes 15: they queue. 10 to 25, 25 to 40, 40 to 55.
    assert scaling.exposed_ms([15, 15, 15], [10, 20, 30], 30) == 25
    assert scaling.exposed_ms([5], [10], 30) == 0.0 == scaling.exposed_ms([], [], 30)


def test_a_bucket_is_full_when_the_block_of_its_last_bytes_is_passed():
    assert scaling.full_at([25, 25, 50], 4, 60.0).tolist() == [15.0, 30.0, 60.0]
    assert scaling.full_at([30, 70], 4, 60.0).tolist() == [30.0, 60.0]  # 30 %: in the second block
    assert scaling.full_at([7], 4, 60.0).tolist() == [60.0]


STEP = scaling.Step(90.0, samples_ms=3.0, optimizer_ms=2.0, blocks=3, sizes=(1_000_000, 3_000_000))


def test_a_step_is_sleep_and_work_and_what_sticks_out():
    assert scaling.step_ms(COSTS, STEP, 1) == 95.0
    # backward: 60 of the 90. The buckets are full at 20 and 60 ms and take 2.5 and 6.5: the last one is exposed.
    assert scaling.step_ms(COSTS, STEP, 2) == pytest.approx(95 + 6.5)
    # 8 ranks on 2 cores: all work 4 times as long. The last bucket, (3.5 + 10.5) x 4, is exposed.
    assert scaling.step_ms(COSTS, STEP, 8, cores=2) == pytest.approx(90 + 20 + 56)
    assert scaling.step_ms(COSTS, STEP, 8) == pytest.approx(95 + 14)
    # A tree: 1 MB takes 1.5 + 4 ms, 3 MB 1.5 + 12. The last bucket is exposed.
    assert scaling.step_ms(COSTS, STEP, 8, algorithm=scaling.tree) == pytest.approx(95 + 13.5)


def test_ranks_that_share_a_batch_share_all_but_the_optimizer():
    third = STEP.shared(3)
    assert scaling.step_ms(COSTS, third, 1) == 30 + 1 + 2
    # backward: 20 of the 30; full at 20/3 and 20, and 4 messages take 1 ms: 4/3 MB 2.67, 4 MB 8.
    third = third._replace(sizes=(1_000_000, 3_000_000))
    assert scaling.step_ms(COSTS, third, 3) == pytest.approx(33 + 1 + 8)


@pytest.mark.slow
def test_efficiencies_of_real_ranks(tmp_path):
    """Emulated compute of two ranks: half the sleep each, and then less than half the time to win."""
    emulated = {"size": "tiny", "compute": "emulated", "nproc": 2}
    grids = [
        {"strategy": "single", "batch_size": 8, "block_ms": 20.0, **emulated},
        {"strategy": "ddp_bucketed", "batch_size": 8, "block_ms": 20.0, **emulated},
        {"strategy": "ddp_bucketed", "batch_size": 16, "block_ms": 40.0, **emulated},
    ]
    measured = sweep(grids, tmp_path, rounds=3, steps_per_round=1, device="cpu", quiet=True)
    measured = measured.assign(ranks=measured["nproc"])
    alone = measured[measured["strategy"] == "single"].assign(ranks=1)
    for kind, batch in (("strong", 8), ("weak", 16)):
        many = measured[(measured["strategy"] == "ddp_bucketed") & (measured["batch_size"] == batch)]
        found = scaling.efficiency(alone, many, kind)
        assert 0 < found.low <= found.median <= found.high and found.n == 3
        # The sleep of a rank cannot be shorter than it is: no efficiency above what the single process loses itself.
        assert found.median < 1.5
    with pytest.raises(ValueError, match="batch_size of 2 ranks must be 16 for weak scaling from 8"):
        scaling.efficiency(alone, measured[measured["strategy"] == "ddp_bucketed"], "weak")


# The picture and the controls


def picture():
    frame = pd.DataFrame(
        {"scaling": kind, "ranks": n, "efficiency": n**-power + late, "predicted": 1 / n}
        for kind, power in (("weak", 0.1), ("strong", 0.5))
        for n in (1, 2, 4)
        for late in (-0.02, 0.0, 0.02)
    )
    return efficiency.efficiency(frame, "A title", predicted="predicted")


def test_the_picture_has_the_ideal_and_both_kinds():
    (axes,) = picture().axes
    assert {text.get_text() for text in axes.texts} >= {"ideal", "weak", "strong", "dashed: predicted"}
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 1
    assert [1.0, 1.0] in [list(line.get_ydata()) for line in axes.lines]


def test_what_the_controls_ask_is_what_is_predicted():
    state = efficiency.State(compute=2, gradients=0.5, link_mbit=1000, cores=4)
    found = efficiency.rows(COSTS, STEP, state).set_index(["scaling", "ranks"])["efficiency"]
    own = STEP._replace(asleep_ms=180.0, sizes=(500_000.0, 1_500_000.0))
    eight = scaling.step_ms(COSTS, own, 8, 4, 1000)
    assert found["weak", 1] == found["strong", 1] == 1.0
    assert found["weak", 8] == pytest.approx(185 / eight)
    assert found["strong", 8] == pytest.approx(185 / 8 / scaling.step_ms(COSTS, own.shared(8), 8, 4, 1000))


def test_alpha_and_algorithm_are_those_of_the_controls():
    state = efficiency.State(alpha_us=500, algorithm="double tree")
    found = efficiency.rows(COSTS, STEP, state).set_index(["scaling", "ranks"])["efficiency"]
    # A tree of 8: 1 MB takes 6 x 0.5 + 4 ms, 3 MB 3 + 12. The last bucket is exposed.
    assert found["weak", 8] == pytest.approx(95 / (95 + 15))
    assert efficiency.headline(state).endswith("a core for each rank, alpha 500 us, double tree")


def test_the_takeaway_says_how_far_it_goes():
    free = Costs(0.0, 0.0)
    words = efficiency.takeaway(free, STEP, efficiency.State())
    # Strong: 95 / (93 + 2 n) >= 0.8 up to 12.9 ranks.
    assert words == (
        "Compute x 1, gradients x 1, no link, a core for each rank: weak scaling keeps 80% up to n = 1,024, "
        "strong scaling keeps 80% up to n = 8."
    )


@pytest.mark.slow
def test_controls_redraw_and_launch_nothing():
    shown = efficiency.explorer(COSTS, STEP, 2, "predicted")
    seen = {shown.image.value}
    moves = (
        (shown.controls["compute"], 4),
        (shown.controls["gradients"], 2),
        (shown.controls["link_mbit"], 100),
        (shown.controls["cores"], 2),
        (shown.controls["alpha_us"], 50),
        (shown.controls["algorithm"], "double tree"),
        (shown.controls["kinds"]["weak"], False),
    )
    for control, value in moves:
        control.value = value
        assert shown.image.value not in seen and 'alt="Compute x 4' in shown.image.value
        seen.add(shown.image.value)
    assert shown.state == efficiency.State(("strong",), 4, 2, 100, 2, 50, "double tree")
    shown.controls["kinds"]["strong"].value = False
    assert shown.image.value == "<p>Tick at least one kind of scaling.</p>"


def test_what_is_seen_without_a_kernel_comes_first(monkeypatch):
    order = []
    monkeypatch.setattr(explorer, "present", lambda *_: order.append("figure"))
    monkeypatch.setattr(explorer, "table", lambda *_: order.append("table"))
    monkeypatch.setattr(efficiency.controls, "show", lambda *_: order.append("controls"))
    assert efficiency.explorer(COSTS, STEP, 2, "predicted").state == efficiency.State()
    assert order == ["figure", "table", "controls"]
