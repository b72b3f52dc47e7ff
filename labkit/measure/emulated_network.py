"""An emulated network: a message arrives latency + bytes / rate after all ranks have sent it.

    backward   | l3 | l2 | l1 |- wait -|
    network         [ message 1 ][ message 2 ]     one after the other, as on one cable
                    latency + bytes / rate

The messages are real, with their real bytes and order; only the time is a sleep. So a laptop shows
the effect of a slow network, together with emulated compute (models/emulated.py). Numbers measured
with it are labelled "emulated". The links of cluster/network_namespaces.py are slow without sleeps.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from time import sleep

import torch
import torch.distributed as dist

from labkit import comm
from labkit.ring_cost import sent_bytes

PAIRWISE = ("send", "exchange")


@contextmanager
def emulated_network(latency_ms, mbit, slow_rank=None, slower=1.0):
    """Delay each message of labkit.comm in the block, by latency + bytes that a rank sends / rate.

    latency_ms: of a message. mbit: speed of the links in Mbit/s, 10^6 bits a second.
    slow_rank: the link of this rank has 1 / `slower` of the speed. Every collective runs at the
        speed of the slowest link, a message between two ranks at that of the sender's link.
    """
    lane = ThreadPoolExecutor(1)
    real = comm.metered

    def metered(op, group, tensor, async_op, launch, pairs=None, sent=None):
        formula = sent or partial(sent_bytes, op)

        def launch_and_sleep():
            size = formula(dist.get_world_size(group), 0 if tensor is None else tensor.nbytes)
            slowed = slow_rank is not None and (op not in PAIRWISE or dist.get_rank() == slow_rank)
            rate = mbit * 1e6 / 8 / (slower if slowed else 1.0)
            seconds = latency_ms / 1e3 + size / rate
            work = launch()
            if async_op:
                return Arriving(work, seconds, lane, tensor)
            sleep(seconds)

        return real(op, group, tensor, async_op, launch_and_sleep, pairs, sent)

    comm.metered = metered
    try:
        yield
    finally:
        comm.metered = real
        lane.shutdown()


class Arriving:
    """The Work of a message that arrives `seconds` after the real one."""

    def __init__(self, work, seconds, lane, tensor):
        self.future = torch.futures.Future()
        lane.submit(self.deliver, work, seconds, tensor)

    def deliver(self, work, seconds, tensor):
        try:
            work.wait()
            sleep(seconds)
            self.future.set_result([tensor])
        except Exception as error:
            self.future.set_exception(error)

    def wait(self, timeout=None):
        self.future.wait()
        return True

    def is_completed(self):
        return self.future.done()

    def get_future(self):
        return self.future
