"""The compressor explorer: what is recorded on real ranks, and the pure pictures and controls on it."""

import copy
import json

import pandas as pd
import pytest
import torch
from matplotlib.text import Text
from torch import nn

from labkit.compression import DGC, OneBit, PowerSGD, Quantize, TopK
from labkit.ddp import DDP
from labkit.measure.compressor_probe import Watched, largest_window
from labkit.show import gradients, plots, publish

MAKE = {
    "topk": lambda: TopK(0.1),
    "topk_forgetful": lambda: TopK(0.1, feedback=False),
    "topk_whole": lambda: TopK(1.0),
    "onebit": lambda: OneBit(chunk=64),
    "quantize": lambda: Quantize(8),
    "powersgd": lambda: PowerSGD(2),
    "dgc": lambda: DGC(0.1, momentum=0.5),
}
STEPS = 6
ELEMENTS = 24 * 40 + 40 + 40 * 4 + 4


def train(rank, hook, dtype=torch.float32, **settings):
    """The weights after a few steps, each rank on data of its own."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 4)).to(dtype)
    model = DDP(copy.deepcopy(module), **settings)
    model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 24, generator=generator).to(dtype)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def watch(rank, world_size, name, window=ELEMENTS):
    """(rows, whether the weights end as they do without watching)."""
    watched = Watched(MAKE[name](), window)
    weights = train(rank, watched.hook)
    return watched.rows, torch.equal(weights, train(rank, MAKE[name]().hook))


def several_buckets(rank, world_size):
    try:
        train(rank, Watched(TopK(0.1)).hook, bucket_cap_mb=0)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", MAKE)
def test_arrived_and_residual_are_gradient_and_what_had_waited(ranks, name):
    rows, same = ranks(2, watch, name=name)[0]
    assert same and len(rows) == STEPS
    before = torch.zeros(ELEMENTS, dtype=torch.float64)
    for row in rows:
        gradient, arrived, residual = (torch.tensor(row[part], dtype=torch.float64) for part in gradients.VECTORS)
        gap = float((arrived + residual - gradient - before).abs().max())
        before = residual
        if row["feedback"] and name != "dgc":  # which forgets on purpose
            assert gap <= 1e-4 * float(gradient.abs().max())  # five digits are recorded
        assert row["error"] == pytest.approx(float((arrived - gradient).norm() / gradient.norm()), rel=1e-3, abs=1e-5)
        assert row["waiting"] == pytest.approx(float(residual.norm() / gradient.norm()), rel=1e-3, abs=1e-5)
        assert (row["step"], row["elements"], row["first"]) == (rows.index(row), ELEMENTS, 0)


def watch_fp64(rank, world_size):
    watched = Watched(TopK(0.1), ELEMENTS)
    weights = train(rank, watched.hook, torch.float64)
    return torch.equal(weights, train(rank, TopK(0.1).hook, torch.float64))


def test_watching_fp64_gradients_does_not_change_them(ranks):
    assert ranks(2, watch_fp64) == [True, True]


@pytest.mark.parametrize("name", ["topk", "topk_forgetful"])
def test_the_sums_catch_up_only_with_feedback(ranks, name):
    rows, _ = ranks(2, watch, name=name)[0]
    total = [sum(torch.tensor(row[part], dtype=torch.float64) for row in rows) for part in ("gradient", "arrived")]
    assert rows[-1]["sum_error"] == pytest.approx(float((total[1] - total[0]).norm() / total[0].norm()), rel=1e-3)
    assert rows[0]["sum_error"] == rows[0]["error"]
    assert (rows[-1]["sum_error"] < 0.8 * rows[0]["sum_error"]) == (name == "topk")
    assert all((row["waiting"] > 0) == (name == "topk") for row in rows)


def test_the_gradient_of_a_compressor_with_momentum_is_under_it(ranks):
    (plain, _), (moving, _) = (ranks(2, watch, name=name)[0] for name in ("topk", "dgc"))
    assert plain[0]["gradient"] == moving[0]["gradient"] and (plain[0]["momentum"], moving[0]["momentum"]) == (0, 0.5)
    first, second = (torch.tensor(row["gradient"]) for row in moving[:2])
    before = torch.tensor(plain[1]["gradient"])  # of the same weights: both sent the same in step 0
    torch.testing.assert_close(second, 0.5 * first + before, rtol=0, atol=1e-4 * float(second.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_are_those_of_a_step(ranks, world_size):
    k = round(0.1 * ELEMENTS)
    replies = ranks(world_size, watch, name="topk")
    for row in replies[0][0]:
        assert row["sent_bytes"] == (world_size - 1) * k * 8
        assert row["plain_bytes"] == 2 * (world_size - 1) * 4 * ELEMENTS // world_size
    assert all(rows == replies[0][0] for rows, _ in replies)  # whichever rank records
    assert json.loads(json.dumps(replies[0][0])) == replies[0][0]


def test_the_window_is_where_the_first_gradient_is_large(ranks):
    rows, _ = ranks(2, watch, name="topk", window=16)[0]
    whole, _ = ranks(2, watch, name="topk")[0]
    energy = [sum(x * x for x in whole[0]["gradient"][at : at + 16]) for at in range(0, ELEMENTS - 15, 16)]
    first = 16 * energy.index(max(energy))
    assert {row["first"] for row in rows} == {first}
    assert rows[3]["arrived"] == whole[3]["arrived"][first : first + 16]
    assert largest_window(torch.tensor([1.0, 1, 3, 0, 2, 2, 9]), 2) == 2  # what fills no window is left out
    assert largest_window(torch.ones(3), 8) == 0


def test_several_buckets_are_refused(ranks):
    assert all("supports a model with one bucket" in words for words in ranks(2, several_buckets))


def recorded(forms=(("topk", "ratio 0.1", True), ("topk", "ratio 0.1", False), ("onebit", "", True)), steps=3):
    """Rows as they come from a launch, with numbers that are easy to find again."""
    rows = []
    for place, (compressor, knob, feedback) in enumerate(forms):
        for step in range(steps):
            numbers = {
                "momentum": 0,
                "elements": 1000,
                "sent_bytes": 100 * (1 + place),
                "plain_bytes": 4000,
                "first": 16,
            }
            errors = {"error": 0.5, "sum_error": 0.5 / (1 + step * feedback), "waiting": 0.25 * feedback}
            vectors = {"gradient": [1.0, -2.0, 0.5], "arrived": [0.0, -2.5, 0.0], "residual": [2.0, 0.0, 0.75 * step]}
            form = {"rank": 0, "compressor": compressor, "knob": knob, "feedback": feedback, "step": step}
            rows.append({**form, **numbers, **errors, **vectors})
    return pd.DataFrame(rows)


STATE = gradients.State("topk", "ratio 0.1", True, 2)


def test_the_first_state_has_feedback_where_there_is_one():
    frame = recorded()
    assert gradients.initial(frame) == STATE
    assert gradients.initial(frame.iloc[3:]) == gradients.State("topk", "ratio 0.1", False, 2)
    assert gradients.initial(frame, "onebit") == gradients.State("onebit", "", True, 2)


@pytest.mark.parametrize("frame", [pd.DataFrame(), recorded().iloc[:0], recorded().drop(columns="sum_error")])
def test_a_frame_that_cannot_be_explored_is_refused(frame):
    with pytest.raises(
        ValueError, match=r"an explorer of compressors needs rows with compressor, knob, feedback, step"
    ):
        gradients.initial(frame)


def heights(axes):
    return [[bar.get_height() for bar in group] for group in axes.containers]


def test_the_picture_of_a_step():
    figure = plots.transmitted(recorded(), STATE)
    above, below = figure.axes
    assert heights(above) == [[2.0, -2.5, 1.5], [1.0, -2.0, 0.5]]  # to be sent: arrived + residual; the gradient
    assert above.lines[0].get_ydata().tolist() == [0.0, -2.5, 0.0] and above.lines[0].get_xdata()[0] == 16
    assert heights(below) == [[2.0, 0.0, 1.5]] and below.get_ylabel() == "waits"
    assert "3 of 1,000" in below.get_xlabel()
    assert figure._suptitle.get_text() == "Step 2: top-k, ratio 0.1, with feedback"
    assert publish.png(figure, dpi=50)
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["gradient", "that + what had waited", "arrived"]
    figure = gradients.transmitted(recorded().assign(momentum=0.9), gradients.State("topk", "ratio 0.1", False, 0))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["gradient, with momentum", "arrived"]
    above, below = figure.axes
    assert heights(above) == [[1.0, -2.0, 0.5]]
    assert heights(below) == [[1.0, 0.5, 0.5]] and below.get_ylabel() == "missing"


def test_the_sums_with_and_without_feedback_stand_in_one_picture():
    figure = plots.catching_up(recorded(), STATE)
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["sums, with feedback", "sums, without", "each step alone"]
    assert axes.lines[0].get_ydata().tolist() == [50.0, 25.0, pytest.approx(50 / 3)]
    assert axes.lines[1].get_ydata().tolist() == [50.0] * 3
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert boxes[0].count_overlaps(boxes[1:]) == 0
    alone = gradients.catching_up(recorded(), gradients.State("onebit", "", True, 1)).axes[0]
    assert [text.get_text() for text in alone.texts] == ["sums, with feedback", "each step alone"]


def test_drawing_is_pure():
    frame = recorded()
    before = frame.copy(deep=True)
    gradients.picture(frame, STATE)
    pd.testing.assert_frame_equal(frame, before)
    with pytest.raises(ValueError, match=r"nothing recorded for top-k, ratio 0\.1, with feedback, step 7"):
        gradients.transmitted(frame, gradients.State("topk", "ratio 0.1", True, 7))


def test_the_takeaway():
    words = gradients.takeaway(recorded(), STATE)
    assert words.startswith("top-k, ratio 0.1, with feedback: a rank sends 100 B a step in place of 3.91 KiB, 40 times")
    assert words.endswith("the sums differ by 16.7 %, and 0.25 times the gradient's norm waits.")
    words = gradients.takeaway(recorded(), gradients.State("topk", "ratio 0.1", False, 2))
    assert words.endswith("misses the gradient by 50 % of its norm; since step 0 the sums differ by 50 %.")
    alone = recorded().assign(sent_bytes=0, plain_bytes=0)  # a world of one rank sends nothing
    assert "0 B a step in place of 0 B. In step 2" in gradients.takeaway(alone, STATE)


def test_the_table_has_a_row_for_each_form():
    table = gradients.small(recorded())
    assert table["compressor"].tolist() == ["top-k, ratio 0.1", "top-k, ratio 0.1", "1 bit"]
    assert table["of the sums"].tolist() == ["16.7 %", "50 %", "16.7 %"]
    assert table["times less"].tolist() == ["40", "20", "13.3"]


def test_controls_redraw_from_the_rows():
    shown = gradients.explorer(recorded(), "counted", "topk")
    seen = {shown.image.value}
    for control, value in (
        (shown.controls["step"], 1),
        (shown.controls["feedback"], False),
        (shown.controls["step"], 0),
    ):
        control.value = value
        assert shown.image.value not in seen and shown.image.value.count('alt="') == 2
        seen.add(shown.image.value)
    assert shown.state == gradients.State("topk", "ratio 0.1", False, 0)
    shown.controls["form"].value = ("onebit", "")
    assert shown.image.value == "<p>Not recorded: 1 bit, without feedback.</p>"


def test_what_is_seen_without_a_kernel_comes_first(monkeypatch):
    order = []
    monkeypatch.setattr(gradients, "present", lambda *_: order.append("figure"))
    monkeypatch.setattr(gradients, "table", lambda *_: order.append("table"))
    monkeypatch.setattr(gradients.controls, "show", lambda *_: order.append("controls"))
    shown = gradients.explorer(recorded(), "counted", "onebit")
    assert order == ["figure", "figure", "table", "controls"] and shown.controls["form"].value == ("onebit", "")
