from math import inf

import pandas as pd
import pytest

from labkit.show import controls, strategy_comparison


def rows_of(models=("mlp", "gpt"), buckets=(1, 25), first=10.0, link_mbit=inf):
    """Three strategies, three rounds each; only the bucketed one was measured at several bucket sizes."""
    rows = []
    for model in models:
        for place, strategy in enumerate(["single", "ddp_naive", "ddp_bucketed"]):
            for size in buckets if strategy == "ddp_bucketed" else [float("nan")]:
                for number in range(3):
                    step = first * (1 + place) + number + (0 if pd.isna(size) else 5 / size)
                    key = {"model": model, "strategy": strategy, "bucket_cap_mb": size, "link_mbit": link_mbit}
                    rows.append({**key, "round": number, "step_ms": step, "sent_bytes": 1024 * place})
    return pd.DataFrame(rows)


def test_the_first_state():
    state = strategy_comparison.initial(rows_of())
    assert state == strategy_comparison.State("mlp", ("single", "ddp_naive", "ddp_bucketed"), 25, "step_ms")
    assert strategy_comparison.initial(rows_of(buckets=(25,))).bucket_cap_mb is None


@pytest.mark.parametrize("frame", [pd.DataFrame(), rows_of().drop(columns="model"), rows_of().iloc[:0]])
def test_a_frame_that_cannot_be_compared_is_refused(frame):
    with pytest.raises(ValueError, match="a comparison needs rows with model, strategy, bucket_cap_mb"):
        strategy_comparison.initial(frame)


def test_the_bucket_size_filters_only_what_has_several():
    frame = rows_of()
    state = strategy_comparison.State("gpt", ("single", "ddp_bucketed"), 1, "step_ms")
    rows = strategy_comparison.chosen(frame, state)
    assert set(rows["strategy"]) == {"single", "ddp_bucketed"} and set(rows["model"]) == {"gpt"}
    assert set(rows["bucket_cap_mb"].dropna()) == {1}


def test_drawing_is_pure():
    frame = rows_of()
    before = frame.copy()
    state = strategy_comparison.initial(frame)
    words = [t.get_text() for t in strategy_comparison.draw(frame, state).findobj(lambda a: hasattr(a, "get_text"))]
    assert {"MLP, buckets of 25 MB: step time", "11 ms", "21 ms", "31.2 ms"} <= set(words)
    pd.testing.assert_frame_equal(frame, before)
    with pytest.raises(ValueError, match="nothing measured yet for MLP, buckets of 3 MB: step time"):
        strategy_comparison.draw(frame, strategy_comparison.State("mlp", ("ddp_bucketed",), 3, "step_ms"))


@pytest.mark.parametrize(
    ("strategies", "metric", "words"),
    [
        (
            ("single", "ddp_naive"),
            "step_ms",
            "step time is 11 ms for single process and 21 ms for DDP, naive, a factor of 1.91.",
        ),
        (("single",), "step_ms", "step time is 11 ms for single process."),
        (("single", "ddp_naive"), "sent_bytes", "is 0 B for single process and 1 KiB for DDP, naive."),
    ],
)
def test_the_takeaway_is_one_sentence(strategies, metric, words):
    text = strategy_comparison.takeaway(rows_of(), strategy_comparison.State("gpt", strategies, None, metric))
    assert text.startswith("GPT: ") and text.endswith(words)


def test_controls_redraw_from_saved_data_and_launch_nothing():
    shown = strategy_comparison.Comparison(rows_of(), launch=lambda *_: pytest.fail("launched without the button"))
    seen = [shown.image.value]
    assert seen[0].startswith("<p>Change a control")
    for change in (
        lambda: setattr(shown.model, "value", "gpt"),
        lambda: setattr(shown.metric, "value", "sent_bytes"),
        lambda: setattr(shown.size, "value", 1),
        lambda: setattr(shown.boxes["single"], "value", False),
    ):
        change()
        assert shown.image.value not in seen and 'alt="' in shown.image.value
        seen.append(shown.image.value)
    assert shown.state == strategy_comparison.State("gpt", ("ddp_naive", "ddp_bucketed"), 1, "sent_bytes")
    for box in shown.boxes.values():
        box.value = False
    assert shown.image.value == "<p>Tick at least one strategy.</p>"


