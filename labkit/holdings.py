"""Holdings: what a strategy keeps of parameters, gradients and optimizer states, as bytes that come and go in a step.

    P bytes of parameters, G = P of gradients, S of states, n ranks      per rank, between steps
    single, ddp    [ P ][ G ][ S ]
    zero1          [ P ][ G ][S/n]                                       the optimizer steps on a shard
    zero2          [ P ][G/n][S/n]                                       + one bucket of gradients while it travels
    fsdp           [P/n][G/n][S/n]                                       + the units that are gathered just now

Adam keeps two moments, so S = 2 P in fp32: 16 bytes a parameter, and 16 / n under FSDP. Padding is what a flat buffer
needs to be cut into equal parts: fewer than n elements a buffer.
Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020, sections 3 and 5.
"""

from labkit.bucket import assign_buckets
from labkit.replicas import ALIGNMENT


class Single:
    """One process holds everything once, and a gradient from the moment it is made.

    Every holding answers: start() -> bytes by kind before forward; keeps(i): whether the gradient tensor that autograd
    makes for parameter i is itself what is held; on(event) -> {kind: change in bytes}; stepped: (shape, dtype, device)
    of each tensor that the optimizer steps on; padding: bytes; host: bytes in host memory.
    """

    padding = host = 0

    def __init__(self, rehearsal, world_size, cap_bytes):
        self.parameters, self.buffers = list(rehearsal.parameters.values()), list(rehearsal.buffers.values())
        self.trained, self.world_size, self.cap_bytes = rehearsal.trained(), world_size, cap_bytes
        self.stepped = [(p.shape, p.dtype, p.device) for p in self.parameters if p.requires_grad]

    def start(self):
        return {"parameters": sum(p.nbytes for p in self.parameters)}

    def keeps(self, number):
        return True

    def on(self, event):
        return {}


class DDP(Single):
    """Every rank holds everything. Gradients live in buckets all the time; one that is alone in its bucket is it."""

    def start(self):
        buckets = numbered_buckets(self.parameters, self.trained, self.cap_bytes)
        shared = [i for bucket in buckets if len(bucket) > 1 for i in bucket]
        self.alone = {bucket[0] for bucket in buckets if len(bucket) == 1}
        # Buffers travel packed in one message, each from an aligned place, and the room for it is kept.
        packed = sum(-(-b.nbytes // ALIGNMENT) * ALIGNMENT for b in self.buffers)
        return super().start() | {
            "gradients": sum(self.parameters[i].nbytes for i in shared),
            "communication": packed,
        }

    def keeps(self, number):
        return number in self.alone


def numbered_buckets(parameters, trained, cap_bytes):
    """assign_buckets, in numbers of the parameters."""
    numbers = {id(parameters[i]): i for i in trained}
    lists = assign_buckets([parameters[i] for i in trained], cap_bytes)
    return [[numbers[id(p)] for p in members] for members in lists]
