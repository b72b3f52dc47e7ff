"""The one explorer: controls, their state and its picture; what its button runs; what is shown without a kernel."""

from dataclasses import dataclass

import ipywidgets
import matplotlib.pyplot as plt
import pandas as pd

from labkit.show import controls, explorer


@dataclass(frozen=True)
class State:
    size: int = 1
    names: tuple = ("a", "b")


def rows():
    return [{"size": controls.menu("size", [1, 2, 3], 1)}, {"names": controls.boxes(("a", "b"))}]


def picture(state):
    explorer.need_one(state.names, "name")
    if state.size == 3:
        raise ValueError("3 < 4 is no size")
    return f"{state.size} of {', '.join(state.names)}"


def test_controls_become_the_state_and_its_picture():
    shown = explorer.Explorer(State(), rows(), picture, "hint")
    assert shown.image.value == "<p>hint</p>" and shown.state == State()
    shown.controls["size"].value = 2
    shown.controls["names"]["a"].value = False
    assert shown.state == State(2, ("b",)) and shown.image.value == "2 of b"


def test_an_error_of_the_picture_is_shown_as_text():
    shown = explorer.Explorer(State(), rows(), picture, "hint")
    shown.controls["size"].value = 3
    assert shown.image.value == "<p>3 &lt; 4 is no size</p>"
    shown.controls["size"].value = 1
    for box in shown.controls["names"].values():
        box.value = False
    assert shown.image.value == "<p>Tick at least one name.</p>"


def test_a_state_that_cannot_be_read_changes_nothing():
    def read(state, size, names):
        if size == 2:
            raise ValueError("no 2")
        return State(size, names)

    shown = explorer.Explorer(State(), rows(), picture, "hint", read=read)
    shown.controls["size"].value = 2
    assert shown.image.value == "<p>no 2</p>" and shown.state == State()


def test_the_panel_holds_a_row_of_widgets_for_each_row_and_the_image():
    shown = explorer.Explorer(State(), rows(), picture, "hint")
    assert [len(line.children) for line in shown.panel.children[:-1]] == [1, 2]
    assert shown.panel.children[-1] is shown.image


def test_only_the_button_runs_and_it_says_what_came_out():
    ran = []

    def run(state):
        ran.append(state)
        if state.size == 2:
            raise RuntimeError("rank 1: <out of memory>\nTraceback")
        return "measured"

    shown = explorer.Explorer(State(), rows(), picture, "hint", run=run, words="Run it")
    shown.controls["names"]["a"].value = False
    assert ran == [] and shown.button.description == "Run it"
    shown.button.click()
    assert ran == [State(1, ("b",))] and shown.message.value == "measured"
    shown.controls["size"].value = 2
    shown.button.click()
    assert shown.message.value == "<b>RuntimeError</b>: rank 1: &lt;out of memory&gt;"
    assert not shown.button.disabled


def test_without_run_there_is_no_button():
    panel = explorer.Explorer(State(), rows(), picture, "hint").panel
    assert not any(isinstance(one, ipywidgets.HBox) for one in panel.children)


def test_what_is_seen_without_a_kernel_comes_first(monkeypatch):
    order = []
    monkeypatch.setattr(explorer, "present", lambda _, caption, provenance, alt: order.append((caption, alt)))
    monkeypatch.setattr(explorer, "table", lambda _, caption: order.append(caption))
    monkeypatch.setattr(controls, "show", lambda _: order.append("controls"))
    monkeypatch.setattr(explorer, "as_html", lambda words, *figures: f"{words}: {len(figures)} images")

    def more(state):
        return [plt.figure()]

    def takeaway(state):
        return f"size {state.size}"

    shown = explorer.explore(
        State(), rows(), lambda _: plt.figure(), takeaway, "predicted", pd.DataFrame(), "caption", "hint", more=more
    )
    assert order == [("size 1", "size 1"), "caption; predicted", "controls"]
    shown.controls["size"].value = 2
    assert shown.image.value == "size 2: 2 images"
