"""Workers, their template and their coordinator are killed, stopped and hung: no batch is lost, repeated or changed."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

import penstock as ps
import steps
from loading import Batch, assert_same, coordinator, copied, epochs, gone, ids, rest, template, wait_until, workers
from penstock.graph import Reader
from penstock.read import Arrays

pytestmark = pytest.mark.processes


def _pipe(n: int = 240, batch: int = 8) -> ps.Pipe:
    return ps.arrays(x=np.arange(n)).map(steps.steady).batch(batch)


@contextmanager
def _murderer(loader: ps.Loader, interval_s: float) -> Iterator[list[int]]:
    """Kills a random worker of the loader again and again. Looks for them itself: a loader is for one thread."""
    killed: list[int] = []
    stop = threading.Event()
    owner = template(loader)
    rng = random.Random(0)

    def kill() -> None:
        while not stop.wait(interval_s * rng.uniform(0.5, 1.0)):
            try:
                alive = psutil.Process(owner).children()
                victim = rng.choice(alive)
                victim.kill()
                killed.append(victim.pid)
            except (psutil.NoSuchProcess, IndexError):
                continue

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("start", ["clean", "fork"])
def test_workers_killed_all_the_time_lose_and_repeat_nothing(start: str) -> None:
    (expected,) = epochs(_pipe(), workers=0)
    with ps.Loader(_pipe(), workers=3, start=start) as loader, _murderer(_started(loader), 0.1) as killed:
        loader.set_epoch(0)
        assert_same(rest(loader), expected)
        seen = loader.stats()
    assert len(killed) >= 3
    assert seen["workers_lost"] >= 3
    assert not seen["errors"]


def _started(loader: ps.Loader) -> ps.Loader:
    """The loader, running."""
    next(iter(loader))
    return loader


@pytest.mark.parametrize("start", ["clean", "fork"])
@pytest.mark.parametrize("victims", ["workers", "template", "template and workers"])
def test_all_at_once(start: str, victims: str) -> None:
    (expected,) = epochs(_pipe(), workers=0)
    with ps.Loader(_pipe(), workers=3, start=start) as loader:
        batches = iter(loader)
        found = [copied(next(batches)) for _ in range(5)]
        first = template(loader)
        doomed = workers(loader, 3) if "workers" in victims else []
        doomed += [first] if "template" in victims else []
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        found += [copied(batch) for batch in batches]
        assert_same(found, expected)
        after = loader.stats()
        assert after["workers_lost"] >= 3
        assert not after["errors"]
        assert (template(loader) == first) == (victims == "workers")


def test_a_template_killed_again_and_again_is_replaced() -> None:
    (expected,) = epochs(_pipe(), workers=0)
    with ps.Loader(_pipe(), workers=2) as loader:
        found = []
        for i, batch in enumerate(loader):
            found.append(copied(batch))
            if i % 4 == 2:
                os.kill(template(loader), signal.SIGKILL)
        assert_same(found, expected)


@pytest.mark.parametrize("start", ["clean", "fork"])
def test_a_killed_coordinator_is_a_clear_error_and_the_epoch_can_go_on(start: str) -> None:
    (expected,) = epochs(_pipe(), workers=0)
    with ps.Loader(_pipe(), workers=2, start=start) as loader:
        batches = iter(loader)
        found = [copied(next(batches)) for _ in range(3)]
        family = [*workers(loader, 2), template(loader)]
        os.kill(coordinator(), signal.SIGKILL)
        with pytest.raises(ps.LaneError, match=r"coordinates the workers is gone.*state_dict"):
            found.extend(map(copied, batches))
        wait_until(lambda: all(map(gone, family)), 2)
        state = json.loads(json.dumps(loader.state_dict()))
        with pytest.raises(ps.StateError):
            next(batches)
        loader.load_state_dict(state)
        assert_same(found + rest(loader), expected)


def test_workers_killed_while_they_start(tmp_path: Path) -> None:
    """The first three workers die before they are ready; the next ones live."""
    with ps.Loader(ps.source(_Dying(tmp_path, 3)).batch(5), workers=2, shuffle=False) as loader:
        assert ids(rest(loader)) == list(range(20))


def test_workers_that_never_start_are_an_error(tmp_path: Path) -> None:
    loader = ps.Loader(ps.source(_Dying(tmp_path, 10_000)).batch(5), workers=2)
    with pytest.raises(ps.LaneError, match=r"died 5 times in a row before it was ready"):
        next(iter(loader))


class _Dying(Arrays):
    """Kills the first processes that open it."""

    clean = False

    def __init__(self, folder: Path, deaths: int) -> None:
        super().__init__(x=np.arange(20))
        self.folder, self.deaths = folder, deaths

    def open(self) -> Reader:
        (self.folder / str(os.getpid())).touch()
        if len(list(self.folder.iterdir())) <= self.deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().open()


def test_a_replacement_works_within_a_tenth_of_a_second(record_property: pytest.RecordProperty) -> None:
    """From the kill to the first work of its replacement; the bound is lenient, the median is in the report."""

    def stamped(sample: Batch) -> Batch:
        time.sleep(0.001)
        return {"pid": os.getpid(), "at": time.monotonic()}

    pipe = ps.arrays(x=np.arange(100_000)).map(stamped).batch(4)
    waits = []
    with ps.Loader(pipe, workers=1, shuffle=False) as loader:
        batches = iter(loader)
        for _ in range(12):
            before = int(next(batches)["pid"][0])
            killed_at = time.monotonic()
            os.kill(before, signal.SIGKILL)
            batch = next(b for b in batches if int(b["pid"][0]) != before)
            waits.append(float(batch["at"][0]) - killed_at)
    median = statistics.median(waits)
    record_property("respawn_ms", round(1000 * median, 1))
    print(f"respawned in {1000 * median:.1f} ms (worst {1000 * max(waits):.1f})")
    assert median < 1


# hanging workers


def _until_the_end(batches: Iterator[Batch]) -> tuple[list[Batch], list[str]]:
    """Batches, and what was said of stalls; on a busy machine a start or a batch may be one."""
    found, stalls = [], []
    while True:
        try:
            found.append(copied(next(batches)))
        except ps.StalledError as error:
            stalls.append(str(error))
        except StopIteration:
            return found, stalls


def test_a_stopped_worker_is_replaced_and_its_slot_is_not_given_away() -> None:
    (expected,) = epochs(_pipe(), workers=0)
    with ps.Loader(_pipe(), workers=2, timeout_s=1) as loader:
        batches = iter(loader)
        found = [copied(next(batches)) for _ in range(3)]
        stopped = workers(loader, 2)[0]
        os.kill(stopped, signal.SIGSTOP)
        more, stalls = _until_the_end(batches)
        assert any(f"pid {stopped}, T (stopped)" in stall for stall in stalls)
        wait_until(lambda: gone(stopped))
        assert_same(found + more, expected)


@pytest.mark.parametrize("hang", [steps.spin, steps.sleep_long, steps.block_in_c])
@pytest.mark.parametrize("start", ["clean", "fork"])
def test_a_hung_worker_shows_its_stack_and_is_replaced(hang: Callable[[], None], start: str, tmp_path: Path) -> None:
    """The function hangs once; afterwards the epoch goes on as if nothing had been."""
    pipe = ps.arrays(x=np.arange(40)).map(steps.Hanging(hang, str(tmp_path / "hung"))).batch(4)
    with ps.Loader(pipe, workers=2, timeout_s=1, shuffle=False, start=start) as loader:
        found, stalls = _until_the_end(iter(loader))
    assert [batch["id"].tolist() for batch in found] == [list(range(i, i + 4)) for i in range(0, 40, 4)]
    assert any(hang.__name__ in stall and "steps.py" in stall for stall in stalls)


def test_a_worker_that_ends_while_its_stack_is_awaited_does_no_harm(tmp_path: Path) -> None:
    pipe = (
        ps.arrays(x=np.arange(40))
        .map(steps.Hanging(steps.end_when_asked_for_the_stack, str(tmp_path / "hung")))
        .batch(4)
    )
    with ps.Loader(pipe, workers=2, timeout_s=1, shuffle=False, start="clean") as loader:
        found, stalls = _until_the_end(iter(loader))
    assert [batch["id"].tolist() for batch in found] == [list(range(i, i + 4)) for i in range(0, 40, 4)]
    assert any("ended meanwhile" in stall for stall in stalls)


@pytest.mark.parametrize("count", [1, 2])
def test_a_sample_that_always_hangs_becomes_a_bad_sample(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.graphwork._PATIENCE_S", 0.2)

    def hangs(sample: Batch) -> Batch:
        if sample["x"] == 5:
            time.sleep(3600)
        return sample

    pipe = ps.arrays(x=np.arange(16)).map(hangs).batch(4)
    with ps.Loader(pipe, workers=count, timeout_s=0.5, shuffle=False, on_error="skip") as loader:
        batches = iter(loader)
        found, stalls = [], 0
        while True:
            try:
                found.append(next(batches)["id"].tolist())
            except ps.StalledError:
                stalls += 1
            except StopIteration:
                break
        assert found == [[0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
        assert 0 < stalls <= 4
        assert [bad["id"] for bad in loader.stats()["errors"]] == [5]


def test_a_new_epoch_is_not_held_up_by_a_worker_that_hangs_in_the_old_one() -> None:
    def hangs(sample: Batch) -> Batch:
        if sample["x"] == 6:
            time.sleep(3600)
        time.sleep(0.003)  # quicker ones are answered for several at once, here with the one that hangs
        return sample

    pipe = ps.arrays(x=np.arange(16)).map(hangs).batch(2)
    with ps.Loader(pipe, workers=1, timeout_s=2, shuffle=False) as loader:
        assert next(iter(loader))["id"].tolist() == [0, 1]
        time.sleep(0.3)
        batches = iter(loader)
        with pytest.raises(ps.StalledError, match="hangs"):
            next(batches)
        assert [next(batches)["id"].tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


# a slot in use is never written by somebody else


def test_a_late_writer_cannot_touch_a_slot_in_use(tmp_path: Path) -> None:
    """A thread of a worker that was killed for hanging would write much later; its batch is by then the user's."""
    mark = tmp_path / "held"

    def holds(sample: Batch) -> Batch:
        if sample["x"] == 9 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP)  # the result is there, and would be written on waking
            return {"x": sample["x"], "row": np.full(30_000, -1)}
        return {"x": sample["x"], "row": np.full(30_000, sample["x"])}

    pipe = ps.arrays(x=np.arange(48)).map(holds).batch(4)
    with ps.Loader(pipe, workers=2, timeout_s=0.5, shuffle=False, prefetch=2) as loader:
        batches = iter(loader)
        found = []
        while True:
            try:
                found.append(next(batches))
            except ps.StalledError as error:
                for asleep in map(int, re.findall(r"pid (\d+)", str(error))):
                    if psutil.pid_exists(asleep):
                        os.kill(asleep, signal.SIGCONT)
            except StopIteration:
                break
        assert mark.exists()
        for batch in found:
            assert (batch["row"] == batch["x"][:, None]).all()
        assert ids(found) == list(range(48))


