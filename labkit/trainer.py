"""One training step for every strategy of the lab: forward, backward, clipping, optimizer, rate.

    model      = parallelize(model, strategy)                      who holds and who sends what
    optimizer  = make_optimizer(model, strategy, AdamW, lr=3e-4)   ZeRO, Horovod, local SGD wrap it
    trainer    = Trainer(model, optimizer, loss)
    train_step = zero_grad, for each micro-batch forward and backward, then clip, step, schedule

With accumulation over k micro-batches only the last backward communicates: 1/k of the messages.

A mean loss is over the targets that it counts. Micro-batches and ranks with more of them weigh
more, so that the step is that of one process and one batch:

    loss of micro-batch i x (its targets / targets of all ranks and micro-batches) x ranks

Sent for it, where the loss may ignore targets: 8 bytes a step, while the first forward runs.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from tempfile import gettempdir

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from labkit import comm, compression
from labkit.amp import GradScaler, autocast
from labkit.ddp import DDP
from labkit.fsdp import FSDP
from labkit.fsdp.wrap_policy import as_policy
from labkit.fully_shard_messages import MeteredGather, MeteredScatter
from labkit.hierarchical import FORMS, Hierarchical
from labkit.horovod import Compression, DistributedOptimizer, broadcast_parameters
from labkit.local_sgd import DiLoCo, LocalSGD
from labkit.mesh import Mesh
from labkit.offload import Offloaded
from labkit.recompute import checkpoint_every
from labkit.sampler import all_of, count_targets, evaluate
from labkit.tensor_parallel import tensor_parallel
from labkit.tensor_parallel.tp_state_dict import cuts_of
from labkit.zero import ZeRO1, ZeRO2

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parallelize(
    module,
    strategy,
    unit=torch.nn.Linear,
    bucket_cap_mb=25,
    hook=None,
    group=None,
    nvme_path="",
):
    """The module, wrapped so that the ranks of a group (None: all) train it together.

    unit: a class, or a function module -> bool: what FSDP gathers together. hook: carries the
    gradients of a strategy of HOOKED, see comm_hook. nvme_path: the folder of fsdp_nvme, "" for
    the system's temporary one.
    Raises ValueError for an unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}: known are {', '.join(STRATEGIES)}")
    path = {"nvme_path": nvme_path} if strategy == "fsdp_nvme" else {}
    model = STRATEGIES[strategy](module, unit, bucket_cap_mb, group, **path)
    if hook is not None:
        model.register_comm_hook(None, hook.hook)
    return model


def whole(module, unit, cap_mb, group):
    """The model as it is, on every rank: averaging is the optimizer's (ZeRO, local SGD)."""
    return module


def horovod(module, unit, cap_mb, group):
    """The model with the weights of rank 0; the optimizer averages gradients during backward."""
    broadcast_parameters(module.state_dict(), process_group=group)
    return module


def our_ddp(module, group, cap_mb, overlap=True):
    return DDP(module, process_group=group, bucket_cap_mb=cap_mb, overlap=overlap)


def torch_ddp(module, unit, cap_mb, group):
    """PyTorch's own, in the setting that is closest to ours."""
    return DistributedDataParallel(module, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True)


def torch_fsdp(module, unit, cap_mb, group):
    """PyTorch's fully_shard, its messages sent through labkit.comm, to be counted as ours are."""
    from torch.distributed.fsdp import fully_shard

    # fully_shard takes every rank's own weights as they are, where DDP broadcasts those of rank 0.
    for tensor in [*module.parameters(), *module.buffers()]:
        comm.broadcast(tensor.detach())
    for part in [*units(module, unit), module]:
        fully_shard(part)
        part.set_custom_all_gather(MeteredGather())
        part.set_custom_reduce_scatter(MeteredScatter())
    return module


def fsdp_nvme(module, unit, cap_mb, group, nvme_path=""):
    """FSDP with its shards in files; make_optimizer puts the optimizer's states into files, too."""
    return FSDP(module, unit, offload=nvme_path or gettempdir(), process_group=group)


def units(module, unit):
    """The submodules that are gathered together; unit: a class, or a function module -> bool."""
    matches = as_policy(unit)
    return [part for part in module.modules() if part is not module and matches(part)]


