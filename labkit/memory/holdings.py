"""Holdings: bytes of parameters, gradients and states that a strategy keeps, through a step.

    P bytes of parameters, G = P of gradients, S of states; per rank of n, between backward and step
    single, ddp    [ P ][ G ][ S ]
    zero1          [ P ][ G ][S/n]    the optimizer steps on a shard
    zero2          [ P ][G/n][S/n]    + two buckets of gradients while they travel
    fsdp           [P/n][G/n][S/n]    + the units that are gathered just now

Adam keeps two moments, so S = 2 P in fp32: 16 bytes a parameter, and 16 / n under FSDP. Padding is
what a flat buffer needs to be cut into equal parts: fewer than n elements a buffer.
Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
sections 3 and 5.
"""

from labkit.ddp.bucket import assign_buckets
from labkit.replicas import ALIGNMENT
from labkit.zero.flat_shards import Layout


class Single:
    """One process holds everything once, and a gradient from the moment it is made.

    Every holding answers:
    start(): bytes by kind before forward.
    keeps(i): whether the gradient tensor that autograd makes for parameter i is itself what is
        held.
    on(event, size): the changes (kind, bytes), one by one, that an event of the rehearsal brings;
        size: bytes of the gradient that has come.
    stepped(): (shape, dtype, device) of each tensor that the optimizer steps on.
    padding: bytes, of all that is held between steps but the optimizer's.
    host: bytes in host memory instead of the device's; offload: the optimizer's states are there,
        too.
    """

    padding = host = 0
    offload = False

    def __init__(self, rehearsal, world_size=1, rank=0, cap_bytes=0, prefetch=1):
        self.rehearsal, self.world_size, self.rank = rehearsal, world_size, rank
        self.cap_bytes, self.prefetch = cap_bytes, prefetch
        self.parameters, self.buffers = (
            list(rehearsal.parameters.values()),
            list(rehearsal.buffers.values()),
        )
        self.trained = [i for i, p in enumerate(self.parameters) if p.requires_grad]
        # On gloo labkit.comm's reduce_scatter receives all parts before it adds them up.
        self.receives_parts = rehearsal.device.type == "cpu"

    def start(self):
        return {"parameters": sum(p.nbytes for p in self.parameters)}

    def keeps(self, number):
        return True

    def on(self, event, size):
        return ()

    def stepped(self):
        return [(p.shape, p.dtype, p.device) for p in (self.parameters[i] for i in self.trained)]

    def numbered_buckets(self):
        """The buckets in which gradients travel, in numbers of the parameters."""
        numbers = {id(self.parameters[i]): i for i in self.trained}
        lists = assign_buckets([self.parameters[i] for i in self.trained], self.cap_bytes)
        return [[numbers[id(p)] for p in members] for members in lists]


class DDP(Single):
    """Every rank holds everything. Gradients live in buckets always; one alone is its bucket."""

    def start(self):
        buckets = self.numbered_buckets()
        self.alone = {bucket[0] for bucket in buckets if len(bucket) == 1}
        shared = [i for bucket in buckets if len(bucket) > 1 for i in bucket]
        # Buffers travel packed in one message, each from an aligned place; its memory is kept.
        packed = sum(-(-b.nbytes // ALIGNMENT) * ALIGNMENT for b in self.buffers)
        gradients = sum(self.parameters[i].nbytes for i in shared)
        return super().start() | {"gradients": gradients, "communication": packed}

    def keeps(self, number):
        return number in self.alone

    def on(self, event, size):
        if event[0] == "gradient" and not self.keeps(event[1]):
            yield "activations", -size


class Separate(DDP):
    """DDP with a message for every parameter: each gradient is its own bucket."""

    def numbered_buckets(self):
        return [[i] for i in self.trained]


class ZeRO1(Single):
    """Flat buckets of parameters and of whole gradients; this rank steps on its part of each."""

    whole_gradients = True

    def start(self):
        self.buckets = [Flat(self, members) for members in self.numbered_buckets()]
        self.home = {i: bucket for bucket in self.buckets for i in bucket.members}
        self.sent = 0  # buckets that have left
        self.padding = (1 + self.whole_gradients) * sum(bucket.padding for bucket in self.buckets)
        frozen = sum(p.nbytes for p in self.parameters if not p.requires_grad)
        whole = sum(bucket.nbytes for bucket in self.buckets)
        return {"parameters": frozen + whole, "gradients": whole if self.whole_gradients else 0}

    def keeps(self, number):
        return False

    def on(self, event, size):
        if event[0] == "gradient":
            bucket = self.home[event[1]]
            if len(bucket.waiting) == len(bucket.members):
                yield from self.opened(bucket)
            yield "activations", -size
            bucket.waiting.discard(event[1])
            while self.sent < len(self.buckets) and not self.buckets[self.sent].waiting:
                yield from self.launched()
        elif event[0] == "end":
            while self.sent < len(self.buckets):
                if len(self.buckets[self.sent].waiting) == len(self.buckets[self.sent].members):
                    yield from self.opened(self.buckets[self.sent])
                yield from self.launched()
            yield from self.delivered(self.buckets[-1])

    def opened(self, bucket):
        """The first gradient of a bucket has come."""
        return ()

    def launched(self):
        bucket = self.buckets[self.sent]
        if self.receives_parts:
            yield "communication", bucket.nbytes
        if self.sent:
            yield from self.delivered(self.buckets[self.sent - 1])
        self.sent += 1

    def delivered(self, bucket):
        if self.receives_parts:
            yield "communication", -bucket.nbytes

    def stepped(self):
        return [
            piece
            for bucket in self.buckets
            for piece in bucket.pieces(self.rank)
            if piece[0] != (0,)
        ]


class ZeRO2(ZeRO1):
    """A bucket's whole gradients only from its first until it is reduced; then this rank's part."""

    whole_gradients = False

    def opened(self, bucket):
        yield "communication", bucket.nbytes

    def launched(self):
        yield "gradients", self.buckets[self.sent].shard_nbytes
        yield from super().launched()

    def delivered(self, bucket):
        yield from super().delivered(bucket)
        yield "communication", -bucket.nbytes


class Flat:
    """Parameters of one dtype in one flat buffer, cut into world_size shards."""

    def __init__(self, holding, members):
        self.members, self.waiting = members, set(members)
        self.parameters = [holding.parameters[i] for i in members]
        self.layout = Layout([p.shape for p in self.parameters], holding.world_size)
        item = self.parameters[0].element_size()
        self.trainable = self.parameters[0].requires_grad
        self.nbytes, self.shard_nbytes = self.layout.padded * item, self.layout.shard_numel * item
        self.padding = (self.layout.padded - self.layout.numel) * item

    def pieces(self, rank):
        """(shape, dtype, device) of this rank's part of each parameter; it may be empty."""
        sizes = [stop - start for start, stop in self.layout.ranges(rank)]
        return [
            ((size,), p.dtype, p.device) for size, p in zip(sizes, self.parameters, strict=True)
        ]

    def piece_nbytes(self, rank):
        return sum(size * dtype.itemsize for (size,), dtype, _ in self.pieces(rank))
