"""The stages of one rank: the names of their tensors in the full model, and tied parameters.

    rank 0   stage 0: embedding ...                     a name in two stages is one parameter:
    rank 3   stage 3: ... head (the embedding again)    equal at first, gradients added

Sent per rank and step for a tied parameter on k ranks: (k-1) x its gradient. Press and Wolf, EACL
2017 (tied embeddings).
"""

import json
from collections import Counter
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from labkit import comm
from labkit.collective_errors import raised_on_all
from labkit.replicas import broadcast_tensors, gather_bytes


def by_stage(stage, name):
    return f"{stage}.{name}"


class Stages:
    """The stages of this rank. modules: {stage: nn.Module}; on the meta device, of all ranks.

    names: (stage, name in the stage) -> name in the full model; None: "stage.name".
    length: number of stages of the model; later stages are copies of the first, the second, ...
    owner: {stage: rank}. schedule: a text that must be identical on all ranks. Collective. Raises
    ValueError, on all ranks, for stages on other ranks than in the schedule, and for one name with
    different shapes, dtypes or requires_grad.
    """

    def __init__(self, modules, names, length, owner, group, schedule, device):
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.built = modules if torch.device(device).type == "meta" else None
        ranks = range(dist.get_world_size(group) if self.built else 0)
        places = [{n: part for n, part in modules.items() if owner[n] == r} for r in ranks]
        self.modules = dict(places[self.rank] if places else modules)
        self.names = names or by_stage
        self.length = length
        # name in the full model: this rank's tensors of that name; its first stage with that name
        with raised_on_all(group, device):
            self.tensors, self.first = self.named(self.modules)
        texts = [self.describe(place, schedule) for place in places]
        texts = texts or gather_bytes(self.describe(self.modules, schedule), group, device)
        self.holders = self.agree(owner, [json.loads(text) for text in texts])
        self.tied = {
            name: copies
            for name, copies in sorted(self.tensors.items())
            if isinstance(copies[0], nn.Parameter)
            and (len(copies) > 1 or len(self.holders[name]) > 1)
        }
        self.make_equal()

    def named(self, modules):
        tensors = {}
        first = {}
        for stage, module in sorted(modules.items()):
            for own, tensor in module.state_dict(keep_vars=True).items():
                if not isinstance(tensor, torch.Tensor) or own.endswith("_extra_state"):
                    raise ValueError(
                        f"stage {stage}: {own!r} is not a parameter or buffer, and a pipeline "
                        "supports only those: remove get_extra_state"
                    )
                name = self.names(stage % self.length, own)
                first.setdefault(name, stage)
                copies = tensors.setdefault(name, [])
                if not any(tensor is copy for copy in copies):
                    copies.append(tensor)
        return tensors, first

    def describe(self, modules, schedule):
        """Describe a rank with these stages to the other ranks, as text."""
        tensors, first = self.named(modules)
        looks = {
            name: (first[name], look_of(copies[0]), len(copies)) for name, copies in tensors.items()
        }
        description = {"schedule": schedule, "stages": sorted(modules), "looks": looks}
        return json.dumps(description).encode()

    def agree(self, owner, descriptions):
        """Return {name: [ranks that hold it]}, the first stage's first. descriptions: by rank."""
        holders = {}
        known = {}
        self.counts = Counter()
        for rank, description in enumerate(descriptions):
            if description["schedule"] != descriptions[0]["schedule"]:
                raise ValueError(f"ranks 0 and {rank} have different schedules")
            wanted = sorted(s for s, place in owner.items() if place == rank)
            if description["stages"] != wanted:
                raise ValueError(
                    f"rank {rank} has stages {description['stages']}; "
                    f"by the schedule it has {wanted}"
                )
            for name, (stage, look, count) in description["looks"].items():
                self.counts[name] += count
                holders.setdefault(name, []).append((stage, rank))
                if known.setdefault(name, look) != look:
                    raise ValueError(f"{name!r} is {known[name]} in one stage, {look} in another")
        return {name: [rank for _, rank in sorted(pairs)] for name, pairs in holders.items()}

    @torch.no_grad()
    def make_equal(self):
        """Set tied parameters to the values of the copy in the first stage that has one."""
        names = sorted(name for name, ranks in self.holders.items() if len(ranks) > 1)
        for name in names:
            if self.rank in self.holders[name]:
                self.share(name, self.tensors[name][0])
        for copies in self.tied.values():
            for copy in copies[1:]:
                copy.copy_(copies[0])

    def share(self, name, tensor):
        """Send the first holder's values to the others."""
        first, *others = self.holders[name]
        if self.rank != first:
            comm.recv(tensor.data, first, self.group)
            return
        for rank in others:
            comm.send(tensor.data, rank, self.group)

    @contextmanager
    def separate_tied_gradients(self):
        """Collect the gradient of each copy of a tied parameter separately, during a step.

        Then add the sum over all copies to the gradient that each copy had. After an exception
        nothing is added. Collective.
        """
        before = {p: p.grad for copies in self.tied.values() for p in copies}
        for p in before:
            p.grad = None
        try:
            yield
        except BaseException:
            for p, gradient in before.items():
                p.grad = gradient
            raise
        self.add_tied(before)

    @torch.no_grad()
    def add_tied(self, before):
        for name, copies in self.tied.items():
            if not copies[0].requires_grad:
                continue
            parts = {self.rank: sum(p.grad for p in copies if p.grad is not None)}
            own = parts[self.rank] = parts[self.rank] + torch.zeros_like(copies[0])
            others = [rank for rank in self.holders[name] if rank != self.rank]
            works = []
            for rank in others:
                parts[rank] = torch.empty_like(own)
                works.append(comm.exchange(own, rank, parts[rank], rank, self.group, async_op=True))
            for work in works:
                work.wait()
            total = sum(parts[rank] for rank in sorted(parts))  # in one order: bitwise identical
            for p in copies:
                p.grad = total.clone() if before[p] is None else before[p] + total

    def state_dict(self):
        """Return {name in the full model: this rank's tensor}."""
        return {name: copies[0].detach() for name, copies in self.tensors.items()}

    def full_state_dict(self):
        """Return all tensors of all ranks, copied to the CPU of every rank. Collective."""
        return union(self.state_dict(), self.group, self.device)

    def copies(self, name):
        """Return the number of copies of a parameter on all ranks."""
        return self.counts[name]

    @torch.no_grad()
    def load(self, state_dict, strict=True):
        """Load this rank's part of a full state dict, or of state_dict().

        Raises RuntimeError for a tensor of another shape and, if strict, for a missing one.
        """
        missing = [name for name in self.tensors if name not in state_dict]
        wrong = [
            f"{name!r} has shape {list(state_dict[name].shape)}, expected {list(copies[0].shape)}"
            for name, copies in self.tensors.items()
            if name in state_dict and state_dict[name].shape != copies[0].shape
        ]
        if wrong or (missing and strict):
            raise RuntimeError("; ".join(wrong + [f"missing {name!r}" for name in missing]))
        for name, copies in self.tensors.items():
            for copy in copies:
                copy.copy_(state_dict.get(name, copy))


