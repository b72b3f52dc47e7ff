"""A flat parameter: the parameters of one unit as one sharded tensor, unsharded while in use.

                     gather()                use()                   free()
    shard   [ w1 | b1 ] --- all_gather -->  [ w1 | b1 | w2 | b2 ]  ------------->  [ w1 | b1 ]
    modules have:  pieces, 1-D views        full parameters                        pieces
                     launch_reduce()          settle()                   deliver()
    full gradients  -- / n -->  [ flat ]  -- reduce_scatter -->  [ shard ]  -->  .grad of the pieces

The full parameters are the same leaf tensors in every step; only their memory is allocated and
freed. So autograd can save them for backward as usual, and finds the values there again when the
unit has been gathered a second time.

Sent per rank: (n-1)/n x bytes, for each gather and for each reduction. Held: 1/n at rest. With a
folder for offload, the shard and its gradient are in an unnamed mapped file there: a gather on the
CPU sends from it, and an optimizer on the CPU computes in it.
Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023, sections
3.2 and 4.2; Rajbhandari et al., ZeRO-Infinity, SC 2021, section 5.1 (shards on NVMe).
"""

import torch
import torch.distributed as dist
from torch import nn

from labkit import comm
from labkit.collective_errors import raised_on_all
from labkit.gloo_workarounds import FAKE_GLOO
from labkit.offload.pinned_memory import room
from labkit.zero.flat_shards import Layout, mark_shard


def to_host(tensor):
    """Return the tensor in host memory, pinned if it comes from a GPU."""
    if tensor.is_cuda:
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
    return tensor.cpu()


def to_device(tensor, device):
    """Return the tensor on the device. From pinned memory, the copy is asynchronous."""
    return tensor.to(device, non_blocking=True)


