"""However a training process or its loader ends: no process and no memory is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import penstock as ps
from loading import Batch, Launcher, Script, assert_same, epochs, gone, rest, wait_until, workers
from penstock.feed import _start_coordinator
from penstock.wire import Channel, pair

pytestmark = pytest.mark.processes

_SCRIPT = """
import os, signal, sys, time
import numpy as np
import psutil
import penstock as ps

def busy(sample):
    if sample["x"] > {busy_after}:
        while True:
            pass
    return sample

def train():
    pipe = ps.arrays(x=np.arange(10_000)).map(busy).batch(4)
    loader = ps.Loader(pipe, workers=2, start={start!r}, shuffle=False)
    batches = iter(loader)
    next(batches)
    while len(loader.stats()["workers"]) < 2:
        next(batches)
    print(*[p.pid for p in psutil.Process().children(recursive=True)], flush=True)
    {then}

if __name__ == "__main__":
    train()
"""


def _script(then: str, start: str = "fork", busy_after: int = 10**9) -> str:
    text = _SCRIPT.format(then=then, start=start, busy_after=busy_after)
    # a clean process cannot find the functions of a script
    return text if start == "fork" else text.replace(".map(busy)", "")


_LOOP = "[time.sleep(0.02) for _ in batches]"
_WAIT = "time.sleep(60)"


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


def _family(script: Script) -> list[int]:
    return [int(pid) for pid in script.first_line().split()]


def _all_gone(pids: list[int], timeout_s: float = 10) -> None:
    assert len(pids) >= 4, "coordinator, template, two workers"
    wait_until(lambda: all(map(gone, pids)), timeout_s)


@pytest.mark.parametrize("start", ["clean", "fork"])
@pytest.mark.parametrize(
    ("then", "code"),
    [
        ("pass", 0),
        ("del batches, loader; import gc; gc.disable()", 0),
        ("loader.close()", 0),
        ("raise RuntimeError('in the training loop')", 1),
        ("sys.exit(7)", 7),
        ("os._exit(8)", 8),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGSEGV); time.sleep(60)", -signal.SIGSEGV),
        ("globals().update(kept=(loader, batches, next(batches)))", 0),
        ("import threading; threading.Thread(target=lambda: next(batches)).start()", 0),
    ],
    ids=["return", "del", "close", "exception", "exit", "_exit", "SIGTERM", "SIGSEGV", "live at shutdown", "thread"],
)
def test_ends_of_a_script(launcher: Launcher, tmp_path: Path, start: str, then: str, code: int) -> None:
    script = launcher.start(tmp_path / "train.py", _script(then, start))
    family = _family(script)
    found, errors = script.end()
    assert found == code
    assert errors.count("Traceback") == (1 if then.startswith("raise") else 0), errors
    _all_gone(family)


@pytest.mark.parametrize("then", [_LOOP, _WAIT])
def test_ctrl_c(launcher: Launcher, tmp_path: Path, then: str) -> None:
    """A terminal sends SIGINT to the whole process group. One traceback is seen, the user's."""
    script = launcher.start(tmp_path / "train.py", _script(then))
    family = _family(script)
    time.sleep(0.1)
    os.killpg(script.pid, signal.SIGINT)
    _, errors = script.end()
    assert errors.count("Traceback") == 1, errors
    assert errors.strip().endswith("KeyboardInterrupt")
    _all_gone(family)


def test_ctrl_c_while_it_starts(launcher: Launcher, tmp_path: Path) -> None:
    text = _script(_LOOP).replace("batches = iter(loader)", "print('starting', flush=True); batches = iter(loader)")
    for delay in (0.0, 0.03, 0.06, 0.1):
        script = launcher.start(tmp_path / "train.py", text)
        script.first_line()
        children = psutil.Process(script.pid).children(recursive=True)
        time.sleep(delay)
        os.killpg(script.pid, signal.SIGINT)
        _, errors = script.end()
        assert errors.strip().endswith("KeyboardInterrupt"), errors
        assert "Traceback" not in errors.split("Traceback", 1)[1], errors
        wait_until(lambda children=children: all(gone(child.pid) for child in children))


