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
    assert len(panels) == len(PANELS)
    assert [label.get_text() for label in panels[0].get_yticklabels()] == [
        style.name(strategy) for strategy in ("single", "ddp_naive", "torch_ddp")
    ]
    assert all("(" in axes.get_title(loc="left") for axes in panels)  # every panel says its unit
    assert len(losses.lines) == 3 and losses.get_xlabel() == "step"
