"""Fully sharded data parallelism (ZeRO-3): each rank holds 1/n; a unit is whole only as it runs.

    forward    network  [gather 0][gather 1][gather 2]
               compute            [ unit 0 ][ unit 1 ][ unit 2 ]     freed as soon as it has run
    backward   network            [gather 1][gather 0]
               compute  [ unit 2 ][ unit 1 ][ unit 0 ]               gathered again, freed again
               network            [reduce 2][reduce 1][reduce 0]     gradients: summed, 1/n kept

    shard="full"      as drawn; the root, what is in no unit, is gathered once, until backward ends
    shard="grad_op"   not freed before backward: one gather fewer, the whole model held meanwhile
    shard="hybrid"    shards within one mesh axis (a machine: gathers stay in it), replicas across

Sent per rank and step: 3 (n-1)/n x parameter bytes: half as much again as DDP ("grad_op": as DDP).
Held per rank: (parameters + gradients + optimizer states) / n, and whole: the root, the unit at
work, `prefetch` more. Rajbhandari et al., ZeRO, SC 2020, section 5.3; Zhao et al., PyTorch FSDP,
VLDB 2023, section 3.
"""

from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_map_only

from labkit import comm
from labkit.parts.call_order import CallOrder
from labkit.parts.flat_param import FlatParam
from labkit.parts.full_state import ShardedModel
from labkit.parts.reducer import Reducer
from labkit.parts.replicas import Replicas, broadcast_tensors
from labkit.parts.shard import padded
from labkit.parts.sharding import Sharding
from labkit.parts.units import materialise, split_units
from labkit.parts.wrapper import find_tensors


def shard_units(units, group=None):
    """The idea: a unit's parameters are whole only while it runs, in forward and in backward.

    units: modules that have no parameter in common. Returns this rank's shards, for the optimizer:
    their gradients are there when backward is over.
    """
    n, rank, shards = dist.get_world_size(group), dist.get_rank(group), []

    def cut(p):
        whole = padded(p, n)
        own = torch.nn.Parameter(whole.chunk(n)[rank].clone())
        p.data = whole[: p.numel()].view_as(p)

        def keep_own_part(p):
            own.grad = torch.empty_like(own)
            comm.reduce_scatter(own.grad, padded(p.grad, n), group=group)
            own.grad /= n
            p.grad = None
            free([(whole, own)])

        p.register_post_accumulate_grad_hook(keep_own_part)
        return whole, own

    def gather(pieces):
        for whole, own in pieces:
            whole.untyped_storage().resize_(whole.nbytes)
            comm.all_gather(whole, own.detach(), group=group)

    def free(pieces):
        for whole, _ in pieces:
            whole.untyped_storage().resize_(0)

    for unit in units:
        pieces = [cut(p) for p in unit.parameters()]
        unit.register_forward_pre_hook(lambda *_, pieces=pieces: gather(pieces))
        unit.register_forward_hook(lambda *_, pieces=pieces: free(pieces))
        unit.register_full_backward_pre_hook(lambda *_, pieces=pieces: gather(pieces))
        free(pieces)
        shards += [own for _, own in pieces]
    return shards


