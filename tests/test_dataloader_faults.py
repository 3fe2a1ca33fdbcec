"""What `ps.DataLoader` does when something goes wrong: torch's exceptions, workers that die or hang, nothing left."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.utils.data as tud

import penstock as ps

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]


class Made(tud.Dataset[Any]):
    """Samples from a function of the index."""

    def __init__(self, make: Callable[[Any], Any], n: int = 12) -> None:
        self.make = make
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        return self.make(index)


# Exceptions


class TwoArgumentsError(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)


class MessageError(Exception):
    message = "as some libraries have it"

    def __init__(self, *, message: str) -> None:
        super().__init__(message)


class QuietError(ValueError):
    pass


def raising(error: Callable[[], BaseException]) -> Callable[[int], int]:
    def make(i: int) -> int:
        if i == 5:
            raise error()
        return i

    return make


ERRORS: dict[str, Callable[[], BaseException]] = {
    "value": lambda: ValueError("sample is broken"),
    "key": lambda: KeyError("missing"),
    "index": lambda: IndexError(3),
    "own": lambda: QuietError("äöü"),
    "two arguments": lambda: TwoArgumentsError(4, "reason"),
    "message": lambda: MessageError(message="text"),
    "os": lambda: FileNotFoundError(2, "No such file or directory", "/nowhere"),
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "assertion": lambda: AssertionError(),
    "memory": lambda: MemoryError("for 10 TB"),
}


def stepped(loader: Any) -> list[Any]:
    """Batches and exceptions in the order in which they come."""
    came: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            came.append(next(iterator).tolist())
        except StopIteration:
            return came
        except Exception as error:
            came.append(error.with_traceback(None))


@pytest.mark.parametrize("kind", ERRORS)
def test_exceptions_are_torchs_and_iteration_goes_on(kind: str) -> None:
    dataset = Made(raising(ERRORS[kind]))
    ours, theirs = (stepped(loader(dataset, 2, num_workers=2)) for loader in (ps.DataLoader, tud.DataLoader))
    assert ours[:2] + ours[3:] == theirs[:2] + theirs[3:]
    assert len(ours) == 6
    mine, its = ours[2], theirs[2]
    assert type(mine) is type(its)
    assert type(mine.args[0]) is type(its.args[0])
    mine, its = str(mine).splitlines(), str(its).splitlines()
    assert mine[0].rstrip("01.") == its[0].rstrip("01.")
    assert mine[1:2] == its[1:2]
    assert mine[-1] == its[-1]
    assert any("in make" in line for line in mine)


def test_a_local_exception_class_arrives_by_name() -> None:
    """torch's loader hangs on this one."""

    class LocalError(Exception):
        pass

    came = stepped(ps.DataLoader(Made(raising(lambda: LocalError("details"))), 2, num_workers=2))
    assert type(came[2]) is RuntimeError
    assert "LocalError, which cannot be pickled" in str(came[2])
    assert "LocalError: details" in str(came[2])
    assert "in make" in str(came[2])
    assert came[3:] == [[6, 7], [8, 9], [10, 11]]


def test_a_batch_that_cannot_be_pickled_is_an_error() -> None:
    """torch's loader hangs on this one, too."""
    came = stepped(ps.DataLoader(Made(lambda i: torch.tensor(i)), 6, num_workers=1, collate_fn=lambda batch: print))
    assert all(type(batch) is AttributeError for batch in came)  # what has no tolist is there
    came = stepped(ps.DataLoader(Made(lambda i: i), 6, num_workers=1, collate_fn=lambda batch: lambda: 0))
    assert [type(batch) for batch in came] == [AttributeError, AttributeError]
    assert "Can't pickle local object" in str(came[0])


class Sour:
    def __setstate__(self, state: Any) -> None:
        raise ValueError("turned sour on the way")

    def __init__(self) -> None:
        self.x = 1


def test_an_object_that_cannot_be_unpickled_is_an_error_and_no_hang() -> None:
    came = stepped(ps.DataLoader(Made(lambda i: i), 6, num_workers=1, collate_fn=lambda batch: Sour()))
    assert ["turned sour on the way" in str(error) for error in came] == [True, True]


