"""Step time over link speed: the frame's arithmetic, the picture's lines, points and rings, and the controls."""

import math

import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.text import Text

from labkit.measure.crossover import Cost, predicted
from labkit.show import bandwidth_explorer, explorer, plots, style, time_vs_bandwidth

COSTS = {
    "topk": Cost(30.0, 1_250_000),  # crosses none at 3,000 Mbit/s
    "none": Cost(20.0, 5_000_000),
    "fp16": Cost(20.0, 2_500_000),  # at every speed
    "quantize8": Cost(25.0, 6_250_000),  # at no speed
    "hierarchical": Cost(10.0, 6_250_000),  # above 1,000 Mbit/s
}
SPEEDS = (50, 200, 1000)


def rows_of(costs=COSTS, speeds=SPEEDS):
    """Three rounds each, in another order than the lab's; their median is what is predicted."""
    return pd.DataFrame(
        {"method": one, "link_mbit": mbit, "step_ms": predicted(*cost, mbit) + late, **cost._asdict()}
        for late in (0.0, 2.0, -1.0)
        for mbit in speeds
        for one, cost in costs.items()
    )


def test_methods_stand_in_the_labs_order_and_the_first_is_the_baseline():
    assert list(time_vs_bandwidth.costs(rows_of())) == ["none", "hierarchical", "fp16", "quantize8", "topk"]
    frame = rows_of({one: cost for one, cost in COSTS.items() if one != "hierarchical"})
    assert bandwidth_explorer.initial(frame) == bandwidth_explorer.State(
        ("none", "fp16", "quantize8", "topk"), 50.0, "none"
    )
    assert bandwidth_explorer.initial(frame, "fp16").baseline == "fp16"


def test_a_method_costs_the_median_of_its_rows():
    frame = pd.concat([rows_of(), rows_of().assign(busy_ms=lambda rows: rows["busy_ms"] + 1), rows_of()])
    assert time_vs_bandwidth.costs(frame)["topk"] == COSTS["topk"]


@pytest.mark.parametrize("frame", [pd.DataFrame(), rows_of().iloc[:0], rows_of().drop(columns="wire_bytes")])
@pytest.mark.parametrize("ask", [plots.step_over_link, bandwidth_explorer.initial])
def test_a_frame_without_rows_or_columns_is_refused(frame, ask):
    with pytest.raises(ValueError, match="need rows with method, link_mbit, step_ms, busy_ms, wire_bytes"):
        ask(frame)


@pytest.mark.parametrize(
    ("method", "at", "words"),
    [
        ("topk", 3000.0, "below 3,000 Mbit/s"),
        ("fp16", None, "at every speed"),
        ("quantize8", None, "at no speed"),
        ("hierarchical", 1000.0, "above 1,000 Mbit/s"),
        ("none", None, "at no speed"),
    ],
)
def test_where_a_method_wins(method, at, words):
    assert time_vs_bandwidth.crossing(COSTS["none"], COSTS[method]) == at
    assert time_vs_bandwidth.wins(COSTS["none"], COSTS[method]) == words


def test_a_crossover_in_words_has_two_digits():
    assert time_vs_bandwidth.wins(Cost(20, 5_000_000), Cost(30, 1_234_567)) == "below 3,000 Mbit/s"
    assert time_vs_bandwidth.wins(Cost(20, 5_000_000), Cost(6020, 1_234_567)) == "below 5 Mbit/s"


def test_a_method_is_called_faster_only_beyond_the_noise_band():
    base = pd.Series([100.0, 101, 102, 103, 104, 105])
    near, far = (pd.DataFrame({"none": base, "again": noise * base, "topk": 0.8 * base}) for noise in (1.3, 1.1))
    faster = time_vs_bandwidth.faster_links({"50 Mbit/s": far, "200 Mbit/s": near, "900 Mbit/s": far}, "none")
    assert faster == {"topk": ["50 Mbit/s", "900 Mbit/s"]}
    assert time_vs_bandwidth.faster_links({"50 Mbit/s": far[:5]}, "none") == {}  # too few rounds
    shown = bandwidth_explorer.small(rows_of(), "none", faster).set_index("method")
    assert shown.loc["top 1 %", "faster, predicted"] == "below 3,000 Mbit/s"
    assert shown.loc["top 1 %", "faster, measured"] == "50 Mbit/s, 900 Mbit/s"
    assert shown.loc["fp16", "faster, measured"] == "on no link"
    assert shown.loc["no compression"].tolist()[2:] == ["", ""]


