"""Memory over the length of a sequence: what fits, in words, in a table and in a picture."""

import pytest

from labkit.show import publish, sequence_length_explorer

SIZES = {"square": lambda T, heads: 4 * heads * T**2, "line": lambda T, heads: 4 * heads * T}
STATE = sequence_length_explorer.State(("square", "line"), (2**10, 2**17, 2**20), (("heads", 2),))


def predict(variant, tokens, heads):
    return SIZES[variant](tokens, heads)


def test_the_longest_that_fits():
    assert sequence_length_explorer.takeaway(predict, STATE) == (
        "heads 2: the longest of these lengths that fits into 80 GiB is "
        "1,024 tokens for square, 1,048,576 tokens for line."
    )
    assert sequence_length_explorer.small(predict, STATE)["square"].tolist() == ["8 MiB", "128 GiB", "8 TiB"]


def test_a_line_for_each_variant_and_one_for_the_capacity():
    axes = sequence_length_explorer.draw(predict, STATE).axes[0]
    assert len(axes.lines) == 3
    assert list(axes.lines[0].get_ydata()) == [predict("square", T, 2) for T in STATE.tokens]
    assert axes.figure.get_suptitle() == "heads 2: up to 1,048,576 tokens fit with line"
    assert publish.png(axes.figure, dpi=50)


def test_the_title_names_all_that_reach_as_far_and_says_if_none_fits(monkeypatch):
    same = sequence_length_explorer.State(("square", "line"), (2**10,), (("heads", 2),))
    title = sequence_length_explorer.draw(predict, same).get_suptitle()
    assert title == "heads 2: up to 1,024 tokens fit with square and line"
    monkeypatch.setattr(sequence_length_explorer, "CAPACITY", 1)
    assert sequence_length_explorer.draw(predict, same).get_suptitle() == "heads 2: nothing fits"


def test_the_controls_draw_anew():
    shown = sequence_length_explorer.explorer(predict, SIZES, STATE.tokens, {"heads": [2, 16]})
    shown.controls["heads"].value = 16
    assert shown.state.chosen == (("heads", 16),) and 'alt="heads 16: ' in shown.image.value
    for box in shown.controls["variants"].values():
        box.value = False
    assert "Tick at least one variant" in shown.image.value
    with pytest.raises(ValueError, match="Tick at least one variant"):
        sequence_length_explorer.rows(predict, shown.state)