STRATEGIES = {
    "single": whole,
    "ddp_naive": lambda m, unit, cap_mb, group: our_ddp(m, group, 0, overlap=False),
    "ddp_overlapped": lambda m, unit, cap_mb, group: our_ddp(m, group, 0),
    "ddp_bucketed": lambda m, unit, cap_mb, group: our_ddp(m, group, cap_mb),
    "horovod": horovod,
    "zero1": whole,
    "zero2": whole,
    "fsdp": lambda m, unit, cap_mb, group: FSDP(m, unit, process_group=group),
    "fsdp_grad_op": lambda m, unit, cap, group: FSDP(m, unit, shard="grad_op", process_group=group),
    "fsdp_offload": lambda m, unit, cap, group: FSDP(m, unit, offload=True, process_group=group),
    "fsdp_nvme": fsdp_nvme,
    "local_sgd": whole,
    "diloco": whole,
    "torch_ddp": torch_ddp,
    "torch_fsdp": torch_fsdp,
}


def comm_hook(name):
    """What `parallelize` takes as hook: a compressor, or the all-reduce by nodes; "none": None.

    name: of compression.COMPRESSORS or hierarchical.FORMS; for the latter, ranks are numbered
        machine by machine, as by torchrun. Collective.
    """
    if name not in FORMS:
        return None if name == "none" else compression.build(name)
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = Mesh({"node": dist.get_world_size() // local, "local": local})
    return Hierarchical(mesh.group("local"), mesh.group("node"), name)


def make_optimizer(
    model,
    strategy,
    optimizer_class,
    bucket_cap_mb=25,
    every=1,
    nvme_path="",
    hook="none",
    **options,
):
    """The optimizer for a model that `parallelize` has returned for the same strategy.

    every: steps between averages, of local SGD and DiLoCo. nvme_path: as in `parallelize`.
    hook: of horovod, the name of a Compression. options: those of optimizer_class.
    """
    sharded = {"zero1": ZeRO1, "zero2": ZeRO2}.get(strategy)
    if sharded:
        return sharded(model.parameters(), optimizer_class, bucket_cap_mb=bucket_cap_mb, **options)
    optimizer = optimizer_class(model.parameters(), **options)
    if strategy == "horovod":
        how = {"compression": getattr(Compression, hook), "bucket_cap_mb": bucket_cap_mb}
        return DistributedOptimizer(optimizer, model.named_parameters(), **how)
    if strategy == "fsdp_nvme":
        return Offloaded(optimizer, to=nvme_path or gettempdir())
    seldom = {"local_sgd": LocalSGD, "diloco": DiLoCo}.get(strategy)
    return seldom(optimizer, every, bucket_cap_mb=bucket_cap_mb) if seldom else optimizer


RECOMPUTE = {"none": None, "every": {"k": 1}, "alternate": {"k": 2}}
RECOMPUTE |= {"matmul": {"k": 1, "keep": "matmul"}}


def recompute(module, which, unit):
    """Let units of the module run again in backward, in place; before `parallelize`.

    which: a key of RECOMPUTE. matmul: every unit, but the results of its matrix products are kept.
    """
    if RECOMPUTE[which]:
        checkpoint_every(module, unit, **RECOMPUTE[which])


def mixed_precision(precision, device, group=None):
    """Trainer's arguments for "bf16" (autocast) and "fp16" (and a loss scale, agreed in group)."""
    if precision not in LOW:
        return {}
    scaler = GradScaler(device.type, process_group=group, enabled=precision == "fp16")
    return {"autocast": partial(autocast, device.type, LOW[precision]), "scaler": scaler}


def counted_by(loss, target):
    """Return the number of targets in the mean of a loss, a scalar tensor; None: the whole batch.

    Class numbers that it ignores do not count: its ignore_index, -100 where it does not say. So it
    is with class weights, its weight. loss: a function, a partial of one, or a module.
    """
    loss = inspect.unwrap(loss)
    given = getattr(loss, "keywords", {})  # of a partial
    ignore_index = getattr(loss, "ignore_index", given.get("ignore_index", -100))
    if ignore_index is None or target.is_floating_point():
        return None
    weight = loss.weight if hasattr(loss, "ignore_index") else given.get("weight")
    return count_targets(target, ignore_index, weight)


class Weights:
    """Weights of the mean losses of a rank's micro-batches in the mean over all ranks.

    counts: [micro-batches], the targets of each. group: who averages gradients; None: nobody.
    shares: of each in this rank's own mean, with the sum 1.
    """

    def __init__(self, counts, group):
        self.counts = counts.double()
        own = self.counts.sum()
        self.shares = torch.where(own > 0, self.counts / own, 0.0)
        self._own, self._all, self._work, self._group = own, own.clone(), None, group
        if group is not None:
            self._work = comm.all_reduce(self._all, group=group, async_op=True)

    def factor(self):
        """This rank's targets, over the mean of all ranks. Waits for the message."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._all /= dist.get_world_size(self._group)
        return torch.where(self._all > 0, self._own / self._all, 0.0)

    def weigh(self, loss, number):
        """(what backward begins with, this rank's part of its own mean) of micro-batch `number`."""
        share = self.shares[number].to(loss.dtype)
        scaled = loss * share * self.factor().to(loss.dtype)
        # The mean over no targets is NaN.
        return scaled, torch.where(share > 0, loss.detach() * share, 0.0)


@dataclass(eq=False, repr=False)
class Trainer:
    """A model, its optimizer and its loss, behind `train_step`.

    model: with an axis pp (labkit.parallelize) it takes whole steps itself, on all of its ranks.
    loss: function (output, target) -> mean over the batch, or over the targets that it counts. Of
        class numbers it ignores its ignore_index (None: it ignores none), -100 if it does not say.
        Ranks weigh the same inside join(), in local SGD, and where targets are floats.
    accumulation: micro-batches of one step; of a pipeline: those that it was made with.
    schedule: anything with step(), called after the optimizer's if the scaler has not skipped that.
    span: a context manager factory, called with "forward", "backward" and "optimizer", to measure.
    autocast: a context manager factory, around the forward. scaler: a GradScaler, for fp16.
    compressor: whose residuals are to follow the scaler's loss scale.
    on_loss: function (loss), called when this rank's mean loss of the step is known: before the
        last backward, with which a message can overlap, or after the step of a pipeline.
    hooks: functions (trainer, loss), called after each step, in this order.
    clip: the largest norm of all gradients; gradient_norm: what it was before in the last step.
    count: function target -> what the mean of the loss divides by, a scalar tensor, for a loss of
        which that cannot be known from its ignore_index and class weights.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable
    accumulation: int = 1
    schedule: object = None
    span: Callable = nullcontext
    autocast: Callable = nullcontext
    scaler: GradScaler = field(default_factory=partial(GradScaler, enabled=False))
    compressor: object = None
    on_loss: Callable | None = None
    hooks: Sequence[Callable] = ()
    clip: float | None = None
    count: Callable | None = None
    gradient_norm: torch.Tensor | None = field(default=None, init=False)

    def __post_init__(self):
        pipeline = getattr(self.model, "pipeline", None)
        if pipeline and self.accumulation not in (1, pipeline.micro_batches):
            raise ValueError(
                f"accumulation={self.accumulation}: a pipeline accumulates over its micro-batches, "
                f"and has {pipeline.micro_batches} of them"
            )
        if hasattr(self.optimizer, "set_backward_passes_per_step"):  # Horovod's counts them
            self.optimizer.set_backward_passes_per_step(self.accumulation)

    def train_step(self, input, target):
        """One optimizer step on this rank's batch; returns its mean loss, detached, a scalar."""
        self.optimizer.zero_grad()
        if getattr(self.model, "pipeline", None):  # forwards and backwards are one list
            total = self.step_pipeline(input, target)
            self.tell(total)
        else:
            total = self.accumulate(input, target)
        with self.span("optimizer"):
            if self.clip is not None:
                self.scaler.unscale_(self.optimizer)
                self.gradient_norm = self.clip_gradients()
            self.scaler.step(self.optimizer)
            lowered = self.update_scale()
        # PyTorch's scaler shows a skipped step by its scale only.
        skipped = getattr(self.scaler, "skipped", lowered)
        if self.schedule is not None and not skipped:
            self.schedule.step()
        for hook in self.hooks:
            hook(self, total)
        return total

    def accumulate(self, input, target):
        """Forward and backward of equal micro-batches (or ValueError); the mean loss."""
        parts, total = self.accumulation, 0.0
        if len(input) % parts:
            raise ValueError(f"a batch of {len(input)} does not split into {parts} equal parts")
        targets = target.chunk(parts)
        weights = self.weights(targets)
        for i, (x, y) in enumerate(zip(input.chunk(parts), targets, strict=True)):
            with nullcontext() if i == parts - 1 else self.quiet():
                with self.span("forward"), self.autocast():
                    loss = self.loss(self.model(x), y)
                    if weights is not None:
                        loss, own = weights.weigh(loss, i)
                    else:
                        loss = loss / parts
                        own = loss.detach()
                total = total + own
                if i == parts - 1:
                    self.tell(total)
                with self.span("backward"):
                    self.scaler.scale(loss).backward()
        return total

    def tell(self, loss):
        if self.on_loss is not None:
            self.on_loss(loss)

    def step_pipeline(self, input, target):
        """The same where forwards and backwards are the actions of a pipeline."""
        device = "cpu" if input.is_meta else input.device
        scale = self.scaler.scale(torch.ones((), device=device)).item()
        weights = self.weights(target.chunk(self.model.pipeline.micro_batches))
        relative = None
        if weights is not None:
            relative = (weights.shares * len(weights.shares)).tolist()
            scale *= weights.factor().item()
        with self.span("backward"):
            return self.model.step(input, target, scale, relative)

    def weights(self, targets):
        """Weights of micro-batches with these targets; None: all weigh the same, on all ranks."""
        group = self.averaging_group()
        if len(targets) == 1 and group is None:
            return None
        counts = [(self.count or partial(counted_by, self.loss))(target) for target in targets]
        return None if counts[0] is None else Weights(torch.stack(counts), group)

    def averaging_group(self):
        """The group of ranks that average gradients in every step; None: this rank has its own."""
        if getattr(self.model, "_joining", None):  # ranks without data would not take part
            return None
        group = None
        if hasattr(self.model, "replicas"):  # of a mesh
            group = self.model.replicas
        elif hasattr(next(self.model.parameters(), None), "device_mesh"):
            group = dist.group.WORLD  # PyTorch's fully_shard
        else:
            for owner in (self.model, self.optimizer):
                if hasattr(owner, "process_group"):
                    group = owner.process_group or dist.group.WORLD
                    break
        return group if group is not None and dist.get_world_size(group) > 1 else None

    def evaluate(self, dataset, dtype=None):
        """Return the mean loss over the targets of a dataset, each counted once. Collective.

        dtype: what floating-point inputs are cast to, if not None.
        """

        def count(target):
            counted = (self.count or partial(counted_by, self.loss))(target)
            return all_of(target) if counted is None else counted

        def total(output, target):
            counted = count(target)
            return torch.where(counted > 0, self.loss(output, target) * counted, 0.0)

        over = getattr(self.model, "evaluate", partial(evaluate, self.model))
        return over(dataset, total, count=count, dtype=dtype).mean

    def clip_gradients(self):
        """Clip all gradients; of shards, by the model or optimizer that knows the global norm."""
        for owner in (self.model, self.optimizer):
            if hasattr(owner, "clip_grad_norm_"):
                return owner.clip_grad_norm_(self.clip)
        if cuts_of(self.model):
            return tensor_parallel.clip_grad_norm_(self.model, self.clip)
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)

    def update_scale(self):
        """Update the loss scale and rescale a compressor's residuals; return whether it fell."""
        before = self.scaler.get_scale()
        self.scaler.update()
        after = self.scaler.get_scale()
        if self.compressor is not None and before != after:
            self.compressor.scale_residuals(after / before)
        return after < before

    def quiet(self):
        """Return no_sync() of the model or, with ZeRO, of the optimizer; else a null context."""
        for sender in (self.model, self.optimizer):
            if hasattr(sender, "no_sync"):
                return sender.no_sync()
        return nullcontext()
