"""Data parallelism: each rank has the full model and a share of the batch; gradients are averaged.

    compute   |--- forward ---|--- backward: l4 | l3 | l2 | l1 ---|        |- step -|
    network                        [ bucket 0: l4 l3 ]  [ bucket 1: l2 l1 ]
                                   sent as soon as its            ^ exposed: the step waits for it
                                   last gradient is ready

    naive       DDP(module, bucket_cap_mb=0, overlap=False)  a message per parameter, after backward
    overlapped  DDP(module, bucket_cap_mb=0)                 a message per parameter, once ready
    bucketed    DDP(module)                                  few large messages, once full

Sent per rank and step, of n ranks: 2 (n-1)/n x gradient bytes.
Held per rank: all parameters, gradients and optimizer states.
Time after forward: max(backward, communication) + first and last bucket; without overlap the sum.
Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020,
section 3.2.
"""

import torch

from labkit.ddp.comm_hook_errors import check_annotations
from labkit.ddp.join import Join
from labkit.ddp.move_and_pickle import Portable
from labkit.ddp.no_sync import NoSync
from labkit.ddp.reducer import Reducer
from labkit.ddp.static_graph import StaticGraph
from labkit.ddp.unused_parameters import FindUnused
from labkit.ddp.wrapper import find_tensors
from labkit.replicas import Replicas, check_ranks
from labkit.torch_private import call_after_backward, current_backward, in_backward


class DDP(NoSync, Portable):
    """Wrap a module so that its gradients are averaged over the group when backward() returns.

    Collective: all ranks construct it. The arguments are those of PyTorch's
    DistributedDataParallel, in its order, and overlap.

    device_ids, output_device: the device of the module, or None. dim: 0.
    broadcast_buffers: copy the buffers of rank 0 to all ranks before each forward that averages.
    init_sync: compare the modules of all ranks, and copy the values of rank 0.
    bucket_cap_mb: MiB of gradients per message (None: 25); 0: one message per parameter.
    find_unused_parameters: a parameter that the loss does not depend on counts as zero on this
        rank; if no rank uses it, its .grad does not change. Without this option, backward() raises
        RuntimeError naming the parameters.
    static_graph: every backward on this rank produces the same gradients as the first; see
        labkit.ddp.static_graph. Parameters may then be unused without a search for them, and
        reentrant checkpoints may share parameters.
    check_reduction, gradient_as_bucket_view: accepted; .grad is always a view of its bucket.
    overlap: send during backward.

    PyTorch's other arguments raise TypeError with the alternative; mixed precision is labkit.amp.
    A forward with all parameters frozen averages nothing, as a GAN's discriminator in the
    generator's step; this must hold on all ranks. Names in
    module._ddp_params_and_buffers_to_ignore are ignored. Do not add, replace or freeze single
    parameters afterwards. state_dict(), named_parameters() etc. use the module's own names. DDP can
    be pickled on the default group, as PyTorch's: without its comm hook; loading sends nothing.

    Raises on every rank ValueError if the model differs between ranks, RuntimeError if it has no
    parameter to train.
    """

    made_by_watching = ("_replicas", "_reducer", "_unused")

    def __init__(
        self,
        module,
        device_ids=None,
        output_device=None,
        dim=0,
        broadcast_buffers=True,
        init_sync=True,
        process_group=None,
        bucket_cap_mb=None,
        find_unused_parameters=False,
        check_reduction=False,
        gradient_as_bucket_view=False,
        static_graph=False,
        overlap=True,
        **others,
    ):
        super().__init__(module)
        check_keywords(module, device_ids, output_device, dim, others)
        bucket_cap_mb = 25 if bucket_cap_mb is None else bucket_cap_mb
        check_ranks("DDP", process_group)
        self.process_group, self.bucket_cap_mb, self.overlap = process_group, bucket_cap_mb, overlap
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self._joining = None  # the Join whose block we are in
        self._buffers_due = True  # the last forward was one that averages
        settings = (
            f"{bucket_cap_mb=}, {overlap=}, {broadcast_buffers=}, "
            f"{find_unused_parameters=}, {static_graph=}"
        )
        if init_sync:
            replicas = Replicas(module, process_group, broadcast_buffers)
            replicas.check(settings)
            replicas.become(0)
        self._watch()

    def _watch(self):
        """Make the buckets and hooks for the parameters, at their current place in memory."""
        self._replicas = Replicas(self.module, self.process_group, self.broadcast_buffers)
        chosen = [(name, p) for name, p in self._replicas.parameters() if p.requires_grad]
        cap_bytes = int(self.bucket_cap_mb * 2**20)
        self._reducer = Reducer(chosen, self, self.process_group, cap_bytes, self.overlap)
        self._unused = None  # every backward brings every gradient
        if self.static_graph:
            self._unused = StaticGraph(self._reducer)
        elif self.find_unused_parameters:
            self._unused = FindUnused(self._reducer)
        self._expecting = False  # a forward that averages has been, its backward not yet
        self._backward = None  # the engine's number for the backward that will call _finish

    @property
    def buckets(self):
        """The list of Bucket, in the order in which they are sent."""
        return self._reducer.buckets

    def register_comm_hook(self, state, hook):
        """Replace each bucket's all_reduce by hook(state, bucket) -> Future of the averaged tensor.

        The tensor is flat. The hook also divides the gradients. PyTorch's own hooks
        (torch.distributed.algorithms.ddp_comm_hooks) run unchanged, and labkit's run on PyTorch's
        DDP. Raises RuntimeError if a hook is registered already, ValueError for other annotations.
        """
        if not callable(hook):
            raise TypeError(f"hook must be callable, not {type(hook).__name__}")
        check_annotations(hook)
        if self._reducer.hook is not None:
            raise RuntimeError("a comm hook is registered already: a DDP supports one")
        self._reducer.use_hook(state, hook)

    def join(
        self, divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False
    ):
        """Use `with model.join():` around a loop that is longer on some ranks: labkit.ddp.join.

        divide_by_initial_world_size: a rank without data counts as a zero gradient; otherwise
            divide by the number of ranks with data.
        throw_on_early_termination: raise RuntimeError on all ranks when one rank runs out of data.
        """
        return Join(self, divide_by_initial_world_size, enable, throw_on_early_termination)

    # ---- one step

    def forward(self, *args, **kwargs):
        """Call the module. Backward through its output averages gradients, unless in no_sync()."""
        averages = self.require_backward_grad_sync and torch.is_grad_enabled()
        averages = averages and not self._replicas.frozen()
        # activation checkpointing runs this forward again, inside a backward
        if averages and not in_backward():
            self._prepare()
        source = self._joining.announce(averages) if self._joining else 0
        self._share_buffers(source, averages)
        output = self.module(*args, **kwargs)
        if averages:
            self._expecting = True
            for t in find_tensors(output):
                if t.grad_fn is not None:
                    t.register_hook(self._arm)
        return output

    def _prepare(self):
        if self._reducer.started:  # an exception interrupted the last backward
            self._reducer.abandon()
            if self._unused:
                self._unused.used(failed=True)
        if self._unused:
            self._unused.forget()
        self._backward = None
        self._replicas.check_trainable(may_freeze=self.find_unused_parameters)

    def _share_buffers(self, source, averages):
        """Copy the buffers that the forward of the last averaging step may have changed."""
        if self._buffers_due:
            self._replicas.share_buffers(source)
        self._buffers_due = averages

    def _arm(self, _=None):
        """Have the autograd engine call _finish at the end of the backward that has begun.

        Hooks on the outputs call this, because their gradients come first: reentrant checkpointing
        runs further backwards inside this one, and the callback must belong to the outermost. If
        the loss bypasses the outputs, the first parameter calls it.
        """
        self._backward = current_backward()
        call_after_backward(self._finish)

    def on_gradient(self, index, slot):
        if self._backward is None:
            if not self._expecting:
                return self._reducer.keep(index, slot)  # no_sync()
            self._arm()
        if self._unused:
            self._unused.arrive(index, slot, self._backward)
        else:
            self._reducer.arrive(index, slot)

    def _finish(self):
        self._backward = None
        if self._reducer.started:  # not so after torch.autograd.grad, which does not set .grad
            self._expecting = False
            absent = self._reducer.finish(self._unused.used if self._unused else None)
            if self._unused:
                self._unused.close(absent)
            elif absent:
                raise RuntimeError(
                    f"the loss does not depend on {', '.join(absent)}: "
                    "pass find_unused_parameters=True if it need not depend on every parameter"
                )


