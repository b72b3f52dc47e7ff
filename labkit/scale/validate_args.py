"""Check the arguments of the planner before the search.

    axes        their ranks divide the GPUs, and are as many if dp, tp, pp and cp are given; tp
                divides heads, kv_heads, ffn and the GPUs of a node; pp divides the layers, ep the
                experts
    schedule    zero bubble has one stage a rank

An impossible value raises ValueError: one line with the value and with possible values.
"""

from math import isfinite, prod

from labkit.scale.hardware import PRECISIONS, with_precision
from labkit.scale.job_config import SCHEDULES

AXES = ("dp", "tp", "pp", "cp", "replicas")
GIVEN = {*AXES, "ep", "vpp", "zero", "micro_batch", "recompute"}


def check_given(given, shape, cluster, uneven):
    """Raise ValueError for impossible axes and settings."""
    for name, value in given.items():
        if name not in GIVEN:
            raise ValueError(f"unknown setting {name!r}: known are {', '.join(sorted(GIVEN))}")
        if name != "recompute" and (
            not isfinite(value) or value != int(value) or value < (name != "zero")
        ):
            least = 0 if name == "zero" else 1
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")
    if given.get("zero", 0) > 3:
        raise ValueError(f"zero must be 0, 1, 2 or 3, got {given['zero']}")
    sizes = {name: given[name] for name in AXES if name in given}
    ranks = prod(sizes.values())
    whole = set(AXES[:4]) <= sizes.keys()
    gpus, node = cluster.gpus, cluster.gpus_per_node
    for name, size in sizes.items():
        if gpus % size:
            raise ValueError(f"{name}={size} does not divide the {gpus} GPUs")
    if gpus % ranks or (whole and gpus != ranks):
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        way = "the product must be as many" if whole else f"it must divide {gpus}"
        raise ValueError(f"{product} = {ranks} ranks, but there are {gpus} GPUs: {way}")
    tp, pp, thin = (given.get(name, 1) for name in ("tp", "pp", "vpp"))
    for name, size in (shape.divided_by_tp | {"gpus_per_node": node}).items():
        if size % tp:
            raise ValueError(f"tp={tp} does not divide {name}={size}")
    if shape.experts % given.get("ep", 1):
        raise ValueError(f"ep={given['ep']} does not divide experts={shape.experts}")
    if shape.layers % (pp * thin) and not (uneven and thin == 1 and pp <= shape.layers):
        stages = f"pp={pp}" if thin == 1 else f"pp x vpp = {pp} x {thin}"
        usual = ", ".join(map(str, divisors(shape.layers)))
        raise ValueError(
            f"{stages} does not divide layers={shape.layers}: use one of {usual}, or uneven stages"
        )


def check_precision(precision, gpu):
    """Return the precision; "free" means fp8 if the GPU has it, else bf16, else fp16.

    Raises ValueError, one line, for an unknown precision and for one that the GPU does not have.
    """
    if precision == "free":
        return next(name for name in ("fp8", "bf16", "fp16", "fp32") if gpu.has(name))
    if not any(name in precision.lower() for name in PRECISIONS):
        raise ValueError(
            f"precision must be free or one of {', '.join(PRECISIONS)}, got {precision!r}"
        )
    if not gpu.has(precision):
        raise ValueError(
            f"{gpu.name} does not have {precision}: use {' or '.join(gpu.precisions)}, or a GPU "
            f"that has it: {', '.join(with_precision(precision))}"
        )
    return precision


def schedules_of(schedule, given):
    """Return the schedules to try. Raises ValueError if unknown or ruled out by `given`."""
    if schedule not in ("free", *SCHEDULES):
        known = ", ".join(SCHEDULES)
        raise ValueError(f"schedule must be free or one of {known}, got {schedule!r}")
    if schedule == "zero_bubble" and given.get("vpp", 1) > 1:
        raise ValueError(f"schedule=zero_bubble needs vpp=1, got {given['vpp']}: use 1f1b")
    return tuple(SCHEDULES) if schedule == "free" else (schedule,)


def divisors(n):
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
