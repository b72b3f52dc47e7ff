"""The gradients of units: each unit's leave as it is done, all have arrived when backward returns.

    compute   [ unit 2 ][ unit 1 ][ unit 0 ]       end of backward:
    network             [reduce 2][reduce 1][reduce 0][root, if it is replicated], then p.grad

    one on its way    before a unit's gradients leave, those of the unit before are waited for
    no_sync()         nothing leaves: whole gradients stay with the unit, this rank's part in p.grad
    an exception      leaves a backward half-way: what is under way is waited for, and dropped

No module is told that a whole backward is over. The engine tells it, if it is asked during that
backward. So ask at the first gradient: where one backward runs inside another, it is the outer's.
"""

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from labkit.ddp.reducer import Reducer


class UnitGradients:
    """flats: the FlatParams of all units. at_end: called when a backward is over that came here."""

    def __init__(self, flats, at_end):
        self.flats, self.at_end = flats, at_end
        self.under_way = False  # a backward has come here, and is not over
        self.accumulates = True  # it leaves gradients: it is no autograd.grad() of the input
        self.averages = True  # else it keeps: no_sync()
        self._sent = None  # the unit whose gradients have left last

    def watch(self, replicated, group):
        """These, [(name, parameter)], are whole on every rank: average them at the end."""
        self._replicated = [p for _, p in replicated]
        self.reducer = Reducer(replicated, self, group, overlap=False)

    def begin(self):
        """A gradient has come somewhere: if it is the first, ask to be called at the end."""
        if not self.under_way:
            self.under_way, self.accumulates = True, self._will_accumulate()
            Variable._execution_engine.queue_callback(self.at_end)

    def _will_accumulate(self):
        """Whether the backward under way leaves a gradient at a parameter."""
        leaves = [p for flat in self.flats if flat.trainable for p in flat.wholes]
        leaves += self._replicated
        return any(
            torch._C._will_engine_execute_node(get_gradient_edge(p).node) for p in reversed(leaves)
        )

    def on_gradient(self, index, slot):
        """A replicated parameter has its gradient."""
        if self.averages:
            self.begin()
            self.reducer.arrive(index, slot)
        else:
            self.reducer.keep(index, slot)

    @torch.no_grad()
    def send(self, unit):
        """This unit's backward is done."""
        if self.averages:
            if self._sent is not None:
                self._sent.settle()
            self._sent = unit
            unit.launch_reduce()

    @torch.no_grad()
    def deliver(self):
        """Backward is over: wait for everything, and let the pieces have it."""
        for flat in self.flats:
            flat.settle()
        if self.reducer.started:
            # Not earlier: collectives match by order, and ranks may differ in when these arrive.
            self.reducer.finish()
        for flat in self.flats:
            flat.deliver() if self.averages else flat.keep()
        self.under_way = False

    def abandon(self):
        """An exception has left a backward."""
        for flat in self.flats:
            flat.forget()
        self.reducer.abandon()
        self.under_way = False
