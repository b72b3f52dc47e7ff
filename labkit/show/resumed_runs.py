"""Losses of resumed runs on those of an uninterrupted one, and below their difference.

loss |\\    :  :         :            : a mark: saved, killed, stopped
     | \\___:__:___      :            the runs lie on one another, the first is the broadest
     |      :  :   \\____:________
off  |- - - : -: - - - -: - - - - -  what rounding alone may do
   0 |______:__:________:  __-- -    logarithmic above, and 0: the same in all bits
"""

import numpy as np
from matplotlib.ticker import MaxNLocator, NullLocator

from labkit.show import style
from labkit.show.curves import draw_runs, line_widths

LEAST = 1e-8  # below it the axis is linear, so that it contains 0


def differences(frame):
    """Return the frame with `off`: the relative difference from the first run's loss in that step.

    frame: run, step, loss; of the first run one row per step, of others one each time that a step
    was taken. Raises ValueError without rows.
    """
    if frame.empty:
        raise ValueError("no losses to draw")
    first = frame[frame["run"] == frame["run"].iloc[0]].set_index("step")["loss"]
    wanted = first[frame["step"]].to_numpy()
    return frame.assign(off=np.abs(frame["loss"].to_numpy() - wanted) / np.abs(wanted))


def broken(frame, marks=(), rounding=None, title=None):
    """Return a Figure of the losses of all runs; below, the differences from the first run.

    frame: as in differences. marks: [(step, words, "left" or "right" of its line)]. rounding: the
    relative difference that rounding alone may cause, drawn across.
    """
    frame = differences(frame)
    runs = list(dict.fromkeys(frame["run"]))
    colours = style.palette(runs)
    with style.look():
        figure, (above, below) = style.new_figure(
            9.0, 5.4, 2, 1, sharex=True, height_ratios=(1.5, 1)
        )
        widths = line_widths(runs, step=2.0)
        by_step = frame.groupby(["run", "step"], as_index=False)
        draw_runs(above, by_step.last(), "step", "loss", "run", colours, widths, str)
        others = {run: colours[run] for run in runs[1:]}
        draw_runs(below, by_step["off"].max(), "step", "off", "run", others, widths[1:])
        finish(above, below, frame["off"].max(), rounding)
        for at, words, side in marks:
            mark(above, below, at, words, side)
        look = {"loc": "outside lower left", "ncols": len(runs), "columnspacing": 1.6}
        figure.legend(*above.get_legend_handles_labels(), **look)
        style.entitle(figure, title)
    return figure


def finish(above, below, most, rounding):
    above.set_ylabel(style.axis_label("loss"))
    below.set_ylabel("relative difference")
    below.set_xlabel("step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.set_yscale("symlog", linthresh=LEAST, linscale=0.6)
    below.yaxis.set_minor_locator(NullLocator())
    powers = [10.0**power for power in range(-8, 1, 2)]
    top = max(most, rounding or 0, powers[1])
    shown = [power for power in powers if power <= 10 * top]
    below.set_yticks([0.0, *shown], ["0", *(f"$10^{{{round(np.log10(p))}}}$" for p in shown)])
    below.set_ylim(-0.3 * LEAST, 12 * top)
    if rounding:
        below.axhline(rounding, color=style.RED, linewidth=1.1, linestyle=(0, (4, 3)))
        look = {
            "ha": "right",
            "va": "bottom",
            "color": style.RED,
            "xycoords": ("axes fraction", "data"),
        }
        style.beside(below, f"rounding: {rounding:.1e}", (1, rounding), (0, 2), **look)
    for axes in (above, below):
        axes.grid(axis="y")
        axes.margins(x=0.01)


def mark(above, below, at, words, side):
    """Draw a line across both axes, with its words above them."""
    for axes in (above, below):
        axes.axvline(at, color=style.FAINT, linewidth=0.9, linestyle=(0, (3, 3)), zorder=1)
    look = {"ha": "right" if side == "left" else "left", "va": "bottom", "color": style.FAINT}
    look["xycoords"] = ("data", "axes fraction")
    style.beside(above, words, (at, 1), (-2 if side == "left" else 2, 2), **look)