def test_exceptions_of_the_collation_and_of_keys() -> None:
    for collate in (lambda batch: 1 / 0, None):
        dataset = Made(lambda i: torch.ones(1 + i % 2) if i > 5 else torch.ones(1))
        arguments = {"num_workers": 2, "collate_fn": collate}
        ours = stepped(ps.DataLoader(dataset, 2, **arguments))
        theirs = stepped(tud.DataLoader(dataset, 2, **arguments))
        assert [type(one) for one in ours] == [type(one) for one in theirs]
    with pytest.raises(KeyError, match="'z'"):
        list(ps.DataLoader({"a": 1}, sampler=["a", "z"], num_workers=1))  # type: ignore[arg-type]


@pytest.mark.parametrize("seeding", ["sample", "torch"])
def test_an_exception_of_the_start_function(seeding: Any) -> None:
    def start(worker: int) -> None:
        raise QuietError("no such device")

    ours = stepped(ps.DataLoader(Made(lambda i: i), 2, num_workers=2, worker_init_fn=start, seeding=seeding))
    theirs = stepped(tud.DataLoader(Made(lambda i: i), 2, num_workers=2, worker_init_fn=start))
    assert type(ours[0]) is type(theirs[0]) is QuietError
    assert str(ours[0]).splitlines()[0][:-2] == str(theirs[0]).splitlines()[0][:-2]
    assert len(ours) == len(theirs) == 6
    assert all(type(error) is QuietError and "no such device" in str(error) for error in ours)


class Failing(tud.IterableDataset[int]):
    """Fails once in the middle, and goes on."""

    def __init__(self, fail_at: int = 4, n: int = 9) -> None:
        self.fail_at = fail_at
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return _FailingIterator(self.fail_at, self.n)


class _FailingIterator:
    def __init__(self, fail_at: int, n: int) -> None:
        self.at = -1
        self.fail_at = fail_at
        self.n = n

    def __iter__(self) -> _FailingIterator:
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at == self.fail_at:
            raise ValueError("a bad record")
        if self.at >= self.n:
            raise StopIteration
        return self.at


@pytest.mark.parametrize("how", [{"batch_size": None}, {"batch_size": 2}], ids=str)
def test_a_stream_goes_on_behind_an_exception(how: dict[str, Any]) -> None:
    ours, theirs = (
        stepped_values(loader(Failing(), num_workers=2, **how)) for loader in (ps.DataLoader, tud.DataLoader)
    )
    assert ours == theirs
    assert "ValueError" in ours


def stepped_values(loader: Any) -> list[Any]:
    came: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            batch = next(iterator)
            came.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
        except StopIteration:
            return came
        except Exception as error:
            came.append(type(error).__name__)


