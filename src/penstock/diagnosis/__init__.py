"""Where a training's time goes: measured one part at a time, in any PyTorch script or loop.

    profile = ps.diagnose(loader, step)
    $ penstock diagnose train.py -- --epochs 1

`conduct` finds the training loader of a script, `session` is the sequence of phases, `target` what it asks of a loader,
`outcome` makes the profile. `run` is the command's part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.diagnosis.conduct import Finished
from penstock.diagnosis.machine import Machine
from penstock.diagnosis.outcome import profile_of
from penstock.diagnosis.session import Measured, Session, Settings
from penstock.diagnosis.target import target_of
from penstock.errors import DiagnosisError, OptionError
from penstock.profile import Profile

__all__ = ["diagnose"]


def diagnose(loader: Any, step: Callable[[Any], object], *, steps: int = 50, skip: int = 0) -> Profile:
    """Where the time of a training goes: the loader is iterated, and `step` called with its batches.

    `loader` is a torch DataLoader or a Penstock Loader. Each phase takes about `steps` steps; `skip` pass first. The
    step is called with some batches many times, so what it trains is to be thrown away afterwards.
    """
    target = target_of(loader)
    if target is None:
        raise OptionError(f"diagnose takes a torch DataLoader or a penstock.Loader, not {type(loader).__name__}")
    if not callable(step):
        raise OptionError(f"diagnose takes a step to be called with each batch, not {step!r}")
    name = getattr(step, "__qualname__", type(step).__qualname__)
    profiles: list[Profile] = []

    def finish(measured: Measured, machine: Machine) -> None:
        profiles.append(profile_of(name, target, measured, machine))
        raise Finished

    session = Session(target, Settings(steps=steps, skip=skip), finish)
    try:
        _train(session, target.own(), step, skip)
    except Finished:
        pass
    except Exception as error:
        if not session.optional:
            raise
        session.measured.notes.append(f"the step failed while {session.phase}: {type(error).__name__}: {error}")
        profiles.append(profile_of(name, target, session.measured, session.machine))
    if not profiles:
        raise DiagnosisError(f"{target.name} yields no batch; there is nothing to diagnose")
    return profiles[0]


def _train(session: Session, own: Any, step: Callable[[Any], object], skip: int) -> None:
    passed = 0
    while passed < skip:
        at = passed
        for batch in own:
            step(batch)
            passed += 1
            if passed >= skip:
                break
        else:
            own = session.target.own()
        if passed == at:
            return
    session.begin(own, passed)
    del own
    while True:
        step(next(session))
