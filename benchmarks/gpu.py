"""The matrix of trainings on a GPU: models, eager and compiled, on few cores and many, fed by all contenders in turn.

`python -m benchmarks.gpu --list`, then `python -m benchmarks.gpu --only resnet50-2cores --rounds 3 --seconds 6`

Every part is a process of its own and a file of its own, `benchmarks/results/gpu-PART.json`, so that the matrix can be
measured piece by piece. With `--within SECONDS` no turn begins that would not end in time, and the parts that are left
are named. A part of seven contenders takes about two minutes a round, and another one to compile the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence

from benchmarks.harness import ROOT, Row
from benchmarks.training import parts
from benchmarks.training.parts import Part

CONTENDERS = ("torch", "dali", "dali:1.0", "dali:0.12", "penstock")
ALL = ("synthetic", *CONTENDERS)
ROUGH = ("synthetic", "rough", *CONTENDERS)
LANES = ("dali", "dali:1.0", "dali:0.12", "penstock:device=cpu", "penstock")
ABLATION = ("synthetic", *(f"ablation:{setting}" for setting in ("none", "ahead", "affinity", "threshold")))
LARGE = (1024, 768)
LEAST_S = 45
"""With less time left no part is begun."""

PARTS = (
    Part("resnet50-2cores", "resnet50", ROUGH),
    Part("resnet50-4cores", "resnet50", ALL, cores=4),
    Part("resnet50-16cores", "resnet50", ALL, cores=16),
    Part("resnet50-compiled-2cores", "resnet50", ROUGH, compile="default"),
    Part("resnet50-compiled-16cores", "resnet50", ALL, compile="default", cores=16),
    Part("resnet50-graphs-2cores", "resnet50", ALL, compile="reduce-overhead"),
    Part("vit-compiled-2cores", "vit_b_16", ALL, compile="default"),
    Part("resnet18-4cores", "resnet18", ALL, cores=4),
    Part("resnet18-16cores", "resnet18", ALL, cores=16),
    Part("resnet18-compiled-1024-4cores", "resnet18", ALL, compile="default", cores=4, batch=1024),
    Part("resnet18-large-16cores", "resnet18", LANES, cores=16, image_size=LARGE),
    Part("process-4cores", "resnet50", ("synthetic", "penstock", "process"), cores=4),
    Part("ablation-4cores", "resnet18", ABLATION, cores=4, image_size=LARGE),
    Part("alexnet-4cores", "alexnet", ALL, cores=4),
    Part("mobilenet-4cores", "mobilenet_v2", ALL, cores=4),
    Part("m5-2cores", "m5", ("synthetic", "torch", "penstock")),
    Part("alone-4cores", "none", CONTENDERS, cores=4, augment="default"),
    Part("alone-rand-4cores", "none", CONTENDERS, cores=4),
    Part("alone-large-16cores", "none", LANES, cores=16, image_size=LARGE),
    Part("alone-progressive-4cores", "none", CONTENDERS, cores=4, progressive=0.1),
    Part("tiny-2cores", "tiny", ("synthetic", "penstock"), batch=64, size=64),
)
"""`tiny` is not of the published matrix: it shows on any machine, with --device cpu, that all runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it from the command line; the exit status is 1 where a contender failed."""
    options = _parser().parse_args(arguments)
    if options.list:
        print("\n".join(_line(part) for part in PARTS))
        return 0
    if options.quick:
        options.rounds, options.seconds, options.warm = 1, min(options.seconds, 0.5), 0.2
    until, failed, left = time.time() + options.within, False, []
    for part in _chosen(options):
        if until - time.time() < LEAST_S:
            left.append(part.name)
            continue
        rows = _run(part, options, until)
        failed |= any(row.error for row in rows)
        left += [part.name] if any(len(row.samples) < options.rounds and not row.error for row in rows) else []
    if left:
        print(f"no time for all of: {' '.join(left)}", file=sys.stderr)
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = parts.arguments(__doc__ or "", seconds=6.0, rounds=3)
    names = [part.name for part in PARTS]
    default = [part.name for part in PARTS if part.model != "tiny"]
    parser.add_argument("--only", nargs="+", choices=names, default=default, help="these parts", metavar="PART")
    parser.add_argument("--loaders", nargs="+", help="these contenders instead of a part's own")
    parser.add_argument("--list", action="store_true", help="show the parts, measure nothing")
    return parser


def _chosen(options: argparse.Namespace) -> list[Part]:
    named = {part.name: part for part in PARTS}
    chosen = [named[name] for name in options.only]
    if options.loaders:
        chosen = [dataclasses.replace(part, loaders=tuple(options.loaders)) for part in chosen]
    return [dataclasses.replace(part, name=f"gpu-{part.name}") for part in chosen]


def _run(part: Part, options: argparse.Namespace, until: float) -> list[Row]:
    rows, settings = parts.measured(part, options, until)
    print(parts.show(part, rows), flush=True)
    for row in rows:
        if row.error:
            print(f"FAILED {row.name}: {row.error}", file=sys.stderr, flush=True)
    folder = options.results or (None if options.quick else ROOT / "benchmarks" / "results")
    if folder is not None:
        parts.record(part, rows, settings, folder)
    return rows


def _line(part: Part) -> str:
    how = f"{part.compile or 'eager'}, batch {part.batch}, {part.cores} cores, {part.augment}"
    size = "x".join(map(str, part.image_size))
    return f"{part.name:<32} {part.model:<13} {how}, {size}: {' '.join(part.loaders)}"


if __name__ == "__main__":
    raise SystemExit(main())
