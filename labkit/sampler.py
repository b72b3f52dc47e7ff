"""Distributed sampling: each sample exactly once an epoch; and exact evaluation on many ranks.

    epoch 0    permutation    7  2  9  0  4  1  8  3  6  5       rank 0: 7 0 8 5
                      rank    0  1  2  0  1  2  0  1  2  0       rank 1: 2 4 3     rank 2: 9 1 6
    epoch 1    another permutation, distributed in the same way

No sample is repeated as padding. With N samples and n ranks, shares and numbers of batches may
differ by one: use drop_last=True (drops the epoch's last N mod n samples) or `join` of DDP.

`Batches` iterates over epochs without end, and can resume from a checkpoint.

Sent: nothing for sampling, since all ranks draw the same permutation; one all-reduce of 16 bytes
per evaluation. Li et al., PyTorch Distributed, VLDB 2020; protocol of
torch.utils.data.DistributedSampler, which pads instead.
"""

import math
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from labkit import comm


class DistributedSampler(Sampler):
    """This rank's share of the indices 0 to N - 1: torch's DistributedSampler without repetition.

    num_replicas, rank: None takes them from the default process group.
    shuffle: a new permutation in every epoch, from seed + epoch: call set_epoch(epoch) before each.
    drop_last: equal shares of N // num_replicas samples.
    If num_replicas divides N, the indices equal those of torch's sampler, in the same order.

    Raises ValueError for a rank out of range, and for fewer samples than ranks: a rank without
    samples would take no step, and the others would wait for its gradients forever.
    """

    def __init__(
        self, dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False
    ):
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ValueError(
                f"Invalid rank {rank}, rank should be in the interval [0, {num_replicas - 1}]"
            )
        if len(dataset) < num_replicas:
            raise ValueError(
                f"the dataset has {len(dataset)} samples for {num_replicas} ranks: "
                "add samples or use fewer ranks, as each rank needs at least one"
            )
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.total_size = len(dataset) - len(dataset) % num_replicas if drop_last else len(dataset)
        self.num_samples = len(range(rank, self.total_size, num_replicas))

    def __iter__(self):
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            indices = torch.randperm(len(self.dataset), generator=generator).tolist()
        else:
            indices = range(len(self.dataset))
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def __len__(self):
        return self.num_samples

    def set_epoch(self, epoch):
        """Set the epoch of the next iteration: a new permutation, identical on all ranks."""
        self.epoch = epoch


