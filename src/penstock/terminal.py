"""Progress on a terminal, and the only import of rich, which draws it nicely where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.errors import MissingExtraError

__all__ = ["load_rich", "progress"]


def load_rich() -> Any:
    """The package rich, with the parts used here."""
    try:
        import rich
        import rich.console
        import rich.live
        import rich.progress
        import rich.table
        import rich.text
    except ImportError as error:
        raise MissingExtraError(
            "the live view needs rich, which is not installed; pip install 'penstock[top]', or use --once"
        ) from error
    return rich


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """`with progress("training", images) as advance: advance(64)`: a bar on a terminal, a few lines elsewhere."""
    if not sys.stdout.isatty():
        yield _lines(title, total)
        return
    try:
        bar = load_rich().progress
    except MissingExtraError:
        yield _redrawn(title, total)
        print()
        return
    columns = (
        "{task.description:<20}",
        bar.BarColumn(40),
        "{task.completed:>7,}/{task.total:,}",
        bar.TimeElapsedColumn(),
    )
    with bar.Progress(*columns, auto_refresh=False) as shown:  # its thread would compete with the training
        task = shown.add_task(title, total=total)

        def advance(steps: int = 1) -> None:
            shown.update(task, advance=steps)
            shown.refresh()

        yield advance


def _lines(title: str, total: int) -> Callable[[int], None]:
    """One line for each quarter."""
    done = 0

    def advance(steps: int = 1) -> None:
        nonlocal done
        before, done = done, done + steps
        if before * 4 // total < done * 4 // total:
            print(f"{title}: {done:,} of {total:,}", flush=True)

    return advance


def _redrawn(title: str, total: int) -> Callable[[int], None]:
    """One line, written over."""
    done = 0

    def advance(steps: int = 1) -> None:
        nonlocal done
        done += steps
        filled = 40 * done // total
        print(f"\r{title:<20} [{'#' * filled}{'.' * (40 - filled)}] {done:,}/{total:,}", end="", flush=True)

    return advance
