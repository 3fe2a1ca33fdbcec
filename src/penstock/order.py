"""Which samples a step holds: pure arithmetic over positions of an epoch's order.

An epoch is a sequence of positions 0 .. n-1; a seeded permutation says which id stands at each. Step s of the epoch
takes the positions of its global batch (batch size times ranks), and each rank a contiguous part of them, so a state
counted in samples can be taken up by another number of ranks with the same global batch.

The following is how steps are meant to be. If the implementation differs, it is a bug.

- Every position is in exactly one step and on exactly one rank, unless `drop_last` drops the tail of the epoch.
- Every rank has the same number of steps, and no rank has an empty one.
- All steps but the last are global batches; the last is the tail, spread evenly. Where the tail is smaller than the
  number of ranks, it is joined with the step before and both are spread evenly over the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import OptionError

__all__ = ["Order", "Step"]


@dataclass(frozen=True)
class Step:
    """One rank's part of one global batch."""

    first: int
    rows: int
    end: int
    """Position after the whole global batch: what the epoch has consumed once this step is done on every rank."""


@dataclass(frozen=True)
class Order:
    """The steps of an epoch over `n` samples for one rank."""

    n: int
    batch: int
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1

    @property
    def global_batch(self) -> int:
        return self.batch * self.world_size

    def steps(self, consumed: int = 0) -> Iterator[Step]:
        """The steps that remain after `consumed` samples of the epoch."""
        start = consumed
        for size in self._sizes(self.n - consumed):
            low = start + size * self.rank // self.world_size
            high = start + size * (self.rank + 1) // self.world_size
            start += size
            yield Step(low, high - low, start)

    def count(self, consumed: int = 0) -> int:
        """How many steps remain."""
        remaining = self.n - consumed
        whole, tail = divmod(remaining, self.global_batch)
        return whole if self.drop_last or not tail else whole + 1

    def _sizes(self, remaining: int) -> Iterator[int]:
        whole, tail = divmod(remaining, self.global_batch)
        if self.drop_last or tail == 0:
            yield from (self.global_batch for _ in range(whole))
            return
        if tail >= self.world_size:
            yield from (self.global_batch for _ in range(whole))
            yield tail
            return
        last_two = self.global_batch + tail
        if whole == 0 or last_two < 2 * self.world_size:
            raise OptionError(
                f"{remaining} samples cannot give each of {self.world_size} ranks a sample in every step of "
                f"batch size {self.batch}; use drop_last=True, fewer ranks or a batch size of at least 2"
            )
        yield from (self.global_batch for _ in range(whole - 1))
        yield last_two - last_two // 2
        yield last_two // 2
