"""Plan the layout of a model on a cluster: the fastest, the cheapest, and the fewest GPUs that fit.

    python -m labkit.scale.plan --model gpt3-175b --gpus 1024 --gpu a100-80gb --tokens 300e9
    python -m labkit.scale.plan --model gpt3-175b --cluster ours.yaml --tokens 300e9

    search.py   all layouts  ->  cost.py          ->  step time   -> fastest      days, GPU-hours,
                             ->  memory_model.py  ->  GiB, fits?  -> cheapest     money, energy
                                                                  -> smallest

    days = tokens / (tokens a second)     money = GPUs x hours x price     energy = GPUs x h x watts

The cheapest plan needs the fewest GPU-hours, on complete nodes that divide the cluster or on the
fewest GPUs that fit. For the fastest plan, the command also prints: the size of its gradient
buckets (bucket_size_model.py); the runner-up with other axes, and which part of its step is longer;
a faster plan that does not fit, and which kind of memory is too large; with --sensitivity, whether
another plan wins if one constant is at either end of its spread. All figures are predicted; the
command also prints the median error of the predictions on held-out published rows.
"""

import argparse
import sys
from dataclasses import dataclass, fields
from math import isfinite
from operator import attrgetter

from labkit.scale import constants
from labkit.scale.bert_shapes import Encoder
from labkit.scale.bucket_size_model import USUAL, bucket_of, choose_bucket
from labkit.scale.cluster import Cluster
from labkit.scale.cost import predict_step
from labkit.scale.explain import KINDS, sensitivity, why_larger, why_slower, words
from labkit.scale.fit import errors_kept_out
from labkit.scale.model_row import check_columns, row_of, whole
from labkit.scale.quantities import amount
from labkit.scale.search import Found, Space, most, search, smallest, space_of
from labkit.scale.validate_args import AXES, GIVEN, check_precision, divisors

REACH = 64  # if nothing fits, search for a cluster up to this many times as large


@dataclass(frozen=True)
class Plan:
    """The result of plan(). fastest, cheapest, smallest: Found (its job, step, peak).

    runner_up: the next fastest with other axes. larger: of the faster jobs that do not fit, the one
    with the least memory. Both may be None. contenders: all jobs that fit on the same number of
    GPUs, fastest first.
    """

    cluster: Cluster
    space: Space
    fastest: Found
    cheapest: Found
    smallest: Found
    runner_up: Found | None
    larger: Found | None
    contenders: list

    @property
    def bucket(self):
        """The gradient Bucket of the fastest plan, or None if its gradients are not in buckets."""
        return choose_bucket(self.fastest.job, constants.values())


def plan(model, cluster, *, global_batch=None, seq_len=None, precision="bf16", framework="",
         schedule="1f1b", spare=0.1, uneven=False, **given):  # fmt: skip
    """Return the Plan of a model on a Cluster.

    model: a name of models.csv, its columns as "layers=32,hidden=4096,...", or a mapping of them.
    global_batch: sequences per step. spare: the share of memory to leave free, by default twice
    the median error of the prediction. uneven: whether stages of a pipeline may differ by a layer.
    precision: bf16, fp8, fp16, tf32 or fp32, or "free": fp8 if the GPU has it, else bf16.
    schedule: of a pipeline, 1f1b (plain or interleaved), zero_bubble (ZB-H1), which few stacks
    support, or "free": the faster of the two.
    given: axes and settings that are fixed: dp, tp, pp, cp, ep, vpp, replicas, zero, micro_batch,
    recompute. Raises ValueError, one line, for invalid input, or if nothing fits.
    """
    row = dict(row_of(model) if isinstance(model, str) else model)
    check_columns(row)
    sizes = {"global_batch": global_batch, "seq_len": seq_len}
    row |= {name: value for name, value in sizes.items() if value is not None}
    batch = whole(row, "global_batch")
    if batch is None:
        raise ValueError("global_batch is missing: how many sequences has a step?")
    precision = check_precision(precision, cluster.device)
    settings = {"spare": spare, "uneven": uneven, "precision": precision, "framework": framework}
    space = space_of(row, cluster, global_batch=batch, schedule=schedule, **settings, **given)
    c = constants.values()
    n = most(space, cluster.gpus)
    fit, refused = search(space, n, c)
    if not fit:
        raise ValueError(nowhere(space, n, refused, c, REACH * n))
    fit.sort(key=lambda found: found.seconds)
    fastest = fit[0]
    small = smallest(space, n, c) or fastest
    cheapest = min(fastest, small, key=lambda found: found.gpu_seconds)
    for count in divisors(n):
        whole_nodes = count < cluster.gpus_per_node or count % cluster.gpus_per_node == 0
        if small.job.n_gpus < count < n and whole_nodes:
            cheaper, _ = search(space, count, c, cheapest.gpu_seconds / count)
            cheapest = min([cheapest, *cheaper], key=lambda found: found.gpu_seconds)
    axes = attrgetter(*AXES, "ep")
    others = (found for found in fit if axes(found.job) != axes(fastest.job))
    refused = (Found(job, predict_step(job, c), peak) for peak, job in by_size(refused))
    larger = next((found for found in refused if found.seconds < fastest.seconds), None)
    return Plan(cluster, space, fastest, cheapest, small, next(others, None), larger, fit)


