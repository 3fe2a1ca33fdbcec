"""How workers start, what they are, and what a loader says of itself."""

from __future__ import annotations

import os
import resource
import socket
import statistics
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import psutil
import pytest
import torch

import penstock as ps
from loading import Batch, assert_same, coordinator, epochs, rest, template, wait_until, workers
from penstock import view

pytestmark = pytest.mark.processes


def _images(photos: Path) -> ps.Pipe:
    return ps.files(photos).decode().random_resized_crop(32).flip().rand_augment().batch(6)


def _count(n: int = 400, batch: int = 10) -> ps.Pipe:
    return ps.arrays(x=np.arange(n)).batch(batch)


def _settled(loader: ps.Loader, count: int) -> list[int]:
    """The workers, after an epoch."""
    rest(loader)
    return workers(loader, count)


# what workers are


def test_workers_of_a_native_pipeline_are_small_and_without_torch(
    photos: Path, record_property: pytest.RecordProperty
) -> None:
    with ps.Loader(_images(photos), workers=2) as loader:
        pids = _settled(loader, 2)
        for pid in (*pids, template(loader), coordinator()):
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "libtorch" not in maps
            assert "/torch/" not in maps
        private = []
        for pid in pids:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            sizes = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
            private.append((sizes["Private_Clean"] + sizes["Private_Dirty"]) / 1024)
        record_property("private_mib", private)
        print("private MiB of workers:", private)
        assert max(private) < 100
        assert "numpy" not in Path(f"/proc/{coordinator()}/maps").read_text()


