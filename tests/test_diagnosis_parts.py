"""What a diagnosis is made of: children, counters, dropped caches, reads that are seen, the interpreter's lock."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.diagnosis.batches import cut, fresh, nbytes, rows
from penstock.diagnosis.children import apart, crew
from penstock.diagnosis.counters import counters
from penstock.diagnosis.interpreter import LockWatch
from penstock.diagnosis.machine import Machine
from penstock.diagnosis.reads import Reads, look, read_pieces
from penstock.diagnosis.storage import drop, measure
from penstock.errors import DiagnosisError

pytestmark = pytest.mark.processes

SIZE = 50_000


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{index}.bin" for index in range(60)]
    for path in paths:
        path.write_bytes(os.urandom(SIZE))
    return [str(path) for path in paths]


def seen(fetch: Callable[[int], object], count: int = 60) -> Reads:
    return look(lambda: fetch, range(count))


def test_a_file_for_each_sample_is_seen_for_all_of_them(files: list[str]) -> None:
    fetched: list[int] = []
    reads = seen(lambda id: (Path(files[id]).read_bytes(), fetched.append(id)))
    assert reads.known
    assert reads.sample_bytes == SIZE
    assert [[piece.path for piece in pieces] for pieces in reads.samples] == [[path] for path in files]
    assert fetched == []  # it was another process that fetched


def test_a_data_set_that_catches_errors_is_seen_all_the_same(files: list[str]) -> None:
    def fetch(id: int) -> bytes:
        try:
            return Path(files[id]).read_bytes()
        except Exception:
            return Path(files[0]).read_bytes()

    assert [pieces[0].path for pieces in seen(fetch).samples] == files


def test_several_files_for_a_sample_are_all_seen(files: list[str]) -> None:
    reads = seen(lambda id: [Path(files[id]).read_bytes(), Path(files[id + 1]).read_bytes()], 40)
    assert reads.sample_bytes == 2 * SIZE
    assert len(reads.samples) == 40


def test_parts_of_a_file_that_stays_open_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "all.bin"
    path.write_bytes(os.urandom(40 * SIZE))
    with path.open("rb", buffering=0) as file:

        def fetch(id: int) -> bytes:
            file.seek(id * SIZE)
            return file.read(SIZE)

        reads = seen(fetch, 40)
    assert reads.known
    assert reads.files == (str(path),)
    assert reads.sample_bytes == pytest.approx(SIZE, rel=0.02)
    assert all(read_pieces(pieces) == pytest.approx(SIZE, rel=0.02) for pieces in reads.samples)


def test_data_in_memory_or_mapped_cannot_be_told(files: list[str]) -> None:
    assert "no file is read" in seen(lambda id: id).problem
    with open(files[0], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert not seen(lambda id: mapped[id]).known


def test_what_comes_through_a_pipe_cannot_be_told() -> None:
    read, write = os.pipe()

    def fetch(id: int) -> bytes:
        os.write(write, bytes(10_000))
        return os.read(read, 10_000)

    assert "no file that Python has opened" in seen(fetch).problem
    os.close(read)
    os.close(write)


def test_a_data_set_that_fails_in_a_child_is_named() -> None:
    def fetch(id: int) -> None:
        raise KeyError("gone")

    assert "KeyError" in seen(fetch).problem


def test_a_stream_is_seen_to_its_end(files: list[str]) -> None:
    def opened() -> Callable[[int], object]:
        stream = (Path(path).read_bytes() for path in files)
        return lambda id: next(stream)

    reads = look(opened, range(1000), stream=True)
    assert len(reads.samples) == len(files) - 1  # the first is fetched to see what that imports
    assert reads.sample_bytes == SIZE


def test_a_child_gives_its_result_or_its_error() -> None:
    assert apart(lambda: {"pid": os.getpid()})["pid"] != os.getpid()
    with pytest.raises(DiagnosisError, match="ZeroDivisionError"):
        apart(lambda: 1 // 0)
    with pytest.raises(DiagnosisError, match="died"):
        apart(lambda: os._exit(1))


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.diagnosis.children._PATIENCE_S", 0.3)
    with pytest.raises(DiagnosisError, match="hung"):
        apart(lambda: time.sleep(60))


def test_a_crew_does_every_item_once(tmp_path: Path) -> None:
    def make() -> Callable[[str], int]:
        def task(name: str) -> int:
            (tmp_path / f"{name} {os.getpid()}").touch(exist_ok=False)
            time.sleep(0.001)
            return 10

        return task

    done = crew(3, make, [str(number) for number in range(50)], 60.0)
    assert (done.items, done.bytes) == (50, 500)
    assert sorted(path.name.split()[0] for path in tmp_path.iterdir()) == sorted(map(str, range(50)))
    assert done.seconds > 50 * 0.001 / 3


def test_a_crew_s_lead_does_not_count() -> None:
    done = crew(2, lambda: lambda item: time.sleep(0.02) or item, [1] * 40, 60.0, lead=5)
    assert (done.items, done.bytes) == (30, 30)
    assert crew(1, lambda: lambda item: item, [1], 60.0, lead=5).items == 0


def test_a_crew_s_time_is_bounded() -> None:
    done = crew(2, lambda: lambda item: time.sleep(0.01) or 1, list(range(5000)), 0.2)
    assert 2 <= done.items < 100


def test_a_crew_with_a_member_that_fails_is_an_error_and_no_deadlock() -> None:
    with pytest.raises(DiagnosisError, match="ZeroDivisionError"):
        crew(2, lambda: lambda item: 1 // 0, [1, 2, 3], 60.0)
    with pytest.raises(DiagnosisError, match="LookupError"):
        crew(2, _unmade, [1, 2, 3], 60.0)


def _unmade() -> Callable[[int], int]:
    raise LookupError


def test_dropped_files_are_read_from_the_device_and_others_are_not(files: list[str]) -> None:
    reads = seen(lambda id: Path(files[id]).read_bytes())
    cold, warm = measure(reads, None, [2, 1], cold=True), measure(reads, None, [2, 1], cold=False)
    assert cold.evidence is not None
    if cold.evidence.device_bytes is None:
        pytest.skip("this kernel does not count what a device reads")
    if cold.as_meant is False:
        assert cold.points == ()
        pytest.skip("the folder of this test lies in memory")
    assert warm.as_meant is True
    assert warm.evidence is not None
    assert warm.evidence.device_bytes == 0
    assert [point.readers for point in cold.points] == [2, 1]
    assert warm.points[0].bytes_per_s > cold.points[0].bytes_per_s
    assert cold.points[0].bytes_per_s == pytest.approx(SIZE * cold.points[0].samples_per_s)


def test_a_mapped_file_that_cannot_be_dropped_is_not_called_cold(tmp_path: Path) -> None:
    path = tmp_path / "one.bin"
    path.write_bytes(os.urandom(40 * SIZE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) > 0  # every page is in this process's tables
        reads = seen(lambda id: path.read_bytes(), 4)
        cold = measure(reads, None, [1], cold=True)
    if cold.as_meant is None:
        pytest.skip("this kernel does not count what a device reads")
    assert cold.as_meant is False
    assert cold.points == ()


def test_dropping_what_is_not_there_is_no_error() -> None:
    drop(["/nowhere/at/all"])


def test_cpu_time_of_children_is_counted() -> None:
    before = counters()
    apart(lambda: [_spin(0.3)])
    assert 0.2 < counters().since(before).cpu_s < 2.0


def _spin(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


@pytest.fixture
def busy_thread() -> Iterator[None]:
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    yield
    over.set()
    thread.join()


def test_a_busy_thread_takes_the_interpreter(busy_thread: None) -> None:
    watch = _watched()
    if watch.share is None:
        pytest.skip("this kernel does not say where a thread sleeps")
    assert watch.share > 0.4  # 0.82 on an idle machine, where 0.83 of the time is lost


def test_a_thread_alone_has_the_interpreter() -> None:
    watch = _watched()
    assert watch.share is None or watch.share < 0.1


def _watched() -> LockWatch:
    with LockWatch() as watch:
        for _ in range(100):
            time.sleep(0.001)
            sum(range(2000))
    return watch


def test_the_machine_is_what_this_process_may_use() -> None:
    machine = Machine.here()
    assert 1 <= machine.cores <= len(os.sched_getaffinity(0))
    assert 0 < machine.free_bytes <= machine.memory_bytes
    assert (machine.gpu, machine.gpus) == (None, 0)


def test_batches_are_counted_and_cut() -> None:
    batch = {"image": torch.zeros(4, 3), "more": [torch.ones(4), (torch.tensor(1.0), "text")]}
    assert rows(batch) == 4
    assert nbytes(batch) == 4 * (12 + 4 + 1)
    half = cut(batch, 2)
    assert half["image"].shape == (2, 3)
    assert half["more"][0].shape == (2,)
    assert half["more"][1] == (torch.tensor(1.0), "text")
    assert cut([torch.tensor(1.0)], 1) is None
    assert rows(np.zeros(3)) is None


def test_a_batch_taken_apart_can_be_handed_out_again() -> None:
    batch = {"image": torch.zeros(2), "list": [torch.zeros(2)]}
    taken = fresh(batch)
    taken.pop("image")
    taken["list"].clear()
    assert len(batch["list"]) == 1
    assert "image" in batch
