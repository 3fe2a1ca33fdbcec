"""A part of the matrix: one model, eager or compiled, on so many cores, fed by several contenders in one process.

They share the process because the model is compiled once for all of them (a minute), and because each one's ratio
compares with a G of the same process. A contender that ends the process is recorded as failed, and a new process takes
the turns that are left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness, photos
from benchmarks.harness import Measured, Row
from benchmarks.training import AUDIO, data

__all__ = ["Part", "arguments", "measured", "record", "show"]

COMPILING_S = 300
"""At most, for a model on one core; it counts towards the part's time."""

HEAD = (
    *("loader", "G", "alone", "training", "ratio", "least", "most", "waited", "slowed", "cores"),
    *("alone cores", "torch MiB", "loader MiB"),
)


@dataclass(frozen=True)
class Part:
    """What to measure."""

    name: str
    model: str
    """One of `models.MODELS`; "none": only the loaders, alone."""
    loaders: tuple[str, ...]
    cores: int = 2
    batch: int = 256
    compile: str = ""
    """A mode of torch.compile; empty: eager."""
    augment: str = "rand"
    size: int = 224
    image_size: tuple[int, int] = (500, 375)
    progressive: float = 0.0

    @property
    def kind(self) -> str:
        """What the model takes."""
        return "audio" if self.model in AUDIO else "image"


def arguments(description: str, seconds: float, rounds: int) -> argparse.ArgumentParser:
    """The options that do not belong to a part."""
    parser = harness.arguments(description, rounds)
    parser.add_argument("--seconds", type=float, default=seconds, help="of training in a turn; G and alone take half")
    parser.add_argument("--warm", type=float, default=2.0, help="seconds before each that do not count")
    parser.add_argument("--within", type=float, default=3600.0, help="seconds for everything; what is left is told")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--data", type=Path, help="class folders to train on; without, they are generated")
    parser.add_argument("--files", type=int, default=8192, help="files to generate")
    parser.add_argument("--classes", type=int, default=1000, help="classes to generate")
    parser.add_argument("--samples", type=int, default=262_144, help="of an epoch; the files repeat")
    parser.add_argument("--commit", default="", help="what is measured, where no .git says so")
    return parser


def measured(part: Part, options: argparse.Namespace, until: float) -> tuple[list[Row], Measured]:
    """The rows, and what is worth knowing of the work. Takes turns until the clock says `until`.

    The log of turns lies beside the results, so that they are there also if this process is killed.
    """
    root = _root(part, options)
    request = _request(part, options, root, until)
    log = Path(request["log"])
    log.unlink(missing_ok=True)
    rows = {name: Row(name) for name in part.loaders}
    try:
        _take_all(part, request, rows, options.rounds)
    except RuntimeError as error:
        for row in rows.values():
            row.error = row.error or str(error)
    settings = _settings(part, options, root, _lines(log))
    if options.results is None:
        log.unlink(missing_ok=True)
    return list(rows.values()), settings


def _settings(part: Part, options: argparse.Namespace, root: Path, lines: list[Measured]) -> Measured:
    known = {key: value for line in lines for key, value in line.get("machine", {}).items()}
    said = {key: getattr(options, key) for key in ("seconds", "rounds", "warm", "commit")}
    return {**asdict(part), **said, "machine": known, "mean_file_bytes": data.mean_bytes(root)}


def _take_all(part: Part, request: Measured, rows: dict[str, Row], rounds: int) -> None:
    """All turns, in one process as long as none ends it."""
    if part.compile:
        _fill_cache(part, request)
    turns = [(number, name) for number in range(rounds) for name in rows]
    while turns and time.time() < request["until"]:
        turns = _taken(part, {**request, "turns": turns}, rows)


def _taken(part: Part, request: Measured, rows: dict[str, Row]) -> list[tuple[int, str]]:
    """Run a process; the turns that are left to another one, none if it ended in peace."""
    log = Path(request["log"])
    seen = len(_lines(log))
    died: RuntimeError | None = None
    try:
        timeout = max(30.0, request["until"] - time.time() + 60)
        harness.measure("benchmarks.training.trial:run", request, cores=part.cores, timeout=timeout)
    except RuntimeError as error:
        died = error
    under_way = _entered(_lines(log)[seen:], rows)
    if died is None:
        return []
    if under_way is None:
        raise died
    rows[under_way].error = str(died)
    done = {(sample["round"], row.name) for row in rows.values() for sample in row.samples}
    return [turn for turn in request["turns"] if turn not in done and rows[turn[1]].error is None]


