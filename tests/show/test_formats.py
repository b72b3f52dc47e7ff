"""Formats against torch's own casts, bit by bit; pictures and the explorer as pure functions of data and state."""

import numpy as np
import pandas as pd
import pytest
import torch

from labkit.show import formats, loss_scale, publish
from labkit.show.numbers import FORMATS, fate

TORCH = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8 e5m2": torch.float8_e5m2,
    "fp8 e4m3": torch.float8_e4m3fn,
}


def many_values(name):
    """fp32 numbers of all sizes, ties and edges among them. What is beyond e4m3 torch saturates or not, by version."""
    generator = np.random.default_rng(0)
    values = generator.standard_normal(50_000) * np.exp2(generator.uniform(-150, 124, 50_000))
    edges = [
        0.0,
        -0.0,
        1.0,
        1 + 2**-8,
        1 + 3 * 2**-8,
        1 + 2**-11,
        65504.0,
        65519.0,
        65520.0,
        61439.0,
        61440.0,
        2.0**-25,
    ]
    edges += [2.0**-24, 3 * 2.0**-25, 448.0, 2.0**-10, 2.0**-9, 2.0**-149, np.inf, -np.inf]
    values = np.concatenate([values, edges]).astype(np.float32)
    return values[np.abs(values) <= 448] if name == "fp8 e4m3" else values


@pytest.mark.parametrize("name", TORCH)
def test_rounding_and_bits_are_torchs(name):
    one, values = FORMATS[name], many_values(name)
    cast = torch.from_numpy(values).to(TORCH[name])
    np.testing.assert_array_equal(one.round(values), cast.double().numpy())
    width = cast.element_size()
    raw = cast.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]).tolist()
    for value, code in list(zip(values, raw, strict=True))[::97] + list(zip(values, raw, strict=True))[-20:]:
        assert "".join(one.bits(float(value))) == f"{code % 2 ** (8 * width):0{8 * width}b}", value


@pytest.mark.parametrize("name", TORCH)
def test_limits_are_torchs(name):
    one, info = FORMATS[name], torch.finfo(TORCH[name])
    assert (one.largest, one.smallest_normal, one.epsilon) == (info.max, info.smallest_normal, info.eps)
    assert one.round(one.smallest) == one.smallest and one.round(one.smallest / 2) == 0
    beyond = one.round(2 * one.largest)
    assert np.isinf(beyond) if one.infinity else np.isnan(beyond)


def test_tf32_is_fp32_with_thirteen_bits_fewer():
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    code = values.view(np.uint32).astype(np.uint64)
    rounded = ((code + 0xFFF + ((code >> 13) & 1)) >> 13 << 13).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(FORMATS["tf32"].round(values), rounded)


def test_the_fate_of_values():
    values = [0.0, np.nan, 2.0**-26, 2.0**-20, 1.0, 65504.0]
    assert fate(values, "fp16") == {"zero": 0.25, "subnormal": 0.25, "normal": 0.5, "overflow": 0.0}
    assert fate(values, "fp16", scale=2.0**10) == {"zero": 0.0, "subnormal": 0.25, "normal": 0.5, "overflow": 0.25}
    assert fate(values, "bf16")["normal"] == 1.0
    with pytest.raises(ValueError, match="no value is finite and different from zero"):
        fate([0.0, np.inf], "fp16")


def words(figure):
    return [text.get_text() for axes in figure.axes for text in axes.findobj(lambda a: hasattr(a, "get_text"))]


@pytest.mark.parametrize("value", [0.1, 0.0, -3.5, 1e-30, 1e38, float("inf"), float("nan")])
def test_every_value_has_bits(value):
    figure = formats.bit_layout(value)
    digits = [text for text in words(figure) if text in ("0", "1")]
    assert len(digits) >= 32 + 19 + 16 + 16 + 8 + 8
    assert publish.png(figure, dpi=40)


def test_the_error_is_said_in_words():
    assert formats.error_words(1.0, 1.0) == formats.error_words(0.0, 0.0) == "exact"
    assert formats.error_words(1e-9, 0.0) == "all of it"
    assert formats.error_words(1e9, float("inf")) == "overflow"
    assert formats.error_words(1.0, 1.125) == "1.2e-01"


def test_gradients_are_coloured_by_what_becomes_of_them():
    gradients = np.concatenate([np.full(10, 2.0**-30), np.full(30, 2.0**-20), np.full(60, 2.0**-3), np.zeros(7)])
    said = words(formats.reach(gradients, "fp16"))
    assert {"full precision: 60 %", "bits lost (subnormal): 30 %", "becomes zero: 10 %"} <= set(said)
    said = words(formats.reach(gradients, "fp16", 2.0**20))
    assert {"full precision: 40 %", "beyond the largest: 60 %"} <= set(said)
    with pytest.raises(ValueError, match="no gradient is finite"):
        formats.reach(np.zeros(3))


def test_the_takeaway_is_one_sentence():
    counts = formats.powers([2.0**-30, 1.0, 1.0, 1.0])
    assert counts == {-30: 1, 0: 3}
    state = formats.State(scale=1.0, format="fp16")
    told = "In fp16, with a loss scale of 1, 25 % of these gradients become zero and 0 % overflow."
    assert formats.takeaway(counts, state) == told


@pytest.mark.slow
def test_controls_redraw_from_the_saved_gradients():
    shown = formats.explorer([1e-8, 1e-3, 1.0], "measured")
    shown.controls["value"].value = 3.0
    before = shown.image.value.split("</p>")
    assert 'alt="The bits of 3 in each of the formats."' in before[0] and "loss scale of 1," in before[1]
    shown.controls["scale"].value = 2.0**16
    shown.controls["format"].value = "fp8 e4m3"
    assert shown.state == formats.State(3.0, 2.0**16, "fp8 e4m3")
    bits, sizes, _ = shown.image.value.split("</p>")
    assert bits == before[0] and "In fp8 e4m3, with a loss scale of 65536," in sizes


def test_what_is_seen_without_a_kernel_comes_first(monkeypatch):
    order = []
    monkeypatch.setattr(formats, "present", lambda *_: order.append("figure"))
    monkeypatch.setattr(formats, "table", lambda *_: order.append("table"))
    monkeypatch.setattr(formats.controls, "show", lambda *_: order.append("controls"))
    formats.explorer([1.0, 1e-9], "measured")
    assert order == ["figure", "table", "controls"]


def test_the_scale_over_time():
    rows = [
        {"run": run, "step": step, "scale": scale, "skipped": step == 1}
        for run in ("ours", "theirs")
        for step, scale in enumerate((8.0, 8.0, 4.0, 4.0))
    ]
    figure = loss_scale.loss_scales(pd.DataFrame(rows))
    assert {"ours", "theirs"} <= set(words(figure)) and publish.png(figure, dpi=40)
    marks = [line.get_xydata().tolist() for line in figure.axes[0].lines if line.get_marker() == "X"]
    assert marks == [[[1.0, 8.0]]] * 4  # red, and the run's colour in it
    with pytest.raises(ValueError, match="no steps"):
        loss_scale.loss_scales(pd.DataFrame())
