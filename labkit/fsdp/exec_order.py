"""The order in which units run: predicted for prefetching, recorded for backward.

CallOrder predicts the order of the last forward:

    last forward     0  1  2  3    the prediction for this forward
    this forward     0  1          unit 1 begins: gather 2 meanwhile; in backward, unit 1: gather 0
    another branch   0  2          not as predicted: no prefetching while the orders differ

All ranks run the same units in the same order, so every rank gathers the same ones.

Trace records when units began and ended in one forward. Backward reaches these points in reverse:

    forward    root( 0( )0 1( )1 )root
    backward   )root  )1 1(  )0 0(  root(      ")": gather the unit     "(": reduce its gradients

If the loss of a rank does not depend on unit 1, its backward reaches neither of the unit's points,
but the other ranks wait for it there. At the next point that it reaches, the rank catches up: it
gathers, and sends zeros. The engine runs later nodes first, so it never returns to a skipped point.

Zhao et al., PyTorch FSDP, VLDB 2023, section 3.3 (prefetching by the order of the step before);
Paszke et al., Automatic differentiation in PyTorch, 2017, section 4.
"""

from dataclasses import dataclass


class CallOrder:
    """Predict the next units. units: the expected first forward. ahead: units to name."""

    def __init__(self, units, ahead):
        self.expected, self.called, self.ahead = units, [], ahead

    def begin(self):
        """Begin a new forward."""
        self.expected, self.called = self.called or self.expected, []

    def after(self, unit):
        """Note a call; return the next units, none if this forward differs from the last."""
        position = len(self.called)
        self.called.append(unit)
        as_expected = self.expected[position : position + 1] == [unit]
        return self.expected[position + 1 : position + 1 + self.ahead] if as_expected else []

    def before(self, unit):
        """Return, for backward, the units called before `unit`, the last one first."""
        if unit not in self.called:
            return []
        last = len(self.called) - 1 - self.called[::-1].index(unit)
        return list(
            dict.fromkeys(other for other in self.called[:last][::-1] if other is not unit)
        )[: self.ahead]


@dataclass(eq=False)
class Point:
    """The beginning or the end of a unit in a forward. heard: whether its output has a gradient."""

    unit: object
    is_end: bool
    heard: bool = False


class Trace:
    """The points of one forward, in order."""

    def __init__(self):
        self._points, self._open, self._left = [], [], None

    def begin(self, unit):
        """Record that a unit begins; return the Point."""
        point = Point(unit, is_end=False)
        self._points.append(point)
        self._open.append(point)
        return point

    def end(self, unit):
        """Record that a unit ends; return its Points, begin and end."""
        begun = self._open.pop()
        while begun.unit is not unit:  # an exception that the model caught has left that one
            begun = self._open.pop()
        point = Point(unit, is_end=True)
        self._points.append(point)
        return begun, point

    def reach(self, point):
        """Return the points that backward has passed, and this one, in the order of backward."""
        left = self._remaining()
        if point not in left:  # another output of the same unit
            return [point]
        place = left.index(point)
        self._left, reached = left[:place], left[place:]
        return reached[::-1]

    def finish(self):
        """Return the remaining points, in the order of backward, and reset for the next one."""
        left, self._left = self._remaining(), None
        return left[::-1]

    def _remaining(self):
        if self._left is None:
            self._left = [point for point in self._points if point.heard]
        return self._left

    def forget(self):
        """Reset after an exception in backward."""
        self._left = None
