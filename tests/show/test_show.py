import io
import json
import re
import socket
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from labkit import trainer
from labkit.measure import machine
from labkit.measure.timeline import Span, Timeline
from labkit.memory import memory_tracker
from labkit.show import notebook, plots, publish, schedules, style, tables

STRATEGIES = ["single", "ddp_naive", "ddp_bucketed", "something_new"]


@pytest.fixture
def shown(monkeypatch):
    """What a notebook would display: a list of (mimebundle, metadata)."""
    outputs = []

    def display(bundle, metadata=None, raw=False):
        outputs.append((bundle, metadata))

    for module in (publish, notebook):
        monkeypatch.setattr(module, "display", display)
    return outputs


def spans(rank):
    timeline = Timeline(rank)
    for name, lane, start, end, info in [
        ("forward", "compute", 0, 10, {}),
        ("l1", "compute", 0, 10, {"unit": True}),
        ("backward", "compute", 10, 40, {}),
        ("l1 backward", "compute", 10, 40, {"unit": True}),
        ("bucket 1", "network", 18, 30, {"waited": 0.0}),
        ("bucket 0", "network", 25, 40, {"waited": 0.008}),
        ("optimizer", "compute", 40, 41, {}),
        ("copy", "disk", 5, 9, {}),
    ]:
        timeline.spans.append(Span(name, lane, start / 1e3, end / 1e3, rank, info))
    return timeline


def compared():
    noise = np.random.default_rng(0)
    return pd.DataFrame(
        {"strategy": one, "model": model, "step_ms": 40 + 4 * noise.random(), "sent_bytes": 3 << 20, "step": step}
        | {"loss": 2 / (1 + step)}
        for one in STRATEGIES
        for model in ("mlp", "gpt")
        for step in range(6)
    )


def pictures():
    sizes = dict.fromkeys(memory_tracker.KINDS, 1 << 20)
    sweep = pd.DataFrame(
        {"size_bytes": 2**k, "time_ms": 2**k / 1e6 + 0.1, "formula_ms": 2**k / 1e6, "algorithm": one}
        for one in ("ring", "tree")
        for k in range(10, 27)
    )
    checked = tables.predicted_measured([("sent", "bytes", 4096, 4096), ("step time", "ms", 40.0, 44.0)])
    return {
        "timeline": lambda: plots.timeline(Timeline.merge([spans(0), spans(1)]).frame(), "A title"),
        "schedules": lambda: plots.schedules({"one": spans(0).frame(), "other": spans(1).frame()}, "A title", 30.0),
        "bars": lambda: plots.grouped_bars(compared(), "step_ms"),
        "groups": lambda: plots.grouped_bars(compared(), "step_ms", group="model", title="A title"),
        "bytes": lambda: plots.grouped_bars(compared(), "sent_bytes"),
        "memory": lambda: plots.memory_bars(pd.DataFrame([{"strategy": one, **sizes} for one in STRATEGIES])),
        "ratio": lambda: plots.measured_against_predicted(checked.assign(low=[np.nan, 42.0], high=[np.nan, 47.0])),
        "loss": lambda: plots.loss_curves(compared(), title="A title"),
        "log loss": lambda: plots.loss_curves(compared(), log_y=True, nested=False),
        "sweep": lambda: plots.sweep(
            sweep, "size_bytes", "time_ms", by="algorithm", predicted="formula_ms", log_y=True
        ),
        "samples": lambda: plots.memory_over_time([(0.0, sizes), (0.1, sizes | {"activations": 5 << 20})]),
        "phases": lambda: plots.memory_over_time(
            [(0.0, sizes)] * 20, "A title", {"forward": 1, "rest": 9}, [(0, sizes)]
        ),
    }


@pytest.fixture(params=pictures())
def figure(request):
    return pictures()[request.param]()


def texts(figure):
    return [text for text in figure.findobj(lambda artist: hasattr(artist, "get_text")) if text.get_text().strip()]


