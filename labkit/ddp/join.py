"""Uneven inputs: a rank without data joins the others' collectives with zeros until all are done.

    rank 0   | step | step | done: zeros | done |  model of rank 1
    rank 1   | step | step |    step     | done |  its own
             ^ each forward begins with one small all_reduce: which ranks have data, which average?

Sent in addition, per step: one int32 vector of 2 n elements. At the end: the model once, from the
last rank that had data. Without join, the other ranks wait for ever in an all_reduce after the
first rank has finished.
Semantics: torch.distributed.algorithms.join. Every step is one forward and at most one averaged
backward.
"""

import torch
import torch.distributed as dist

from labkit import comm


class Join:
    """Context manager of DDP.join(), used around the loop over the data."""

    def __init__(
        self, ddp, divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False
    ):
        self.ddp, self.enable = ddp, enable
        self.divide_by_initial_world_size = divide_by_initial_world_size
        self.throw_on_early_termination = throw_on_early_termination
        self.group = ddp.process_group
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.last = range(self.world_size)  # the ranks that had data in the latest step

    def __enter__(self):
        if self.enable:
            self.ddp._joining = self

    def __exit__(self, kind, error, traceback):
        if not self.enable:
            return
        self.ddp._joining = None
        try:
            if kind is None:
                while self._shadow():
                    pass
                # Only a rank with data to the end has made every update and seen every statistic.
                self.ddp._replicas.become(max(self.last))
        finally:
            self.ddp._reducer.divide_by(self.world_size)

    def announce(self, averages):
        """Announce a forward of DDP, and return the rank whose buffers are used.

        averages: whether its backward will average gradients.

        Raises RuntimeError if a rank is out of data and throw_on_early_termination.
        """
        self._exchange(True, averages)
        if not self.divide_by_initial_world_size:
            self.ddp._reducer.divide_by(len(self.last))
        return max(self.last)

    def _shadow(self):
        """Take part in one step of the other ranks, without data. False: no rank has data."""
        active, averages = self._exchange(False, False)
        if active:
            self.ddp._share_buffers(max(active), averages)
            if averages:
                self.ddp._reducer.send_zeros()
                if self.ddp._unused:
                    self.ddp._unused.used()
        return bool(active)

    def _exchange(self, active, averages):
        votes = torch.zeros(
            2, self.world_size, dtype=torch.int32, device=self.ddp.buckets[0].device
        )
        votes[0, self.rank], votes[1, self.rank] = active, averages
        comm.all_reduce(votes, group=self.group)
        with_data, averaging = votes.tolist()
        present = [rank for rank in range(self.world_size) if with_data[rank]]
        self.last = present or self.last
        if self.throw_on_early_termination and 0 < len(present) < self.world_size:
            gone = [rank for rank in range(self.world_size) if rank not in present]
            raise RuntimeError(
                f"ranks {gone} ran out of data before ranks {present}: ending on all ranks"
            )
        return present, any(averaging)
