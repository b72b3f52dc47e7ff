"""The messages of a pipeline, derived from its schedule: who sends what to whom, in which order.

    rank 0   F0 F1 .. B0 ..        to rank 1: 1F0 1F1   each message is named by its receiver:
    rank 1   .. F0 B0 F1 B1        to rank 0: 0B0 0B1   the inputs of F0, F1; gradients for B0, B1

A message is sent when the action that makes it has ended, and no rank waits for its arrival.
Messages between two ranks arrive in the order of the sender's list, and the receiver takes them in
that order. It posts a receive while it still runs the action before. Forward and backward messages
use separate groups (NCCL communicators), so neither can block the other. All messages of a kind
have the same shape and dtype. A header of 80 bytes with both precedes the first one.
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
    """Return the action that needs the result of this one, or None. route: its micro-batch's."""
    kind, stage, m = action
    if kind == "F" and stage + 1 in route:
        return Action("F", stage + 1, m)
    return Action("B", stage - 1, m) if kind == "B" and stage - 1 in route else None


def messages(schedule, owner):
    """Return {(source, destination): [the action that needs each message], in order of sending}."""
    lists = {}
    route = routes(schedule)
    for source, program in enumerate(schedule):
        for action in program:
            target = made_for(action, route[action.micro_batch])
            if target is not None and owner[target.stage] != source:
                lists.setdefault((source, owner[target.stage]), []).append(target)
    return lists


class Mail:
    """One rank's messages, step after step. ways: (group for forward, group for backward)."""

    def __init__(self, schedule, owner, ways, device):
        self.rank = dist.get_rank(ways[0])
        self.ways = ways
        self.owner = owner
        self.device = device
        self.routes = routes(schedule)
        lists = messages(schedule, owner)
        self.lists = {src: targets for (src, dst), targets in lists.items() if dst == self.rank}
        self.source = {action: src for src, targets in self.lists.items() for action in targets}
        # (kind, stage) of the receiving action: (shape, dtype) of the tensor
        self.looks = {}
        self.sent_looks = {}
        self.expected = {}  # in a dry run, where headers have no data: (kind, stage) -> looks
        self.begin()

    def begin(self):
        """Begin a new step."""
        self.asked = dict.fromkeys(self.lists, 0)
        self.coming = {}
        self.here = {}
        self.leaving = []

    @torch.no_grad()
    def expect(self, stages, input):
        """Predict the messages of a micro-batch without data. stages: {number: module}, all."""
        for chain in set(self.routes.values()):
            x = input
            for stage, following in pairwise(chain):
                x = stages[stage](x)
                self.expected["F", following] = tuple(x.shape), x.dtype

    def ask(self, action, ahead):
        """Post receives up to the one that the action needs. ahead: stop where that would block."""
        src = self.source.get(action)
        while src is not None and action not in self.coming:
            first = self.lists[src][self.asked[src]]
            looks = self.looks.get(first[:2])
            if looks is None:
                if ahead:
                    return
                looks = self.looks[first[:2]] = self.read_looks(src, first[:2])
            buffer = torch.empty(looks[0], dtype=looks[1], device=self.device)
            work = comm.recv(buffer, src, self.ways[src > self.rank], async_op=True)
            self.coming[first] = buffer, work
            self.asked[src] += 1

    def take(self, action):
        """Wait for the tensor that another action made for this one and return it, or None."""
        if action in self.here:
            return self.here.pop(action)
        if action not in self.source:
            return None
        self.ask(action, ahead=False)
        buffer, work = self.coming[action]
        work.wait()
        self.coming[action] = None
        return buffer

    def send(self, tensor, action):
        """Start sending the result of an action to the one that needs it, if there is one."""
        target = made_for(action, self.routes[action.micro_batch])
        if target is None:
            return
        dst = self.owner[target.stage]
        if dst == self.rank:
            self.here[target] = tensor
            return
        tensor = tensor.contiguous()
        group = self.ways[self.rank > dst]
        for message in [*self.header_for(tensor, action, target), tensor]:
            self.leaving.append((comm.send(message, dst, group, async_op=True), message))
        self.leaving = [pair for pair in self.leaving if not pair[0].is_completed()]

    def header_for(self, tensor, action, target):
        """Return [header] for the first forward message to a stage, else [].

        Raises ValueError if a later message has another shape or dtype, or if the header cannot
        describe the tensor.
        """
        looks = tuple(tensor.shape), tensor.dtype
        is_new = target[:2] not in self.sent_looks
        before = self.sent_looks.setdefault(target[:2], looks)
        if before != looks:
            raise ValueError(
                f"{action} (stage, kind, micro-batch) made {list(looks[0])} {looks[1]} but before "
                f"{list(before[0])} {before[1]}: all must have one shape and dtype"
            )
        if target.kind == "B" or not is_new:
            return []
        self.looks["B", action.stage] = looks  # of the gradient that will come back
        if len(looks[0]) > MOST_DIMS or looks[1] not in DTYPES:
            raise ValueError(
                f"{action} made {list(looks[0])} {looks[1]}: a stage's output must have at most "
                f"{MOST_DIMS} dimensions and a real, integer or bool dtype"
            )
        padded = [*looks[0], *[0] * (MOST_DIMS - len(looks[0]))]
        numbers = [DTYPES.index(looks[1]), len(looks[0]), *padded]
        return [torch.tensor(numbers, device=self.device)]

    def end(self):
        """Wait until all messages have been sent."""
        for work, _ in self.leaving:
            work.wait()

    def read_looks(self, src, target):
        header = torch.empty(2 + MOST_DIMS, dtype=torch.int64, device=self.device)
        comm.recv(header, src, self.ways[src > self.rank])
        if target in self.expected:
            return self.expected[target]
        dtype, dims, *shape = header.tolist()
        return tuple(shape[:dims]), DTYPES[dtype]
