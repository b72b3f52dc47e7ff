"""Mixed precision: 16 bits where enough, fp32 where not; a loss scale keeps fp16 gradients from 0.

    loss x scale --backward--> gradients x scale --unscale_--> gradients --clip--> step
                  fp16 ends at 2^-24; with a scale     | rank 0: inf?  no |   all_reduce MAX:
                  of 2^16 it reaches down to 2^-40     | rank 1: inf? YES |   all skip this step
    scale  65536 32768 .. 65536  inf: x backoff_factor; growth_interval without: x growth_factor

autocast (autocast_mode.py, its table in autocast_lists.py) chooses the precision of each operation;
MasterWeights (labkit/zero/master_weights.py) is for a model with parameters of 16 bits.
Sent per rank and unscale_: 4 numbers, to agree. bf16 has fp32's range and needs no scale:
GradScaler(enabled=False). Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2;
hysteresis as in Megatron-LM (Shoeybi et al., 2019); agreement over shards: Rajbhandari et al.,
ZeRO, SC 2020 (each rank sees only its share of the gradients).
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from labkit import comm
from labkit.amp.autocast_mode import autocast
from labkit.amp.unscale import gradients_of, unscale_and_check
from labkit.pickle_support import check_default_group
from labkit.zero.master_weights import MasterWeights

__all__ = ["GradScaler", "MasterWeights", "autocast", "gradients_of", "unscale_and_check"]

NO_GRADIENTS = "nothing to check: no rank has a gradient among the optimizer's parameters"


class GradScaler:
    """Dynamic loss scaling with the calls of torch.amp.GradScaler, one verdict for all ranks.

        scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
        scaler.unscale_(optimizer); clip_grad_norm_(...)    to clip: between backward and step

    device: of the scale, "cuda" or "cpu". min_scale: backing off ends there.
    hysteresis: an overflow halves the scale only from this many on, counted since it last grew.
    process_group: who agrees; default all ranks, if there are. All must call unscale_ (or step)
        alike; a rank that trains alone gives a group of one. Some ranks may hold no gradients
        (empty shards).
    Raises RuntimeError for calls in the wrong order, scales that differ between ranks, and a scale
    that is 0; ValueError for fp16 gradients (use MasterWeights) and for arguments that cannot be.
    """

    skipped = False  # whether the last step() left out the optimizer's step

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
        self._enabled, self.process_group = enabled, process_group
        self.device = torch.device(device)
        if not enabled:
            return
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                "GradScaler: no CUDA device here: "
                'pass device="cpu", or enabled=False to train without'
            )
        if (
            growth_factor <= 1
            or not 0 < backoff_factor < 1
            or growth_interval < 1
            or hysteresis < 1
        ):
            raise ValueError(
                "GradScaler: growth_factor above 1, backoff_factor between 0 and 1, "
                "growth_interval and hysteresis at least 1, "
                f"not {growth_factor}, {backoff_factor}, {growth_interval}, {hysteresis}"
            )
        self._growth_factor, self._backoff_factor, self._growth_interval = (
            growth_factor,
            backoff_factor,
            growth_interval,
        )
        self._hysteresis, self._min_scale = hysteresis, min_scale
        self._good_steps, self._overflows = 0, 0
        self._used = False  # scale() has been called
        self._set_scale(init_scale)
        self._forget()

    @staticmethod
    def _expect(holds, otherwise):
        if not holds:
            raise RuntimeError(otherwise)

    def _set_scale(self, value):
        self._scale = torch.tensor(value, dtype=torch.float32).item()  # rounded as the tensors are
        self._tensors = {}

    def _forget(self):
        self._verdicts, self._stepped = {}, set()  # by id(optimizer), since the last update()

    def _on(self, device):
        """(scale, 1 / scale) as tensors on device, because fp16 x fp32 scalar tensor gives fp32."""
        if device not in self._tensors:
            inverse = 1 / self._scale  # in fp64, rounded once
            self._tensors[device] = tuple(
                torch.full((), v, device=device) for v in (self._scale, inverse)
            )
        return self._tensors[device]

    # ---- one iteration, in this order

    def scale(self, outputs):
        """outputs (a tensor or an iterable of them) times the scale; a scalar fp16 loss in fp32."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            self._used = True
            return outputs * self._on(outputs.device)[0]
        if isinstance(outputs, Iterable) and not isinstance(outputs, str):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled
        raise ValueError(
            f"scale() takes a tensor or an iterable of tensors, not {type(outputs).__name__}"
        )

    def unscale_(self, optimizer):
        """Divide the optimizer's gradients by the scale, in place; ask all ranks for inf or NaN.

        Once per optimizer and update(), when they are complete. Collective. No device sync.
        If not enabled, it only waits for gradients (Horovod's) and moves them (MasterWeights).
        """
        if hasattr(optimizer, "take_gradients"):
            optimizer.take_gradients()
        if not self._enabled:
            return
        self._expect(self._used, "unscale_() before scale(loss): scale the loss first")
        self._expect(id(optimizer) not in self._stepped, "unscale_() after step(): call it before")
        self._expect(
            id(optimizer) not in self._verdicts,
            "unscale_() twice since the last update(): once is enough",
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
        """[found_inf, has_gradients, scale, -scale], the largest of all ranks. Alone: found_inf."""
        if not (dist.is_initialized() and dist.get_world_size(self.process_group) > 1):
            self._expect(has_gradients, NO_GRADIENTS)
            return found_inf
        seen = torch.full((4,), self._scale, device=self.device)  # no copy: the host would wait
        seen[0], seen[1], seen[3] = found_inf, float(has_gradients), -self._scale
        comm.all_reduce(seen, dist.ReduceOp.MAX, self.process_group)
        return seen

    def _found_inf(self, key):
        """The verdict on an optimizer, as a bool."""
        verdict = self._verdicts[key]
        if isinstance(verdict, torch.Tensor):
            verdict = self._verdicts[key] = self._read(verdict)
        return verdict

    def _read(self, verdict):
        """The host waits for the device here."""
        if verdict.dim() == 0:
            return verdict.item() > 0
        found_inf, has_gradients, largest, smallest = verdict.tolist()
        self._expect(has_gradients, NO_GRADIENTS)
        self._expect(
            largest == -smallest,
            f"the loss scale differs between ranks, from {-smallest:g} to {largest:g}: "
            "load the same state on all",
        )
        return found_inf > 0

    def step(self, optimizer, *args, **kwargs):
        """optimizer.step(*args, **kwargs) if all gradients of all ranks are finite, else None.

        Unscales them if you have not. No closure.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        self._expect("closure" not in kwargs, "GradScaler.step takes no closure")
        self._expect(self._used, "step() before scale(loss): scale the loss first")
        self._expect(
            id(optimizer) not in self._stepped,
            "step() twice since the last update(): update() in between",
        )
        if id(optimizer) not in self._verdicts:
            self.unscale_(optimizer)
        self.skipped = self._found_inf(id(optimizer))
        self._stepped.add(id(optimizer))
        return None if self.skipped else optimizer.step(*args, **kwargs)

    def update(self, new_scale=None):
        """Adapt the scale to what was found since the last update(), or set it to new_scale."""
        if not self._enabled:
            return
        self._expect(self._used, "update() before scale(loss): scale the loss first")
        if new_scale is not None:
            self._set_scale(float(new_scale))
        else:
            self._expect(
                self._verdicts, "update() before step() or unscale_(): nothing was checked"
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
                    "the loss scale has fallen to 0: the gradients overflow at any scale",
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
                "GradScaler can be pickled before unscale_() or after update(), not in between",
            )
        check_default_group(self, self.process_group)
        return self.__dict__ | {"process_group": None}

    def is_enabled(self):
        return self._enabled

    def get_scale(self):
        """The scale, a float; 1.0 if not enabled."""
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
        """torch.amp.GradScaler's keys (it can load them), and the overflows. Empty if disabled."""
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
        """Of this class or torch's. Raises RuntimeError for the empty one of a disabled scaler."""
        if not self._enabled:
            return
        self._expect(
            state_dict, "the state dict is empty: it was saved by a GradScaler(enabled=False)"
        )
        self._set_scale(state_dict["scale"])
        self._growth_factor, self._backoff_factor = (
            state_dict["growth_factor"],
            state_dict["backoff_factor"],
        )
        self._growth_interval = state_dict["growth_interval"]
        self._good_steps, self._overflows = (
            state_dict["_growth_tracker"],
            state_dict.get("_overflows", 0),
        )
