"""A unit in a step: it hears from its outputs when its backward begins, from its inputs when done.

    forward    x --[view]--> module --> y        gather before, free after
    backward     [ done ] <-------- [ begins ]   gather before, free and reduce after
                 all gradients       the first
                 of inputs are in    of an output's

    called twice        two forwards, two backwards: done when the second is done
    recomputed          a forward inside backward, for a forward that was counted already
    no input gradient   no hook fires: the end of the whole backward counts

Hooks on tensors, as a module's own backward hooks forbid to change its outputs in place, and see no
tensor in a container.

UnitGradients: each unit's gradients leave as soon as it is done; all have arrived when backward
returns.

    compute   [ unit 2 ][ unit 1 ][ unit 0 ]       end of backward:
    network             [reduce 2][reduce 1][reduce 0][root, if it is replicated], then p.grad

    one on its way    before a unit's gradients leave, those of the unit before are waited for
    no_sync()         nothing leaves: whole gradients stay with the unit, this rank's part in p.grad
    an exception      leaves a backward half-way: what is under way is waited for, and dropped

A module is not notified when a whole backward is over; the engine calls back if asked during that
backward. So UnitGradients asks at the first gradient: where one backward runs inside another, the
callback belongs to the outer one.
Zhao et al., PyTorch FSDP, VLDB 2023, section 4.3.
"""

from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.utils._pytree import tree_map_only

from labkit.ddp.reducer import Reducer
from labkit.ddp.wrapper import find_tensors
from labkit.torch_private import call_after_backward, in_backward, will_visit


class Unit:
    """A part of the model gathered together: its name, module, modules (name -> module) of its own.

    keep: stays gathered from its forward to its backward.
    """

    def __init__(self, name, module, keep=False):
        self.name, self.module, self.keep = name, module, keep
        self.modules = {}
        self.flats = []  # FlatParams, as a rule one; else one for each dtype, trainable and frozen
        self.backwards_due = 0  # forwards whose backward has not come yet
        self.owes = False  # gradients, zeros if need be: other ranks wait for them
        self._versions = None  # of the pieces, when they were gathered for the forward

    def gather(self):
        for flat in self.flats:
            flat.gather()

    def use(self):
        for flat in self.flats:
            flat.use()

    def free(self):
        for flat in self.flats:
            flat.free()

    def launch_reduce(self):
        for flat in self.flats:
            flat.launch_reduce(self.owes)
        self.owes = False

    def settle(self):
        for flat in self.flats:
            flat.settle()

    # ---- between forward and backward

    def note_forward(self):
        """A forward begins."""
        self._versions = self._piece_versions()
        if torch.is_grad_enabled():
            # A recomputation belongs to the forward that was counted, if that had grad.
            self.backwards_due = (
                max(self.backwards_due, 1) if in_backward() else self.backwards_due + 1
            )

    def watch_inputs(self, args, kwargs, done):
        """The arguments; done(gradients) is called when backward has reached all of them."""
        watched = []

        def watch(t):
            if t.requires_grad:
                t = t.view_as(t)  # a node of our own: gradients of t's other uses may come later
                watched.append(t)
            return t

        args, kwargs = tree_map_only(torch.Tensor, watch, (args, kwargs))
        if watched and torch.is_grad_enabled():
            register_multi_grad_hook(watched, done)
        return args, kwargs

    def watch_outputs(self, output, begins):
        """begins(gradient) is called when a gradient comes to a tensor of output, if one can."""
        tensors = list(find_tensors(output))
        watched = [t for t in tensors if t.grad_fn is not None]
        for t in watched:
            t.register_hook(begins)
        if self.flats and not tensors and not isinstance(output, str | int | float | None):
            raise TypeError(
                f"{self} returns {type(output).__name__}, in which FSDP finds no tensor to "
                "hear of backward from: return tensors, in dicts, lists, tuples or "
                "dataclasses if need be"
            )
        return bool(watched)

    def check_unchanged(self):
        """Raise RuntimeError where what backward needs is no longer what forward has used."""
        if self._versions != self._piece_versions():
            raise RuntimeError(
                f"the parameters of {self} were changed between forward and backward: "
                "call backward() before step()"
            )

    def _piece_versions(self):
        return [piece._version for flat in self.flats for piece in flat.pieces]

    def watch_modules(self):
        """Its modules are called inside its own forward only: elsewhere they hold 1-D pieces."""

        def check(module, args, name):
            if self.flats and not self.flats[0].whole:
                raise RuntimeError(
                    f"{name!r} was called outside the forward of {self}, where its parameters are "
                    "shards: call the FSDP module itself, and what else it does from its forward"
                )

        for name, module in self.modules.items():
            if module is not self.module and module._parameters:
                module.register_forward_pre_hook(partial(check, name=name))

    # ---- what it owns

    def own_parameters(self):
        """{parameter: [(name, module, attribute)]}, as of now; tied ones have several places."""
        found = {}
        for prefix, module in self.modules.items():
            for attribute, p in module._parameters.items():
                if p is not None:
                    found.setdefault(p, []).append(
                        (f"{prefix}.{attribute}".removeprefix("."), module, attribute)
                    )
        return found

    def kinds(self):
        """[(names, places)] of its parameters: one a dtype, trainable or frozen. See FlatParam."""
        kinds = {}
        for p, places in self.own_parameters().items():
            names, all_places = kinds.setdefault((p.dtype, p.requires_grad), ([], []))
            names.append(places[0][0])
            all_places.append([(module, attribute) for _, module, attribute in places])
        return list(kinds.values())

    def __str__(self):
        return repr(self.name) if self.name else "the root"


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
            call_after_backward(self.at_end)

    def _will_accumulate(self):
        """Return whether the running backward leaves a gradient at a parameter."""
        leaves = [p for flat in self.flats if flat.trainable for p in flat.wholes]
        leaves += self._replicated
        return any(will_visit(get_gradient_edge(p).node) for p in reversed(leaves))

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
