"""A sample as bytes, for what outlives the process: a head of JSON that names the fields, then their bytes.

Nothing in a record is ever executed, so one that somebody else wrote can be read. A field comes back exactly as it
was, of the same type; a sample with a value of another type has no record.

    data = packed(sample)            # None where a value cannot be kept
    sample = unpacked(data)
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from penstock.graph import Sample

__all__ = ["packed", "unpacked"]

_HEAD = 4
"""Bytes of the head's length."""


def packed(sample: Sample) -> bytes | None:
    """The sample's record; None where a field is neither bytes, numbers, text, lists of these nor an array."""
    fields: list[list[Any]] = []
    parts: list[bytes] = []
    for name, value in sample.items():
        described = _described(value)
        if described is None:
            return None
        kind, about, data = described
        fields.append([name, kind, about])
        parts.append(data)
    head = json.dumps(fields, separators=(",", ":")).encode()
    return b"".join((len(head).to_bytes(_HEAD, "little"), head, *parts))


def unpacked(data: bytes) -> Sample:
    """The sample of a record. Arrays are read-only."""
    start = _HEAD + int.from_bytes(data[:_HEAD], "little")
    sample: Sample = {}
    for name, kind, about in json.loads(data[_HEAD:start]):
        if kind == "bytes":
            sample[name] = data[start : start + about]
            start += about
        elif kind == "plain":
            sample[name] = about
        else:
            dtype, shape = np.dtype(about[0]), about[1]
            array = np.frombuffer(data, dtype, math.prod(shape), start).reshape(shape)
            sample[name] = array if kind == "array" else array[()]
            start += array.nbytes
    return sample


def _described(value: Any) -> tuple[str, Any, bytes] | None:
    """A field's kind, what the head says of it, and its bytes."""
    if type(value) is bytes:
        return "bytes", len(value), value
    if isinstance(value, np.generic | np.ndarray):
        if type(value) not in (np.ndarray, value.dtype.type) or value.dtype.kind not in "biufc":
            return None
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return kind, [value.dtype.str, list(value.shape)], value.tobytes()
    return ("plain", value, b"") if _plain(value) else None


def _plain(value: Any) -> bool:
    """JSON gives it back as it was."""
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) is list:
        return all(map(_plain, value))
    return type(value) is dict and all(type(key) is str and _plain(item) for key, item in value.items())
