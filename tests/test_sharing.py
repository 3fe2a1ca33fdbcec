"""The lane's kernels run where the training's steps take less time."""

from __future__ import annotations

import pytest

from penstock.sharing import Mode, Sharing


def _train(sharing: Sharing, seconds: dict[Mode, float], steps: int = 400) -> list[Mode]:
    modes: list[Mode] = []
    for step in range(steps):
        sharing.stepped(seconds[sharing.mode] * (0.0 if step % 2 else 2.0) + (10 if step == 40 else 0))
        modes.append(sharing.mode)
    return modes


@pytest.mark.parametrize(("beside", "between", "wanted"), [(0.050, 0.055, "beside"), (0.061, 0.055, "between")])
def test_the_faster_way_stays(beside: float, between: float, wanted: Mode) -> None:
    sharing = Sharing(None)
    modes = _train(sharing, {"beside": beside, "between": between})
    assert set(modes) == {"beside", "between"}
    assert set(modes[-200:]) == {wanted}
    assert f"{1000 * beside:.1f} ms with the lane beside" in sharing.reason


@pytest.mark.parametrize("mode", ["beside", "between"])
def test_a_pinned_way_is_never_left(mode: Mode) -> None:
    sharing = Sharing(mode)
    assert set(_train(sharing, {"beside": 1.0, "between": 0.1})) == {mode}
    assert sharing.reason == "as asked"


def test_without_a_difference_the_lane_runs_beside() -> None:
    sharing = Sharing(None)
    assert _train(sharing, {"beside": 0.01, "between": 0.01})[-1] == "beside"
