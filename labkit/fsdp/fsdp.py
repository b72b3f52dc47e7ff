"""FSDP (ZeRO-3): each rank stores 1/n of each unit (e.g. a block) and gathers it while it runs.

    forward    network  [gather 0][gather 1][gather 2]
               compute            [ unit 0 ][ unit 1 ][ unit 2 ]     freed as soon as it has run
    backward   network  [gather 2][gather 1][gather 0]
               compute            [ unit 2 ][ unit 1 ][ unit 0 ]     gathered again, freed again
               network                      [reduce 2][reduce 1][reduce 0]   gradients: 1/n kept

    shard="full"      as drawn; the root (modules in no unit) stays gathered until backward ends
    shard="grad_op"   not freed before backward: one gather less, but the full model is in memory
    shard="hybrid"    shards within one mesh axis (a machine: gathers stay in it), replicas across

Sent per rank and step: 3 (n-1)/n x parameter bytes, 1.5 times as much as DDP ("grad_op": as DDP).
Held per rank: (parameters + gradients + optimizer states) / n, and in full: the root, the running
unit and `prefetch` more. Rajbhandari et al., ZeRO, SC 2020, section 5.3; Zhao et al., PyTorch FSDP,
VLDB 2023, section 3; Rajbhandari et al., ZeRO-Infinity, SC 2021; DeepSpeed's documentation, page
config-json (the persistence threshold).
"""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labkit.ddp.no_sync import NoSync
from labkit.ddp.wrapper import Wrapper
from labkit.fsdp.exec_order import CallOrder, Trace
from labkit.fsdp.flat_param import FlatParam
from labkit.fsdp.fsdp_state_dict import full_state_dict, load_full_state_dict, load_shards, places
from labkit.fsdp.fsdp_unit import UnitGradients, kinds
from labkit.fsdp.sharding_strategy import Sharding, check_arguments, compute_device, in_dtype
from labkit.fsdp.wrap_policy import materialise, read_elsewhere, split_units
from labkit.pickle_support import NotPickled
from labkit.replicas import Replicas, broadcast_tensors, check_memory
from labkit.torch_private import in_backward
from labkit.zero.clip import clip_grad_norm_


