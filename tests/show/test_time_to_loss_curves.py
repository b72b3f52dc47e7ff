"""The race to a loss and its explorer: what is reached when, what is predicted for other links, what pictures say."""

import math

import pandas as pd
import pytest

from labkit.show import local_sgd_explorer, plots, publish, style, time_to_loss_curves

MIB = 2**20
RUNS = {  # family, seconds and bytes a lap, lowest loss
    "every step": ("every_step", 2.0, 8 * MIB, 0.04),
    "H = 4": ("local_sgd", 1.0, 2 * MIB, 0.05),
    "H = 16": ("local_sgd", 0.5, MIB // 2, 0.01),
    "never": ("alone", 0.25, 0, 0.3),
}
TARGET = 0.05


def measured():
    rows = []
    for run, (family, seconds, sent, lowest) in RUNS.items():
        for lap, loss in enumerate((2.0, 0.5, lowest, lowest)):
            row = {"run": run, "family": family, "seconds": lap * seconds, "sent_bytes": lap * sent, "loss": loss}
            rows.append(row | {"busy_ms": lap * 100.0})
    return pd.DataFrame(rows)


def words(axes):
    return [text.get_text() for text in axes.texts]


def state(mbit, runs=tuple(RUNS)):
    return local_sgd_explorer.State(runs, mbit)


def test_a_run_is_there_when_its_loss_is_first_at_most_the_target():
    ends = time_to_loss_curves.reached(measured(), TARGET).set_index("run")
    assert list(ends.index) == list(RUNS)
    assert ends["seconds"].tolist()[:3] == [4.0, 2.0, 1.0]  # the second lap, not the third
    assert math.isnan(ends.loc["never", "seconds"]) and ends.loc["never", "lowest"] == 0.3


def test_a_frame_that_is_no_race_is_said():
    with pytest.raises(ValueError, match="missing: family, loss"):
        time_to_loss_curves.reached(measured().drop(columns=["family", "loss"]), TARGET)
    with pytest.raises(ValueError, match="missing: any row"):
        time_to_loss_curves.reached(measured().iloc[:0], TARGET)


def test_a_family_goes_from_pale_to_its_own_colour():
    colours = time_to_loss_curves.shades(measured())
    assert colours["H = 16"] == pytest.approx(style.lighter(style.COLOURS["local_sgd"], 0))
    assert colours["H = 4"] == pytest.approx(style.lighter(style.COLOURS["local_sgd"], 0.62))
    assert len(set(map(tuple, colours.values()))) == len(RUNS)


def test_runs_that_are_neither_the_base_nor_named_are_grey():
    colours = time_to_loss_curves.colours_of(measured(), ["H = 16"])
    grey = time_to_loss_curves.OTHER
    assert colours == {
        "H = 4": grey,
        "never": grey,
        "H = 16": pytest.approx(style.lighter(style.COLOURS["local_sgd"], 0)),  # the family's only named run
        "every step": style.INK,
    }
    figure = plots.race(measured(), TARGET, "Who is first", ["H = 16"])
    over_seconds, over_bytes = figure.axes[2:]
    assert words(over_seconds) == ["target: 0.05", "every step", "H = 16", "never"]
    assert words(over_bytes) == ["every step", "H = 16"]  # without a message there is no curve over bytes
    bottom, _ = over_seconds.get_ylim()
    assert bottom < measured()["loss"].min() / 1.5  # below the curves there is room for the names
    curves = [line for line in over_seconds.lines if len(line.get_xdata()) > 2]
    assert [line.get_color() for line in curves] == [grey, grey, style.INK, colours["H = 16"]]


def test_the_ends_stand_above_the_curves_on_the_same_axis():
    figure = plots.race(measured(), TARGET, "Who is first", list(RUNS))
    seconds, size, losses, over_bytes = figure.axes
    assert losses.get_ylabel() == "loss (nats)"
    assert words(seconds) == ["4 s", "2 s", "1 s", "not reached"]
    assert words(size) == ["16 MiB", "4 MiB", "1 MiB", "not reached"]
    assert seconds.get_xlim() == losses.get_xlim() and size.get_xlim() == over_bytes.get_xlim()
    dots = [line.get_xdata()[0] for line in losses.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert sorted(dots) == [1.0, 2.0, 4.0]
    assert over_bytes.get_xscale() == "log" and over_bytes.get_xlabel().endswith("(MiB)")
    assert publish.png(figure, dpi=50)


def test_nothing_sent_and_nobody_there_can_be_drawn():
    alone = measured().query("run == 'never'")
    assert words(plots.race(alone, TARGET).axes[1]) == ["not reached"]


def test_seconds_on_another_link_are_busy_and_bytes():
    predicted = local_sgd_explorer.on_link(measured(), state(8)).set_index("run")["seconds"]
    assert predicted["every step"].tolist() == pytest.approx([lap * (0.1 + 8 * MIB / 1e6) for lap in range(4)])
    assert predicted["never"].tolist() == pytest.approx([0, 0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match="Tick at least one run"):
        local_sgd_explorer.on_link(measured(), state(8, ()))


def test_the_takeaway_names_the_first_and_what_it_wins():
    wins = (0.1 + 8 * MIB / 1e6) / (0.1 + 0.5 * MIB / 1e6)
    end = f"H = 16 is first at a loss of 0.05, after 1.25 s, {wins:.3g} times sooner than every step."
    assert local_sgd_explorer.takeaway(measured(), TARGET, state(8)).endswith(end)
    assert local_sgd_explorer.takeaway(measured(), TARGET, state(8, ("never",))).endswith(
        "none of them reaches a loss of 0.05."
    )
    (over_seconds, _) = local_sgd_explorer.draw(measured(), TARGET, state(8)).axes[2:]
    assert words(over_seconds)[1:3] == ["every step", "H = 16"]
    assert "sooner" not in local_sgd_explorer.takeaway(measured(), TARGET, state(8, ("H = 4",)))


def test_the_table_has_a_column_for_each_link():
    table = local_sgd_explorer.small(measured(), TARGET, (8, 80))
    assert list(table) == ["run", "8 Mbit/s", "80 Mbit/s"]
    assert table.set_index("run").loc["H = 16"].tolist() == ["1.25 s", "0.305 s"]
    assert table.set_index("run").loc["never"].tolist() == ["not reached"] * 2


@pytest.mark.slow
def test_controls_draw_the_choice_anew():
    shown = local_sgd_explorer.explorer(measured(), TARGET, 8, "predicted")
    shown.controls["link_mbit"].value = 1000
    first = shown.image.value
    assert "A link of 1,000 Mbit/s, predicted: H = 16 is first" in first and "<img" in first
    shown.controls["runs"]["H = 16"].value = False
    assert shown.state.runs == ("every step", "H = 4", "never") and "H = 4 is first" in shown.image.value
    for box in shown.controls["runs"].values():
        box.value = False
    assert shown.image.value == "<p>Tick at least one run.</p>"


def test_the_explorer_shows_figure_table_and_controls(capsys):
    shown = local_sgd_explorer.explorer(measured(), TARGET, 8, "predicted from counted bytes")
    assert shown.state == state(8)
    with pytest.raises(ValueError, match="provenance must begin"):
        local_sgd_explorer.explorer(measured(), TARGET, 8, "guessed")
