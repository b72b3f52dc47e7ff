"""Units while they are unsharded: recorded on real ranks, drawn, and in an explorer."""

from functools import partial

import pandas as pd
import pytest
import torch

from labkit import comm, models
from labkit.fsdp import FSDP
from labkit.measure.residency import watch_units
from labkit.measure.timeline import Timeline
from labkit.memory.memory_tracker import KINDS
from labkit.show import explorer, fsdp_explorer, publish, style
from labkit.show.memory_timeline import memory_timelines, thinned
from labkit.show.unit_residency import most_whole, residency, units_of

UNITS = ("root", "blocks.0", "blocks.1")


def watched(rank, world_size, mode, prefetch):
    model = FSDP(models.build("gpt"), models.unit("gpt"), shard=mode, prefetch=prefetch)
    tokens = torch.randint(256, (1, 9))
    for _ in range(2):  # the second time a fresh timeline takes the place of the first
        timeline = Timeline(rank)
        labels = watch_units(model, timeline)
        with timeline.span("forward"), comm.record() as events:
            models.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    timeline.add_comm(events, labels)
    return [event.op for event in events], labels, timeline.rows(), [flat.flat.nbytes for flat in model.flats]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "prefetch", "times"), [("full", 1, 2), ("full", 0, 2), ("grad_op", 1, 1)])
def test_each_unit_is_whole_once_in_forward_and_once_in_backward(ranks, mode, prefetch, times):
    for rank, (ops, labels, rows, sizes) in enumerate(ranks(2, watched, mode=mode, prefetch=prefetch)):
        kinds = {"all_gather": "gather", "reduce_scatter": "reduce"}
        assert [label.split()[0] for label in labels] == [kinds[op] for op in ops], (
            f"rank {rank}"
        )  # a label for each message, in order
        assert [labels.count(f"gather {unit}") for unit in UNITS] == [1, times, times], f"rank {rank}"
        assert [labels.count(f"reduce {unit}") for unit in UNITS] == [1, 1, 1], f"rank {rank}"
        whole = [row for row in rows if row["lane"] == "whole"]
        assert [sum(row["name"] == unit for row in whole) for unit in UNITS] == [1, times, times], f"rank {rank}"
        assert {row["name"]: row["payload_bytes"] for row in whole} == dict(zip(UNITS, sizes, strict=True)), (
            f"rank {rank}"
        )
        frame = Timeline.from_rows(rows).frame()
        # The root and the unit at work, and the next; there are two blocks only.
        count, held = most_whole(frame[frame["lane"] == "whole"])
        assert (count, held) == ((2, sizes[0] + sizes[1]) if prefetch == 0 else (3, sum(sizes))), f"rank {rank}"
        assert publish.png(residency({"a step": frame}, "title"), dpi=40), f"rank {rank}"


def step(ahead, offset=0.0):
    """Rows of Timeline.rows(): root and two units; with `ahead` they are whole at once."""
    spans = [
        ("forward", "compute", 0, 40, {}),
        ("gather root", "network", 0, 5, {"waited": 0.0}),
        ("gather 0", "network", 5, 10, {"waited": 0.005}),
        ("reduce 0", "network", 30, 38, {"waited": 0.0}),
        ("root", "whole", 0, 38, {"payload_bytes": 10}),
        ("0", "whole", 5, 20, {"payload_bytes": 100}),
        ("1", "whole", 10 if ahead else 20, 30, {"payload_bytes": 100}),
    ]
    return [
        {"rank": 0, "name": name, "lane": lane, "start": offset + start / 1e3, "end": offset + end / 1e3, **info}
        for name, lane, start, end, info in spans
    ]


def words(figure):
    return [text.get_text() for axes in figure.axes for text in (*axes.texts, *axes.get_yticklabels())]


def test_a_row_per_unit_and_what_is_whole_at_most():
    frames = {name: Timeline.from_rows(step(ahead, 7.0)).frame() for name, ahead in (("none", False), ("one", True))}
    assert units_of(frames["none"]) == ["root", "0", "1"]
    figure = residency(frames)
    shown = words(figure)
    assert "at most 2 complete:\n110 B" in shown and "at most 3 complete:\n210 B" in shown
    assert shown.count("gather") == shown.count("root") == 2 and "exposed 5 ms" in shown


def test_a_step_without_units_is_refused():
    rows = [row for row in step(True) if row["lane"] != "whole"]
    with pytest.raises(ValueError, match="residency needs spans in the lane 'whole'"):
        residency({"a step": Timeline.from_rows(rows).frame()})


