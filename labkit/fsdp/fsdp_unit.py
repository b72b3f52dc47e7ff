"""A unit in a step: hooks on its outputs and inputs show when its backward begins and ends.

    forward    x --[view]--> module --> y        gather before, free after
    backward     [ done ] <-------- [ begins ]   gather before, free and reduce after
                 all gradients       the first
                 of inputs are in    of an output's

    called twice        two forwards, two backwards: done when the second is done
    recomputed          a forward inside backward, for a forward that was counted already
    no input gradient   no hook fires: the unit is done at the end of the complete backward

The hooks are on tensors, because a module's own backward hooks do not allow in-place changes of its
outputs and do not see tensors in containers.

UnitGradients: each unit's gradients are sent as soon as it is done; all have arrived when backward
returns.

    compute   [ unit 2 ][ unit 1 ][ unit 0 ]       end of backward:
    network             [reduce 2][reduce 1][reduce 0][root, if it is replicated], then p.grad

    one at a time     before a unit's gradients are sent, wait for those of the previous unit
    no_sync()         nothing is sent: the unit keeps full gradients, p.grad is this rank's part
    an exception      interrupts a backward: wait for the running messages, and drop their results

A module is not notified at the end of a complete backward, but the engine accepts callbacks during
it. So UnitGradients queues a callback at the first gradient. If one backward runs inside another,
the callback belongs to the outer one.
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
    """A part of the model that is gathered as one.

    It has a name, a module, and modules (name -> module) of its own. keep: whether it stays
    gathered from its forward to its backward.
    """

    def __init__(self, name, module, keep=False):
        self.name, self.module, self.keep = name, module, keep
        self.modules = {}
        self.flats = []  # FlatParams: usually one; else one for each dtype, trainable and frozen
        self.sharded = False  # whether it has sharded parameters, in its flats or in the root's
        self.backwards_due = 0  # forwards whose backward has not come yet
        self.owes = False  # other ranks wait for its gradients: send them, or zeros
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
        """Note that a forward begins."""
        self._versions = self._piece_versions()
        if torch.is_grad_enabled():
            # A recomputation belongs to the forward that was counted, if that had grad.
            self.backwards_due = (
                max(self.backwards_due, 1) if in_backward() else self.backwards_due + 1
            )

    def watch_inputs(self, args, kwargs, done):
        """Return the arguments with hooks: done(gradients) is called when all have gradients."""
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
        """Register hooks: begins(gradient) is called when a gradient reaches a tensor of output."""
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
        """Raise RuntimeError if the parameters have changed since the forward used them."""
        if self._versions != self._piece_versions():
            raise RuntimeError(
                f"the parameters of {self} were changed between forward and backward: "
                "call backward() before step()"
            )

    def _piece_versions(self):
        return [piece._version for flat in self.flats for piece in flat.pieces]

    def watch_modules(self):
        """Detect calls of its modules outside its forward, where parameters are 1-D pieces."""

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
        """Return the current {parameter: [(name, module, attribute)]}; tied ones have several."""
        found = {}
        for prefix, module in self.modules.items():
            for attribute, p in module._parameters.items():
                if p is not None:
                    found.setdefault(p, []).append(
                        (f"{prefix}.{attribute}".removeprefix("."), module, attribute)
                    )
        return found

    def split(self, threshold):
        """Return (kinds of parameters of more elements, {parameter: places} of the others)."""
        own = self.own_parameters()
        small = {p: places for p, places in own.items() if 0 < p.numel() <= threshold}
        self.sharded = bool(own)
        return kinds({p: places for p, places in own.items() if p not in small}), small

    def __str__(self):
        return repr(self.name) if self.name else "the root"


def kinds(parameters):
    """Return [(names, places)], one for each dtype, trainable or frozen.

    parameters: {parameter: [(name, module, attribute)]}.
    """
    found = {}
    for p, places in parameters.items():
        names, all_places = found.setdefault((p.dtype, p.requires_grad), ([], []))
        names.append(places[0][0])
        all_places.append([(module, attribute) for _, module, attribute in places])
    return list(found.values())


class UnitGradients:
    """Sends the gradients of units. flats: all FlatParams. at_end: called at a backward's end."""

    def __init__(self, flats, at_end):
        self.flats, self.at_end = flats, at_end
        self.under_way = False  # a backward has reached a unit, and is not over
        self.accumulates = True  # it sets .grad: it is no autograd.grad() of the input
        self.averages = True  # False in no_sync(): it keeps gradients
        self._sent = None  # the unit whose gradients were sent last

    def watch(self, replicated, group):
        """Average these replicated parameters, [(name, parameter)], at the end of backward."""
        self._replicated = [p for _, p in replicated]
        self.reducer = Reducer(replicated, self, group, overlap=False)

    def begin(self):
        """Queue the callback at the end of backward, if this gradient is the first."""
        if not self.under_way:
            self.under_way, self.accumulates = True, self._will_accumulate()
            call_after_backward(self.at_end)

    def _will_accumulate(self):
        """Return whether the running backward leaves a gradient at a parameter."""
        leaves = [p for flat in self.flats if flat.trainable for p in flat.wholes]
        leaves += self._replicated
        return any(will_visit(get_gradient_edge(p).node) for p in reversed(leaves))

    def on_gradient(self, index, slot):
        """Called when the gradient of a replicated parameter is complete."""
        if self.averages:
            self.begin()
            self.reducer.arrive(index, slot)
        else:
            self.reducer.keep(index, slot)

    @torch.no_grad()
    def send(self, unit):
        """Send the gradients of a unit whose backward is done."""
        if self.averages:
            if self._sent is not None:
                self._sent.settle()
            self._sent = unit
            unit.launch_reduce()

    @torch.no_grad()
    def deliver(self):
        """Wait for all messages at the end of backward, and set the gradients of the pieces."""
        for flat in self.flats:
            flat.settle()
        if self.reducer.started:
            # Not earlier: collectives match by order, and ranks may differ in when these arrive.
            self.reducer.finish()
        for flat in self.flats:
            flat.deliver() if self.averages else flat.keep()
        self.under_way = False

    def abandon(self):
        """End a backward that raised an exception."""
        for flat in self.flats:
            flat.forget()
        self.reducer.abandon()
        self.under_way = False
