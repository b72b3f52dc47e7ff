"""A model of shards, from outside: its parameters are pieces, its state dicts pieces or whole.

    state_dict             this rank's pieces, under the module's own names
    full_state_dict        n ranks, pieces  --- all_gather --->  every rank: w1 [4, 6], b1 [4], ...
    load_full_state_dict   every rank: w1 [4, 6], b1 [4], ...  --- own parts ---> m ranks, pieces
    load_shards            the state_dict() of each of n ranks --- as if whole -> m ranks, pieces

Sent per rank: (n-1)/n x parameter bytes for full_state_dict, else nothing. Held while saving: the
whole model.
Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023, section 4.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from labkit.ddp.wrapper import Wrapper, plain_name
from labkit.fsdp.sharding_strategy import compute_device
from labkit.pickle_support import NotPickled
from labkit.replicas import broadcast_tensors
from labkit.zero.clip import clip_grad_norm_


class ShardedModel(NotPickled, Wrapper):
    """Base of FSDP: what does not belong to a step.

    Subclasses have flats, all FlatParams; sharding, a Sharding; replicated, the parameters that are
    whole on every rank; watch_root(), called when these have moved.
    """

    instead = "full_state_dict() (collective, whole) or state_dict() (this rank's shards)"
    more = ". To average weights, clone the shards: see FSDP's docstring"

    def named_parameters(self, *args, **kwargs):
        """The pieces, also while the module holds whole parameters."""
        pieces = {
            whole: p
            for flat in self.flats
            for whole, p in zip(flat.wholes, flat.pieces, strict=True)
        }
        for name, p in self.module.named_parameters(*args, **kwargs):
            yield name, pieces.get(p, p)

    def rest(self):
        """Nothing is gathered."""
        for flat in self.flats:
            flat.free()

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for flat in self.flats:
            flat.drop_cleared()

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Clip the norm of the gradients of all ranks' pieces to max_norm; returns the norm before.

        Collective. As torch.nn.utils.clip_grad_norm_ on the averaged gradients in one process.
        """
        if any(flat.kept for flat in self.flats):
            raise RuntimeError(
                "what no_sync() keeps has not been averaged: clip after a backward outside of it"
            )
        group, device = self.sharding.group, self.sharding.device
        pieces = [p for flat in self.flats for p in flat.pieces]
        copies = dict.fromkeys(pieces, 1)
        copies |= dict.fromkeys(self.replicated, dist.get_world_size(group))
        return clip_grad_norm_(copies, max_norm, norm_type, group, device)

    # ---- state dicts

    def state_dict(self, *args, **kwargs):
        """This rank's pieces, and buffers, by the module's own names. Whole: full_state_dict()."""
        self.rest()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """Of this rank, from as many ranks; of other numbers: load_shards, load_full_state_dict."""
        self.rest()
        return super().load_state_dict(state_dict, strict, assign)

    def full_state_dict(self):
        """module.state_dict() as if never sharded, on every rank; buffers: rank 0's. Collective."""
        self.rest()
        broadcast_tensors(list(self.module.buffers()), 0, self.sharding.everyone)
        try:
            for flat in self.flats:
                # Copies: each tensor alone in its memory, without padding, as files want them.
                flat.put(
                    [nn.Parameter(value.clone(), flat.trainable) for value in flat.gather_master()]
                )
            return self.module.state_dict()  # the module's own: its hooks and extra state included
        finally:
            for flat in self.flats:
                flat.put(flat.pieces)

    def load_full_state_dict(self, state_dict, strict=True):
        """Take this rank's part of each whole value. Every rank must be given all.

        From any number of ranks, or none. Returns what module.load_state_dict returns. Raises
        RuntimeError, before anything is changed, with every wrong shape and, if strict, every
        missing and unexpected name.
        """
        self.rest()
        homes = self._homes()
        own = self.module.state_dict().keys()
        given = {plain_name(name, own): value for name, value in state_dict.items()}
        problems = [f"missing {name!r}" for name in own if name not in given and strict]
        problems += [f"unexpected {name!r}" for name in given if name not in own and strict]
        for name, value in given.items():
            if name in homes:
                flat, slot = homes[name]
                shape = flat.layout.shapes[slot]
                if value.shape != shape:
                    problems.append(f"{name!r} is {list(value.shape)} and should be {list(shape)}")
                begin, end = flat.layout.ranges(flat.rank)[slot]
                given[name] = value.flatten()[begin:end]
        if problems:
            raise RuntimeError(
                f"not a state dict of this {type(self.module).__name__}: {'; '.join(problems)}"
            )
        return self.module.load_state_dict(given, strict)

    def load_shards(self, state_dicts, strict=True):
        """Take what n ranks saved as state_dict(), in order of rank, for whatever world size."""
        given = dict(state_dicts[0])
        for name, (flat, slot) in self._homes().items():
            if name in given:
                whole, shape = (
                    torch.cat([state[name] for state in state_dicts]),
                    flat.layout.shapes[slot],
                )
                if whole.numel() != shape.numel():
                    raise RuntimeError(
                        f"{name!r} has {shape.numel()} elements, these {len(state_dicts)} state "
                        f"dicts have {whole.numel()} of it: "
                        "give that of every rank that saved, once, in order"
                    )
                given[name] = whole.view(shape)
        return self.load_full_state_dict(given, strict)

    def places(self):
        """{name: (start, stop, shape)}: which elements of the whole, flat, this rank's piece is."""
        self.rest()
        return {
            name: (*flat.layout.ranges(flat.rank)[slot], tuple(flat.layout.shapes[slot]))
            for name, (flat, slot) in self._homes().items()
        }

    def _homes(self):
        """{name: (its FlatParam, its number there)}, by every name that a tied parameter has."""
        homes = {
            piece: (flat, slot) for flat in self.flats for slot, piece in enumerate(flat.pieces)
        }
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: homes[p] for name, p in named if p in homes}

    # ---- what moves or copies all parameters

    def apply(self, fn):
        """nn.Module.apply on whole parameters, so that an initialiser draws as in one process.

        Collective. Values become rank 0's. Held meanwhile: the whole model. Returns self.
        """
        self.rest()
        try:
            for flat in self.flats:
                flat.put([nn.Parameter(one, flat.trainable) for one in flat.gather_master()])
            super().apply(fn)
            for flat in self.flats:
                flat.take_whole()
            broadcast_tensors([*self.replicated, *self.buffers()], 0, self.sharding.everyone)
        finally:
            for flat in self.flats:
                flat.put(flat.pieces)
        return self

    def _apply(self, fn, recurse=True):
        """to(), double(), cuda(): the pieces have moved, so their shards must."""
        self.rest()
        super()._apply(fn, recurse)
        self.sharding = replace(
            self.sharding, device=compute_device(self.module, self.sharding.everyone)
        )
        for flat in self.flats:
            flat.renew(self.sharding)
        self.watch_root()
        return self
