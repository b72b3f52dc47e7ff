"""A training step of GPT blocks of width 256 sharded over ranks: our tensor parallelism, and PyTorch's on DTensor.

One plan for both libraries, with all tokens on every rank and with shards of the sequence. All variants start from the
same weights, use the same input, and have their own copy of the blocks. Bytes are counted.
"""

import copy
from types import SimpleNamespace

import torch
from torch import nn

from benchmarks.protocol import Comparison, exact_row
from labkit import comm
from labkit.measure.interleaved_timing import columns, time_variants
from labkit.models import plans
from labkit.run import launch

WIDTH = 256
HEADS = 8
LAYERS = 4
BATCH = 4
TOKENS = 128
AT_MOST = {2: 0.80, 4: 0.90}


def comparisons(nproc):
    return [
        Comparison("tensor parallel / DTensor", "ours", "torch", at_most=AT_MOST[nproc]),
        Comparison("with sequence shards / DTensor so", "ours, sequence", "torch, sequence"),
        Comparison("with sequence shards / all tokens", "ours, sequence", "ours", at_most=1.10),
        Comparison("A/A: DTensor / DTensor", "torch again", "torch"),
    ]


def of_ours(context, blocks, sequence):
    from labkit.tensor_parallel import tensor_parallel

    plan = plans.of_blocks(plans.gpt(tensor_parallel, sequence))
    return tensor_parallel.parallelize_module(blocks, None, plan)


def of_pytorch(context, blocks, sequence):
    from torch.distributed import tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    styles = SimpleNamespace(**{**vars(tensor), **vars(parallel)})
    mesh = init_device_mesh(torch.device(context.device).type, (context.world_size,))
    return parallel.parallelize_module(blocks, mesh, plans.of_blocks(plans.gpt(styles, sequence)))


def setting(context, sequence):
    """Return blocks, and their input on this rank."""
    from labkit.models.gpt import Block

    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(LAYERS))).to(context.device)
    x = torch.randn(BATCH, TOKENS, WIDTH, device=context.device)
    return blocks, x.chunk(context.world_size, 1)[context.rank] if sequence else x


def training_step(blocks, x):
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.01, momentum=0.9)

    def step():
        optimizer.zero_grad()
        blocks(x.detach().requires_grad_()).square().mean().backward()
        optimizer.step()

    return step


def made(context, make, sequence=False):
    blocks, x = setting(context, sequence)
    return training_step(make(context, copy.deepcopy(blocks), sequence), x)


def times(context, repetitions):
    """Measure on every rank."""
    variants = {
        "ours": made(context, of_ours),
        "torch": made(context, of_pytorch),
        "torch again": made(context, of_pytorch),
        "ours, sequence": made(context, of_ours, True),
        "torch, sequence": made(context, of_pytorch, True),
    }
    time_variants(context, variants, repetitions=repetitions)


def sent(context):
    """Count, on every rank, the bytes sent in one step by both variants."""
    counts = {}
    for form, sequence in (("all_tokens", False), ("sequence", True)):
        step = made(context, of_ours, sequence)
        with comm.record() as log:
            step()
        counts[form] = sum(event.sent_bytes for event in log)
    context.record(**counts)


def formula(nproc, sequence):
    """Return the bytes of a rank's messages: 4 all-reduces a block, and gradients of 2 norms and 2 biases."""
    numbers = 4 * BATCH * TOKENS * WIDTH + (6 * WIDTH if sequence else 0)
    return 4 * LAYERS * numbers * 2 * (nproc - 1) // nproc


def run(repetitions):
    """Yield the rows and the raw milliseconds, or counts, of each run."""
    for nproc in (2, 4):
        counts = launch("benchmarks.tensor_parallel:sent", nproc=nproc, quiet=True).records
        rows = [
            exact_row("tensor parallel", f"{form} sends", nproc, int(counts[form].max()), formula(nproc, sequence))
            for form, sequence in (("all_tokens", False), ("sequence", True))
        ]
        yield rows, counts.to_dict("list")
        measured = launch("benchmarks.tensor_parallel:times", nproc=nproc, repetitions=repetitions)
        values = columns(measured.records)
        yield [one.row("tensor parallel", nproc, values) for one in comparisons(nproc)], values
