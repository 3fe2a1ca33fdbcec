"""`penstock diagnose`: run the script, then show and write what was found. Rank 0 does so for all."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from penstock.diagnosis.ranks import here
from penstock.diagnosis.run import ScriptError, run_script
from penstock.diagnosis.session import Settings
from penstock.errors import DiagnosisError
from penstock.profile import Profile
from penstock.report.document import diagnosis_json
from penstock.report.page import diagnosis_page
from penstock.report.text import diagnosis_text

__all__ = ["run"]


def run(options: argparse.Namespace) -> None:
    """The command. Ends with the script's own status where that failed."""
    for path in (options.profile, options.json, options.html):
        _check_writable(path)
    arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    settings = Settings(steps=options.steps, skip=options.skip, keep_on=options.keep_on)
    try:
        profile = run_script(options.script, arguments, settings, module=options.module, wanted=options.loader)
    except ScriptError as error:
        print(f"penstock: {error}", file=sys.stderr)
        raise SystemExit(error.status) from None
    if here().rank == 0:
        _show(profile, options)


def _check_writable(path: Path | None) -> None:
    """Now, not after minutes of measuring."""
    if path is not None and not path.parent.is_dir():
        raise DiagnosisError(f"{path} cannot be written: there is no folder {path.parent}")


def _show(profile: Profile, options: argparse.Namespace) -> None:
    print(diagnosis_text(profile), end="")
    renderings: tuple[tuple[Path | None, Callable[[Profile], str]], ...] = (
        (options.profile, Profile.to_json),
        (options.json, diagnosis_json),
        (options.html, diagnosis_page),
    )
    for path, render in renderings:
        if path is not None:
            path.write_text(render(profile))