def lines_of(figure):
    """The axes, its curves by colour, and where its rings are."""
    axes = figure.axes[0]
    curves = {line.get_color(): line for line in axes.lines if len(line.get_xdata()) == 100}
    rings = [one.get_offsets()[0].tolist() for one in axes.collections if isinstance(one, PathCollection)]
    return axes, curves, rings


def test_lines_are_predicted_points_are_measured_and_rings_mark_where_they_cross():
    figure = plots.step_over_link(rows_of(), "none", title="Five methods", at=200)
    axes, curves, rings = lines_of(figure)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("link speed (Mbit/s)", "step time (ms)")
    colours = style.palette(COSTS)
    assert set(curves) == set(colours.values())
    for method, cost in COSTS.items():
        speeds, times = curves[colours[method]].get_data()
        assert times == pytest.approx(predicted(*cost, speeds))
        assert speeds[0] <= 50 and speeds[-1] >= 3000  # as far as the crossovers
        points = [one for one in axes.lines if one.get_marker() == "o" and one.get_color() == colours[method]]
        places, times = zip(*(one.get_xydata()[0] for one in points), strict=True)
        assert list(times) == [predicted(*cost, mbit) for mbit in SPEEDS]
        assert places == pytest.approx(SPEEDS, rel=0.1)  # fp16 and top 1 % next to each other at 1,000 Mbit/s
        whiskers = [one for one in axes.containers if one.lines[0].get_color() == colours[method]]
        (low, high) = whiskers[0].lines[2][0].get_segments()[0][:, 1]
        assert (low, high) == pytest.approx((predicted(*cost, 50) - 0.5, predicted(*cost, 50) + 1))
    assert sorted(rings) == [[1000.0, 60.0], [3000.0, pytest.approx(100 / 3)]]
    assert [line for line in axes.lines if list(line.get_xdata()) == [200, 200]]
    words = {text.get_text() for text in axes.texts}
    assert words > {
        "no compression",
        "top 1 %: predicted below 3,000 Mbit/s",
        "fp16: predicted at every speed",
        "hierarchical: predicted above 1,000 Mbit/s",
    }


@pytest.mark.parametrize("count", [2, 4, 10])
def test_words_do_not_overlap(count):
    methods = ["none", "fp16", "bf16", "quantize8", "quantize4", "onebit", "topk", "randomk", "dgc", "powersgd"][:count]
    figure = plots.step_over_link(
        rows_of({one: Cost(20 + place / 10, 5_000_000 / (1 + place)) for place, one in enumerate(methods)}),
        title="Many",
    )
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # an annotation's own would include its leader
    assert len(boxes) == count + 1  # and the note
    assert all(box.count_overlaps(boxes[:place]) == 0 for place, box in enumerate(boxes))
    assert all(box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 and box.y0 >= 0 for box in boxes)


def test_far_crossovers_are_told_but_do_not_stretch_the_picture():
    frame = rows_of({"none": Cost(20, 5_000_000), "topk": Cost(20.001, 1_250_000)})
    axes, _, _ = lines_of(plots.step_over_link(frame))
    assert axes.get_xlim()[1] == pytest.approx(1500)  # 1,000 was measured
    assert not any("ring: " in text.get_text() for text in axes.texts)
    assert "top 1 %: predicted below 30,000,000 Mbit/s" in {text.get_text() for text in axes.texts}


def test_where_nothing_was_measured_lines_are_drawn_alone():
    figure = plots.step_over_link(rows_of().assign(step_ms=math.nan))
    axes, curves, _ = lines_of(figure)
    assert len(curves) == 5 and not axes.containers
    assert any("ring: as fast as" in text.get_text() for text in axes.texts)
    shown = bandwidth_explorer.small(rows_of().assign(step_ms=math.nan), "none", None)
    assert set(shown["faster, measured"]) == {""} and shown["faster, predicted"].tolist()[4] == "below 3,000 Mbit/s"