def test_a_generator_that_failed_has_ended() -> None:
    def records() -> Iterator[int]:
        yield 1
        raise ValueError("a bad record")

    class Records(tud.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return records()

    ours, theirs = (
        stepped_values(loader(Records(), None, num_workers=1)) for loader in (ps.DataLoader, tud.DataLoader)
    )
    assert ours == theirs == [1, "ValueError"]


def test_a_stream_that_cannot_begin() -> None:
    class Never(tud.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            raise FileNotFoundError("no shards here")

    def start(worker: int) -> None:
        raise FileNotFoundError("no shards here")

    for dataset, how in ((Never(), {}), (Numbers(3), {"worker_init_fn": start})):
        loader = ps.DataLoader(dataset, num_workers=2, persistent_workers=True, **how)
        for _ in range(2):  # torch's workers raise something for ever
            assert stepped_values(loader) == ["FileNotFoundError"] * 2


def test_a_sampler_that_fails_takes_nothing_along() -> None:
    class Sampler:
        def __iter__(self) -> Iterator[int]:
            yield from range(9)
            raise RuntimeError("out of indices")

        def __len__(self) -> int:
            return 12

    came = []
    with contextlib.suppress(RuntimeError):
        for batch in ps.DataLoader(Made(lambda i: i), None, sampler=Sampler(), num_workers=1, prefetch_factor=4):
            came.append(batch)
    assert came == [0, 1, 2, 3, 4]
    iterator = iter(ps.DataLoader(Made(lambda i: i), None, sampler=Sampler(), num_workers=1, prefetch_factor=8))
    with pytest.raises(RuntimeError, match="out of indices"):
        [next(iterator) for _ in range(3)]
    assert list(iterator) == [2, 3, 4, 5, 6, 7, 8]


# Workers that die


def children_of_templates() -> list[psutil.Process]:
    me = psutil.Process()
    forks = [child for child in me.children() if "-S" not in child.cmdline()]
    return [worker for fork in forks for worker in fork.children()]


class Killing:
    """Kills workers at times that vary, while the body runs."""

    def __init__(self, most: int = 1000, pause_s: float = 0.05) -> None:
        self._most = most
        self._pause_s = pause_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.killed = 0

    def __enter__(self) -> Killing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        chance = random.Random(5)
        while self.killed < self._most and not self._done.wait(chance.uniform(0.4, 1.6) * self._pause_s):
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                chance.choice(children_of_templates()).kill()
                self.killed += 1


def steady(i: int) -> Any:
    time.sleep(0.003)
    return {"x": torch.full((4000,), float(i)), "i": i}


def named(i: int) -> Any:
    time.sleep(0.003)
    return torch.full((4000,), float(i)), f"sample {i}"


@pytest.mark.parametrize("make", [steady, named], ids=["cut", "whole"])
@pytest.mark.parametrize("seeding", ["sample", "torch"])
def test_killed_workers_lose_and_repeat_nothing(make: Any, seeding: Any) -> None:
    dataset = Made(make, 400)
    expected = [[str(item) for item in batch] for batch in tud.DataLoader(dataset, 10)]
    with Killing() as chaos:
        loader = ps.DataLoader(dataset, 10, num_workers=2, seeding=seeding)
        batches = [[str(item) for item in batch] for batch in loader]
    assert batches == expected
    assert chaos.killed >= 3


class Numbers(tud.IterableDataset[Any]):
    def __init__(self, n: int, pause_s: float = 0.002) -> None:
        self.n = n
        self.pause_s = pause_s

    def __iter__(self) -> Iterator[Any]:
        info = tud.get_worker_info()
        for i in range(self.n):
            time.sleep(self.pause_s)
            yield info.id if info else 0, i


def test_killed_workers_of_streams_lose_and_repeat_nothing() -> None:
    dataset = Numbers(120)
    expected = [[part.tolist() for part in batch] for batch in tud.DataLoader(dataset, 7, num_workers=2)]
    with Killing(most=5, pause_s=0.1) as chaos:
        batches = [[part.tolist() for part in batch] for batch in ps.DataLoader(dataset, 7, num_workers=2)]
    assert batches == expected
    assert chaos.killed >= 2


def crash() -> None:
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize("end", [crash, lambda: os._exit(3)], ids=["segfault", "exit"])
@pytest.mark.parametrize("how", [{}, {"seeding": "torch"}, {"collate_fn": torch.tensor}], ids=str)
def test_a_sample_that_ends_its_worker_is_named(end: Callable[[], None], how: dict[str, Any]) -> None:
    def make(i: int) -> int:
        if i == 57:
            end()
        return i

    came = stepped(ps.DataLoader(Made(make, 100), 10, num_workers=2, **how))
    assert [type(one) for one in came].count(RuntimeError) == 1
    assert "DataLoader worker died every time it prepared" in str(came[5])
    assert "57" in str(came[5])
    assert came[:5] + came[6:] == [list(range(i, i + 10)) for i in range(0, 100, 10) if i != 50]


def test_a_stream_that_ends_its_worker_is_named_and_over() -> None:
    class Crashing(tud.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            info = tud.get_worker_info()
            assert info is not None
            for i in range(20):
                if info.id == 0 and i == 7:
                    crash()
                yield 100 * info.id + i

    came = stepped_values(ps.DataLoader(Crashing(), None, num_workers=2))
    assert [one for one in came if one != "RuntimeError" and one < 100] == list(range(7))
    assert [one for one in came if one != "RuntimeError" and one >= 100] == list(range(100, 120))
    assert came.count("RuntimeError") == 1


def test_a_hung_worker_is_named_with_its_stack_and_replaced(tmp_path: Path) -> None:
    marker = tmp_path / "hung"

    def sleeping_beauty(i: int) -> int:
        if i == 6 and not marker.exists():
            marker.touch()
            time.sleep(1000)
        return i

    started = time.monotonic()
    came = stepped(ps.DataLoader(Made(sleeping_beauty), 2, num_workers=2, timeout=1))
    assert time.monotonic() - started < 10
    (error,) = [one for one in came if type(one) is RuntimeError]
    came.remove(error)
    assert came == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert "DataLoader timed out after 1 seconds" in str(error)
    assert "sleeping_beauty" in str(error)


def test_a_killed_coordinator_is_an_error() -> None:
    iterator = iter(ps.DataLoader(Made(steady, 1000), 2, num_workers=2))
    next(iterator)
    for child in psutil.Process().children():
        if "-S" in child.cmdline():
            child.kill()
    with pytest.raises(ps.LaneError, match="coordinates the workers is gone"):
        list(iterator)


# Ends


def processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


def gone(before: list[psutil.Process]) -> bool:
    deadline = time.monotonic() + 2
    while set(processes()) - set(before):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def first_of(loader: Any) -> Any:
    for batch in loader:
        return batch
    return None


def exhausted(dataset: Any) -> None:
    iterator = iter(ps.DataLoader(dataset, 2, num_workers=2))
    for _ in iterator:
        pass
    assert next(iterator, None) is None


def abandoned(dataset: Any) -> None:
    assert first_of(ps.DataLoader(dataset, 2, num_workers=2)) is not None


def unwanted(dataset: Any) -> None:
    iter(ps.DataLoader(dataset, 2, num_workers=2))


def persisted(dataset: Any) -> None:
    loader = ps.DataLoader(dataset, 2, num_workers=2, persistent_workers=True)
    list(loader)
    assert processes()
    first_of(loader)


def failed(dataset: Any) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for _ in ps.DataLoader(dataset, 2, num_workers=2, persistent_workers=True):
            1 / 0  # noqa: B018


@pytest.mark.parametrize("end", [exhausted, abandoned, unwanted, persisted, failed])
@pytest.mark.parametrize("dataset", [Made(steady, 40), Numbers(20)], ids=["map", "stream"])
def test_nothing_is_left_and_no_collection_is_waited_for(end: Any, dataset: Any) -> None:
    before = processes()
    end(dataset)
    assert gone(before)


class Run:
    """A training script in a process of its own. All its processes bear a mark in their environment."""

    def __init__(self, script: str, folder: Path) -> None:
        path = folder / "train.py"
        path.write_text(textwrap.dedent(script))
        self.mark = f"PENSTOCK_TEST_{uuid.uuid4().hex}"
        self._said = folder / "said"
        with self._said.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, str(path)],
                env={**os.environ, self.mark: "1", "PYTHONWARNINGS": "ignore"},
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self) -> str:
        """What it said until it ended."""
        self.process.wait(100)
        return self._said.read_text()

    def wait_for(self, line: str) -> None:
        deadline = time.monotonic() + 30
        while line not in self._said.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def bearing(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if mark in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def all_gone(mark: str) -> bool:
    deadline = time.monotonic() + 5
    while bearing(mark):
        if time.monotonic() > deadline:
            for process in bearing(mark):
                process.kill()
            return False
        time.sleep(0.02)
    return True


TRAINING = """
    import os, sys, time
    import torch
    import penstock as ps

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 10_000

        def __getitem__(self, index):
            time.sleep(0.002)
            return torch.full((5000,), float(index))

    loader = ps.DataLoader(Slow(), 4, num_workers=2, persistent_workers=True)
    for step, batch in enumerate(loader):
        if step == 5:
            print("running", flush=True)
            END
"""

ENDS = {
    "falls off the end": ("break", 0),
    "exits": ("sys.exit(3)", 3),
    "exits at once": ("os._exit(4)", 4),
    "raises": ("raise ValueError", 1),
    "ends in a thread's eyes": ("import threading; iterator = iter(loader); break", 0),
}


@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_left_of_a_process_that(how: str, tmp_path: Path) -> None:
    end, code = ENDS[how]
    run = Run(TRAINING.replace("END", end), tmp_path)
    said = run.said()
    assert run.process.returncode == code, said
    assert all_gone(run.mark)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_nothing_is_left_of_a_process_that_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    run = Run(TRAINING.replace("END", "pass"), tmp_path)
    run.wait_for("running")
    assert len(bearing(run.mark)) >= 4
    os.killpg(run.process.pid, number)  # Ctrl-C goes to the whole group
    said = run.said()
    assert all_gone(run.mark)
    if number is signal.SIGINT:
        assert said.rstrip().endswith("KeyboardInterrupt")
        assert said.count("Traceback") == 1
    else:
        assert said == "running\n"


SPAWNING = """
    import os, sys
    from collections import namedtuple
    import torch
    import torch.utils.data as tud
    import penstock as ps

    Pair = namedtuple("Pair", "x y")

    class OwnError(Exception):
        pass

    class Own(tud.Dataset):
        def __init__(self):
            self.table = torch.arange(100_000.0)

        def __len__(self):
            return 10

        def __getitem__(self, index):
            if index == 9:
                raise OwnError("the last one")
            return Pair(self.table[index * 10 : index * 10 + 10], index)

    class Shard(tud.IterableDataset):
        def __iter__(self):
            info = tud.get_worker_info()
            yield from range(info.id, 6, info.num_workers)

    def start(worker):
        assert __name__ == "__mp_main__", "the script runs anew for the workers"
        assert tud.get_worker_info().num_workers == 2

    def collate(batch):
        return [Pair(*item) for item in batch]

    def steps(loader):
        for batch in loader:
            yield batch

    def main(method):
        kinds = (
            (Own(), dict(batch_size=3)),
            (Own(), dict(batch_size=3, collate_fn=collate)),
            (Shard(), dict(batch_size=2)),
        )
        for dataset, how in kinds if method == "spawn" else kinds[:1]:
            taken = []
            # torch's are forked: what they give is the same, and fresh interpreters import torch for seconds
            for kind, context, begin in ((ps.DataLoader, method, start), (tud.DataLoader, "fork", None)):
                loader = kind(dataset, num_workers=2, multiprocessing_context=context, worker_init_fn=begin, **how)
                taken.append([])
                try:
                    for batch in loader:
                        taken[-1].append((str(batch), type(batch).__module__))
                except OwnError as error:
                    taken[-1].append(str(error).splitlines()[-1].replace("__mp_main__.", ""))
            assert taken[0] == taken[1], taken
            print(len(taken[0]), flush=True)
        for kind in (ps.DataLoader, tud.DataLoader):
            try:
                list(kind(Own(), num_workers=1, multiprocessing_context=method, collate_fn=lambda batch: batch))
            except Exception as error:
                print(type(error).__name__, error)

    if __name__ == "__main__":
        main(METHOD)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_fresh_interpreters_find_what_the_script_defines(method: str, tmp_path: Path) -> None:
    run = Run(SPAWNING.replace("METHOD", repr(method)), tmp_path)
    lines = run.said().splitlines()
    kinds = 3 if method == "spawn" else 1
    assert lines.count("4") == kinds, lines  # beside them torch's forks may grumble over iterators they inherited
    refusals = [line for line in lines if "pickle" in line]
    assert len(refusals) == 2
    assert len(set(refusals)) == 1
    assert all_gone(run.mark)


def test_a_module_of_the_users_is_found_by_fresh_interpreters(tmp_path: Path) -> None:
    (tmp_path / "wares.py").write_text(
        "import torch\n\nclass Wares(torch.utils.data.Dataset):\n    def __len__(self):\n        return 4\n\n"
        "    def __getitem__(self, index):\n        return torch.tensor(index)\n"
    )
    script = """
        import torch, penstock as ps
        from wares import Wares
        if __name__ == "__main__":
            torch.multiprocessing.set_start_method("spawn")
            loader = ps.DataLoader(Wares(), 2, num_workers=1)
            print([batch.tolist() for batch in loader], loader.explain().count("fresh interpreter"))
    """
    run = Run(script, tmp_path)
    assert run.said() == "[[0, 1], [2, 3]] 1\n"
    assert all_gone(run.mark)


# Memory


def resident() -> int:
    """Private memory of this process and of those it has started, in bytes."""
    total = 0
    for process in [psutil.Process(), *processes()]:
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().uss
    return total


SIZES: dict[str, Callable[[int], Any]] = {
    "messages": lambda i: (i, torch.zeros(5)),
    "slots": lambda i: torch.zeros(20_000),
    "objects": lambda i: (torch.zeros(6000), "x" * 100),
}


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("how", [{}, {"collate_fn": list}], ids=["torch's collation", "own collation"])
def test_memory_does_not_grow(kind: str, how: dict[str, Any]) -> None:
    before = 0
    descriptors = 0
    held = []
    for step, batch in enumerate(ps.DataLoader(Made(SIZES[kind], 6000), 2, num_workers=2, **how)):
        held = [*held[-9:], batch]
        if step == 500:
            before, descriptors = resident(), psutil.Process().num_fds()
        elif step == 2900:
            assert psutil.Process().num_fds() <= descriptors + 12
            assert resident() < before + (8 << 20)
    assert step == 2999
