"""Errors of one rank, raised on all: otherwise the other ranks would wait for it.

    rank 0   write ... done             --- "" -------------->  raise: rank 1: no space left
    rank 1   write ... no space left    --- "rank 1: ..." --->  raise: rank 1: no space left

Otherwise the others would wait for the one that has failed. Sent per rank and call: its text, to
all the others. Held besides: nothing.
"""

import json
from contextlib import contextmanager

import torch
import torch.distributed as dist

from labkit.replicas import gather_bytes


@contextmanager
def raised_on_all(group=None, device="cpu"):
    """What goes wrong inside on one rank of the group is raised on all. Collective at its end.

    That rank raises its own exception, the others a ValueError with its words. Nobody is asked on
    the meta device, where nothing is sent.
    """
    failure = None
    try:
        yield
    except Exception as reason:
        failure = reason
    words = "" if failure is None else str(failure) or type(failure).__name__
    alone = torch.device(device).type == "meta"
    said = [] if alone else gather_bytes(words.encode(), group, device)
    if failure is not None:
        raise failure
    for rank, theirs in enumerate(said):
        if theirs:
            raise ValueError(f"rank {rank}: {theirs.decode()}")


class Together:
    """All ranks; without a process group, one process alone. Collective, as are its methods.

    error: the exception that agree() raises. The group is its own: a thread may use it during a
    step, and its messages do not come between those of the step.
    """

    def __init__(self, error):
        self.error = error
        alone = not dist.is_initialized()
        self.rank, self.n = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        self.group = None if alone else dist.new_group(backend="gloo")

    def tell(self, value):
        """What all ranks say, in order. value: what JSON takes."""
        text = json.dumps(value).encode()
        texts = [text] if self.n == 1 else gather_bytes(text, self.group)
        return [json.loads(one) for one in texts]

    def agree(self, words):
        """Raises the error on all ranks where one has something to say."""
        if said := [one for one in self.tell(words) if one]:
            raise self.error(said[0])

    @contextmanager
    def agreed(self, failed):
        """What goes wrong inside on one rank is raised on all. failed: what is so then."""
        words = ""
        try:
            yield
        except Exception as reason:
            line = " ".join(str(reason).split())
            words = f"{failed}: rank {self.rank}: {line}"
        self.agree(words)

    def close(self):
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
