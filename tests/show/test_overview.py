import pandas as pd

from labkit.show import style
from labkit.show.overview import PANELS, overview


def test_a_panel_per_metric_in_a_fixed_order_and_a_loss_curve_per_strategy():
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
    assert len(losses.lines) == 3 and losses.get_xlabel() == "step"


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
