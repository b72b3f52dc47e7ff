"""Over slow links: a training step with top-k 1 % against none, and gathers against the time of their bytes.

The step is of a GPT under our DDP, whose ranks are two nodes. The time spent compressing is the compressor's own clock,
on rank 0; what it saves is how much sooner a step ends. In gathers a link is used both ways at once: were the two ways
to take turns, as in gloo's own, it would be twice the time.
"""

import copy

import torch

from benchmarks.data_parallel import share, training_step
from benchmarks.protocol import Comparison
from labkit import comm, models
from labkit.measure.interleaved_timing import columns, time_variants
from labkit.run import launch

LINK_MBIT = 100
LAYERS = 4  # of width 384: 7 million parameters, whose gradients are 2.5 s of this link
RATIO = 0.01
SAMPLES = 2  # a rank
GATHERED = 2**20  # elements of 4 bytes
AT_MOST = {2: 1.2, 4: 1.5}  # nodes -> time / time of the bytes; of four each sends to three at once, and is sent to


def times(context, repetitions):
    """Runs on every rank."""
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
    """Runs on every rank."""
    whole, part = torch.zeros(GATHERED), torch.zeros(GATHERED // context.world_size)
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
    """Yield the rows and the raw values; nothing, after the line that says why, where there are no namespaces."""
    if launch("pass", nodes=2, nproc=1).network["how"] == "loopback":
        return
    link = {"nodes": 2, "nproc": 1, "link_mbit": LINK_MBIT}
    records = launch("benchmarks.slow_link:times", **link, repetitions=repetitions, timeout=1800).records
    values, compressing = columns(records), columns(records, "compressing")["topk"]
    yield list(rows(values, compressing)), {"ms": values, "compressing": compressing}
    for nodes in AT_MOST:
        link = {"nodes": nodes, "nproc": 1, "link_mbit": LINK_MBIT}
        values = columns(launch("benchmarks.slow_link:gathers", **link, repetitions=repetitions, timeout=1800).records)
        yield list(gather_rows(values, nodes)), values
