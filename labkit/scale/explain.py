"""Explain a plan: why the next one is slower or too large, and which constants it depends on.

    runner-up   its step, part by part             the parts that are longer
    too large   its memory, kind by kind           the kind that is larger
    constants   of constants.csv, each at both ends of its spread, with the others unchanged:

        of time      the same jobs fit: rank them again, until no other could be faster
        of memory    other jobs fit: search again for jobs faster than those that still fit

If a constant k becomes r k, no part of a step changes by more than the factor r or 1/r. So a job
with step time t then takes at least t min(r, 1/r). Both the new ranking and the new search are
therefore exact.
Constants change one at a time, so their interactions are not covered; Saltelli et al., Global
Sensitivity Analysis, 2008, section 1.2, discusses this limit.
"""

from dataclasses import dataclass, replace

from labkit.scale import constants
from labkit.scale.cost import predict_step
from labkit.scale.job_config import SCHEDULES
from labkit.scale.memory_model import predict_memory
from labkit.scale.search import Found, search
from labkit.scale.validate_args import AXES

KINDS = ("states", "gathered", "activations", "logits", "runtime")


def words(job):
    """Return a job's layout in a few words."""
    sizes = " x ".join(f"{a} {getattr(job, a)}" for a in AXES if getattr(job, a) > 1) or "one GPU"
    inner = "".join(f", {a} {getattr(job, a)}" for a in ("ep", "vpp") if getattr(job, a) > 1)
    inner += f", {SCHEDULES[job.schedule]}" if job.schedule != "1f1b" else ""
    again = "" if job.recompute == "none" else f", recompute {job.recompute}"
    again += ", states offloaded" if job.offload else ""
    return f"{sizes}{inner}, ZeRO-{job.zero}, batch {job.grad_accum} x {job.micro_batch}{again}"


def why_slower(other, best):
    """Return a line that says which parts of the other's step are longer."""
    mine, theirs = best.step.parts, other.step.parts
    longer = sorted(mine, key=lambda part: mine[part] - theirs[part])[:2]
    reasons = ", ".join(f"{p} {theirs[p] - mine[p]:+.3g} s" for p in longer if theirs[p] > mine[p])
    return f"{words(other.job)}: {other.seconds / best.seconds - 1:+.1%} of a step: {reasons}"


def why_larger(other, best, spare):
    """Return a line that says which kind of the other's memory is too large."""
    kind = max(KINDS, key=lambda k: getattr(other.peak, k) - getattr(best.peak, k))
    usable, more = (1 - spare) * other.peak.memory, getattr(other.peak, kind)
    return (
        f"{words(other.job)}: {other.seconds / best.seconds - 1:+.1%} of a step, but "
        f"{other.peak.total:.1f} GiB of {usable:.1f}: {kind} {more:.1f}, "
        f"not {getattr(best.peak, kind):.1f}"
    )


@dataclass(frozen=True)
class Moved:
    """The effect of one constant at another value.

    constant: a constants.Constant, set to `value`. same: the plan's fastest job with that value, a
    Found. best: the fastest job with that value; None: nothing fits.
    """

    constant: object
    value: float
    same: Found
    best: Found | None

    @property
    def changes(self):
        """Whether another job is the fastest with the new value."""
        return self.best is None or self.best.job != self.same.job


def sensitivity(plan):
    """Return a list of Moved, two for each constant that has a spread."""
    return [
        moved(plan, constant, value)
        for constant in constants.read()
        for value in dict.fromkeys((constant.low, constant.high))
        if value != constant.value
    ]


def moved(plan, constant, value):
    """Return the Moved of a plan with one constant at another value."""
    c = constants.values() | {constant.name: value}
    same = again(plan.fastest, c)
    # nanotron's memory depends on whether the GPU waits for its host, and so on constants of time
    if constant.column == "tok_s_gpu" and not plan.space.job.stack.balances:
        return Moved(constant, value, same, ranked_again(plan, c, value / constant.value))
    now = (again(found, c) for found in plan.contenders)
    still = next((found for found in now if plan.space.fits(found.peak)), None)
    faster, _ = search(plan.space, same.job.n_gpus, c, still.seconds if still else float("inf"))
    return Moved(constant, value, same, min(faster, key=seconds, default=still))


def ranked_again(plan, c, ratio):
    """Return the fastest of the plan's contenders with constants c, as a Found.

    ratio: the new value of the changed constant / its old value.
    """
    best, least = None, min(ratio, 1 / ratio)
    for found in plan.contenders:
        if best and found.seconds * least > best.seconds:
            break
        now = replace(found, step=predict_step(found.job, c))
        best = min(filter(None, [best, now]), key=seconds)
    return best


def again(found, c):
    return Found(found.job, predict_step(found.job, c), predict_memory(found.job, c))


def seconds(found):
    return found.seconds
