"""The clock of a device: CUDA works behind the host, so its moments are events in its streams.

    host     launch  launch  wait()                        resolve() ......| now each is a number
    stream           |== kernel ==|...stands still...|== kernel ==|
                     ^            ^ wait() begins    ^ and ends   ^          until then each is NaN

What the host's clock says of wait() on CUDA is how long it took to enqueue: nothing. To synchronise
at each moment would tell the truth about another program, one in which nothing overlaps. An event
costs next to nothing.
Resolution: about half a microsecond (cudaEventElapsedTime).
"""

from math import nan
from time import perf_counter

import torch

from labkit import comm


def clock_of(device):
    """The clock for what runs on a device (None: the host)."""
    on_cuda = device is not None and torch.device(device).type == "cuda"
    return CudaClock(device) if on_cuda else comm.HOST


class CudaClock:
    """Moments of a CUDA device, in seconds of time.perf_counter(), told as comm.HostClock does.

    event, stream: torch.cuda's Event and current_stream, or what answers to their names.
    """

    def __init__(self, device, event=torch.cuda.Event, stream=torch.cuda.current_stream):
        self.device, self._event, self._stream = device, event, stream
        self._pending = []  # (event, thing, name), in the order in which they were stamped

    def stamp(self, thing, name):
        """thing.name becomes the moment when the current stream gets here: NaN until resolve()."""
        setattr(thing, name, nan)
        self._pending.append((self._mark(), thing, name))

    def _mark(self):
        event = self._event(enable_timing=True)
        event.record(self._stream(self.device))
        return event

    def resolve(self):
        """Wait until the device has passed every moment that was stamped, and tell them."""
        if not self._pending:
            return
        now, pending = self._mark(), self._pending
        self._pending = []
        now.synchronize()
        host = perf_counter()
        for event, thing, name in pending:
            event.synchronize()  # one in another stream may come later than `now`
            if getattr(thing, name) is not None:  # an operation that failed has no end
                setattr(thing, name, host - event.elapsed_time(now) / 1e3)