def test_nothing_is_clipped_and_every_axis_has_words(figure):
    figure.draw_without_rendering()
    # Two lanes of a timeline, names of strategies: a y axis of words needs no label. All others say what and unit.
    for axes in figure.axes:
        assert axes.get_xlabel()
        assert axes.get_ylabel() or all(re.search("[a-z]", t.get_text()) for t in axes.get_yticklabels())
    width, height = figure.bbox.width, figure.bbox.height
    for text in texts(figure):
        if text.get_visible() and text.get_figure() is figure and text not in hidden_ticks(figure):
            box = text.get_window_extent()
            assert box.x0 > -2 and box.x1 < width + 2 and box.y0 > -2 and box.y1 < height + 2, text.get_text()


def hidden_ticks(figure):
    """matplotlib keeps labels of ticks beyond the limits, which it never draws."""
    hidden = []
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim()))):
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low - 1e-9 <= tick.get_loc() <= high + 1e-9:
                    hidden += [tick.label1, tick.label2]
                hidden.append(tick.label2)
    return hidden


def test_the_ground_is_opaque(figure):
    from PIL import Image

    corner = Image.open(io.BytesIO(publish.png(figure, dpi=40))).convert("RGBA").getpixel((0, 0))
    assert corner == (0xFA, 0xFA, 0xF7, 255)


def test_the_reader_s_style_is_left_alone():
    import matplotlib

    with matplotlib.rc_context({"font.size": 23, "axes.facecolor": "black"}):
        plots.grouped_bars(compared(), "step_ms")
        assert matplotlib.rcParams["font.size"] == 23 and matplotlib.rcParams["axes.facecolor"] == "black"


def test_timeline_names_what_fits_and_sums_what_is_exposed():
    words = [text.get_text() for text in texts(plots.timeline(spans(0).frame()))]
    assert {"forward", "backward", "bucket 1", "waits", "exposed\n8 ms", "rank 0  compute"} <= set(words)
    assert "rank 0  disk" in words and "optimizer" not in words  # one of 41 ms: no room for its name


def test_schedules_draw_messages_in_turn_and_sum_what_is_exposed():
    figure = plots.schedules({"bucketed": spans(0).frame()}, "A title", 30.0)
    words = [text.get_text() for text in texts(figure)]
    assert {"bucketed", "41 ms", "exposed 8 ms", "without messages: 30 ms", "compute", "network"} <= set(words)
    assert "   2 messages" in words and "waits" in words
    frame = spans(0).frame()
    in_turn = schedules.in_turn(frame[frame["lane"] == "network"])
    assert list(zip(in_turn["start_ms"].round(6), in_turn["end_ms"].round(6), strict=True)) == [(18, 30), (30, 40)]
    with pytest.raises(ValueError, match="empty timeline"):
        plots.schedules({"none": Timeline().frame()})


def test_bars_carry_their_medians():
    frame = pd.DataFrame({"strategy": ["a"] * 3 + ["b"], "step_ms": [1.0, 2.0, 9.0, 4.0]})
    words = [text.get_text() for text in texts(plots.grouped_bars(frame, "step_ms"))]
    assert {"2 ms", "4 ms", "a", "b", "step time (ms)"} <= set(words)


def test_memory_bars_take_the_rows_of_compare():
    rows = pd.DataFrame(
        {"strategy": one, "peak_parameters_bytes": 1 << 20, "peak_activations_bytes": size << 20}
        for one in ("single", "ddp_naive")
        for size in (2, 3)
    )
    words = [text.get_text() for text in texts(plots.memory_bars(rows))]
    assert words.count("4 MiB") == 2 and words.count("3 MiB") == 2 and {"parameters", "activations"} <= set(words)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.timeline(Timeline().frame()),
        lambda: plots.grouped_bars(pd.DataFrame({"strategy": [], "step_ms": []}), "step_ms"),
        lambda: plots.memory_bars(pd.DataFrame({"strategy": ["a"]})),
        lambda: plots.memory_over_time([]),
    ],
)
def test_nothing_to_draw_is_said(draw):
    with pytest.raises(ValueError, match=r"cannot be drawn|to draw"):
        draw()


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0, "bytes", "0 B"),
        (26214400, "bytes", "25 MiB"),
        (1536, "bytes", "1.50 KiB"),
        (12.345, "ms", "12.3 ms"),
        (18.0001, "ms", "18.0 ms"),
        (1234.5, "samples/s", "1,234 samples/s"),
        (3, "", "3"),
    ],
)
def test_quantities_read_well(value, unit, words):
    assert style.quantity(value, unit) == words


