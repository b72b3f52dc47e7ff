"""Distributed sampling: each sample exactly once an epoch; and exact evaluation on many ranks.

    epoch 0    permutation    7  2  9  0  4  1  8  3  6  5       rank 0: 7 0 8 5
                      rank    0  1  2  0  1  2  0  1  2  0       rank 1: 2 4 3     rank 2: 9 1 6
    epoch 1    another permutation, dealt in the same way

No sample is repeated to make the shares equal, so with N samples and n ranks they differ by at most
one, and so may the number of batches: use drop_last=True (leaves out the epoch's last N mod n
samples) or `join` of the DDP.

`Batches` goes through epoch after epoch, and can be told where to go on.

Sent: nothing to sample, since all ranks draw the same permutation; one all-reduce of 16 bytes per
evaluation. Li et al., PyTorch Distributed, VLDB 2020; protocol of
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
    Where num_replicas divides N, the indices are those of torch's sampler, in the same order.

    Raises ValueError for a rank out of range, and for fewer samples than ranks: a rank without a
    sample would take no step, while the others waited for its gradients for ever.
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
                f"at least one rank would have none and leave the others waiting. "
                f"Give every rank a sample, or use fewer ranks."
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
        """The next iteration is `epoch`'s permutation: the same on all ranks, new in each epoch."""
        self.epoch = epoch


class Batches:
    """(input, target) batches of one rank, without end: in each epoch a new order of the samples.

    The batches of one step are, of all ranks together, the next samples of the epoch's permutation,
    however many ranks there are: so others can go on where these have stopped, and each sample of
    an epoch is still seen once. A last batch that is not full is left out.
    batch_size: of this rank. Raises ValueError where an epoch has not one batch for all ranks.
    """

    def __init__(self, dataset, batch_size, num_replicas=None, rank=None, seed=0):
        self.sampler = DistributedSampler(dataset, num_replicas, rank, seed=seed)
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.together = batch_size * self.sampler.num_replicas
        if len(dataset) < self.together:
            raise ValueError(
                f"{dataset}: {len(dataset)} samples are fewer than a batch of {self.together}"
            )
        self.epoch = self.taken = 0  # taken: samples of the epoch, by all ranks
        self._left = None

    def __iter__(self):
        return self

    def __next__(self):
        if self.taken + self.together > len(self.dataset):
            self.epoch, self.taken, self._left = self.epoch + 1, 0, None
        if self._left is None:
            self.sampler.set_epoch(self.epoch)
            rest = list(self.sampler)[self.taken // self.sampler.num_replicas :]
            # A generator of its own: a loader draws from the global one, and dropout would notice.
            own = torch.Generator().manual_seed(self.seed)
            self._left = iter(
                DataLoader(self.dataset, self.batch_size, sampler=rest, generator=own)
            )
        self.taken += self.together
        return next(self._left)

    def state_dict(self):
        """The same on all ranks."""
        about = {"samples": len(self.dataset), "seed": self.seed}
        return {"epoch": self.epoch, "taken": self.taken, **about}

    def problems(self, state):
        """Why these batches cannot go on from there, [text]: other data, or an odd rest."""
        found = [
            f"{name} were {state[name]}, and are {own} now"
            for name, own in (("samples", len(self.dataset)), ("seed", self.seed))
            if state[name] != own
        ]
        if state["taken"] % self.sampler.num_replicas:
            ranks = self.sampler.num_replicas
            found.append(f"{ranks} ranks cannot go on evenly after {state['taken']} samples")
        return found

    def load_state_dict(self, state):
        """Raises ValueError where there are problems(state)."""
        if found := self.problems(state):
            raise ValueError("; ".join(found))
        self.epoch, self.taken, self._left = state["epoch"], state["taken"], None


class Evaluation(NamedTuple):
    """`total`: the metric's sum over all `count` targets (samples, or a text's tokens); `mean`.

    Targets that are ignored are not counted. The mean over none is NaN.
    """

    total: float
    count: int | float

    @property
    def mean(self):
        return self.total / self.count if self.count else math.nan


def count_targets(target, ignore_index=-100, weight=None):
    """What the mean of torch.nn.functional.cross_entropy divides by, a scalar tensor.

    target: class numbers, of which ignore_index does not count; or floats, of which all count.
    weight: [classes]: each target counts as much as its class weighs.
    """
    if target.is_floating_point():
        return all_of(target)
    counts = target.long() != ignore_index  # in 8 bits 156 is -100
    if weight is None:
        return counts.sum()
    return weight[target.long().where(counts, 0)].where(counts, 0.0).sum()


def all_of(target):
    """The number of its elements as a scalar tensor, float64, where it is."""
    return torch.full((), target.numel(), dtype=torch.float64, device=target.device)


def pair_of(batch):
    """(inputs, targets). Raises TypeError for batches of another kind."""
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
        f"evaluate takes samples (input, target), of tensors or numbers, and this dataset's are "
        f"{found}: wrap it in a dataset of pairs"
    )


def device_for(model, group):
    """Where batches go, and sums are sent from."""
    if dist.is_initialized() and "nccl" in str(dist.get_backend(group)):
        return torch.device(
            "cuda", torch.cuda.current_device()
        )  # also where parameters wait on the CPU
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def correct(output, target):
    """How many of target [...] int64 the largest logit of output [..., classes] hits: int64 []."""
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
    """The metric over the whole dataset, each sample once: the same `Evaluation` on all ranks.

    metric: (output, target) -> the batch's *sum*, a scalar tensor; sums of integers are exact.
    score: (input, target) -> that, of a model that is more than a call; None: metric of the output.
    count: target -> how many of a batch's targets the metric counts: all but -100 unless given. A
        loss that ignores another number: partial(count_targets, ignore_index=0).
    dtype: what floating-point inputs are cast to; None: they stay as the dataset has them.
    All ranks of the group call it, with the same dataset and the same weights; without a process
    group, one process. The model is put into eval mode for the while, and gets batches on the
    device of its parameters. Every rank calls the model equally often, so a model whose forward
    communicates (DDP's buffers) does not hang. Raises ValueError for an empty dataset, TypeError
    for one whose samples are not pairs (input, target).
    """
    if not len(dataset):
        raise ValueError("the dataset is empty: there is nothing to evaluate")
    alone = not dist.is_initialized()
    rank, world_size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
    share = range(rank, len(dataset), world_size)
    longest = len(range(0, len(dataset), world_size))
    batches = [share[start : start + batch_size] for start in range(0, longest, batch_size)]
    # A rank whose share has ended looks at sample 0 again, uncounted, while the others finish.
    loader = DataLoader(dataset, batch_sampler=[list(batch) or [0] for batch in batches])
    device = device_for(model, group)
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # metric, targets: exact to 2^53
    modes = {module: module.training for module in model.modules()}  # frozen: maybe in eval already
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
