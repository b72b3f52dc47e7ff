"""Local SGD: ranks train alone for H steps, then average weights. DiLoCo: an outer optimizer step.

    rank 0   |step|step|step|step|         |step|step|step|step|         H = 4
    rank 1   |step|step|step|step|         |step|step|step|step|
                                  [average]                     [average]

    local SGD    weights = mean of the ranks' weights
    DiLoCo       movement = weights at the last average - weights now     (H inner steps of AdamW)
                 outer optimizer (SGD, Nesterov): uses the mean movement as its gradient

Sent per rank: 2 (n-1)/n x parameter bytes every H steps: 1/H of DDP. The price: the ranks diverge
in between, more with larger H and learning rate, so the result differs from one process. With H = 1
it is equal if a step is linear in the gradients: SGD, with any momentum and weight decay; not
AdamW, which divides by the root of each rank's own squares. Held in addition to the inner
optimizer: nothing; with a hook or an outer optimizer the weights of the last average (DiLoCo: and
their momentum); and the message during an average.
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
    """Wraps an inner optimizer and averages its parameters over the group every `every` steps.

    inner: any torch optimizer, over the parameters of a model without DDP. Learning-rate schedulers
        take this inner optimizer. Its states stay per rank, and so do buffers such as BatchNorm's
        statistics.
    start: average after each step until that step. outer: function of tensors -> optimizer
        (DiLoCo). hook: a comm hook such as a compressor's, applied to the movements.
    bucket_cap_mb: MiB per message.
    Collective: parameters are set to rank 0's. Raises ValueError if every < 1, and on every rank if
    settings or parameters differ between ranks.
    """

    def __init__(
        self, inner, every=8, start=0, outer=None, hook=None, process_group=None, bucket_cap_mb=25
    ):
        if type(every) is not int or every < 1:
            raise ValueError(f"every={every} must be an integer >= 1")
        refuse_copies(type(self).__name__, inner)
        self.inner = inner
        self.every = every
        self.start = start
        self.hook = hook
        self.group = process_group
        self.steps = self._since = 0
        everything = [p for group in inner.param_groups for p in group["params"]]
        self.parameters = [p for p in everything if p.requires_grad]
        self._names = {p: f"parameter {number}" for number, p in enumerate(self.parameters)}
        self.anchors = {}  # parameter -> its value after the last average
        if outer or hook:
            self.anchors = {p: p.detach().clone() for p in self.parameters}
            # Plain SGD with lr=1 moves by the mean movement.
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
        """{parameter: its states}: the inner optimizer's, the anchor, and the outer optimizer's."""
        kept = {p: dict(state) for p, state in self.inner.state.items()}
        for p, anchor in self.anchors.items():
            kept.setdefault(p, {}).update(anchor=anchor, outer=self.outer.state.get(anchor, {}))
        return kept

    def add_param_group(self, param_group):
        """Raise RuntimeError: new parameters would have no anchors and would never be averaged."""
        raise RuntimeError(
            f"{type(self).__name__} cannot add a parameter group: add it to the inner optimizer, "
            "then construct a new one"
        )

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def step(self, closure=None):
        """Take a step of the inner optimizer, then average if due. Returns the closure's loss."""
        loss = self.inner.step(closure)
        self.steps += 1
        self._since += 1
        if self.steps <= self.start or self._since == self.every:
            self.average()
        return loss

    @torch.no_grad()
    def average(self):
        """Average now. Collective. Call it after the last step, unless that step has averaged.

        Raises RuntimeError if parameters were added to the inner optimizer or unfrozen after
        construction.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad and p not in self._names:
                    raise RuntimeError(
                        f"a parameter of shape {list(p.shape)} was added or unfrozen after "
                        f"{type(self).__name__} was constructed: construct a new one"
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
        self.outer.zero_grad()  # frees the buckets: the movements are views of them
        for p, anchor in self.anchors.items():
            p.copy_(anchor)

    def __getstate__(self):
        check_default_group(self, self.group)
        return self.__dict__ | {"group": None}

    def state_dict(self):
        """Return this rank's state, without the parameters and without the hook's state.

        Save it on every rank: inner states differ between ranks, and between averages so do the
        parameters. A compressor has its own state_dict.
        """
        state = {"inner": self.inner.state_dict(), "steps": self.steps, "since": self._since}
        if self.anchors:
            anchors = {self._names[p]: anchor.clone() for p, anchor in self.anchors.items()}
            state |= {"anchors": anchors, "outer": self.outer.state_dict()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        self.steps = state["steps"]
        self._since = state["since"]
        for p, anchor in self.anchors.items():
            anchor.copy_(state["anchors"][self._names[p]])
        if self.anchors:
            self.outer.load_state_dict(state["outer"])


class DiLoCo(LocalSGD):
    """LocalSGD with an outer optimizer: SGD with Nesterov momentum.

    The paper's inner optimizer is AdamW, with every=500.
    """

    def __init__(self, inner, every=100, outer_lr=0.7, outer_momentum=0.9, **settings):
        outer = partial(
            torch.optim.SGD, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0
        )
        super().__init__(inner, every, outer=outer, **settings)


def mean(group, bucket):
    """Return a future-like Mean of a bucket over the group. The comm hook without compression."""
    work = comm.all_reduce(bucket.buffer(), group=group, async_op=True)
    return Mean(work, bucket.buffer(), dist.get_world_size(group))


class Mean:
    """Like a Future of the mean: divides the sum in wait()."""

    def __init__(self, work, total, world_size):
        self.work = work
        self.total = total
        self.world_size = world_size

    def wait(self):
        self.work.wait()
        return self.total.div_(self.world_size)
