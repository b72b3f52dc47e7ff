"""Predict the memory of one training step: a dry run, tracked by kind.

    module --tensors without data--> DDP, ZeRO or FSDP --> step 1, step 2    on fake ranks
                                                           states   tracked: bytes by kind at every
                                                           appear   change, the largest is the peak

    single, ddp  [ P ][ G ][ S ]    P bytes of parameters, G = P of gradients, S of optimizer states
    zero1        [ P ][ G ][S/n]    (Adam in fp32: S = 2 P, so 16 bytes a parameter in all);
    zero2        [ P ][G/n][S/n]    + two buckets of gradients in flight
    fsdp         [P/n][G/n][S/n]    + the units that are gathered at that moment

Bytes and kinds are those of MemoryTracker (memory_tracker.py) in a real step. It takes the Python
time of two steps, for a model of any size.
Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
sections 3 and 5.
"""

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from tempfile import gettempdir
from time import perf_counter

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from labkit.ddp import DDP
from labkit.fsdp import FSDP
from labkit.fsdp.wrap_policy import split_units
from labkit.horovod import DistributedOptimizer
from labkit.memory.dry_run import fake_ranks, no_data
from labkit.offload import Offloaded
from labkit.zero import ZeRO1, ZeRO2


def whole(module, unit, cap_mb, prefetch):
    return module


def sharded(module, unit, cap_mb, prefetch, **options):
    return FSDP(module, unit, prefetch=prefetch, **options)


# Functions (module, unit, bucket_cap_mb, prefetch) -> the model that is trained.
STRATEGIES = {
    "single": whole,
    "ddp_naive": lambda m, unit, cap_mb, prefetch: DDP(m, bucket_cap_mb=0, overlap=False),
    "ddp_overlapped": lambda m, unit, cap_mb, prefetch: DDP(m, bucket_cap_mb=0),
    "ddp_bucketed": lambda m, unit, cap_mb, prefetch: DDP(m, bucket_cap_mb=cap_mb),
    "horovod": whole,
    "zero1": whole,
    "zero2": whole,
    "fsdp": sharded,
    "fsdp_grad_op": partial(sharded, shard="grad_op"),
    "fsdp_offload": partial(sharded, offload=True),
    "fsdp_nvme": partial(sharded, offload=gettempdir()),  # no file is made in a dry run
}
ZERO = {"zero1": ZeRO1, "zero2": ZeRO2}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
}
# Dtype of the weights, and the one that autocast computes in.
PRECISIONS = {
    "fp64": (torch.float64, None),
    "fp32": (torch.float32, None),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
}


@dataclass(frozen=True)
class Estimate:
    """The memory of one rank in a step after the first, so that optimizer states exist.

    samples: [(position, bytes by kind)] before the step and after every change, as in
        MemoryTracker.samples, with the position instead of the time.
    held: bytes by kind after the step, and so between steps.
    moment: the phase of the peak: "forward", "backward" or "optimizer".
    host: bytes in host memory. rank: the rank whose memory this is.
    """

    strategy: str
    world_size: int
    samples: list
    held: dict
    moment: str
    host: int = 0
    rank: int = 0

    @property
    def peak(self):
        """Bytes by kind at the moment when their sum is largest."""
        return max((kinds for _, kinds in self.samples), key=lambda kinds: sum(kinds.values()))

    @property
    def peak_total(self):
        return sum(self.peak.values())


def estimate(
    module,
    input,
    loss=None,
    strategy="single",
    world_size=1,
    optimizer="adamw",
    precision="fp32",
    target=None,
    unit=None,
    recompute=None,
    device=None,
    rank=0,
    bucket_cap_mb=25,
    prefetch=1,
):
    """Return the Estimate of one training step of `module` on one rank's batch.

    Computes nothing, and leaves the module unchanged.
    input: a tensor or a tuple of them, one rank's batch. target: as `loss` takes it, a tensor or a
        tuple of them. loss: function (output, target), or (output) without a target, -> scalar;
        None: the sum of the output. Module, input and target may be on the meta device.
    strategy: a key of STRATEGIES. optimizer: "adamw", "sgd" (with momentum), or a function
        parameters -> Optimizer. precision: a key of PRECISIONS; bf16 and fp16: autocast.
    unit: the modules that FSDP gathers as one: a class, a tuple of them, a function module -> bool,
        or None.
    recompute: labkit.recompute.checkpoint, or another function (function, *args) that runs a unit
        and computes it again in backward; None: only what the module recomputes itself.
    device: the device to predict for, a torch.device or its name; None: the module's.
    rank, world_size: the rank, and the number of ranks. bucket_cap_mb, prefetch: as in DDP, ZeRO
        and FSDP.
    Raises ValueError for an unknown strategy, optimizer or precision.
    """
    wrap = known("strategy", strategy, STRATEGIES)
    make = known("optimizer", optimizer, OPTIMIZERS) if isinstance(optimizer, str) else optimizer
    dtype, low = known("precision", precision, PRECISIONS)
    kind = device_of(module, device).type
    units = split_units(module, unit)[1:]
    alone = strategy == "single"
    with ExitStack() as stack:
        stack.enter_context(without_data(module, dtype))
        ranks = no_data(kind) if alone else fake_ranks(rank, world_size, kind)
        fake = stack.enter_context(ranks)
        for one in units if recompute else ():
            one.module.forward = partial(recompute, one.module.forward)
        model = wrap(module, unit, bucket_cap_mb, prefetch)
        zero = ZERO.get(strategy)
        made = shard(zero, make, model, bucket_cap_mb) if zero else make(list(model.parameters()))
        if strategy == "horovod":
            named = model.named_parameters()
            made = DistributedOptimizer(made, named, bucket_cap_mb=bucket_cap_mb)
        if strategy == "fsdp_nvme":
            made = Offloaded(made, to=gettempdir())
        step = Step(model, loss, made, partial(fake.autocast, low) if low else nullcontext)
        data = tree_map_only(torch.Tensor, partial(empty, dtype=dtype), (input, target))
        tracker = fake.tracker(module, made)
        for _ in range(2):  # the first step makes the optimizer states
            with tracker:
                made.zero_grad()
                step(*data)
        return estimate_of(tracker, made, step.began, strategy, world_size, rank, fake)


