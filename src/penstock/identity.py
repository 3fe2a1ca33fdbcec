"""A text for a value that is the same in every process, and another for a value that acts differently.

Functions count by their code, their defaults and what they enclose, not by where they are defined: the same script may
be run as a file or as a module. Of objects of other kinds their type and their attributes count, of long collections
and large arrays their sizes.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any

__all__ = ["identity"]

_LONG = 1000
_LARGE_BYTES = 1 << 20
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType)


def identity(value: object) -> str:
    """The value's text."""
    return _identity(value, ())


def _identity(value: Any, around: tuple[int, ...]) -> str:
    if isinstance(value, enum.Enum):
        return f"{_type(value)}.{value.name}"
    if type(value) in _PLAIN:
        return repr(value)
    if id(value) in around:
        return "itself"
    around = (*around, id(value))
    if isinstance(value, type | types.BuiltinFunctionType | types.ModuleType):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    if isinstance(value, types.MethodType):
        return _joined("method", (value.__func__, value.__self__), around)
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return _joined("function", (value.__code__, value.__defaults__, value.__kwdefaults__, *cells), around)
    if isinstance(value, types.CodeType):
        return _joined("code", (value.co_code, value.co_names, value.co_varnames, *value.co_consts), around)
    if isinstance(value, functools.partial):
        return _joined("partial", (value.func, value.args, value.keywords), around)
    return _collection(value, around)


def _collection(value: Any, around: tuple[int, ...]) -> str:
    if isinstance(value, Mapping | set | frozenset | list | tuple) and len(value) > _LONG:
        return f"{_type(value)}[{len(value)}]"
    if isinstance(value, Mapping):
        return _joined(_type(value), sorted(_joined("", pair, around) for pair in value.items()), around)
    if isinstance(value, set | frozenset):
        return _joined(_type(value), sorted(_identity(item, around) for item in value), around)
    if isinstance(value, list | tuple):
        return _joined(_type(value), value, around)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        known = value.nbytes <= _LARGE_BYTES and not value.dtype.hasobject
        digest = hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest() if known else ""
        return f"{value.dtype.str}{value.shape}{digest}"
    return _joined(_type(value), (getattr(value, "__qualname__", ""), getattr(value, "__dict__", {})), around)


def _joined(kind: str, parts: Any, around: tuple[int, ...]) -> str:
    return f"{kind}({', '.join(_identity(part, around) for part in parts)})"


def _type(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a name that was not bound yet
        return None
