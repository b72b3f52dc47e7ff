"""PowerSGD: send a gradient matrix as two thin ones, from one step of power iteration.

    M [rows, cols]        P = M Q               mean of P, orthonormal columns    Q = M' P
    +------------+        +--+                       +--+                         +------------+
    |            |  x Q = |  |  --- all_reduce --->  |  |  then, on every rank:   +------------+
    |            |        |  |                       |  |  --- all_reduce --->     [cols, rank]
    +------------+        +--+                       +--+
    average = P Q', of rank `rank`;  sent = P (own Q)'        ' = transposed
    the next step starts from this Q: gradients change slowly

    bucket      0    1       2       3 (last)    Q of a bucket needs its P, which is still being
    messages    P0   P1 Q0   P2 Q1   P3 Q2 Q3    sent: Q follows the P of the next bucket. The
                                                 order is the same on all ranks

Sent per rank and step: 2 (n-1)/n x 4 rank (rows + cols) bytes a matrix, for any n; vectors and
small matrices are sent in full, together with P. Held: one residual, and Q. Both messages are means
over the ranks, linear in M: nothing is gathered.
P and Q are stored column by column, which makes M Q and P' M faster on a CPU. The two operations
before each message are done matrix by matrix, so that the second one finds the matrix in the cache:
add the gradient, multiply by Q; multiply by P, subtract P Q'.
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

    warm_start: begin with the last step's Q; otherwise with random numbers from `seed`.
    min_saving: matrices that would shrink less than this factor are sent in full; 0: none.
    Raises ValueError for a rank below 1, and in the first step for a rank that exceeds the smaller
    side of every matrix.
    """

    def __init__(self, rank=4, feedback=True, warm_start=True, min_saving=2.0, seed=0):
        if type(rank) is not int or rank < 1:
            raise ValueError(f"rank={rank} must be an integer >= 1")
        super().__init__(
            feedback, rank=rank, warm_start=warm_start, min_saving=min_saving, seed=seed
        )
        self.rank = rank
        self.warm_start = warm_start
        self.min_saving = min_saving
        self.seed = seed
        self._q = {}  # parameter -> (name, initial Q [cols, rank])
        self._loaded = {}  # name -> Q of a parameter that was in no bucket yet
        self._widest = 0  # the largest smaller side of any matrix so far
        self._waiting = None  # the Exchange whose P is being sent

    def hook(self, group, bucket):
        """Return a Future of the bucket's average over the group (None: all ranks).

        Do not wait for it before the next bucket's hook, which sends this bucket's Q; the last
        bucket sends its own.
        """
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
        return residual  # _send_p adds the gradient, matrix by matrix

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
                    part += average  # still the gradient
                if self._shrinks(p):
                    q = self._start(p, name, part.dtype)
                    m = Matrix(p, part.view(len(p), -1), average.view(len(p), -1), q)
                    products.append((m.corrected @ m.q).view(-1))
                    x.matrices.append(m)
                else:
                    x.whole.append((part, average))
            if bucket.is_last() and 0 < self._widest < self.rank:
                raise ValueError(
                    f"rank={self.rank} exceeds the smaller side of every matrix: "
                    f"use at most {self._widest}"
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
        """Return a parameter's initial Q, [cols, rank], identical on all ranks."""
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
        if not is_finite(x.message):  # all ranks see the inf or NaN and discard this step
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
        x.group = None  # _multiply runs in a thread of the group and must not be the last owner
        for m, q in zip(x.matrices, message.split([q.numel() for q in own]), strict=True):
            m.q = q.view(-1, len(m.q)).t()
            self._q[m.parameter] = self._q[m.parameter][0], m.q
        work.get_future().then(partial(self._multiply, x)).add_done_callback(
            partial(hand_over, x.future)
        )

    def _multiply(self, x, travelled):
        travelled.value()  # raises an error of the collective
        with self.clock():
            for m in x.matrices:
                use_here(m.p, m.q)
                if m.average.dtype == m.p.dtype:  # faster than mm on a CPU
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
        # Files do not store strides, but rounding depends on them: restore column-major order.
        rows = {"memory_format": torch.contiguous_format}
        self._loaded = {name: q.t().clone(**rows).t() for name, q in state["q"].items()}
        self._q = {}


@dataclass
class Matrix:
    """A parameter's part of a bucket as a matrix [rows, cols]: to send, and for its average."""

    parameter: torch.Tensor
    corrected: torch.Tensor
    average: torch.Tensor
    q: torch.Tensor  # [cols, rank]
    p: torch.Tensor = None  # [rows, rank], orthonormal columns


class Exchange:
    """The state of one bucket between its two messages."""

    def __init__(self, group, gradient, corrected):
        self.group = group
        self.gradient = gradient
        self.corrected = corrected
        self.owes = corrected is not gradient  # False: no residual, the average overwrites it
        self.matrices = []
        self.whole = []  # tensors sent in full: (tensor to send, tensor for its average)
        self.message = self.work = None
        self.future = torch.futures.Future(devices=[gradient.device] if gradient.is_cuda else None)

    def unpack(self):
        """Read the first message: P of each matrix, and the tensors that are sent in full."""
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
    """Return an orthonormal basis of the columns, [rows, rank]; identical on all ranks."""
    return torch.linalg.qr(columns.to(torch.promote_types(columns.dtype, torch.float32))).Q.to(
        columns.dtype
    )


def hand_over(outer, inner):
    """Pass the value or error of the inner Future to the outer."""
    try:
        outer.set_result(inner.value())
    except Exception as error:
        outer.set_exception(error)
