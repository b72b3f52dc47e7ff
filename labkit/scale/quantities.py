"""Read the quantities that a person types: 1T tokens, 400 Gbit/s, a price, a deadline.

    "1T", "15.6e12", "300B", "300,000"   ->  a number
    "400", "400Gbit/s", "400G"           ->  Gbit/s; "50GB/s" is refused: bytes, not bits
    "30d", "2027-03-01"                  ->  days from today

Each function raises ValueError, one line with the value and what to write instead.
"""

import re
from datetime import date
from math import isfinite

SCALES = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)"
BITS = {"": 1, "gbit/s": 1, "gbps": 1, "gbit": 1, "gb/s": 1, "g": 1, "tbit/s": 1000, "tbps": 1000}


def amount(said, name="tokens"):
    """Return the number of "1T", "15.6e12" or "300B"."""
    written = str(said).strip().lower().replace(",", "").replace("_", "")
    found = re.fullmatch(NUMBER + r"\s*([kmbgt]?)", written)
    value = float(found[1]) * SCALES[found[2]] if found else 0
    if not (isfinite(value) and value > 0):
        raise ValueError(
            f"{name} must be a positive number such as 1T, 300B or 15.6e12, got {said!r}"
        )
    return value


def network(said):
    """Return the Gbit/s of a GPU's network."""
    written = str(said).strip()
    found = re.fullmatch(NUMBER + r"\s*(.*)", written, re.IGNORECASE)
    unit = found[2].strip() if found else ""
    value = float(found[1]) if found else 0
    if re.fullmatch(r"[GMT]i?B(yte)?s?(/s|ps)?|[GMT]i?byte.*", unit):
        bits = 8 * value * {"M": 1e-3, "G": 1, "T": 1e3}[unit[0]]
        raise ValueError(
            f"network must be in Gbit/s per GPU, got bytes: {said}; write --network {bits:g}"
        )
    if not found or unit.lower() not in BITS or not (isfinite(value) and value > 0):
        raise ValueError(f"network must be the Gbit/s of each GPU, such as 400, got {said!r}")
    return value * BITS[unit.lower()]


def price(said):
    """Return the price of a GPU-hour."""
    try:
        value = float(str(said).strip())
    except ValueError:
        value = 0
    if not (isfinite(value) and value > 0):
        raise ValueError(f"price must be the cost of a GPU-hour, such as 2.50, got {said!r}")
    return value


def days_until(said, today=None):
    """Return the days until a deadline: "30d" or a date such as "2027-03-01"."""
    written = str(said).strip().lower()
    if found := re.fullmatch(NUMBER + r"\s*d(ays?)?", written):
        days = float(found[1])
    else:
        try:
            days = (date.fromisoformat(written) - (today or date.today())).days
        except ValueError:
            raise ValueError(
                f"deadline must be a date such as 2027-03-01 or days such as 30d, got {said!r}"
            ) from None
    if not days > 0:
        raise ValueError(f"deadline must be in the future, got {said}")
    return days
