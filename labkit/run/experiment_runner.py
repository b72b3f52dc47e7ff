"""One experiment on one rank: its model, data and trainer, and the measurements of each step.

build           makes a model, an optimizer and a Trainer from the experiment's fields
prepare         runs WARMUP steps; counts memory and traffic, which are constant, in the last one
step            runs one timed step and returns its row, documented at `step_row`
estimate        predicts the memory of each rank, without ranks or data
largest_batch   predicts the largest batch with which a rank's step fits its memory
"""

import io
from contextlib import nullcontext
from functools import cache, partial
from math import nan

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from labkit import comm, models
from labkit.compression import COMPRESSORS
from labkit.hierarchical import FORMS
from labkit.learning_rate import scaled_lr, warmup
from labkit.measure.flops import step_flops
from labkit.measure.monitor import Monitor, waited_ms
from labkit.measure.timeline import Timeline
from labkit.measure.traffic import TrafficCounter
from labkit.memory import last_true
from labkit.memory.dry_run import fake_ranks
from labkit.memory.memory_estimate import estimate_of
from labkit.memory.memory_tracker import MemoryTracker
from labkit.models.curriculum import shorten
from labkit.run.auto_strategy import choose_strategy
from labkit.run.context import Context, EventFile
from labkit.run.experiment_mesh import compose, length_of, loss_of, mesh_of, model_of, sizes_of
from labkit.sampler import Batches
from labkit.trainer import (
    LOW,
    Trainer,
    comm_hook,
    make_optimizer,
    mixed_precision,
    parallelize,
    recompute,
)

