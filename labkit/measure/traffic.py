"""Count what a step sends, by any library: every collective of torch passes one dispatch point.

    our DDP      -> labkit.comm -> torch.distributed --+
    PyTorch DDP  -> its reducer, in C++ ---------------+--> c10d operators --> gloo or NCCL
    fully_shard  -> torch.distributed -----------------+         ^ seen here

`comm.record()` sees labkit's own messages, with times. A dispatch mode below all Python wrappers
also sees PyTorch's, but only their start. Messages and payload are counted; bytes sent per rank are
derived from the payload by the ring formula of labkit.ring_cost. Where labkit.gloo_workarounds
sends an operation of REPLACED as other ones, its payload is that of the operation.
"""

from threading import local

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit import gloo_workarounds
from labkit.comm_log import record
from labkit.ring_cost import sent_bytes, sent_of_splits

# operator -> (index of the argument that holds the payload, the operation of labkit.ring_cost)
OPERATORS = {
    "allreduce_": (0, "all_reduce"),
    "allreduce_coalesced_": (0, "all_reduce"),
    "_reduce_scatter_base_": (1, "reduce_scatter"),
    "_allgather_base_": (0, "all_gather"),
    "alltoall_base_": (1, "all_to_all"),
    "broadcast_": (0, "broadcast"),
    "send": (0, "send"),
    "recv_": (0, "recv"),
}

REPLACED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")  # by gloo_workarounds


class TrafficCounter(TorchDispatchMode):
    """A context manager that counts messages (operations), payload_bytes and sent_bytes.

    world_size: of the groups that communicate. Raises ValueError for an unknown collective. It does
    not see messages that a future's callback sends on a backend's thread, as in PyTorch's
    powerSGD_hook.
    """

    def __init__(self, world_size):
        super().__init__()
        self.world_size = world_size
        self.messages = self.payload_bytes = self.sent_bytes = 0
        self._thread = local()  # begun: labkit.comm's operation whose messages follow

    def __enter__(self):
        self._log = record(self, timed=False)
        self._log.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        self._log.__exit__(*error)
        return super().__exit__(*error)

    def append(self, event):
        """Note an operation of labkit.comm: this thread sends its messages next."""
        sends = event.group_size > 1 and event.payload_bytes
        self._thread.begun = event if event.op in REPLACED and sends else None

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor runs operators on its local shard, which are counted
        if operator.namespace == "c10d":
            self.count(operator.overloadpacket.__name__, args)
        return operator(*args, **(kwargs or {}))

    def count(self, name, args):
        if name == "barrier":
            return
        if name not in OPERATORS:
            raise ValueError(
                f"no formula for the bytes that c10d.{name} sends: "
                "add it to labkit.measure.traffic.OPERATORS"
            )
        position, op = OPERATORS[name]
        payload = sum(t.nbytes for t in tree_leaves(args[position]) if isinstance(t, torch.Tensor))
        if not gloo_workarounds.continues():
            begun, self._thread.begun = getattr(self._thread, "begun", None), None
            self.messages += 1
            self.payload_bytes += begun.payload_bytes if begun else payload
        sizes = args[4] if op == "all_to_all" else None
        if sizes:
            rank = dist.ProcessGroup.unbox(args[2]).rank()
            self.sent_bytes += sent_of_splits(payload, sizes, rank)
        else:
            self.sent_bytes += sent_bytes(op, self.world_size, payload)