class FlatParam:
    """Parameters of one dtype, all trainable or all frozen. Collective: they take rank 0's values.

    names: list of str. places: for each parameter its (module, attribute) pairs; tied parameters
    have several. sharding: a Sharding of sharding_strategy.py. Afterwards the modules have the
    pieces as parameters; from use() to free(), the full parameters.
    """

    def __init__(self, names, places, sharding):
        self.names, self.places, self.sharding = names, places, sharding
        values = [getattr(*first) for first, *_ in places]
        self.trainable = values[0].requires_grad
        self.rank = dist.get_rank(sharding.group)
        self.layout = Layout([value.shape for value in values], dist.get_world_size(sharding.group))
        flat = torch.empty(self.layout.padded, dtype=values[0].dtype, device=sharding.device)
        comm.broadcast(self.layout.flatten(values, flat), 0, sharding.everyone)
        shard = self.layout.shard(flat, self.rank).clone()
        self.pieces = [nn.Parameter(torch.empty_like(shard[:0]), self.trainable) for _ in values]
        self.put(self.pieces)
        del values, flat  # free full values: a model too large for a rank is built unit by unit
        self._hold(shard)
        # As a float64 scalar tensor it changes no gradient's dtype.
        self.factor = torch.tensor(
            1.0 / dist.get_world_size(sharding.everyone), dtype=torch.float64
        )
        # A reduce_scatter on gloo keeps its data twice: wait, to avoid those of another unit.
        self._waits = dist.get_backend(sharding.group) in ("gloo", FAKE_GLOO)
        self.whole = False  # whether the modules have the full parameters
        self.kept = {}  # slot -> (what keep() gave the piece as gradient, its version)
        self._gathering = self._reducing = None  # the running collective, and its memory
        self._reduced = []  # (shard of gradients, all_reduce across or None), not yet delivered

    def _hold(self, shard):
        """Keep this shard, and create the full parameters without memory."""
        sharding = self.sharding
        self._grads = [None] * len(self.pieces)  # memory for the pieces' gradients, in a file
        if sharding.folder:
            shard, gradient = self._map(shard)
            self._grads = self.layout.pieces(gradient, self.rank)
        elif sharding.offload:
            shard = to_host(shard)
        self.shard = shard
        views = self.layout.pieces(shard, self.rank)
        self._sizes = [view.numel() for view in views]
        self._sizes.append(shard.numel() - sum(self._sizes))  # the padding
        for piece, view in zip(self.pieces, views, strict=True):
            piece.data = view
            piece.is_piece = True
            mark_shard(piece)
        self._addresses = [view.data_ptr() for view in views]
        dtype = (
            sharding.param_dtype
            if sharding.param_dtype and shard.is_floating_point()
            else shard.dtype
        )
        self.flat = torch.empty(self.layout.padded, dtype=dtype, device=sharding.device)
        self.wholes = [nn.Parameter(view, self.trainable) for view in self.layout.views(self.flat)]
        # .data has its own version: refilling it is no in-place change of saved tensors.
        self._filled, self._memory = self.flat.data, self.flat.untyped_storage()
        self._memory.resize_(0)

    def _map(self, shard):
        """Return the shard in a file, and a gradient's place in the same file. Collective."""
        sharding = self.sharding
        with raised_on_all(sharding.everyone, sharding.device):
            file = room(2 * shard.nbytes, sharding.folder, sharding.device)
        both = file.view(shard.dtype)
        return both[: shard.numel()].copy_(shard), both[shard.numel() :]

    def put(self, parameters):
        """Set these as the modules' parameters, one for each parameter."""
        for places, p in zip(self.places, parameters, strict=True):
            for module, attribute in places:
                module._parameters[attribute] = p  # setattr's checks cost more than the launch

    # ---- parameters

    def gather(self):
        """Launch the all_gather of the full parameters, unless it is launched already."""
        if self.whole or self._gathering:
            return
        self._memory.resize_(self.flat.nbytes)
        # Copied only if dtype or device differ: usually the shard itself is sent. First to the
        # device, because a cast on the host would allocate memory that is not pinned.
        source = self.shard
        if self.sharding.offload:
            source = to_device(source, self.flat.device)
        source = source.to(self.flat.dtype)
        self._gathering = (
            comm.all_gather(self._filled, source, self.sharding.group, async_op=True),
            source,
        )

    def use(self):
        """Wait for the full parameters and set them in the modules."""
        if not self.whole:
            self._gathering[0].wait()
            self._gathering, self.whole = None, True
            self.put(self.wholes)

    def free(self):
        """Set the pieces in the modules, and free the memory of the full parameters."""
        if self._gathering:  # it was prefetched, and not needed
            self._gathering[0].wait()
        elif not self.whole:
            return
        self._gathering, self.whole = None, False
        self.put(self.pieces)
        self._memory.resize_(0)

    def check(self):
        """Raise RuntimeError if other code has replaced the pieces by other tensors."""
        for name, places, piece, address in zip(
            self.names, self.places, self.pieces, self._addresses, strict=True
        ):
            for module, attribute in places:
                if module._parameters.get(attribute) is not piece:
                    raise RuntimeError(
                        f"{name!r} was replaced behind FSDP: "
                        "assign before constructing FSDP, or copy_()"
                    )
            if piece.data_ptr() != address and piece.numel():
                raise RuntimeError(
                    f"{name!r} was given other storage behind FSDP: change the values in place "
                    "(p.data.copy_(...)), or construct FSDP after changing it"
                )
            if piece.requires_grad != self.trainable:
                raise RuntimeError(
                    f"{name!r} was {'frozen' if self.trainable else 'unfrozen'} after FSDP was "
                    "constructed: set requires_grad first, then construct FSDP"
                )

    def renew(self, sharding):
        """Put the pieces into one shard again, after to(), double() or cuda() has moved them."""
        self.sharding = sharding
        pieces = torch.cat([piece.data for piece in self.pieces])
        shard = pieces.new_zeros(self.layout.shard_numel)
        shard[: pieces.numel()] = pieces
        self._hold(shard)

    def gather_master(self):
        """Return all full parameters in the shards' own dtype, as new tensors. Collective."""
        source = self.shard.to(self.flat.device)
        flat = source.new_empty(self.layout.padded)
        comm.all_gather(flat, source, self.sharding.group)
        return self.layout.views(flat)

    def take_whole(self):
        """Keep this rank's part of the full parameters of rank 0. Collective."""
        values = [module._parameters[attribute].detach() for (module, attribute), *_ in self.places]
        flat = self.shard.new_empty(self.layout.padded, device=self.flat.device)
        comm.broadcast(self.layout.flatten(values, flat), 0, self.sharding.everyone)
        self.shard.copy_(self.layout.shard(flat, self.rank))

    # ---- gradients

    def launch_reduce(self, owed=False):
        """Launch the reduce_scatter of the full gradients; a missing one counts as zero.

        owed: send even if all are missing, because other ranks may have them.
        """
        missing = all(p.grad is None for p in self.wholes)
        if not self.trainable or (missing and not owed):
            return
        for slot in self.kept:  # these are parts of the gradients sent now
            self.pieces[slot].grad = None
        self.kept.clear()
        dtype = self.sharding.reduce_dtype or self.flat.dtype
        total = torch.empty(self.layout.padded, dtype=dtype, device=self.flat.device)
        for view, p in zip(self.layout.views(total), self.wholes, strict=True):
            self._divide(p.grad, view)
            p.grad = None  # one by one: flat and single gradients never all exist at once
        total[self.layout.numel :].zero_()
        output = self.layout.shard(total, self.rank)  # in place: no memory but the sent buffer
        work = comm.reduce_scatter(output, total, group=self.sharding.group, async_op=True)
        self._reducing = work, output
        if self._waits:
            self.settle()

    def _divide(self, gradient, view):
        if gradient is None:
            view.zero_()
        elif gradient.dtype == view.dtype:  # divided on the way: one pass over memory, not two
            torch.mul(gradient.detach(), self.factor, out=view)
        else:
            view.copy_(gradient.detach()).mul_(self.factor)

    def settle(self):
        """Wait for the reduce_scatter; with hybrid sharding, launch the all_reduce of the shard."""
        if not self._reducing:
            return
        work, output = self._reducing
        work.wait()
        self._reducing, flat, output = None, output.untyped_storage(), output.clone()
        flat.resize_(0)  # now, not when the backend's threads release it
        across = self.sharding.across
        work = comm.all_reduce(output, group=across, async_op=True) if across is not None else None
        self._reduced.append((output, work))

    def keep(self):
        """In no_sync(), keep the full gradients; the .grad of the pieces is this rank's part.

        If the gradients of the pieces are cleared, as by optimizer.zero_grad(), these are, too.
        """
        for slot, (p, piece) in enumerate(zip(self.wholes, self.pieces, strict=True)):
            if p.grad is not None and (piece.grad is None or slot in self.kept):
                begin, end = self.layout.ranges(self.rank)[slot]
                part = p.grad.detach().reshape(-1)[begin:end].to(piece.device, piece.dtype)
                piece.grad, self.kept[slot] = part, (part, part._version)

    def drop_cleared(self):
        """Clear the full gradients whose piece was cleared since keep()."""
        for slot, (part, version) in list(self.kept.items()):
            if self.pieces[slot].grad is not part or part._version != version:
                self.wholes[slot].grad = None
                del self.kept[slot]

    def deliver(self):
        """Add the reduced gradients to those of the pieces."""
        for output, work in self._reduced:
            if work is not None:
                work.wait()
            self._add(output.to(self.shard.dtype))
        self._reduced.clear()

    def _add(self, gradient):
        if self.sharding.offload:
            gradient = to_host(gradient)
        *parts, _ = gradient.split(self._sizes)  # without the padding
        for piece, g, mapped in zip(self.pieces, parts, self._grads, strict=True):
            if piece.grad is not None:
                piece.grad += g
            else:
                piece.grad = g if mapped is None else mapped.copy_(g)

    def forget(self):
        """Drop all gradients that are not yet delivered."""
        self.settle()
        for _, work in self._reduced:
            if work is not None:
                work.wait()
        self._reduced.clear()
        for slot, p in enumerate(self.wholes):
            p.grad = None
            if slot in self.kept:
                self.pieces[slot].grad = None
        self.kept.clear()