class FSDP(NoSync, NotPickled, Wrapper):
    """Wrap a module so that its parameters, gradients and optimizer states are sharded.

    Collective: all ranks construct it.
    unit: the modules that are gathered as one: a module class, a tuple of them, or a function
        module -> bool (see labkit.fsdp.wrap_policy); None: the whole module.
    root: the modules in no unit form one more unit ("shard"), or are replicated, with gradients
        averaged at the end of backward ("replicate").
    shard: "full", "grad_op" or "hybrid"; the last with a mesh of two axes: replicas along the
        first, shards along the second. With another mode a mesh of one axis may stand for
        process_group.
    param_dtype: gather, compute and reduce in this dtype; the shards keep theirs, as masters.
    reduce_dtype: sum gradients in this dtype.
    offload: True: keep shards and their gradients in host memory. A folder: in unnamed mapped files
        there, of which the system caches pages in free memory (DeepSpeed's device "nvme"). The
        gradients then are at the same addresses in every step. For the optimizer's states:
        labkit.offload.Offloaded(optimizer, to=folder). prefetch: units gathered ahead.
    persistence_threshold: parameters of at most this many elements are gathered with the root, all
        in one message, and stay until backward ends. Their gradients and optimizer states stay
        sharded. DeepSpeed's stage3_param_persistence_threshold keeps them between steps, too.
        If their unit does not run, they count as zero. It needs root="shard".

    parameters() are this rank's shards, 1-D, possibly empty, under the module's own names:
    construct the optimizer from them, after FSDP. Values are those of rank 0; modules on the meta
    device are initialised unit by unit (reset_parameters). Every rank must call the same units in
    the same order. A unit's parameters are available only in its own forward.
    A parameter that this rank's loss does not depend on counts as zero. If its unit does not run,
    or under no_grad(), .grad does not change.
    Buffers are copied from rank 0 once; afterwards each rank has its own.
    copy.deepcopy and torch.optim.swa_utils.AveragedModel are not supported, because hooks and
    groups belong to one instance. To average weights, average shards, which needs no message:
        average = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters(): average[name].lerp_(p.detach(), 1 - decay)
    Swap them in to evaluate or save: model.load_state_dict(model.state_dict() | average).
    Raises ValueError, on every rank, if the model differs between ranks, if no module matches
    `unit`, or if units share a parameter; OSError on a rank whose folder cannot be written to or is
    full, with ValueError on the others.
    """

    instead = "full_state_dict() (collective, whole) or state_dict() (this rank's shards)"
    more = ". To average weights, clone the shards: see FSDP's docstring"

    def __init__(
        self,
        module,
        unit=None,
        root="shard",
        mesh=None,
        shard="full",
        param_dtype=None,
        reduce_dtype=None,
        offload=False,
        prefetch=1,
        persistence_threshold=0,
        process_group=None,
    ):
        super().__init__(module)
        check_arguments(module, root, prefetch, persistence_threshold)
        self.sharding = sharding = Sharding.choose(
            module, shard, mesh, process_group, param_dtype, reduce_dtype, offload
        )
        self.process_group, self.prefetch = sharding.everyone, prefetch
        self.units = split_units(module, unit, keep=shard == "grad_op")
        settings = (
            f"{root=}, {shard=}, {param_dtype=}, {reduce_dtype=}, {prefetch=}, "
            f"{persistence_threshold=}, {len(self.units)} units"
        )
        Replicas(module, sharding.everyone).check(settings, sharding.device)
        check_memory(module.named_parameters(), "FSDP")
        small = {}
        for u in self.units:
            materialise(u, sharding.device)
            if root == "shard" or u is not self.units[0]:
                large, kept = u.split(persistence_threshold)
                u.flats = [FlatParam(*kind, sharding) for kind in large]
                small |= kept
            u.module.register_forward_pre_hook(
                partial(self._before_forward, u), prepend=True, with_kwargs=True
            )
            u.module.register_forward_hook(partial(self._after_forward, u))
            u.watch_modules()
        self.units[0].flats += [FlatParam(*kind, sharding) for kind in kinds(small)]
        self.flats = [flat for u in self.units for flat in u.flats]
        self.replicated = list(self.units[0].own_parameters()) if root == "replicate" else []
        whole = [*self.replicated, *module.buffers()]
        for t in whole:
            t.data = t.data.to(sharding.device)
        broadcast_tensors(whole, 0, sharding.everyone)
        self._order = CallOrder(self.units, prefetch)
        self._trace, self._traces = Trace(), []  # of this forward; of those in this backward
        self._gradients = UnitGradients(self.flats, self._end_backward)
        self.watch_root()

    def watch_root(self):
        """Register the replicated parameters, at their current place in memory."""
        named, replicated = self.module.named_parameters(), set(self.replicated)
        averaged = [(name, p) for name, p in named if p in replicated and p.requires_grad]
        self._gradients.watch(averaged, self.process_group)

    # ---- forward

    def forward(self, *args, **kwargs):
        """Call the module, gathering and freeing units. An exception frees them all."""
        try:
            return self.module(*args, **kwargs)
        except BaseException as error:
            # checkpointing may run us again inside a backward, and stops us by an exception
            if not in_backward():
                self._expect_no_backward()
                self.rest()
            if isinstance(error, Exception) and (words := read_elsewhere(error, self.units)):
                raise RuntimeError(words) from error
            raise

    def _before_forward(self, unit, module, args, kwargs):
        again = in_backward()  # recomputation
        if unit is self.units[0] and not again:
            self._begin()
        unit.gather()
        if not again:
            for following in self._order.after(unit):
                following.gather()
        unit.use()
        unit.note_forward()
        if unit.sharded and self.sharding.param_dtype is not None:
            args, kwargs = in_dtype((args, kwargs), self.sharding.param_dtype)
        if again or not torch.is_grad_enabled():
            done = partial(self._after_backward, unit)
        else:
            done = partial(self._reach, self._trace, self._trace.begin(unit))
        return unit.watch_inputs(args, kwargs, done)

    def _begin(self):
        self.rest()  # the optimizer may have changed the shards: gathered values are stale
        if self._gradients.under_way:  # an exception interrupted a backward
            self._gradients.abandon()
            self._expect_no_backward()
        for flat in self.flats:
            flat.check()
            flat.drop_cleared()
        self._order.begin()
        self._trace = Trace()
        if torch.is_grad_enabled():
            self._gradients.averages = self.require_backward_grad_sync

    def _expect_no_backward(self):
        for trace in self._traces:
            trace.forget()
        self._traces.clear()
        for unit in self.units:
            unit.backwards_due, unit.owes = 0, False

    def _after_forward(self, unit, module, args, output):
        if unit.flats and self.replicated and self.sharding.param_dtype is not None:
            # The replicated modules compute in their own dtype.
            output = in_dtype(output, self.replicated[0].dtype)
        if torch.is_grad_enabled():
            self._watch_outputs(unit, output)
        if in_backward():  # a recomputation: backward uses the gathered unit next
            return output
        if not (unit.keep and torch.is_grad_enabled()):
            unit.free()
        if unit is self.units[0]:
            for other in self.units:  # gathered ahead, but not called this time
                if not other.keep:
                    other.free()
        return output

    def _watch_outputs(self, unit, output):
        if in_backward():
            unit.watch_outputs(output, partial(self._before_backward, unit))
        else:
            begin, end = self._trace.end(unit)
            begin.heard = end.heard = unit.watch_outputs(
                output, partial(self._reach, self._trace, end)
            )

    # ---- backward

    def _reach(self, trace, point, _=None):
        """Called when backward reaches a point of a forward; this rank may have skipped others."""
        self._gradients.begin()
        if trace not in self._traces:
            self._finish_traces()  # of later forwards
            self._traces.append(trace)
        self._pass(trace.reach(point))

    def _finish_traces(self):
        for trace in self._traces:
            self._pass(trace.finish())

    def _pass(self, points):
        for point in points:
            if point.is_end:
                self._before_backward(point.unit)
            else:
                self._after_backward(point.unit)

    def _before_backward(self, unit, _=None):
        """Called when the first gradient has reached an output of this unit, on some rank."""
        self._gradients.begin()
        unit.owes = self._gradients.accumulates
        unit.check_unchanged()
        unit.gather()
        for preceding in self._order.before(unit):
            if preceding.backwards_due:
                preceding.gather()
        unit.use()

    def _after_backward(self, unit, _=None):
        """Called when gradients have reached all inputs of this unit."""
        unit.backwards_due = max(0, unit.backwards_due - 1)
        if unit.backwards_due == 0:
            # with create_graph=True, the new graph also needs the parameters
            if not torch.is_grad_enabled():
                unit.free()
            self._gradients.send(unit)

    def _end_backward(self):
        self._finish_traces()
        self._traces.clear()
        # Units whose inputs got no gradient, usually the root; in the order in which ranks with
        # other inputs have reduced them.
        for unit in reversed(dict.fromkeys([*self._order.called, *self.units])):
            unit.backwards_due = 0
            self._after_backward(unit)
        self._gradients.deliver()

    # ---- its parameters: pieces, also while the module has the full ones

    def named_parameters(self, *args, **kwargs):
        """Return the pieces, also while the module has the full parameters."""
        pieces = {
            whole: p
            for flat in self.flats
            for whole, p in zip(flat.wholes, flat.pieces, strict=True)
        }
        for name, p in self.module.named_parameters(*args, **kwargs):
            yield name, pieces.get(p, p)

    def rest(self):
        """Free all units."""
        for flat in self.flats:
            flat.free()

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for flat in self.flats:
            flat.drop_cleared()

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Clip the norm of the gradients of all ranks to max_norm; return the norm before.

        Collective. As torch.nn.utils.clip_grad_norm_ on the averaged gradients in one process.
        """
        if any(flat.kept for flat in self.flats):
            raise RuntimeError(
                "no_sync() keeps gradients that are not averaged: clip after a backward outside it"
            )
        group, device = self.sharding.group, self.sharding.device
        pieces = [p for flat in self.flats for p in flat.pieces]
        copies = dict.fromkeys(pieces, 1)
        copies |= dict.fromkeys(self.replicated, dist.get_world_size(group))
        return clip_grad_norm_(copies, max_norm, norm_type, group, device)

    # ---- state dicts

    def state_dict(self, *args, **kwargs):
        """Return this rank's pieces and buffers by name. For the full model: full_state_dict()."""
        self.rest()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """Load this rank's pieces. For another world size: load_shards, load_full_state_dict."""
        self.rest()
        return super().load_state_dict(state_dict, strict, assign)

    def full_state_dict(self):
        """Return the full module.state_dict() on every rank, with rank 0's buffers. Collective."""
        return full_state_dict(self)

    def load_full_state_dict(self, state_dict, strict=True):
        """Load this rank's part of a full state dict; see fsdp_state_dict.load_full_state_dict."""
        return load_full_state_dict(self, state_dict, strict)

    def load_shards(self, state_dicts, strict=True):
        """Load the state_dict() of each of n ranks, in order of rank, into any world size."""
        return load_shards(self, state_dicts, strict)

    def places(self):
        """Return {name: (start, stop, shape)}: the piece's range in the flat full parameter."""
        return places(self)

    # ---- what moves or copies all parameters

    def apply(self, fn):
        """Call nn.Module.apply on full parameters, so an initialiser draws as in one process.

        Collective. Values become rank 0's. The full model is in memory meanwhile. Returns self.
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
        """Called by to(), double(), cuda(), which move the pieces: move the shards, too."""
        self.rest()
        super()._apply(fn, recurse)
        self.sharding = replace(
            self.sharding, device=compute_device(self.module, self.sharding.everyone)
        )
        for flat in self.flats:
            flat.renew(self.sharding)
        self.watch_root()
        return self
