"""Sizes, rates and factors as people write them, and back. GB is 10^9 bytes, GiB is 2^30: never one for the other."""

from __future__ import annotations

import math
import re

from penstock.errors import OptionError

__all__ = ["bytes_per_s_text", "bytes_text", "parse_bytes", "parse_bytes_per_s", "parse_factor", "parse_share"]

_UNITS: dict[str, int] = {
    "b": 1,
    **{f"{prefix}b": int(1000**power) for power, prefix in enumerate("kmgtp", 1)},
    **{f"{prefix}ib": int(1024**power) for power, prefix in enumerate("kmgtp", 1)},
}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)")


def parse_bytes(text: str, name: str = "a size") -> int:
    """ "24GB" is 24 * 10^9 bytes, "24GiB" is 24 * 2^30, "4096B" is bytes. A number alone is refused: of what?"""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise OptionError(
            f"{name} is a number with a unit, such as 24GB (10^9 bytes each) or 24GiB (2^30), not {text!r}"
        )
    return round(float(match[1]) * _UNITS[match[2].lower()])


def parse_bytes_per_s(text: str, name: str = "a rate") -> float:
    """ "500MB/s" is 5 * 10^8 bytes per second. Bits are not spoken here."""
    size, slash, per = text.strip().rpartition("/")
    if not slash or per.strip() != "s":
        raise OptionError(f"{name} is a size for each second, such as 500MB/s, not {text!r}")
    return float(parse_bytes(size, name))


def parse_share(text: str, name: str = "a share") -> float:
    """ "35%" is 0.35; from 0 to 100%."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*%", text.strip())
    if match is None or float(match[1]) > 100:
        raise OptionError(f"{name} is a percentage from 0% to 100%, such as 35%, not {text!r}")
    return float(match[1]) / 100


def parse_factor(text: str, name: str = "a factor") -> float:
    """ "2x" is 2; above 0."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*x", text.strip())
    if match is None or not 0 < float(match[1]) < math.inf:
        raise OptionError(f"{name} is how many times as fast, such as 2x or 0.5x, not {text!r}")
    return float(match[1])


def bytes_text(count: float) -> str:
    """Three digits and a unit of 10^3: "24.0 GB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.{0 if unit == 'B' else _decimals(count)}f} {unit}"
        count /= 1000
    return f"{count:,.{_decimals(count)}f} PB"


def bytes_per_s_text(rate: float) -> str:
    """As `bytes_text`, for each second."""
    return f"{bytes_text(rate)}/s"


def _decimals(value: float) -> int:
    return 2 if value < 9.995 else 1 if value < 99.95 else 0
