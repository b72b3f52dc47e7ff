"""ZeRO: data parallelism without the copies: each rank has one part of the optimizer states.

                parameters   gradients    optimizer states        rank 0 of 4: # held   . given up
    DDP          [########]   [########]   [########|########]
    ZeRO-1       [########]   [########]   [##......|##......]
    ZeRO-2       [########]   [##......]   [##......|##......]
    ZeRO-3       [##......]   [##......]   [##......|##......]     labkit/fsdp.py

    backward   reduce_scatter, a bucket at a time: each rank gets the mean of its part alone
    step       update the own part, all_gather the parameters in place

Sent per rank and step: (n-1)/n (G + P), where DDP's all_reduce sends 2 (n-1)/n G: the same, as
G = P bytes. Held per rank: P + G + S/n (ZeRO-1), P + (G + S)/n + the buckets on their way (ZeRO-2).
Padding: < n elements a bucket. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models, SC 2020, sections 5 and 7.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.autograd import Variable

from labkit import comm
from labkit.parts.clip import clip_grad_norm_
from labkit.parts.consolidate import gather_state, options_of, slice_state
from labkit.parts.elementwise import check_elementwise
from labkit.parts.pickling import NotPickled
from labkit.parts.reducer import watchers
from labkit.parts.replicas import broadcast_tensors, check_agreement
from labkit.parts.scatter import Scatterer
from labkit.parts.shard import padded


def shard_states(parameters, optimizer_class, group=None, **options):
    """The idea of ZeRO-1: each rank has the states of one part of all parameters.

    Call what this returns in place of optimizer.step.
    """
    parameters, n = list(parameters), dist.get_world_size(group)
    flat = padded(torch.cat([p.detach().flatten() for p in parameters]), n)
    sizes = [p.numel() for p in parameters]
    for p, place in zip(parameters, flat[: sum(sizes)].split(sizes), strict=True):
        p.data = place.view_as(p)
    own = flat.chunk(n)[dist.get_rank(group)]
    optimizer = optimizer_class([own], **options)

    def step():
        gradients = padded(torch.cat([p.grad.flatten() for p in parameters]), n)
        own.grad = torch.empty_like(own)
        comm.reduce_scatter(own.grad, gradients, group=group)
        own.grad /= n
        optimizer.step()
        comm.all_gather(flat, own, group=group)

    return step


def shard_gradients(parameters, optimizer_class, group=None, **options):
    """The idea of ZeRO-2: of each gradient, too, only this rank's part is kept.

    Call what this returns in place of optimizer.step.
    """
    n, pieces = dist.get_world_size(group), []
    for p in parameters:
        flat = padded(p, n)
        p.data = flat[: p.numel()].view_as(p)
        own = flat.chunk(n)[dist.get_rank(group)]

        def keep_own_part(p, own=own):
            own.grad = torch.empty_like(own)
            comm.reduce_scatter(own.grad, padded(p.grad, n), group=group)
            own.grad /= n
            p.grad = None

        p.register_post_accumulate_grad_hook(keep_own_part)
        pieces.append((flat, own))
    optimizer = optimizer_class([own for _, own in pieces], **options)

    def step():
        optimizer.step()
        for flat, own in pieces:
            comm.all_gather(flat, own, group=group)

    return step


class ZeRO1(NotPickled, torch.optim.Optimizer):
    """optimizer_class over parameters that all ranks hold, with the states sharded.

    optimizer_class: elementwise, from torch.optim or like it. defaults: its options.
    params: parameters, (name, parameter) pairs or groups, as for any torch optimizer.
    bucket_cap_mb: MiB of gradients per message.
    Construct it on all ranks, after the model is on its device: parameters become those of rank 0,
    and views of flat buffers. No DDP is needed: backward averages the gradients.

    param_groups hold this rank's pieces, 1-D, whose .grad after backward is the mean over the
    ranks. A parameter's own .grad is then whole, but only this rank's part of it is the mean. So
    clip with clip_grad_norm_ of this class, and clear with zero_grad of this class. A parameter
    without a gradient on a rank counts as zero there, and one without on every rank is stepped with
    zero, so momentum and weight decay may move it: freeze what is not to be trained.

    Raises ValueError, on every rank, if the parameters differ between ranks, none is to be trained,
    or optimizer_class is not elementwise.
    """

    keeps_gradients = True  # whole, after they have been averaged
    instead = "state_dict() (collective, whole)"

    def __init__(self, params, optimizer_class, process_group=None, bucket_cap_mb=25, **defaults):
        name = type(self).__name__
        if not dist.is_initialized():
            raise RuntimeError(
                f"{name} needs ranks: call torch.distributed.init_process_group first"
            )
        if dist.get_rank(process_group) < 0:
            raise ValueError(
                f"this rank is not in process_group: construct {name} on the group's ranks only"
            )
        if bucket_cap_mb < 0:
            raise ValueError(f"bucket_cap_mb must be at least 0, not {bucket_cap_mb}")
        self._sealed = False
        super().__init__(params, defaults)  # reads parameters, pairs and groups as torch does
        self.process_group = process_group
        self._whole_groups = self.param_groups
        settings = f"{name}, {optimizer_class.__name__}, {bucket_cap_mb=}, {defaults}"
        names = self._check(settings)
        for group in self._whole_groups:
            check_elementwise(
                optimizer_class, defaults, options_of(group), next(iter(names)).device
            )
        broadcast_tensors([p.detach() for p in names], 0, process_group)
        trainable = [(name, p) for p, name in names.items() if p.requires_grad]
        self._frozen = {p: name for p, name in names.items() if not p.requires_grad}
        self._average = True
        self._armed = False
        overlap = not any(map(watchers, names))  # a DDP around the model averages first: wait
        cap_bytes = int(bucket_cap_mb * 2**20)
        self._reducer = Scatterer(
            trainable, self, process_group, cap_bytes, overlap, self.keeps_gradients
        )
        pairs = [
            pair
            for bucket in self.buckets
            for pair in zip(bucket.members, bucket.pieces, strict=True)
        ]
        self._pieces = {p: piece for p, piece in pairs if piece is not None}
        self._inner = optimizer_class(
            [self._cut(group) for group in self._whole_groups], **defaults
        )
        self._sealed = True
        self._share()

    def _check(self, settings):
        """{parameter: its name}, in order. Collective: ValueError where the ranks do not agree."""
        names, lines = {}, [f"settings {settings}"]
        for number, group in enumerate(self._whole_groups):
            for place, p in enumerate(group["params"]):
                name = (
                    group["param_names"][place]
                    if "param_names" in group
                    else f"parameter {len(names)}"
                )
                names[p] = name
                trainable = "trainable" if p.requires_grad else "fixed"
                shape = f"{p.dtype} {list(p.shape)}, strides {list(p.stride())}"
                lines.append(f"{name!r} of group {number}: {shape}, {trainable}")
        check_agreement(lines, self.process_group, next(iter(names)).device if names else "cpu")
        if not any(p.requires_grad for p in names):
            raise ValueError(f"{type(self).__name__}: no parameter requires a gradient")
        for p, name in names.items():
            if any(isinstance(owner, ZeRO1) for owner in watchers(p)):
                raise ValueError(
                    f"{name!r} is in another {type(self).__name__} already: delete that one first"
                )
        return names

    def _cut(self, group):
        """The group with this rank's pieces, perhaps none, for the parameters; without names."""
        return {
            **options_of(group),
            "params": [self._pieces[p] for p in group["params"] if p in self._pieces],
        }

    def _share(self):
        """What schedulers, GradScaler and trackers look at is what the inner optimizer works on."""
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self.defaults = self._inner.defaults

    @property
    def buckets(self):
        """The list of ShardedBucket, in the order in which they leave."""
        return self._reducer.buckets

    def add_param_group(self, param_group):
        """Only while it is constructed. Raises RuntimeError afterwards."""
        if self._sealed:
            raise RuntimeError(
                f"{type(self).__name__} cuts its parameters once: construct a new one with all "
                "groups, and load this one's state_dict() into it"
            )
        super().add_param_group(param_group)

    # ---- backward

    @contextmanager
    def no_sync(self):
        """Backwards in this block add to this rank's p.grad; the next averages the whole sum."""
        before, self._average = self._average, False
        try:
            yield
        finally:
            self._average = before

    def on_gradient(self, index, slot):
        """The gradient of a parameter is complete."""
        if not self._average:
            return self._reducer.keep(index, slot)
        if not self._armed:
            self._armed = True
            Variable._execution_engine.queue_callback(self._end_backward)
        elif self.buckets[index].arrived[slot] and self._reducer.overlap:
            raise RuntimeError(
                f"{self.buckets[index].names[slot]!r} got a gradient twice before the "
                "gradients were averaged: if a backward has raised an error, call zero_grad() of "
                "this optimizer before the next one; else checkpoint what uses the parameter "
                "several times with use_reentrant=False"
            )
        self._reducer.arrive(index, slot)

    def _end_backward(self):
        self._armed = False
        # Reentrant checkpointing runs backwards inside a backward: the end of such a one is no end.
        inside = torch._C._current_autograd_node() is not None
        if not inside or (
            self._reducer.overlap and not any(bucket.missing for bucket in self.buckets)
        ):
            self._finish()

    @torch.no_grad()
    def _finish(self):
        """Send what has not left, wait for everything."""
        if self._reducer.started:
            self._reducer.launch_rest()
            self._reducer.wait()

    @torch.no_grad()
    def zero_grad(self, set_to_none=True):
        """Clear the gradients of parameters and pieces; ends a backward that has raised, too."""
        if self._reducer.started:
            self._reducer.abandon()
        self._armed = False
        for bucket in self.buckets:
            bucket.clear(set_to_none)

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale all gradients so that their norm is at most max_norm; returns the norm before.

        Collective: the norm is over all ranks' pieces. As torch.nn.utils.clip_grad_norm_ on the
        averaged gradients in one process.
        """
        self._finish()
        pieces = list(self._pieces.values())
        return clip_grad_norm_(
            pieces, [], max_norm, norm_type, self.process_group, self.buckets[0].device
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
        self._inner.load_state_dict(
            slice_state(state_dict, self._whole_groups, self._pieces, self.buckets)
        )
        self._share()


class ZeRO2(ZeRO1):
    """ZeRO1 that frees each bucket's gradients once averaged: then p.grad is None, pieces hold all.

    Under no_sync() gradients stay whole in p.grad, until a backward averages.
    """

    keeps_gradients = False