def test_units_and_names_from_columns():
    assert [style.unit_of(c) for c in ("step_ms", "sent_bytes", "samples_per_s", "loss")] == [
        "ms",
        "bytes",
        "samples/s",
        "",
    ]
    assert style.axis_label("training_loss") == "training loss (cross-entropy, nats)"
    assert style.axis_label("all_reduce_ms") == "all reduce (ms)" and style.name("torch_ddp") == "PyTorch DDP"


def test_colours_stay_with_their_thing_and_differ():
    one, other = style.palette(["ddp_naive", "x", "y"]), style.palette(["y", "ddp_naive"])
    assert one["ddp_naive"] == other["ddp_naive"] and len(set(one.values())) == 3
    for colour in style.CYCLE:
        assert style.text_on(colour) in ("white", style.INK)


def test_strategies_of_one_picture_have_different_colours():
    later = {"local_sgd", "diloco"}  # in pictures of their own
    drawn = [*(set(trainer.STRATEGIES) - later), "ddp_accumulation", "fsdp_recompute"]
    assert len(set(style.palette(drawn).values())) == len(drawn)


def test_labels_are_spread_apart_and_keep_their_order():
    moved = style.spread_apart([5.0, 5.1, 5.2, 40.0, 0.0], 10)
    assert moved[4] < moved[0] < moved[1] < moved[2] < moved[3]
    assert np.diff(sorted(moved)).min() >= 10 - 1e-9 and moved[3] == 40.0


def test_present_shows_alt_text_caption_and_provenance(shown):
    plots.present(plots.grouped_bars(compared(), "step_ms"), "Buckets < naive", "measured on 2 cores", "Four bars.")
    (image, about), (caption, _) = shown
    assert image["text/plain"] == "Four bars." and about["image/png"]["alt"] == "Four bars."
    assert image["image/png"].startswith(b"\x89PNG") and about["image/png"]["needs_background"] == "light"
    assert "Buckets &lt; naive" in caption["text/html"] and "Four bars." in caption["text/html"]
    assert caption["text/plain"] == "Buckets < naive (measured on 2 cores)"


@pytest.mark.parametrize(
    ("provenance", "alt", "message"), [("guessed", "words", "provenance"), ("measured", " ", "alt text")]
)
def test_pictures_without_words_or_origin_are_refused(shown, provenance, alt, message):
    with pytest.raises(ValueError, match=message):
        plots.present(plots.grouped_bars(compared(), "step_ms"), "caption", provenance, alt)
    assert not shown


def test_saved_figures_are_the_same_byte_for_byte_and_hold_their_data(tmp_path):
    frame, found = compared(), []
    for folder in (tmp_path / "one", tmp_path / "two"):
        figure = plots.grouped_bars(frame, "step_ms")
        about = ({"world_size": 2}, "measured on 2 cores", "Four bars.")
        found.append(plots.save(figure, "bars", frame, *about, folder=folder))
    assert found[0].read_bytes() == found[1].read_bytes()
    beside = json.loads(found[0].with_suffix(".json").read_text())
    assert len(beside["data"]) == len(frame) and beside["data"][0]["strategy"] == "single"
    assert beside["parameters"] == {"world_size": 2} and beside["provenance"] == "measured on 2 cores"
    assert beside["alt"] == "Four bars." and beside["machine"]["torch"] and beside["commit"]
    text = found[0].read_text() + json.dumps(beside)
    assert socket.gethostname() not in text and str(machine.ROOT) not in text
    assert "<title>Four bars.</title>" in text


