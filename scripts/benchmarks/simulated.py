"""Steps of emulated compute over shaped links, and their simulation, which is fitted on none of them.

What simulate() is given: of each operation the line through two sizes of it, timed alone, before any step, on the same
links; and the moments at which messages leave. Those come from the same code on a group that sends nothing ("fake"),
where all ranks step at once: they share the cores, so what Python takes is in it. In the row of an ideal host they come
from a rehearsal, on a clock that only emulated compute moves. A pipeline is played.
"""

import statistics
import time
from dataclasses import asdict, replace
from itertools import product
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.protocol import Comparison, exact_row
from labkit import comm
from labkit.comm_log import Event, Pause
from labkit.ddp import DDP
from labkit.fsdp import FSDP
from labkit.measure.interleaved_timing import columns, time_variants
from labkit.memory.dry_run import dry_run
from labkit.models import emulated
from labkit.pipeline import Pipeline, one_f_one_b
from labkit.pipeline.schedule_validation import play
from labkit.run import launch
from labkit.scale.simulate import simulate
from labkit.scale.virtual_clock import only_sleep
from labkit.zero import ZeRO1

NODES, LINKS_MBIT, BLOCKS_MS = (2, 4, 8), (100, 400), (5.0, 15.0)
FORMS = ("DDP, one message", "DDP, a block a message", "ZeRO-1", "FSDP")
PIPELINE, MICRO_BATCHES, ROWS = "1F1B", 8, 64  # rows of a micro-batch
BLOCKS, WIDTH = 6, 256
SIZES = (2**16, 2**19)  # elements of the messages that are timed alone
MEDIAN, WORST = 0.05, 0.15  # what the error may be


def stepper(form, block_ms, device, group=None):
    """A function that takes one training step of a stack of blocks that sleep."""
    with torch.device(device):
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
        batch = torch.ones(2, WIDTH)
    emulated.emulate(module, nn.Linear, block_ms)
    size_mb = 4 * WIDTH * (WIDTH + 1) / 2**20
    if form == "ZeRO-1":
        given = {"process_group": group, "bucket_cap_mb": size_mb, "lr": 1e-3}
        model, optimizer = module, ZeRO1(module.parameters(), torch.optim.SGD, **given)
    else:
        if form == "FSDP":
            model = FSDP(module, unit=nn.Linear, process_group=group)
        else:
            model = DDP(module, process_group=group, bucket_cap_mb=size_mb if "block" in form else 25)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def pipeline_stepper(rank, ranks, block_ms):
    """The same of 1F1B, a block a rank."""
    stage = emulated.emulate(nn.Linear(WIDTH, WIDTH), nn.Linear, block_ms)
    made = Pipeline({rank: stage}, None, one_f_one_b, MICRO_BATCHES, nn.functional.mse_loss)
    batch = torch.zeros(ROWS * MICRO_BATCHES, WIDTH)

    def step():
        made.step(batch, batch)

    return step


def rehearsed(device, clock, form, block_ms):
    step = stepper(form, block_ms, device)
    for _ in range(2):  # the first finds the order of gradients and gathers
        clock.sleep(1.0)
        start = clock.now
        step()
    return start, clock.now


def times(context, repetitions):
    """Runs on every rank."""
    for op, seconds in lines(context.world_size, repetitions).items():
        if context.rank == 0:
            context.record(op=op, seconds=seconds)
    nobody = dist.new_group(backend="fake")
    for form, ms in product(FORMS, BLOCKS_MS):
        told = unanswered(stepper(form, ms, "cpu", nobody), repetitions)
        if context.rank == 0:
            context.record(left=f"{form}|{ms}", **told)
    variants = {f"{form}|{ms}": stepper(form, ms, "cpu") for form, ms in product(FORMS, BLOCKS_MS)}
    here = context.rank, context.world_size
    variants |= {f"{PIPELINE}|{ms}": pipeline_stepper(*here, ms) for ms in BLOCKS_MS}
    for name, step in variants.items():
        step()
        with comm.record() as events:
            step()
        if context.rank == 0:
            context.record(name=name, sent=sum(event.sent_bytes for event in events))
    time_variants(context, variants, repetitions=repetitions, steps=1)


