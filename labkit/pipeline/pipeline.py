"""Pipeline parallelism: each rank holds some layers, and micro-batches pass through all of them.

    gpipe   rank 0   F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3     F: activations go to the next rank
            rank 1   .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..     B: gradients go to the one before
            bubble   ^^             ^^^^^                    the rank is idle

Sent per rank, step and boundary: the batch's activations there, and gradients of that size.
Held: 1/p of parameters, gradients and states; activations of as many micro-batches as the schedule
has in flight. Time lost: the bubble, (p-1)/(M+p-1) for M micro-batches here. Schedules with less
bubble or memory are other lists of the same actions (pipeline_schedules.py), and so is your own.
Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, NeurIPS
2019, section 2.3; Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM, SC 2021, section 2.2.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labkit.collective_errors import raised_on_all
from labkit.fsdp.sharding_strategy import compute_device
from labkit.pipeline.pipeline_p2p import Mail
from labkit.pipeline.pipeline_schedules import (
    Action,
    actions,
    dual_pipe,
    gpipe,
    interleaved,
    one_f_one_b,
    routes,
    v_shaped,
    zero_bubble,
)
from labkit.pipeline.pipeline_stages import Stages, parts_of
from labkit.pipeline.schedule_validation import check
from labkit.pipeline.zero_bubble_backward import backward_of_input, backward_of_weights
from labkit.replicas import check_ranks, gather_bytes

__all__ = [
    "Action",
    "Pipeline",
    "dual_pipe",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "v_shaped",
    "zero_bubble",
]


class Pipeline:
    """A model in stages, each built on the rank that runs it. Collective to construct and to call.

    stages: {number: module} of this rank (on the meta device: of all ranks); a module maps one
        tensor to one tensor.
    schedule: a function (stages, micro_batches, ranks) -> for each rank a list of Action, or such a
        list. It is validated before anything runs.
    micro_batches: number of equal parts of a batch, along dim 0.
    loss: (output, target) -> a mean over the samples; needed on the rank of the last stage.
    names: (stage, name in the stage) -> name in the full model; None: "stage.name". Parameters with
        the same name are tied: they have one value, and their gradient is the sum over all copies.
        A stage and its copy in another chain (dual_pipe) have the same number here, so they are
        tied, too.

    When step() returns, .grad of this rank's parameters is the gradient of the mean over the batch:
    clip, average over other axes of a mesh and step as usual. A B with a separate W traverses the
    graph twice (zero_bubble_backward.py). Raises ValueError, on all ranks, for an invalid schedule,
    stages on other ranks than in the schedule, and a missing loss. Not supported: stages with
    several input or output tensors, and batches that cannot be split into equal parts.
    """

    def __init__(
        self, stages, group=None, schedule=one_f_one_b, micro_batches=1, loss=None, names=None
    ):
        check_ranks("Pipeline", group)
        self.group = group
        self.rank = dist.get_rank(group)
        self.micro_batches = micro_batches
        self.loss = loss
        is_dict = isinstance(stages, dict)
        modules = stages.values() if is_dict else ()
        device = next((p.device for module in modules for p in module.parameters()), None)
        device = device or compute_device(nn.ModuleList(), group)
        count = b"%d" % len(stages) if is_dict else b""
        counts = [count] if device.type == "meta" else gather_bytes(count, group, device)
        if b"" in counts:
            raise ValueError(f"stages on rank {counts.index(b'')} must be a dict: number -> module")
        with raised_on_all(group, device):
            self.read(schedule, list(map(int, counts)))
        text = " | ".join(" ".join(map(str, program)) for program in self.schedule)
        length = len(self.owner) // len(self.last)
        self.stages = Stages(stages, names, length, self.owner, group, text, device)
        self.split = {a for a in self.schedule[self.rank] if a.kind == "W"}
        ways = group, self.backward_group(group)
        forward = [[a for a in program if a.kind == "F"] for program in self.schedule]
        self.mail = Mail(self.schedule, self.owner, ways, device)
        self.forward_mail = partial(Mail, forward, self.owner, ways, device)

    def read(self, schedule, counts):
        """Set the action lists, the rank of each stage, and the first and last stage of a chain."""
        if callable(schedule):
            schedule = schedule(sum(counts), self.micro_batches, len(counts))
        self.schedule = actions(schedule)
        self.owner = check(self.schedule, dist.get_world_size(self.group), self.micro_batches)
        chains = set(routes(self.schedule).values())
        self.first, self.last = ({chain[end] for chain in chains} for end in (0, -1))
        local = sorted(stage for stage in self.last if self.owner[stage] == self.rank)
        if local and self.loss is None:
            raise ValueError(f"stage {local[0]} is the last: rank {self.rank} needs a loss")

    @staticmethod
    def backward_group(group):
        """Return a group for backward messages: on NCCL those of one group run one at a time."""
        if "nccl" not in dist.get_backend(group):
            return group
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        return dist.new_group(ranks, use_local_synchronization=True)

    def step(self, input=None, target=None, *, scale=1.0, weights=None):
        """Run forward and backward of a batch; return the mean loss on the last stage, else None.

        input is read on the rank of the first stage, target on that of the last. Gradients are
        accumulated. scale: multiplies the loss in backward only. weights: of the micro-batches in
        the mean, a list of numbers whose mean is 1; None: equal weights. Two chains (dual_pipe)
        have two ends: both are given the full batch, and return their parts of its mean loss.
        Raises RuntimeError if gradients are off, ValueError for a missing or unsuitable batch.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("step() needs gradients, which are off: use evaluate()")
        self.scale = scale
        self.metric = self.loss
        self.weights = weights or [1.0] * self.micro_batches
        with self.stages.separate_tied_gradients():
            return self.run(self.schedule[self.rank], self.mail, input, target)

    @torch.no_grad()
    def evaluate(self, input=None, target=None, loss=None):
        """Run forward of a batch; return the mean loss on the last stage, else None.

        The batch may have another size every time. target: a tensor, or a list with one per
        micro-batch. loss: another loss than for training.
        """
        self.metric = loss or self.loss
        self.weights = [1.0] * self.micro_batches
        program = [action for action in self.schedule[self.rank] if action.kind == "F"]
        return self.run(program, self.forward_mail(), input, target)

    def run(self, program, mail, input, target):
        """Run each action of this rank's list, and post the receive of the next one before it."""
        self.inputs = self.cut(input, self.first, "input")
        self.targets = self.cut(target, self.last, "target")
        if len(self.weights) != self.micro_batches:
            raise ValueError(
                f"weights has {len(self.weights)} numbers for {self.micro_batches} micro-batches"
            )
        self.held = {}
        self.later = {}
        self.losses = []
        if self.stages.built and not mail.looks:
            mail.expect(self.stages.built, input[: len(input) // self.micro_batches])
        mail.begin()
        for number, action in enumerate(program):
            for upcoming in program[number : number + 2]:
                mail.ask(upcoming, ahead=upcoming is not action)
            arrived = mail.take(action)
            mail.send(self.compute(action, arrived), action)
        mail.end()
        return torch.stack(self.losses).sum() / self.micro_batches if self.losses else None

    def cut(self, batch, ends, name):
        """Split the batch into micro-batches, on a rank with a first or last stage."""
        if not (local := ends & self.stages.modules.keys()):
            return None
        if batch is None:
            raise ValueError(f"this rank has stage {min(local)}: step() needs its {name}")
        return parts_of(batch, self.micro_batches, name)

    def compute(self, action, arrived):
        """Run one action without its messages: from the received tensor to the one to send."""
        if action.kind == "F":
            return self.forward(action, arrived)
        if action.kind == "B":
            return self.backward(action, arrived)
        backward_of_weights(self.later.pop(action[1:]))

    def forward(self, action, arrived):
        _, stage, m = action
        x = self.inputs[m] if arrived is None else arrived.detach()
        if arrived is not None and x.is_floating_point():
            x.requires_grad_()
        output = self.stages.modules[stage](x)
        if not isinstance(output, torch.Tensor):
            raise ValueError(
                f"stage {stage} returned a {type(output).__name__}: it must return one tensor"
            )
        if stage in self.last:
            output = self.metric(output, self.targets[m])
            if output.dim():
                raise ValueError(f"the loss must be a scalar: it has shape {list(output.shape)}")
            loss = output.detach()
            weight = self.weights[m]
            if weight != 1:  # 0 for a micro-batch without targets, whose mean is NaN
                loss = loss * weight if weight else torch.zeros_like(loss)
            self.losses.append(loss)
        if torch.is_grad_enabled():
            self.held[action[1:]] = x, output
        return output.detach()

    def backward(self, action, gradient):
        _, stage, m = action
        x, output = self.held.pop((stage, m))
        if stage in self.last:
            scale = self.weights[m] * self.scale
            gradient = torch.full_like(output, scale / self.micro_batches)
        if action._replace(kind="W") in self.split:
            x_gradient, self.later[stage, m] = backward_of_input(output, x, gradient)
        else:
            if output.requires_grad:  # also if the stage returns its input unchanged
                torch.autograd.backward(output, gradient)
            x_gradient = x.grad if x.is_leaf else None
        if stage in self.first:
            if x_gradient is not None and not x.is_leaf:  # a split batch that requires gradients
                x.backward(x_gradient)
            return None
        return torch.zeros_like(x) if x_gradient is None else x_gradient

    def parameters(self):
        """Return the parameters of this rank's stages, each once."""
        return (p for _, p in self.named_parameters())

    def named_parameters(self):
        """Yield (name in the full model, parameter), for each copy on this rank."""
        for name, copies in self.stages.tensors.items():
            yield from ((name, p) for p in copies if isinstance(p, torch.nn.Parameter))

    def state_dict(self):
        """Return this rank's parameters and buffers by their names in the full model."""
        return self.stages.state_dict()

    def full_state_dict(self):
        """Return the full model's state dict, on the CPU of every rank. Collective."""
        return self.stages.full_state_dict()

    def load_state_dict(self, state_dict, strict=True):
        """Load this rank's part of full_state_dict(), or of its own state_dict()."""
        self.stages.load(state_dict, strict)