def test_drawing_is_pure_and_the_baseline_stays():
    frame = rows_of()
    before = frame.copy()
    state = bandwidth_explorer.State(("topk",), 100.0, "none")
    _, curves, _ = lines_of(bandwidth_explorer.draw(frame, state))
    colours = style.palette(COSTS)
    assert set(curves) == {colours["topk"], colours["none"]}
    pd.testing.assert_frame_equal(frame, before)
    with pytest.raises(ValueError, match="Tick at least one method"):
        bandwidth_explorer.draw(frame, bandwidth_explorer.State((), 100.0, "none"))


def test_bars_split_a_step_into_work_and_bytes():
    figure = bandwidth_explorer.bars(rows_of(), bandwidth_explorer.State(("none", "topk"), 100.0, "none"))
    axes = figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == [20.0, 30.0, 400.0, 100.0]
    assert [text.get_text() for text in axes.texts] == ["420 ms", "130 ms"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["no compression", "top 1 %"]


@pytest.mark.parametrize(
    ("methods", "speed", "words"),
    [
        (
            ("none", "topk"),
            100.0,
            "A link of 100 Mbit/s: a step of top 1 %, the fastest, is predicted to take 130 ms, 3.23 times as fast as "
            "no compression (420 ms). Predicted faster than no compression: top 1 % below 3,000 Mbit/s.",
        ),
        (("none",), 100.0, "A link of 100 Mbit/s: a step of no compression, the fastest, is predicted to take 420 ms."),
        (
            ("topk", "hierarchical"),
            10_000.0,
            "A link of 10,000 Mbit/s: a step of hierarchical, the fastest, is predicted to take 15 ms, 1.6 times as "
            "fast as no compression (24 ms). Predicted faster than no compression: hierarchical above 1,000 Mbit/s; "
            "top 1 % below 3,000 Mbit/s.",
        ),
    ],
)
def test_the_takeaway(methods, speed, words):
    assert bandwidth_explorer.takeaway(rows_of(), bandwidth_explorer.State(methods, speed, "none")) == words


def test_no_method_is_called_the_fastest_where_another_is_as_fast():
    one = rows_of({"none": COSTS["none"], "hierarchical": COSTS["none"]})
    words = bandwidth_explorer.takeaway(one, bandwidth_explorer.State(("none", "hierarchical"), 100.0, "none"))
    assert words.startswith(
        "A link of 100 Mbit/s: a step of no compression (as fast within 5 %: hierarchical) is predicted"
    )


def test_the_menu_goes_in_log_steps_through_what_was_measured():
    frame = rows_of({"none": COSTS["none"], "topk": COSTS["topk"]}, speeds=(50, 300))
    assert bandwidth_explorer.offered(frame, "none") == [50, 100, 200, 300, 500, 1000, 2000]


@pytest.mark.slow
def test_controls_redraw_and_launch_nothing():
    shown = bandwidth_explorer.explorer(rows_of(), "throttled", "none")
    seen = {shown.image.value}
    boxes = shown.controls["methods"]
    for control, value in ((shown.controls["link_mbit"], 2000.0), (boxes["fp16"], False), (boxes["none"], False)):
        control.value = value
        assert shown.image.value not in seen and shown.image.value.count('alt="') == 2
        seen.add(shown.image.value)
    assert shown.state == bandwidth_explorer.State(("hierarchical", "quantize8", "topk"), 2000.0, "none")
    for box in shown.controls["methods"].values():
        box.value = False
    assert shown.image.value == "<p>Tick at least one method.</p>"


def test_what_is_seen_without_a_kernel_comes_first(monkeypatch):
    order = []
    monkeypatch.setattr(explorer, "present", lambda *_: order.append("figure"))
    monkeypatch.setattr(explorer, "table", lambda *_: order.append("table"))
    monkeypatch.setattr(bandwidth_explorer.controls, "show", lambda *_: order.append("controls"))
    assert bandwidth_explorer.explorer(rows_of(), "throttled", "none").state.baseline == "none"
    assert order == ["figure", "table", "controls"]
