"""Reduce-scatter of gradients: backward sends full buckets, each rank keeps the mean of its shard.

    parameters     w1   b1   w2   b2           on all ranks views of the buckets' `values`
    bucket 0              [b2 | w2 .. ]        its gradients, full: sent while w1's is computed
                   rank 0 [b2 | w2]            reduce_scatter: the mean, of this part on this rank,
                   rank 1      [ w2 ]          of that part on the other
    pieces         for the optimizer: one tensor per parameter with elements in this rank's shard

    keep=True    keep the bucket, p.grad are its views; this rank's shard becomes the mean (ZeRO-1)
    keep=False   free the bucket as soon as it has been reduced; keep the shard (ZeRO-2)

Sent per rank and step: (n-1)/n x gradient bytes, half an all_reduce. At most two buckets are sent
at a time; otherwise keep=False would hold all gradients. Held with keep=False: 1/n of the gradients
+ the buckets being sent.
Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020,
section 5.2.
"""

import weakref
from functools import partial

import torch
import torch.distributed as dist

from labkit import comm
from labkit.ddp.bucket import Bucket
from labkit.ddp.reducer import Reducer
from labkit.zero.flat_shards import Layout


class ShardedBucket(Bucket):
    """A bucket whose parameters are views of a flat buffer, `values`; its gradients, of another."""

    def __init__(self, parameters, index, is_last, names, group=None, keep=True):
        self.keep, self.rank, self.world_size = (
            keep,
            dist.get_rank(group),
            dist.get_world_size(group),
        )
        # Memory order, not index order: an elementwise update does not care, and strides stay.
        self.layout = Layout([(p.numel(),) for p in parameters], self.world_size)
        self.averaged = False  # this rank's part is a mean, the rest is left over
        super().__init__(parameters, index, is_last, names)
        self.release()
        self._adopt()

    @torch.no_grad()
    def _adopt(self):
        """Move the values into one flat buffer; make the pieces, views of this rank's shard."""
        self.values = torch.zeros(self.layout.padded, dtype=self.dtype, device=self.device)
        self.homes = self.shaped(self.values)
        for p, home in zip(self.members, self.homes, strict=True):
            home.copy_(p)
            p.data = home
        parts = self.layout.pieces(self.shard(), self.rank)
        self.pieces = [torch.nn.Parameter(part) if part.numel() else None for part in parts]

    def shaped(self, flat):
        """Views of a flat buffer, [padded], with the parameters' shapes and strides."""
        return [
            part.as_strided(p.shape, stride, part.storage_offset())
            for part, p, stride in zip(
                self.layout.views(flat), self.members, self._strides, strict=True
            )
        ]

    def in_memory_order(self, slot, tensor):
        """A tensor shaped as parameter number `slot`, flat, its elements ordered as in `values`."""
        p = self.members[slot]
        dense = torch.empty_strided(
            p.shape, self._strides[slot], dtype=tensor.dtype, device=self.device
        )
        return dense.copy_(tensor).as_strided((p.numel(),), (1,))

    def _allocate(self):
        self._flat = torch.empty(self.layout.padded, dtype=self.dtype, device=self.device)
        self._flat[self.layout.numel :].zero_()  # the padding; gradients are written before sent
        self._views = self.shaped(self._flat)

    def shard(self):
        """This rank's part of the parameters' values, [shard_numel]."""
        return self.layout.shard(self.values, self.rank)

    def release(self):
        """Drop the full gradients."""
        self._flat = self._views = None
        self.averaged = False

    def clear(self, set_to_none):
        """Drop the averaged gradients, those of the pieces and the full ones."""
        for p in (*self.members, *self.pieces):
            if p is not None and p.grad is not None:
                p.grad = None if set_to_none else p.grad.detach().zero_()
        self.averaged = False

    def put(self, slot, factor=None):
        """Move gradient number `slot` into the buffer, times factor; p.grad: the view, or None."""
        p = self.members[slot]
        if p.grad is None:  # undefined: backward came by, and had none
            return self.skip(slot)
        if p.grad.is_sparse:
            raise TypeError(
                f"the gradient of {self.names[slot]!r} is sparse: "
                "make it dense (Embedding: sparse=False)"
            )
        self.buffer()
        if p.grad is not self._views[slot]:
            self._copy(p.grad.detach(), slot, factor)
        elif factor is not None:
            p.grad.mul_(factor)
        p.grad = self._views[slot] if self.keep else None

    def skip(self, slot, factor=None):
        """No gradient came for this parameter: send what p.grad held before, else zeros."""
        self.reopen()
        if self.members[slot].grad is not None:
            self.put(slot, factor)
        else:
            self.buffer()
            self._views[slot].zero_()

    @torch.no_grad()
    def reopen(self):
        """Prepare an averaged gradient for additions: make it this rank's term of the next sum."""
        if self.averaged:
            self.averaged = False
            mine = self.layout.shard(self._flat, self.rank)
            total = mine * self.world_size
            self._flat.zero_()
            mine.copy_(total)

    def target(self):
        """Return the output tensor for this rank's shard of the sum, [shard_numel]."""
        if self.keep:
            return self.layout.shard(self.buffer(), self.rank)
        return torch.empty(self.layout.shard_numel, dtype=self.dtype, device=self.device)

    def deliver(self, mean):
        """Set the pieces' gradients to mean, [shard_numel]; with keep=False, add it to them."""
        for piece, part in zip(self.pieces, self.layout.pieces(mean, self.rank), strict=True):
            if piece is not None and (self.keep or piece.grad is None):
                piece.grad = part.data  # for is_averaged, unscaling or clipping it changes nothing
            elif piece is not None:
                piece.grad.add_(part)
        if self.keep:
            self.averaged, self._version = True, self._flat._version
        else:
            self._flat.untyped_storage().resize_(0)  # now, not when the backend releases it
            self.release()

    def is_averaged(self, slot):
        """Return whether this gradient, if any, was averaged and not changed since."""
        gradient = self.members[slot].grad
        untouched = self.averaged and self._flat._version == self._version
        return gradient is None or (untouched and gradient is self._views[slot])

    def settle(self, adopt):
        """Expect every gradient of the next step. adopt: not needed, no gradient was set aside."""
        self.arrived = bytearray(len(self.members))
        self.missing = len(self.members)


