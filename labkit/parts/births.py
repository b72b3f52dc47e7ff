"""Births and deaths of storages, in the order of a run, and what each turns out to be for.

    x = a @ b     + 32 KiB    every operator's new storages are seen, in backward too
    p.grad        = that one, from its birth on: a gradient
    all_reduce    = that one, from its birth on: it travels
    del x         - 32 KiB    a weak reference tells
"""

import weakref
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Piece:
    """A storage: bytes, the number of the parameter whose gradient it is, whether it is sent."""

    size: int
    gradient_of: int | None = None
    travels: bool = False


class Watch(TorchDispatchMode):
    """Writes every new storage, and the end of every storage, into `log`."""

    def __init__(self, log):
        super().__init__()
        self.log, self.alive = log, {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tensors_of((args, kwargs))}
        if operator is torch.ops.aten.lift_fresh.default:
            given = set()  # its input was built where nobody could see it
        result = operator(*args, **(kwargs or {}))
        for t in tensors_of(result):
            storage = t.untyped_storage()
            if storage._cdata not in self.alive and storage._cdata not in given:
                self.born(storage)
        return result

    def born(self, storage):
        address, piece = storage._cdata, Piece(storage.nbytes())
        self.alive[address] = piece, weakref.ref(storage, lambda _: self.died(address))
        self.log.append((piece, piece.size, None))

    def died(self, address):
        piece, _ = self.alive.pop(address)
        self.log.append((piece, -piece.size, None))

    def piece_of(self, tensor):
        return self.alive.get(tensor.untyped_storage()._cdata, (None, None))[0]

    def gradient(self, number, parameter):
        """A parameter's gradient is complete: its storage has been a gradient all its life."""
        self.log.append((self.learn_gradient(number, parameter), 0, ("gradient", number)))

    def learn_gradient(self, number, parameter):
        piece = self.piece_of(parameter.grad)
        if piece is not None:
            piece.gradient_of = number
        return piece

    def travels(self, tensor):
        """It is sent or received, in a group of stand_in."""
        if (piece := self.piece_of(tensor)) is not None:
            piece.travels = True

    def mark(self, phase, unit):
        self.log.append((None, 0, (phase, unit)))


def tensors_of(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
