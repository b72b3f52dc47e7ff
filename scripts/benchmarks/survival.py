"""The cost of fault tolerance: a step with a watchdog and preemption, and checkpoints written during training.

The watched step is labkit.train's, without a save, against the same model in a plain loop. A checkpoint is timed twice:
how long save() delays training, and until all of it is on the disk. It is compared with PyTorch's async_save of the
same state, and with a plain copy: each rank writes as many bytes as its file has, and waits for the disk.
"""

import copy
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.data_parallel import share
from benchmarks.protocol import Comparison, exact_row
from benchmarks.zero import training_step
from labkit import models
from labkit.measure.interleaved_timing import columns, meet, time_variants
from labkit.run import launch

STEP = [
    Comparison("watched, and asked whether to stop / by hand", "watched", "by hand", at_most=1.02),
    Comparison("watched / not watched", "trainer, watched", "trainer", at_most=1.01),
    Comparison("A/A: by hand / by hand", "by hand again", "by hand"),
]
SAVE = [
    Comparison("stands still / until it is written", "stall", "whole", at_most=0.10),
    Comparison("writing / a plain copy of the same bytes", "written", "copy", at_most=1.25),
    Comparison("stands still / async_save", "stall", "stall of async_save", at_most=1.0),
    Comparison("until it is written / async_save", "whole", "async_save", at_most=0.8),
    Comparison("A/A: a plain copy / a plain copy", "copy again", "copy"),
]


def steps(context, model, repetitions):
    """Measure on every rank."""
    from labkit.ddp import DDP
    from labkit.measure.monitor import Monitor
    from labkit.measure.sinks import open_sinks
    from labkit.measure.timeline import Timeline
    from labkit.preempt import Agreement, Preemption
    from labkit.trainer import Trainer

    torch.manual_seed(0)
    module = models.build(model, "small").to(context.device)
    loss = models.loss(model)
    input, target = share(context, model)

    def made():
        wrapped = DDP(copy.deepcopy(module))
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.001)

    with tempfile.TemporaryDirectory() as folder:
        timelines = [Timeline(context.rank, context.device) for _ in range(2)]
        trainers = [Trainer(*made(), loss, span=timeline.span) for timeline in timelines]
        monitors = [Monitor(timeline, open_sinks([f"jsonl:{folder}"], context.rank)) for timeline in timelines]
        preemption = Preemption()
        agreement = Agreement(lambda: preemption.told)
        trainers[0].on_loss = agreement.send
        plain = Trainer(*made(), loss)

        def watched():
            with monitors[0].step(1) as row:
                trainers[0].train_step(input, target)
                mean, _ = agreement.read()
                row["loss"] = mean.item()

        def only_watched():
            with monitors[1].step(1) as row:
                row["loss"] = trainers[1].train_step(input, target).item()

        variants = {"watched": watched, "trainer, watched": only_watched}
        variants["trainer"] = lambda: plain.train_step(input, target).item()
        variants |= {name: by_hand(*made(), loss, input, target) for name in ("by hand", "by hand again")}
        time_variants(context, variants, repetitions=repetitions)
        for monitor in monitors:
            monitor.close()


def by_hand(model, optimizer, loss, input, target):
    """Take steps of a plain loop that prints its loss, and so waits for it, too."""

    def step():
        optimizer.zero_grad()
        value = loss(model(input), target)
        value.backward()
        optimizer.step()
        value.item()

    return step


def saves(context, strategy, repetitions):
    """Measure on every rank: rank 0 records a row of seconds per repetition, every rank its bytes."""
    import torch.distributed.checkpoint as dcp

    from labkit.checkpoint import Checkpoints
    from labkit.measure.stats import shuffled_rounds
    from labkit.trainer import make_optimizer, parallelize

    torch.manual_seed(0)
    model = parallelize(models.build("gpt", "medium"), strategy, models.unit("gpt"))
    optimizer = make_optimizer(model, strategy, torch.optim.AdamW, lr=0.001)
    training_step(model, optimizer, models.loss("gpt"), *share(context, "gpt"))()
    state = {"model": model, "optimizer": optimizer}
    with tempfile.TemporaryDirectory(dir=os.environ.get("LABKIT_DISK")) as own:
        places = [own]
        dist.broadcast_object_list(places)
        folder = Path(places[0])
        checkpoints = Checkpoints(folder / "ours", keep=1)
        checkpoints.save(0, state)
        checkpoints.wait()
        meet()
        file = folder / "ours" / "step-000000000" / f"rank-{context.rank}.safetensors"
        size = file.stat().st_size
        content = file.read_bytes()
        held = sum(copied.nbytes for copied in checkpoints._host.values())
        context.record(of="bytes", written=size, held=held)
        group = dist.new_group(backend="gloo")

        def ours(number):
            start = time.perf_counter()
            checkpoints.save(number, state)
            stall = time.perf_counter() - start
            checkpoints.wait()
            whole = time.perf_counter() - start
            return {"stall": stall, "whole": whole, "written": whole - stall}

        def theirs(number):
            start = time.perf_counter()
            both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            saving = dcp.async_save(both, checkpoint_id=folder / "theirs" / str(number), process_group=group)
            stall = time.perf_counter() - start
            saving.result()
            return {"stall of async_save": stall, "async_save": time.perf_counter() - start}

        def plain_copy(number):
            start = time.perf_counter()
            with open(folder / f"copy-{context.rank}", "wb") as copied:
                copied.write(content)
                copied.flush()
                os.fsync(copied.fileno())
            dist.barrier()
            return time.perf_counter() - start

        variants = {"ours": ours, "copy": plain_copy, "copy again": plain_copy}
        if strategy == "ddp_bucketed":  # whose state dicts PyTorch's writer supports directly
            variants["theirs"] = theirs
        rows = {}
        for number, name in shuffled_rounds(variants, repetitions + 1):
            if context.rank == 0:
                shutil.rmtree(folder / "theirs", ignore_errors=True)
                os.sync()  # what another variant has left to write would be waited for by fsync
            meet()
            took = variants[name](number + 1)
            rows.setdefault(number, {}).update(took if isinstance(took, dict) else {name: took})
            meet()
            context.progress(number + 1, repetitions + 1)
        if context.rank == 0:
            for number in range(1, repetitions + 1):
                context.record(of="seconds", **rows[number])
        checkpoints.close()
        meet()


def run(repetitions):
    """Yield the rows and the raw times."""
    for model in ("mlp", "gpt"):
        measured = launch("benchmarks.survival:steps", nproc=2, model=model, repetitions=repetitions)
        values = columns(measured.records)
        yield [comparison.row(f"a watched step, {model}", 2, values) for comparison in STEP], values
    for strategy in ("ddp_bucketed", "fsdp"):
        records = launch("benchmarks.survival:saves", nproc=2, strategy=strategy, repetitions=repetitions).records
        values = records[records["of"] == "seconds"].dropna(axis=1).to_dict("list")
        rows = [one.row(f"a checkpoint, {strategy}", 2, values) for one in SAVE if {one.ours, one.theirs} <= {*values}]
        of_ranks = records[records["of"] == "bytes"]
        held = int(of_ranks["held"].max())
        written = int(of_ranks["written"].max())
        row = exact_row(f"a checkpoint, {strategy}", "host memory of a rank / its file", 2, held, written)
        rows.append(row | {"target": "at most 1", "verdict": "holds" if held <= written else "missed"})
        yield rows, values
