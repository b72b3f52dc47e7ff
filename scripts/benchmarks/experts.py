"""A mixture of experts against one network of the same work per token, both with emulated compute.

A row sleeps for ROW_US in an expert, or in the one network, and twice as long in backward; messages, routing and
sorting are real. In "to one" the router sends all tokens to one expert, whose rank computes for all. The times make no
claim. Bytes are counted and compared with the formula: each row that leaves the rank, there and back, in forward and in
backward.
"""

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.protocol import Comparison, exact_row
from labkit import comm
from labkit.measure.interleaved_timing import columns, time_variants
from labkit.models.emulated import Sleep
from labkit.moe import MoE
from labkit.run import launch

# tokens of a rank; microseconds of a row's forward
WIDTH = 128
TOKENS = 512
EXPERTS = 8
ROW_US = 40
COMPARISONS = [
    Comparison("mixture, balanced / one network", "balanced", "one network"),
    Comparison("mixture, all to one expert / balanced", "to one", "balanced"),
    Comparison("A/A: one network / one network", "one network again", "one network"),
]


class SleepingNetwork(nn.Module):
    """Two layers with a hidden width of 4 WIDTH; sleeps for each row of its input [rows, WIDTH]."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, rows):
        seconds = len(rows) * ROW_US / 1e6
        return Sleep.apply(rows, (seconds, 2 * seconds), *self.parameters())


def mixture(rows, to_one=False):
    """An MoE with one expert per token; rows go to the experts in turn, or all to the first."""
    moe = MoE(WIDTH, EXPERTS, 1, SleepingNetwork, dist.group.WORLD, balance=None)
    chosen = torch.zeros(len(rows), dtype=torch.int64) if to_one else torch.arange(len(rows)) % EXPERTS
    scores = nn.functional.one_hot(chosen, EXPERTS).to(rows)
    moe.router.register_forward_hook(lambda router, inputs, found: found + 100 * scores)
    return moe


def times(context, repetitions):
    """Measure on every rank."""
    rows = torch.randn(TOKENS, WIDTH, requires_grad=True)
    networks = {"one network": SleepingNetwork(), "one network again": SleepingNetwork()}
    networks |= {"balanced": mixture(rows), "to one": mixture(rows, to_one=True)}

    def step(network):
        network(rows).sum().backward()

    variants = {name: lambda network=network: step(network) for name, network in networks.items()}
    time_variants(context, variants, repetitions=repetitions, steps=1)


def sent(context):
    """Count, on every rank, the bytes of a step's all-to-alls and the rows that left the rank."""
    rows = torch.randn(TOKENS, WIDTH, requires_grad=True)
    for name in ("balanced", "to one"):
        moe = mixture(rows, name == "to one")
        with comm.record() as log:
            moe(rows).sum().backward()
        owner = moe.route(rows)[2] * context.world_size // EXPERTS
        bytes_sent = sum(event.sent_bytes for event in log if event.op == "all_to_all")
        context.record(variant=name, sent=bytes_sent, leaving=int((owner != context.rank).sum()))


def run(repetitions):
    """Yield the rows and the raw milliseconds, or counts, of each run."""
    for nproc in (2, 4):
        counts = launch("benchmarks.experts:sent", nproc=nproc, device="cpu", quiet=True).records
        totals = counts.groupby("variant", sort=False)[["sent", "leaving"]].sum()
        yield (
            [
                exact_row(f"experts, {name}", "all-to-alls", nproc, int(row.sent), int(row.leaving) * WIDTH * 4 * 2 * 2)
                for name, row in totals.iterrows()
            ],
            counts.to_dict("list"),
        )
    for nproc in (2, 4):
        measured = launch("benchmarks.experts:times", nproc=nproc, device="cpu", repetitions=repetitions)
        values = columns(measured.records)
        yield [comparison.row("experts, emulated", nproc, values) for comparison in COMPARISONS], values
