"""Steps of emulated compute over shaped links, and their simulation, which is not fitted to them.

simulate() gets a line through two sizes of each operation, timed alone on the same links before any step, and the
times at which messages are sent. Those come from the same code on a "fake" group that sends nothing, where all ranks
step at once: they share the cores, so Python's time is included. In the row of an ideal host they come from a dry run,
on a clock that only emulated compute moves. A pipeline's schedule is simulated.
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
from labkit.torch_private import register_fake_backends
from labkit.zero import ZeRO1

NODES = (2, 4, 8)
LINKS_MBIT = (100, 400)
BLOCKS_MS = (5.0, 15.0)
FORMS = ("DDP, one message", "DDP, a block a message", "ZeRO-1", "FSDP")
# rows of a micro-batch
PIPELINE = "1F1B"
MICRO_BATCHES = 8
ROWS = 64
BLOCKS = 6
WIDTH = 256
SIZES = (2**16, 2**19)  # elements of the messages that are timed alone
# limits of the error
MEDIAN = 0.03
WORST = 0.15


def stepper(form, block_ms, device, group=None):
    """Return a function that takes one training step of a stack of sleeping blocks."""
    with torch.device(device):
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
        batch = torch.ones(2, WIDTH)
    emulated.emulate(module, nn.Linear, block_ms)
    size_mb = 4 * WIDTH * (WIDTH + 1) / 2**20
    if form == "ZeRO-1":
        given = {"process_group": group, "bucket_cap_mb": size_mb, "lr": 1e-3}
        model = module
        optimizer = ZeRO1(module.parameters(), torch.optim.SGD, **given)
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
    """Return a function that takes one 1F1B step, with a block per rank."""
    stage = emulated.emulate(nn.Linear(WIDTH, WIDTH), nn.Linear, block_ms)
    made = Pipeline({rank: stage}, None, one_f_one_b, MICRO_BATCHES, nn.functional.mse_loss)
    batch = torch.zeros(ROWS * MICRO_BATCHES, WIDTH)

    def step():
        made.step(batch, batch)

    return step


def rehearsed(device, clock, form, block_ms):
    step = stepper(form, block_ms, device)
    for _ in range(2):  # the first step finds the order of gradients and gathers
        clock.sleep(1.0)
        start = clock.now
        step()
    return start, clock.now


def times(context, repetitions):
    """Measure on every rank."""
    for op, seconds in lines(context.world_size, repetitions).items():
        if context.rank == 0:
            context.record(op=op, seconds=seconds)
    register_fake_backends("fake")
    fake = dist.new_group(backend="fake")
    for form, ms in product(FORMS, BLOCKS_MS):
        measured = unanswered(stepper(form, ms, "cpu", fake), repetitions)
        if context.rank == 0:
            context.record(left=f"{form}|{ms}", **measured)
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
    """Return the step of median length, without time for messages. Collective: all ranks step at once."""
    steps = []
    for _ in range(repetitions + 2):  # the first step finds the order of gradients and gathers
        dist.barrier()
        with comm.record() as events:
            start = time.perf_counter()
            step()
            end = time.perf_counter()
        steps.append((end - start, start, end, events))
    _, start, end, events = sorted(steps[2:], key=itemgetter(0))[repetitions // 2]
    return {"start": start, "end": end, "events": [asdict(event) for event in events]}


def lines(n, repetitions):
    """Return {operation: median seconds of messages of SIZES}. Collective."""
    medians = {}
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        for numel in SIZES:
            whole = torch.zeros(numel // n * n)
            part = torch.zeros(numel // n)
            given = {"all_reduce": (whole,), "reduce_scatter": (part, whole), "all_gather": (whole, part)}[op]
            taken = []
            for _ in range(repetitions + 1):
                dist.barrier()
                start = time.perf_counter()
                getattr(comm, op)(*given)
                taken.append(time.perf_counter() - start)
            medians.setdefault(op, []).append(statistics.median(taken[1:]))
    return medians | {"send": [there_and_back(numel, repetitions) / 2 for numel in SIZES]}


def there_and_back(numel, repetitions):
    """Return median seconds from rank 0 to rank 1 and back; 0 on other ranks."""
    message = torch.zeros(numel)
    taken = []
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
    """Return seconds of a message of `size` bytes, interpolated from SIZES."""
    (few, many) = (4 * one for one in SIZES)
    (short, long) = seconds
    return short + (long - short) / (many - few) * (size - few)


def as_on_gloo(event):
    """Let FSDP wait for a reduce_scatter at once, as it does on gloo to save memory (labkit/fsdp/flat_param.py)."""
    return replace(event, pauses=[Pause(event.start)]) if event.op == "reduce_scatter" else event


def simulated(form, block_ms, nodes, alone, left):
    """Return (seconds of a step, of one with an ideal host, bytes that rank 0 sends). left: of unanswered()."""
    if form == PIPELINE:
        size = 4 * ROWS * WIDTH
        schedule = one_f_one_b(nodes, MICRO_BATCHES, nodes)
        played = play(schedule, dict.fromkeys("FBW", block_ms / 1e3), line(alone["send"], size))
        return played.length, played.length, MICRO_BATCHES * size
    with only_sleep(emulated) as clock:
        run = dry_run(rehearsed, nodes, clock=clock, form=form, block_ms=block_ms)
    start, end = run.result
    ideal = [event for event in run.events if event.start >= start]
    real = [Event(**event | {"pauses": paused(event["pauses"])}) for event in left["events"]]
    seconds = []
    for events, first, last in ((real, left["start"], left["end"]), (ideal, start, end)):
        waits = list(map(as_on_gloo, events) if form == "FSDP" else events)
        seconds.append(simulate(waits, first, last, lambda e: ("network", line(alone[e.op], e.payload_bytes))).seconds)
    return *seconds, sum(event.sent_bytes for event in ideal)


def paused(pauses):
    return None if pauses is None else [Pause(**pause) for pause in pauses]


def run(repetitions):
    """Yield the rows and the raw values; without namespaces, print a line and yield nothing."""
    if launch("pass", nodes=2, nproc=1).network["how"] == "loopback":
        return
    errors = []
    ideal = []
    sent = 0
    counted = 0
    for nodes, mbit in product(NODES, LINKS_MBIT):
        rows, values = compared(nodes, mbit, repetitions)
        errors += [abs(row["ratio"] - 1) for row in rows]
        ideal += values["ideal"]
        sent, counted = sent + sum(values["sent"]), counted + sum(values["counted"])
        yield rows, values
    common = {"benchmark": "simulated", "ranks": f"{NODES[0]} to {NODES[-1]}", "pairs": len(errors)}
    summary = [
        common | row(f"half of {len(errors)} errors are less", errors, MEDIAN),
        common | row("the largest error", [max(errors)] * 2, WORST),
        common | row("half of them, the host ideal", ideal, None),
        common | row("the largest, the host ideal", [max(ideal)] * 2, None),
    ]
    exact = exact_row("simulated", "bytes of all steps", common["ranks"], sent, counted)
    yield [*summary, exact], {"errors": errors, "ideal": ideal}


def row(words, errors, most):
    """Return the median of the errors and its limit."""
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
    rows = []
    values = {"alone": alone, "sent": [], "counted": [], "ideal": []}
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
