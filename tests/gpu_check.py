"""All that is tested on a real GPU: `python tests/gpu_check.py`, with PYTHONPATH=src where Penstock is not installed.

It runs `pytest -m gpu`, or does without pytest where there is none (see bare.py). The exit status is 1 where a test
failed, and with `--within SECONDS` what there was no time for is named.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parent
FILES = (
    "engine_gpu",
    "triton_cut",
    "triton_finish",
    "triton_steps",
    "loader_gpu",
    "tail",
    "sound_device",
)
"""The most telling first."""
NEEDED = ("pytest", "hypothesis", "psutil")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=FILES, default=FILES, help="these files' tests", metavar="FILE")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds; what is left is named")
    parser.add_argument("--bare", action="store_true", help="without pytest, though it is there")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(TESTS))
    sys.path.insert(1, str(TESTS.parent))
    paths = [TESTS / f"test_{name}.py" for name in options.only]
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not missing and not options.bare:
        return _with_pytest(paths, time.monotonic() + options.within)
    print(f"without pytest; missing: {', '.join(missing) or 'nothing'}")
    import bare

    bare.install()
    report = bare.run(paths, time.monotonic() + options.within)
    for name, reason in report.left_out.items():
        print(f"left out: {name}: {reason}")
    print(f"{len(report.passed)} passed, {len(report.failed)} failed, {len(report.left_out)} left out")
    for name in report.failed:
        print(f"FAILED {name}")
    return int(bool(report.failed))


def _with_pytest(paths: Sequence[Path], until: float) -> int:
    import pytest

    class Until:
        def pytest_runtest_setup(self) -> None:
            if time.monotonic() > until:
                pytest.skip("no time")

    # Warnings of the torch that is there are not this project's.
    marks = ["-m", "gpu", "-W", "default", "--durations=15", "-rsP", "-p", "no:cacheprovider"]
    return int(pytest.main([*marks, *map(str, paths)], plugins=[Until()]))


if __name__ == "__main__":
    raise SystemExit(main())
