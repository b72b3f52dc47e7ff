"""Saves and restores what a result depends on: random numbers, autocast, torch function modes.

    first time   random state r0 | autocast bf16 | save r0, bf16; y = dropout(linear(x))
    again        random state r7 | autocast off  | set r0, bf16; y = dropout(linear(x)); set r7, off

Both runs then compute the same bits. Cost: one copy of the random state (5 KB on CPU, 16 bytes on
CUDA) a call.
"""

from contextlib import ExitStack, contextmanager

import torch
from torch.overrides import _get_current_function_mode_stack

AUTOCAST_DEVICES = ("cpu", "cuda")


class Surroundings:
    """Saves the state when constructed. `with surroundings.again():` restores it in the block.

    tensors: the function's inputs; the random states of their CUDA devices and of the current
    device are saved. random=False does not save them: dropout then draws other masks the second
    time.
    """

    def __init__(self, tensors, random=True):
        self.devices = {t.device for t in tensors if t.device.type == "cuda"}
        if torch.cuda.is_initialized():
            self.devices.add(torch.device("cuda", torch.cuda.current_device()))
        self.random = self.random_state() if random else None
        self.autocast = autocast_settings()
        self.modes = _get_current_function_mode_stack()

    def random_state(self):
        """Return the state of these devices' generators: {device: state}."""
        return {"cpu": torch.get_rng_state()} | {
            device: torch.cuda.get_rng_state(device) for device in self.devices
        }

    @contextmanager
    def again(self):
        """Restore the saved state in the block, and the current state after it."""
        with ExitStack() as undo:
            if self.random is not None:
                undo.callback(set_random_state, self.random_state())
                set_random_state(self.random)
            undo.callback(set_autocast, autocast_settings())
            set_autocast(self.autocast)
            torch.autocast_increment_nesting()
            undo.callback(leave_autocast)
            active = _get_current_function_mode_stack()
            for mode in self.modes:
                if mode not in active:
                    undo.enter_context(mode)
            yield


def set_random_state(states):
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)


def autocast_settings():
    """Return PyTorch's autocast settings: ([(device type, enabled, dtype)], cache enabled)."""
    devices = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in AUTOCAST_DEVICES
    ]
    return devices, torch.is_autocast_cache_enabled()


def set_autocast(settings):
    devices, cache = settings
    for kind, enabled, dtype in devices:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(cache)


def leave_autocast():
    """Leave a nesting level of autocast.

    After the outermost one, drop cached casts, because weights change in the next step.
    """
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
