"""How near a training comes to what the GPU does alone: G, the loader's rate, the training's rate, cores, GPU memory.

`python -m benchmarks.train --model resnet50 --loader penstock dali:1.0 --cores 2 --batch 256 [--compile]`

G is the rate of the same step on one batch that stays on the device; `alone` that of the loader without a model;
`ratio` is training to G. `waited` is the share of time for which the device had no step to do, `slowed` the rest of
what is lacking: steps that took longer because the loader shares the device, the bus and the interpreter with them.
All cores that the process and its workers may use are pinned before anything starts. Contenders take turns in one
process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from benchmarks.training import MODELS, parts
from benchmarks.training.loaders import LOADERS
from benchmarks.training.parts import Part


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it from the command line; the exit status is 1 where a contender failed."""
    options = _parser().parse_args(arguments)
    if options.quick:
        options.rounds, options.seconds, options.warm = 1, min(options.seconds, 0.5), 0.2
    part = _part(options)
    rows, settings = parts.measured(part, options, time.time() + options.within)
    print(parts.show(part, rows))
    for row in rows:
        print(f"FAILED {row.name}: {row.error}" if row.error else "", end="\n" if row.error else "")
    if options.results is not None:
        parts.record(part, rows, settings, options.results)
    return int(any(row.error for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = parts.arguments(__doc__ or "", seconds=20.0, rounds=1)
    parser.add_argument(
        "--model", choices=(*MODELS, "none"), default="resnet50", help='"none": only the loaders, alone'
    )
    parser.add_argument(
        "--loader",
        nargs="+",
        default=["penstock"],
        help=f"{', '.join(LOADERS)}; or NAME:SETTING, as dali:1.0 (the engine's share), torch:v1, penstock:workers=4",
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--compile", nargs="?", const="default", default="", help="with a mode of torch.compile")
    parser.add_argument("--augment", choices=("default", "rand"), default="rand")
    parser.add_argument("--size", type=int, default=224, help="pixels that the model takes, each way")
    parser.add_argument("--image-size", type=image_size, default=(500, 375), help="of the files, as 500x375")
    parser.add_argument("--progressive", type=float, default=0.0, help="share of progressive JPEGs")
    return parser


def image_size(text: str) -> tuple[int, int]:
    """WIDTHxHEIGHT."""
    width, _, height = text.partition("x")
    return int(width), int(height)


def _part(options: argparse.Namespace) -> Part:
    mode = f"-{options.compile}" if options.compile else ""
    return Part(
        f"train-{options.model}{mode}-{options.cores}cores",
        options.model,
        tuple(options.loader),
        options.cores,
        options.batch,
        options.compile,
        options.augment,
        options.size,
        options.image_size,
        options.progressive,
    )


if __name__ == "__main__":
    raise SystemExit(main())
