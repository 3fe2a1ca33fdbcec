"""A torch map-style dataset of the user's as a source."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import GraphError
from penstock.graph import Field, Reader, Sample, Source, Spec

__all__ = ["Dataset"]


class Dataset(Source):
    """Any object with `__len__` and `__getitem__`, kept as it is and handed to the workers by fork.

    A dict becomes fields; a tuple the fields named by `fields`, by default `image` and `label`, or a named tuple's own
    names; anything else the first of them. Of a dict, `fields` takes the entries named. Pillow images become uint8 RGB
    arrays [height, width, 3], tensors become arrays of the same shape, bytes stay encoded. Arrays come out read-only.
    """

    clean = False
    opaque = True

    def __init__(self, dataset: Any, fields: Sequence[str] | None = None) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise GraphError(
                f"dataset: a map-style dataset with __len__ and __getitem__ is needed, not {type(dataset).__name__}; "
                "ps.DataLoader takes iterable ones too"
            )
        if isinstance(fields, str) or (fields is not None and (not fields or "id" in fields)):
            raise GraphError(f"dataset: fields must be a list of names, none of them 'id', not {fields!r}")
        self.dataset = dataset
        self._fields = None if fields is None else tuple(fields)
        self._length = len(dataset)
        if not self._length:
            raise GraphError(f"dataset: the {type(dataset).__name__} is empty")

    def __len__(self) -> int:
        return self._length

    def spec(self) -> Spec:
        """Nothing but likely names is known before an item is read, and reading one here could open files too early."""
        return {name: Field("any") for name in self._fields or ("image", "label")}

    def open(self) -> Reader:
        """Asks the dataset."""
        return _DatasetReader(self.dataset, self._fields)

    def place(self, id: int) -> str:
        """`MyDataset[id]`."""
        return f"{type(self.dataset).__name__}[{id}]"

    def fingerprint(self) -> str:
        """Of the type, the length and the fields; more cannot be seen from outside."""
        kind = type(self.dataset)
        text = repr((kind.__module__, kind.__qualname__, self._length, self._fields))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class _DatasetReader(Reader):
    def __init__(self, dataset: Any, fields: tuple[str, ...] | None) -> None:
        self._dataset = dataset
        self._fields = fields

    def read(self, id: int) -> Sample:
        item = self._dataset[id]
        return {name: _converted(value) for name, value in self._named(item).items()}

    def _named(self, item: Any) -> Mapping[str, Any]:
        if isinstance(item, Mapping):
            return self._entries(item)
        if not isinstance(item, tuple | list):
            return {(self._fields or ("image",))[0]: item}
        names = self._fields or getattr(item, "_fields", None) or ("image", "label")
        if len(names) != len(item):
            raise ValueError(
                f"an item has {len(item)} elements, but the fields are {names}; name them with fields=[...]"
            )
        return dict(zip(names, item, strict=True))

    def _entries(self, item: Mapping[Any, Any]) -> Mapping[str, Any]:
        names = tuple(item) if self._fields is None else self._fields
        absent = [name for name in names if name not in item]
        if absent:
            raise ValueError(f"an item has no entry {absent[0]!r}, only {', '.join(map(str, item))}")
        if "id" in names or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"an item's entries must be named by strings other than 'id', not {names}; choose with fields=[...]"
            )
        return {name: item[name] for name in names}


def _converted(value: Any) -> Any:
    """Pillow images as arrays. Tensors stay tensors: theirs is torch's CHW, where an array named `image` is HWC.

    Pillow is not imported: without it, no value is of its types.
    """
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        value = np.asarray(value.convert("RGB"))
    if isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
    return value
