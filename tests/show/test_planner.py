"""The plan under the controls: never better than the whole search, in words, in a picture; predictions in pictures."""

from dataclasses import replace

import pandas as pd
import pytest

from labkit.scale.cluster import Cluster
from labkit.scale.explain import words
from labkit.scale.plan import plan
from labkit.show import planner, predictions, publish

JOB = planner.Job({"gpt3-6.7b": 1024, "llama3-405b": 2048}, ("A100-80GB", "H100-80GB"), (8, 64), ("bf16", "fp8"), 3e11)
STATE = planner.State("gpt3-6.7b", "A100-80GB", 64)


def test_few_layouts_hold_nothing_that_the_whole_search_would_refuse():
    found, _ = planner.answer(JOB, STATE)
    whole = plan("gpt3-6.7b", Cluster("A100-80GB", 64)).fastest
    assert found.peak.total <= 0.9 * found.peak.memory
    assert 1 <= found.seconds / whole.seconds < 1.05
    assert found.job.n_gpus == 64


def test_more_spared_is_never_faster():
    found, _ = planner.answer(replace(JOB, spare=0.8), STATE)
    assert found is None or found.seconds >= planner.answer(JOB, STATE)[0].seconds


def test_words_and_picture():
    found, _ = planner.answer(JOB, STATE)
    said = planner.takeaway(JOB, STATE)
    assert said.startswith(f"gpt3-6.7b on 64 x A100-80GB, bf16, the fastest of few layouts: {words(found.job)};")
    assert f"{found.peak.total:.1f} GiB a GPU" in said and "GPU-hours for 3e+11 tokens." in said
    figure = planner.draw(JOB, STATE)
    held, spent = figure.axes
    assert held.get_xlabel().startswith("memory of a GPU (GiB); red: its ")
    assert f"{found.peak.total:,.3g} GiB" in [text.get_text() for text in held.texts]
    assert spent.get_xlabel() == "time of a step (s)"
    assert f"{found.seconds:,.3g} s" in [text.get_text() for text in spent.texts]
    assert figure.get_suptitle() == "gpt3-6.7b on 64 x A100-80GB, bf16, predicted: the fastest of few layouts"
    assert publish.png(figure, dpi=50)


def test_what_does_not_fit_is_said_and_drawn():
    state = planner.State("llama3-405b", "A100-80GB", 8)
    assert "none of the few layouts tried fits; the least is" in planner.takeaway(JOB, state)
    assert "GiB a GPU (states alone" in planner.takeaway(JOB, state)
    assert len(planner.draw(JOB, state).axes) == 1


def test_the_controls_draw_anew():
    shown = planner.explorer(JOB, STATE, "predicted")
    for name, value in {"gpu": "H100-80GB", "precision": "fp8", "gpus": 8}.items():
        shown.controls[name].value = value
    assert shown.state == planner.State("gpt3-6.7b", "H100-80GB", 8, "fp8")
    assert "gpt3-6.7b on 8 x H100-80GB, fp8" in shown.image.value


def test_a_precision_that_the_gpu_lacks_is_refused_in_words():
    state = planner.State("gpt3-6.7b", "A100-80GB", 64, "fp8")
    assert "A100-80GB does not have fp8: use" in planner.takeaway(JOB, state)
    assert planner.picture(JOB, state).startswith("<p>gpt3-6.7b on 64 x A100-80GB, fp8: A100-80GB does not have fp8")


def test_predictions_beside_what_is_published():
    rows = [{"group": f"source {i % 3}", "predicted": 1000 + i, "published": 1100 - i} for i in range(9)]
    figure = predictions.against_published(pd.DataFrame(rows))
    axes = figure.axes[0]
    assert axes.get_xlim() == axes.get_ylim() and len(axes.lines) == 4
    assert [text.get_text() for text in axes.get_legend().get_texts()][-1] == "source 2, 3 rows"
    with pytest.raises(ValueError, match="6 groups at most"):
        predictions.against_published(pd.DataFrame([row | {"group": i} for i, row in enumerate(rows)]))


def test_who_is_beaten_in_days_and_in_hours_is_hollow():
    frame = pd.DataFrame({"gpus": [64, 128, 256], "days": [40, 21, 12], "gpu_hours": [61440, 70000, 69000]})
    axes = predictions.time_and_money(frame, 0.05).axes[0]
    points = [line for line in axes.lines if line.get_marker() == "o"]
    hollow = [p.get_markerfacecolor() == predictions.style.GROUND for p in points]
    assert hollow == [False, True, False]  # by days: 256, 128, 64


def test_a_control_is_answered_without_matplotlib():
    shown = planner.picture(JOB, STATE)
    found, _ = planner.answer(JOB, STATE)
    assert "<img" not in shown and "step" in shown
    for kind in ("states", "activations"):
        assert f"{kind} {getattr(found.peak, kind):.3g} GiB" in shown
    assert f"{found.seconds:.3g} s" in shown and f"dashed: {0.9 * found.peak.memory:.3g}" in shown


def test_the_line_of_what_may_be_used_lies_where_it_belongs():
    shown = planner.bar({"states": 30.0}, {"states": "#000"}, "GiB", 80.0, 72.0)
    assert "width:37.50%" in shown and "left:90.00%" in shown
    assert "left:" not in planner.bar({"layers": 2.0}, {"layers": "#000"}, "s", 2.0)