def _faults(sample: dict[str, Any]) -> dict[str, Any]:
    """Page faults of taking memory for an image of 1500 x 1000 pixels and writing to all of it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(1500 * 1000 * 3, np.uint8)
    return {"faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before}


@pytest.mark.parametrize("start", ["clean", "fork"])
def test_a_worker_uses_the_memory_of_an_image_for_the_next(start: Any) -> None:
    with ps.Loader(ps.arrays(x=np.arange(40)).map(_faults).batch(10), workers=1, start=start) as loader:
        rest(loader)
        assert sum(int(batch["faults"].sum()) for batch in loader) < 100


@pytest.mark.parametrize("start", ["clean", "fork"])
def test_workers_hold_no_descriptor_of_another(start: str) -> None:
    """Each has its own socket, its stack file and what all programs have; in fork mode also what this process has."""
    with ps.Loader(_count(), workers=4, start=start) as loader:  # type: ignore[arg-type]
        pids = _settled(loader, 4)
        ours = {_target(os.getpid(), fd) for fd in os.listdir("/proc/self/fd")}
        own = []
        for pid in pids:
            targets = [_target(pid, fd) for fd in os.listdir(f"/proc/{pid}/fd") if int(fd) > 2]
            own.append({t for t in targets if t.startswith("socket:")} - ours)
        assert [len(sockets) for sockets in own] == [1] * 4
        assert len(set.union(*own)) == 4


def _target(pid: int, fd: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return ""


def test_functions_without_a_name_reach_the_workers() -> None:
    captured = {"offset": 7, "lock": open(os.devnull)}  # noqa: SIM115 - something that cannot be pickled
    pipe = ps.arrays(x=np.arange(20)).map(lambda s: {"y": s["x"] + captured["offset"]}).batch(5)
    (batches,) = epochs(pipe, workers=2, shuffle=False)
    assert torch.cat([batch["y"] for batch in batches]).tolist() == list(range(7, 27))
    captured["lock"].close()  # type: ignore[attr-defined]


def test_a_pipeline_that_cannot_be_pickled_says_what_to_do() -> None:
    pipe = ps.arrays(x=np.arange(20)).map(lambda s: s).batch(5)
    with pytest.raises(ps.LaneError, match=r"start='clean' needs a pipeline that can be pickled.*start='fork'"):
        next(iter(ps.Loader(pipe, workers=1, start="clean")))


class _Unloadable:
    def __call__(self, sample: Batch) -> Batch:
        return sample

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise RuntimeError("not today")


def test_a_pipeline_that_cannot_be_loaded_says_what_to_do() -> None:
    pipe = ps.arrays(x=np.arange(20)).map(_Unloadable()).batch(5)
    loader = ps.Loader(pipe, workers=1, start="clean")
    with pytest.raises(ps.LaneError, match=r"RuntimeError: not today.*use start='fork'"):
        next(iter(loader))


def test_what_only_this_process_has_reaches_the_workers(photos: Path) -> None:
    store = fsspec.filesystem("memory")
    for path in sorted(photos.glob("*/*.jpg")):
        store.pipe_file(f"/loader/{path.parent.name}/{path.name}", path.read_bytes())
    here, there = (
        epochs(ps.files(root).decode().resize((9, 9)).batch(6), workers=2) for root in (photos, "memory://loader")
    )
    assert_same(here[0], there[0])


@pytest.mark.parametrize("count", [0, 2])
def test_a_source_that_cannot_be_opened_is_an_error(count: int) -> None:
    class Shut(type(ps.arrays(x=np.arange(20)).graph.source)):  # type: ignore[misc]
        clean = False

        def open(self) -> Any:
            raise PermissionError("the store is closed")

    loader = ps.Loader(ps.source(Shut(x=np.arange(20))).batch(5), workers=count)
    for _ in range(2):
        with pytest.raises(ps.LaneError, match="PermissionError: the store is closed"):
            next(iter(loader))
    loader.close()


def test_what_workers_print_is_seen_once(capfd: pytest.CaptureFixture[str]) -> None:
    def speak(sample: Batch) -> Batch:
        print("said", int(sample["x"]))
        return sample

    print("before")
    epochs(ps.arrays(x=np.arange(6)).map(speak).batch(2), workers=2)
    assert sorted(capfd.readouterr().out.splitlines()) == ["before", *(f"said {i}" for i in range(6))]


# how much they take


def test_an_idle_loader_takes_no_time() -> None:
    with ps.Loader(_count(4000), workers=2) as loader:
        batches = iter(loader)
        next(batches)
        processes = [psutil.Process(pid) for pid in (coordinator(), template(loader), *workers(loader, 2))]
        time.sleep(0.2)
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(0.8)
        after = [sum(process.cpu_times()[:2]) for process in processes]
        assert max(b - a for a, b in zip(before, after, strict=True)) <= 0.02


def test_the_first_batch_comes_soon(photos: Path, record_property: pytest.RecordProperty) -> None:
    """The bound is lenient, the median is in the report."""
    waits = []
    for _ in range(5):
        with ps.Loader(_images(photos), workers=2) as loader:
            started = time.perf_counter()
            next(iter(loader))
            waits.append(time.perf_counter() - started)
    median = statistics.median(waits)
    record_property("first_batch_ms", round(1000 * median))
    print(f"first batch after {1000 * median:.0f} ms, at best {1000 * min(waits):.0f}")
    assert median < 3


# what is refused


def test_too_little_memory_is_told() -> None:
    wide = ps.arrays(x=np.zeros((40, 100_000))).batch(10)
    with pytest.raises(ps.OptionError, match=r"memory_bytes=1,048,576; give at least 16,"):
        next(iter(ps.Loader(wide, workers=1, memory_bytes=1 << 20)))
    unknown = ps.arrays(x=np.zeros((40, 100_000))).map(dict).batch(10)
    with pytest.raises(ps.OptionError, match=r"memory_bytes=1,048,576"):
        list(ps.Loader(unknown, workers=1, memory_bytes=1 << 20))


def test_memory_for_two_batches_is_enough() -> None:
    wide = ps.arrays(x=np.random.default_rng(0).random((40, 20_000))).batch(10)
    (expected,) = epochs(wide, workers=0)
    with ps.Loader(wide, workers=2, memory_bytes=4 << 20) as loader:
        kept = list(loader)
        assert loader.stats()["slots"] == 2
    assert all(one["x"].equal(other["x"]) for one, other in zip(kept, expected, strict=True))


# what a loader says


def test_stats_are_true() -> None:
    with ps.Loader(_count(400, 10), workers=2, name="mine") as loader:
        before = loader.stats()
        assert (before["batches"], before["batches_taken"], before["workers"]) == (0, 0, [])
        batches = iter(loader)
        for _ in range(7):
            batch = next(batches)
        now = loader.stats()
        assert now["name"] == "mine"
        assert now["pid"] == os.getpid()
        assert now["batches_taken"] == 7
        assert 7 <= now["batches"] <= 40
        del batch
        assert sum(1 for _ in batches) == 33
        after = loader.stats()
        assert (after["batches"], after["batches_taken"], after["samples"]) == (40, 40, 400)
        assert sum(worker["samples"] for worker in after["workers"]) == 400
        assert {worker["pid"] for worker in after["workers"]} == set(workers(loader))
        assert after["window"] == 0
        assert after["slots_held"] == 0
        assert after["workers_lost"] == after["bad_samples"] == 0
        assert 0 < after["wait_s"] < after["uptime_s"]
    final = loader.stats()
    assert final["batches_taken"] == 40, "still known after the loader was closed"
    assert not psutil.Process().children()


def test_waiting_is_counted() -> None:
    def slow(sample: Batch) -> Batch:
        time.sleep(0.05)
        return sample

    for count in (0, 1):
        with ps.Loader(ps.arrays(x=np.arange(8)).map(slow).batch(1), workers=count) as loader:
            started = time.perf_counter()
            rest(loader)
            took = time.perf_counter() - started
            stats = loader.stats()
            assert 0.4 <= stats["wait_s"] <= took
            assert stats["wait_s"] <= stats["uptime_s"], "starting workers is waiting too"


def test_stats_have_the_same_keys_without_workers() -> None:
    found = []
    for count in (0, 1):
        loader = ps.Loader(_count(), workers=count)
        keys = [loader.stats().keys()]
        rest(loader)
        keys.append(loader.stats().keys())
        loader.close()
        keys.append(loader.stats().keys())
        found += keys
    assert all(keys == found[0] for keys in found)


def test_explain_is_true(photos: Path) -> None:
    native = ps.Loader(_images(photos), workers=2)
    text = native.explain()
    assert "30 samples" in text
    assert "decode" in text
    assert "5 of 6 per epoch" in text
    assert "workers: 2, as asked" in text
    assert "clean process without torch" in text
    opaque = ps.Loader(ps.arrays(x=np.arange(20)).map(lambda s: s).batch(5), workers=1)
    assert "forked from this process: the pipeline holds objects of yours" in opaque.explain()
    assert "prepared in the training process" in ps.Loader(_count(), workers=0).explain()
    assert not psutil.Process().children(), "explaining starts nothing"


def _scrape(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text: str = answer.read().decode()
    return text


def test_metrics_are_served_for_prometheus() -> None:
    with ps.Loader(_count(), workers=2, metrics_port=0, name='a "name"') as loader:
        port = loader.metrics_port
        assert port
        rest(loader)
        loader.stats()
        lines = _scrape(port).splitlines()
        values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
        assert values["penstock_batches_total"] == 40
        assert values["penstock_samples_total"] == 400
        assert 'loader="a \\"name\\""' in lines[2]
        for name in values:
            assert f"# TYPE {name} " in "\n".join(lines)
        with pytest.raises(urllib.error.HTTPError, match="404") as missing:
            _scrape(port, "/elsewhere")
        missing.value.close()
        with socket.create_connection(("127.0.0.1", port)):  # says nothing; others are served all the same
            assert _scrape(port)
        rest(loader)
    with pytest.raises(urllib.error.URLError):
        _scrape(port)


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        loader = ps.Loader(_count(), workers=1, metrics_port=port)
        with pytest.raises(ps.OptionError, match=rf"metrics_port={port} cannot be served"):
            next(iter(loader))
    assert len(rest(loader)) == 40
    assert loader.metrics_port == port
    loader.close()


def test_a_port_without_workers_is_an_error() -> None:
    with pytest.raises(ps.OptionError, match="metrics_port"):
        ps.Loader(_count(), workers=0, metrics_port=0)


def test_running_loaders_are_found() -> None:
    def mine() -> dict[str, dict[str, Any]]:
        return {found["name"]: found for found in view.running() if found["pid"] == os.getpid()}

    assert mine() == {}
    with ps.Loader(_count(), workers=1, name="one") as one, ps.Loader(_count(), workers=1, name="two") as two:
        rest(one)
        next(iter(two))
        one.stats()
        found = mine()
        assert set(found) == {"one", "two"}
        assert found["one"]["batches"] == 40
        assert set(found["one"]) == set(one.stats())
    wait_until(lambda: mine() == {})


def test_a_view_is_whole_however_much_there_is_to_say() -> None:
    """A thousand errors with long reasons are more than a socket takes at once."""

    def fail(sample: Batch) -> Batch:
        raise ValueError("long " * 200)

    with ps.Loader(
        ps.arrays(x=np.arange(600)).map(fail).batch(50), workers=1, on_error="replace", name="big"
    ) as loader:
        for _ in range(12):
            with pytest.raises(ps.SampleError):
                next(iter(loader))
        (found,) = [found for found in view.running() if found["name"] == "big"]
        assert len(str(found)) > 200_000
