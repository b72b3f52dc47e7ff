"""Search all layouts of a job on n GPUs and return those that fit.

    layout   tp x pp x cp x dp [x replicas] = n     ep of dp or of dp x tp, ZeRO 0 to 3
    batch    virtual stages a rank, micro-batch     grad_accum follows from the global batch
    saved    none, half or all of a layer recomputed; optimizer states in host memory
    dtype    bf16 or fp8 products, if precision="free"

tp stays in a node and divides heads, kv_heads and ffn. pp divides the layers, unless uneven stages
are allowed. cp leaves at least 1,024 tokens a rank. dp divides the global batch; ep divides the
experts and dp, or spans tp and divides dp x tp. Several stages a rank need a number of
micro-batches that pp divides. Hybrid sharding has a replica in each node. A pipeline runs 1F1B,
interleaved if a rank has several stages. If `schedule` allows it, zero bubble (ZB-H1) is tried,
too: it has one stage a rank and needs at least as many micro-batches as stages. The search is
pruned without losing the best layout:

    a layout that the stack does not run                        is not tried: stacks.py
    more recomputation takes more time and less memory         the first that fits is the fastest
    a larger micro-batch takes more memory                     none is tried after one too large
    fp8 never needs more memory than bf16, nor more time       bf16 is not tried if the GPU has fp8
    unless its casts take longer than its products save

cost.py predicts the time and memory_model.py the memory. Neither models the bucket size;
bucket_size_model.py chooses it for the fastest layout. The rules of thumb are from Narayanan et
al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021, section 3.
"""

from dataclasses import dataclass, replace
from math import gcd, isfinite

from labkit.scale.cost import predict_step
from labkit.scale.job_config import Job, job_of, recomputed, spans_tp
from labkit.scale.memory_model import (
    GIB,
    frozen_bytes,
    host_bytes,
    predict_memory,
    state_bytes,
)
from labkit.scale.messages import all_trained
from labkit.scale.model_row import ARCHITECTURES, ASKED, MODEL, NOT_PLANNED, text
from labkit.scale.validate_args import PRECISIONS, check_given, divisors, schedules_of

LEAST_TOKENS = 1024
NEAR = 0.05  # the median error of speeds kept out of the fit
TRIED = ("none", "selective", "full")  # "half" saves as much as "selective" and takes longer


@dataclass(frozen=True)
class Found:
    """A job with its predicted Step and Peak."""

    job: Job
    step: object
    peak: object

    @property
    def seconds(self):
        return self.step.seconds

    @property
    def gpu_seconds(self):
        return self.step.seconds * self.job.n_gpus


