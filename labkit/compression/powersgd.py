"""PowerSGD: a gradient matrix travels as two thin ones, by one step of power iteration.

    M [rows, cols]        P = M Q               mean of P, orthonormal columns    Q = M' P
    +------------+        +--+                       +--+                         +------------+
    |            |  x Q = |  |  --- all_reduce --->  |  |  then, on every rank:   +------------+
    |            |        |  |                       |  |  --- all_reduce --->     [cols, rank]
    +------------+        +--+                       +--+
    average = P Q', of rank `rank`;  sent = P (own Q)'        ' = transposed
    the next step starts from this Q: gradients change slowly

    bucket      0    1       2       3 (last)    Q of a bucket needs its P, still under way: it goes
    messages    P0   P1 Q0   P2 Q1   P3 Q2 Q3    after the P of the next. This order, told by the
                                                 buckets alone, is the same on all ranks: no race

Sent per rank and step: 2 (n-1)/n x 4 rank (rows + cols) bytes a matrix, whatever n; vectors and
small matrices go whole, beside P. Held: one residual, and Q. Both messages are means over the
ranks, linear in M: nothing is gathered.
P and Q lie in memory column by column: on a CPU M Q and P' M are much faster so, and than M' P.
One matrix after the other is added to and multiplied, later multiplied and subtracted from: the
second of each then finds it in the cache.
Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression, NeurIPS 2019,
algorithms 1 and 2.
"""

from dataclasses import dataclass
from functools import partial

import torch

from labkit.compression.feedback import Compressor, done, is_finite, start_mean, use_here
from labkit.compression.residual import names


class PowerSGD(Compressor):
    """Approximate each matrix by one of rank `rank`; a convolution's is [out, in x height x width].

    warm_start: begin with the last step's Q; otherwise with random numbers.
    min_saving: a tensor that would not shrink by this factor is sent whole; 0: no matrix is.
    Raises ValueError for a rank below 1 at once, and in the first step for one that exceeds the
    smaller side of every matrix.
    """

    def __init__(self, rank=4, feedback=True, warm_start=True, min_saving=2.0, seed=0):
        if type(rank) is not int or rank < 1:
            raise ValueError(f"rank must be a whole number of at least 1, not {rank}")
        super().__init__(
            feedback, rank=rank, warm_start=warm_start, min_saving=min_saving, seed=seed
        )
        self.rank, self.warm_start, self.min_saving, self.seed = rank, warm_start, min_saving, seed
        self._q = {}  # parameter -> (name, Q [cols, rank] to begin with)
        self._loaded = {}  # name -> Q of a parameter that no bucket has shown yet
        self._widest = 0  # the largest smaller side of any matrix so far
        self._waiting = None  # the Exchange whose P is under way

    def hook(self, group, bucket):
        """Future of the average over group (None: all); it waits for the last bucket's hook."""
        before, self._waiting = self._waiting if bucket.index() else None, None
        future = done(bucket.buffer())
        if bucket.buffer().numel():
            self.agree(group, bucket.buffer().device)
            self._waiting = self._send_p(group, bucket)
            future = self._waiting.future
        if before is not None:
            self._send_q(before)
        if bucket.is_last():
            self.step += 1
            if self._waiting is not None:
                self._send_q(self._waiting)
            self._waiting = None
        return future

    def accumulate(self, residual, gradient, bucket):
        return residual  # _send_p adds to it, matrix by matrix

    def _send_p(self, group, bucket):
        with self.clock():
            gradient = bucket.buffer()
            x = Exchange(group, gradient, self.correct(gradient, bucket))
            sizes = [p.numel() for p in bucket.parameters()]
            parts = zip(
                bucket.parameters(),
                names(bucket),
                x.corrected.split(sizes),
                gradient.split(sizes),
                strict=True,
            )
            products = []
            for p, name, part, average in parts:
                if x.owes:
                    part += average  # which still is the gradient
                if self._shrinks(p):
                    q = self._start(p, name, part.dtype)
                    m = Matrix(p, part.view(len(p), -1), average.view(len(p), -1), q)
                    products.append((m.corrected @ m.q).view(-1))
                    x.matrices.append(m)
                else:
                    x.whole.append((part, average))
            if bucket.is_last() and 0 < self._widest < self.rank:
                raise ValueError(
                    f"rank {self.rank} exceeds every matrix: "
                    f"the largest possible here is {self._widest}"
                )
            x.message = torch.cat([*products, *(part for part, _ in x.whole)])
        x.work = start_mean(x.message, group)
        return x

    def _shrinks(self, p):
        if p.dim() < 2 or not p.numel():
            return False
        rows, cols = len(p), p.numel() // len(p)
        self._widest = max(self._widest, min(rows, cols))
        return rows * cols >= self.min_saving * min(self.rank, rows, cols) * (rows + cols)

    def _start(self, p, name, dtype):
        """The Q to begin with, the same on all ranks: [cols, rank] of a parameter."""
        if p not in self._q or not self.warm_start:
            cols = p.numel() // len(p)
            generator = torch.Generator().manual_seed(
                hash((self.seed, self.step, *p.shape)) % 2**63
            )
            q = torch.randn(min(self.rank, len(p), cols), cols, generator=generator).t()
            self._q[p] = name, (self._loaded.pop(name, q) if self.warm_start else q)
        return self._q[p][1].to(p.device, dtype)

    def _send_q(self, x):
        x.work.wait()
        if not is_finite(x.message):  # inf or NaN, and all ranks see it: nothing of this step stays
            if x.owes:
                x.corrected.sub_(x.gradient)
            return x.future.set_result(x.gradient.fill_(torch.nan))
        with self.clock():
            x.unpack()
            own = []
            for m in x.matrices:
                own.append(m.p.t() @ m.corrected)
                if x.owes:
                    m.corrected.addmm_(m.p, own[-1], alpha=-1)
            if not own:
                return x.future.set_result(x.gradient)
            message = torch.cat([q.view(-1) for q in own])
        work = start_mean(message, x.group)
        x.group = None  # its last holder ends its threads, and one of them runs _multiply
        for m, q in zip(x.matrices, message.split([q.numel() for q in own]), strict=True):
            m.q = q.view(-1, len(m.q)).t()
            self._q[m.parameter] = self._q[m.parameter][0], m.q
        work.get_future().then(partial(self._multiply, x)).add_done_callback(
            partial(hand_over, x.future)
        )

    def _multiply(self, x, travelled):
        travelled.value()  # raises what has gone wrong on the way
        with self.clock():
            for m in x.matrices:
                use_here(m.p, m.q)
                if m.average.dtype == m.p.dtype:  # on a CPU sooner than mm, which reads nothing
                    m.average.zero_().addmm_(m.p, m.q.t())
                else:
                    m.average.copy_(m.p @ m.q.t())
        return x.gradient

    def __getstate__(self):
        q = self.state_dict()["q"]
        return super().__getstate__() | {"_q": {}, "_loaded": q, "_waiting": None}

    def state_dict(self):
        return super().state_dict() | {
            "q": {name: q.clone() for name, q in self._q.values()} | self._loaded
        }

    def load_state_dict(self, state):
        super().load_state_dict(state)
        # A file keeps no strides, and rounding depends on them: column by column again.
        rows = {"memory_format": torch.contiguous_format}
        self._loaded = {name: q.t().clone(**rows).t() for name, q in state["q"].items()}
        self._q = {}


