"""Autocast: parameters stay fp32; each operation casts its inputs to a suitable precision.

    x fp32 -+               +-- weight fp32, cast once, cached until the block ends
            v               v
         [ bf16 ] linear [ bf16 ] -> bf16 -> gelu -> bf16 -> linear -> bf16 -> loss [ fp32 ] -> fp32
    backward: autograd has recorded each cast, and casts each gradient back: weight.grad is fp32

A TorchFunctionMode intercepts torch's functions above autograd. It does not see operations inside a
C++ function (the linear inside an LSTM). labkit/amp/autocast_lists.py says which dtype each uses.

Cost: a 16-bit copy of every weight in a product: half the parameters' bytes, until backward ends.
Micikevicius et al., Mixed Precision Training, ICLR 2018, sections 3.1 and 3.3.
"""

import functools
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from labkit.amp.autocast_lists import TABLES

DEFAULT = {"cuda": torch.float16, "cpu": torch.bfloat16}
CASTABLE = {torch.float32, torch.float16, torch.bfloat16}  # fp64 is an explicit choice: not cast


class autocast(TorchFunctionMode):
    """`with autocast("cuda", torch.float16): loss = ...`, or a decorator. Not for backward.

    dtype: torch.float16 or torch.bfloat16; default bfloat16 on "cpu", float16 on "cuda".
    enabled=False: no casts, also inside another autocast. cache_enabled: cast each weight once
    per block. Open one block for each forward, as FSDP refills weights without notice.

    Operations with out= and in-place ones are not changed. Raises ValueError for an unknown device
    or dtype, RuntimeError if this machine cannot multiply in dtype, or for an operation that would
    overflow.
    """

    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=True):
        super().__init__()
        if device_type not in TABLES:
            raise ValueError(
                f"autocast supports {' and '.join(TABLES)}, not device_type={device_type!r}"
            )
        self.device_type = device_type
        self.dtype = dtype or DEFAULT[device_type]
        self.enabled = enabled
        self.cache_enabled = cache_enabled
        if enabled:
            if self.dtype not in (torch.float16, torch.bfloat16):
                raise ValueError(
                    f"autocast supports torch.float16 and torch.bfloat16, not dtype={self.dtype}"
                )
            if reason := why_not(device_type, self.dtype):
                raise RuntimeError(f"autocast({device_type!r}, {self.dtype}): {reason}")
        self._rules = TABLES[device_type] if enabled else {}
        self._casts = {}
        self._depth = 0
        # the enclosing autocasts of this device: only the innermost one casts
        self._around = []
        self._quiet = False

    def __enter__(self):
        open_ones = [
            m
            for m in _get_current_function_mode_stack()
            if isinstance(m, autocast) and m is not self
        ]
        self._around = [mode for mode in open_ones if mode.device_type == self.device_type]
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self._depth -= 1
        if self._depth == 0:
            self._casts.clear()

    def __call__(self, function):
        @functools.wraps(function)
        def inside(*args, **kwargs):
            with autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled):
                return function(*args, **kwargs)

        return inside

    def __torch_function__(self, function, types, args=(), kwargs=None):
        rule = self._rules.get(function)
        if rule is not None and not self._quiet and not (kwargs and kwargs.get("out") is not None):
            args, kwargs = self._apply(rule, function, args, kwargs or {})
        if self._around:
            with quiet(self._around):
                return function(*args, **(kwargs or {}))
        return function(*args, **kwargs) if kwargs else function(*args)

    def _apply(self, rule, function, args, kwargs):
        """Return (args, kwargs), cast by the rule."""
        if rule == "forbidden":
            raise RuntimeError(
                f"{function.__name__} overflows in 16 bits: use binary_cross_entropy_with_logits, "
                "or autocast(enabled=False) around it with fp32 inputs"
            )
        low = rule == "low" or (rule == "promote" and not self._any_fp32((args, kwargs.values())))
        dtype, cast = self.dtype if low else torch.float32, self._cast
        return [cast(a, dtype) for a in args], {name: cast(a, dtype) for name, a in kwargs.items()}

    def _cast(self, value, dtype):
        if isinstance(value, torch.Tensor):
            held = self._casts.get(id(value))
            if (
                held is not None
                and dtype is self.dtype
                and held[1] == (value._version, torch.is_grad_enabled())
            ):
                return held[2]
            if (
                value.dtype is dtype
                or value.dtype not in CASTABLE
                or value.device.type != self.device_type
            ):
                return value
            copy = value.to(dtype)
            if dtype is self.dtype and self.cache_enabled and value.requires_grad and value.is_leaf:
                # Cast once per block, but again after a change. A copy made under no_grad is not
                # connected to the weight, so it is not used where gradients are needed. Holding
                # the weight keeps its id unique.
                self._casts[id(value)] = (value, (value._version, torch.is_grad_enabled()), copy)
            return copy
        if type(value) in (list, tuple):
            return type(value)([self._cast(item, dtype) for item in value])
        return value

    def _any_fp32(self, values):
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.dtype is torch.float32 and value.device.type == self.device_type:
                    return True
            elif (
                not isinstance(value, str) and hasattr(value, "__iter__") and self._any_fp32(value)
            ):
                return True
        return False


@functools.cache
def why_not(device_type, dtype):
    """Return None if this machine can multiply matrices of dtype on the device, else the reason."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return "this machine has no CUDA device: use 'cpu'"
    one = torch.ones(1, 1, dtype=dtype, device=device_type)
    try:
        torch.mm(one, one)
    except RuntimeError as error:
        return (
            f"this device cannot multiply in {dtype}: use the other 16-bit dtype or fp32 ({error})"
        )
    return None


@contextmanager
def quiet(modes):
    """Disable these autocasts within the block: an inner one has cast already."""
    before = [mode._quiet for mode in modes]
    try:
        for mode in modes:
            mode._quiet = True
        yield
    finally:
        for mode, was in zip(modes, before, strict=True):
            mode._quiet = was