UNTAKEN = {  # keywords of PyTorch's DDP that this one does not take: what to use instead
    "mixed_precision": "labkit.amp has autocast, GradScaler and MasterWeights",
    "device_mesh": "give process_group=mesh.group(axis)",
    "delay_all_reduce_named_params": "give bucket_cap_mb",
    "param_to_hook_all_reduce": "give register_comm_hook() a hook",
    "skip_all_reduce_unused_params": "give find_unused_parameters=True",
}


def check_keywords(module, device_ids, output_device, dim, others):
    """Raise TypeError or ValueError for values of PyTorch's keywords that are not supported."""
    for name, value in others.items():
        if name not in UNTAKEN:
            raise TypeError(f"DDP() has no argument {name!r}")
        if value:
            raise TypeError(f"DDP does not take {name}: {UNTAKEN[name]}")
    if dim != 0:
        raise ValueError(f"dim={dim}: DDP does not split inputs, each rank has its own; leave it 0")
    if device_ids is not None and not isinstance(device_ids, list | tuple):
        raise TypeError(f"device_ids is a list of one device, not {type(device_ids).__name__}")
    given = [*(device_ids or []), *([] if output_device is None else [output_device])]
    on = {p.device for p in module.parameters()}
    for device in given:
        named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if len(device_ids or given) != 1 or on != {named}:
            where = " and ".join(sorted(map(str, on)))
            raise ValueError(
                f"device_ids={device_ids}, output_device={output_device}: each rank drives the one "
                f"device that its module is on, which is {where}"
            )
