"""A static graph: the first backward counts the gradients; later ones rely on these counts.

    first step   counts: w1 1  b1 0  w2 3    all buckets are sent at the end of backward, and one
                                             message: which rank uses which parameters?
    later        w2 .. w2 .. w2: complete    b1 is skipped at once, without a message

Reentrant checkpointing adds to the gradient of a shared parameter several times in one backward.
Only the count shows which addition is the last. Sent in addition: one int32 per parameter, once.
Semantics: static_graph of torch.nn.parallel.DistributedDataParallel.
"""


class StaticGraph:
    """The counts of gradients in this rank's first averaging backward, which does not overlap."""

    def __init__(self, reducer):
        self.reducer = reducer
        self.overlap = reducer.overlap
        reducer.overlap = False
        self.counts = None  # by bucket and slot: how many gradients one backward brings
        self._used = None
        self.forget()

    def forget(self):
        """Restart the count, because a forward begins."""
        self._seen = [[0] * len(bucket.members) for bucket in self.reducer.buckets]

    def used(self, failed=False):
        """Return which parameters some rank has used, [[bool]] by bucket. Collective at first.

        failed: an exception has left the backward; then all count as used.
        """
        if self._used is None:
            self._used = self.reducer.used(everything=failed)
        return self._used

    def arrive(self, index, slot, backward):
        """Count an addition to a gradient. backward: not needed here."""
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
        """End a backward. Raises RuntimeError if its gradients differ from those of the first."""
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
