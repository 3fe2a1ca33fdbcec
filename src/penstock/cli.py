"""The command `penstock`. Imports little: what a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock import __version__
from penstock.errors import PenstockError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it went well, 2 with one line on stderr if it could not."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], None] = options.command
    try:
        command(options)
        sys.stdout.flush()
    except (PenstockError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # as in `penstock top --once | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("penstock", description="A PyTorch input pipeline: see it work, watch it run.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        help="train a small network from generated images, with Penstock and with torch's DataLoader",
        description="Generates images, trains a small network from them twice, and compares the loaders.",
    )
    demo.add_argument("--data", type=Path, metavar="DIR", help="where the images are kept (default: the user's cache)")
    demo.add_argument("--per-class", type=int, default=400, metavar="N", help="images of each class (default: 400)")
    demo.add_argument("--epochs", type=int, default=2, metavar="N", help="epochs of each training (default: 2)")
    demo.set_defaults(command=_demo)

    top = commands.add_parser(
        "top",
        help="show the loaders that run on this machine",
        description="Shows the loaders that run on this machine (yours; as root: everybody's). Ctrl-C ends it.",
    )
    form = top.add_mutually_exclusive_group()
    form.add_argument("--once", action="store_true", help="print one table and end")
    form.add_argument("--json", action="store_true", help="print one reading as JSON and end")
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between readings (default: 1)")
    top.set_defaults(command=_top)
    _add_diagnose(commands.add_parser("diagnose", help="tell where the time of a training script goes"))
    _add_what_if(commands.add_parser("what-if", help="predict what a diagnosed training would reach elsewhere"))
    return parser


def _add_diagnose(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a PyTorch training script as it is, measures its loader, its step and its storage one at a time, "
        "and says what it waits for and what would help. The script is ended when all is measured: what it trains "
        "meanwhile is to be thrown away."
    )
    parser.add_argument("script", help="the script, or with -m the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- ARGUMENTS", help="the script's own")
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="steps of each phase (default: 50)")
    parser.add_argument(
        "--skip", type=int, default=0, metavar="N", help="steps that pass first, such as an epoch that fills caches"
    )
    parser.add_argument(
        "--loader",
        type=int,
        metavar="N",
        help="diagnose the Nth loader that is iterated, from 0 (default: that trains)",
    )
    parser.add_argument(
        "--continue", dest="keep_on", action="store_true", help="let the script go on afterwards, from a new epoch"
    )
    for name, what in (
        ("profile", "what was measured, for `penstock what-if`"),
        ("json", "the findings too, for programs"),
        ("html", "a page with plots"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"write {what}")
    parser.set_defaults(command=_diagnose)


def _add_what_if(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predicts from a profile that `penstock diagnose` wrote what the training would reach with other hardware. "
        "Runs nothing. Each value of a list is shown alone; with several options, so are all their combinations."
    )
    parser.add_argument("profile", type=Path, metavar="PROFILE.json", help="what `penstock diagnose --profile` wrote")
    for name, metavar, what in (
        ("cores", "N,N", "cores of the host, and as many workers unless there are more already"),
        ("workers", "N,N", "workers of each rank"),
        ("cache", "SIZE,SIZE", "a cache that never evicts: 64GB (10^9 bytes each), 64GiB (2^30) or 35%% of the data"),
        ("gpu", "2x", "a GPU so many times as fast"),
        ("disk", "2x|3GB/s", "a disk so many times as fast, or of that rate"),
        ("gpus", "N,N", "GPUs, each with a process of its own"),
        ("batch", "N,N", "samples of a batch on each rank"),
        ("lane", "RATE/COST", "samples/s that the GPU prepares itself, and what that takes of its rate: 15000/9%%"),
        ("remote", "100MB/s", "remote storage to read from; compared with --download"),
        ("download", "1GB/s", "the rate at which everything is downloaded first"),
    ):
        parser.add_argument(f"--{name}", metavar=metavar, help=what)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=_what_if)


def _what_if(options: argparse.Namespace) -> None:
    from penstock import questions

    print(questions.answer(options), end="")


def _diagnose(options: argparse.Namespace) -> None:
    from penstock.diagnosis import command

    command.run(options)


def _demo(options: argparse.Namespace) -> None:
    from penstock import demo

    demo.run(options.data or demo.default_folder(), options.per_class, options.epochs)


def _top(options: argparse.Namespace) -> None:
    from penstock import top

    top.run(options.interval, "json" if options.json else "text" if options.once else "live")


if __name__ == "__main__":
    sys.exit(main())
