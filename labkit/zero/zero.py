"""ZeRO: data parallelism without the copies: each rank has one part of the optimizer states.

                parameters   gradients    optimizer states        rank 0 of 4: # held   . given up
    DDP          [########]   [########]   [########|########]
    ZeRO-1       [########]   [########]   [##......|##......]
    ZeRO-2       [########]   [##......]   [##......|##......]
    ZeRO-3       [##......]   [##......]   [##......|##......]     labkit/fsdp/fsdp.py

    backward   reduce_scatter, a bucket at a time: each rank gets the mean of its part alone
    step       update the own part, all_gather the parameters in place

n ranks; P, G, S: bytes of parameters, gradients, optimizer states. Sent per rank and step: (n-1)/n
(G + P), as much as DDP's 2 (n-1)/n G, as G = P. Held per rank: P + G + S/n (ZeRO-1), P + (G + S)/n
+ the buckets on their way (ZeRO-2). Rajbhandari et al., ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models, SC 2020, sections 5 and 7.
"""

import torch
from torch.autograd import Variable

from labkit import comm
from labkit.ddp.no_sync import NoSync
from labkit.ddp.reducer import watchers
from labkit.replicas import broadcast_tensors, check_ranks
from labkit.zero.clip import clip_grad_norm_
from labkit.zero.elementwise import check_elementwise
from labkit.zero.sharded_optimizer import ShardedOptimizer
from labkit.zero.sharded_reducer import Scatterer
from labkit.zero.zero_state_dict import options_of


class ZeRO1(NoSync, ShardedOptimizer):
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
        overlap = not any(map(watchers, names))  # a DDP around the model averages first: wait
        cap_bytes = int(bucket_cap_mb * 2**20)
        self._reducer = Scatterer(
            trainable, self, process_group, cap_bytes, overlap, self.keeps_gradients
        )
        self._armed = False  # a backward is under way, and will call _end_backward
        self._cut(optimizer_class, defaults)

    @property
    def buckets(self):
        """The list of ShardedBucket, in the order in which they leave."""
        return self._reducer.buckets

    # ---- backward

    def on_gradient(self, index, slot):
        """The gradient of a parameter is complete."""
        if not self.require_backward_grad_sync:
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

    def _finish(self):
        if self._reducer.started:
            self._reducer.finish()

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


class ZeRO2(ZeRO1):
    """ZeRO1 that frees each bucket's gradients once averaged: then p.grad is None, pieces hold all.

    Under no_sync() gradients stay whole in p.grad, until a backward averages.
    """

    keeps_gradients = False
