"""ZeRO: data parallelism in which each rank keeps one shard of the optimizer states.

                parameters   gradients    optimizer states        rank 0 of 4: # held   . freed
    DDP          [########]   [########]   [########|########]
    ZeRO-1       [########]   [########]   [##......|##......]
    ZeRO-2       [########]   [##......]   [##......|##......]
    ZeRO-3       [##......]   [##......]   [##......|##......]     labkit/fsdp/fsdp.py

    backward   reduce_scatter, a bucket at a time: each rank gets the mean of its shard
    step       update the own shard, all_gather the parameters in place

n ranks; P, G, S: bytes of parameters, gradients, optimizer states. Sent per rank and step: (n-1)/n
(G + P), as much as DDP's 2 (n-1)/n G, as G = P. Held per rank: P + G + S/n (ZeRO-1), P + (G + S)/n
+ the buckets on their way (ZeRO-2). Rajbhandari et al., ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models, SC 2020, sections 5 and 7.
"""

import torch

from labkit import comm
from labkit.amp.master_weights import MasterWeights
from labkit.ddp.no_sync import NoSync
from labkit.ddp.reducer import watchers
from labkit.pickle_support import NotPickled
from labkit.replicas import broadcast_tensors, check_agreement, check_memory, check_ranks
from labkit.torch_private import call_after_backward, in_node
from labkit.zero.clip import clip_grad_norm_
from labkit.zero.elementwise_check import check_elementwise
from labkit.zero.sharded_reducer import Scatterer
from labkit.zero.zero_state_dict import gather_state, options_of, slice_state


