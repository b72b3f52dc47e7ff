"""Preemption: when one rank is asked to stop, all ranks stop after the same step, save and exit.

    rank 0   step 41 | step 42         | save | exit with 0
    rank 1   step 41 | SIGTERM step 42 | save | exit with 0

    step 42's message   [ loss | signalled? ]  --- all_reduce --->  [ sum of losses | how many ]

A signal reaches ranks at different times, or only one rank. If each rank stopped on its own, the
others would wait for its gradients forever. So the flag is appended to a message that is sent
anyway, 8 bytes longer, and all ranks read the same answer after the same step.

Slurm and Kubernetes send SIGTERM, and SIGKILL some seconds later.
"""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from labkit import comm


def mean_and_wish(loss, told, group=None):
    """Return (mean loss of the ranks, whether any rank must stop), from one all-reduce."""
    message = torch.stack([loss.detach().double(), torch.tensor(float(told), device=loss.device)])
    comm.all_reduce(message, group=group)
    mean = message[0] / dist.get_world_size(group)
    return mean, bool(message[1])


class Preemption:
    """Records a request to stop this rank: SIGTERM or SIGINT, an existing file, or a time limit.

        with Preemption(file="stop", seconds=3600) as preemption:
            for step in ...:
                loss, stop = mean_and_wish(train_step(...), preemption.told)

    Within the block, signals have no other effect; afterwards the previous handlers are restored.
    Signals are received in the main thread only. seconds: measured by a monotonic clock.
    """

    def __init__(self, file=None, seconds=None):
        self.file = file
        self.ends = None if seconds is None else time.monotonic() + seconds
        self.reason = None
        self._before = {}  # {signal: previous handler}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number, frame):
        self.reason = signal.Signals(number).name

    @property
    def told(self):
        """Whether this rank was asked to stop; `reason` then says by what."""
        if self.reason is None and self.file is not None and os.path.exists(self.file):
            self.reason = f"the file {self.file}"
        if self.reason is None and self.ends is not None and time.monotonic() >= self.ends:
            self.reason = "the time is up"
        return self.reason is not None
