"""Published jobs and their predictions; a job on another GPU: in words, in a picture, with the controls."""

import pandas as pd
import pytest

from labkit.scale import cases as published
from labkit.show import cases_explorer, publish

NAME, OTHER = "Mixtral 8x7B, 64 GPUs", "Llama 3 405B, 16,384 GPUs"


def course():
    rows = {row["case"]: row for row in published.table(published.CASES)}
    return cases_explorer.Course(
        {name: published.case_of(rows[name]) for name in (NAME, OTHER)}, {"A100-80GB": 2, "B200-180GB": 6}
    )


def frame():
    rows = [("dense", 110.0, 107.0, 107.0), ("of unclear FLOPs", 51.0, 67.0, 157.0)]
    return pd.DataFrame(rows, columns=["case", "predicted", "least", "most"])


def test_both_words_and_both_figures_are_in_the_picture():
    figure = cases_explorer.beside(frame(), "A title")
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [name.split(" ")[0] for name in names] == ["predicted", "published"]
    assert [text.get_text() for text in figure.axes[0].texts][:2] == ["110; 107", "51; 67 to 157"]
    assert publish.png(figure, dpi=50)
    with pytest.raises(ValueError, match="no case"):
        cases_explorer.beside(frame().head(0))


def test_parts_add_up_to_the_steps():
    state = cases_explorer.State(NAME, "B200-180GB")
    told = cases_explorer.rows(course(), state).groupby("gpu")["step_seconds"].sum()
    for gpu, found in cases_explorer.both(course(), state).items():
        assert told[gpu] == pytest.approx(found.seconds)
    assert told["B200-180GB"] < told["H100-80GB"]


def test_words_say_time_money_and_memory():
    words = cases_explorer.takeaway(course(), cases_explorer.State(OTHER, "A100-80GB"))
    assert words.startswith(f"{OTHER}, its layout on A100-80GB: 0.38 times the speed on H100-80GB. A trillion tokens")
    assert "at an assumed 2 each." in words and "GiB fits in 79 GiB." in words


def test_the_gpu_that_it_ran_on_is_one_bar():
    both = cases_explorer.both(
        cases_explorer.Course(course().cases, {"H100-80GB": 1}), cases_explorer.State(NAME, "H100-80GB")
    )
    assert list(both) == ["H100-80GB"]


def test_the_controls_draw_anew():
    shown = cases_explorer.explorer(course(), cases_explorer.State(NAME, "A100-80GB"), "predicted")
    shown.controls["case"].value = OTHER
    shown.controls["gpu"].value = "B200-180GB"
    assert shown.state == cases_explorer.State(OTHER, "B200-180GB")
    assert f"{OTHER}, its layout on B200-180GB: 1.77 times" in shown.image.value