def test_a_coordinator_that_hears_nothing_but_goodbye_ends_in_peace(capfd: pytest.CaptureFixture[str]) -> None:
    """The training process was interrupted before it could say what it wants."""
    ours, theirs = pair()
    with theirs:
        process = _start_coordinator(theirs.fileno())
    channel = Channel(ours)
    channel.send(("bye",))
    channel.close()
    assert process.wait(20) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("start", ["fork", "clean"])
def test_a_training_process_killed_while_workers_are_busy_in_the_users_code(
    launcher: Launcher, tmp_path: Path, start: str
) -> None:
    text = _script("list(batches)", "fork", busy_after=200)
    if start == "clean":  # functions of a script cannot be found by a clean process
        function = text[text.index("def busy") : text.index("def train")]
        (tmp_path / "busywork.py").write_text(function)
        text = text.replace(function, "sys.path.append(os.path.dirname(path))\nfrom busywork import busy\n")
        text = text.replace("start='fork'", "start='clean'")
    script = launcher.start(tmp_path / "train.py", text)
    family = _family(script)
    wait_until(lambda: sum(psutil.Process(pid).cpu_percent(0.1) > 5 for pid in family) >= 1, 20)
    os.kill(script.pid, signal.SIGKILL)
    script.end()
    _all_gone(family)


@pytest.mark.parametrize("start", ["fork", "clean"])
def test_training_process_and_coordinator_killed_together(launcher: Launcher, tmp_path: Path, start: str) -> None:
    script = launcher.start(tmp_path / "train.py", _script(_WAIT, start))
    family = _family(script)
    (lead,) = [p.pid for p in psutil.Process(script.pid).children() if "penstock.coordinator" in " ".join(p.cmdline())]
    os.kill(script.pid, signal.SIGSTOP)
    os.kill(lead, signal.SIGKILL)
    os.kill(script.pid, signal.SIGKILL)
    script.end()
    _all_gone(family)


_PIPE = ps.arrays(x=np.arange(40_000).reshape(4000, 10)).batch(10)


def _children() -> list[int]:
    """Of this process, but for the launcher."""
    return [child.pid for child in psutil.Process().children(recursive=True) if "launch()" not in str(child.cmdline())]


@pytest.mark.parametrize("start", ["clean", "fork"])
def test_a_closed_loader_leaves_not_even_a_zombie(start: str) -> None:
    """This process adopts orphans, as the first process of a container does."""
    loader = ps.Loader(_PIPE, workers=3, start=start)  # type: ignore[arg-type]
    next(iter(loader))
    workers(loader, 3)
    assert len(_children()) == 5
    loader.close()
    assert _children() == []
    loader.close()
    assert len(rest(loader)) == 400
    loader.close()
    assert _children() == []


@pytest.mark.parametrize("start", ["clean", "fork"])
def test_a_loader_that_is_let_go_ends_at_once(start: str) -> None:
    loader = ps.Loader(_PIPE, workers=2, start=start)  # type: ignore[arg-type]
    batches = iter(loader)
    batch = next(batches)
    assert _children()
    del loader
    next(batches)
    assert _children()
    del batches
    assert _children() == []
    assert batch["id"].numel() == 10


def test_a_loader_that_fails_to_start_leaves_nothing() -> None:
    loader = ps.Loader(ps.arrays(x=np.zeros((40, 100_000))).batch(10), workers=2, memory_bytes=1 << 20)
    for _ in range(2):
        with pytest.raises(ps.OptionError, match="memory_bytes"):
            next(iter(loader))
        assert _children() == []


