"""Number formats of training, exactly: which numbers one has, and what becomes of any other.

    fp32      s eeeeeeee fffffffffffffffffffffff   normal (e > 0): (-1)^s x 2^(e - bias) x 1.f
    tf32      s eeeeeeee ffffffffff                subnormal (e = 0): (-1)^s x 2^(1 - bias) x 0.f
    bf16      s eeeeeeee fffffff                   exponent bits: how far it reaches
    fp16      s eeeee ffffffffff                   fraction bits: how fine it is
    fp8 e5m2  s eeeee ff
    fp8 e4m3  s eeee fff                           no infinity: its codes hold numbers, up to 448

IEEE 754-2019, section 3.4; Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019;
NVIDIA A100 whitepaper, 2020 (tf32); Micikevicius et al., FP8 Formats for Deep Learning, 2022,
section 3.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Format:
    """A binary float format with a sign; infinity=False: the top exponent has numbers (e4m3)."""

    name: str
    exponent_bits: int
    fraction_bits: int
    infinity: bool = True

    @property
    def bias(self):
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def largest(self):
        """The largest finite number."""
        if self.infinity:
            return 2.0**self.bias * (2 - 2.0**-self.fraction_bits)
        return 2.0 ** (self.bias + 1) * (2 - 2 * 2.0**-self.fraction_bits)  # the last code is NaN

    @property
    def smallest_normal(self):
        """The smallest normal number; below it, fraction bits are lost one by one."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self):
        """The smallest number above zero; up to half of it, everything becomes zero."""
        return 2.0 ** (1 - self.bias - self.fraction_bits)

    @property
    def epsilon(self):
        """The distance from 1 to the next number."""
        return 2.0**-self.fraction_bits

    def round(self, values):
        """Round values to the nearest numbers of this format, ties to even.

        Values beyond the largest number become infinity, or NaN if the format has no infinity.
        values: array-like -> array of float64 of the same shape.
        """
        values = np.asarray(values, dtype=np.float64)
        _, power = np.frexp(values)  # |value| = 0.5 to 1 times 2^power
        spacing = np.exp2(np.maximum(power - 1, 1 - self.bias) - self.fraction_bits)
        with np.errstate(invalid="ignore"):
            rounded = np.rint(values / spacing) * spacing
            beyond = np.abs(rounded) > self.largest
        return np.where(beyond, np.copysign(np.inf, values) if self.infinity else np.nan, rounded)

    def bits(self, value):
        """Return (sign, exponent, fraction) of a value rounded to this format, as texts of 0, 1."""
        stored = float(self.round(value))
        sign = "1" if np.signbit(value) else "0"
        e = self.exponent_bits
        f = self.fraction_bits
        if not np.isfinite(stored):
            # infinity: all exponent bits, no fraction bit; NaN: some fraction bits, in e4m3 all
            fraction = "0" * f if np.isinf(stored) else "1" * f
            return sign, "1" * e, fraction
        size = abs(stored)
        power = max(int(np.frexp(size)[1]) - 1, 1 - self.bias)
        code = round(size / 2.0 ** (power - f))  # 1.f x 2^f, or 0.f x 2^f for a subnormal
        normal = code >= 2**f
        return (
            sign,
            f"{power + self.bias if normal else 0:0{e}b}",
            f"{code - 2**f if normal else code:0{f}b}",
        )


FORMATS = {
    one.name: one
    for one in (
        Format("fp32", 8, 23),
        Format("tf32", 8, 10),
        Format("bf16", 8, 7),
        Format("fp16", 5, 10),
        Format("fp8 e5m2", 5, 2),
        Format("fp8 e4m3", 4, 3, infinity=False),
    )
}


def fate(values, name, scale=1.0):
    """Return the shares of values x scale that a format stores as each kind.

    The keys are "zero", "subnormal", "normal" and "overflow". name: of FORMATS. values: array; zero
    and non-finite ones do not count. Raises ValueError if there is no other.
    """
    values = np.asarray(values, dtype=np.float64)
    values = np.abs(values[np.isfinite(values) & (values != 0)])
    if not values.size:
        raise ValueError("no value is finite and different from zero")
    one = FORMATS[name]
    stored = one.round(values * scale)
    zero = stored == 0
    overflow = ~np.isfinite(stored)
    subnormal = ~zero & ~overflow & (stored < one.smallest_normal)
    shares = {
        "zero": zero,
        "subnormal": subnormal,
        "normal": ~(zero | overflow | subnormal),
        "overflow": overflow,
    }
    return {kind: float(mask.mean()) for kind, mask in shares.items()}
