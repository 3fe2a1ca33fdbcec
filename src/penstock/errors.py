"""The one exception tree. Every message says what was expected, what was found, where, and the remedy."""

from __future__ import annotations

__all__ = [
    "DiagnosisError",
    "GraphError",
    "LaneError",
    "MissingExtraError",
    "OptionError",
    "PenstockError",
    "SampleError",
    "SourceError",
    "StalledError",
    "StateError",
]


class PenstockError(Exception):
    """Whatever Penstock raises derives from this."""


class GraphError(PenstockError):
    """The pipeline as written cannot work: an operator lacks its input, or an argument makes no sense."""


class OptionError(PenstockError, ValueError):
    """A loader's option is unknown or senseless."""


class SourceError(PenstockError, FileNotFoundError):
    """A source finds nothing, or not what it expects, where it was told to look."""


class StateError(PenstockError):
    """A saved state does not belong to this loader."""


class DiagnosisError(PenstockError):
    """A training could not be diagnosed, or a saved profile cannot be read; the message says what is missing."""


class MissingExtraError(PenstockError, ImportError):
    """A feature needs an optional package; the message names the pip extra that brings it."""


class LaneError(PenstockError):
    """A process that prepares batches could not be started, or was lost more often than is survivable."""


class StalledError(PenstockError, TimeoutError):
    """No batch came within the timeout. The message holds the stack of the worker that hangs."""


class SampleError(PenstockError):
    """One sample could not be prepared.

    The message names the sample's id, its place (a file, a member of a tar, a row) and the operator. Read as data:
    `id`, `place`, `operator`, `reason`.
    """

    def __init__(self, reason: str, *, id: int = -1, place: str = "", operator: str = "") -> None:
        super().__init__(reason, id, place, operator)
        self.reason = reason
        self.id = id
        self.place = place
        self.operator = operator

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_sample_error, (type(self), self.reason, self.id, self.place, self.operator)

    def __str__(self) -> str:
        where = [f"sample {self.id}"] if self.id >= 0 else []
        where += [self.place] if self.place else []
        head = f"{self.operator} failed" if self.operator else "failed"
        return f"{head} on {' at '.join(where) or 'a sample'}: {self.reason}"


def _rebuild_sample_error(kind: type[SampleError], reason: str, id: int, place: str, operator: str) -> SampleError:
    return kind(reason, id=id, place=place, operator=operator)
