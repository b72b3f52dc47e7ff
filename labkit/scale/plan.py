"""How to lay a model out on a cluster: the fastest way, the cheapest, the fewest GPUs that fit it.

    python -m labkit.scale.plan --model gpt3-175b --gpus 1024 --gpu a100-80gb --tokens 300e9
    python -m labkit.scale.plan --model gpt3-175b --cluster ours.yaml --tokens 300e9

    search.py   what divides  ->  cost.py    ->  seconds of a step  -> fastest      days, GPU-hours,
                              ->  memory.py  ->  GiB, it fits       -> cheapest     money, energy
                                                                    -> smallest

    days = tokens / (tokens a second)     money = GPUs x hours x price     energy = GPUs x h x watts

Cheapest counts GPU-hours, on whole nodes that divide the cluster, or the fewest that fit. With the
fastest come: its bucket of gradients (bucket.py); who was second with other axes, and which part of
its step is longer; who would be faster and does not fit, and which memory is too large; whether
another wins with any one constant at either end of its spread. All of it is predicted: beside it
stands how far off predictions of published rows were that no fit has seen.
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
from labkit.scale.job_config import row_of, whole
from labkit.scale.search import Found, Space, most, search, smallest, space_of
from labkit.scale.validate_args import AXES, GIVEN, divisors

REACH = 64  # times the cluster: how far a larger one is looked for that would do


@dataclass(frozen=True)
class Plan:
    """What was found. fastest, cheapest, smallest: Found (its job, step, peak).

    runner_up: the next with other axes; larger: needs least memory of those that would be faster
    and do not fit; both may be None. contenders: all that fit on as many GPUs, fastest first.
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
        """The Bucket of the fastest's gradients, or None where they are in none."""
        return choose_bucket(self.fastest.job, constants.values())


def plan(model, cluster, *, global_batch=None, seq_len=None, precision="bf16", framework="",
         schedule="1f1b", spare=0.1, uneven=False, **given):  # fmt: skip
    """The Plan of a model on a Cluster.

    model: a name of models.csv, its columns as "layers=32,hidden=4096,...", or a mapping of them.
    global_batch: sequences of a step. spare: the share of memory to leave free, by default twice
    the median error of the prediction. uneven: stages of a pipeline may differ by a layer.
    precision: bf16, fp8, fp16, tf32 or fp32, or "free": fp8 where the GPU has it, else bf16.
    schedule: of a pipeline, 1f1b (interleaved, too), zero_bubble (ZB-H1), which few stacks have, or
    "free": the faster.
    given: axes and settings that are not free: dp, tp, pp, cp, ep, vpp, replicas, zero,
    micro_batch, recompute. Raises ValueError, one line, for bad input and where nothing fits.
    """
    row = dict(row_of(model) if isinstance(model, str) else model)
    told = {"global_batch": global_batch, "seq_len": seq_len}
    row |= {name: value for name, value in told.items() if value is not None}
    batch = whole(row, "global_batch")
    if batch is None:
        raise ValueError("global_batch is missing: how many sequences has a step?")
    told = {"spare": spare, "uneven": uneven, "precision": precision, "framework": framework}
    space = space_of(row, cluster, global_batch=batch, schedule=schedule, **told, **given)
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
    """Why nothing fits, what is missing, and what is the nearest that fits: a line."""
    peak, nearest = by_size(refused)[0]
    gpu = nearest.gpu
    usable = (1 - space.spare) * gpu.memory_gib
    enough = smallest(space, limit, c)
    where = f"it fits on {enough.job.n_gpus} of them" if enough else "nor does it on more of them"
    return (
        f"nothing fits on {n} x {gpu.name}: the least is {peak.total:.1f} GiB a GPU "
        f"({peak.largest} {getattr(peak, peak.largest):.1f}), {peak.total - usable:.1f} GiB more "
        f"than the {usable:.1f} GiB to be used; {where} ({words(nearest)} is the nearest)"
    )


def bill(found, tokens, price=None, watts=None):
    """{days, gpu_hours, kwh, money} of training on so many tokens.

    price: of a GPU-hour, in any currency; None: money is None. watts: of a GPU with its share of
    the node and of cooling; None: what the GPU alone draws at most.
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
    print(f"{'':9}{'GPUs':>6}{'step s':>9}{'tok/s/GPU':>10}{'GiB':>7}{'days':>9}{'GPU-hours':>12}"
          f"{'MWh':>9}{money}  layout")  # fmt: skip
    for (title, found), cost in zip(chosen.items(), bills, strict=True):
        money = "" if price is None else f"{cost['money']:>12,.0f}"
        print(
            f"{title:9}{found.job.n_gpus:>6}{found.seconds:>9.4g}"
            f"{found.step.tokens_per_second:>10.4g}{found.peak.total:>7.1f}{cost['days']:>9.4g}"
            f"{cost['gpu_hours']:>12,.0f}{cost['kwh'] / 1000:>9,.0f}{money}  {words(found.job)}"
        )
    if job.n_gpus < plan.cluster.gpus:
        print(f"on no more than {job.n_gpus} of the GPUs is there a layout that divides all")
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
    """Print what each constant moves: the time of the fastest, or which one that is."""
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
    add("--cluster", metavar="FILE", help="YAML, see cluster.py; figures told here replace its")
    add("--tokens", required=True, type=float)
    add("--price", type=float, help="of a GPU-hour")
    add("--watts", type=float, help="of a GPU, all that serves it included")
    add("--confirm", dest="confirmed", action="store_true", default=argparse.SUPPRESS,
        help="figures that look wrong are meant")  # fmt: skip
    add("--sensitivity", action="store_true", help="what each constant moves")
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
    told = {field.name: asked.pop(field.name, None) for field in fields(Cluster)}
    told = {name: figure for name, figure in told.items() if figure is not None}
    try:
        cluster = Cluster.from_yaml(file, **told) if file else Cluster.from_dict(told)
        found = plan(model, cluster, **asked)
        show(model, found, tokens, price, watts)
    except ValueError as error:
        sys.exit(f"labkit.scale.plan: {error}")
    if also:
        show_sensitivity(found)


if __name__ == "__main__":
    main()