def _entered(lines: list[Measured], rows: dict[str, Row]) -> str | None:
    """Put the turns into their rows; whose turn did not end."""
    under_way = None
    for line in lines:
        under_way = line.get("begun")
        if "failed" in line:
            rows[line["failed"]].error = line["error"]
        elif "name" in line:
            row = rows[line.pop("name")]
            row.note = line.pop("note")
            row.samples.append(line)
    return under_way


def _fill_cache(part: Part, request: Measured) -> None:
    """Compile once with all cores, for it takes them seconds and the part's own few cores minutes."""
    marker = harness.scratch() / f"compiled-{part.model}-{part.batch}-{part.size}-{part.compile}"
    if not marker.exists():
        timeout = min(COMPILING_S, max(30.0, request["until"] - time.time()))
        harness.measure("benchmarks.training.trial:compiled", request, cores=os.cpu_count() or 1, timeout=timeout)
        marker.touch()


def _root(part: Part, options: argparse.Namespace) -> Path:
    """The data, all read once."""
    if options.data is not None:
        root: Path = options.data.resolve()
    elif options.photos is not None and part.kind == "image":
        root = photos.class_folders(options.photos, options.files)
    else:
        width, height = part.image_size
        kind: Any = part.kind
        recipe = data.Recipe(kind, options.files, options.classes, width, height, part.progressive)
        root = data.class_folders(recipe)
    photos.warm(root)
    return root


def _request(part: Part, options: argparse.Namespace, root: Path, until: float) -> Measured:
    job = {"root": str(root), "kind": part.kind, "samples": options.samples, "batch": part.batch, "size": part.size}
    job |= {"cores": part.cores, "augment": part.augment, "device": options.device, "seed": 0}
    folder = options.results or harness.scratch()
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "job": job,
        "model": part.model,
        "compile": part.compile,
        "classes": max(2, sum(entry.is_dir() for entry in root.iterdir())),
        "seconds": options.seconds,
        "warm": options.warm,
        "until": until,
        "log": str((folder / f"{part.name}.jsonl").resolve()),
    }


def _lines(log: Path) -> list[Measured]:
    """What the trials wrote; a line that a process's end has cut off is left out."""
    lines = []
    for line in log.read_text().splitlines() if log.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def show(part: Part, rows: Sequence[Row]) -> str:
    """The table: medians, for ratios the spread too."""
    return harness.table((f"{part.name}: {HEAD[0]}", *HEAD[1:], "note"), [_cells(row) for row in rows])


def _cells(row: Row) -> tuple[str, ...]:
    if not row.samples:
        return row.name, *([""] * (len(HEAD) - 1)), "failed" if row.error else "no time"
    rates = [_median(row, key, "{:,.0f}") for key in ("g", "alone_images_per_s", "images_per_s")]
    ratios = [sample["ratio"] for sample in row.samples if "ratio" in sample]
    spread = [f"{pick(ratios):.3f}" if ratios else "" for pick in (statistics.median, min, max)]
    shares = [_median(row, key, "{:.3f}") for key in ("waited_share", "slowed_share")]
    cores = [_median(row, key, "{:.2f}") for key in ("cores", "alone_cores")]
    memory = [_median(row, key, "{:,.0f}") for key in ("allocated_mib", "loader_gpu_mib")]
    return row.name, *rates, *spread, *shares, *cores, *memory, "then failed" if row.error else row.note


def _median(row: Row, key: str, form: str) -> str:
    return form.format(row.median(key)) if key in row.samples[0] else ""


def record(part: Part, rows: Sequence[Row], settings: Measured, folder: Path) -> None:
    """Write the JSON file; the log that led to it goes. Without git the environment is what the process said of it."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = harness.environment() if shutil.which("git") else {}
    found = {
        "benchmark": part.name,
        "settings": settings,
        "environment": environment,
        "rows": [asdict(r) for r in rows],
    }
    (folder / f"{part.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / f"{part.name}.jsonl").unlink(missing_ok=True)
