"""The private names of torch that labkit uses, all in one file, for the day that torch changes one.

    autograd engine    which backward runs, whether it visits a node, a callback at its end
    process groups     a group by its name, the default store, timeouts, a world of fake ranks
    torchelastic       the delay and the name lookup of its rendezvous
    operators          foreach copies, assertions on the device, unscaling, the modes that are on

Tried with torch 2.13, the version in requirements.txt, which has no public name for any of them.
"""

from contextlib import contextmanager
from functools import cache
from importlib import import_module
from time import monotonic_ns
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.overrides import _get_current_function_mode_stack

# ---- operators: each is one kernel on many tensors, or on a flag that the host does not read

foreach_copy = torch._foreach_copy_  # (destinations, sources)
assert_async = torch._assert_async  # (bool tensor, message): raises on the device
unscale_and_find_inf = (
    torch._amp_foreach_non_finite_check_and_unscale_
)  # (gradients, flag, 1/scale)


function_modes = _get_current_function_mode_stack  # () -> [TorchFunctionMode, outermost first]


# ---- the autograd engine


def current_backward():
    """Return the engine's number of the innermost backward that runs in this thread; -1: none."""
    return torch._C._current_graph_task_id()


def in_backward():
    """Return whether this thread runs a backward."""
    return current_backward() != -1


def in_node():
    """Return whether this thread is inside a node of the graph, as in a backward in a backward."""
    return torch._C._current_autograd_node() is not None


def will_visit(node):
    """Return whether the backward that runs will execute a node of the graph."""
    return torch._C._will_engine_execute_node(node)


def call_after_backward(function):
    """Have the engine call function() at the end of the backward that runs."""
    Variable._execution_engine.queue_callback(function)


def gradient_hooks(parameter):
    """Return the functions given to parameter.register_post_accumulate_grad_hook()."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


# ---- process groups


def default_store():
    """Return the store by which the ranks of the default group have met."""
    return distributed_c10d._get_default_store()


def group_named(name):
    """Return the process group with this name."""
    return distributed_c10d._resolve_process_group(name)


def set_default_timeout(timeout):
    """Set the timeout of groups that are made later. timeout: a datetime.timedelta."""
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout


def set_timeout(timeout):
    """Set the timeout of the default group. timeout: a datetime.timedelta."""
    distributed_c10d._set_pg_timeout(timeout)


def timeout_of(group=None):
    """Return the timeout of a group on the CPU, a datetime.timedelta. None: the default group."""
    backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
    return backend.options._timeout


@cache
def register_fake_backends(*names):
    """Register PyTorch's fake backend, which sends nothing, for the CPU and the meta device."""
    fake_pg = import_module("torch.testing._internal.distributed.fake_pg")
    for name in names:
        dist.Backend.register_backend(name, fake_pg._create_fake_pg, True, ["cpu", "meta"])
    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):
        import_module("torch.distributed._tools.fake_collectives")  # older than torch 2.13


@contextmanager
def another_world(backend, rank, ranks):
    """Inside, this process is rank `rank` of `ranks` ranks of a fake backend.

    The groups of a process that is a rank already are hidden, and come back afterwards.
    """
    own_world = distributed_c10d._world
    distributed_c10d._world = SimpleNamespace(
        default_pg=None, pg_map={}, pg_names={}, pg_group_ranks={}, pg_backend_config={},
        group_count=monotonic_ns(),  # groups are named by it, and names must differ
        tags_to_pg={}, pg_to_tag={}, pg_coalesce_state={}, comms=[],
    )  # fmt: skip
    try:
        dist.init_process_group(backend, rank=rank, world_size=ranks, store=dist.HashStore())
        # without it each group warns that it has no default
        dist.group.WORLD._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        yield
    finally:
        distributed_c10d._world = own_world


# ---- torchelastic


def shorten_rendezvous(one_node):
    """Remove two delays from the rendezvous of torchelastic in this process.

    one_node: do not wait for up to 0.3 s, which spreads the nodes of a large job.
    """
    rendezvous = import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    if one_node:
        rendezvous._delay = lambda seconds: None
    # It looks up the caller's name in all modules for its log, which takes half the time of a
    # launch.
    rendezvous.get_method_name = lambda depth=2: ""
