"""The errors that a user cares for, on published rows.

chosen over best    in each cell of model x GPUs x length x batch with at least 3 running
                    layouts: the published speed of the layout that the planner recommends,
                    over the best published speed
tokens/s            median error by number of GPUs, for long sequences, fused kernels, A100
memory              median error of each stack; out-of-memory jobs found, false alarms
intervals           share of the rows kept out of the fit that lie in interval()

python -m labkit.scale.fit --scores
"""

from collections import defaultdict
from statistics import median

from labkit.scale.cost import predict_step
from labkit.scale.intervals import CRAWL, LONG, interval
from labkit.scale.memory_model import predict_memory
from labkit.scale.published_rows import (
    errors,
    gib,
    kept_out,
    published,
    runs,
    speed,
    with_figure,
)
from labkit.scale.search import Found, recommended

LEAST_LAYOUTS = 3


def cells(rows):
    """Return {(source, model, GPU, GPUs, length, batch, precision): rows that ran}."""
    found = defaultdict(list)
    columns = ("source", "model", "gpu", "n_gpus", "seq_len", "global_batch", "precision")
    for row in with_figure(rows, "tok_s_gpu"):
        of_batch = float(row["global_batch"] or 0) * row["job"].context == row["job"].step_tokens
        if row["status"] != "crashed_or_oom" and of_batch:
            found[tuple(row[column] for column in columns)].append(row)
    return {cell: ran for cell, ran in found.items() if len(ran) >= LEAST_LAYOUTS}


def chosen_over_best(rows, c):
    """Return {cell: published speed of the layout to choose / the best published speed}.

    Layouts that fill more than 0.9 of the memory are not chosen, as plan() leaves a tenth free.
    """
    found = {}
    for cell, ran in cells(rows).items():
        speeds = {id(row["job"]): float(row["tok_s_gpu"]) for row in ran}
        jobs = [row["job"] for row in ran]
        fit = [Found(job, predict_step(job, c), predict_memory(job, c)) for job in jobs]
        fit = [one for one in fit if one.peak.total <= CRAWL * one.peak.memory] or fit
        found[cell] = speeds[id(recommended(fit).job)] / max(speeds.values())
    return found


def groups_of_speed(row):
    """Yield the groups of a row whose speed is scored."""
    job = row["job"]
    if row["source"] == "ultrascale-playbook":
        yield f"nanotron, {job.n_gpus} GPUs"
    if job.fused:
        yield "fused kernels, H100 and later"
    if job.context >= LONG:
        yield "16k tokens and more"
    if job.gpu.generation == "ampere":
        yield "A100"


def by_group(rows, column, predict, c, groups):
    """Return {group: (rows, median error)}."""
    found = defaultdict(list)
    for row in with_figure(rows, column):
        for group in groups(row):
            found[group].append(row)
    return {
        group: (len(its), median(errors(its, column, predict, c)))
        for group, its in sorted(found.items())
    }


def out_of_memory(rows, c):
    """Return (share of the crashed rows found, share of false alarms among those that ran)."""
    crashed = [runs(row["job"], c) for row in rows if row["status"] == "crashed_or_oom"]
    ran = [runs(row["job"], c) for row in rows if row["status"].startswith("ok")]
    return crashed.count(False) / len(crashed), ran.count(False) / len(ran)


def held(rows, c):
    """Return {reason for keeping out: (rows, share that lies in its interval)}."""
    found = defaultdict(list)
    for row in with_figure(rows, "tok_s_gpu"):
        if why := kept_out(row, "tok_s_gpu"):
            low, high, *_ = interval(row["job"], c, without=row)
            found[why].append(low <= float(row["tok_s_gpu"]) <= high)
    return {why: (len(its), sum(its) / len(its)) for why, its in found.items()}


def kept_groups(row):
    """Yield the groups of a row whose speed was kept out of the fit."""
    if kept_out(row, "tok_s_gpu"):
        yield from groups_of_speed(row)


def show_scores(c):
    """Print all scores."""
    rows = published()
    print(f"{sum(row['trouble'] for row in rows)} rows are left out: published_rows.py says why")
    chosen = chosen_over_best(rows, c)
    print(f"chosen over best: {len(chosen)} cells, median {median(chosen.values()):.2f}, "
          f"worst {min(chosen.values()):.2f}")  # fmt: skip
    for cell, value in sorted(chosen.items(), key=lambda pair: pair[1])[:5]:
        print(f"  {value:.2f}  {' '.join(cell)}")
    print(f"{'median error of tokens/s':40}{'rows':>6}{'all':>8}{'rows':>8}{'kept out':>10}")
    kept = by_group(rows, "tok_s_gpu", speed, c, kept_groups)
    for group, (count, error) in by_group(rows, "tok_s_gpu", speed, c, groups_of_speed).items():
        others, its = kept.get(group, (0, float("nan")))
        print(f"  {group:38}{count:>6}{error:>8.1%}{others:>8}{its:>10.1%}")
    print("median error of memory")
    stacks = by_group(rows, "mem_gib", gib, c, lambda row: [row["job"].stack.name])
    for stack, (count, error) in stacks.items():
        print(f"  {stack:38}{count:>6}{error:>8.1%}")
    share, alarms = out_of_memory(rows, c)
    print(f"out of memory: {share:.1%} found, {alarms:.1%} false alarms")
    print("rows kept out of the fit that lie in their interval")
    for why, (count, share) in held(rows, c).items():
        print(f"  by {why:35}{count:>6}{share:>8.1%}")
