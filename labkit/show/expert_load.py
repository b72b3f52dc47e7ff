"""The load of experts: how many rows each got, step by step, over an even share.

    none      expert 0  ########......        dark orange: many times its share; dark purple: no row
              expert 1  ..............        white: its share
    loss      expert 0  ..::::::::::::        one scale for all runs
              expert 1  ..::::::::::::
                        step ->

A frame has a row per run and step; its column `load` is the list of the experts' numbers of rows.
A value of 1 is balance; with n experts, n means that one of them got all rows.
"""

import numpy as np
from matplotlib.colors import TwoSlopeNorm

from labkit.show import style

COLOURS = "PuOr_r"  # diverging, also for colour-blind readers


def shares(frame):
    """Return {run: [steps, experts]}: rows over an even share. ValueError without rows."""
    if frame.empty:
        raise ValueError("no load was recorded, so there is nothing to draw")
    loads = {run: np.array(rows["load"].tolist()) for run, rows in frame.groupby("run", sort=False)}
    return {run: load / load.mean(1, keepdims=True) for run, load in loads.items()}


def load_map(frame, title=None):
    """Return a Figure with a panel per run: experts over steps, coloured by their load.

    White is an even share. The scale ends at half of the rows, 2 even shares at least.
    """
    runs = shares(frame)
    experts = max(load.shape[1] for load in runs.values())
    scale = TwoSlopeNorm(1, 0, max(2, experts / 2))
    with style.look():
        figure, grid = style.new_figure(
            9.0, 1.2 + 1.35 * len(runs), len(runs), sharex=True, squeeze=False
        )
        for axes, (run, load) in zip(grid[:, 0], runs.items(), strict=True):
            image = axes.imshow(load.T, COLOURS, scale, aspect="auto", interpolation="nearest")
            axes.set_title(run, loc="left", weight="bold", size=10.5)
            axes.set_ylabel("expert")
            axes.set_yticks([0, load.shape[1] - 1])
            axes.grid(False)
        axes.set_xlabel("step")
        bar = figure.colorbar(image, ax=list(grid[:, 0]), pad=0.02, extend="max")
        bar.set_label("rows / an even share")
        style.entitle(figure, title)
    return figure
