"""The order in which a model calls its units, known from the step before: to gather ahead.

    last forward     0  1  2  3    what this one is expected to do
    this forward     0  1          unit 1 begins: gather 2 meanwhile; in backward, unit 1: gather 0
    another branch   0  2          not as expected: nothing is gathered ahead where orders differ

Every rank sees the same order (the ranks run the same units), so every rank gathers the same ones.
Zhao et al., PyTorch FSDP, VLDB 2023, section 3.3 (prefetching by the order of the step before).
"""


class CallOrder:
    """units: what to expect of the first forward. ahead: how many units are named as the next."""

    def __init__(self, units, ahead):
        self.expected, self.called, self.ahead = units, [], ahead

    def begin(self):
        """A new forward."""
        self.expected, self.called = self.called or self.expected, []

    def after(self, unit):
        """unit is called now: those that come next; none if this forward differs from the last."""
        position = len(self.called)
        self.called.append(unit)
        as_expected = self.expected[position : position + 1] == [unit]
        return self.expected[position + 1 : position + 1 + self.ahead] if as_expected else []

    def before(self, unit):
        """In backward: the units called before unit, the last one first."""
        if unit not in self.called:
            return []
        last = len(self.called) - 1 - self.called[::-1].index(unit)
        return list(
            dict.fromkeys(other for other in self.called[:last][::-1] if other is not unit)
        )[: self.ahead]