class FSDP(ShardedModel):
    """module, with its parameters, gradients and so optimizer states sharded.

    Collective: all ranks construct it.
    unit: what is gathered together: a module class, a tuple of them, or a function module -> bool
        (policies are in labkit.parts.units); None: everything at once.
    root: what is in no unit is one more unit ("shard"), or whole on every rank, with its gradients
        averaged at the end of backward ("replicate").
    shard: "full", "grad_op" or "hybrid"; the last with a mesh of two axes: replicas along the
        first, shards along the second. With another mode a mesh of one axis may stand for
        process_group.
    param_dtype: gather, compute and reduce in this dtype; the shards stay as they are, the masters.
    reduce_dtype: sum gradients in this one.
    offload: keep shards and their gradients in host memory. prefetch: units gathered ahead.
    parameters() are this rank's shards, 1-D, some perhaps empty, under the module's own names:
    construct the optimizer from them, after this. Values are rank 0's; modules on the meta device
    get theirs unit by unit (reset_parameters). Every rank must call the same units in the same
    order, and a unit's parameters are there in its own forward only.
    A parameter that the loss does not depend on counts as zero on this rank; where none of its unit
    has a gradient, .grad stays as it is. Buffers are rank 0's at first, and then each rank's own.
    Raises ValueError, on every rank, if the model differs between ranks, or where units match
    nothing or share.
    """

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
        process_group=None,
    ):
        super().__init__(module)
        if not dist.is_initialized():
            raise RuntimeError("FSDP needs ranks: call torch.distributed.init_process_group first")
        if any(hasattr(p, "is_piece") for p in module.parameters()):
            raise ValueError(
                "this module is sharded already: wrap the whole model once, and "
                "name its parts by unit="
            )
        if root not in ("shard", "replicate"):
            raise ValueError(f'root is "shard" or "replicate", not {root!r}')
        if type(prefetch) is not int or prefetch < 0:
            raise ValueError(f"prefetch is a number of units, 0 or more, not {prefetch!r}")
        sharding = Sharding.choose(
            module, shard, mesh, process_group, param_dtype, reduce_dtype, offload
        )
        self.sharding, self.process_group, self.prefetch = sharding, sharding.everyone, prefetch
        self.require_backward_grad_sync = True
        self.units = split_units(module, unit, keep=shard == "grad_op")
        settings = (
            f"{root=}, {shard=}, {param_dtype=}, {reduce_dtype=}, {prefetch=}, "
            f"{len(self.units)} units"
        )
        Replicas(module, sharding.everyone).check(settings, sharding.device)
        for u in self.units:
            materialise(u, sharding.device)
            if root == "shard" or u is not self.units[0]:
                u.flats = [FlatParam(names, places, sharding) for names, places in u.kinds()]
            u.module.register_forward_pre_hook(
                partial(self._before_forward, u), prepend=True, with_kwargs=True
            )
            u.module.register_forward_hook(partial(self._after_forward, u))
        self.flats = [flat for u in self.units for flat in u.flats]
        self.replicated = list(self.units[0].own_parameters()) if root == "replicate" else []
        whole = [*self.replicated, *module.buffers()]
        for t in whole:
            t.data = t.data.to(sharding.device)
        broadcast_tensors(whole, 0, sharding.everyone)
        self.watch_root()
        self._calls = CallOrder(self.units, prefetch)
        self._armed = False  # a backward is under way, and will call _end_backward
        self._averages = True  # as the forward found require_backward_grad_sync
        self._reducing = None  # the unit whose gradients are on their way

    def watch_root(self):
        """Average the gradients of the replicated parameters, where these are now."""
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        averaged = [
            (name, p) for name, p in trained if any(p is other for other in self.replicated)
        ]
        self._reducer = (
            Reducer(averaged, self, self.process_group, overlap=False) if averaged else None
        )

    # ---- forward

    def forward(self, *args, **kwargs):
        """The module's forward; gathers and frees. If it raises, the next one starts afresh."""
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            # checkpointing may run us again inside a backward, and stops us by an exception
            if not in_backward():
                self.rest()
                for unit in self.units:
                    unit.calls = 0
            raise

    def _before_forward(self, unit, module, args, kwargs):
        inside = in_backward()
        if unit is self.units[0] and not inside:
            self._begin()
        unit.gather()
        if not inside:
            for following in self._calls.after(unit):
                following.gather()
        unit.use()
        unit.versions = unit.piece_versions()
        if torch.is_grad_enabled():
            # A recomputation in backward belongs to the forward that was counted, if that had grad.
            unit.calls = max(unit.calls, 1) if inside else unit.calls + 1
        return self._watch_inputs(unit, args, kwargs)

    def _begin(self):
        if self._armed:  # an exception has left a backward
            self._abandon()
        self.rest()  # the optimizer may have changed the shards: what is still whole is stale
        for flat in self.flats:
            flat.check()
            flat.drop_cleared()
        self._calls.begin()
        if torch.is_grad_enabled():
            self._averages = self.require_backward_grad_sync

    def _watch_inputs(self, unit, args, kwargs):
        """Have _after_backward called when backward has reached the inputs: the unit is done."""
        watched, param_dtype = [], self.sharding.param_dtype

        def watch(t):
            if unit.flats and param_dtype is not None and t.is_floating_point():
                t = t.to(param_dtype)
            if t.requires_grad:
                t = t.view_as(t)  # a node of our own: gradients of t's other uses may come later
                watched.append(t)
            return t

        args, kwargs = tree_map_only(torch.Tensor, watch, (args, kwargs))
        if watched and torch.is_grad_enabled():
            register_multi_grad_hook(watched, lambda _: self._after_backward(unit))
        return args, kwargs

    def _after_forward(self, unit, module, args, output):
        if self.replicated and unit.flats and self.sharding.param_dtype is not None:
            # What is replicated computes in its own dtype, and so must be given that.
            dtype = self.replicated[0].dtype
            output = tree_map_only(
                torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, output
            )
        if torch.is_grad_enabled():
            tensors = list(find_tensors(output))
            for t in tensors:
                if t.grad_fn is not None:
                    t.register_hook(partial(self._before_backward, unit))
            if unit.flats and not tensors and not isinstance(output, str | int | float | None):
                raise TypeError(
                    f"{unit} returns {type(output).__name__}, in which FSDP finds no tensor to "
                    "hear of backward from: return tensors, in dicts, lists, tuples or "
                    "dataclasses if need be"
                )
        if in_backward():  # a recomputation: backward is about to use what has been gathered
            return output
        if not (unit.keep and torch.is_grad_enabled()):
            unit.free()
        if unit is self.units[0]:
            for other in self.units:  # gathered ahead, but not called this time
                if not other.keep:
                    other.free()
        return output

    # ---- backward

    def _before_backward(self, unit, _=None):
        """The first gradient has come to an output of this unit."""
        self._arm()
        if unit.versions != unit.piece_versions():
            raise RuntimeError(
                f"the parameters of {unit} were changed between forward and backward: "
                "call backward() before step()"
            )
        unit.gather()
        for preceding in self._calls.before(unit):
            if preceding.calls:
                preceding.gather()
        unit.use()

    def _arm(self):
        """Have the engine call _end_backward when the outermost backward, first here, is done."""
        if not self._armed:
            self._armed = True
            Variable._execution_engine.queue_callback(self._end_backward)

    def _after_backward(self, unit):
        unit.calls = max(0, unit.calls - 1)
        if unit.calls == 0:
            # with create_graph=True, the new graph needs the parameters in its turn
            if not torch.is_grad_enabled():
                unit.free()
            if self._averages:
                self._reduce(unit)

    @torch.no_grad()
    def _reduce(self, unit):
        # one at a time: the last unit's gradients go out while this one computes
        if self._reducing is not None:
            self._reducing.settle()
        self._reducing = unit
        unit.launch_reduce()

    def on_gradient(self, index, slot):
        """A replicated parameter has its gradient."""
        if self._averages:
            self._arm()
            self._reducer.arrive(index, slot)
        else:
            self._reducer.keep(index, slot)

    def _end_backward(self):
        # Those at whose inputs nothing has come by, the root as a rule; in the order in which other
        # ranks, where inputs may differ in that, have reduced them.
        for unit in reversed(dict.fromkeys([*self._calls.called, *self.units])):
            unit.calls = 0
            self._after_backward(unit)
        with torch.no_grad():
            self._collect()
        self._armed, self._reducing = False, None

    def _collect(self):
        """Wait for all gradients, and let the pieces have them."""
        for flat in self.flats:
            flat.settle()
        if self._reducer is not None and self._reducer.started:
            # Not earlier: collectives match by order, and ranks may differ in when these arrive.
            self._reducer.launch_rest()
            self._reducer.wait()
            self._reducer.settle([[True] * len(bucket.members) for bucket in self._reducer.buckets])
        for flat in self.flats:
            flat.deliver() if self._averages else flat.keep()

    @contextmanager
    def no_sync(self):
        """Forwards in this block do not average: backward adds to this rank's whole gradients.

        Costs memory, saves the reductions: the next averaging backward sends the whole sum.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def rest(self):
        """Nothing is gathered."""
        for unit in self.units:
            unit.free()

    def _abandon(self):
        self.rest()
        for flat in self.flats:
            flat.forget()
        if self._reducer is not None:
            self._reducer.abandon()
        for unit in self.units:
            unit.calls = 0
        self._armed, self._reducing = False, None


def in_backward():
    return torch._C._current_graph_task_id() != -1
