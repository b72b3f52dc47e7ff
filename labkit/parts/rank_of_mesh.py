"""What one rank of a mesh builds and does, rehearsed where the others are not.

    whole module (on no device)   -- stages of pp -- layers cut by tp -- attention of cp -->  part
    part, and the rank's program  -- rehearse -->  its log, as of a module that is not split

The split layers, the ring and the schedule are those of the real run; messages are stand_in's. The
program replays labkit/pipeline.py: what it holds, when, and what is on its way. Other axes (dp, and
cp again, along which gradients are averaged) are the holdings': they see smaller parameters.
Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM,
SC 2021, section 3.
"""

import copy
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from labkit import comm
from labkit.parts.dependencies import check
from labkit.parts.layouts import Axis
from labkit.parts.messages import made_for
from labkit.parts.plan import checked, met
from labkit.parts.rehearsal import Step
from labkit.parts.schedules import Action
from labkit.parts.split_backward import backward_of_input, backward_of_weights
from labkit.parts.stages import Stages
from labkit.parts.stand_in import StandIn, stand_ins

AXES = ("dp", "cp", "pp", "tp")


def part_of(
    module,
    input,
    target,
    axes,
    at=None,
    plan=None,
    attend=None,
    stage=None,
    stages=None,
    schedule=None,
    micro_batches=1,
):
    """(part, input, target, step) of one rank, as labkit.parts.rehearsal.rehearse takes them.

    axes: {axis: ranks}, words and other arguments as of labkit.composition.Composed. at: {axis:
    this rank's place}, 0 if not said. input, target: whole sequences; along cp they are cut.
    Raises ValueError for what such a mesh cannot do.
    """
    unknown = next((axis for axis in axes if axis not in AXES), None)
    if unknown is not None:
        raise ValueError(f"unknown axis {unknown!r}: known are {', '.join(AXES)}")
    groups = {axis: StandIn((at or {}).get(axis, 0), axes.get(axis, 1)) for axis in AXES}
    needed = {"tp": {"plan": plan}, "cp": {"attend": attend}}
    needed["pp"] = {"stage": stage, "schedule": schedule, "target": target}
    for axis, words in needed.items():
        missing = [word for word, given in words.items() if given is None]
        if groups[axis].size > 1 and missing:
            raise ValueError(f"{axis}={groups[axis].size} needs {' and '.join(missing)}")
    n = groups["cp"].size
    if n > 1 and groups["pp"].size > 1:
        raise ValueError("pp and cp together: stages after the first are not told their positions")
    if n > 1 and input.shape[1] % (2 * n):
        raise ValueError(f"{input.shape[1]} tokens have no {2 * n} equal chunks: cp={n}")
    part, step = without_data(module), Step
    with stand_ins():
        if groups["pp"].size > 1:
            stages = stages or groups["pp"].size
            program = schedule(stages, micro_batches, groups["pp"].size)
            part, step = pipelined(part, input, stage, program, groups["pp"], micro_batches)
        if groups["tp"].size > 1:
            own = part.values() if isinstance(part, nn.ModuleDict) else [part]
            for one in own:
                split(one, groups["tp"], plan)
    if n > 1:
        for one in part.modules():
            if hasattr(one, "attend"):
                one.attend = partial(attend, group=groups["cp"])
        input, target = tree_map_only(
            torch.Tensor, lambda t: t[:, : t.shape[1] // n].contiguous(), (input, target)
        )
        step = OnTokens
    return part, input, target, step


def without_data(module):
    """A copy on the meta device; the module may be anywhere."""
    memo = {}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    for b in module.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(module, memo)


def split(module, group, plan):
    """As parallelize_module, without its messages. A stage takes what is for it of the plan."""
    axis = Axis(group)
    axis.draws.size = 1  # whose random numbers they are does not matter, and costs real generators
    here = {pattern: style for pattern, style in plan.items() if met(module, pattern)}
    for _, part, style in checked(module, here, axis):
        style.apply(part, axis)


class OnTokens(Step):
    """A step on this rank's tokens; the module is told where in the sequence they are."""

    def run(self, inputs):
        positions = torch.arange(inputs[0].shape[1], device=inputs[0].device)
        return self.module(*inputs, positions=positions)


# ---- stages


def pipelined(module, input, stage, schedule, group, micro_batches):
    """(ModuleDict of this rank's stages, the Step that goes through their program)."""
    owner = check(schedule, group.size, micro_batches)
    if len(module.blocks) % len(owner):
        raise ValueError(f"{len(owner)} stages cannot share {len(module.blocks)} blocks alike")
    blocks = len(module.blocks) // len(owner)
    every = {n: stage(module, range(n * blocks, (n + 1) * blocks)) for n in sorted(owner)}
    first = {}  # of each tensor the first of its names
    names = {
        name: first.setdefault(tensor, name)
        for name, tensor in module.state_dict(keep_vars=True).items()
    }
    shapes, x = {}, input[: len(input) // micro_batches].to("meta")
    with torch.no_grad():
        for number, one in every.items():
            x = one(x)
            shapes[number] = x.shape
    holders = {}
    for number, one in every.items():
        for name in one.state_dict():
            ranks = holders.setdefault(names[name], [])
            ranks += [owner[number]] * (owner[number] not in ranks)
    own = nn.ModuleDict({str(number): every[number] for number in every if owner[number] == group.rank})
    about = schedule[group.rank], owner, shapes, micro_batches, (names, holders), group
    return own, partial(Program, *about)


class Program(Step):
    """Forward, loss and backward as this rank's list has them: Pipeline.step, alone.

    shapes: {stage: of what it makes of a micro-batch}.
    """

    def __init__(self, program, owner, shapes, micro_batches, tied, group, *step):
        super().__init__(*step)
        self.program, self.owner, self.shapes = program, owner, shapes
        self.micro_batches, self.tied, self.group = micro_batches, tied, group
        self.last = len(owner) - 1

    def forward(self, inputs, target):
        self.inputs, self.targets = (one[0].chunk(self.micro_batches) for one in (inputs, target))
        self.held, self.later, self.losses = {}, {}, []
        rooms, here, sent, turned = {}, {}, None, False
        for number, action in enumerate(self.program):
            for one in self.program[number : number + 2]:
                if one not in rooms and (room := self.receive(one)) is not None:
                    rooms[one] = room
            arrived = (rooms if action in rooms else here).pop(action, None)
            if action.kind == "B" and not turned:
                self.at_backward()
                turned = True
            made, reader = self.compute(action, arrived), made_for(action, len(self.owner))
            if reader is not None and self.owner[reader.stage] == self.group.rank:
                here[reader] = made
            elif reader is not None:
                sent = made.contiguous()  # it has left when the next one is ready
                comm.send(sent, self.owner[reader.stage], self.group)
            del made
        del sent, arrived
        mean = torch.stack(self.losses).mean() if self.losses else None
        Tied(self, *self.tied).add_tied()
        told = torch.zeros((), dtype=torch.float64)
        comm.broadcast(told, self.owner[self.last], self.group)
        del mean
        return told

    def receive(self, action):
        """Room for what another rank has made for this action, or None."""
        back = action.kind == "B"
        source = action.stage + (1 if back else -1)
        if action.kind == "W" or self.owner.get(source, self.group.rank) == self.group.rank:
            return None
        weight = next(self.module.parameters())
        room = weight.new_empty(self.shapes[action.stage if back else source])
        comm.recv(room, self.owner[source], self.group)
        return room

    def compute(self, action, arrived):
        kind, stage, m = action
        if kind == "W":
            return backward_of_weights(self.later.pop((stage, m)))
        if kind == "F":
            x = self.inputs[m] if arrived is None else arrived.detach().requires_grad_()
            with self.precision():
                output = self.module[str(stage)](x)
                if stage == self.last:
                    output = self.loss(output, self.targets[m])
                    self.losses.append(output.detach())
            self.held[stage, m] = x, output
            return output.detach()
        x, output = self.held.pop((stage, m))
        if stage == self.last:
            arrived = torch.full_like(output, 1.0)
        if Action("W", stage, m) in self.program:
            found, self.later[stage, m] = backward_of_input(output, x, arrived)
        else:
            torch.autograd.backward(output, arrived)
            found = x.grad
        return torch.zeros_like(x) if found is None and stage else found


class Tied(Stages):
    """The stages of a Program's rank, which know of the others' from the whole module."""

    def __init__(self, program, names, holders):
        self.known = holders
        modules = {int(number): one for number, one in program.module.items()}
        device = program.inputs[0].device
        named = lambda stage, name: names[name]  # noqa: E731
        super().__init__(modules, named, program.owner, program.group, "", device)
        self.tied = {
            name: copies
            for name, copies in sorted(self.tensors.items())
            if copies[0].requires_grad and (len(copies) > 1 or len(holders[name]) > 1)
        }

    def agree(self, owner, schedule):
        return self.known

    def make_equal(self):
        """Values are nobody's."""
