"""The frozen description of a pipeline: a source, operators, a batch. Defining, rewriting and running it are apart.

A sample travels as a plain dict of fields. `image` is first the encoded bytes, after `decode` an HWC uint8 RGB array
(after `normalize` HWC float32); `audio` is first bytes, after `decode_audio` a float32 array [channels, time] with
`rate` beside it; `boxes` is float32 [n, 4] as x0, y0, x1, y1 in pixels of `image`; `label` and the rest pass
through.

An operator is decided, then applied. All randomness of a sample is a row of uniform numbers in [0, 1) that is drawn
before placement from (seed, epoch, position); an operator states how many it uses (`units`) and receives exactly those.
`decide` turns them, and the size of the image once that is known, into plain parameters; `apply` only applies. So every
lane gives the same sample the same augmentation.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from penstock.errors import GraphError
from penstock.identity import identity

__all__ = ["Batch", "Field", "Graph", "Operator", "Reader", "Sample", "Source", "Spec", "Units"]

Sample = dict[str, Any]
Units = Sequence[float]
"""The uniform draws of one sample for one operator; as many as the operator's `units`."""


@dataclass(frozen=True)
class Field:
    """What is known of one field before any sample is read. A None in `shape` is a size that differs by sample."""

    kind: Literal["encoded", "image", "audio", "boxes", "value", "any"]
    shape: tuple[int | None, ...] | None = None
    dtype: str | None = None

    @property
    def fixed(self) -> bool:
        """Every sample has the same shape and dtype, so rows of a batch can be laid out beforehand."""
        return self.shape is not None and self.dtype is not None and None not in self.shape


Spec = Mapping[str, Field]


class Reader(ABC):
    """A source opened inside one process: it may hold file handles and is never pickled."""

    @abstractmethod
    def read(self, id: int) -> Sample:
        """The sample as stored (images and audio still encoded), without its `id`.

        Raises OSError, KeyError or ValueError when it cannot."""

    def close(self) -> None:  # noqa: B027 - most readers hold nothing
        """Let go of what is open."""

    # for a cache before the source

    def requested(self) -> int:
        """Bytes that were requested from storage so far; always 0 from a reader that does not count them."""
        return 0

    def stamp(self, id: int) -> bytes:
        """Differs when the sample is stored anew, where `Source.version` would not tell."""
        return b""

    def drop_behind(self) -> None:  # noqa: B027 - most readers read no files
        """From now on have the kernel forget pages of files once they were read: what is kept is kept elsewhere."""


class Source(ABC):
    """Where samples come from: a sized collection with ids 0 .. len-1, and a way to open it in a worker.

    A source is picklable unless `clean` is False: it then holds objects of the user's, arrays too large to pickle, or
    reads what only this process's memory has, and reaches the workers by fork.
    """

    clean: bool = True
    opaque: ClassVar[bool] = False
    """Reading runs the user's code, which may draw random numbers: it is seeded for every sample."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def open(self) -> Reader:
        """Called once in each process that reads."""

    @abstractmethod
    def spec(self) -> Spec:
        """The fields that `Reader.read` gives."""

    @abstractmethod
    def place(self, id: int) -> str:
        """Where a sample is stored, as errors name it: a path, `shard.tar: member`, `file.parquet: row 7`."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the ids mean other samples (a saved state would then be wrong)."""

    def version(self) -> str:
        """Changes when the stored bytes of any sample may have, as far as that is known without asking for each: two
        data sets whose samples are named alike differ in it. What a cache holds is keyed by it."""
        return self.fingerprint()

    def sizes(self) -> Sequence[int] | None:
        """Stored bytes per id where they are known without reading, for sorting work by size."""
        return None


@dataclass(frozen=True)
class Operator(ABC):
    """One step over a sample. Subclasses are frozen dataclasses of plain arguments; they know no lane."""

    clean: ClassVar[bool] = True
    """False for operators that hold a user's function: they reach the workers by fork."""

    @property
    def name(self) -> str:
        """The name users write in the chain; errors name it."""
        raise NotImplementedError

    @property
    def units(self) -> int:
        """How many uniform draws `apply` takes for one sample."""
        return 0

    @abstractmethod
    def check(self, spec: Spec) -> Spec:
        """The fields after this operator; raises GraphError when its input is missing or of the wrong kind."""

    @abstractmethod
    def apply(self, sample: Sample, units: Units) -> Sample:
        """The sample after this operator. May change the dict it was given, never the arrays of a source."""


@dataclass(frozen=True)
class Batch:
    """The last step: how samples become a batch. `ragged` says what happens to fields whose shapes differ."""

    size: int
    drop_last: bool = False
    ragged: Literal["error", "pad", "list"] = "error"

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise GraphError(f"batch: size must be a whole number of at least 1, not {self.size!r}")
        if not isinstance(self.drop_last, bool):
            raise GraphError(f"batch: drop_last must be True or False, not {self.drop_last!r}")
        if self.ragged not in ("error", "pad", "list"):
            raise GraphError(f"batch: ragged must be 'error', 'pad' or 'list', not {self.ragged!r}")


@dataclass(frozen=True)
class Graph:
    """Source, operators, batch. Checked when made: a Graph that exists is one that can run."""

    source: Source
    operators: tuple[Operator, ...] = ()
    batch: Batch | None = None
    specs: tuple[Spec, ...] = field(init=False, repr=False, compare=False)
    identities: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Of the operators, as they were when the graph was made: objects of the user's may change while they work."""

    def __post_init__(self) -> None:
        specs: list[Spec] = [self.source.spec()]
        for operator in self.operators:
            specs.append(operator.check(specs[-1]))
        object.__setattr__(self, "specs", tuple(specs))
        object.__setattr__(self, "identities", tuple(map(_identity, self.operators)))

    @property
    def spec(self) -> Spec:
        """The fields that come out."""
        return self.specs[-1]

    @property
    def clean(self) -> bool:
        """The graph can be pickled into a fresh process; otherwise it travels by fork."""
        return self.source.clean and all(operator.clean for operator in self.operators)

    @property
    def units(self) -> int:
        """Uniform draws per sample over all operators."""
        return sum(operator.units for operator in self.operators)

    def then(self, operator: Operator) -> Graph:
        """The graph with one more operator."""
        if self.batch is not None:
            raise GraphError(f"{operator.name} comes after batch; operators work on samples, so put batch last")
        return replace(self, operators=(*self.operators, operator))

    def batched(self, batch: Batch) -> Graph:
        """The graph with its batch step."""
        if self.batch is not None:
            raise GraphError("batch appears twice; a pipeline has one batch step, its last")
        return replace(self, batch=batch)

    def rewritten(self, passes: Sequence[Callable[[Graph], Graph]]) -> Graph:
        """The graph after a list of pure passes."""
        graph = self
        for rewrite in passes:
            graph = rewrite(graph)
        return graph

    def fingerprint(self) -> str:
        """Changes when any sample of any epoch would differ. The batch size is left out: it may change on resume."""
        parts = (self.source.fingerprint(), *self.identities)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _identity(operator: Operator) -> str:
    return repr((operator.name, [(f.name, identity(getattr(operator, f.name))) for f in fields(operator)]))
