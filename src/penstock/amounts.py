"""Amounts of memory as people write them: a number of bytes, a text such as "24GB", or a fraction of what there is."""

from __future__ import annotations

import re

__all__ = ["amount"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TEXT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]i?|)b?\s*", re.IGNORECASE)


def amount(value: object) -> int | float | None:
    """Bytes as an int, or a fraction above 0 and up to 1 as a float; None for what is neither."""
    if isinstance(value, str):
        found = _TEXT.fullmatch(value)
        return None if found is None else int(float(found[1]) * _UNITS[found[2].lower()]) or None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        return value if value > 0 else None
    return value if 0 < value <= 1 else None
