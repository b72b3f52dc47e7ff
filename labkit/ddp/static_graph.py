"""A static graph: the first backward shows which gradients come, how often; no later one asks.

    first step   counts: w1 1  b1 0  w2 3    all sent as backward ends; one message: who uses what?
    later        w2 .. w2 .. w2: complete    b1 is given up as backward begins; nobody asks

Reentrant checkpointing adds to the gradient of a shared parameter several times in one backward:
only by counting does one know which is the last. Sent besides: one int32 per parameter, once.
Semantics: static_graph of torch.nn.parallel.DistributedDataParallel.
"""


class StaticGraph:
    """Gradients counted in this rank's first averaging backward, which does not overlap."""

    def __init__(self, reducer):
        self.reducer = reducer
        self.overlap = reducer.overlap
        reducer.overlap = False
        self.counts = None  # by bucket and slot: how many gradients one backward brings
        self._used = None
        self.forget()

    def forget(self):
        """A forward begins: count anew."""
        self._seen = [[0] * len(bucket.members) for bucket in self.reducer.buckets]

    def used(self, failed=False):
        """Return which parameters some rank has used, [[bool]] by bucket. Collective at first.

        failed: an exception has left the backward; then all count as used.
        """
        if self._used is None:
            self._used = self.reducer.used(everything=failed)
        return self._used

    def arrive(self, index, slot, backward):
        """A gradient was added to. backward: not needed here."""
        self._seen[index][slot] += 1
        if self.counts is None:
            return self.reducer.arrive(index, slot)
        if not self.reducer.started:
            self.reducer.started = True
            for bucket, counts in zip(self.reducer.buckets, self.counts, strict=True):
                for other, count in enumerate(counts):
                    if count == 0:
                        self.reducer.skip(bucket.index(), other)
        if self._seen[index][slot] == self.counts[index][slot]:
            self.reducer.arrive(index, slot)

    def close(self, absent):
        """Backward is over. Raises RuntimeError if it was not like the first."""
        seen = self._seen
        self.forget()
        if self.counts is None:
            self.counts, self.reducer.overlap = seen, self.overlap
        changed = [
            f"{name!r} got {now} gradients, not {before}"
            for bucket, *rows in zip(self.reducer.buckets, seen, self.counts, strict=True)
            for name, now, before in zip(bucket.names, *rows, strict=True)
            if now != before
        ]
        if changed:
            raise RuntimeError(
                "static_graph=True, but this backward is not like the first: "
                f"{'; '.join(changed)}. Where the graph changes from step to step, "
                "pass find_unused_parameters=True instead"
            )
