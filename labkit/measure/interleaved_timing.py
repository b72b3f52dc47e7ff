"""Variants of one thing, timed in turns: a ratio that may be believed on a small noisy machine.

    repetition 1   | barrier | b b b | barrier | a a a | barrier | b' b' b' |
    repetition 2   | barrier | a a a | barrier | b' b' b' | barrier | b b b |
    ...            a new order in each, the same on all ranks; b' is b again: the noise

A slow second then slows all variants. A variant is a function of nothing that takes one step.
`stats.paired_ratio` makes of two columns what may be said of them.
"""

import time

import torch.distributed as dist

from labkit.measure.stats import shuffled_rounds
from labkit.measure.traffic import TrafficCounter

STEPS = 3  # of a variant between two barriers
WARMUP = 2  # repetitions that are run and thrown away


def timed(variants, *, repetitions, steps=STEPS, warmup=WARMUP):
    """Yield {variant, repetition, ms}, ms of one step. Collective where there are ranks.

    variants: name -> function. Where its last step returns a dict, that is added.
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
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def time_variants(context, variants, *, repetitions, beside=None, **settings):
    """Runs on every rank: record rank 0's rows of timed(), and move the bar.

    beside: name -> dict of what else is known of a variant; what it returns itself goes before.
    """
    for row in timed(variants, repetitions=repetitions, **settings):
        if context.rank == 0:
            context.record(**(beside or {}).get(row["variant"], {}) | row)
        context.progress(row["repetition"] + 1, repetitions)


def time_and_count(context, variants, **settings):
    """time_variants(), with `messages` in each row: of a variant's second step, not timed."""
    counted = {}
    for name, step in variants.items():
        step()  # the first may set up more than it will need again
        with TrafficCounter(context.world_size) as traffic:
            step()
        counted[name] = {"messages": traffic.messages}
    time_variants(context, variants, beside=counted, **settings)


def columns(records, value="ms"):
    """The rows as variant -> values in the order of the repetitions."""
    ordered = records.sort_values("repetition")
    return {name: rows[value].tolist() for name, rows in ordered.groupby("variant")}