@dataclass
class Matrix:
    """A tensor of a bucket as a matrix [rows, cols]: what is to be sent, and its average."""

    parameter: torch.Tensor
    corrected: torch.Tensor
    average: torch.Tensor
    q: torch.Tensor  # [cols, rank]
    p: torch.Tensor = None  # [rows, rank], orthonormal columns


class Exchange:
    """One bucket between its two messages."""

    def __init__(self, group, gradient, corrected):
        self.group, self.gradient, self.corrected = group, gradient, corrected
        self.owes = corrected is not gradient  # else no residual: the average is written there
        self.matrices, self.whole = [], []  # whole: (what is to be sent, where its average goes)
        self.message = self.work = None
        self.future = torch.futures.Future(devices=[gradient.device] if gradient.is_cuda else None)

    def unpack(self):
        """The first message has come: P of each matrix, and the tensors that travel whole."""
        sizes = [len(m.corrected) * m.q.size(1) for m in self.matrices] + [
            len(part) for part, _ in self.whole
        ]
        pieces = iter(self.message.split(sizes))
        for m, piece in zip(self.matrices, pieces, strict=False):
            m.p = orthonormal(piece.view(len(m.corrected), -1))
        for part, average in self.whole:
            average.copy_(next(pieces))
            if part.data_ptr() != average.data_ptr():
                part.zero_()


def orthonormal(columns):
    """An orthonormal basis of the columns, [rows, rank]; from the same, all ranks get the same."""
    return torch.linalg.qr(columns.to(torch.promote_types(columns.dtype, torch.float32))).Q.to(
        columns.dtype
    )


def hand_over(outer, inner):
    """The outer Future gets what the inner has: its value or its error."""
    try:
        outer.set_result(inner.value())
    except Exception as error:
        outer.set_exception(error)