@dataclass(frozen=True)
class Space:
    """The search space. job: on one GPU; given: axes and settings that are fixed.

    spare: the share of memory that stays free. uneven: whether stages may differ by a layer.
    host_gib: host memory of a node for offloaded optimizer states; None: no offload. schedules: the
    pipeline schedules to try.
    """

    job: Job
    global_batch: int
    given: dict
    spare: float
    uneven: bool
    host_gib: float | None
    schedules: tuple = ("1f1b",)

    def free(self, name, choices):
        """Return the choices of `name` that agree with `given`."""
        return [choice for choice in choices if self.given.get(name, choice) == choice]

    def layouts(self, n):
        """Yield jobs on n GPUs with all combinations of axes and ZeRO stages."""
        shape, node = self.job.shape, min(n, self.job.gpus_per_node)
        for tp in self.free("tp", divisors(gcd(node, *shape.divided_by_tp.values()))):
            for pp in self.free("pp", divisors(n // tp) if n % tp == 0 else ()):
                if pp > shape.layers or not (self.uneven or shape.layers % pp == 0):
                    continue
                for cp in self.free("cp", divisors(gcd(n // tp // pp, self.job.context))):
                    data = n // tp // pp // cp
                    if self.global_batch % data or cp > max(1, self.job.context // LEAST_TOKENS):
                        continue
                    axes = {"n_gpus": n, "gpus_per_node": node, "tp": tp, "pp": pp, "cp": cp}
                    yield from self.sharded(replace(self.job, **axes), data)

    def sharded(self, job, data):
        """Yield variants of a job with `data` data-parallel ranks: ZeRO stage, replicas and ep."""
        in_node = max(1, job.gpus_per_node // job.tp // job.cp)
        tried = (0, 1, 2, 3) if data * job.cp > 1 else (0,)
        ways = [(zero, data) for zero in (self.given.get("zero", z) for z in tried)]
        if data % in_node == 0 and 1 < in_node < data:
            ways.append((3, in_node))
        for zero, dp in dict.fromkeys(ways):
            fits = self.free("zero", [zero]) and self.free("dp", [dp])
            if fits and self.free("replicas", [data // dp]):
                for ep in self.free("ep", self.expert_ranks(job, dp)):
                    found = replace(job, zero=zero, dp=dp, replicas=data // dp, ep=ep)
                    if not job.stack.refuses(found):
                        yield found

    def expert_ranks(self, job, dp):
        """Return the numbers of ranks that can share the experts."""
        experts, wide = job.shape.experts, job.tp * dp
        found = divisors(gcd(dp, experts))
        if job.tp > 1 and job.stack.sequence:
            found += [ep for ep in divisors(gcd(wide, experts)) if spans_tp(ep, job.tp, job.cp, dp)]
        return found

    def batches(self, layout):
        """Yield, for each schedule and vpp, the jobs in order of increasing micro-batch."""
        each = self.global_batch // layout.dp // layout.replicas
        layers, pp = layout.shape.layers, layout.pp
        several = pp > 1 and layers % pp == 0 and "vpp" in layout.stack.axes
        thin = divisors(layers // pp) if several else [1]
        known = [schedule for schedule in self.schedules if schedule in layout.stack.schedules]
        tried = known if pp > 1 else ("1f1b",)
        ways = [("1f1b", vpp) for vpp in self.free("vpp", thin)]
        ways += [("zero_bubble", vpp) for vpp in self.free("vpp", [1])]
        for schedule, vpp in (way for way in ways if way[0] in tried):
            way = replace(layout, schedule=schedule, vpp=vpp)
            yield (
                replace(way, micro_batch=micro, grad_accum=each // micro)
                for micro in self.free("micro_batch", divisors(each))
                if runs(way, each // micro)
            )

    def fits(self, peak):
        """Return whether a Peak leaves the spare share of memory free."""
        room = 1 - self.spare
        host = peak.host <= room * (self.host_gib or 0)
        return peak.runs and host and peak.total <= room * peak.memory

    def least(self):
        """Return the fewest GPUs on which fully sharded parameters, gradients and states fit."""
        job = replace(self.job, zero=3, offload=bool(self.host_gib))
        trained, _ = all_trained(job)
        needed = trained * (state_bytes(job, {}, 1) - host_bytes(job))
        needed = (needed + frozen_bytes(job, job.shape.parameters, 0, job.shape.layers)) / GIB
        return max(1, -int(-needed // ((1 - self.spare) * job.gpu.memory_gib)))


def search(space, n, c, within=float("inf")):
    """Return (a list of Found that fit n GPUs and take less than `within` seconds, refused).

    refused: (Peak, Job) of the jobs tried that do not fit.
    """
    fit, refused = [], []
    for layout in space.layouts(n):
        for jobs in space.batches(layout):
            for job in jobs:
                found = first_to_fit(space, job, c, within, refused)
                fit += [found] if found else []
                again = found is None or (found and found.job.recompute != job.recompute)
                if space.host_gib and again:  # with offload, less recomputation may be needed
                    other = replace(job, offload=True)
                    if not other.stack.refuses(other):
                        found = first_to_fit(space, other, c, within, refused)
                        fit += [found] if found else []
                if found is None:
                    break
    return fit, refused


def recommended(fit):
    """Return the Found to choose: of those nearly as fast as the fastest, that with least stages.

    A difference below NEAR is less than the prediction's error, and of the published steps up to
    256 GPUs the cluster's own trouble slowed 4 % without a pipeline, but 14 to 27 % with one.
    """
    fastest = min(found.seconds for found in fit)
    near = [found for found in fit if found.seconds <= (1 + NEAR) * fastest]
    return min(near, key=lambda found: (found.job.pp, found.seconds))


def first_to_fit(space, job, c, within, refused):
    """Return the Found that recomputes least; False if it takes too long, None if none fits."""
    kinds = (space.given["recompute"],) if "recompute" in space.given else TRIED
    if within < float("inf") and predict_step(job, c).seconds >= within:
        return False  # too slow even without recomputation
    for kind in kinds:
        tried = job if job.recompute == kind else replace(job, recompute=kind)
        peak = predict_memory(tried, c)
        if space.fits(peak):
            step = predict_step(tried, c)
            return step.seconds < within and Found(tried, step, peak)
        refused.append((peak, tried))
    return None


def runs(job, micro_batches):
    """Return whether a pipeline's schedule supports this number of micro-batches."""
    if job.schedule == "zero_bubble":
        return micro_batches >= job.pp
    return job.vpp == 1 or micro_batches % job.pp == 0


def most(space, limit):
    """Return the most GPUs, complete nodes and at most `limit`, for which a layout exists."""
    node = space.job.gpus_per_node
    whole = range(limit - limit % node, 0, -node)
    for n in (limit, *whole, *range(min(node, limit), 0, -1)):
        if any(True for layout in space.layouts(n) for jobs in space.batches(layout) for _ in jobs):
            return n
    given = ", ".join(f"{name}={value}" for name, value in space.given.items()) or "nothing"
    raise ValueError(
        f"no layout of {limit} GPUs or fewer has {given} given: dp times micro_batch must divide "
        f"global_batch={space.global_batch}, cp must leave {LEAST_TOKENS} of {space.job.context} "
        "tokens at least, and with vpp, pp must divide the number of micro-batches"
    )


def smallest(space, limit, c):
    """Return the fastest Found on the fewest GPUs that fit the model, at most `limit`; or None."""
    node, least = space.job.gpus_per_node, space.least()
    for n in (*divisors(node)[:-1], *range(node, limit + 1, node)):
        if least <= n <= limit:
            fit, _ = search(space, n, c)
            if fit:
                return min(fit, key=lambda found: found.seconds)
    return None


def space_of(row, cluster, *, global_batch, spare, uneven, precision, framework="",
             stack="", schedule="1f1b", **given):  # fmt: skip
    """Return the Space of a model (a row for job_config.py) on a Cluster.

    Raises ValueError for invalid input.
    """
    architecture = text(row, "architecture").lower()
    if architecture not in ARCHITECTURES:
        raise ValueError(NOT_PLANNED.format(architecture))
    kept = {name: row.get(name) for name in (*MODEL, *ASKED, "seq_len")}
    if precision == "free":
        precision = "fp8" if "fp8" in cluster.device.tflops else "bf16"
    if not any(dtype in precision.lower() for dtype in PRECISIONS):
        raise ValueError(
            f"precision must be free or one of {', '.join(PRECISIONS)}, got {precision!r}"
        )
    kept |= {"gpu": cluster.gpu, "n_gpus": 1, "precision": precision}
    kept |= {"framework": framework, "stack": stack}
    job = job_of(kept)
    if refused := job.stack.refuses_part(
        replace(job, **{n: given.get(n, 1) for n in ("pp", "cp")})
    ):
        raise ValueError(refused)
    job = replace(job, gpu=cluster.device, gpus_per_node=cluster.gpus_per_node)
    job = replace(job, network_gbps=job.gpu.network_gbps, collectives=cluster.collectives)
    job = replace(job, leaf=cluster.leaf, oversubscription=cluster.oversubscription)
    if not isfinite(spare) or not 0 <= spare < 1:
        raise ValueError(f"spare must be a share of memory, from 0 to less than 1, got {spare}")
    check_given(given, job.shape, cluster, uneven)
    if "recompute" in given:
        given["recompute"] = recomputed(given["recompute"])
    schedules = schedules_of(schedule, given)
    if schedule != "free" and schedule not in job.stack.schedules:
        known = ", ".join(job.stack.schedules)
        raise ValueError(f"{job.stack.name} does not run schedule={schedule}: use {known}")
    return Space(job, global_batch, given, spare, uneven, cluster.host_gib, schedules)
