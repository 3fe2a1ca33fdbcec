"""`penstock top`: rates from two readings, and a real loader seen from outside."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import top
from penstock.lanes import MOST_WORKERS


def snapshot(name: str = "train", pid: int = 7, **changes: Any) -> dict[str, Any]:
    worker = {"number": 0, "pid": 8, "samples": 0, "busy_s": 0.0}
    plain = {
        "name": name,
        "pid": pid,
        "uptime_s": 10.0,
        "batches": 0,
        "samples": 0,
        "wait_s": 0.0,
        "slots": 9,
        "slots_free": 4,
        "slots_held": 2,
        "cache": None,
        "workers": [worker],
        "workers_lost": 0,
        "bad_samples": 0,
        "errors": [],
    }
    return {**plain, **changes}


def test_rates_are_what_happened_between_two_readings() -> None:
    before = snapshot(batches=10, samples=640, wait_s=1.0)
    after = snapshot(
        uptime_s=12.0,
        batches=14,
        samples=896,
        wait_s=1.5,
        workers=[{"number": 0, "pid": 8, "samples": 300, "busy_s": 1.0}],
    )
    (one,) = top.rates([before], [after])
    assert (one.seconds, one.samples_per_s, one.batches_per_s, one.waited) == (2.0, 128.0, 2.0, 0.25)
    (worker,) = one.workers
    assert (worker.samples_per_s, worker.busy) == (150.0, 0.5)


def test_a_new_loader_counts_from_its_start() -> None:
    (one,) = top.rates([], [snapshot(samples=50, wait_s=2.5)])
    assert (one.seconds, one.samples_per_s, one.waited) == (10.0, 5.0, 0.25)


def test_a_loader_that_came_in_the_place_of_another_is_a_new_one() -> None:
    (one,) = top.rates([snapshot(uptime_s=100.0, samples=9000)], [snapshot(uptime_s=1.0, samples=5)])
    assert one.samples_per_s == 5.0


def test_loaders_of_one_name_in_one_process_are_told_apart() -> None:
    before = [snapshot(samples=100), snapshot(samples=200), snapshot(pid=9, samples=300)]
    after = [snapshot(uptime_s=11.0, samples=110 + 100 * k, pid=pid) for k, pid in enumerate((7, 7, 9))]
    assert [one.samples_per_s for one in top.rates(before, after)] == [10.0, 10.0, 10.0]


def test_shares_stay_below_one_where_counters_come_in_lumps() -> None:
    after = snapshot(uptime_s=11.0, wait_s=3.0, workers=[{"number": 0, "pid": 8, "samples": 1, "busy_s": 5.0}])
    (one,) = top.rates([snapshot()], [after])
    assert (one.waited, one.workers[0].busy) == (1.0, 1.0)


def test_the_table_shows_loaders_workers_slots_and_bad_samples() -> None:
    errors = [
        {"row": k, "id": k, "place": f"data/{k}.jpg", "operator": "decode", "reason": f"cut off\nat {k}"}
        for k in range(8)
    ]
    lines = top.text(top.rates([], [snapshot(samples=12345, bad_samples=8, errors=errors)])).splitlines()
    assert lines[0].split()[:3] == ["loader", "pid", "samples/s"]
    assert lines[1].split()[:3] == ["train", "7", "1,234"]
    assert "4 of 9" in lines[1]
    assert lines[2].split()[:3] == ["worker", "0", "8"]
    assert lines[3] == "train: decode failed on sample 0 at data/0.jpg: cut off"
    assert lines[-1] == "train: and 3 more; loader.stats() lists them"


def test_the_share_that_comes_from_the_cache() -> None:
    before, after = (snapshot(cache={"hits": hits, "misses": 60}) for hits in (0, 30))
    assert [one.cached for one in top.rates([], [after])] == [30 / 90]
    assert [one.cached for one in top.rates([before], [{**after, "uptime_s": 11.0}])] == [1.0]
    assert [one.cached for one in top.rates([after], [{**after, "uptime_s": 11.0}])] == [None]
    head, row, *_ = top.text(top.rates([], [after])).splitlines()
    assert row[head.index("cached") :].split()[0] == "33%"


def test_it_says_so_when_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(top, "running", lambda: iter(()))
    top.run(60.0, "text")
    assert capsys.readouterr().out == "no loader runs on this machine\n"
    top.run(60.0, "json")
    assert json.loads(capsys.readouterr().out) == []


@contextlib.contextmanager
def busy_loader(name: str) -> Iterator[ps.Loader]:
    """A loader of 2 workers whose batches, 2 of 40, were taken."""
    pipe = ps.arrays(image=np.zeros((640, 32, 32, 3), np.uint8)).flip().batch(16)
    with ps.Loader(pipe, workers=2, name=name) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        loader.stats()
        yield loader


@pytest.mark.processes
def test_lanes_of_a_gpu_are_told_from_workers() -> None:
    lanes = [(3, 8), (MOST_WORKERS, 9), (MOST_WORKERS + 1, 10), (MOST_WORKERS + 2, 0)]
    workers = [{"number": number, "pid": pid, "samples": 1, "busy_s": 0.1} for number, pid in lanes]
    shown = top.text(top.rates([], [snapshot(uptime_s=1.0, workers=workers)])).splitlines()[2:]
    assert [line.strip().split("  ")[0] for line in shown] == ["worker 3", "stager 0", "stager 1", "GPU lane"]


def test_a_running_loader_is_seen_from_another_process() -> None:
    name = f"seen-{os.getpid()}"
    command = [sys.executable, "-m", "penstock.cli", "top", "--interval", "0.2"]
    with busy_loader(name):
        read = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True)
        (one,) = [found for found in json.loads(read.stdout) if found["snapshot"]["name"] == name]
        table = subprocess.run([*command, "--once"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert one["snapshot"]["pid"] == os.getpid()
    assert one["snapshot"]["batches"] >= 2
    assert len(one["workers"]) == 2
    row = next(line for line in table.splitlines() if line.startswith(name))
    assert row.split()[1] == str(os.getpid())
    assert not any(found["name"] == name for found in top.running())


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_the_live_view_draws_until_control_c() -> None:
    name = f"live-{os.getpid()}"
    with busy_loader(name):
        master, slave = pty.openpty()  # after the workers were forked: they would keep it open
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
        command = [sys.executable, "-m", "penstock.cli", "top", "--interval", "0.1"]
        process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        with open(master, "rb", buffering=0) as terminal:
            shown = b""
            with contextlib.suppress(OSError):  # the terminal's end
                while part := terminal.read(4096):
                    seen = shown.count(name.encode()) >= 2
                    shown += part
                    if not seen and shown.count(name.encode()) >= 2:
                        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130, shown.decode()
    assert b"Traceback" not in shown
