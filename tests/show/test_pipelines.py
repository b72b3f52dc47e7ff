"""Pipelines drawn, the table of bubbles, and the explorer's controls."""

import pytest

from labkit.measure.timeline import Timeline
from labkit.measure.timeline_analysis import bubble
from labkit.pipeline import pipeline
from labkit.pipeline.pipeline_schedules import routes
from labkit.pipeline.schedule_validation import play
from labkit.show import pipelining, plots, publish
from labkit.show.pipelines import played

STATES = {name: pipelining.State(name, 4, 8) for name in pipelining.STAGES_OF_A_RANK}


@pytest.mark.parametrize("name", STATES)
def test_what_is_played_has_the_bubble_of_the_schedule(name):
    schedule = STATES[name].written()
    frame = played(schedule, forward_ms=30)
    assert bubble(frame) == pytest.approx(play(schedule).bubble)
    share = len(routes(schedule)[0]) / 4  # of the stages of a model, for each of four ranks
    assert frame["end_ms"].max() == pytest.approx(30 * play(schedule).length / share)


def test_a_message_makes_it_longer():
    schedule = STATES["gpipe"].written()
    assert bubble(played(schedule, 30, message_ms=1)) > bubble(played(schedule, 30))


def test_every_action_is_a_box_with_its_number():
    figure = plots.pipelines({"1F1B": played(pipeline.one_f_one_b(2, 3), 10)}, "A title")
    axes = figure.axes[0]
    assert len(axes.patches) == 2 + 12  # the ranks' grounds, and an F and a B of each
    written = [text.get_text() for text in axes.texts]
    assert written[:2] == ["1F1B", "bubble 25.0% of 120 ms"] and sorted(written[2:]) == sorted("001122" * 2)
    assert publish.png(figure, dpi=50)
    with pytest.raises(ValueError, match="cannot be drawn"):
        plots.pipelines({})


def test_the_table_holds_measured_beside_predicted():
    frames = {name: played(state.written(), 10, message_ms=0.1) for name, state in STATES.items()}
    rows = pipelining.compared(frames, STATES, 10).set_index("schedule")
    assert (rows["ratio"] > 1).all() and rows.loc["one_f_one_b", "held"] == "4, 3, 2, 1"
    assert rows.loc["interleaved", "held"] == "5.5, 4.5, 3.5, 2.5"
    assert rows.loc["dual_pipe", "held"] == "5, 5, 5, 5"


def test_spans_of_ranks_that_began_later():
    rows = [(0, "0F0", 1.0, 2.0), (1, "1F0", 2.0, 3.0)]
    spans = [
        {"rank": rank, "name": name, "lane": "compute", "start": start, "end": end} for rank, name, start, end in rows
    ]
    assert bubble(Timeline.from_rows(spans).frame()) == pytest.approx(0.5)


def test_the_controls_play_and_the_button_runs():
    ran = []

    def launch(state):
        ran.append(state)
        if state.micro_batches == 4:
            raise RuntimeError("no ranks\nmore")
        return played(state.written(), 10)

    board = pipelining.explorer(STATES["one_f_one_b"], {}, 10, launch)
    board.controls["schedule"].value = "zero_bubble"
    assert "11.1% predicted." in board.image.value and "<img" in board.image.value and not ran
    board.button.click()
    assert ran == [pipelining.State("zero_bubble", 4, 8)] and "11.1% measured" in board.image.value
    board.controls["micro_batches"].value = 2
    assert "<p>one_f_one_b: micro_batches=" in board.image.value or "zero_bubble: micro" in board.image.value
    board.controls["micro_batches"].value = 4
    board.button.click()
    assert board.message.value == "<b>RuntimeError</b>: no ranks"