def unanswered(step, repetitions):
    """The step of median length, of those whose messages take no time. Collective: all ranks step at once."""
    steps = []
    for _ in range(repetitions + 2):  # the first finds the order of gradients and gathers
        dist.barrier()
        with comm.record() as events:
            start = time.perf_counter()
            step()
            end = time.perf_counter()
        steps.append((end - start, start, end, events))
    _, start, end, events = sorted(steps[2:], key=itemgetter(0))[repetitions // 2]
    return {"start": start, "end": end, "events": [asdict(event) for event in events]}


def lines(n, repetitions):
    """{operation: median seconds of messages of SIZES}. Collective."""
    found = {}
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        for numel in SIZES:
            whole, part = torch.zeros(numel // n * n), torch.zeros(numel // n)
            given = {"all_reduce": (whole,), "reduce_scatter": (part, whole), "all_gather": (whole, part)}[op]
            taken = []
            for _ in range(repetitions + 1):
                dist.barrier()
                start = time.perf_counter()
                getattr(comm, op)(*given)
                taken.append(time.perf_counter() - start)
            found.setdefault(op, []).append(statistics.median(taken[1:]))
    return found | {"send": [there_and_back(numel, repetitions) / 2 for numel in SIZES]}


def there_and_back(numel, repetitions):
    """Median seconds from rank 0 to rank 1 and back; 0 on the others."""
    message, taken = torch.zeros(numel), []
    for _ in range(repetitions + 1):
        dist.barrier()
        start = time.perf_counter()
        for sender, receiver in ((0, 1), (1, 0)):
            if dist.get_rank() == sender:
                comm.send(message, receiver)
            elif dist.get_rank() == receiver:
                comm.recv(message, sender)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def line(seconds, size):
    """Seconds of a message of `size` bytes, by those of SIZES."""
    (few, many), (short, long) = (4 * one for one in SIZES), seconds
    return short + (long - short) / (many - few) * (size - few)


def as_on_gloo(event):
    """There FSDP waits for a reduce_scatter at once, not to hold what travels twice (labkit/fsdp/flat_param.py)."""
    return replace(event, pauses=[Pause(event.start)]) if event.op == "reduce_scatter" else event


def simulated(form, block_ms, nodes, alone, left):
    """(seconds of a step, of one whose host takes no time, bytes that rank 0 sends in it). left: by unanswered()."""
    if form == PIPELINE:
        size = 4 * ROWS * WIDTH
        schedule = one_f_one_b(nodes, MICRO_BATCHES, nodes)
        played = play(schedule, dict.fromkeys("FBW", block_ms / 1e3), line(alone["send"], size))
        return played.length, played.length, MICRO_BATCHES * size
    with only_sleep(emulated) as clock:
        told = dry_run(rehearsed, nodes, clock=clock, form=form, block_ms=block_ms)
    start, end = told.result
    ideal = [event for event in told.events if event.start >= start]
    real = [Event(**event | {"pauses": paused(event["pauses"])}) for event in left["events"]]
    found = []
    for events, first, last in ((real, left["start"], left["end"]), (ideal, start, end)):
        waits = list(map(as_on_gloo, events) if form == "FSDP" else events)
        found.append(simulate(waits, first, last, lambda e: ("network", line(alone[e.op], e.payload_bytes))).seconds)
    return *found, sum(event.sent_bytes for event in ideal)


def paused(pauses):
    return None if pauses is None else [Pause(**pause) for pause in pauses]


def run(repetitions):
    """Yield the rows and the raw values; nothing, after the line that says why, where there are no namespaces."""
    if launch("pass", nodes=2, nproc=1).network["how"] == "loopback":
        return
    errors, ideal, sent, counted = [], [], 0, 0
    for nodes, mbit in product(NODES, LINKS_MBIT):
        rows, values = compared(nodes, mbit, repetitions)
        errors += [abs(row["ratio"] - 1) for row in rows]
        ideal += values["ideal"]
        sent, counted = sent + sum(values["sent"]), counted + sum(values["counted"])
        yield rows, values
    told = {"benchmark": "simulated", "ranks": f"{NODES[0]} to {NODES[-1]}", "pairs": len(errors)}
    summary = [
        told | row(f"half of {len(errors)} errors are less", errors, MEDIAN),
        told | row("the largest error", [max(errors)] * 2, WORST),
        told | row("half of them, the host ideal", ideal, None),
        told | row("the largest, the host ideal", [max(ideal)] * 2, None),
    ]
    exact = exact_row("simulated", "bytes of all steps", told["ranks"], sent, counted)
    yield [*summary, exact], {"errors": errors, "ideal": ideal}


def row(words, errors, most):
    """The median of errors, and what it may be."""
    low, middle, high = statistics.quantiles(errors, n=4)
    verdict = None if most is None else "holds" if middle <= most else "missed"
    target = None if most is None else f"at most {most}"
    found = {"row": words, "ratio": middle, "low": low, "high": high, "interval": f"quartiles {low:.3f} to {high:.3f}"}
    return found | {"target": target, "verdict": verdict}


def compared(nodes, mbit, repetitions):
    link = {"nodes": nodes, "nproc": 1, "link_mbit": mbit}
    records = launch("benchmarks.simulated:times", **link, repetitions=repetitions, timeout=1800).records
    alone = records.dropna(subset="op").set_index("op")["seconds"].to_dict()
    real = records.dropna(subset="sent").set_index("name")["sent"].to_dict()
    left = records.dropna(subset="left").set_index("left")[["start", "end", "events"]].to_dict("index")
    measured = columns(records.dropna(subset="ms"))
    rows, values = [], {"alone": alone, "sent": [], "counted": [], "ideal": []}
    for name, steps in measured.items():
        form, ms = name.split("|")
        seconds, ideal, counted = simulated(form, float(ms), nodes, alone, left.get(name))
        values |= {name: steps, f"{name}, simulated": [1e3 * seconds] * len(steps)}
        values["sent"].append(int(real[name]))
        values["counted"].append(counted)
        values["ideal"].append(abs(statistics.median(steps) / 1e3 / ideal - 1))
        words = f"{form}, {ms} ms a block, {mbit} Mbit/s: measured / simulated"
        rows.append(Comparison(words, name, f"{name}, simulated").row("simulated", nodes, values))
    return rows, values
