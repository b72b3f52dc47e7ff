"""Over slow links: a training step with top-k 1 % against none, and gathers against the time of their bytes.

The step is of a GPT under our DDP, whose ranks are two nodes. Compression time is by the compressor's clock on rank 0;
savings are the difference of step times. Gathers use a link in both directions at once; gloo's own uses one direction
after the other and takes twice the time.
"""

import copy

import torch

from benchmarks.data_parallel import share, training_step
from benchmarks.protocol import Comparison
from labkit import comm, models
from labkit.measure.interleaved_timing import columns, time_variants
from labkit.run import launch

LINK_MBIT = 100
LAYERS = 4  # of width 384: 7 million parameters, whose gradients take 2.5 s on this link
RATIO = 0.01
SAMPLES = 2  # a rank
GATHERED = 2**20  # elements of 4 bytes
AT_MOST = {2: 1.2, 4: 1.5}  # nodes -> time / time of the bytes; with four, each sends to and receives from three


def times(context, repetitions):
    """Measure on every rank."""
    from labkit.compression import TopK
    from labkit.ddp import DDP

    torch.manual_seed(0)
    module = models.build("gpt", "medium", layers=LAYERS).to(context.device)
    batch = [part[:SAMPLES] for part in share(context, "gpt")]

    def variant(compressor=None):
        wrapped = DDP(copy.deepcopy(module))
        step = training_step(wrapped, models.loss("gpt"), *batch)
        if compressor is None:
            return step
        wrapped.register_comm_hook(None, compressor.hook)

        def compressed():
            before = compressor.seconds
            step()
            return {"compressing": 1000 * (compressor.seconds - before)}

        return compressed

    variants = {"none": variant(), "topk": variant(TopK(RATIO)), "topk again": variant(TopK(RATIO))}
    time_variants(context, variants, repetitions=repetitions, steps=1)


def rows(values, compressing):
    saved = [plain - compressed for plain, compressed in zip(values["none"], values["topk"], strict=True)]
    group = f"GPT, 2 nodes, {LINK_MBIT} Mbit/s"
    yield Comparison("top-k 1 % / no compression", "topk", "none", at_most=1 / 8).row(group, 2, values)
    yield Comparison("A/A: top-k 1 % / itself", "topk again", "topk").row(group, 2, values)
    spent = Comparison("time compressing / time saved by it", "compressing", "saved", at_most=0.10)
    yield spent.row(group, 2, {"compressing": compressing, "saved": saved})


def gathers(context, repetitions):
    """Measure on every rank."""
    whole = torch.zeros(GATHERED)
    part = torch.zeros(GATHERED // context.world_size)
    variants = {
        "all_gather": lambda: comm.all_gather(whole, part),
        "again": lambda: comm.all_gather(whole, part),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole),
    }
    time_variants(context, variants, repetitions=repetitions, steps=1)


def gather_rows(values, nodes):
    group = f"gathers, {nodes} nodes, {LINK_MBIT} Mbit/s"
    least = 1000 * (nodes - 1) / nodes * GATHERED * 4 * 8 / (LINK_MBIT * 1e6)
    for name in ("all_gather", "reduce_scatter"):
        compared = Comparison(f"{name} / time of its bytes", "time", "least", AT_MOST[nodes])
        yield compared.row(group, nodes, {"time": values[name], "least": [least] * len(values[name])})
    yield Comparison("A/A: all_gather / itself", "again", "all_gather").row(group, nodes, values)


def run(repetitions):
    """Yield the rows and the raw values; without namespaces, print a line and yield nothing."""
    if launch("pass", nodes=2, nproc=1).network["how"] == "loopback":
        return
    link = {"nodes": 2, "nproc": 1, "link_mbit": LINK_MBIT}
    records = launch("benchmarks.slow_link:times", **link, repetitions=repetitions, timeout=1800).records
    values = columns(records)
    compressing = columns(records, "compressing")["topk"]
    yield list(rows(values, compressing)), {"ms": values, "compressing": compressing}
    for nodes in AT_MOST:
        link = {"nodes": nodes, "nproc": 1, "link_mbit": LINK_MBIT}
        values = columns(launch("benchmarks.slow_link:gathers", **link, repetitions=repetitions, timeout=1800).records)
        yield list(gather_rows(values, nodes)), values
