"""What FSDP holds in a step: shards all the time, a whole unit while at work and a little before.

    event            parameters             gradients and messages
    forward u        + u, + the next        ("prefetch" of them)
    forward end u    - u                    (not the root, whose parameters are kept)
    backward u       + u, + the one before
    backward end u   - u                    + flat gradient of u, - its own; - flat, + 1/n at last

This replays labkit/fsdp/fsdp.py in bytes: the same events in the same order, and so the same peak.
Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023, sections
3.2 and 3.3.
"""

from labkit.memory.holdings import Flat, Single


class FSDP(Single):
    """shard="full": a unit is freed after its forward, and gathered again for its backward."""

    kept_after_forward = False
    offload = False

    def start(self):
        self.units = [[Flat(self, members) for members in unit] for unit in self.rehearsal.units]
        self.home = {
            i: u for u, unit in enumerate(self.units) for flat in unit for i in flat.members
        }
        self.forwards = [
            event[1] for _, _, event in self.rehearsal.log if event and event[0] == "forward"
        ]
        self.calls = [0] * len(self.units)
        self.whole, self.copied, self.done = set(), set(), 0  # done: forwards so far
        self.come = [[] for _ in self.units]  # bytes of the gradients that are in
        self.travelling = []  # flat gradients on their way
        flats = [flat for unit in self.units for flat in unit]
        shards = sum(flat.shard_nbytes for flat in flats)
        self.padding = shards - sum(flat.piece_nbytes(self.rank) for flat in flats)
        if self.offload:
            self.host = shards + sum(flat.shard_nbytes for flat in flats if flat.trainable)
        return {"parameters": 0 if self.offload else shards}

    def on(self, event, size):
        phase, number = event
        if phase == "gradient":
            self.come[self.home[number]].append(size)
        elif phase == "forward":
            self.calls[number] += 1
            self.done += 1
            ahead = self.forwards[self.done : self.done + self.prefetch]
            yield from self.gather(number, *ahead)
        elif phase == "forward end":
            if number and not self.kept_after_forward:
                yield from self.free(number)
        elif phase == "backward":
            yield from self.gather(number, *self.preceding(number))
        elif phase == "backward end":
            self.calls[number] -= 1
            if not self.calls[number]:
                yield from self.after_backward(number)
        elif phase == "end":  # those at whose inputs no gradient came by, the root as a rule
            for u in reversed(dict.fromkeys([*self.forwards, *range(len(self.units))])):
                self.calls[u] = 0
                yield from self.after_backward(u)
            yield from self.settle()
            if self.offload:
                yield (
                    "gradients",
                    -sum(f.shard_nbytes for unit in self.units for f in unit if f.trainable),
                )

    def preceding(self, number):
        """Units whose backward comes next, as far as they are gathered ahead."""
        last = len(self.forwards) - 1 - self.forwards[::-1].index(number)
        others = dict.fromkeys(u for u in self.forwards[:last][::-1] if u != number)
        return [u for u in list(others)[: self.prefetch] if self.calls[u]]

    def gather(self, used, *ahead):
        for u in (used, *ahead):
            if u not in self.whole:
                self.whole.add(u)
                yield from (("parameters", flat.nbytes) for flat in self.units[u])
                if self.offload:  # what is sent is a copy of the shard on the device
                    self.copied.add(u)
                    yield "communication", sum(flat.shard_nbytes for flat in self.units[u])
        if used in self.copied:
            self.copied.discard(used)
            yield "communication", -sum(flat.shard_nbytes for flat in self.units[used])

    def free(self, u):
        if u in self.whole:
            self.whole.discard(u)
            yield from (("parameters", -flat.nbytes) for flat in self.units[u])

    def after_backward(self, u):
        yield from self.free(u)
        yield from self.settle()
        if self.come[u]:
            self.travelling = [flat for flat in self.units[u] if flat.trainable]
            for flat in self.travelling:
                yield "communication", flat.nbytes
                yield from (("gradients", -size) for size in self.come[u])
                self.come[u] = []
                if self.receives_parts:  # gloo holds what travels twice: FSDP waits for it at once
                    yield "communication", flat.nbytes
                    yield "communication", -flat.nbytes
                    yield from self.arrived(flat)
            if self.receives_parts:
                self.travelling = []

    def settle(self):
        """The message on its way has come."""
        for flat in self.travelling:
            yield from self.arrived(flat)
        self.travelling = []

    def arrived(self, flat):
        """This rank's part of the sum stays, and the flat gradient goes."""
        yield "gradients", flat.shard_nbytes
        yield "communication", -flat.nbytes

    def stepped(self):
        flats = (flat for unit in self.units for flat in unit if flat.trainable)
        return [piece for flat in flats for piece in flat.pieces(self.rank)]


class FSDPGradOp(FSDP):
    """shard="grad_op": whole from forward to backward."""

    kept_after_forward = True


class FSDPOffload(FSDP):
    """offload=True: shards, their gradients and the optimizer's states are in host memory."""

    offload = True
