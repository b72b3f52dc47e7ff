"""A clock that only emulated compute moves: the host's own time in a dry run does not count.

    this machine    |forward .. Python .. forward|   .. hooks .. |backward .. Python ..|
    this clock      |forward|forward|backward|backward|     messages leave at their moments

A block sleeps for as long as a GPU would compute. On this clock a sleep returns at once and takes
exactly its time. So a dry run's step is the same on every machine, and simulate() adds only the
messages.
"""

from contextlib import contextmanager
from unittest.mock import patch

from labkit import comm


class Clock:
    """now: seconds since it was made. For comm.record(clock=...)."""

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def stamp(self, thing, name):
        setattr(thing, name, self.now)

    def resolve(self):
        """Nothing is left open."""


@contextmanager
def only_sleep(module):
    """Inside, `module.sleep`, as labkit.models.emulated has one, moves the Clock that this gives.

    Every message that is recorded inside is stamped with it.
    """
    clock = Clock()
    with comm.record(clock=clock), patch.object(module, "sleep", clock.sleep):
        yield clock
