"""Runs a script that knows nothing of Penstock, and diagnoses the training in it."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from penstock.diagnosis.conduct import Conductor, Finished
from penstock.diagnosis.session import Settings
from penstock.errors import DiagnosisError
from penstock.profile import Profile

__all__ = ["ScriptError", "run_script"]


class ScriptError(DiagnosisError):
    """The script failed before all was measured; its traceback has been shown, `status` is what it would end with."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def run_script(
    script: str, arguments: Sequence[str], settings: Settings, *, module: bool = False, wanted: int | None = None
) -> Profile:
    """Run a script, or a module, as the main program until all is measured."""
    if not module and not Path(script).is_file():
        raise DiagnosisError(f"there is no script {script}")
    conductor = Conductor(script, settings, wanted)
    before = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path[0:1] = [str(Path.cwd() if module else Path(script).resolve().parent)]
    try:
        with conductor.watched():
            _run(script, module, conductor)
    finally:
        sys.argv, sys.path[:] = before
        _leave_group()
    if conductor.profile is None:
        raise DiagnosisError(_ended_early(conductor))
    return conductor.profile


def _run(script: str, module: bool, conductor: Conductor) -> None:
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except Finished:
        return
    except SystemExit as error:
        status = _status(error)
        if status and not conductor.finish_early():
            raise ScriptError(f"{script} ended with status {status}; {_so_far(conductor)}", status) from None
    except DiagnosisError:  # raised here, while the script waited for a batch
        raise
    except Exception as error:
        if conductor.finish_early():
            return
        traceback.print_exception(type(error), error, _script_part(error.__traceback__))
        raise ScriptError(f"{script} failed, as shown above; {_so_far(conductor)}", 1) from None


def _status(error: SystemExit) -> int:
    """What Python makes of the argument of sys.exit."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _script_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's own frame on, as if nothing had run it; none where it could not be compiled."""
    while trace is not None and not _of_runpy(trace):
        trace = trace.tb_next
    while trace is not None and _of_runpy(trace):
        trace = trace.tb_next
    return trace


def _of_runpy(trace: TracebackType) -> bool:
    return trace.tb_frame.f_globals.get("__name__") == "runpy"


def _ended_early(conductor: Conductor) -> str:
    session = conductor.session
    if session is not None:
        return (
            f"the script ended while {session.phase}; {session.steps_needed} steps of its loop are needed after the "
            f"first {session.measured.passed}. Let it train longer, or ask for fewer with --steps"
        )
    if not conductor.iterated:
        return (
            "the script ended without iterating a torch.utils.data.DataLoader or a penstock.Loader in its own process; "
            "there is nothing to diagnose. Where it starts processes that train, diagnose these (torchrun does)"
        )
    listed = "; ".join(
        f"{number}: {entry.name}, {entry.batches} batches{', trained from' if entry.trains else ''}"
        for number, entry in enumerate(conductor.iterated)
    )
    if any(entry.trains for entry in conductor.iterated):
        return f"the script ended before the first phase began ({listed}). Let it train longer, or lower --skip"
    return (
        f"no torch optimizer stepped between the batches of a loader ({listed}). "
        "Say which loader is the training's: --loader NUMBER"
    )


def _so_far(conductor: Conductor) -> str:
    session = conductor.session
    where = f"it was {session.phase}" if session is not None else "no phase had begun"
    return f"{where}, and nothing is reported"


def _leave_group() -> None:
    """The script's own end, which would have left the group of ranks, has not been reached."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