def samples(*totals):
    return [(float(moment), {**dict.fromkeys(KINDS, 0), "parameters": size}) for moment, size in enumerate(totals)]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_saws_share_one_scale(count):
    figure = memory_timelines({f"run_{i}": samples(1, 5 + i, 2) for i in range(count)}, "title")
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown] == [f"run_{i}" for i in range(count)]
    assert len({axes.get_ylim() for axes in shown}) == 1
    assert [text.get_text() for axes in shown for text in axes.texts] == [f"peak {5 + i} B" for i in range(count)]
    assert publish.png(figure, dpi=40)


def test_what_the_eye_cannot_tell_apart_is_left_out():
    many = samples(*([1000] * 50), 1001, 500, 1002, 1000)
    assert [number for number, _ in thinned(many)] == [1, 52, 53, 54]  # first, fall, peak, last


def test_a_run_without_samples_is_refused():
    with pytest.raises(ValueError, match="no samples to draw"):
        memory_timelines({"a": samples(1, 2), "b": []})


def sweep(spans=True):
    rows = []
    for unit, size in (("a block", 1), ("two blocks", 2)):
        for mode in ("full", "grad_op"):
            for ahead in (0, 1):
                for number in range(3):
                    held = 1024 * (8 if mode == "grad_op" else size * (1 + ahead))
                    about = {"held_bytes": held, "step_ms": 50.0 - 10 * ahead + number, "exposed_ms": 5.0}
                    row = {"unit": unit, "mode": mode, "prefetch": ahead, **about}
                    rows.append(row | ({"spans": step(ahead)} if spans else {}))
    return pd.DataFrame(rows)


FIRST = fsdp_explorer.State("a block", "full", 1)


def test_one_sentence_says_what_a_choice_costs():
    text = fsdp_explorer.takeaway(sweep(), FIRST)
    assert text == (
        "units of a block, full sharding, 1 ahead: at most 2 KiB of parameters on a rank, a step in 41 ms, "
        "of which 5 ms exposed; of the other 7 choices 1 hold less."
    )


def test_the_ring_is_at_the_choice():
    frame = sweep()
    before = frame.copy(deep=True)
    figure = fsdp_explorer.draw(frame, FIRST)
    assert figure.get_suptitle() == "units of a block, full sharding, 1 ahead: 41 ms a step, at most 2 KiB held"
    assert figure.axes[0].get_xlabel() == "parameters held at most, shards included (KiB)"
    rings = figure.axes[0].collections
    assert [tuple(ring.get_offsets()[0]) for ring in rings] == [(2.0, 41.0)]
    assert {"0 ahead", "1 ahead"} == {text.get_text() for text in figure.axes[0].texts}
    pd.testing.assert_frame_equal(frame, before)


@pytest.mark.slow
def test_controls_redraw_from_saved_rows():
    for spans, images in ((True, 2), (False, 1)):  # the step itself is drawn where it was kept
        shown = fsdp_explorer.explorer(sweep(spans), "emulated", FIRST)
        assert shown.image.value.startswith("<p>Move a control")
        seen = set()
        for change in (
            partial(setattr, shown.controls["unit"], "value", "two blocks"),
            partial(setattr, shown.controls["mode"], "value", "grad_op"),
            partial(setattr, shown.controls["prefetch"], "value", 0),
        ):
            change()
            assert shown.image.value.count("<img") == images and 'alt="units of two blocks' in shown.image.value
            seen.add(shown.image.value)
        assert len(seen) == 3 and shown.state == fsdp_explorer.State("two blocks", "grad_op", 0)


def test_what_is_seen_without_a_kernel_comes_first(monkeypatch):
    order = []
    for place, name in ((explorer, "present"), (explorer, "table"), (fsdp_explorer.controls, "show")):
        monkeypatch.setattr(place, name, lambda *_, name=name: order.append(name))
    shown = fsdp_explorer.explorer(sweep(), "emulated")
    assert order == ["present", "table", "show"] and shown.state == fsdp_explorer.State("a block", "full", 0)
    with pytest.raises(ValueError, match=r"a sweep needs the columns .*; missing: mode, held_bytes"):
        fsdp_explorer.explorer(sweep().drop(columns=["mode", "held_bytes"]), "emulated")


def test_the_table_has_a_column_for_each_prefetch():
    table = fsdp_explorer.small(sweep())
    assert list(table) == ["unit", "mode", "held, 0 ahead", "held, 1 ahead", "step, 0 ahead", "step, 1 ahead"]
    assert table.iloc[0].tolist() == ["a block", "full sharding", "1 KiB", "2 KiB", "51 ms", "41 ms"]
    assert style.name("held, 0 ahead") == "held, 0 ahead"
