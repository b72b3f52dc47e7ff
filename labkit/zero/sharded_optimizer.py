"""An optimizer of pieces, from outside: groups, names and states are those of whole parameters.

    given          [ w1  b1 ] [ w2 ]              groups, the same on every rank, or an error
    param_groups   rank 0   [ w1' ] []            pieces, cut once: what schedulers, GradScaler and
                   rank 1   [ w1'' b1 ] [ w2 ]    the optimizer inside look at
    state_dict     [ w1  b1 ] [ w2 ]              whole, as if never sharded; loads on any n ranks

Parameters that are added, moved to other memory, or unfrozen after the cut are told, not ignored.
Rajbhandari et al., ZeRO, SC 2020, section 5.1.
"""

import torch

from labkit.ddp.reducer import watchers
from labkit.pickle_support import NotPickled
from labkit.replicas import check_agreement, check_memory
from labkit.zero.zero_state_dict import gather_state, options_of, slice_state


class ShardedOptimizer(NotPickled, torch.optim.Optimizer):
    """Base of ZeRO: what does not belong to a step.

    Subclasses have process_group, and buckets, a list of ShardedBucket; they call _agree(), make
    the buckets, and call _cut().
    """

    instead = "state_dict() (collective, whole)"
    _inner = None  # until _cut()

    def _agree(self, settings):
        """{parameter: its name}, in order. Collective: ValueError where the ranks do not agree."""
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
            if any(isinstance(owner, ShardedOptimizer) for owner in watchers(p)):
                raise ValueError(
                    f"{name!r} is in another {type(self).__name__} already: delete that one first"
                )
        self._frozen = {p: name for p, name in names.items() if not p.requires_grad}
        return names

    def _cut(self, optimizer_class, defaults):
        """Make the optimizer inside, of this rank's pieces in groups as given, without names."""
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
        """What schedulers, GradScaler and trackers look at is what the inner optimizer works on."""
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self.defaults = self._inner.defaults

    def add_param_group(self, param_group):
        """Only while it is constructed. Raises RuntimeError afterwards."""
        if self._inner is not None:
            raise RuntimeError(
                f"{type(self).__name__} cuts its parameters once: construct a new one with all "
                "groups, and load this one's state_dict() into it"
            )
        super().add_param_group(param_group)

    def _check_members(self):
        """Raise RuntimeError where parameters or gradients are not what the cut left to step()."""
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
        """Whether its pieces are ranges of elements: not of a channels_last parameter."""
        return all(p.is_contiguous() for bucket in self.buckets for p in bucket.members)

    def parts(self):
        """What this rank has: (optimizer, groups of whole parameters, {p: (piece, start, stop)}).

        start, stop: which elements of p, in the order in which memory has them.
        """
        cut = {}
        for bucket in self.buckets:
            ranges = bucket.layout.ranges(bucket.rank)
            for p, piece, where in zip(bucket.members, bucket.pieces, ranges, strict=True):
                if piece is not None:
                    cut[p] = (piece, *where)
        return self._inner, self._whole_groups, cut

    def state_dict(self):
        """The state of the unsharded optimizer, whole, on every rank. Collective.

        What optimizer_class on all parameters would return: loads there, and here on any n ranks.
        """
        return gather_state(
            self._inner, self._whole_groups, self._pieces, self.buckets, self.process_group
        )

    def load_state_dict(self, state_dict):
        """Take this rank's part of a whole state_dict(), ours or optimizer_class's. Sends nothing.

        Raises ValueError where groups or shapes are not those of these parameters.
        """
        self.load_parts(slice_state(state_dict, self._whole_groups, self._pieces, self.buckets))

    def load_parts(self, state_dict):
        """Take a state_dict() of the optimizer in parts()."""
        self._inner.load_state_dict(state_dict)
        self._share()
