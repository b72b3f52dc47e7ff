"""A unit in a step: it hears from its outputs when its backward begins, from its inputs when done.

    forward    x --[view]--> module --> y        gather before, free after
    backward     [ done ] <-------- [ begins ]   gather before, free and reduce after
                 all gradients       the first
                 of inputs are in    of an output's

    called twice        two forwards, two backwards: done when the second is done
    recomputed          a forward inside backward, for a forward that was counted already
    no input gradient   nobody tells that it is done: the end of the whole backward does

Hooks on tensors, as a module's own backward hooks forbid to change its outputs in place, and see no
tensor in a container. Zhao et al., PyTorch FSDP, VLDB 2023, section 4.3.
"""

from functools import partial

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_map_only

from labkit.ddp.wrapper import find_tensors


def in_backward():
    return torch._C._current_graph_task_id() != -1


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