def known(what, name, table):
    """Return table[name]. Raises ValueError, which lists the known names, for an unknown one."""
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}: known are {', '.join(table)}")
    return table[name]


def device_of(module, device=None):
    """Return the device to predict for: `device`, else the module's; the CPU if that is meta."""
    own = next((p.device for p in module.parameters() if not p.is_meta), "cpu")
    return torch.device(device or own)


def empty(tensor, dtype):
    """Return a tensor like this one on the meta device; a floating-point one in dtype."""
    dtype = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")


def shard(zero, make, model, cap_mb):
    """Return the ZeRO optimizer for `make`, a function parameters -> Optimizer.

    If make is a partial of a class, its keywords become arguments of the ZeRO optimizer.
    """
    options = {}
    if isinstance(make, partial):
        make, options = make.func, make.keywords
    return zero(model.parameters(), make, bucket_cap_mb=cap_mb, **options)


@contextmanager
def without_data(module, dtype):
    """Replace the module's tensors with meta tensors in the block, floating-point ones in dtype.

    After the block the module has its own tensors, hooks, forwards and attributes again.
    """
    before = []
    for part in module.modules():
        kept = {n: v.copy() for n, v in vars(part).items() if isinstance(v, dict | set)}
        before.append((part, dict(vars(part)), kept))
    twins = {}

    def twin(tensor):
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if id(tensor) not in twins:
            made = empty(tensor, dtype)
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, tensor.requires_grad)
            twins[id(tensor)] = made
        return twins[id(tensor)]

    try:
        for part in module.modules():
            for table in (vars(part), part._parameters, part._buffers):
                table.update((name, twin(value)) for name, value in list(table.items()))
        yield
    finally:
        for part, attributes, kept in before:
            vars(part).clear()
            vars(part).update(attributes)
            for name, contents in kept.items():
                attributes[name].clear()
                attributes[name].update(contents)


class Step:
    """A training step. began: [(phase, seconds of time.perf_counter())] of the last one."""

    def __init__(self, model, loss, optimizer, precision):
        self.model, self.loss, self.optimizer, self.precision = model, loss, optimizer, precision
        self.began = []

    def __call__(self, input, target):
        inputs = input if isinstance(input, tuple | list) else (input,)
        targets = () if target is None else target
        targets = targets if isinstance(targets, tuple | list) else (targets,)
        self.began = [("forward", perf_counter())]
        with self.precision(), torch.device("meta"):
            output = self.model(*inputs)
            value = total(output) if self.loss is None else self.loss(output, *targets)
            del output
        self.began.append(("backward", perf_counter()))
        value.backward()
        self.began.append(("optimizer", perf_counter()))
        self.optimizer.step()
        self.value = value  # a training loop keeps it, to print it


def total(output):
    """Return the sum of all floating-point tensors in the output, a scalar."""
    tensors = (t for t in tree_leaves(output) if isinstance(t, torch.Tensor))
    return sum(t.sum() for t in tensors if t.is_floating_point())


def estimate_of(tracker, optimizer, began, strategy, world_size, rank=0, fake=None):
    """Return the Estimate of a step that a tracker has recorded.

    began: [(name of a phase, its beginning in seconds of time.perf_counter())], in order.
    fake: the FakeDevice of a dry run; None: a real step.
    """
    counts = step_counts(optimizer) if fake else 0
    host = fake.host.nbytes if fake else 0
    timed = tracker.samples
    before = [at for at, _ in timed if tracker.start + at <= began[0][1]]  # such as zero_grad
    timed = timed[max(0, len(before) - 1) :]
    if fake and fake.type != "cpu":
        host += counts
    else:
        for _, kinds in timed:
            kinds["optimizer_states"] += counts
    at, _ = max(timed, key=lambda sample: sum(sample[1].values()))
    moment = "forward"
    for phase, start in began:
        if start <= tracker.start + at:
            moment = phase
    samples = list(enumerate(kinds for _, kinds in timed))
    return Estimate(strategy, world_size, samples, timed[-1][1], moment, host, rank)


def step_counts(optimizer):
    """Return the bytes of the states that are on the CPU for any device: Adam's step counts."""
    states = tree_leaves(list(optimizer.state.values()))
    return sum(t.nbytes for t in states if isinstance(t, torch.Tensor) and t.is_cpu)
