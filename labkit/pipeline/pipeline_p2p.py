"""The messages of a pipeline, read off its schedule: who sends what to whom, in which order.

    rank 0   F0 F1 .. B0 ..        to rank 1: 1F0 1F1   what they are for: the inputs of F0 and F1
    rank 1   .. F0 B0 F1 B1        to rank 0: 0B0 0B1   ... and the gradients for B0 and B1

A message leaves when the action that makes it has ended, and nobody waits for it to arrive. Between
two ranks messages arrive in the order of the sender's list, so its reader takes them in that order;
it asks for one while it still does the action before. Upward and downward go separate ways (on
NCCL: communicators), so neither can be stuck behind the other. What is sent looks alike every time:
shape and dtype go ahead of the first message, 80 bytes, once.
"""

from itertools import pairwise

import torch
import torch.distributed as dist

from labkit import comm
from labkit.pipeline.pipeline_schedules import Action, routes

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES += (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
MOST_DIMS = 8


def made_for(action, route):
    """The action that needs what this one makes, or None; route: its micro-batch's."""
    kind, stage, m = action
    if kind == "F" and stage + 1 in route:
        return Action("F", stage + 1, m)
    return Action("B", stage - 1, m) if kind == "B" and stage - 1 in route else None


def messages(schedule, owner):
    """{(source, destination): [the action each message is for], as they are sent}."""
    lists, route = {}, routes(schedule)
    for source, program in enumerate(schedule):
        for action in program:
            target = made_for(action, route[action.micro_batch])
            if target is not None and owner[target.stage] != source:
                lists.setdefault((source, owner[target.stage]), []).append(target)
    return lists


class Mail:
    """One rank's messages in one step after the other. ways: (group for up, group for down)."""

    def __init__(self, schedule, owner, ways, device):
        self.rank, self.ways, self.owner, self.device = dist.get_rank(ways[0]), ways, owner, device
        self.routes, lists = routes(schedule), messages(schedule, owner)
        self.lists = {src: there for (src, dst), there in lists.items() if dst == self.rank}
        self.source = {action: src for src, there in self.lists.items() for action in there}
        # (kind, stage) of the action that reads: (shape, dtype) of what is read and of what is sent
        self.looks, self.told = {}, {}
        self.expected = {}  # of messages without data, which tell nothing: (kind, stage) -> looks
        self.begin()

    def begin(self):
        """A new step."""
        self.asked = dict.fromkeys(self.lists, 0)
        self.coming, self.here, self.leaving = {}, {}, []

    @torch.no_grad()
    def expect(self, stages, input):
        """What will come, of a micro-batch without data. stages: {number: module} of all ranks."""
        for chain in set(self.routes.values()):
            x = input
            for stage, following in pairwise(chain):
                x = stages[stage](x)
                self.expected["F", following] = tuple(x.shape), x.dtype

    def ask(self, action, ahead):
        """Ask for what the action needs and what comes before it; ahead: not where it must wait."""
        src = self.source.get(action)
        while src is not None and action not in self.coming:
            first = self.lists[src][self.asked[src]]
            looks = self.looks.get(first[:2])
            if looks is None:
                if ahead:
                    return
                looks = self.looks[first[:2]] = self.read_looks(src, first[:2])
            room = torch.empty(looks[0], dtype=looks[1], device=self.device)
            work = comm.recv(room, src, self.ways[src > self.rank], async_op=True)
            self.coming[first] = room, work
            self.asked[src] += 1

    def take(self, action):
        """What another action has made for this one, a tensor; None where there is nothing."""
        if action in self.here:
            return self.here.pop(action)
        if action not in self.source:
            return None
        self.ask(action, ahead=False)
        room, work = self.coming[action]
        work.wait()
        self.coming[action] = None
        return room

    def send(self, tensor, action):
        """Hand on what an action has made to the one that needs it."""
        target = made_for(action, self.routes[action.micro_batch])
        if target is None:
            return
        dst = self.owner[target.stage]
        if dst == self.rank:
            self.here[target] = tensor
            return
        tensor, group = tensor.contiguous(), self.ways[self.rank > dst]
        for one in [*self.first_sight(tensor, action, target), tensor]:
            self.leaving.append((comm.send(one, dst, group, async_op=True), one))
        self.leaving = [pair for pair in self.leaving if not pair[0].is_completed()]

    def first_sight(self, tensor, action, target):
        """What goes ahead of the first of its kind: [header], or nothing."""
        looks = tuple(tensor.shape), tensor.dtype
        is_new = target[:2] not in self.told
        told = self.told.setdefault(target[:2], looks)
        if told != looks:
            raise ValueError(
                f"{action} (stage, kind, micro-batch) makes {list(looks[0])} {looks[1]}, before it "
                f"was {list(told[0])} {told[1]}: all micro-batches and steps must look alike"
            )
        if target.kind == "B" or not is_new:
            return []
        self.looks["B", action.stage] = looks  # of the gradient that will come back
        if len(looks[0]) > MOST_DIMS or looks[1] not in DTYPES:
            raise ValueError(f"{action} makes {list(looks[0])} {looks[1]}, which cannot be told")
        padded = [*looks[0], *[0] * (MOST_DIMS - len(looks[0]))]
        numbers = [DTYPES.index(looks[1]), len(looks[0]), *padded]
        return [torch.tensor(numbers, device=self.device)]

    def end(self):
        """All that was sent has left."""
        for work, _ in self.leaving:
            work.wait()

    def read_looks(self, src, target):
        header = torch.empty(2 + MOST_DIMS, dtype=torch.int64, device=self.device)
        comm.recv(header, src, self.ways[src > self.rank])
        if target in self.expected:
            return self.expected[target]
        dtype, dims, *shape = header.tolist()
        return tuple(shape[:dims]), DTYPES[dtype]
