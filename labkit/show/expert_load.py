"""The load of experts: how many rows each got, step by step, over an even share.

    none      expert 0  ########......        dark: none of the rows; bright: many times its share
              expert 1  ..............
    loss      expert 0  ..::::::::::::        one scale for all runs
              expert 1  ..::::::::::::
                        step ->

A frame has a row per run and step; its column `load` holds the list of the experts' rows. 1 is
balance; as much as there are experts: all rows to one.
"""

import numpy as np

from labkit.show import style

COLOURS = "cividis"  # as bright in grey, and distinct for colour-blind readers


def shares(frame):
    """{run: [steps, experts]}: each expert's rows over an even share. ValueError without rows."""
    if frame.empty:
        raise ValueError("no load was recorded, so there is nothing to draw")
    loads = {run: np.array(rows["load"].tolist()) for run, rows in frame.groupby("run", sort=False)}
    return {run: load / load.mean(1, keepdims=True) for run, load in loads.items()}


def load_map(frame, title=None):
    """Figure: a panel per run, experts over steps, coloured by their load over an even share."""
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
