"""Settings and checkpoint state of a loss scaler, with the names of torch.amp.GradScaler.

ours.load_state_dict(theirs.state_dict())        theirs.load_state_dict(ours.state_dict())
"""

from labkit.pickle_support import check_default_group


class ScalerState:
    """Base of GradScaler: getters, setters, state_dict and pickle."""

    @staticmethod
    def _expect(holds, otherwise):
        if not holds:
            raise RuntimeError(otherwise)

    def __getstate__(self):
        if self._enabled:
            idle = not self._verdicts and not self._stepped
            self._expect(
                idle,
                "GradScaler cannot be pickled between unscale_() and update(): call update() first",
            )
        check_default_group(self, self.process_group)
        return self.__dict__ | {"process_group": None}

    def is_enabled(self):
        return self._enabled

    def get_scale(self):
        """Return the scale as a float; 1.0 if disabled."""
        return self._scale if self._enabled else 1.0

    def get_growth_factor(self):
        return self._growth_factor

    def set_growth_factor(self, new_factor):
        self._growth_factor = new_factor

    def get_backoff_factor(self):
        return self._backoff_factor

    def set_backoff_factor(self, new_factor):
        self._backoff_factor = new_factor

    def get_growth_interval(self):
        return self._growth_interval

    def set_growth_interval(self, new_interval):
        self._growth_interval = new_interval

    def state_dict(self):
        """Return torch.amp.GradScaler's keys, which it can load, and the overflows.

        Empty if disabled.
        """
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._good_steps,
            "_overflows": self._overflows,
        }

    def load_state_dict(self, state_dict):
        """Load a state of this class or torch's.

        Raises RuntimeError if it is empty (disabled scaler).
        """
        if not self._enabled:
            return
        self._expect(
            state_dict, "the state dict is empty: it was saved by a GradScaler(enabled=False)"
        )
        self._set_scale(state_dict["scale"])
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._good_steps = state_dict["_growth_tracker"]
        self._overflows = state_dict.get("_overflows", 0)
