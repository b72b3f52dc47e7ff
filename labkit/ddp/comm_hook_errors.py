"""Report a comm hook that raises on one rank to the other ranks, which would wait for ever.

    rank 0   hook(bucket 0)   hook(bucket 1)   wait: once a second, read the store -> RuntimeError
    rank 1   hook(bucket 0)   hook(bucket 1) raises: write "the comm hook of rank 1 ..." there

Sent: nothing, unless a hook raises or a step is a second late. The store is that of the default
process group.
"""

import threading

import torch
import torch.distributed as dist

from labkit.ddp.bucket import Bucket
from labkit.torch_private import default_store

PATIENCE = 1.0  # seconds between two reads of the store


def future_from(returned):
    """Return the result of a comm hook. Raises TypeError if it has no wait()."""
    if not hasattr(returned, "wait"):
        raise TypeError(
            f"a comm hook returned {type(returned).__name__}: "
            "it must return a torch.futures.Future of the averaged tensor"
        )
    return returned


def check_annotations(hook):
    """Raise ValueError, as PyTorch does, for a hook annotated with other types than it handles."""
    told = getattr(hook, "__annotations__", {})
    for name, right in (("bucket", (dist.GradBucket, Bucket)), ("return", (torch.futures.Future,))):
        found = told.get(name)
        if isinstance(found, type) and not issubclass(found, right):
            raise ValueError(
                f"comm hook: {name} is annotated {found.__name__}, and must be {right[0].__name__}"
            )


class RankFailed(RuntimeError):
    """Another rank's comm hook has raised. Messages already sent wait for that rank to continue."""


class HookFailures:
    """Failures of comm hooks by step, reported in the store. All ranks count the same steps.

    Entries from before this object belong to another one, whose steps had the same numbers.
    """

    def __init__(self, group=None):
        self.group, self.step = group, 0
        self._before = self._count()

    def _key(self, name):
        return f"labkit/comm_hook/{(self.group or dist.group.WORLD).group_name}/{name}"

    def _count(self, more=0):
        return default_store().add(self._key("count"), more)

    def call(self, hook, state, bucket):
        """Call hook(state, bucket). If it raises, wait() raises on the other ranks."""
        try:
            return future_from(hook(state, bucket))
        except Exception as error:
            told = f"the comm hook of rank {dist.get_rank()} raised {type(error).__name__}: {error}"
            default_store().set(self._key(self._count(1)), f"{self.step} {told}")
            raise

    def told(self):
        """Return the failure that a rank reported in this step, or None."""
        for number in range(self._before + 1, self._count() + 1):
            step, _, words = default_store().get(self._key(number)).decode().partition(" ")
            if int(step) == self.step:
                return words
        return None

    def wait(self, pending):
        """Wait for `pending`. Raises RankFailed if another rank's hook raises in the meantime."""
        future = pending.get_future() if hasattr(pending, "get_future") else pending
        if hasattr(future, "add_done_callback") and not future.done():
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            while not done.wait(PATIENCE):
                if words := self.told():
                    raise RankFailed(words)
        return pending.wait()
