"""Preemption: when one rank is asked to stop, all stop after the same step, save and leave.

    rank 0   step 41 | step 42         | save | leave with 0
    rank 1   step 41 | SIGTERM step 42 | save | leave with 0

    step 42's message   [ loss | was I told? ]  --- all_reduce --->  [ sum of losses | how many ]

A signal reaches ranks at different moments, or one alone. If each stopped by itself, the others
would wait for its gradients for ever. So the wish rides on a message that is sent anyway, 8 bytes
longer, and all read the same answer after the same step.

As clusters do it: Slurm and Kubernetes send SIGTERM, and SIGKILL some seconds later.
"""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from labkit import comm


def mean_and_wish(loss, told, group=None):
    """The idea: (mean loss of the ranks, whether any was told to stop), by one all-reduce."""
    message = torch.stack([loss.detach().double(), torch.tensor(float(told), device=loss.device)])
    comm.all_reduce(message, group=group)
    mean = message[0] / dist.get_world_size(group)
    return mean, bool(message[1])


class Preemption:
    """Notes that this rank was told to stop: by SIGTERM or SIGINT, a file that is there, a time.

        with Preemption(file="stop", seconds=3600) as preemption:
            for step in ...:
                loss, stop = mean_and_wish(train_step(...), preemption.told)

    Signals do nothing else while it lasts, however often they come; afterwards what they did
    before. Outside the main thread it hears none. seconds: by a clock that nobody can set.
    """

    def __init__(self, file=None, seconds=None):
        self.file = file
        self.ends = None if seconds is None else time.monotonic() + seconds
        self.reason, self._before = None, {}

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
        """Whether this rank was; `reason` then says by what."""
        if self.reason is None and self.file is not None and os.path.exists(self.file):
            self.reason = f"the file {self.file}"
        if self.reason is None and self.ends is not None and time.monotonic() >= self.ends:
            self.reason = "the time is up"
        return self.reason is not None
