import pandas as pd
import pytest

from labkit.show import collective_chunks, plots, publish, style


def number(rank, chunk, n):
    """What rank fills chunk with."""
    return (chunk + 1) * 10 ** (n - 1 - rank)


def state(n, holds):
    return [{"rank": rank, "holds": holds(rank)} for rank in range(n)]


def own(n):
    return lambda rank: [number(rank, chunk, n) for chunk in range(n)]


def whole(n):
    return lambda rank: [sum(number(r, chunk, n) for r in range(n)) for chunk in range(n)]


def words(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def frames(figure, colour):
    """How many boxes are framed in this colour."""
    wanted = collective_chunks.FancyBboxPatch((0, 0), 1, 1, edgecolor=colour).get_edgecolor()
    return sum(p.get_edgecolor() == wanted and p.get_linewidth() > 1 for p in figure.axes[0].patches)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_before_and_after(n):
    rows = [
        {"operation": "all_reduce", "rank": row["rank"], "before": own(n)(row["rank"]), "after": row["holds"]}
        for row in reversed(state(n, whole(n)))
    ]
    figure = plots.before_after(pd.DataFrame(rows), title="All-reduce")
    assert words(figure)[0] == "all_reduce"
    # n ranks, n chunks, n digits, twice; a heading, n names of ranks and the arrow
    assert len(words(figure)) == 2 * n**3 + n + 2
    assert sum(digit == "0" for digit in words(figure)) == n**3 - n**2  # only before: after it, all are in
    assert publish.png(figure, dpi=50)


def test_a_step_frames_what_it_changed():
    moves = [own(2), lambda rank: [[10, 22], [11, 2]][rank], whole(2)]
    rows = [{"step": step, **row} for step, holds in enumerate(moves) for row in state(2, holds)]
    figure = plots.step_by_step(pd.DataFrame(rows), ["reduce-scatter", "all-gather"])
    headings = {text for text in words(figure) if not text.isdigit() and not text.startswith("rank")}
    assert headings == {"start", "reduce-scatter", "step 1", "after step 1", "all-gather", "step 2"}
    assert frames(figure, style.INK) == 4  # two boxes a step


def test_what_differs_from_the_first_is_red():
    rows = [{"algorithm": "ring", **row} for row in state(3, whole(3))]
    rows += [{"algorithm": "wrong", **row} for row in state(3, own(3))]
    figure = plots.side_by_side(pd.DataFrame(rows))
    assert frames(figure, style.RED) == 9
    assert publish.png(figure, dpi=50)


def test_nothing_recorded_is_said():
    with pytest.raises(ValueError, match="nothing was recorded"):
        plots.side_by_side(pd.DataFrame())


def test_figures_are_written_only_where_a_command_says(tmp_path, monkeypatch):
    figure = plots.side_by_side(pd.DataFrame([{"algorithm": "ring", **row} for row in state(2, whole(2))]))
    about = ("ends", {}, {"world_size": 2}, "counted", "Two ranks hold the sum.")
    monkeypatch.delenv("LABKIT_FIGURES", raising=False)
    assert plots.save(figure, *about) is None
    monkeypatch.setenv("LABKIT_FIGURES", str(tmp_path / "pictures"))
    assert plots.save(figure, *about) == tmp_path / "pictures" / "ends.svg"
    assert (tmp_path / "pictures" / "ends.json").exists()