class Scatterer(Reducer):
    """A Reducer that leaves the mean of each gradient on one rank only, in the .grad of its piece.

    Afterwards the parameters are views of the buckets' values. keep: see above. Others: see
    Reducer.
    """

    def __init__(
        self, named_parameters, owner, group=None, cap_bytes=25 * 2**20, overlap=True, keep=True
    ):
        self.keep_whole = keep
        super().__init__(named_parameters, owner, group, cap_bytes, overlap)
        if keep:
            before = [
                p.register_hook(partial(_reopen, weakref.ref(b)))
                for b in self.buckets
                for p in b.members
            ]
            self.forget = weakref.finalize(self, _remove, before)
            self.forget.atexit = False

    def _make_bucket(self, members, index, is_last, names):
        return ShardedBucket(members, index, is_last, names, self.group, self.keep_whole)

    def keep(self, index, slot):
        """In no_sync(), keep this rank's full p.grad until a backward averages it."""
        if self.keep_whole:
            super().keep(index, slot)

    @torch.no_grad()
    def _launch(self, bucket):
        self._pending.append(None)
        if bucket.numel:
            target = bucket.target()
            work = comm.reduce_scatter(target, bucket.buffer(), group=self.group, async_op=True)
            self._pending[-1] = (work, target)
        if bucket.index():  # at most two at a time are sent: the memory of earlier ones is needed
            self._wait(self.buckets[bucket.index() - 1], self._pending[-2])
            self._pending[-2] = None

    @torch.no_grad()
    def _wait(self, bucket, pending):
        if pending is not None:
            work, target = pending
            work.wait()
            bucket.deliver(target)


def _reopen(bucket, gradient):
    alive = bucket()
    if alive is not None:
        alive.reopen()


def _remove(handles):
    for handle in handles:
        handle.remove()
