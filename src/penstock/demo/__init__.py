"""`penstock demo`: a small training, fed by Penstock and by torch's DataLoader in turn, and what came of each."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from penstock.demo.images import CLASSES, generate, place
from penstock.errors import OptionError
from penstock.terminal import progress

__all__ = ["default_folder", "run"]


def default_folder() -> Path:
    """Where the data set is kept for the next time: the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def run(folder: Path, per_class: int, epochs: int) -> None:
    """Make the data set, train twice, print both side by side."""
    if per_class < 10:
        raise OptionError(f"the demo needs at least 10 images per class, one of them for validation, not {per_class}")
    if epochs < 1:
        raise OptionError(f"the demo needs at least 1 epoch, not {epochs}")
    root = place(folder, per_class)
    if not root.is_dir():
        with progress("making pictures", per_class * len(CLASSES)) as advance:
            generate(folder, per_class, advance)
    print(f"data set: {per_class * len(CLASSES):,} JPEG files of {len(CLASSES)} classes in {root}")
    sys.stdout.flush()

    from penstock.demo.training import compare, report  # torch takes seconds to import; say something first

    print(report(compare(root, epochs)))
