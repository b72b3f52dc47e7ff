"""The live view: it draws what comes, seldom enough, stops no training, and leaves a static picture."""

import pandas as pd
import pytest

from labkit.run import launch
from labkit.show import diagnosis_panel, live


def rows_of(run="A", steps=6, ranks=3, **more):
    """Rows as launch hands them on."""
    for step in range(1, steps + 1):
        for rank in range(ranks):
            row = {"kind": "record", "rank": rank, "step": step, "run": run, "loss": 3.0 / step, "step_ms": 50.0}
            row |= {"data_ms": 5.0, "forward_ms": 10.0, "backward_ms": 30.0, "optimizer_ms": 5.0}
            row |= {"exposed_comm_ms": 12.0, "samples_per_s": 100.0, "rss_bytes": 3e8, "messages": 2}
            yield row | {"shortest_message_ms": 1.5, "memory_stalls": 0, "to_0_ms": 2.0} | more


def test_waiting_lies_inside_backward_and_is_counted_once():
    parts = live.parts_of(pd.DataFrame(rows_of(steps=1)))
    assert parts.iloc[0].to_dict() == pytest.approx(
        {"data_ms": 5, "forward_ms": 10, "backward_ms": 18, "optimizer_ms": 5, "exposed_comm_ms": 12}
    )
    late = live.parts_of(pd.DataFrame(rows_of(steps=1, exposed_comm_ms=40.0)))  # also waits after backward
    assert late["backward_ms"].iloc[0] == 0 and late["exposed_comm_ms"].iloc[0] == 40


def test_the_picture_shows_each_panel_and_says_what_it_was_not_told():
    rows = pd.DataFrame(rows_of())
    figure = live.draw(rows, "a title")
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert len(figure.axes) == 6 and "not recorded" not in texts
    figure = live.draw(rows.drop(columns=["loss", "rss_bytes"]))
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts.count("not recorded") == 2
    words = live.takeaway(rows, "A")
    assert words == "run A: 3 ranks, step 6; a step takes 50.0 ms, and 12.0 ms of it a rank waits for messages."


def test_lines_of_ranks_do_not_have_the_colours_of_the_parts():
    figure = live.draw(pd.DataFrame(rows_of(ranks=5)))
    lines = [line for axes in figure.axes for line in axes.lines]
    assert len(lines) == 2 + 2 * 5 and not {line.get_color() for line in lines} & set(live.COLOURS.values())


class Shown:
    """What stands where the view was shown."""

    def __init__(self):
        self.contents, self.kept = [], []

    def display(self, data, raw, display_id):
        self.contents.append(data)
        return self

    def update(self, data, raw):
        self.contents.append(data)

    def present(self, figure, caption, provenance, alt):
        self.kept.append(caption)


@pytest.fixture
def shown(monkeypatch):
    shown = Shown()
    monkeypatch.setattr(live, "display", shown.display)
    monkeypatch.setattr(live, "present", shown.present)
    return shown


def test_it_is_redrawn_in_place_and_not_with_every_row(monkeypatch, shown):
    drawn, now = [], [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(live, "as_svg", lambda figure, words: drawn.append(words) or words)
    view = live.Live("emulated")
    for row in rows_of(steps=40):
        view.record(row)
    image = view.image
    assert len(drawn) == 1 and image.value.startswith("run A")  # all in one moment
    now[0] += 1 / live.REDRAWS
    view.record(next(rows_of("B", exposed_comm_ms=3.0)))
    assert len(drawn) == 2 and view.image is image and image.value.startswith("run B")
    view.record(next(rows_of("B")))  # in the same moment
    assert len(drawn) == 2
    assert len(shown.contents) == 1
    view.close()
    assert shown.contents[1:] == [{"text/plain": ""}] and image.comm is None
    assert len(shown.kept) == 1 and shown.kept[0].startswith("run B: ")


def test_a_picture_that_cannot_be_drawn_is_said_once(monkeypatch, shown, capsys):
    def fails(rows, title=None):
        raise ZeroDivisionError("no room")

    monkeypatch.setattr(live, "draw", fails)
    view = live.Live()
    for row in rows_of():
        view.record(row)
    view.close()
    assert capsys.readouterr().err.splitlines() == ["labkit: live view: ZeroDivisionError: no room"]
    assert len(view.rows) == 18


def test_without_rows_there_is_nothing_to_see(shown):
    view = live.Live()
    view.record({"kind": "record", "rank": 0, "x": 1})
    view.update(1, 2)
    view.close()
    assert view.broken is None and shown.contents == shown.kept == []


def test_a_launch_tells_its_view(shown):
    view = live.Live("emulated", keep=False)
    program = "for step in range(3):\n    record(step=step, step_ms=2.0, exposed_comm_ms=1.0)"
    records = launch(program, nproc=2, device="cpu", quiet=True, bar=view).records
    assert len(view.rows) == len(records) == 6 and len(shown.contents) >= 2 and shown.kept == []


def test_runs_side_by_side():
    frame = pd.DataFrame([*rows_of("A"), *rows_of("B", loss_scale=8.0)])
    assert len(diagnosis_panel.sheet(frame).axes) == 4
    numbers = diagnosis_panel.numbers(frame)
    assert numbers["links: usual, slowest"].tolist() == ["2.0, 2.0 ms"] * 2
    assert "memory stalls" not in numbers  # no cause of 32 shows in them, and a page fault misleads
    before, after = (pd.DataFrame(rows_of(step_ms=ms)).assign(changed=ms < 50) for ms in (50.0, 25.0))
    both = pd.concat([before, after]).assign(cause="tiny buckets", gain=0.5)
    (axes,) = diagnosis_panel.treated(both).axes
    words = [text.get_text() for text in axes.texts]
    assert words[1].endswith("25 predicted") and words[0] == "50 ms"


def test_the_slowest_rank_of_a_step_is_a_number_and_no_rank_has_the_colour_of_a_part():
    rows = pd.DataFrame(rows_of(steps=30))
    rows.loc[(rows["rank"] == 2) & (rows["step"] <= 20), "step_ms"] += 7.0
    rows.loc[(rows["rank"] == 1) & (rows["step"] > 20), "step_ms"] += 9.0
    _, right = diagnosis_panel.sheet(rows).axes
    numbers = [(text.get_text(), *text.xy) for text in right.texts]
    assert numbers == [("2", step, 40.0) for step in range(1, 20, 3)] + [("1", step, 42.0) for step in (22, 25, 28)]
    colours = {line.get_color() for line in right.lines}
    assert len(right.lines) == 3 and len(colours) == 1 and colours.isdisjoint(live.COLOURS.values())


def test_skipped_steps_are_a_part_of_a_useful_step():
    rows = pd.DataFrame(row | {"loss_scale": 2.0 ** (row["step"] % 2)} for row in rows_of(steps=5))
    assert diagnosis_panel.parts(rows)["skipped"] == pytest.approx(50.0)