def by_size(refused):
    return sorted(refused, key=lambda one: one[0].total)


def nowhere(space, n, refused, c, limit):
    """Return a line: nothing fits, how much memory is missing, and which cluster would fit."""
    peak, nearest = by_size(refused)[0]
    gpu = nearest.gpu
    needed = round(peak.total, 1)
    usable = round((1 - space.spare) * gpu.memory_gib, 1)
    enough = smallest(space, limit, c)
    where = f"it fits on {enough.job.n_gpus} of them" if enough else "nor does it on more of them"
    return (
        f"nothing fits on {n} x {gpu.name}: the least is {needed:.1f} GiB a GPU "
        f"({peak.largest} {getattr(peak, peak.largest):.1f}), {needed - usable:.1f} GiB more "
        f"than the {usable:.1f} GiB to be used; {where} ({words(nearest)} is the nearest)"
    )


def bill(found, tokens, price=None, watts=None):
    """Return {days, gpu_hours, kwh, money} of training on `tokens` tokens.

    price: of a GPU-hour, in any currency; None: money is None. watts: of a GPU with its share of
    the node and of cooling; None: the maximum power of the GPU alone.
    """
    for name, value in (("tokens", tokens), ("price", price), ("watts", watts)):
        if value is not None and not (isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, got {value}")
    hours = tokens / found.job.step_tokens * found.seconds / 3600
    gpu_hours = hours * found.job.n_gpus
    kwh = gpu_hours * (watts or found.job.gpu.watts) / 1000
    money = None if price is None else gpu_hours * price
    return {"days": hours / 24, "gpu_hours": gpu_hours, "kwh": kwh, "money": money}


def show(name, plan, tokens, price, watts):
    """Print a plan."""
    job, gpu, c = plan.fastest.job, plan.fastest.job.gpu, constants.values()
    chosen = {title: getattr(plan, title) for title in ("fastest", "cheapest", "smallest")}
    bills = [bill(found, tokens, price, watts) for found in chosen.values()]
    print(
        f"{name}, {job.shape.parameters / 1e9:.4g} billion parameters, {plan.space.global_batch} x "
        f"{job.context} tokens a step, {tokens:.3g} in all, in {job.precision}, "
        f"{plan.cluster.gpus} x {gpu.name}, {plan.cluster.gpus_per_node} a node with "
        f"{job.network_gbps:g} Gbit/s, {job.collectives} collectives; all predicted\n"
    )
    money = "" if price is None else f"{'money':>12}"
    print(f"{'':9}{'GPUs':>6}{'step s':>9}{'tok/s/GPU':>10}{'GiB':>7}{'days':>11}{'GPU-hours':>13}"
          f"{'MWh':>9}{money}  layout")  # fmt: skip
    for (title, found), cost in zip(chosen.items(), bills, strict=True):
        money = "" if price is None else f"{cost['money']:>12,.0f}"
        print(
            f"{title:9}{found.job.n_gpus:>6}{found.seconds:>9.4g}"
            f"{found.step.tokens_per_second:>10.4g}{found.peak.total:>7.1f}{cost['days']:>11,.1f}"
            f"{cost['gpu_hours']:>13,.0f}{cost['kwh'] / 1000:>9,.1f}{money}  {words(found.job)}"
        )
    if job.n_gpus < plan.cluster.gpus:
        above = -(-plan.space.global_batch // plan.cluster.gpus) * plan.cluster.gpus
        print(
            f"only {job.n_gpus} of the GPUs are used: no layout divides evenly over more; a batch "
            f"of {above} uses all {plan.cluster.gpus}"
        )
    kinds = ", ".join(f"{kind} {getattr(plan.fastest.peak, kind):.1f}" for kind in KINDS)
    print(f"\nof {gpu.memory_gib:g} GiB: {kinds}, {plan.space.spare:.0%} spared")
    off = "; ".join(f"{e:.1%} of {what} by {why}" for (what, why), e in errors_kept_out().items())
    if bucket := plan.bucket:
        usual = bucket_of(job, USUAL, c)
        more = 1e3 * (usual.exposed - bucket.exposed)
        print(f"bucket of gradients: {bucket}; {USUAL} MiB are {usual.count}, {more:+.3g} ms")
    none = "; none of them of an encoder" if isinstance(job.shape, Encoder) else ""
    print(f"median error of predictions, on published rows kept out of the fit: {off}{none}")
    if plan.runner_up:
        print(f"runner-up: {why_slower(plan.runner_up, plan.fastest)}")
    if plan.larger:
        print(f"too large: {why_larger(plan.larger, plan.fastest, plan.space.spare)}")


def show_sensitivity(plan):
    """Print how each constant changes the fastest plan's step time, or which plan is fastest."""
    print("\nconstant          from        to  its step  fastest then")
    for moved in sensitivity(plan):
        same = moved.same.seconds / plan.fastest.seconds - 1
        if moved.changes or abs(same) > 1e-4:
            best = words(moved.best.job) if moved.best else "nothing fits"
            best = best if moved.changes else "the same"
            print(
                f"{moved.constant.name:14}{moved.constant.value:>8.4g}{moved.value:>10.4g}"
                f"{same:>+10.1%}  {best}"
            )


def main():
    parser = argparse.ArgumentParser(
        prog="python -m labkit.scale.plan", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--model", required=True, help="of models.csv, or layers=32,hidden=4096,...")
    add("--cluster", metavar="FILE", help="YAML, see cluster.py; options replace its figures")
    add("--tokens", default="1T", help="of the whole run, such as 300B or 15.6e12 (default: 1T)")
    add("--price", type=float, help="of a GPU-hour")
    add("--watts", type=float, help="of a GPU with its share of the node and of cooling")
    add("--confirm", dest="confirmed", action="store_true", default=argparse.SUPPRESS,
        help="unusual figures are correct")  # fmt: skip
    add("--sensitivity", action="store_true", help="print the effect of each constant on the plan")
    cluster = {"gpu": str, "gpus": int, "gpus-per-node": int, "network-gbps": float}
    cluster |= {"node-gbs": float, "memory-gib": float, "host-gib": float, "collectives": str}
    job = {"global-batch": int, "seq-len": int, "precision": str, "framework": str, "schedule": str}
    job |= {"spare": float}
    for name, kind in (cluster | job).items():
        add(f"--{name}", type=kind, default=argparse.SUPPRESS)
    add("--uneven", action="store_true", help="stages may differ by a layer")
    for name in sorted(GIVEN):
        kind = str if name == "recompute" else int
        add(f"--{name.replace('_', '-')}", type=kind, default=argparse.SUPPRESS)
    asked = vars(parser.parse_args())
    model, price, watts = (asked.pop(name) for name in ("model", "price", "watts"))
    tokens, also, file = (asked.pop(name) for name in ("tokens", "sensitivity", "cluster"))
    figures = {field.name: asked.pop(field.name, None) for field in fields(Cluster)}
    figures = {name: figure for name, figure in figures.items() if figure is not None}
    try:
        tokens = amount(tokens)
        cluster = Cluster.from_yaml(file, **figures) if file else Cluster.from_dict(figures)
        found = plan(model, cluster, **asked)
        show(model, found, tokens, price, watts)
    except ValueError as error:
        sys.exit(f"labkit.scale.plan: {error}")
    if also:
        show_sensitivity(found)


if __name__ == "__main__":
    main()
