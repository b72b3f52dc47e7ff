"""A virtual clock that only emulated compute advances: host time in a dry run does not count.

    this machine    |forward .. Python .. forward|   .. hooks .. |backward .. Python ..|
    this clock      |forward|forward|backward|backward|     messages are stamped with its time

An emulated block sleeps for the time that a GPU would compute. With this clock, a sleep returns at
once and advances the clock by exactly its time. So a dry run's step is the same on every machine,
and simulate() adds only the messages.
"""

from contextlib import contextmanager
from unittest.mock import patch

from labkit import comm


class Clock:
    """A clock for comm.record(clock=...). now: seconds since it was created."""

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def stamp(self, thing, name):
        setattr(thing, name, self.now)

    def resolve(self):
        """Do nothing: stamps are final at once."""


@contextmanager
def only_sleep(module):
    """Yield a Clock that `module.sleep` advances instead of sleeping (see labkit.models.emulated).

    The messages recorded inside the block are stamped with this clock.
    """
    clock = Clock()
    with comm.record(clock=clock), patch.object(module, "sleep", clock.sleep):
        yield clock
