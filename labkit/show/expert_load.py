"""The load of experts: how many rows each got, step by step, over an even share.

    none      expert 0  ########......        dark: none of the rows; bright: many times its share
              expert 1  ..............
    loss      expert 0  ..::::::::::::        one scale for all runs
              expert 1  ..::::::::::::
                        step ->

A frame has a row per run and step; its column `load` is the list of the experts' numbers of rows.
A value of 1 is balance; with n experts, n means that one of them got all rows.
"""

import numpy as np

from labkit.show import style

COLOURS = "cividis"  # also reads in grey, and for colour-blind readers


def shares(frame):
    """Return {run: [steps, experts]}: rows over an even share. ValueError without rows."""
    if frame.empty:
        raise ValueError("no load was recorded, so there is nothing to draw")
    loads = {run: np.array(rows["load"].tolist()) for run, rows in frame.groupby("run", sort=False)}
    return {run: load / load.mean(1, keepdims=True) for run, load in loads.items()}


def load_map(frame, title=None):
    """Return a Figure with a panel per run: experts over steps, coloured by their load."""
    runs = shares(frame)
    top = max(load.max() for load in runs.values())
    with style.look():
        figure, grid = style.new_figure(
            9.0, 1.2 + 1.35 * len(runs), len(runs), sharex=True, squeeze=False
        )
        for axes, (run, load) in zip(grid[:, 0], runs.items(), strict=True):
            image = axes.imshow(
                load.T, COLOURS, aspect="auto", interpolation="nearest", vmin=0, vmax=top
            )
            axes.set_title(run, loc="left", weight="bold", size=10.5)
            axes.set_ylabel("expert")
            axes.set_yticks([0, load.shape[1] - 1])
            axes.grid(False)
        axes.set_xlabel("step")
        bar = figure.colorbar(image, ax=list(grid[:, 0]), pad=0.02)
        bar.set_label("rows / an even share")
        style.entitle(figure, title)
    return figure