class ZeRO1(NoSync, NotPickled, torch.optim.Optimizer):
    """An optimizer over parameters that all ranks hold, with the optimizer states sharded.

    optimizer_class: elementwise, from torch.optim or like it. defaults: its options.
    params: parameters, (name, parameter) pairs or groups, as for any torch optimizer.
    bucket_cap_mb: MiB of gradients per message.
    Construct it on all ranks, after the model is on its device. Parameters get the values of rank
    0, and become views of flat buffers. Do not wrap the model in DDP: backward averages gradients.

    param_groups hold this rank's pieces, 1-D. After backward their .grad is the mean over the
    ranks. A parameter's own .grad has its full shape, but only this rank's shard of it is the mean.
    So use clip_grad_norm_ and zero_grad of this class. A parameter without a gradient counts as
    zero on that rank. Without a gradient on every rank it is stepped with zero, so momentum and
    weight decay may change it: freeze parameters that are not trained.

    Raises ValueError, on every rank, if the parameters differ between ranks, if none requires a
    gradient, or if optimizer_class is not elementwise.
    """

    keeps_gradients = True  # keep full gradients after they have been averaged
    instead = "state_dict() (collective, whole)"
    _inner = None  # until _cut()

    def __init__(self, params, optimizer_class, process_group=None, bucket_cap_mb=25, **defaults):
        name = type(self).__name__
        check_ranks(name, process_group)
        super().__init__(params, defaults)  # reads parameters, pairs and groups as torch does
        self.process_group = process_group
        names = self._agree(f"{name}, {optimizer_class.__name__}, {bucket_cap_mb=}, {defaults}")
        device = next(iter(names)).device
        for group in self.param_groups:
            check_elementwise(optimizer_class, defaults, options_of(group), device)
        broadcast_tensors([p.detach() for p in names], 0, process_group)
        trainable = [(name, p) for p, name in names.items() if p.requires_grad]
        overlap = not any(map(watchers, names))  # a DDP around the model averages first
        cap_bytes = int(bucket_cap_mb * 2**20)
        self._reducer = Scatterer(
            trainable, self, process_group, cap_bytes, overlap, self.keeps_gradients
        )
        self._armed = False  # a backward is running and will call _end_backward
        self._cut(optimizer_class, defaults)

    @property
    def buckets(self):
        """The list of ShardedBucket, in the order in which they are sent."""
        return self._reducer.buckets

    def _agree(self, settings):
        """Return {parameter: name} in order. Collective; ValueError if the ranks do not agree."""
        self._whole_groups = self.param_groups
        names, lines = {}, [f"settings {settings}"]
        for number, group in enumerate(self._whole_groups):
            for place, p in enumerate(group["params"]):
                given = group.get("param_names")
                names[p] = given[place] if given else f"parameter {len(names)}"
                trainable = "trainable" if p.requires_grad else "fixed"
                shape = f"{p.dtype} {list(p.shape)}, strides {list(p.stride())}"
                lines.append(f"{names[p]!r} of group {number}: {shape}, {trainable}")
        check_agreement(lines, self.process_group, next(iter(names)).device if names else "cpu")
        check_memory([(name, p) for p, name in names.items()], type(self).__name__)
        if not any(p.requires_grad for p in names):
            raise ValueError(f"{type(self).__name__}: no parameter requires a gradient")
        for p, name in names.items():
            if any(isinstance(owner, ZeRO1) for owner in watchers(p)):
                raise ValueError(
                    f"{name!r} is in another {type(self).__name__} already: delete that one first"
                )
        self._frozen = {p: name for p, name in names.items() if not p.requires_grad}
        return names

    def _cut(self, optimizer_class, defaults):
        """Make the inner optimizer over this rank's pieces, in the given groups, without names."""
        self._pieces = {
            p: piece
            for bucket in self.buckets
            for p, piece in zip(bucket.members, bucket.pieces, strict=True)
            if piece is not None
        }
        groups = [
            options_of(group)
            | {"params": [self._pieces[p] for p in group["params"] if p in self._pieces]}
            for group in self._whole_groups
        ]
        self._inner = optimizer_class(groups, **defaults)
        self._share()

    def _share(self):
        """Show schedulers, GradScaler and trackers the groups and states of the inner optimizer."""
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self.defaults = self._inner.defaults

    def add_param_group(self, param_group):
        """Raise RuntimeError: groups can be added only during construction."""
        if self._inner is not None:
            raise RuntimeError(
                f"{type(self).__name__} shards its parameters once: construct a new one with all "
                "groups, and load this one's state_dict() into it"
            )
        super().add_param_group(param_group)

    # ---- backward

    def on_gradient(self, index, slot):
        """Called when the gradient of a parameter is complete."""
        if not self.require_backward_grad_sync:
            return self._reducer.keep(index, slot)
        if not self._armed:
            self._armed = True
            call_after_backward(self._end_backward)
        elif self.buckets[index].arrived[slot] and self._reducer.overlap:
            raise RuntimeError(
                f"{self.buckets[index].names[slot]!r} got a gradient twice before the "
                "gradients were averaged: if a backward has raised an error, call zero_grad() of "
                "this optimizer before the next one; otherwise checkpoint modules that share the "
                "parameter with use_reentrant=False"
            )
        self._reducer.arrive(index, slot)

    def _end_backward(self):
        self._armed = False
        # Reentrant checkpointing runs backwards inside a backward, whose ends do not count.
        inside = in_node()
        if not inside or (
            self._reducer.overlap and not any(bucket.missing for bucket in self.buckets)
        ):
            self._finish()

    def _finish(self):
        if self._reducer.started:
            self._reducer.finish()

    @torch.no_grad()
    def zero_grad(self, set_to_none=True):
        """Clear the gradients of parameters and pieces. Also ends a backward that has raised."""
        if self._reducer.started:
            self._reducer.abandon()
        self._armed = False
        for bucket in self.buckets:
            bucket.clear(set_to_none)

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale all gradients so that their norm is at most max_norm; return the norm before.

        Collective: the norm is over all ranks' pieces. As torch.nn.utils.clip_grad_norm_ on the
        averaged gradients in one process.
        """
        self._finish()
        copies = dict.fromkeys(self._pieces.values(), 1)
        return clip_grad_norm_(
            copies, max_norm, norm_type, self.process_group, self.buckets[0].device
        )

    # ---- step

    def step(self, closure=None):
        """Update this rank's pieces, gather the parameters. Collective. closure: as in torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._finish()
        self._check_members()
        self._inner.step()
        full = [bucket for bucket in self.buckets if bucket.numel]
        for work in [
            comm.all_gather(b.values, b.shard(), self.process_group, async_op=True) for b in full
        ]:
            work.wait()
        # They changed through their buffers: autograd must notice where it holds an old value.
        torch.autograd.graph.increment_version([p for b in self.buckets for p in b.members])
        return loss

    def _check_members(self):
        """Raise RuntimeError if parameters or gradients were replaced or changed since backward."""
        for bucket in self.buckets:
            for slot, (name, p) in enumerate(zip(bucket.names, bucket.members, strict=True)):
                if p.data_ptr() != bucket.homes[slot].data_ptr():
                    raise RuntimeError(
                        f"{name!r} has moved to other memory since {type(self).__name__} was "
                        "constructed: move or convert the model first (to(), half()), then "
                        "construct the optimizer"
                    )
                if not bucket.is_averaged(slot):
                    raise RuntimeError(
                        f"the gradient of {name!r} is not the average, or was changed after it: "
                        "end accumulation with a backward outside no_sync(), clip with "
                        "clip_grad_norm_ of this optimizer, and leave the averaging to "
                        f"{type(self).__name__} (no PyTorch DDP around the model)"
                    )
        for p, name in self._frozen.items():
            if p.grad is not None:
                raise RuntimeError(
                    f"{name!r} was unfrozen after {type(self).__name__} was constructed: "
                    "do it before"
                )

    # ---- state

    def has_ranges(self):
        """Whether all pieces are ranges of elements: not so for channels_last parameters."""
        return all(p.is_contiguous() for bucket in self.buckets for p in bucket.members)

    def parts(self):
        """Return (inner optimizer, groups of full parameters, {p: (piece, start, stop)}).

        start, stop: the range of elements of p, in memory order.
        """
        cut = {}
        for bucket in self.buckets:
            ranges = bucket.layout.ranges(bucket.rank)
            for p, piece, where in zip(bucket.members, bucket.pieces, ranges, strict=True):
                if piece is not None:
                    cut[p] = (piece, *where)
        return self._inner, self._whole_groups, cut

    def state_dict(self):
        """Return the state of the unsharded optimizer, on every rank. Collective.

        The format is that of optimizer_class over all parameters: it loads there, and here on any
        number of ranks.
        """
        return gather_state(
            self._inner, self._whole_groups, self._pieces, self.buckets, self.process_group
        )

    def load_state_dict(self, state_dict):
        """Load this rank's shard of a full state_dict(), of this class or optimizer_class.

        Sends nothing. Raises ValueError if groups or shapes differ from these parameters.
        """
        self.load_parts(slice_state(state_dict, self._whole_groups, self._pieces, self.buckets))

    def load_parts(self, state_dict):
        """Load a state_dict() of the optimizer in parts()."""
        self._inner.load_state_dict(state_dict)
        self._share()


class ZeRO2(ZeRO1):
    """ZeRO1 that frees each bucket's gradients once averaged: p.grad is None, the pieces hold them.

    Under no_sync() full gradients stay in p.grad until a backward averages.
    """

    keeps_gradients = False


def refuse_copies(name, optimizer):
    """Raise ValueError where the optimizer works on copies or pieces of the model's parameters.

    name: of the class that would treat those as the model's own.
    """
    pieces = any(
        hasattr(p, "is_piece") for group in optimizer.param_groups for p in group["params"]
    )
    if pieces or isinstance(optimizer, MasterWeights | ZeRO1):
        kind = "an optimizer of FSDP's shards" if pieces else type(optimizer).__name__
        raise ValueError(
            f"{name} cannot wrap {kind}: it needs a torch.optim optimizer of the model's own, "
            "whole parameters"
        )
