"""Buckets: many small gradients are sent as one message, once its last gradient is ready.

    parameters    w1   b1   w2   b2   w3   b3           backward makes the gradients right to left
    bucket 0                          [b3 | w3]  --->   all_reduce while w2 is still being computed
    bucket 1                [b2 | w2]            --->   always after bucket 0, on all ranks
    bucket 2      [b1 | w1]                      --->
                    ^ p.grad is a view of the bucket: the optimizer reads the average

Messages per step: gradient bytes / bucket_cap (+ 1 per dtype and device), instead of one per
parameter. A message costs latency + bytes / bandwidth, so small ones waste the link, while a single
one cannot overlap with backward. Memory: the gradients once. A bucket of one parameter needs no
buffer: that parameter's gradient is the buffer.
Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020,
sections 3.2.3 and 4.2.
"""

import torch


class Bucket:
    """A flat buffer of gradients, in the expected order: the argument of a comm hook.

    It has the methods of torch.distributed.GradBucket, so hooks written for either run on both.
    """

    def __init__(self, parameters, index=0, is_last=True, names=None):
        self.members, self._index, self._is_last = list(parameters), index, is_last
        self.names = names or [f"parameter {slot}" for slot in range(len(self.members))]
        self.dtype, self.device = self.members[0].dtype, self.members[0].device
        self._flat = self._views = self._replacement = None
        self.numel = sum(p.numel() for p in self.members)
        self.nbytes = self.numel * self.members[0].element_size()
        # The strides that autograd gives the gradient: the parameter's own if they leave no gaps.
        self._strides = [torch.empty_like(p, device="meta").stride() for p in self.members]
        # whether it had a gradient since the last average, in no_sync() too
        self.used = bytearray(len(self.members))
        self.skipped = {}  # slot -> the gradient it had before, or None
        self.arrived = bytearray(len(self.members))
        self.missing = len(self.members)
        if len(self.members) > 1:
            self._allocate()

    def _allocate(self):
        self._flat = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        self._views, offset = [], 0
        for p, stride in zip(self.members, self._strides, strict=True):
            self._views.append(self._flat.as_strided(p.shape, stride, offset))
            offset += p.numel()

    def index(self):
        """Position in the order of sending, 0 first."""
        return self._index

    def is_last(self):
        return self._is_last

    def parameters(self):
        return list(self.members)

    def buffer(self):
        """The flat gradients, [numel], in the parameters' dtype."""
        if self._replacement is not None:
            return self._replacement
        if self._flat is None:
            self._allocate()
        return self._flat

    def set_buffer(self, buffer):
        """Let later hooks see another tensor (e.g. in half precision) until the average arrives."""
        self._replacement = buffer

    def gradients(self):
        """Views of `buffer()` with the parameters' shapes."""
        if self._replacement is None:
            self.buffer()
            return list(self._views)
        parts = self._replacement.split([p.numel() for p in self.members])
        return [
            part.as_strided(p.shape, stride, part.storage_offset())
            for part, p, stride in zip(parts, self.members, self._strides, strict=True)
        ]

    def put(self, slot, factor=None):
        """Copy gradient number `slot`, times factor, into the buffer; p.grad becomes the view."""
        p = self.members[slot]
        gradient = p.grad
        if gradient is None:  # undefined: backward passed it without a gradient
            self.skip(slot)
        elif self._views is not None and gradient is self._views[slot]:
            if factor is not None:
                gradient.mul_(factor)
        elif gradient.is_sparse:
            raise TypeError(
                f"the gradient of {self.names[slot]!r} is sparse: "
                "make it dense (Embedding: sparse=False)"
            )
        elif (
            len(self.members) > 1
            or gradient.requires_grad
            or gradient.stride() != self._strides[slot]
            or gradient.is_conj()  # or the negative of an imaginary part: a lazy view
            or gradient.is_neg()
        ):
            if self._views is None:
                self._allocate()
            p.grad = self._views[slot]
            self._copy(gradient.detach() if gradient.requires_grad else gradient, slot, factor)
        else:
            self._views, self._flat = [gradient], gradient.as_strided((self.numel,), (1,))
            if factor is not None:
                gradient.mul_(factor)

    def _copy(self, gradient, slot, factor):
        if factor is None:
            self._views[slot].copy_(gradient)
        else:  # copy and divide in one pass over memory
            torch.mul(gradient, factor, out=self._views[slot])

    def skip(self, slot, factor=None):
        """Send what p.grad held before (no_sync), else zeros. p.grad does not change."""
        self.buffer()
        view, gradient = self._views[slot], self.members[slot].grad
        self.skipped[slot] = gradient.clone() if gradient is view else gradient
        if gradient is None:
            view.zero_()
        else:
            self._copy(gradient, slot, factor)

    def receive(self, averaged):
        """Take the result of a hook's future: any shape and dtype, the buffer or another tensor."""
        if not isinstance(averaged, torch.Tensor):
            raise TypeError(
                f"a comm hook's future returned {type(averaged).__name__}: "
                "return the averaged tensor"
            )
        if averaged.data_ptr() != self._flat.data_ptr():
            self._flat.copy_(averaged.view(-1))

    def settle(self, adopt):
        """End a step, and expect every gradient of the next one.

        adopt: [bool] by slot. A skipped parameter takes the average as p.grad, or keeps its own.
        """
        for slot, before in self.skipped.items():
            p, view = self.members[slot], self._views[slot]
            if adopt[slot]:
                p.grad = view
            elif p.grad is view:
                view.copy_(before)
        self.skipped = {}
        self.used = bytearray(len(self.members))
        self.arrived = bytearray(len(self.members))
        self.missing = len(self.members)
        if len(self.members) == 1:  # the buffer is the gradient: release both
            self._flat = self._views = None

    def zeros(self):
        """Return the same bucket with a buffer of zeros, for a rank without data."""
        twin = Bucket(self.members, self._index, self._is_last)
        twin.buffer()
        return twin


def assign_buckets(parameters, cap_bytes):
    """Return lists of parameters, one per bucket, in the order in which backward completes them.

    The order of the gradients is assumed to be the reverse order of registration. A bucket has one
    dtype and device, and at most cap_bytes unless a single parameter is larger. 0: one parameter
    per bucket.
    """
    if cap_bytes < 0:
        raise ValueError(f"bucket_cap_mb must be at least 0, not {cap_bytes / 2**20:g}")
    filling, done = {}, []
    for position, p in enumerate(reversed(list(parameters))):
        kind = (p.dtype, p.device)
        size, members, _ = filling.get(kind, (0, [], 0))
        if members and (cap_bytes == 0 or size + p.nbytes > cap_bytes):
            done.append(filling.pop(kind))
            size, members = 0, []
        filling[kind] = (size + p.nbytes, [*members, p], position)
    done.extend(filling.values())
    done.sort(key=lambda entry: entry[2])  # a bucket is complete when its last gradient is
    return [members for _, members, _ in done]