@pytest.mark.parametrize("start", ["clean", "fork"])
def test_a_forked_child_leaves_its_parents_loader_alone(start: str) -> None:
    (expected,) = epochs(_PIPE, workers=0)
    with ps.Loader(_PIPE, workers=2, start=start) as loader:  # type: ignore[arg-type]
        batches = iter(loader)
        found = [next(batches) for _ in range(3)]
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            said = b"nothing"
            try:
                next(batches)
            except ps.LaneError as error:
                said = str(error).encode()
            with contextlib.suppress(BaseException):
                loader.close()
                del batches, loader
            os.write(write, said)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert b"make a Loader of its own" in os.read(read, 1000)
        os.close(read)
        os.close(write)
        found += list(batches)
        assert_same(found, expected)


def test_a_child_that_ends_as_a_program_does_leaves_the_loader_alone(launcher: Launcher, tmp_path: Path) -> None:
    then = "pid = os.fork()\n    if pid == 0: sys.exit(0)\n    os.waitpid(pid, 0)\n    print(len(list(batches)))"
    script = launcher.start(tmp_path / "train.py", _script(then))
    family = _family(script)
    code, errors = script.end()
    assert code == 0, errors
    assert int(script.output.splitlines()[1]) > 2000
    _all_gone(family)


@pytest.mark.parametrize("start", ["clean", "fork"])
def test_two_loaders_at_once(start: str) -> None:
    (expected,) = epochs(_PIPE, workers=0)
    first, second = (ps.Loader(_PIPE, workers=2, start=start) for _ in range(2))  # type: ignore[arg-type]
    pairs = list(zip(first, second, strict=True))
    assert_same([one for one, _ in pairs], expected)
    assert_same([other for _, other in pairs], expected)
    family = _children()
    first.close()
    assert 0 < len(_children()) < len(family)
    assert_same(rest(second), epochs(_PIPE, 2, workers=0)[1])
    second.close()


@pytest.mark.parametrize("start", ["clean", "fork"])
def test_the_training_process_gains_no_thread(start: str) -> None:
    before = threading.active_count(), psutil.Process().num_threads()
    with ps.Loader(_PIPE, workers=2, start=start) as loader:  # type: ignore[arg-type]
        for _ in loader:
            pass
        assert (threading.active_count(), psutil.Process().num_threads()) == before


def test_an_interrupted_wait_leaves_the_loader_usable() -> None:
    def slow(sample: Batch) -> Batch:
        time.sleep(0.05)
        return sample

    def interrupt(*_: object) -> None:
        raise TimeoutError

    pipe = ps.arrays(x=np.arange(40)).map(slow).batch(10)
    (expected,) = epochs(pipe, workers=0)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with ps.Loader(pipe, workers=1) as loader:
            batches = iter(loader)
            found = [next(batches)]
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(TimeoutError):
                list(batches)
            loader.load_state_dict(loader.state_dict())
            state = loader.state_dict()
            assert state["samples"] >= 10
            found = expected[: state["samples"] // 10] + rest(loader)
            assert_same(found, expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("size", ["size=64k", None])
def test_shared_memory_of_the_container_is_not_needed(tmp_path: Path, size: str | None) -> None:
    """/dev/shm of 64 KiB, or none that can be written to; nothing is put there."""
    text = _script("print(len(list(batches))); print(os.listdir('/dev/shm'))").replace(
        "x=np.arange(10_000)", "x=np.arange(10_000), wide=np.zeros((10_000, 1000))"
    )
    (tmp_path / "train.py").write_text(text)
    mount = f"mount -t tmpfs -o {size} tmpfs /dev/shm" if size else "mount -t tmpfs -o ro tmpfs /dev/shm"
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", f"{mount} && exec {sys.executable} train.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(ps.__file__).parent.parent)}
    probe = subprocess.run([*command[:-1], mount], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no mount namespace can be had here: {probe.stderr.strip()}")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert int(lines[1]) > 2000
    assert lines[2] == "[]"