def test_each_network_has_rows_of_its_own():
    frame = pd.concat([rows_of(), rows_of(("mlp",), first=1000.0, link_mbit=100.0)])
    shown = strategy_comparison.Comparison(frame, launch=lambda *_: rows_of(("mlp",), first=2000.0, link_mbit=100.0))
    assert [words for words, _ in shown.network.options] == ["this machine", "nodes on links of 100 Mbit/s"]
    shown.network.value = 100.0
    assert "MLP, buckets of 25 MB, nodes on links of 100 Mbit/s: step time" in shown.image.value
    assert set(strategy_comparison.chosen(frame, shown.state)["step_ms"].round(-3)) == {1000, 2000, 3000}
    shown.button.click()
    assert len(shown.frame) == len(frame)
    assert shown.frame.query("link_mbit == 100")["step_ms"].min() == 2000
    assert shown.frame.query("link_mbit != 100")["step_ms"].min() == 10
    shown.model.value = "gpt"
    assert shown.image.value.startswith("<p>Nothing measured yet for GPT")
    assert strategy_comparison.Comparison(rows_of()).network.disabled


def test_without_launch_there_is_no_button():
    for launch in (None, print):
        shown = strategy_comparison.Comparison(rows_of(), launch)
        assert (shown.button in everything_in(shown.panel)) == (launch is not None)


def everything_in(widget):
    return [widget, *(inner for child in getattr(widget, "children", ()) for inner in everything_in(child))]


class FakeRun:
    def __init__(self, records):
        self.records = records


@pytest.mark.parametrize("wrap", [FakeRun, lambda frame: frame])
def test_the_button_measures_and_new_rows_replace_old_ones(wrap):
    asked = []

    def launch(model, strategies, size, link_mbit):
        asked.append((model, strategies, size, link_mbit))
        return wrap(rows_of((model,), (size,), first=100.0))

    shown = strategy_comparison.Comparison(rows_of(), launch, sizes=(4,))
    assert [size for _, size in shown.size.options] == [1, 4, 25]
    shown.size.value = 4
    assert "31.2" not in shown.image.value
    shown.button.click()
    assert asked == [("mlp", ["single", "ddp_naive", "ddp_bucketed"], 4, inf)]
    mine = shown.frame[shown.frame["model"] == "mlp"]
    assert set(mine.loc[mine["strategy"] == "single", "step_ms"]) == {100, 101, 102}
    assert set(mine["bucket_cap_mb"].dropna()) == {1, 4, 25}
    assert shown.message.value == "measured: 9 rows added" and not shown.button.disabled
    assert "302 ms" in shown.image.value


def test_a_failing_launch_is_one_line_in_the_widget():
    def launch(*_):
        raise RuntimeError("rank 1 failed: <out of memory>\nTraceback ...")

    shown = strategy_comparison.Comparison(rows_of(), launch)
    shown.button.click()
    assert shown.message.value == "<b>RuntimeError</b>: rank 1 failed: &lt;out of memory&gt;"
    assert shown.image.value == strategy_comparison.picture(rows_of(), shown.state) and not shown.button.disabled


def test_what_is_seen_without_a_kernel_comes_first(monkeypatch):
    order = []
    monkeypatch.setattr(strategy_comparison, "present", lambda *_: order.append("figure"))
    monkeypatch.setattr(strategy_comparison, "table", lambda _, caption: order.append(caption))
    monkeypatch.setattr(controls, "show", lambda *_: order.append("controls"))
    strategy_comparison.comparison(rows_of(), provenance="measured on a test")
    assert order == ["figure", "MLP, buckets of 25 MB, median (quartiles); measured on a test", "controls"]


def test_controls_that_cannot_be_drawn_say_where_they_are(monkeypatch):
    shown = []
    monkeypatch.setattr(controls, "display", lambda bundle, raw: shown.append(bundle))
    panel = strategy_comparison.Comparison(rows_of()).panel
    controls.show(panel)
    assert shown[0]["application/vnd.jupyter.widget-view+json"]["model_id"] == panel.model_id
    assert shown[0]["text/plain"] == "Controls: run this notebook in JupyterLab."


def test_emulated_rows_are_called_so():
    assert strategy_comparison.origin(rows_of()) == "measured"
    assert strategy_comparison.origin(rows_of().assign(compute="emulated")).startswith("emulated")
