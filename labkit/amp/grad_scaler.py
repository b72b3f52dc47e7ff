"""Mixed precision: 16 bits where enough, fp32 where not; a loss scale keeps fp16 gradients above 0.

    loss x scale --backward--> gradients x scale --unscale_--> gradients --clip--> step
                  fp16 ends at 2^-24; a scale of       | rank 0: inf?  no |   all_reduce MAX:
                  2^16 extends it to 2^-40             | rank 1: inf? YES |   all skip this step
    scale  65536 32768 .. 65536  inf: x backoff_factor; growth_interval without: x growth_factor

autocast (autocast_mode.py, with the table autocast_lists.py) chooses the precision of each
operation; MasterWeights (labkit/amp/master_weights.py) is for a model with 16-bit parameters.
Sent per rank and unscale_: 4 numbers, to agree. bf16 has fp32's range and needs no scale:
GradScaler(enabled=False). Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2;
hysteresis as in Megatron-LM (Shoeybi et al., 2019); agreement over shards: Rajbhandari et al.,
ZeRO, SC 2020 (each rank sees only its shard of the gradients).
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from labkit import comm
from labkit.amp.autocast_mode import autocast
from labkit.amp.master_weights import MasterWeights
from labkit.amp.unscale import gradients_of, unscale_and_check
from labkit.pickle_support import check_default_group

__all__ = ["GradScaler", "MasterWeights", "autocast", "gradients_of", "unscale_and_check"]

NO_GRADIENTS = "no rank has a gradient for any parameter of the optimizer: call backward() first"


class GradScaler:
    """Dynamic loss scaling with the interface of torch.amp.GradScaler; all ranks agree on inf.

        scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
        scaler.unscale_(optimizer); clip_grad_norm_(...)    to clip: between backward and step

    device: of the check for inf that ranks exchange, "cuda" or "cpu". min_scale: the lower limit.
    hysteresis: the number of overflows since the last growth after which the scale decreases.
    process_group: the ranks that agree; default: all ranks, if any. All of them must call unscale_
        (or step) in the same order; a rank that trains alone passes a group of one. Some ranks may
        hold no gradients (empty shards).
    Raises RuntimeError without a CUDA device for device="cuda", for calls in the wrong order, if no
    rank has a gradient, if scales differ between ranks, and for a scale of 0; ValueError for fp16
    gradients (use MasterWeights) and for invalid arguments.
    """

    skipped = False  # whether the last step() skipped the optimizer's step

    def __init__(
        self,
        device="cuda",
        init_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        enabled=True,
        hysteresis=1,
        min_scale=0.0,
        process_group=None,
    ):
        self._enabled = enabled
        self.process_group = process_group
        self.device = torch.device(device)
        if not enabled:
            return
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                "GradScaler found no CUDA device: "
                'pass device="cpu", or enabled=False to train without a scale'
            )
        if (
            growth_factor <= 1
            or not 0 < backoff_factor < 1
            or growth_interval < 1
            or hysteresis < 1
        ):
            raise ValueError(
                f"GradScaler got {growth_factor=}, {backoff_factor=}, {growth_interval=}, "
                f"{hysteresis=}: they must be above 1, between 0 and 1, at least 1, at least 1"
            )
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._hysteresis = hysteresis
        self._min_scale = min_scale
        self._good_steps = 0
        self._overflows = 0
        self._used = False  # scale() has been called
        self._set_scale(init_scale)
        self._forget()

    @staticmethod
    def _expect(holds, otherwise):
        if not holds:
            raise RuntimeError(otherwise)

    def _set_scale(self, value):
        self._scale = torch.tensor(value, dtype=torch.float32).item()  # rounded like the tensors
        self._tensors = {}

    def _forget(self):
        self._verdicts, self._stepped = {}, set()  # by id(optimizer), since the last update()

    def _on(self, device):
        """Return (scale, 1 / scale) as fp32 tensors of 0 dimensions on the device."""
        if device not in self._tensors:
            inverse = 1 / self._scale  # in fp64, rounded once
            self._tensors[device] = tuple(
                torch.full((), v, device=device) for v in (self._scale, inverse)
            )
        return self._tensors[device]

    # ---- one iteration, in this order

    def scale(self, outputs):
        """Multiply outputs, a tensor or an iterable of them, by the scale.

        An fp16 scalar becomes fp32. Raises ValueError for other types.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            self._used = True
            return outputs * self._on(outputs.device)[0]
        if isinstance(outputs, Iterable) and not isinstance(outputs, str):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled
        raise ValueError(
            f"scale() needs a tensor or an iterable of tensors, not {type(outputs).__name__}"
        )

    def unscale_(self, optimizer):
        """Divide the optimizer's gradients by the scale in place; check all ranks' for inf or NaN.

        Call it once per optimizer and update(), when gradients are complete. Collective. Does not
        synchronize the device. If disabled, it only waits for gradients (Horovod) and moves them
        (MasterWeights).
        """
        if hasattr(optimizer, "take_gradients"):
            optimizer.take_gradients()
        if not self._enabled:
            return
        self._expect(self._used, "unscale_() was called before scale(loss): scale the loss first")
        self._expect(
            id(optimizer) not in self._stepped,
            "unscale_() was called after step(): call it before step()",
        )
        self._expect(
            id(optimizer) not in self._verdicts,
            "unscale_() was called twice since the last update(): call it once",
        )
        gradients = gradients_of(optimizer)
        found_inf = torch.zeros((), device=self.device)
        for device, same in gradients.items():
            found = found_inf if device == found_inf.device else torch.zeros((), device=device)
            for tensors in same.values():
                unscale_and_check(tensors, self._on(device)[1], found)
            if found is not found_inf:
                found_inf = torch.maximum(found_inf, found.to(found_inf.device, non_blocking=True))
        self._verdicts[id(optimizer)] = self._agree(found_inf, bool(gradients))

    def _agree(self, found_inf, has_gradients):
        """Return the maximum over ranks of [found_inf, has_gradients, scale, -scale].

        Without other ranks: found_inf only.
        """
        if not (dist.is_initialized() and dist.get_world_size(self.process_group) > 1):
            self._expect(has_gradients, NO_GRADIENTS)
            return found_inf
        seen = torch.full(
            (4,), self._scale, device=self.device
        )  # no copy, for which the host would wait
        seen[0], seen[1], seen[3] = found_inf, float(has_gradients), -self._scale
        comm.all_reduce(seen, dist.ReduceOp.MAX, self.process_group)
        return seen

    def _found_inf(self, key):
        """Return whether an optimizer's gradients contain inf or NaN on any rank."""
        verdict = self._verdicts[key]
        if isinstance(verdict, torch.Tensor):
            verdict = self._verdicts[key] = self._read(verdict)
        return verdict

    def _read(self, verdict):
        """Copy a verdict to the host. The host waits for the device here."""
        if verdict.dim() == 0:
            return verdict.item() > 0
        found_inf, has_gradients, largest, smallest = verdict.tolist()
        self._expect(has_gradients, NO_GRADIENTS)
        self._expect(
            largest == -smallest,
            f"the loss scale differs between ranks, from {-smallest:g} to {largest:g}: "
            "load the same state on all ranks",
        )
        return found_inf > 0

    def step(self, optimizer, *args, **kwargs):
        """Call optimizer.step(*args, **kwargs) if all gradients of all ranks are finite.

        Returns its result, or None if the step is skipped. Unscales the gradients first if needed.
        Does not support a closure.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        self._expect("closure" not in kwargs, "GradScaler.step() does not support a closure")
        self._expect(self._used, "step() was called before scale(loss): scale the loss first")
        self._expect(
            id(optimizer) not in self._stepped,
            "step() was called twice since the last update(): call update() in between",
        )
        if id(optimizer) not in self._verdicts:
            self.unscale_(optimizer)
        self.skipped = self._found_inf(id(optimizer))
        self._stepped.add(id(optimizer))
        return None if self.skipped else optimizer.step(*args, **kwargs)

    def update(self, new_scale=None):
        """Adapt the scale to the checks since the last update(), or set it to new_scale (float)."""
        if not self._enabled:
            return
        self._expect(self._used, "update() was called before scale(loss): scale the loss first")
        if new_scale is not None:
            self._set_scale(float(new_scale))
        else:
            self._expect(
                self._verdicts, "update() was called before step() or unscale_(): call step() first"
            )
            self._adapt(any(self._found_inf(key) for key in self._verdicts))
        self._forget()

    def _adapt(self, found_inf):
        if found_inf:
            self._good_steps = 0
            self._overflows += 1
            if self._overflows >= self._hysteresis:
                self._set_scale(max(self._scale * self._backoff_factor, self._min_scale))
                self._expect(
                    self._scale > 0,
                    "the loss scale has decreased to 0: the gradients overflow at any scale",
                )
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            self._good_steps = self._overflows = 0
            grown = torch.tensor(self._scale * self._growth_factor, dtype=torch.float32).item()
            if math.isfinite(grown):
                self._set_scale(grown)

    # ---- settings and state, by the names of torch.amp.GradScaler

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
        """Return a state that torch.amp.GradScaler can load, with the number of overflows added.

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
        """Load a state of this class or of torch.amp.GradScaler; do nothing if disabled.

        Raises RuntimeError if the state is empty: it was saved by a disabled scaler.
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