def look_of(tensor):
    """Return shape, dtype and requires_grad as text, which all copies of a name must share."""
    fixed = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{list(tensor.shape)} {tensor.dtype}" + " (requires_grad=False)" * fixed


def parts_of(batch, count, name):
    """Split a batch into `count` micro-batches, equal parts along dim 0; a list is split already.

    Raises ValueError for other types, and for parts of unequal size.
    """
    if isinstance(batch, list):
        if len(batch) != count:
            raise ValueError(f"{name} is a list of {len(batch)} for {count} micro-batches")
        return batch
    if not isinstance(batch, torch.Tensor) or not batch.dim():
        kind = "number" if isinstance(batch, torch.Tensor) else type(batch).__name__
        raise ValueError(
            f"{name} is a {kind}: it must be a tensor to split along dim 0, or a list of {count} "
            "micro-batches"
        )
    if len(batch) % count:
        raise ValueError(f"{name}: {len(batch)} samples must be divisible by {count} micro-batches")
    return batch.chunk(count)


def union(state, group, device):
    """Return the tensors of all ranks' dicts, on every rank's CPU. Collective.

    If several ranks have a name, the first rank's tensor.
    """
    looks = {name: (list(t.shape), str(t.dtype)) for name, t in state.items()}
    texts = gather_bytes(json.dumps(looks).encode(), group, device)
    whole = {}
    for rank, text in enumerate(texts):
        for name, (shape, dtype) in json.loads(text).items():
            if name not in whole:
                value = torch.empty(shape, dtype=getattr(torch, dtype[6:]), device=device)
                if rank == dist.get_rank(group):
                    value.copy_(state[name].detach())
                broadcast_tensors([value], rank, group)
                whole[name] = value.cpu()
    return whole
