"""The tests of the GPU can be run where pytest, hypothesis and psutil are missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent

_TESTS = """
import psutil
import pytest
from hypothesis import given, strategies as st

numbers = st.integers(0, 3) | st.none()
ended = []

@pytest.fixture(scope="module")
def base():
    yield 10
    ended.append("base")

@pytest.fixture
def ten(base, monkeypatch):
    monkeypatch.setenv("BARE", "1")
    return base

@pytest.mark.parametrize("row", [1, 2])
@pytest.mark.parametrize(("a", "b"), [(1, 2), (3, 4)])
def test_sums(ten, a, b, row):
    assert ten + a + b + row < 19

def test_raises():
    with pytest.raises(ValueError, match="oh") as caught:
        raise ValueError("oh no")
    assert caught.value.args == ("oh no",)

def test_does_not_raise():
    with pytest.raises(ValueError):
        pass

@given(numbers)
def test_property(number):
    raise AssertionError
"""


def test_tests_run_without_pytest_and_can_fail(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(_TESTS)
    program = (
        f"import sys, pathlib; sys.path[:0] = [{str(TESTS)!r}, {str(tmp_path)!r}]; import bare; bare.install();"
        f"report = bare.run([pathlib.Path({str(tmp_path)!r}, 'test_some.py')]);"
        "print(len(report.passed), sorted(report.failed), report.left_out, sys.modules['test_some'].ended)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        "4 ['test_some::test_does_not_raise[0]', 'test_some::test_sums[3]'] "
        "{'test_some::test_property[0]': 'needs hypothesis'} ['base']"
    )


def test_the_gpus_tests_are_there_and_run_bare() -> None:
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src")}
    command = [sys.executable, str(TESTS / "gpu_check.py"), "--bare", "--only", "triton_finish"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout
    assert ", 0 failed, 0 left out" in done.stdout
    listed = (TESTS / "gpu_check.py").read_text()
    for path in TESTS.glob("test_*.py"):
        if re.search(r"^pytestmark = (MARKS|.*mark\.gpu)", path.read_text(), re.MULTILINE):
            assert f'"{path.stem.removeprefix("test_")}"' in listed
