"""The clock of a device: CUDA runs behind the host, so times are events in its streams.

    host     launch  launch  wait()                        resolve() ......| now each is a number
    stream           |== kernel ==|...... idle .......|== kernel ==|
                     ^            ^ wait() begins     ^ and ends   ^         until then each is NaN

By the host's clock, wait() on CUDA takes only the time to enqueue it. Synchronizing at each moment
would change the program: nothing would overlap. An event costs almost nothing.
Resolution: about half a microsecond (cudaEventElapsedTime).
"""

from math import nan
from time import perf_counter

import torch

from labkit import comm


def clock_of(device):
    """Return the clock for work on a device (None: the host)."""
    on_cuda = device is not None and torch.device(device).type == "cuda"
    return CudaClock(device) if on_cuda else comm.HOST


class CudaClock:
    """Times on a CUDA device, in seconds of time.perf_counter(); same methods as comm.HostClock.

    event, stream: torch.cuda's Event and current_stream, or replacements in a test.
    """

    def __init__(self, device, event=torch.cuda.Event, stream=torch.cuda.current_stream):
        self.device = device
        self._event = event
        self._stream = stream
        self._pending = []  # (event, object, attribute), in the order of the stamps

    def stamp(self, thing, name):
        """Set thing.name to the time when the current stream gets here: NaN until resolve()."""
        setattr(thing, name, nan)
        self._pending.append((self._mark(), thing, name))

    def _mark(self):
        event = self._event(enable_timing=True)
        event.record(self._stream(self.device))
        return event

    def resolve(self):
        """Wait until the device has passed every stamped moment, and set the times."""
        if not self._pending:
            return
        now = self._mark()
        pending = self._pending
        self._pending = []
        now.synchronize()
        host = perf_counter()
        for event, thing, name in pending:
            event.synchronize()  # an event in another stream may come later than `now`
            if getattr(thing, name) is not None:  # a failed operation has no end
                setattr(thing, name, host - event.elapsed_time(now) / 1e3)