ROUTED = "the memory of experts depends on the routing, so no dry run can predict it"
WARMUP = 3  # PyTorch's DDP sends its new bucket order in the second step
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class Participant:
    """One rank of an experiment. With strategy "single", takes_part is False on all ranks but 0.

    done: number of steps so far, on which a curriculum depends.
    length: tokens of each sequence of the latest batch, with a curriculum; else None.
    flops: of all ranks in a step with such a batch, or NaN.
    fake: a FakeDevice of labkit.memory.dry_run, for a context on the meta device.
    """

    def __init__(self, context, experiment, fake=None):
        self.context = context
        self.experiment = experiment
        self.device = context.device
        self.fake = fake
        alone = experiment.strategy == "single"
        self.takes_part = context.rank == 0 or not alone
        self.done = 0
        self.timeline = Timeline(context.rank, context.device)
        # Created by all ranks, because NCCL may make a group by splitting the group of all ranks.
        self.group = dist.new_group([0]) if alone else None
        if not self.takes_part:
            return
        self.world_size = 1 if alone else context.world_size
        self.mesh = None
        rank = 0 if alone else context.rank
        self.replicas = self.world_size
        if experiment.axes:
            self.mesh = mesh_of(experiment, self.world_size)
            # each replica has its own samples
            self.replicas = self.mesh.size("dp") * experiment.expert
            rank = self.mesh.rank("dp") * experiment.expert + self.mesh.rank("ep")
        self.share = experiment.batch_size // self.replicas
        dataset = models.data.load(experiment.data, experiment.model)
        self.batches = Batches(dataset, self.share, self.replicas, rank, experiment.seed)
        self.build()
        e = experiment
        arithmetic = e.compute == "real" and self.device.type != "meta"
        # The FLOPs of experts depend on the routing; a custom model may need real tensors.
        self.counts_flops = arithmetic and not e.experts and e.model in models.SIZES
        self.length = None
        self.flops = self.flops_of()

    def flops_of(self, length=None):
        """Return the FLOPs of a step of all ranks; length: of its sequences (None: complete)."""
        if not self.counts_flops:
            return nan
        e = self.experiment
        sizes = tuple(sizes_of(e).items())
        return self.replicas * share_flops(e.model, sizes, e.data, self.share, length)

    def build(self):
        e = self.experiment
        torch.manual_seed(e.seed)
        self.dtype = torch.float64 if e.precision == "fp64" else torch.float32
        with self.device if self.device.type == "meta" else nullcontext():
            module = model_of(e).to(self.device, self.dtype)
        lr = scaled_lr(e.lr, e.batch_size, e.reference_batch, e.lr_rule, e.linear_until)
        momentum = {"momentum": e.momentum} if e.optimizer == "sgd" else {}
        options = {"lr": lr, "weight_decay": e.weight_decay, **momentum}
        optimizer_class = OPTIMIZERS[e.optimizer]
        if e.strategy == "auto":
            make = partial(optimizer_class, **options)
            e = self.experiment = choose_strategy(self, module, make)
        recompute(module, e.recompute, models.unit(e.model))
        if e.compute == "emulated":
            part = self.share / e.batch_size / e.accumulation / e.context / e.tensor
            # the code inside a block sends messages, or counts the load of experts
            how = {"arithmetic": bool(e.axes or e.experts)}
            models.emulate(module, models.unit(e.model), forward_ms=e.block_ms * part, **how)
        loss = loss_of(e, module)
        hook = comm_hook(e.comm_hook) if e.strategy != "horovod" else None
        self.compressor = hook if e.comm_hook in COMPRESSORS else None
        wrapping = e.strategy, models.unit(e.model), e.bucket_cap_mb, hook
        self.model = (
            compose(module, self.mesh, e, wrapping)
            if e.axes
            else parallelize(module, *wrapping, nvme_path=e.nvme_path)
        )
        how = e.bucket_cap_mb, e.every, e.nvme_path, e.comm_hook
        optimizer = make_optimizer(self.model, e.strategy, optimizer_class, *how, **options)
        plain = getattr(optimizer, "inner", optimizer)
        falling = e.steps - e.warmup_steps if e.schedule == "cosine" else None
        schedule = warmup(plain, e.warmup_steps, falling) if e.warmup_steps or falling else None
        low = mixed_precision(e.precision, self.device, self.group) if self.fake is None else {}
        if self.fake is not None and e.precision in LOW:  # a loss scale depends on values
            low = {"autocast": partial(self.fake.autocast, LOW[e.precision])}
        self.trainer = Trainer(
            self.model, optimizer, loss, e.accumulation, schedule,
            self.timeline.span, compressor=self.compressor, clip=e.clip or None, **low,
        )  # fmt: skip
        self.last_gradient = 0.0
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.note_gradient)

    def note_gradient(self, parameter):
        self.timeline.clock.stamp(self, "last_gradient")

    def prepare(self):
        """Warm up; return the constants of a step: peak bytes by kind; bytes, messages and FLOPs.

        For local SGD and DiLoCo: the mean over the steps from one average to the next.
        """
        if not self.takes_part:
            return {}
        for _ in range(WARMUP - 1):
            self.advance()
        e = self.experiment
        counter = TrafficCounter(self.world_size)
        tracker = MemoryTracker(self.model, self.trainer.optimizer, self.device)
        with tracker as memory, counter as traffic, comm.record() as events:
            for _ in range(e.every):
                self.advance()
        sent, messages = traffic.sent_bytes, traffic.messages
        if (
            e.comm_hook in FORMS or e.axes
        ):  # these send in groups or a thread that the counter does not see
            sent, messages = sum(event.sent_bytes for event in events), len(events)
        peaks = {f"peak_{kind}_bytes": size for kind, size in memory.peak.items()}
        counted = {"sent_bytes": sent // e.every, "messages": messages / e.every}
        return counted | {"flops": self.flops, "peak_bytes": memory.peak_total} | peaks

    def estimate_with(self, strategy):
        """Return the Estimate of this rank's step, if it had another strategy."""
        experiment = self.experiment.replace(strategy=strategy)
        return estimate_rank(experiment, self.world_size, self.context.rank, self.device.type)

    def next_batch(self):
        """Return this rank's (input, target); with a curriculum, of the next step's length."""
        input, target = self.complete_batch()
        if self.experiment.curriculum == "none" or self.fake is not None:
            return input, target  # a dry run is for the longest sequences, which need most memory
        self.length = length_of(self.experiment, self.done + 1)
        self.flops = self.flops_of(self.length)
        return shorten((input, target), self.length)

    def complete_batch(self):
        input, target = next(self.batches)
        input, target = input.to(self.device), target.to(self.device)
        if self.experiment.context > 1:
            input, target = self.model.own_tokens(input), self.model.own_tokens(target)
        return input.to(self.dtype) if input.is_floating_point() else input, target

    def advance(self):
        """Train one step; return its loss and its messages."""
        input, target = self.next_batch()
        self.timeline.spans.clear()
        with comm.record(clock=self.timeline.clock) as events, self.timeline.span("step"):
            loss = self.trainer.train_step(input, target)
        self.timeline.clock.resolve()
        self.done += 1
        return loss, events

    def step(self):
        """Train one step; return its row."""
        compressed = self.seconds_compressing()
        loss, events = self.advance()
        compress_ms = 1e3 * (self.seconds_compressing() - compressed)
        return self.step_row(loss, events) | {"compress_ms": compress_ms}

    def seconds_compressing(self):
        """Return the compressor's seconds by the host's clock, which does not see device time."""
        if self.compressor is None:
            return 0.0
        return nan if self.device.type == "cuda" else self.compressor.seconds

    def step_row(self, loss, events):
        """Return the step's strategy, model, bucket_cap_mb, comm_hook and measurements:

        step, loss (of this rank's share); step_ms, forward_ms, backward_ms, optimizer_ms,
        exposed_comm_ms; samples_per_s, of all ranks. `step` adds compress_ms, the part of backward
        that a compressor took. The callers add mfu.
        """
        names = ("step", "forward", "backward", "optimizer")
        ms = dict.fromkeys(names, 0.0) | self.timeline.milliseconds()
        times = {f"{name}_ms": value for name, value in ms.items()}
        names = ("strategy", "model", "bucket_cap_mb", "comm_hook")
        named = {name: getattr(self.experiment, name) for name in names}
        measured = {"step": self.done, "loss": loss.item(), **times}
        measured["exposed_comm_ms"] = self.exposed_ms(events)
        return named | measured | {"samples_per_s": 1e3 * self.experiment.batch_size / ms["step"]}

    def monitor(self, sinks, peak):
        """Return a Monitor of its trainer's steps. peak: FLOP/s of all ranks, or NaN."""
        sample, _ = self.batches.dataset[0]
        size = self.experiment.batch_size
        tokens = 0 if sample.is_floating_point() else size * len(sample)
        about = {"samples": size, "tokens": tokens, "flops": self.flops, "peak": peak}
        return Monitor(self.timeline, sinks, exposed=self.exposed_ms, device=self.device, **about)

    def exposed_ms(self, events):
        """Return how long this rank waited for messages: the milliseconds inside wait().

        PyTorch's DDP and hooks wait outside labkit.comm. For them it is the time from the last
        gradient's arrival until backward() returned, plus later waits in comm. On CUDA, times are
        the device's. NaN for fully_shard on CUDA, whose streams wait for each other, not for a
        message.
        """
        if self.experiment.strategy == "torch_fsdp" and self.device.type == "cuda":
            return nan
        if self.experiment.strategy == "torch_ddp" or self.experiment.comm_hook != "none":
            end = max(span.end for span in self.timeline.spans if span.name == "backward")
            later = [event for event in events if event.start >= end]
            return 1e3 * (end - self.last_gradient) + waited_ms(later)
        return waited_ms(events)


@cache
def share_flops(model, sizes, data, samples, length=None):
    """Return the FLOPs of the model for this many samples of the data, on meta tensors.

    sizes: ((argument of the model's class, value), ...). length: tokens of each sequence.
    """
    batch = default_collate([models.data.load(data, model)[0]] * samples)
    input, target = batch if length is None else shorten(batch, length)
    with torch.device("meta"):
        module = models.build(model, **dict(sizes))
    return step_flops(module, input.to("meta"), target.to("meta"), models.loss(model))


def estimate(experiment, ranks):
    """Predict what each rank holds in a step after the first, with its batch: a list of Estimate.

        max(estimate(Experiment(model="gpt", tensor=2), 4), key=lambda rank: rank.peak_total)

    Predicted in this process by a dry run of each rank, for ranks on GPUs if this machine has one,
    else on the CPU. Raises ValueError for a batch or a mesh that does not fit the ranks, and for
    experts, whose memory depends on the routing. With a curriculum: of the longest sequences.
    """
    experiment.check_ranks(ranks)
    if experiment.experts:
        raise ValueError(f"experts={experiment.experts}: {ROUTED}; use experts=0")
    return [estimate_rank(experiment, ranks, rank) for rank in range(ranks)]


def largest_batch(experiment, ranks, rank, room):
    """Return the largest batch size, over all ranks, with which this rank's step fits `room` bytes.

    Predicted as by `estimate`. At most the number of training samples. ValueError as from
    `estimate`; MemoryError if one sample per rank and micro-batch does not fit.
    """
    if experiment.experts:
        raise ValueError(f"experts={experiment.experts}: {ROUTED}; set batch_size")
    smallest = experiment.smallest_batch(ranks)

    @cache
    def needed(times):
        tried = experiment.replace(batch_size=times * smallest)
        return estimate_rank(tried, ranks, rank).peak_total

    samples = len(models.data.load(experiment.data, experiment.model))
    times = last_true(lambda times: needed(times) <= room, samples // smallest)
    if not times:
        raise MemoryError(
            f"a batch of {smallest} does not fit: a rank's step needs {needed(1):,} bytes and has "
            f"{room:,}: use more ranks, strategy fsdp, or recompute"
        )
    return times * smallest


def estimate_rank(experiment, ranks, rank, device=None):
    """Return the Estimate of one rank's step. device: "cuda" or "cpu"; None: what this machine has.

    Also works in a process that is a rank itself.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with torch.random.fork_rng(), fake_ranks(rank, ranks, device) as fake:
        context = Context(rank, ranks, 0, 0, torch.device("meta"), EventFile(io.StringIO()))
        with fake.tracker():  # marks the tensors that are made on the host
            participant = Participant(context, experiment, fake)
        return held(participant, fake)


def held(participant, fake=None):
    """Return the Estimate of what this rank holds in its second step, the batch included.

    fake: of estimate_rank. None: in a real step.
    """
    made = participant.model, participant.trainer.optimizer
    tracker = fake.tracker(*made) if fake else MemoryTracker(*made, participant.device)
    for _ in range(2):  # the first step makes the optimizer states
        with tracker:
            participant.advance()
    spans = [span for span in participant.timeline.spans if span.name != "step"]
    began = sorted((span.start, span.name) for span in spans)
    began = [(name, start) for start, name in began]
    rank = participant.context.rank
    ranks = participant.world_size
    strategy = participant.experiment.strategy
    return estimate_of(tracker, made[1], began, strategy, ranks, rank, fake)
