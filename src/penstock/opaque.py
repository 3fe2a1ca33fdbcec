"""The operator that calls a user's function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.errors import GraphError
from penstock.graph import Field, Operator, Sample, Spec, Units
from penstock.seeding import seed_all

__all__ = ["Map"]


@dataclass(frozen=True)
class Map(Operator):
    """Calls `fn` with the sample (a dict, to be returned, changed or anew), or with one field's value.

    `random`, `numpy.random` and `torch` are seeded beforehand, from (seed, epoch, position).
    """

    fn: Callable[[Any], Any]
    field: str | None = None
    clean: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise GraphError(f"map: expected a function, not {type(self.fn).__name__}")

    @property
    def name(self) -> str:
        return f"map({getattr(self.fn, '__qualname__', type(self.fn).__qualname__)})"

    @property
    def units(self) -> int:
        return 1

    def check(self, spec: Spec) -> Spec:
        if self.field is None:
            return {name: Field("any") for name in spec}
        if self.field not in spec and not any(field.kind == "any" for field in spec.values()):
            raise GraphError(f"map: the samples have no field {self.field!r}; they have {', '.join(spec)}")
        return {**spec, self.field: Field("any")}

    def apply(self, sample: Sample, units: Units) -> Sample:
        seed_all(int(units[0] * 2**53))
        if self.field is not None:
            sample[self.field] = self.fn(sample[self.field])
            return sample
        result = self.fn(sample)
        if not isinstance(result, Mapping):
            raise TypeError(
                f"expected the function to return the sample, a mapping; it returned {type(result).__name__}"
            )
        return dict(result)
