"""The last-minute threshold of FusionFlow's task affinity-aware scheduling: how many of a batch's last rows are left to
lanes of the large end.

What a lane of the small end begins last, it ends late: it is slow, and the whole batch waits for it. Left to a lane of
the large end the same rows are done sooner, unless they are too many. How many is found by trying: the threshold starts
at zero; after each batch the end that was done last was the busier one, and the threshold moves by one tiny-batch of
the small end. When it only goes to and fro it freezes, at the upper of the values between which it went: there the
large end was last, and what it does last takes less time. When lanes come or go, the search goes on from where it was.

It counts rows, since the size of a tiny-batch is learned while the search goes on.
"""

from __future__ import annotations

__all__ = ["Threshold"]

_TURNS = 4
"""Changes of direction that end the search. Between two values that are nearly right it turns after every batch."""


class Threshold:
    """Tell it which end was done last; read `rows`."""

    def __init__(self) -> None:
        self.rows = 0
        self.frozen = False
        self._turns: list[int] = []
        self._rising: bool | None = None

    def search(self) -> None:
        """Search (again), from the present value."""
        self.frozen = False
        self._turns.clear()
        self._rising = None

    def judge(self, *, small_last: bool, step: int, most: int) -> None:
        """A batch is complete, and the small end was done last, or the large one. `most` limits the threshold."""
        if self.frozen:
            return
        if self._rising not in (None, small_last):
            self._turns.append(self.rows)
        self._rising = small_last
        if len(self._turns) == _TURNS:
            upper = sorted(self._turns)[_TURNS // 2 :]
            self.rows = sum(upper) // len(upper)
            self.frozen = True
        else:
            self._move(step if small_last else -step, most)

    def _move(self, by: int, most: int) -> None:
        self.rows = max(0, self.rows + by if by < 0 else max(self.rows, min(self.rows + by, most)))
        if self._turns and not min(self._turns) - abs(by) <= self.rows <= max(self._turns) + abs(by):
            self._turns.clear()  # an odd batch on the way made it turn: it still goes somewhere
