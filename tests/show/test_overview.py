import pandas as pd
import pytest

from labkit.show import style
from labkit.show.overview import AGREES, PANELS, agreement, overview


def test_a_panel_per_metric_in_a_fixed_order_and_one_line_for_losses_that_agree():
    rows = [
        {"strategy": strategy, "rank": 0, "step": step, "loss": 2.0 / step, **dict.fromkeys(PANELS, 10.0 * step)}
        for strategy in ("torch_ddp", "ddp_naive", "single")  # as shuffled turns leave them
        for step in (1, 2, 3)
    ]
    figure = overview(pd.DataFrame(rows), "title")
    losses, *panels = figure.axes
    assert losses.get_ylabel() == "loss (cross-entropy, nats)"
    assert len(panels) == len(PANELS)
    assert [label.get_text() for label in panels[0].get_yticklabels()] == [
        style.name(strategy) for strategy in ("single", "ddp_naive", "torch_ddp")
    ]
    assert all("(" in axes.get_title(loc="left") for axes in panels)  # every panel says its unit
    assert len(losses.lines) == 1 and losses.get_xlabel() == "step"
    assert [text.get_text() for text in losses.texts] == ["all 3"]
    assert losses.get_title(loc="left") == "training loss: all 3 agree within 0 nats"


def test_a_strategy_without_values_of_a_metric_is_named_and_the_others_are_drawn():
    """As fully_shard on a GPU, whose waiting nobody measures."""
    rows = [
        {"strategy": strategy, "rank": 0, "step": step, "loss": 1.0, **dict.fromkeys(PANELS, 10.0)}
        for strategy in ("fsdp", "torch_fsdp")
        for step in (1, 2)
    ]
    frame = pd.DataFrame(rows)
    for absent in (["torch_fsdp"], ["fsdp", "torch_fsdp"]):
        frame.loc[frame["strategy"].isin(absent), "exposed_comm_ms"] = float("nan")
        panel = overview(frame, "title").axes[1 + PANELS.index("exposed_comm_ms")]
        words = [text.get_text() for text in panel.texts]
        assert words.count("not measured") == len(absent) and len(panel.patches) == 2 - len(absent)


def trained(**offsets):
    """Losses 4, 3, 2 of one process, and of each strategy those plus its offset; two ranks around their mean."""
    losses = [
        {"strategy": strategy, "rank": rank, "step": step, "loss": 5.0 - step + offset + 0.1 * (rank - 0.5)}
        for strategy, offset in {**offsets, "single": 0.0}.items()
        for step in (1, 2, 3)
        for rank in (0, 1)
    ]
    return pd.DataFrame(losses).assign(**dict.fromkeys(PANELS, 10.0))


def test_a_strategy_whose_loss_differs_visibly_has_a_named_line():
    frame = trained(topk=0.4, onebit=-0.1, fp16=0.001, bf16=-0.002)
    losses, *_ = overview(frame).axes
    assert [text.get_text() for text in losses.texts] == ["the other 3", "1 bit", "top 1 %"]
    assert [line.get_color() for line in losses.lines] == [style.INK, style.COLOURS["onebit"], style.COLOURS["topk"]]
    assert losses.lines[0].get_ydata() == pytest.approx([4.0, 3.0, 2.0])
    assert losses.lines[2].get_ydata() == pytest.approx([4.4, 3.4, 2.4])
    words = "training loss: 3 of 5 agree within 0.003 nats; top 1 % differs most, by 0.4"
    assert losses.get_title(loc="left") == agreement(frame) == words


def test_losses_agree_up_to_a_part_of_the_range():
    edge = 2.0 * AGREES
    assert agreement(trained(fp16=0.99 * edge)).startswith("training loss: all 2 agree within 0.04 nats")
    assert agreement(trained(fp16=1.01 * edge)) == "training loss"


def test_a_strategy_that_diverges_does_not_agree():
    frame = trained(fp16=0.0, ddp_naive=0.0)
    frame.loc[(frame["strategy"] == "fp16") & (frame["step"] > 1), "loss"] = float("inf")
    losses, *_ = overview(frame).axes
    assert [text.get_text() for text in losses.texts] == ["the other 2", "fp16"]
    assert len(losses.lines[1].get_xdata()) == 1
    assert overview(frame.assign(loss=float("nan"))).axes[0].lines[:] == []
