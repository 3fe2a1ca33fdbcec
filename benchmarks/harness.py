"""What all benchmarks share: a process per measurement, rounds in turn, the environment, the table, the JSON file."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["Measured", "Row", "alternate", "arguments", "finish", "measure", "scratch", "table"]

ROOT = Path(__file__).parent.parent
PACKAGES = (
    *("penstock", "torch", "torchvision", "numpy", "pillow", "opencv-python", "nvidia-dali-cuda130", "spdl-io"),
    *("grain", "webdataset", "litdata", "ffcv", "numba"),
)

Measured = dict[str, Any]
"""What one measuring process returns: plain numbers and texts, by name."""


@dataclass
class Row:
    """One contender: every raw sample, or the error that ended it."""

    name: str
    note: str = ""
    samples: list[Measured] = field(default_factory=list)
    error: str | None = None

    def median(self, key: str) -> float:
        """The median over the samples; NaN for a row that failed."""
        return statistics.median(self.values(key)) if self.values(key) else float("nan")

    def values(self, key: str) -> list[float]:
        """One value per sample."""
        return [sample[key] for sample in self.samples]


def arguments(description: str, rounds: int = 5) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help="measurements of each; the median counts")
    parser.add_argument("--cores", type=int, default=2, help="CPU cores that a measured process may use")
    parser.add_argument(
        "--quick", action="store_true", help="one short round: shows that all run, says nothing of speed"
    )
    parser.add_argument("--results", type=Path, help="folder for the JSON file (benchmarks/results; none with --quick)")
    parser.add_argument("--photos", type=Path, default=os.environ.get("PENSTOCK_PHOTOS"), help="a folder of JPEG files")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one measuring process")
    return parser


def scratch() -> Path:
    """Where data sets are kept between runs: below $TMPDIR."""
    folder = Path(tempfile.gettempdir()) / "penstock-benchmarks"
    folder.mkdir(exist_ok=True)
    return folder


def measure(function: str, request: Mapping[str, Any], *, cores: int, timeout: float) -> Measured:
    """Call `module:function(request)` in a fresh process on so many cores; RuntimeError holds what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.harness", function, json.dumps(request), str(answer), str(cores)],
                cwd=ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            status = _wait(process, timeout)
        if status == 0:
            return dict(json.loads(answer.read_text()))
        why = f"no answer within {timeout:g} s" if status is None else f"exit status {status}"
        raise RuntimeError(f"{function}: {why}\n{_tail(log)}")


def _wait(process: subprocess.Popen[bytes], timeout: float) -> int | None:
    """The exit status, or None after the timeout. Nothing that the process started outlives this."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Path, lines: int = 15) -> str:
    text = log.read_text(errors="replace").replace(f"{ROOT}/", "")
    return "\n".join(text.splitlines()[-lines:])


def answer(function: str, request: str, path: str, cores: str) -> None:
    """The measuring process's side of `measure`."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])
    module, name = function.split(":")
    measured = getattr(importlib.import_module(module), name)(json.loads(request))
    Path(path).write_text(json.dumps(measured))
    os._exit(0)  # the destructors of two OpenCVs in one process (FFCV's and the wheel's) wait for each other forever


def alternate(rows: Sequence[Row], rounds: int, run: Callable[[Row], Measured]) -> None:
    """Measure every row once, then every row again, and so on. A row that fails is measured no more."""
    for number in range(rounds):
        for row in (row for row in rows if row.error is None):
            load = os.getloadavg()
            try:
                measured = run(row)
            except RuntimeError as error:
                row.error = str(error)
                print(f"{row.name}: {row.error}", file=sys.stderr, flush=True)
                continue
            row.samples.append({"round": number, "load_before": load, **measured})
            print(f"round {number + 1}/{rounds}  {row.name:<24} {_brief(measured)}", file=sys.stderr, flush=True)


def _brief(measured: Measured) -> str:
    return "  ".join(f"{key}={value:.4g}" for key, value in measured.items() if isinstance(value, float))


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first is flush left."""
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
    cells = [
        [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(*pair, strict=True))
        ]
        for pair in ((line, widths) for line in [head, *lines])
    ]
    return "\n".join("  ".join(line).rstrip() for line in cells)


def finish(name: str, options: argparse.Namespace, settings: Mapping[str, Any], rows: Sequence[Row], text: str) -> int:
    """Print the table, write the JSON file; the exit status is 1 where a row failed."""
    print(f"\n{name}\n{text}")
    folder = options.results or (None if options.quick else ROOT / "benchmarks" / "results")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        record = {
            "benchmark": name,
            "settings": settings,
            "environment": environment(),
            "rows": [asdict(r) for r in rows],
        }
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    failed = [row for row in rows if row.error is not None]
    for row in failed:
        print(f"FAILED {row.name}: {row.error}", file=sys.stderr)
    return 1 if failed else 0


def environment() -> dict[str, Any]:
    """What a reader needs to judge the figures; nothing that names the machine or its owner."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "changed_since": [line[3:] for line in _git("status", "--porcelain").splitlines()],
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "load": os.getloadavg(),
    }


def _field(path: str, name: str) -> str:
    lines = (line for line in Path(path).read_text().splitlines() if line.startswith(name))
    return next(lines, ":").split(":", 1)[1].strip()


def _git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.rstrip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    answer(*sys.argv[1:])
