"""Tiled attention against full scores and PyTorch's own kernel, and the waiting time of a ring.

Peak bytes are counted, in the exact rows; times are of forward and backward of one layer's causal attention.
"""

from functools import partial

import torch
from torch.nn import functional as F

from benchmarks.protocol import Comparison, exact_row
from labkit import comm
from labkit.measure.interleaved_timing import columns, time_variants
from labkit.run import launch

# of a head
HEADS = 4
WIDTH = 32
LENGTHS = (1024, 2048, 4096)
COMPARISONS = [
    Comparison("tiles / all scores at once", "tiles", "plain", at_most=1.0),
    Comparison("tiles / PyTorch's kernel", "tiles", "torch"),
    Comparison("A/A: tiles / tiles", "tiles again", "tiles"),
]
RING = [
    Comparison("ring: waited for / in flight", "waited", "flight"),
    Comparison("ring: waited for / a step", "waited", "ring"),
    Comparison("ring / all-to-all", "ring", "all-to-all"),
    Comparison("A/A: ring / ring", "ring again", "ring"),
]


def plain(query, key, value, is_causal):
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return torch.softmax(scores, -1) @ value


def inputs(length, device):
    return [torch.randn(1, HEADS, length, WIDTH, device=device, requires_grad=True) for _ in range(3)]


def forward_and_backward(attend, tensors):
    output = attend(*tensors, is_causal=True)
    torch.autograd.grad(output, tensors, torch.ones_like(output))


def times(context, length, repetitions):
    """Measure on one rank."""
    from labkit.attention import flash_attention

    tensors = inputs(length, context.device)
    forms = {"plain": plain, "tiles": flash_attention, "tiles again": flash_attention}
    forms["torch"] = F.scaled_dot_product_attention
    variants = {name: partial(forward_and_backward, attend, tensors) for name, attend in forms.items()}
    time_variants(context, variants, repetitions=repetitions, steps=1)


def peaks(context):
    """Count peak bytes by length, on one rank."""
    from labkit.attention import flash_attention
    from labkit.memory.memory_tracker import MemoryTracker

    for length in (1024, 2048, 3072):
        for name, attend in {"plain": plain, "tiles": flash_attention}.items():
            tensors = inputs(length, "cpu")
            with MemoryTracker() as memory:
                forward_and_backward(attend, tensors)
            context.record(form=name, length=length, peak=memory.peak_total)


def shared(context, length, repetitions):
    """Time a ring on every rank: in total, of its messages, and waiting for them."""
    from labkit.attention.context_parallel import places, ring_attention, ulysses_attention

    tensors = inputs(length, context.device)
    shards = [one[..., places(length).to(one.device), :].detach().requires_grad_() for one in tensors]

    def step(attend):
        with comm.record() as events:
            forward_and_backward(attend, shards)
        flight = sum(event.end - event.start for event in events)
        return {"flight": 1e3 * flight, "waited": 1e3 * sum(event.waited for event in events)}

    forms = {"ring": ring_attention, "ring again": ring_attention, "all-to-all": ulysses_attention}
    variants = {name: partial(step, attend) for name, attend in forms.items()}
    time_variants(context, variants, repetitions=repetitions, steps=1)


def held(context, own):
    """Count the bytes kept for backward, on every rank."""
    from labkit.attention.context_parallel import places, ring_attention
    from labkit.memory.memory_tracker import MemoryTracker

    length = own * context.world_size
    shards = [one[..., places(length), :].detach().requires_grad_() for one in inputs(length, "cpu")]
    with MemoryTracker() as memory:
        output = ring_attention(*shards, is_causal=True)
        context.record(held=sum(memory.current.values()), output=output.nbytes)


def run(repetitions):
    """Yield the rows and the raw measurements."""
    counted = launch("benchmarks.attention:peaks", nproc=1, device="cpu", quiet=True).records
    peak = counted.set_index(["form", "length"])["peak"]
    more = {form: peak[form].diff().dropna().astype(int).tolist() for form in ("plain", "tiles")}
    name = "tiles: at the peak for the third 1,024 tokens, of what the second took"
    rows = [exact_row("attention", name, 1, more["tiles"][1], more["tiles"][0])]
    yield rows, {"more for 1,024 tokens": more}
    whole = None
    for nproc in (1, 2, 4):
        kept = launch("benchmarks.attention:held", nproc=nproc, device="cpu", quiet=True, own=1024 // nproc).records
        kept = int(kept["held"].max())
        whole = kept if whole is None else whole
        yield [exact_row("attention", "ring: ranks x what a rank keeps", nproc, nproc * kept, whole)], {"kept": kept}
    yield from alone(repetitions)
    for nproc in (2, 4):
        given = {"length": 4096, "repetitions": repetitions}
        records = launch("benchmarks.attention:shared", nproc=nproc, device="cpu", **given).records
        values = columns(records)
        values |= {name: columns(records, name)["ring"] for name in ("flight", "waited")}
        yield [one.row("attention, 4,096 tokens", nproc, values) for one in RING], values


def alone(repetitions):
    """Yield the rows of one rank."""
    for length in LENGTHS:
        measured = launch("benchmarks.attention:times", nproc=1, length=length, repetitions=repetitions)
        values = columns(measured.records)
        rows = [one.row(f"attention, {length:,} tokens", 1, values) for one in COMPARISONS]
        if length < 2048:  # no claim where all scores fit into a cache
            rows[0] |= {"target": "", "verdict": ""}
        yield rows, values
