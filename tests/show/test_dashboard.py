"""The dashboard: what it makes of a sweep's rows, what its controls draw, and a what-if that runs on real ranks."""

import re
import shutil
import threading
import time

import batch
import explorers
import nbformat
import numpy as np
import pandas as pd
import psutil
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from stored import GRIDS

from labkit.measure.machine import ROOT
from labkit.run import cost_model, summary, sweep
from labkit.run.compare import compare
from labkit.run.experiment import Experiment
from labkit.show import conclusions, dashboard, dashboard_pictures, dashboard_words, style, whatif

KINDS = ("parameters", "gradients", "optimizer_states", "buffers", "communication", "activations")
CARD = {"cpu": "x", "cores": 2, "torch": "2", "python": "3", "gpus": "none", "device": "cpu", "format": 1}
CARD |= {"commit": "c", "measured_at": "t"}


def rows_of(cell, step_ms, launch="one", world=None, sent=100, peak=1000, rounds=6, waits=1.0, **fields):
    """A row per round, of two steps, and rank, as sweep.results() has them; rank 1 takes 2 ms more than rank 0."""
    known = Experiment(**fields).to_dict() | sweep.WORLD | (world or {})
    rows = []
    for number in range(rounds):
        for step in (2 * number, 2 * number + 1):
            for rank in (0, 1):
                took = step_ms * (1 + number / 10) + 2 * rank - 1
                row = {"cell": cell, "launch": launch, "rank": rank, "round": number, "step": step + 4} | known | CARD
                row |= {"loss": 3 - step / 10 + rank, "step_ms": took, "forward_ms": took / 4, "backward_ms": took / 2}
                row |= {"optimizer_ms": took / 8, "exposed_comm_ms": waits + rank, "samples_per_s": 1e3 / took}
                row |= {
                    "mfu": 0.5,
                    "sent_bytes": sent - rank,
                    "peak_bytes": peak + rank,
                    "network": "none",
                    "messages": 1.0,
                }
                rows.append(row | {f"peak_{kind}_bytes": (peak + rank) // 4 for kind in KINDS[:4]})
    return rows


def grid_rows(both=10.0, **more):
    """A base, two single changes of ratio 1/2 and 2, and both together."""
    rows = rows_of("a", 10.0) + rows_of("b", 5.0, sent=50, precision="bf16")
    rows += rows_of("c", 20.0, peak=500, accumulation=2)
    rows += rows_of("d", both, sent=50, peak=500, precision="bf16", accumulation=2)
    return pd.DataFrame(rows)


@pytest.mark.parametrize("slow", [[0, 2], [0, 1]])
def test_a_rate_is_that_of_the_median_step(slow):
    """One long step in four, in each turn or in every second one: the quick steps' rates say little about all."""
    rows = grid_rows()
    rows.loc[(rows["cell"] == "a") & (rows["step"] % 4).isin(slow), "step_ms"] = 100.0
    rows["samples_per_s"] = 8e3 / rows["step_ms"]
    a = summary.summary(rows).set_index("cell").loc["a"]
    assert 50 < a["step_ms"] < 60 and a["samples_per_s"] == pytest.approx(8e3 / a["step_ms"])


def test_the_parts_of_a_peak_are_of_one_rank():
    """Rank 0 holds most activations, and rank 1 most of all: its parts add up to its peak."""
    rows = grid_rows()
    rows["peak_activations_bytes"] = rows["peak_bytes"] - 3 * (rows["peak_bytes"] // 4)
    moved = (rows["rank"] == 0) * 150
    rows["peak_activations_bytes"] += moved
    rows["peak_gradients_bytes"] -= moved
    table = summary.summary(rows)
    parts = table[[f"peak_{kind}_bytes" for kind in ("parameters", "gradients", "optimizer_states", "activations")]]
    assert parts.sum(axis=1).tolist() == table["peak_bytes"].tolist() == [1001, 1001, 501, 501]


def test_a_row_a_cell_by_hand():
    table = summary.summary(grid_rows()).set_index("cell")
    a, c = table.loc["a"], table.loc["c"]
    assert list(table.index) == ["a", "b", "c", "d"] and set(table["base"]) == {"a"}
    assert a["step_ms"] == pytest.approx(12.5)  # rounds of 10, 11, ... 15 ms; the ranks' -1 and +1 cancel
    assert (a["step_low"], a["step_high"]) == pytest.approx((11.25, 13.75))
    assert c["ratio"] == pytest.approx(2.0) and (c["ratio_low"], c["ratio_high"]) == pytest.approx((2.0, 2.0))
    assert c["pairs"] == 6 and a["exposed_comm_ms"] == 1.5
    assert (a["sent_bytes"], a["peak_bytes"], a["peak_gradients_bytes"]) == (100, 1001, 250)
    assert a["loss"] == pytest.approx(3 - 1.1 + 0.5)  # of the last step, the mean of both ranks
    assert (a["world"], a["ranks"], a["changes"]) == ("2 ranks", 2, ())
    assert table.loc["d", "changes"] == (("accumulation", 2), ("precision", "bf16"))
    line = summary.curves(grid_rows()).query("cell == 'a'")
    assert line["seconds"].tolist()[:3] == pytest.approx([0.010, 0.020, 0.031])
    assert line["sent_bytes"].tolist()[:2] == [99.5, 199.0]


def test_ratios_are_paired_in_the_launch_and_a_round_that_one_lacks_is_left_out():
    slow = pd.DataFrame(rows_of("a", 100.0, "two") + rows_of("e", 300.0, "two", rounds=4, bucket_cap_mb=1.0))
    table = summary.summary(pd.concat([grid_rows(), slow])).set_index("cell")
    assert table.loc["e", "ratio"] == pytest.approx(3.0) and table.loc["e", "pairs"] == 4
    assert table.loc["b", "ratio"] == pytest.approx(0.5)


def test_links_in_words_and_refused_nodes_are_no_link():
    far = {"nproc": 1, "nodes": 2, "link_mbit": 100.0}
    rows = pd.DataFrame(rows_of("a", 10.0, world=far))
    table, _ = dashboard.opened(rows)
    assert (table["world"][0], table["link"][0], table["ranks"][0]) == ("2 nodes of 1, 100 Mbit/s", "100 Mbit/s", 2)
    assert "throttled" in dashboard_words.origin(rows)
    refused = rows.assign(network="loopback")
    table, _ = dashboard.opened(refused)
    assert (table["world"][0], table["link"][0]) == ("2 nodes of 1, loopback", "loopback")
    assert "throttled" not in dashboard_words.origin(refused)


def test_more_ranks_than_cores_are_told():
    rows = grid_rows()
    assert "share" not in dashboard_words.origin(rows)
    assert "2 ranks share 1 cores" in dashboard_words.origin(rows.assign(cores=1))
    assert dashboard_words.origin(rows).startswith("measured on 2 cores, no GPU")


# The cost model. By hand: the base steps in 12.5 ms, of which it waits 1.5 ms for its 100 bytes.

BOTH = (("accumulation", 2), ("precision", "bf16"))
FAR = {"nproc": 1, "nodes": 2, "link_mbit": 100.0}


def test_a_combination_adds_the_compute_of_its_changes():
    table = summary.summary(grid_rows(both=15.0))
    said = cost_model.predict(table, "mlp", "2 ranks", BOTH, without="d")
    assert said["compute_ms"] == pytest.approx(11 + (4.75 - 11) + (23.5 - 11))
    assert said["wait_ms"] == pytest.approx(1.5) and said["ratio"] == pytest.approx(1.5)
    assert (said["sent_bytes"], said["peak_bytes"]) == pytest.approx((50, 500), rel=2e-3)
    assert said["peak_gradients_bytes"] == pytest.approx(125, rel=1e-2)
    scores = cost_model.scores(table)
    assert scores["cell"].tolist() == ["d"] and scores["error"].iloc[0] == pytest.approx(0, abs=1e-9)
    own = cost_model.predict(table, "mlp", "2 ranks", BOTH)  # measured: the cell itself is its only part
    assert own["step_ms"] == pytest.approx(18.75)


def test_a_link_is_predicted_from_its_base_and_the_changes_measured_on_one_machine():
    rows = rows_of("F", 50.0, "far", FAR)  # 62.5 ms, of which 11 ms compute
    table = summary.summary(pd.concat([grid_rows(), pd.DataFrame(rows)]))
    said = cost_model.predict(table, "mlp", "2 nodes of 1, 100 Mbit/s", (("precision", "bf16"),))
    assert said["compute_ms"] == pytest.approx(4.75)
    assert said["wait_ms"] == pytest.approx(50 * (62.5 - 11) / 100)


def test_rows_have_the_names_that_people_use():
    changes = {
        "DDP": {},
        "FSDP": {"strategy": "fsdp"},
        "DDP + top 1 %, 2 micro-batches": {"comm_hook": "topk", "accumulation": 2},
        "DDP + fp16 gradients": {"comm_hook": "fp16"},
        "DDP in fp16, recomputed": {"precision": "fp16", "recompute": "every"},
        "local SGD, every 4 steps": {"strategy": "local_sgd", "every": 4},
        "tensor + sequence parallel, 2 ranks": {"tensor": 2, "sequence_parallel": "on"},
        "tensor x context, 2 x 2 ranks": {"tensor": 2, "context": 2},
        "pipeline, 2 ranks, 4 micro-batches": {"pipeline": 2, "strategy": "ddp_naive", "accumulation": 4},
        "DDP, 4 experts on 2 ranks": {"experts": 4, "expert": 2},
        "DDP, flash attention": {"attention": "flash"},
    }
    for name, fields in changes.items():
        row = sweep.USUAL | {"model": "gpt"} | fields
        assert dashboard_words.what(row) == name
        assert dashboard_words.label(row | {"changes": tuple(fields.items())}) == name
    noise = sweep.USUAL | {"model": "gpt", "seed": 1, "changes": (("seed", 1),)}
    assert dashboard_words.label(noise) == "DDP, again with seed 1 (noise)"


def test_a_change_that_was_measured_over_the_link_has_that_wait():
    rows = rows_of("F", 50.0, "far", FAR, waits=51.0)
    rows += rows_of("G", 20.0, "far", FAR, waits=19.75, sent=50, precision="bf16")
    table = summary.summary(pd.concat([grid_rows(), pd.DataFrame(rows)]))
    said = cost_model.predict(table, "mlp", "2 nodes of 1, 100 Mbit/s", BOTH)
    assert said["wait_ms"] == pytest.approx(20.25)  # that of G, and not half of F's 51.5 ms
    assert said["compute_ms"] == pytest.approx(4.75 + 12.5)


def test_what_cannot_be_predicted_says_why():
    table = summary.summary(grid_rows())
    for changes in ((("strategy", "zero1"), ("comm_hook", "topk")), (("tensor", 2),)):
        with pytest.raises(ValueError) as refused:
            Experiment(**dict(changes))
        with pytest.raises(ValueError, match=re.escape(str(refused.value))):
            cost_model.predict(table, "mlp", "2 ranks", changes)
    with pytest.raises(ValueError, match="recompute=every was not measured for mlp"):
        cost_model.predict(table, "mlp", "2 ranks", (("recompute", "every"),))
    with pytest.raises(ValueError, match="no base of mlp was measured on 4 ranks"):
        cost_model.predict(table, "mlp", "4 ranks", BOTH)


def test_sharded_memory_follows_the_number_of_ranks():
    assert cost_model.on_ranks(0.5, 2, 4) == pytest.approx(0.25)  # ZeRO-1's states: 1/2 of 2, 1/4 of 4 ranks
    assert cost_model.on_ranks(1.0, 2, 4) == 1


def test_the_shipped_sweep_is_predicted_within_its_bounds():
    table = summary.summary(sweep.results(ROOT / "notebooks" / "dashboard"))
    scores = cost_model.scores(table)
    off = scores["error"].abs()
    # Not the largest: of 50 cells, noise alone can move the worst one anywhere.
    assert len(off) >= 20 and off.median() <= 0.15 and off.quantile(0.9) <= 0.3
    assert ((scores["nodes"] > 1) & (scores["comm_hook"] != "none")).sum() >= 4  # compression over a link, too
    memory = (scores["predicted_peak_bytes"] / scores["peak_bytes"] - 1).abs()
    assert memory.max() <= 0.1
    question = whatif.WhatIf(table, "gpt", None)
    question.world.value = "2 nodes of 1, 100 Mbit/s"
    question.fields["accumulation"].value = 2
    question.fields["comm_hook"].value = "topk"
    assert "not yet" in question.answer.value


# Conclusions


def concluded(rows):
    table, _ = dashboard.opened(rows)
    return conclusions.conclusions(table, "mlp", 2)


def test_conclusions_name_who_is_faster_than_noise_and_by_how_much():
    rows = (
        rows_of("n", 10.0, seed=1) + rows_of("F", 50.0, "far", FAR) + rows_of("H", 10.0, "far", FAR, comm_hook="topk")
    )
    rows += rows_of("h", 10.0, comm_hook="topk")
    far, machine, memory = concluded(pd.concat([grid_rows(), pd.DataFrame(rows)]))
    assert far.startswith("Over a link of 100 Mbit/s, DDP + top 1 % is 5.0 times as fast as DDP; ")
    assert far.endswith(
        "on this machine DDP + top 1 % is neither faster nor slower beyond noise (step x 1.00, 1.00 to 1.00)."
    )
    assert machine.startswith(
        "On this machine, DDP in bf16 is 2.00 times as fast as DDP. The largest ratios: DDP, 2 micro-batches "
        "(2 times). 2 of 4 techniques are neither faster nor slower beyond noise."
    )
    least = "DDP, 2 micro-batches needs least memory: 501 B a rank, 50 % of DDP; its step is "
    assert memory == f"{least}slower (step x 2.00)."
    few = concluded(grid_rows().query("round < 5"))
    assert few[0].startswith("On this machine, nothing is faster than DDP beyond noise.")
    assert "0 of 3 techniques are neither faster nor slower beyond noise; 3 have too few rounds for a verdict" in few[0]
    assert few[1] == f"{least}without a verdict, from 5 rounds."
    whole = grid_rows().query("accumulation == 1")
    assert concluded(whole)[1] == "DDP needs least memory: 1,001 B a rank."


def test_a_sentence_begins_with_a_capital():
    rows = rows_of("F", 50.0, "far", FAR) + rows_of("L", 100.0, "far", FAR, strategy="local_sgd")
    rows += rows_of("l", 10.0, peak=100, strategy="local_sgd")
    far, _, memory = concluded(pd.concat([grid_rows(), pd.DataFrame(rows)]))
    assert far.endswith("beyond noise. Local SGD takes 2 times as long.")
    assert memory.startswith("Local SGD needs least memory")


def test_a_loss_is_reached_after_seconds_or_sent_bytes():
    table, curves = dashboard.opened(grid_rows())
    time, sent = (conclusions.title_of(f"loss against {x}", table, curves) for x in ("time", "bytes"))
    assert time.endswith(": DDP in bf16 reaches 2.40 after 0.0750 s; DDP reaches 2.40 after 0.150 s")
    assert sent.endswith(": DDP in bf16 reaches 2.40 after 594 B sent; DDP reaches 2.40 after 1.17 KiB sent")


def test_the_noise_is_the_same_whichever_copy_is_the_base():
    slow = [rows_of("s", 11.5, bucket_cap_mb=1.0), rows_of("n", 12.0, seed=1), rows_of("n", 10 / 1.2, seed=1)]
    for noise in slow[1:]:  # the other copy is 1.2 times as slow, or as fast
        table, _ = dashboard.opened(pd.DataFrame(rows_of("a", 10.0) + slow[0] + noise))
        assert table["verdict"].tolist() == ["base", "cannot tell", "noise"]


def test_the_terminals_table_of_the_shipped_sweep_fits_and_pictures_have_at_most_12_rows():
    table, _ = dashboard.opened(sweep.results(ROOT / "notebooks" / "dashboard"))
    short = dashboard_words.short_table(table[table["model"] == "gpt"]).to_string(index=False)
    assert max(map(len, short.splitlines())) <= 100
    here = dashboard.first_state(table, "gpt", 2)
    for topic in dashboard_words.TOPICS:
        rows = dashboard.chosen(table, dashboard.replace(here, topic=topic))
        assert len(rows) <= dashboard.BARS and "DDP" in set(rows["label"])


def test_a_caption_says_what_is_drawn():
    state = dashboard.State(topic="strategies", model="gpt", ranks=2, link="this machine", picture="ratio to the base")
    assert dashboard_words.caption(state) == "Ratio to the base: strategies, GPT, 2 ranks, this machine"
    every = dashboard.State(model="gpt", picture="scaling", ranks=2)
    assert dashboard_words.caption(every) == "Scaling: GPT"
    assert dashboard_words.caption(dashboard.State()) == "Step time by phase"


def test_bars_are_blue_or_orange_only_beyond_noise():
    rows = [rows_of("n", 11.0, seed=1), rows_of("s", 10.5, bucket_cap_mb=1.0), rows_of("f", 9.5, strategy="zero1")]
    table, curves = dashboard.opened(pd.concat([grid_rows(), *map(pd.DataFrame, rows)]))
    figure = dashboard.draw(table, curves, dashboard.State(picture="ratio to the base", sort="ratio to the base"))
    bars = next(one for one in figure.axes[0].collections if isinstance(one, PolyCollection))
    names = [style.BLUE, style.GREY, style.GREY, style.GREY, style.GREY, style.ORANGE]
    assert [to_hex(colour) for colour in bars.get_facecolor()] == [to_hex(name) for name in names]
    assert "blue: faster, orange: slower, grey: unclear; lines: 95 %" in figure.axes[0].get_xlabel()


def test_a_title_does_not_name_the_noise():
    rows = rows_of("n", 2.0, seed=1, waits=0.1)
    table, curves = dashboard.opened(pd.concat([grid_rows(), pd.DataFrame(rows)]))
    for picture in dashboard.PICTURES:
        assert "noise)" not in conclusions.title_of(picture, table, curves)
        assert conclusions.title_of(picture, table[table["verdict"] == "noise"], curves)


def test_few_rounds_have_no_95_per_cent():
    table, _ = dashboard.opened(grid_rows().query("round < 5"))
    words = dashboard_words.in_words(table)
    assert "ratio (range)" in words and "ratio (95 %)" not in words
    assert words["ratio (range)"].iloc[1] == "0.50 (smallest 0.50, largest 0.50)"
    assert "measured ratio (range)" in whatif.errors(table)
    assert dashboard_words.in_words(dashboard.opened(grid_rows())[0])["ratio (95 %)"].iloc[1] == "0.50 (0.50 to 0.50)"


def shown():
    four = {"nproc": 4}
    far = {"nproc": 1, "nodes": 2, "link_mbit": 100.0}
    rows = (
        rows_of("A", 40.0, "two", four)
        + rows_of("F", 50.0, "three", far)
        + rows_of("H", 30.0, "three", far, comm_hook="topk")
    )
    rows += rows_of("z", 9.0, strategy="zero1") + rows_of("g", 90.0, "four", model="gpt")
    return dashboard.board(pd.concat([grid_rows(), pd.DataFrame(rows)]))


def figure(picture):
    board = shown()
    return dashboard.draw(board.cells.table, board.cells.curves, dashboard.State(picture=picture))


@pytest.mark.parametrize(
    ("name", "value", "cells"),
    [
        ("model", "gpt", "g"),
        ("strategy", "zero1", "z"),
        ("precision", "bf16", "bd"),
        ("compression", "topk", "H"),
        ("ranks", 4, "A"),
        ("link", "100 Mbit/s", "FH"),
    ],
)
def test_each_filter_changes_what_is_drawn_and_listed(name, value, cells):
    board = shown()
    before = board.image.value
    board.controls[name].value = value
    assert set(dashboard.chosen(board.cells.table, board.state)["cell"]) == set(cells)
    assert board.image.value != before
    assert board.image.value.count("<tr>") == 1 + len(cells)
    assert f"{len(cells)} of {len(board.cells.table)} cells" in board.image.value


@pytest.mark.parametrize("picture", list(dashboard.PICTURES))
def test_each_picture_is_drawn_and_is_another(picture):
    board = shown()
    board.controls["picture"].value = (
        "exposed communication" if picture == "step time by phase" else "step time by phase"
    )
    before = board.image.value.split("<p>")[0]
    board.controls["picture"].value = picture
    after = board.image.value.split("<p>")[0]
    assert after.startswith("<img") and 'alt="' in after
    assert after.split("src=")[1] != before.split("src=")[1]


def test_sorting_orders_the_table_and_nothing_left_is_one_line():
    board = shown()
    for sort, column in dashboard.SORTED.items():
        board.controls["sort"].value = sort
        values = dashboard.chosen(board.cells.table, board.state)[column].tolist()
        assert values == sorted(values, reverse=column in dashboard.MORE_IS_BETTER)
    board.controls["precision"].value = "bf16"
    board.controls["strategy"].value = "zero1"
    assert board.image.value == "<p>Nothing was measured that these controls let through.</p>"
    with pytest.raises(ValueError, match="Nothing was measured"):
        dashboard.draw(board.cells.table, board.cells.curves, board.state)


@pytest.mark.parametrize(
    ("base", "drawn"), [("c2", "c0 c1 c2 c3 c4 c5"), ("c7", "c0 c1 c2 c3 c4 c7"), ("x", "c0 c1 c2 c3 c4 c5")]
)
def test_the_base_is_among_the_lines_of_a_loss_picture(base, drawn):
    rows = pd.DataFrame({"cell": [f"c{n}" for n in range(9)], "base": base})
    assert list(dashboard_pictures.with_base(rows)["cell"]) == drawn.split()


def test_a_grid_of_500_cells_is_listed_and_drawn_in_part():
    rows = pd.concat(
        pd.DataFrame(rows_of(f"c{n}", 10.0 + n, f"l{n // 8}", rounds=2, lr=0.001 * (1 + n))) for n in range(500)
    )
    board = dashboard.board(rows)
    assert board.image.value.count("<tr>") == 1 + dashboard.LISTED
    assert "500 of 500 cells" in board.image.value and "the first 12 are drawn" in board.image.value
    assert len(board.image.value) < 100_000


def test_folders_that_hold_no_results_are_told_in_a_line_and_the_stored_sweep_is_shown(tmp_path):
    stored = ROOT / "notebooks" / "dashboard"
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "x.csv").write_text("cell,round\na")
    for folder, words in (("none", "has no results"), ("half", "not of this version's sweep")):
        rows, said = dashboard_words.rows_of(tmp_path / folder, stored)
        assert (
            len(rows)
            and re.match(r"the sweep that ships with the course, measured on \S+ at commit \w+ \(", said)
            and words in said
        )
    own = shutil.copytree(stored, tmp_path / "own")
    assert dashboard_words.rows_of(own, tmp_path)[1].startswith("your own sweep")


def test_the_stored_sweep_is_small_and_has_what_the_grid_says():
    stored = ROOT / "notebooks" / "dashboard"
    assert sum(path.stat().st_size for path in stored.glob("*.csv")) < 1_500_000
    main, more = (sweep.cells(sweep.read_grid(ROOT / "notebooks" / name)) for name in GRIDS)
    assert not main[1] and not more[1]  # no cell is refused
    main, more = ({cell.key for cell in possible} for possible, _ in (main, more))
    measured = set(sweep.results(stored)["cell"])
    assert main <= measured <= main | more


# The button


def compared(measure=lambda cells: pytest.fail("measured without the button")):
    """A board with boxes: two strategies and a hook on this machine, one of them over a link too."""
    far = {"nproc": 1, "nodes": 2, "link_mbit": 100.0}
    rows = rows_of("a", 10.0) + rows_of("z", 9.0, strategy="zero1") + rows_of("t", 8.0, comm_hook="topk")
    rows += rows_of("F", 50.0, "far", far)
    state = dashboard.State(model="mlp", link="this machine")
    return dashboard.board(pd.DataFrame(rows), state, measure, buckets=[5.0], model=["gpt"])


def test_boxes_choose_what_is_compared_and_measure_nothing():
    board = compared()
    assert list(board.controls["whats"]) == ["DDP", "ZeRO-1", "DDP + top 1 %"]
    assert not {"strategy", "ranks"} & set(board.controls) and "3 of 4 cells" in board.image.value
    board.controls["whats"]["ZeRO-1"].value = False
    assert "2 of 4 cells" in board.image.value and ">ZeRO-1<" not in board.image.value
    board.controls["link"].value = "100 Mbit/s"
    assert "Not measured for this choice: DDP + top 1 %." in board.image.value
    for box in board.controls["whats"].values():
        box.value = False
    assert board.image.value == "<p>Tick at least one strategy.</p>"


def test_a_board_without_measure_has_no_boxes_and_no_button():
    assert "whats" not in shown().controls and not hasattr(shown(), "button")


def test_the_button_measures_what_is_ticked_beside_its_base_and_adds_the_rows():
    asked = []

    def measure(cells):
        asked.extend(cells)
        return pd.concat(
            pd.DataFrame(rows_of(cell.key, 70.0, "new", cell.world, **cell.experiment.to_dict())) for cell in cells
        )

    board = compared(measure)
    board.controls["whats"]["DDP"].value = False
    board.controls["link"].value, board.controls["buckets"].value = "100 Mbit/s", 5.0
    assert board.image.value == (f"<p>{dashboard.NOTHING} Not measured for this choice: ZeRO-1; DDP + top 1 %.</p>")
    board.button.click()
    assert board.message.value == "measured: 72 rows added"
    base, *others = [(cell.experiment.strategy, cell.experiment.comm_hook) for cell in asked]
    assert base == ("ddp_bucketed", "none") and others == [("zero1", "none"), ("ddp_bucketed", "topk")]
    assert [cell.experiment.bucket_cap_mb for cell in asked] == [25.0, 5.0, 5.0]
    assert {(cell.nproc, cell.nodes, cell.link_mbit) for cell in asked} == {(1, 2, 100.0)}
    assert "2 of 7 cells" in board.image.value and "Not measured" not in board.image.value


def test_a_model_that_was_not_measured_can_be():
    board = compared(lambda cells: rows_of("new", 1.0, "new", model=cells[0].experiment.model))
    board.controls["model"].value = "gpt"
    cells = dashboard.to_measure(board.cells.table, board.state)
    assert [cell.experiment.model for cell in cells] == ["gpt"] * 3 and cells[0].link_mbit is None


def test_the_button_asks_for_one_model_and_one_link():
    board = compared()
    board.controls["link"].value = dashboard.ANY
    board.button.click()
    assert board.message.value.startswith("<b>ValueError</b>: choose one model and one link")


def test_what_is_seen_without_a_kernel_comes_before_the_board(monkeypatch):
    order = []
    monkeypatch.setattr(dashboard, "present", lambda *_: order.append("figure"))
    monkeypatch.setattr(dashboard, "show_table", lambda _, caption: order.append(caption))
    monkeypatch.setattr(dashboard.controls, "show", lambda _: order.append("controls"))
    dashboard.explorer(grid_rows(), dashboard.State(), "measured", print)
    assert [order[0], order[2]] == ["figure", "controls"]
    assert order[1].startswith("measured; step: median") and "of it: parameters · gradients" in order[1]


def test_controls_that_cannot_be_drawn_say_where_they_are(monkeypatch):
    bundles = []
    monkeypatch.setattr(dashboard.controls, "display", lambda bundle, raw: bundles.append(bundle))
    panel = shown().show().panel
    assert bundles[0]["application/vnd.jupyter.widget-view+json"]["model_id"] == panel.model_id
    assert bundles[0]["text/plain"] == "Controls: run this notebook in JupyterLab."


@pytest.mark.slow
def test_a_comparison_on_real_ranks_becomes_rows_of_the_board():
    tiny = Experiment(model="mlp", batch_size=8)
    cells = {"one": sweep.Cell(tiny), "two": sweep.Cell(tiny.replace(strategy="zero1"))}
    run = compare({label: cell.experiment for label, cell in cells.items()}, rounds=2, device="cpu", quiet=True)
    table, _ = dashboard.opened(sweep.as_rows(cells, run))
    assert table["label"].tolist() == ["DDP", "ZeRO-1"] and (table["pairs"] == 2).all()
    assert table["cell"].tolist() == [cell.key for cell in cells.values()]


# What if


def test_a_prediction_stands_beside_what_was_measured():
    question = whatif.WhatIf(summary.summary(grid_rows(both=12.0)), "mlp", None)
    assert question.answer.value.count("not yet") == 0  # the base itself was measured
    question.fields["precision"].value = "bf16"
    assert "by no other cell" in question.answer.value and "0.50" in question.answer.value
    question.fields["accumulation"].value = 2
    for words in ("step time / base", "1.50", "1.20", "+25 %", "of it, gradients"):
        assert words in question.answer.value
    assert question.button.disabled  # there is nothing to measure
    missing = whatif.WhatIf(summary.summary(grid_rows().query("cell != 'd'")), "mlp", None)
    missing.fields["precision"].value, missing.fields["accumulation"].value = "bf16", 2
    assert "not yet" in missing.answer.value and not missing.button.disabled
    assert whatif.errors(summary.summary(grid_rows(both=12.0)))["error"].tolist() == ["+25 %"]


def test_an_impossible_pair_is_refused_in_the_words_of_experiment_and_cannot_be_measured():
    rows = rows_of("z", 9.0, strategy="zero1") + rows_of("t", 8.0, comm_hook="topk")
    question = whatif.WhatIf(summary.summary(pd.concat([grid_rows(), pd.DataFrame(rows)])), "mlp", None)
    question.fields["strategy"].value, question.fields["comm_hook"].value = "zero1", "topk"
    assert "needs one of the strategies ddp_naive" in question.answer.value and question.button.disabled


def test_all_rows_of_the_errors_have_the_same_columns(monkeypatch):
    found = cost_model.scores(summary.summary(grid_rows(both=12.0)))
    monkeypatch.setattr(whatif, "scores", lambda table: pd.concat([found, found]))
    twice = whatif.errors(None)
    assert len(twice) == 2 and twice.iloc[0].equals(twice.iloc[1])


def test_the_worst_prediction_is_named_with_its_ranks_once(monkeypatch):
    found = cost_model.scores(summary.summary(grid_rows(both=12.0))).assign(changes=[()])
    for tensor, where in ((1, "DDP, 2 ranks"), (2, "tensor parallel, 2 ranks")):
        monkeypatch.setattr(whatif, "scores", lambda table, n=tensor: found.assign(tensor=n))
        assert whatif.in_a_sentence(None).endswith(f"the worst 25 % ({where}).")


def asked(folder, **turns):
    """A what-if over a sweep that was measured here, set to a combination that was not."""
    tiny = {"model": "mlp", "size": "tiny", "batch_size": 8, "nproc": 2}
    grids = [tiny, tiny | {"accumulation": 2}, tiny | {"strategy": "zero1"}]
    table = summary.summary(sweep.sweep(grids, folder / "own", rounds=2, steps_per_round=1, device="cpu", quiet=True))

    def measured(grids, bar):
        return sweep.sweep(grids, folder / "whatif", steps_per_round=1, device="cpu", quiet=True, bar=bar, **turns)

    question = whatif.WhatIf(table, "mlp", measured)
    question.fields["strategy"].value, question.fields["accumulation"].value = "zero1", 2
    return question


@pytest.mark.slow
def test_the_button_measures_the_missing_cell_beside_its_base(tmp_path):
    question = asked(tmp_path, rounds=6)
    assert "not yet" in question.answer.value
    question.button.click()
    question.thread.join(200)
    assert question.message.value == "measured" and "not yet" not in question.answer.value
    assert question.button.disabled and question.stop_button.disabled
    rows = sweep.results(tmp_path / "whatif")
    assert rows[["strategy", "accumulation"]].drop_duplicates().values.tolist() == [["ddp_bucketed", 1], ["zero1", 2]]


@pytest.mark.slow
def test_stop_ends_the_ranks_and_the_next_press_measures(tmp_path):
    question = asked(tmp_path, rounds=100_000)
    before = psutil.Process().children(recursive=True)
    question.button.click()
    thread = question.thread
    wait_for(lambda: question.progress.widget.value > 0)
    ranks = [process for process in psutil.Process().children(recursive=True) if process not in before]
    assert len(ranks) >= 2
    question.stop_button.click()
    thread.join(60)
    assert not thread.is_alive() and question.message.value == "stopped: no rank is left"
    wait_for(lambda: not any(rank.is_running() for rank in ranks))
    assert not list((tmp_path / "whatif").glob("*.csv"))
    assert not question.button.disabled and "not yet" in question.answer.value


def wait_for(good):
    deadline = time.monotonic() + 100
    while not good() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert good()


def test_a_failure_is_a_line_beside_the_button():
    def fails(grids, bar):
        raise ValueError("another sweep writes to runs\nmore")

    question = whatif.WhatIf(summary.summary(grid_rows().query("cell != 'd'")), "mlp", fails)
    question.fields["precision"].value, question.fields["accumulation"].value = "bf16", 2
    question.button.click()
    wait_for(lambda: not question.running())
    assert question.message.value == "<b>ValueError</b>: another sweep writes to runs"
    assert threading.active_count() < 50


# The notebook


@pytest.mark.slow
def test_run_as_a_batch_it_measures_and_leaves_pictures_and_a_csv(tmp_path):
    grid = tmp_path / "small.yaml"
    grid.write_text(
        "- &base {model: [mlp], batch_size: [8]}\n- {<<: *base, strategy: [zero1], nproc: [1, 2]}\n- *base\n"
    )
    values = {"measure": True, "model": "mlp", "rounds": 1, "steps_per_round": 1, "device": "cpu"}
    values |= {"grid": str(grid), "folder": str(tmp_path / "own")}
    kernel = explorers.kernel()
    notebook = batch.find("dashboard")
    outcome = batch.execute(notebook, tmp_path / "out", values, timeout=250, progress=False, kernel=kernel)
    assert not outcome.error, outcome.error
    table = pd.read_csv(tmp_path / "out" / "figures" / "dashboard.csv")
    assert (
        set(table["strategy"]) == {"ddp_bucketed", "zero1"} and len(table) == 3 and np.isfinite(table["step_ms"]).all()
    )
    assert len(list((tmp_path / "out" / "figures").glob("dashboard-*.png"))) >= 5
    assert re.search(r"3 cells: your own sweep", "".join(texts(tmp_path / "out" / "dashboard.ipynb")))


def texts(path):
    for cell in batch.code_cells(nbformat.read(path, 4)):
        yield from (output.get("text", "") for output in cell.outputs)