# samples that kill


def _crash_segfault() -> None:
    ctypes.string_at(0)


def _crash_exit() -> None:
    os._exit(3)


def _crash_abort() -> None:
    os.abort()


@pytest.mark.parametrize("crash", [_crash_segfault, _crash_exit, _crash_abort])
@pytest.mark.parametrize("count", [1, 3])
def test_a_sample_that_kills_workers_is_named(crash: Callable[[], None], count: int) -> None:
    def kills(sample: Batch) -> Batch:
        if sample["x"] == 9:
            crash()
        return sample

    pipe = ps.arrays(x=np.arange(24)).map(kills).batch(4)
    with ps.Loader(pipe, workers=count, shuffle=False) as loader:
        batches = iter(loader)
        assert [next(batches)["id"].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(ps.SampleError, match=r"sample 9\b.*hung or killed the worker") as caught:
            next(batches)
        assert caught.value.id == 9
        assert [batch["id"].tolist() for batch in batches] == [list(range(i, i + 4)) for i in (12, 16, 20)]
        assert loader.stats()["workers_lost"] <= 4
    with ps.Loader(pipe, workers=count, shuffle=False, on_error="skip") as loader:
        assert ids(rest(loader)) == [i for i in range(24) if i != 9]
        assert [bad["id"] for bad in loader.stats()["errors"]] == [9]


@pytest.mark.parametrize("ragged", ["pad", "list"])
def test_batches_that_cannot_be_cut_survive_a_sample_that_kills(ragged: str) -> None:
    def kills(sample: Batch) -> Batch:
        if sample["x"] == 9:
            os._exit(3)
        return {"row": np.arange(int(sample["x"]) % 3 + 1)}

    pipe = ps.arrays(x=np.arange(24)).map(kills).batch(4, ragged=ragged)
    with ps.Loader(pipe, workers=2, shuffle=False, on_error="skip") as loader:
        found = rest(loader)
        assert [len(batch["id"]) for batch in found][3:] == [4, 4, 4]
        assert 9 not in ids(found)


def test_replacements_that_kill_too_do_not_go_on_for_ever() -> None:
    def kills(sample: Batch) -> Batch:
        os._exit(3)

    pipe = ps.arrays(x=np.arange(2)).map(kills).batch(2)
    with (
        ps.Loader(pipe, workers=1, on_error="replace") as loader,
        pytest.raises(ps.SampleError, match="hung or killed the worker"),
    ):
        next(iter(loader))


def test_workers_ended_by_the_job_are_replaced_without_blaming_a_sample() -> None:
    """Schedulers send SIGTERM to every process of a job that is about to end; the training process decides."""
    (expected,) = epochs(_pipe(), workers=0)
    with ps.Loader(_pipe(), workers=2) as loader:
        batches = iter(loader)
        found = [copied(next(batches)) for _ in range(3)]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            for process in psutil.Process().children(recursive=True):
                process.send_signal(number)
            found += [copied(next(batches)) for _ in range(3)]
        found += [copied(batch) for batch in batches]
        assert_same(found, expected)
        assert not loader.stats()["errors"]
