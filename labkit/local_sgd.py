"""Local SGD: ranks train alone for H steps, then average weights; DiLoCo makes that its own step.

    rank 0   |step|step|step|step|         |step|step|step|step|         H = 4
    rank 1   |step|step|step|step|         |step|step|step|step|
                                  [average]                     [average]

    local SGD    weights = mean of the ranks' weights
    DiLoCo       movement = weights at the last average - weights now     (H inner steps of AdamW)
                 outer optimizer (SGD, Nesterov): the mean movement is its gradient; all go on there

Sent per rank: 2 (n-1)/n x parameter bytes every H steps: 1/H of what DDP sends. The price: the
ranks drift apart in between, the more the larger H and the learning rate, and it is no longer the
training of one process. With H = 1 it still is if a step is linear in the gradients: SGD, with any
momentum and weight decay; not AdamW, which divides by the root of each rank's own squares. Held
besides the inner optimizer: nothing; with a hook or an outer optimizer the weights of the last
average (DiLoCo: and their momentum); and, while averaging, the message.
Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019; Lin et al., Don't Use Large
Mini-Batches, Use Local SGD, ICLR 2020 (`start`: post-local SGD); Douillard et al., DiLoCo:
Distributed Low-Communication Training of Language Models, 2023, algorithm 1.
"""

from functools import partial

import torch
import torch.distributed as dist

from labkit import comm
from labkit.ddp.bucket import Bucket, assign_buckets
from labkit.ddp.comm_hook_errors import future_from
from labkit.pickle_support import check_default_group
from labkit.replicas import broadcast_tensors, check_agreement
from labkit.zero.zero import refuse_copies


