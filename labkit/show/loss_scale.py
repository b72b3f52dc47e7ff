"""The loss scale over a training: steps up, halvings, and the steps that were skipped.

2^18      ___x
2^17  ___|   |____x            x: a gradient overflowed, the step is skipped, the scale is halved
2^16         :    |_______     one line per run or rank; equal lines cover each other
"""

from labkit.show import style
from labkit.show.curves import close, line_widths


def loss_scales(frame, by="run", title=None):
    """Return a Figure of the loss scale over steps, a line per `by`; skipped steps are marked.

    frame: step, scale (used in that step), skipped (bool), `by`. Equal lines are nested. Raises
    ValueError without rows.
    """
    if frame.empty:
        raise ValueError("no steps to draw")
    groups = list(dict.fromkeys(frame[by]))
    colours = style.palette(groups)
    with style.look():
        figure, axes = style.new_figure(8.5, 4.0)
        ends = []
        for one, width in zip(groups, line_widths(groups, 1.8, 1.3), strict=True):
            mine = frame[frame[by] == one].sort_values("step")
            steps = mine["step"].to_numpy()
            scales = mine["scale"].to_numpy()
            axes.step(steps, scales, where="post", color=colours[one], linewidth=width)
            skipped = mine["skipped"].to_numpy(bool)
            look = {"marker": "X", "linestyle": "", "zorder": 4, "markeredgewidth": 0}
            for colour, size in ((style.RED, 7), (colours[one], 3)):
                axes.plot(steps[skipped], scales[skipped], color=colour, markersize=size, **look)
            ends.append((steps[-1], scales[-1], style.name(one), colours[one]))
        axes.set_yscale("log", base=2)
        axes.set_xlabel("step")
        axes.set_ylabel("loss scale")
        axes.margins(x=0.01, y=0.08)
        close(figure, axes, ends, title, "X: a gradient was inf or NaN, the step is skipped")
    return figure
