"""Memory that is not there, or no longer: the cache stops growing or gives back, says so, and nobody is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from arenas import MIB, apart, opened, shelf_of
from penstock.cache import finding, keeper
from penstock.cache.access import Opened
from penstock.cache.keeper import Keeper, Pressure
from penstock.cache.tally import Tally
from penstock.graph import Sample
from penstock.limits import Room
from test_cache_loader import cache, sized

__all__ = ["apart"]

GIB = 1 << 30


# the decision


def due(free: int, held: int = GIB, stalled_s: float = 0.0, seconds: float = 0.25, total: int = 16 * GIB) -> int:
    """At the second of two looks, between which tasks waited for so long."""
    pressure = Pressure()
    pressure.due(Room(total, total), 5.0, 100.0, held)
    return pressure.due(Room(total, free), 5.0 + stalled_s, 100.0 + seconds, held)


def test_nothing_is_due_while_half_the_reserve_is_free() -> None:
    assert due(free=GIB // 2) == 0
    assert due(free=8 * GIB) == 0


def test_what_is_due_brings_back_the_reserve() -> None:
    assert due(free=GIB // 2 - 1) == GIB // 2 + 1
    assert due(free=0, held=100 * MIB) == 100 * MIB
    assert due(free=MIB, total=320 * MIB) == 19 * MIB


def test_waiting_tasks_count_where_memory_is_near_its_end() -> None:
    assert due(free=GIB, stalled_s=0.1) == GIB // 16
    assert due(free=GIB, stalled_s=0.01) == 0
    assert due(free=8 * GIB, stalled_s=0.25) == 0, "they wait in another container"


def test_waiting_before_the_first_look_does_not_count() -> None:
    assert Pressure().due(Room(16 * GIB, GIB), 1e6, 100.0, GIB) == 0


# the keeper


def test_a_keeper_gives_back_frees_memory_and_says_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(8 * MIB) as arena:
        descriptor = Tally.create(2)
        tally = Tally(descriptor, 2)
        os.close(descriptor)
        shelf = shelf_of(arena, 100)
        stored = sum(shelf.put(id, bytes(100_000)) for id in range(70))
        watching = Keeper(Opened(arena, tally, tally.row(1), shelf))
        assert list(watching.watch()) == []
        monkeypatch.setattr(keeper, "memory_room", lambda: Room(32 * MIB, 0))
        (warning,) = watching.watch()
        assert "the cache gave back 2," in warning
        assert list(watching.watch()) == []
        said = watching.snapshot()
        assert said["given_back_bytes"] >= 4 * MIB
        assert said["samples"] == stored - said["given_back_samples"]
        assert said["stopped"] == "given back"


def test_loaders_that_share_an_arena_do_not_each_give_back_for_one_want(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(8 * MIB) as arena:
        shelf = shelf_of(arena, 100)
        for id in range(70):
            shelf.put(id, bytes(100_000))
        before = arena.state().held

        def meanwhile() -> Room:
            arena.give_back(lambda: MIB)
            return Room(32 * MIB, 0)

        monkeypatch.setattr(keeper, "memory_room", meanwhile)
        list(Keeper(Opened(arena, Tally(Tally.create(1), 1), Tally(Tally.create(1), 1).row(0), shelf)).watch())
        assert before - arena.state().held < 2 * MIB


# loaders


@pytest.mark.processes
@pytest.mark.parametrize("processes", [0, 2])
def test_one_warning_tells_of_memory_that_is_not_there(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the training process; the epoch goes on."""
    with ps.Loader(sized(40), workers=processes, cache="8MiB") as loader:
        batches = iter(loader)
        next(batches)
        arena = next(finding._others())
        arena.stop(12)
        arena.close()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in batches:
                pass
            monkeypatch.setattr("penstock.feed.WATCH_S", 0.0)
            for _ in range(100):
                for _ in loader:
                    pass
                if caught:
                    break
            for _ in loader:
                pass
        (warning,) = caught
        assert warning.category is RuntimeWarning
        assert "there is no memory for more (the kernel refused it: Cannot allocate memory)" in str(warning.message)
        assert warning.filename == __file__
        assert cache(loader)["stopped"] == "memory"
        assert "grows no more" in loader.explain()


@pytest.mark.processes
def test_a_kernel_that_gives_no_memory_at_all_means_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(23, "Too many open files in system")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with ps.Loader(sized(8), workers=0, cache="8MiB") as loader:
        with pytest.warns(RuntimeWarning, match="there is no cache, for the kernel refused its memory: Too many open"):
            batches = list(loader)
        assert len(batches) == 2
        assert "cache: none, for the kernel refused its memory" in loader.explain()


# a container for real


def measured(sample: Sample) -> Sample:
    """Its size alone: the test has no memory to spare."""
    return {"size": len(sample["image"])}


_GROUPS = Path("/sys/fs/cgroup/memory")
_SCRIPT = """
import json, mmap, os, sys, time, warnings
sys.path.insert(0, {tests!r})
import penstock as ps
from penstock.cache import finding
finding._PREFIX = {prefix!r}
from test_cache_memory import measured

def epoch(loader):
    for _ in loader:
        pass
    return loader.stats()["cache"]

open({group!r} + "/cgroup.procs", "w").write(str(os.getpid()))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with ps.Loader(ps.files({data!r}).map(measured).batch(4), workers=2, cache="2GiB") as loader:
        said = [epoch(loader), epoch(loader), epoch(loader)]
        ballast = []
        for _ in range(12):  # the job needs memory of its own, by and by
            ballast.append(mmap.mmap(-1, 8 << 20))
            ballast[-1].write(bytes(8 << 20))
            time.sleep(0.3)
        said.append(epoch(loader))
print(json.dumps([said, [str(one.message) for one in caught if one.category is RuntimeWarning]]))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    if os.getuid() != 0 or not (_GROUPS / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and the memory controller of control groups, version 1, to make a container")
    folder = _GROUPS / f"penstock-test-{os.getpid()}"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(400 * MIB))
    yield folder
    folder.rmdir()


@pytest.mark.processes
def test_in_a_container_it_stops_gives_back_and_nobody_is_killed(group: Path, apart: str, tmp_path: Path) -> None:
    """Files of 1 MiB, sparse, more of them than there is memory for; then the job takes memory for itself."""
    for number in range(500):
        with (tmp_path / f"{number:04}.jpg").open("wb") as file:
            file.truncate(MIB)
    text = _SCRIPT.format(tests=str(Path(__file__).parent), prefix=apart, group=str(group), data=str(tmp_path))
    source = str(Path(ps.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.returncode == 0, done.stderr
    said, caught = json.loads(done.stdout)
    assert "oom_kill 0" in (group / "memory.oom_control").read_text()
    first, second, third, last = said
    assert first["stopped"] in ("memory", "given back"), (
        "the second, where what else runs there grew by half the reserve"
    )
    assert 20 < first["samples"] < 400
    assert second["hits"] == third["hits"] - second["hits"] == first["samples"]
    assert last["stopped"] == "given back"
    assert last["given_back_bytes"] > first["given_back_bytes"] + 16 * MIB
    assert last["samples"] == first["stored"] - last["given_back_samples"]
    assert sorted(text.split(":")[0][:16] for text in caught) in (
        ["memory became sh"],
        ["memory became sh", "the cache stops "],
    )
