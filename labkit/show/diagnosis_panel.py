"""Runs side by side: how each rank spends its time, before and after a change.

sheet      A  rank 0 |==|===|=====|      a panel for each run: its ranks, the parts of their steps,
                1 1 0 1                  and each rank's compute time by step, the slowest named
treated    cause   before |==|===|=====|       after |==|===|v|     v: what was predicted
"""

import pandas as pd

from labkit.measure.diagnosis_metrics import own_ms, step_ms, useful
from labkit.show import style
from labkit.show.bars import stack
from labkit.show.live import COLOURS, by_rank, legend, parts_of

SKIPPED = style.PURPLE
NUMBERS = 12  # at most, in a panel


def sheet(frame, title=None):
    """Return a Figure: for each "run" of the frame the parts by rank, and own_ms() by step."""
    runs = list(dict.fromkeys(frame["run"]))
    with style.look():
        height = 0.8 + 1.9 * len(runs)
        figure, axes = style.new_figure(9.5, height, len(runs), 2, squeeze=False)
        for (left, right), run in zip(axes, runs, strict=True):
            rows = frame[frame["run"] == run]
            by_rank(left, rows.join(parts_of(rows).add_prefix("part_")))
            left.set_title(f"{run}: parts of a step, by rank (ms)", size=9.5, loc="left")
            words = "computes (ms), a line per rank; number: slowest rank"
            right.set_title(f"{run}: {words}", size=9.5, loc="left")
            compute_times(right, own_ms(rows))
        axes[-1, 1].set_xlabel("step")
        legend(figure)
        style.entitle(figure, title)
    return figure


def compute_times(axes, own):
    """Draw a line per rank, all of one colour, and write the slowest rank's number above a step.

    own: DataFrame of ms [steps, ranks]. The colours of the parts mean no rank.
    """
    axes.plot(own.index, own, color=style.FAINT, marker=".", markersize=4, linewidth=0.9)
    for step, times in own.iloc[:: -(-len(own) // NUMBERS)].iterrows():
        look = {"ha": "center", "size": 9, "weight": "bold"}
        style.beside(axes, str(times.idxmax()), (step, times.max()), (0, 8), **look)
    axes.set_ylim(0, own.max().max() * 1.25)
    axes.tick_params(labelsize=8.5)
    axes.grid(axis="y")


def parts(rows):
    """Return {part: ms of a step} of a run: means over the ranks, medians over the steps.

    "skipped": the time of the skipped steps, per useful step.
    """
    found = parts_of(rows).groupby(rows["step"]).mean().median()
    return dict(found) | {"skipped": step_ms(rows) * (1 / useful(rows) - 1)}


def treated(frame, title=None):
    """Return a Figure with two bars per cause, before and after the change, and the prediction.

    frame: rows of runs with "cause", "changed" (bool) and "gain", the ratio of times per useful
    step that diagnose predicted.
    """
    causes = list(dict.fromkeys(frame["cause"]))
    ticks = []
    written = []
    with style.look():
        figure, axes = style.new_figure(8.5, 1.3 + 0.75 * len(causes))
        for place, cause in enumerate(causes):
            for changed in (False, True):
                rows = frame[(frame["cause"] == cause) & (frame["changed"] == changed)]
                y = 2.4 * place + 0.95 * changed
                pieces = {
                    part: ([ms], COLOURS.get(part, SKIPPED)) for part, ms in parts(rows).items()
                }
                left = stack(axes, [y], pieces, 0.85)[0]
                ticks.append((y, f"{cause}, changed" if changed else cause))
                predicted = rows["gain"].iloc[0] * (written[-1][2] if changed else left)
                if changed:
                    axes.plot([predicted] * 2, [y - 0.5, y + 0.5], color=style.INK, linewidth=2.5)
                written.append((max(left, predicted * changed), y, left, predicted * changed))
        for x, y, left, predicted in written:
            words = f"{left:.0f} ms"
            if predicted:
                words += f", {predicted:.0f} predicted"
            style.beside(axes, words, (x, y), size=9, weight="bold" if predicted else "normal")
        axes.set_yticks([y for y, _ in ticks], [words for _, words in ticks], size=9)
        axes.set_xlim(0, max(x for x, *_ in written) * 1.25)
        axes.invert_yaxis()
        axes.set_xlabel("time per useful step (ms); black: predicted before the change")
        axes.grid(axis="x")
        legend(figure, {"skipped": SKIPPED})
        style.entitle(figure, title)
    return figure


def numbers(frame):
    """Return a DataFrame of texts with a row per run: numbers that the pictures do not show."""
    found = []
    for run, rows in frame.groupby("run", sort=False):
        links = rows[[name for name in rows if str(name).startswith("to_")]].stack()
        row = {"run": run, "messages a step": f"{rows['messages'].median():.0f}"}
        row["shortest message"] = style.quantity(rows["shortest_message_ms"].min(), "ms")
        row["links: usual, slowest"] = f"{links.median():.1f}, {links.max():.1f} ms"
        row["steps skipped"] = f"{1 - useful(rows):.0%}"
        found.append(row)
    return pd.DataFrame(found)
