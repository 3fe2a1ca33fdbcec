"""How a GPU lane shares the GPU with the training: its kernels run beside the training's steps, or between them.

Memory comes first: a lane that finds no room takes half of what it wanted, or there is none (see gpu.py). Then
throughput decides: both ways are tried by turns while the training runs, and the one whose steps take less time stays.

    sharing = Sharing(None)
    sharing.stepped(seconds)  # from one batch to the next; `sharing.mode` says how the next one is to be prepared
"""

from __future__ import annotations

from typing import Literal

__all__ = ["Mode", "Sharing"]

Mode = Literal["beside", "between"]

_WARM_UP = 32
"""Steps before the trial: what was prepared ahead is used up, and the training has compiled what it compiles."""
_TURN = 24
_TURNS: tuple[Mode, ...] = ("beside", "between", "beside", "between")
_SETTLE = 8
"""Steps of a turn that do not count: their batches were prepared in the turn before."""


class Sharing:
    """The choice. With a pinned mode there is none."""

    def __init__(self, pinned: Mode | None) -> None:
        self.mode: Mode = pinned or "beside"
        self.reason = "as asked" if pinned else "it is not known yet which way is faster"
        self._steps = 0
        self._turns: list[float] = [0.0] * len(_TURNS)
        """Seconds of each turn: sums, for a training thread runs ahead of the GPU and then waits for it in one step."""
        self._decided = pinned is not None

    def stepped(self, seconds: float) -> None:
        """A step of the training took this long, waiting for its batch included."""
        if self._decided:
            return
        turn, step = divmod(self._steps - _WARM_UP, _TURN)
        self._steps += 1
        if turn < 0:
            return
        if turn == len(_TURNS):
            self._decide()
            return
        self.mode = _TURNS[turn]
        if step >= _SETTLE:
            self._turns[turn] += seconds

    def _decide(self) -> None:
        beside, between = 1000 * self._best("beside"), 1000 * self._best("between")
        self.mode = "beside" if beside <= between else "between"
        self.reason = f"steps took {beside:.1f} ms with the lane beside them, {between:.1f} ms with it between them"
        self._decided = True

    def _best(self, mode: Mode) -> float:
        """Seconds of a step in the faster of a mode's turns: what else happens only adds to them."""
        return min(seconds for turn, seconds in zip(_TURNS, self._turns, strict=True) if turn == mode) / (
            _TURN - _SETTLE
        )