def test_source_shows_the_code_and_its_place(shown):
    notebook.source(tables.cell, Timeline.merge, memory_tracker)
    headings = [re.match(r"\*\*`(.*)`\*\*", bundle["text/markdown"]).group(1) for bundle, _ in shown]
    assert re.fullmatch(r"labkit/show/tables\.py:\d+-\d+", headings[0])
    assert (
        re.fullmatch(r"labkit/measure/timeline\.py:\d+-\d+", headings[1])
        and headings[2] == "labkit/memory/memory_tracker.py"
    )
    path, first, last = re.match(r"(.*):(\d+)-(\d+)", headings[0]).groups()
    lines = (machine.ROOT / path).read_text().splitlines()[int(first) - 1 : int(last)]
    assert "\n".join(lines) in shown[0][0]["text/markdown"] and lines[0].startswith("def cell(")
    assert (
        "\n@classmethod\ndef merge(cls, timelines):\n    " in shown[1][0]["text/plain"]
    )  # a method starts at the margin
    assert all(str(Path.home()) not in bundle["text/plain"] for bundle, _ in shown[:2])


def test_source_may_be_folded_under_its_heading(shown):
    notebook.source(tables.cell)
    notebook.source(tables.cell, folded=True)
    (whole, folded) = (bundle for bundle, _ in shown)
    heading, _, block = whole["text/markdown"].partition("\n\n")
    assert folded["text/markdown"] == f"{heading}\n\n<details><summary>source</summary>\n\n{block}\n</details>\n"
    assert folded["text/plain"] == whole["text/plain"]


def test_a_verdict_is_exact_lines(capsys):
    notebook.verdict({"weights equal one process": np.bool_(True), "bytes sent": 4096, "calls": np.int64(7)})
    assert capsys.readouterr().out == (
        "weights equal one process  yes\nbytes sent                 4096\ncalls                      7\n"
    )


def test_a_broken_verdict_prints_all_and_names_the_claims(capsys):
    with pytest.raises(AssertionError, match="does not hold: b; c"):
        notebook.verdict({"a": True, "b": False, "c": False, "d": 3})
    assert capsys.readouterr().out == "a  yes\nb  NO\nc  NO\nd  3\n"


@pytest.mark.parametrize("value", [0.1, np.float32(1), "yes", None])
def test_a_verdict_takes_nothing_that_moves(value):
    with pytest.raises(TypeError, match="the verdict 'time'"):
        notebook.verdict({"time": value})


def test_predictions(shown):
    frame = tables.predicted_measured(
        [
            {"quantity": "sent", "unit": "bytes", "predicted": 2048, "measured": 2048},
            {"quantity": "step", "unit": "ms", "predicted": 40, "measured": 44},
            {"quantity": "padding", "unit": "bytes", "predicted": 0, "measured": 0},
        ]
    )
    assert frame["ratio"].tolist()[:2] == [1, 1.1] and np.isnan(frame["ratio"][2])
    notebook.prediction(frame, "measured on 2 cores")
    text = shown[0][0]["text/markdown"]
    assert "| sent | 2 KiB | 2 KiB | = 1 |" in text and "| step | 40 ms | 44 ms | 1.100 |" in text
    assert "*measured on 2 cores*" in text
    with pytest.raises(ValueError, match="missing: measured"):
        tables.predicted_measured([{"quantity": "sent", "unit": "bytes", "predicted": 1}])


