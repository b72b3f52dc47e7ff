"""Buckets and hooks follow the parameters through to(), deepcopy and pickle.

    wrapper.to(device)    parameters in other memory   _watch() again, with the same comm hook
    copy.deepcopy         other parameters             _watch() those, same ranks, shared hook
    torch.save, pickle    no group can be written      on the default group, no hook, as in PyTorch

Nothing is sent.
"""

import copy

from labkit.ddp.wrapper import Wrapper
from labkit.pickle_support import check_default_group


class Portable(Wrapper):
    """Base of a wrapper: `_watch()` makes what `made_by_watching` names, also a `_reducer`."""

    made_by_watching = ()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        old = self._reducer
        old.detach()
        self._watch()
        self._reducer.use_hook(old.state, old.hook)
        return self

    def __deepcopy__(self, memo):
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self._portable(), memo)
        twin.process_group = self.process_group
        twin._watch()
        twin._reducer.use_hook(self._reducer.state, self._reducer.hook)
        return twin

    def _portable(self):
        left = ("process_group", *self.made_by_watching)
        return {key: value for key, value in self.__dict__.items() if key not in left}

    def __getstate__(self):
        check_default_group(self, self.process_group)
        return self._portable()

    def __setstate__(self, state):
        super().__setstate__(state)
        self.process_group = None
        self._watch()
