"""Errors of one rank, raised on all ranks: otherwise the other ranks would wait for it.

    rank 0   write ... done             --- "" -------------->  raise: rank 1: no space left
    rank 1   write ... no space left    --- "rank 1: ..." --->  raise: rank 1: no space left

Sent per rank and call: its error text, to all other ranks.
"""

import json
from contextlib import contextmanager

import torch
import torch.distributed as dist

from labkit.replicas import gather_bytes


@contextmanager
def raised_on_all(group=None, device="cpu"):
    """Raise an exception of one rank on all ranks of the group. Collective at its end.

    That rank raises its own exception, the others a ValueError with its message. On the meta
    device nothing is sent.
    """
    failure = None
    try:
        yield
    except Exception as reason:
        failure = reason
    message = "" if failure is None else str(failure) or type(failure).__name__
    meta = torch.device(device).type == "meta"
    messages = [] if meta else gather_bytes(message.encode(), group, device)
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message:
            raise ValueError(f"rank {rank}: {message.decode()}")


class Together:
    """Exchanges errors among all ranks; or one process without a process group. Collective methods.

    error: the exception that agree() raises. The object has its own group: a thread may use it
    during a step without mixing its messages with the step's.
    """

    def __init__(self, error):
        self.error = error
        alone = not dist.is_initialized()
        self.rank, self.n = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        self.group = None if alone else dist.new_group(backend="gloo")

    def tell(self, value):
        """Gather the values of all ranks, in order. value: JSON-serializable.

        Equal values are one object: do not change them.
        """
        text = json.dumps(value).encode()
        texts = [text] if self.n == 1 else gather_bytes(text, self.group)
        values = {one: json.loads(one) for one in set(texts)}
        return [values[one] for one in texts]

    def agree(self, message):
        """Raise the error on all ranks if any rank passes a message; "" means no error."""
        if messages := [text for text in self.tell(message) if text]:
            raise self.error(messages[0])

    @contextmanager
    def agreed(self, failed):
        """Raise an exception of one rank on all ranks. failed: beginning of the message."""
        message = ""
        try:
            yield
        except Exception as reason:
            line = " ".join(str(reason).split())
            message = f"{failed}: rank {self.rank}: {line}"
        self.agree(message)

    def close(self):
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