def test_a_table_has_its_words_left_and_its_numbers_right(shown):
    rows = {
        "run": ["a", "b", "c"],
        "count": [1, 2, float("nan")],
        "time": ["1.5 ms", "-2 ms", "none"],
        "blank": ["", "-", "≤ 3"],
        "verdict": ["slower", "within noise", "–"],
        "ratio": ["= 1", "= 1", "not exact"],
        "lengths": ["[3, 4]", [5, 6], "[ 7]"],
        "fields": [7, "no: strategy", "no: precision"],
    }
    notebook.table(pd.DataFrame(rows), "measured")
    assert shown[0][0]["text/markdown"].splitlines()[1] == "| :-- | --: | --: | --: | :-- | --: | --: | --: |"


def test_a_ratio_is_clear_of_one_and_of_the_noise():
    plain = [10.0] * 9
    times = {"plain": plain, "fast": [7.0, 8.0, 9.0] * 3, "slow": [11.0, 12.0, 13.0] * 3, "near": [9.0, 9.8, 9.9] * 3}
    times["bit slow"] = [10.2, 10.3, 10.4] * 3
    times["again"] = [9.7, 10.0, 10.5] * 3
    pairs = [(name, "plain") for name in ("fast", "slow", "near", "bit slow", "again")]
    table = tables.ratios(times, pairs)
    assert list(table["times compared"]) == [f"{name} / plain" for name, _ in pairs]
    assert list(table["ratio"]) == ["0.80", "1.20", "0.98", "1.03", "1.00"]
    assert list(table["the first is"]) == ["faster", "slower", "undecided", "within noise", "noise: 0.95 to 1.05"]
    assert table["95 %"].iloc[0] == "0.70 to 0.90"
    swapped = tables.ratios(times, [*pairs[:-1], ("plain", "again")])
    assert list(swapped["the first is"]) == list(table["the first is"])
    few = {name: values[:5] for name, values in times.items()}
    assert set(tables.ratios(few, pairs)["the first is"][:-1]) == {"too few rounds to tell"}
    assert tables.ratios(few, pairs)["range"].iloc[0] == "smallest 0.70, largest 0.90"
    quiet = tables.ratios(times | {"again": plain}, pairs)
    assert quiet["the first is"].iloc[2] == "faster"  # the same interval, without any noise


def test_ratios_of_times_stand_beside_messages():
    rows = [(name, i, ms, sent) for name, ms, sent in (("a", 2.0, 12), ("b", 1.0, 3)) for i in range(4)]
    records = pd.DataFrame(rows, columns=["variant", "repetition", "ms", "messages"])
    table = tables.ratios_and_messages(records, [("a", "b"), ("b", "b")])
    assert list(table["messages"]) == ["12 / 3", "3 / 3"]
    assert list(table["ratio"]) == ["2.00", "1.00"]


def test_comparison_table():
    table = tables.comparison(compared(), ["step_ms", "sent_bytes"])
    assert list(table.index) == ["single process", "DDP, naive", "DDP, bucketed", "something new"]
    assert re.fullmatch(r"[\d.]+ ms \([\d.]+–[\d.]+\)", table["step time"].iloc[0])
    assert set(table["sent per rank and step"]) == {"3 MiB"}


def test_machine_card_is_shown(shown):
    notebook.machine_card()
    assert "processor" in shown[0][0]["text/plain"]


def test_stacked_bars_draw_every_repetition_and_say_the_median_of_the_totals():
    rows = [
        {"launch": launch, "round": number, "phase": phase, "wall_clock_seconds": seconds + number}
        for launch, parts in (("cold", {"start": 3.0, "leave": 1.0}), ("warm", {"leave": 0.5}))
        for number in range(3)
        for phase, seconds in parts.items()
    ]
    figure = plots.stacked_bars(pd.DataFrame(rows), "wall_clock_seconds", "launch", "phase", "round")
    axes = figure.axes[0]
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == [3, 4, 5, 1, 2, 3, 0, 0, 0, 0.5, 1.5, 2.5]
    assert [text.get_text() for text in axes.texts] == ["6 s", "1.50 s"]
    assert axes.get_xlabel() == "wall clock (s)"