class Batches:
    """Endless (input, target) batches of one rank, with a new order of the samples in each epoch.

    All ranks' batches of one step together are the next samples of the epoch's permutation, for any
    number of ranks. So another number of ranks can resume, and each sample of an epoch is still
    seen once. An incomplete last batch is dropped.
    batch_size: of this rank. Raises ValueError if an epoch has less than one batch for all ranks.
    """

    def __init__(self, dataset, batch_size, num_replicas=None, rank=None, seed=0):
        self.sampler = DistributedSampler(dataset, num_replicas, rank, seed=seed)
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.together = batch_size * self.sampler.num_replicas
        if len(dataset) < self.together:
            raise ValueError(
                f"{dataset} has {len(dataset)} samples, fewer than one batch of {self.together}"
            )
        self.epoch = self.taken = 0  # taken: samples of the epoch that all ranks have used
        self._left = None

    def __iter__(self):
        return self

    def __next__(self):
        if self.taken + self.together > len(self.dataset):
            self.epoch += 1
            self.taken = 0
            self._left = None
        if self._left is None:
            self.sampler.set_epoch(self.epoch)
            rest = list(self.sampler)[self.taken // self.sampler.num_replicas :]
            # Its own generator, as a loader would draw from the global one, which dropout uses.
            generator = torch.Generator().manual_seed(self.seed)
            loader = DataLoader(self.dataset, self.batch_size, sampler=rest, generator=generator)
            self._left = iter(loader)
        self.taken += self.together
        return next(self._left)

    def state_dict(self):
        """Return the position in the data, identical on all ranks."""
        about = {"samples": len(self.dataset), "seed": self.seed}
        return {"epoch": self.epoch, "taken": self.taken, **about}

    def problems(self, state):
        """Return why these batches cannot resume from a state, as a list of texts."""
        found = [
            f"{name} was {state[name]} when saved, but is {now} now"
            for name, now in (("samples", len(self.dataset)), ("seed", self.seed))
            if state[name] != now
        ]
        if state["taken"] % self.sampler.num_replicas:
            ranks = self.sampler.num_replicas
            found.append(f"taken={state['taken']} samples must be divisible by {ranks} ranks")
        return found

    def load_state_dict(self, state):
        """Resume from a state_dict(). Raises ValueError if problems(state) finds any."""
        if found := self.problems(state):
            raise ValueError("; ".join(found))
        self.epoch, self.taken, self._left = state["epoch"], state["taken"], None


class Evaluation(NamedTuple):
    """`total`: the metric's sum over all `count` targets (samples, or a text's tokens); `mean`.

    Ignored targets do not count. The mean over no targets is NaN.
    """

    total: float
    count: int | float

    @property
    def mean(self):
        return self.total / self.count if self.count else math.nan


def count_targets(target, ignore_index=-100, weight=None):
    """Return the divisor of torch.nn.functional.cross_entropy's mean, a scalar tensor.

    target: class numbers, except ignore_index; or floats, which all count.
    weight: [classes]: each target counts with the weight of its class.
    """
    if target.is_floating_point():
        return all_of(target)
    counts = target.long() != ignore_index  # in 8 bits 156 is -100
    if weight is None:
        return counts.sum()
    return weight[target.long().where(counts, 0)].where(counts, 0.0).sum()


def all_of(target):
    """Return the number of elements as a scalar tensor, float64, on the same device."""
    return torch.full((), target.numel(), dtype=torch.float64, device=target.device)


def pair_of(batch):
    """Return (inputs, targets). Raises TypeError for other kinds of batches."""
    if (
        isinstance(batch, list | tuple)
        and [isinstance(t, torch.Tensor) for t in batch] == [True] * 2
    ):
        return batch
    found = f"a {type(batch).__name__}"
    if isinstance(batch, dict):
        found = f"a dict with {', '.join(map(repr, batch))}"
    elif isinstance(batch, list | tuple):
        found = f"({', '.join(type(part).__name__ for part in batch)})"
    raise TypeError(
        f"evaluate needs samples (input, target) of tensors or numbers, but this dataset has "
        f"{found}: wrap it in a dataset of pairs"
    )


def device_for(model, group):
    """Return the device for batches and for the sums that are sent."""
    if dist.is_initialized() and "nccl" in str(dist.get_backend(group)):
        return torch.device(
            "cuda", torch.cuda.current_device()
        )  # also if parameters are offloaded to the CPU
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def correct(output, target):
    """Count targets [...] int64 with the largest logit of output [..., classes]: int64 []."""
    return (output.argmax(dim=-1) == target).sum()


def evaluate(
    model,
    dataset,
    metric=correct,
    batch_size=64,
    group=None,
    score=None,
    count=count_targets,
    dtype=None,
):
    """Compute the metric over the whole dataset, each sample once. Returns an `Evaluation`.

    The result is identical on all ranks.
    metric: (output, target) -> the batch's *sum*, a scalar tensor; sums of integers are exact.
    score: (input, target) -> that sum, for a model that cannot be called; None: metric of output.
    count: target -> number of a batch's targets that the metric counts; by default all but -100.
        For a loss that ignores another number: partial(count_targets, ignore_index=0).
    dtype: dtype to cast floating-point inputs to; None: no cast.
    All ranks of the group call it with the same dataset and weights; without a process group, one
    process does. The model is in eval mode meanwhile and gets batches on its parameters' device.
    Every rank calls the model equally often, so a model whose forward communicates (DDP's buffers)
    does not hang. Raises ValueError for an empty dataset, TypeError if samples are not pairs
    (input, target).
    """
    if not len(dataset):
        raise ValueError("the dataset is empty: pass at least one sample")
    alone = not dist.is_initialized()
    rank, world_size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
    share = range(rank, len(dataset), world_size)
    longest = len(range(0, len(dataset), world_size))
    batches = [share[start : start + batch_size] for start in range(0, longest, batch_size)]
    # A rank with fewer batches evaluates sample 0 again, uncounted, while the others finish.
    loader = DataLoader(dataset, batch_sampler=[list(batch) or [0] for batch in batches])
    device = device_for(model, group)
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # metric, targets: exact to 2^53
    modes = {module: module.training for module in model.modules()}  # some may be in eval already
    model.eval()
    try:
        with torch.no_grad():
            for batch, given in zip(batches, loader, strict=True):
                inputs, targets = (tensor.to(device) for tensor in pair_of(given))
                if inputs.is_floating_point():
                    inputs = inputs.to(dtype)
                value = score(inputs, targets) if score else metric(model(inputs), targets)
                if batch:
                    sums[0] += value
                    sums[1] += count(targets)
    finally:
        for module, training in modes.items():
            module.training = training
    if not alone:
        comm.all_reduce(sums, group=group)
    total, counted = sums.tolist()
    return Evaluation(total, int(counted) if counted.is_integer() else counted)
