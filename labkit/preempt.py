"""Preemption: when one rank is asked to stop, all ranks stop after the same step, save and exit.

    rank 0   step 41 | step 42                                | save | exit with 0
    rank 1   step 41 | step 42: forward | SIGTERM   backward  | step 43 ...

    step 42   forward | [ loss | signalled? ]  --- all_reduce --->  backward | [ sum | how many ]

A signal reaches ranks at different times, or only one rank. If each rank stopped on its own, the
others would wait for its gradients forever. So the flag is appended to the message of the loss, 8
bytes longer, and all ranks read the same answer after the same step. The message is sent before the
backward, with which it overlaps: at the end of a step, a rank would wait in it for the slowest one.
A signal that arrives later is heard one step later.

Slurm and Kubernetes send SIGTERM, and SIGKILL some seconds later.
"""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from labkit import comm


class Agreement:
    """The mean loss of the ranks, and whether any of them must stop, from one all-reduce a step.

        trainer.on_loss = Agreement(told).send

    told: function -> whether this rank was asked to stop. group: the ranks; None: all.
    """

    def __init__(self, told, group=None):
        self.told = told
        self.group = group
        self._message = None
        self._work = None

    def send(self, loss):
        """Start the all-reduce of this rank's loss, a scalar tensor. Collective."""
        told = torch.tensor(float(self.told()), device=loss.device)
        self._message = torch.stack([loss.detach().double(), told])
        self._work = comm.all_reduce(self._message, group=self.group, async_op=True)

    def read(self):
        """Wait for what was sent; return (mean loss, a scalar of float64, whether to stop)."""
        self._work.wait()
        total, wishes = self._message
        return total / dist.get_world_size(self.group), bool(wishes)


class Preemption:
    """Records a request to stop this rank: SIGTERM or SIGINT, an existing file, or a time limit.

        with Preemption(file="stop", seconds=3600) as preemption:
            agreement = Agreement(lambda: preemption.told)
            trainer.on_loss = agreement.send
            for step in ...:
                trainer.train_step(...)
                loss, stop = agreement.read()

    Within the block, signals have no other effect. Afterwards the handler is `then`, such as
    signal.SIG_IGN; the previous one if `then` is None or the block raises. Signals are received in
    the main thread only. seconds: measured by a monotonic clock.
    """

    def __init__(self, file=None, seconds=None, then=None):
        self.file = file
        self.then = then
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
            ended_well = self.then is not None and error[0] is None
            signal.signal(number, self.then if ended_well else handler)

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
