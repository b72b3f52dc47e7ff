"""A comm hook that raises on one rank: the others learn of it, instead of waiting for ever.

    rank 0   hook(bucket 0)   hook(bucket 1)   wait: once a second, has a rank told? -> RuntimeError
    rank 1   hook(bucket 0)   hook(bucket 1) raises: tells the store, "the comm hook of rank 1 ..."

Sent: nothing, unless a hook raises or a step is a second late. The store is the one where the ranks
have met.
"""

import threading

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

PATIENCE = 1.0  # seconds between two looks into the store


class RankFailed(RuntimeError):
    """Another rank's comm hook has raised: what was sent is under way until that rank goes on."""


class HookFailures:
    """Who has told of a failure, by step. All ranks of the group count steps alike."""

    def __init__(self, group=None):
        self.group, self.step = group, 0

    def _key(self):
        return f"labkit/comm_hook/{(self.group or dist.group.WORLD).group_name}/{self.step}"

    def call(self, hook, state, bucket):
        """hook(state, bucket); if it raises, so will the others' wait."""
        try:
            return hook(state, bucket)
        except Exception as error:
            told = f"the comm hook of rank {dist.get_rank()} raised {type(error).__name__}: {error}"
            _get_default_store().set(self._key(), told)
            raise

    def wait(self, pending):
        """pending.wait(). Raises RankFailed if it takes long and another rank's hook has raised."""
        future = pending.get_future() if hasattr(pending, "get_future") else pending
        if hasattr(future, "add_done_callback") and not future.done():
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            while not done.wait(PATIENCE):
                if _get_default_store().check([self._key()]):
                    raise RankFailed(_get_default_store().get(self._key()).decode())
        return pending.wait()