class LocalSGD:
    """The inner optimizer, which after every `every` steps averages its parameters over the group.

    inner: any torch optimizer, over the parameters of a model without DDP; a learning-rate schedule
        goes to it. Its states stay each rank's own, and so do buffers such as BatchNorm's
        statistics.
    start: until that step average after each one. outer: function of tensors -> optimizer (DiLoCo).
    hook: a comm hook such as a compressor's; then movements travel, which can be compressed.
    Collective: parameters become rank 0's. Raises ValueError where every < 1, and on every rank
    where ranks differ.
    """

    def __init__(
        self, inner, every=8, start=0, outer=None, hook=None, process_group=None, bucket_cap_mb=25
    ):
        if type(every) is not int or every < 1:
            raise ValueError(f"every must be a whole number of at least 1 step, not {every}")
        refuse_copies(type(self).__name__, inner)
        self.inner, self.every, self.start, self.hook, self.group = (
            inner,
            every,
            start,
            hook,
            process_group,
        )
        self.steps = self._since = 0
        everything = [p for group in inner.param_groups for p in group["params"]]
        self.parameters = [p for p in everything if p.requires_grad]
        self._names = {p: f"parameter {number}" for number, p in enumerate(self.parameters)}
        self.anchors = {}  # parameter -> what it was after the last average
        if outer or hook:
            self.anchors = {p: p.detach().clone() for p in self.parameters}
            # Moving by the mean movement is a step of plain SGD.
            self.outer = (outer or partial(torch.optim.SGD, lr=1.0))(list(self.anchors.values()))
        outside = (
            f"{type(self.outer).__name__} {self.outer.defaults}" if self.anchors else "the mean"
        )
        lines = [f"{every=}, {start=}, {bucket_cap_mb=}, {type(inner).__name__}, outside {outside}"]
        lines += [f"{name!r} {list(p.shape)} {p.dtype}" for p, name in self._names.items()]
        check_agreement(lines, process_group, self.parameters[0].device)
        broadcast_tensors([p.detach() for p in everything], 0, process_group)
        for p, anchor in self.anchors.items():
            anchor.copy_(p.detach())
        self._lists = assign_buckets(self.parameters, int(bucket_cap_mb * 2**20))

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        """parameter -> all kept for it: the inner optimizer's states, the anchor, the outer's."""
        kept = {p: dict(state) for p, state in self.inner.state.items()}
        for p, anchor in self.anchors.items():
            kept.setdefault(p, {}).update(anchor=anchor, outer=self.outer.state.get(anchor, {}))
        return kept

    def add_param_group(self, param_group):
        """Raises RuntimeError: the new parameters would have no anchors, and never be averaged."""
        raise RuntimeError(
            f"{type(self).__name__} averages the parameters that it was constructed with: add the "
            "group to the inner optimizer, then construct a new one around it"
        )

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def step(self, closure=None):
        """A step of the inner optimizer, and an average where it is due."""
        loss = self.inner.step(closure)
        self.steps += 1
        self._since += 1
        if self.steps <= self.start or self._since == self.every:
            self.average()
        return loss

    @torch.no_grad()
    def average(self):
        """Average now: collective. To be called after the last step, if it does not end a round.

        Raises RuntimeError where the inner optimizer has parameters that were added or unfrozen
        after construction.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad and p not in self._names:
                    raise RuntimeError(
                        f"a parameter of shape {list(p.shape)} was added or unfrozen after "
                        f"{type(self).__name__} was constructed: construct a new one around the "
                        "inner optimizer"
                    )
        self._since = 0
        waiting = []
        for index, members in enumerate(self._lists):
            names = [self._names[p] for p in members]
            bucket = Bucket(members, index, index == len(self._lists) - 1, names)
            for p, view in zip(members, bucket.gradients(), strict=True):
                if self.anchors:
                    torch.sub(self.anchors[p], p, out=view)
                else:
                    view.copy_(p)
            waiting.append((bucket, future_from((self.hook or mean)(self.group, bucket))))
        for bucket, future in waiting:
            bucket.receive(future.wait())
            for p, view in zip(bucket.members, bucket.gradients(), strict=True):
                if self.anchors:
                    self.anchors[p].grad = view
                else:
                    p.copy_(view)
        if self.anchors:
            self._step_outside()

    def _step_outside(self):
        self.outer.step()
        self.outer.zero_grad()  # the movements are views of buckets, which end here
        for p, anchor in self.anchors.items():
            p.copy_(anchor)

    def __getstate__(self):
        check_default_group(self, self.group)
        return self.__dict__ | {"group": None}

    def state_dict(self):
        """This rank's own: inner states differ, and between averages so do the parameters.

        What a hook holds is not part of it: a compressor has a state_dict of its own.
        """
        state = {"inner": self.inner.state_dict(), "steps": self.steps, "since": self._since}
        if self.anchors:
            anchors = {self._names[p]: anchor.clone() for p, anchor in self.anchors.items()}
            state |= {"anchors": anchors, "outer": self.outer.state_dict()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        self.steps, self._since = state["steps"], state["since"]
        for p, anchor in self.anchors.items():
            anchor.copy_(state["anchors"][self._names[p]])
        if self.anchors:
            self.outer.load_state_dict(state["outer"])


class DiLoCo(LocalSGD):
    """LocalSGD whose averages are steps of SGD with Nesterov momentum. Paper: AdamW, every=500."""

    def __init__(self, inner, every=100, outer_lr=0.7, outer_momentum=0.9, **settings):
        outer = partial(
            torch.optim.SGD, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0
        )
        super().__init__(inner, every, outer=outer, **settings)


def mean(group, bucket):
    """The comm hook that compresses nothing."""
    work = comm.all_reduce(bucket.buffer(), group=group, async_op=True)
    return Mean(work, bucket.buffer(), dist.get_world_size(group))


class Mean:
    """Like a Future of the mean: the sum is divided when it is waited for."""

    def __init__(self, work, total, world_size):
        self.work, self.total, self.world_size = work, total, world_size

    def wait(self):
        self.work.wait()
        return self.total.div_(self.world_size)
