"""How much memory a cache may take: what the user says, in bytes.

`"24GB"`, `"512MiB"`: so much. `0.5`: this share of the memory there is, of the machine or the container. `"auto"`: what
is free now beyond the batches and a reserve.
"""

from __future__ import annotations

from typing import Literal

from penstock.cache.arena import reserve_bytes
from penstock.errors import OptionError
from penstock.limits import memory_room
from penstock.units import parse_bytes

__all__ = ["CacheSize", "budget_bytes", "check_cache"]

CacheSize = str | float | Literal["auto"] | None

_LEAST = 1 << 20
_MOST = 1 << 41
"""What native/arena.c can address."""
_FORMS = "a size such as '24GB' or '512MiB', a share of the memory such as 0.5, 'auto', or None"
_PAGE_TABLES = 512
"""A process that reads the cache needs a page-table entry of 8 bytes for each page of 4,096 that it met."""


def check_cache(value: object) -> None:
    """Refuse what says no size; the message says what would."""
    if value is None or value == "auto":
        return
    if isinstance(value, str):
        if not _LEAST <= _parsed(value) <= _MOST:
            raise OptionError(f"cache must be from 1MiB to 2TiB, not {value!r}")
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise OptionError(f"cache must be {_FORMS}, not {value!r}")
    elif not 0 < value <= 1 or (isinstance(value, int) and value == 1):
        hint = f"; for that many bytes write '{value // 2**20}MiB'" if value >= _LEAST and value < _MOST else ""
        raise OptionError(f"cache as a number is a share of the memory, above 0.0 and up to 1.0, not {value!r}{hint}")


def budget_bytes(value: CacheSize, batch_memory: int, processes: int) -> int:
    """The bytes of a checked size other than None. `processes` read it, and `batch_memory` is needed beside it."""
    if value == "auto":
        room = memory_room()
        free = room.free - batch_memory - reserve_bytes(room.total)
        return max(_LEAST, int(free / (1 + processes / _PAGE_TABLES)))
    if isinstance(value, str):
        return _parsed(value)
    assert value is not None
    return max(_LEAST, int(value * memory_room().total))


def _parsed(text: str) -> int:
    try:
        return parse_bytes(text)
    except OptionError:
        raise OptionError(f"cache must be {_FORMS}, not {text!r}") from None
