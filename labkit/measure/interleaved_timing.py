"""Time variants in interleaved rounds, for reliable ratios on a small noisy machine.

    repetition 1   | barrier | b b b | barrier | a a a | barrier | b' b' b' |
    repetition 2   | barrier | a a a | barrier | b' b' b' | barrier | b b b |
    ...            a new order in each, the same on all ranks; b' is b again, and shows the noise

A slow second then slows all variants. A variant is a function without arguments that takes one
step. Compare two columns with `stats.paired_ratio`.
"""

import time

import torch.distributed as dist

from labkit.measure.stats import shuffled_rounds
from labkit.measure.traffic import TrafficCounter

STEPS = 3  # steps of a variant between two barriers
WARMUP = 2  # repetitions that are discarded


def timed(variants, *, repetitions, steps=STEPS, warmup=WARMUP):
    """Yield {variant, repetition, ms}, ms per step. Collective if there is a process group.

    variants: name -> function without arguments. If its last step returns a dict, the row includes
    it. repetitions: timed ones, after `warmup` that are discarded.
    """
    for number, name in shuffled_rounds(variants, repetitions + warmup):
        meet()
        started = time.perf_counter()
        for _ in range(steps):
            extra = variants[name]()
        meet()
        ms = 1000 * (time.perf_counter() - started) / steps
        if number >= warmup:
            row = {"variant": name, "repetition": number - warmup, "ms": ms}
            yield row | extra if isinstance(extra, dict) else row


def meet():
    """Wait for all ranks, if there is a process group."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def time_variants(context, variants, *, repetitions, beside=None, **settings):
    """Record rank 0's rows of timed(), and move the progress bar. Call it on every rank.

    beside: name -> dict of further fields of a variant; the fields of timed() take precedence.
    """
    for row in timed(variants, repetitions=repetitions, **settings):
        if context.rank == 0:
            context.record(**(beside or {}).get(row["variant"], {}) | row)
        context.progress(row["repetition"] + 1, repetitions)


def time_and_count(context, variants, **settings):
    """Run time_variants() with `messages` in each row, counted in an extra step of each variant."""
    counted = {}
    for name, step in variants.items():
        step()  # the first step may need more set-up than later ones
        with TrafficCounter(context.world_size) as traffic:
            step()
        counted[name] = {"messages": traffic.messages}
    time_variants(context, variants, beside=counted, **settings)


def columns(records, value="ms"):
    """Return {variant: values in the order of the repetitions}. records: a DataFrame of rows."""
    ordered = records.sort_values("repetition")
    return {name: rows[value].tolist() for name, rows in ordered.groupby("variant")}
