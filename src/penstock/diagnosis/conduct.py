"""Finds the training loader among all that a script iterates, and gives its iteration to a session.

While `watched` is open, iterating a loader goes through here. Outside of it nothing is replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.utils.data
from torch.optim.optimizer import register_optimizer_step_post_hook

from penstock.diagnosis.machine import Machine
from penstock.diagnosis.outcome import profile_of
from penstock.diagnosis.ranks import gathered
from penstock.diagnosis.session import Measured, Session, Settings
from penstock.diagnosis.target import Batches, target_of
from penstock.loader import Loader
from penstock.profile import Profile

__all__ = ["Conductor", "Finished"]


class Finished(BaseException):
    """All is measured; the script need not go on."""


@dataclass
class _Iterated:
    """A loader that the script iterates."""

    loader: Any
    name: str
    original: Callable[[Any], Batches]
    batches: int = 0
    steps_at: int = 0
    """The optimizers' steps when its last batch was handed out."""
    trains: bool = False
    """An optimizer stepped between two of its batches."""


class Conductor:
    """Diagnoses one loader of a script: the wanted one, else the first between whose batches an optimizer steps."""

    def __init__(self, script: str, settings: Settings, wanted: int | None = None) -> None:
        self.profile: Profile | None = None
        self.session: Session | None = None
        self.iterated: list[_Iterated] = []
        self._script = script
        self._settings = settings
        self._wanted = wanted
        self._chosen: _Iterated | None = None
        self._steps = 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Iterating a loader goes through here."""
        kinds: tuple[Any, ...] = (torch.utils.data.DataLoader, Loader)
        originals = [kind.__iter__ for kind in kinds]
        hook = register_optimizer_step_post_hook(self._stepped)
        for kind, original in zip(kinds, originals, strict=True):
            kind.__iter__ = self._replacement(original)
        try:
            yield
        finally:
            hook.remove()
            for kind, original in zip(kinds, originals, strict=True):
                kind.__iter__ = original

    def _replacement(self, original: Callable[[Any], Batches]) -> Callable[[Any], Batches]:
        def iterate(loader: Any) -> Batches:
            return _Pass(self, self._entry(loader, original))

        return iterate

    def _entry(self, loader: Any, original: Callable[[Any], Batches]) -> _Iterated:
        for entry in self.iterated:
            if entry.loader is loader:
                return entry
        target = target_of(loader, original)
        entry = _Iterated(loader, target.name if target else type(loader).__name__, original)
        self.iterated.append(entry)
        return entry

    def _stepped(self, *arguments: Any) -> None:
        self._steps += 1

    def next(self, entry: _Iterated, iteration: _Pass) -> Any:
        """The next batch of an iteration."""
        if entry.batches and self._steps > entry.steps_at:
            entry.trains = True
        if self._chosen is None and self._is_wanted(entry):
            self._chosen = entry
        if self._chosen is entry:
            if self.session is None and entry.batches >= self._settings.skip:
                self._begin(entry, iteration)
            if self.session is not None:
                return next(self.session)
        batch = next(iteration.own)
        entry.batches += 1
        entry.steps_at = self._steps
        return batch

    def _is_wanted(self, entry: _Iterated) -> bool:
        return entry.trains if self._wanted is None else self.iterated.index(entry) == self._wanted

    def _begin(self, entry: _Iterated, iteration: _Pass) -> None:
        target = target_of(entry.loader, entry.original)
        assert target is not None
        self.session = Session(target, self._settings, self._finish)
        self.session.begin(iteration.own, entry.batches)
        iteration.own = iter(())  # or its workers would outlive the watch

    def _finish(self, measured: Measured, machine: Machine) -> None:
        assert self.session is not None
        found = profile_of(self._script, self.session.target, measured, machine)
        self.profile = replace(found, notes=(*found.notes, *_spread(found)))
        if not self._settings.keep_on:
            raise Finished

    def finish_early(self) -> bool:
        """The script did not survive what it need not: the profile is what was measured until then."""
        if self.profile is None and self.session is not None and self.session.optional:
            session = self.session
            session.measured.notes.append(f"the script failed while {session.phase}; nothing else depends on that")
            self.profile = profile_of(self._script, session.target, session.measured, session.machine)
        return self.profile is not None


def _spread(profile: Profile) -> Iterator[str]:
    """The rates are those of rank 0; how far the others' are from them."""
    rates = gathered((profile.gpu_samples_per_s, profile.prep_samples_per_s, profile.rate_samples_per_s))
    if len(rates) > 1:
        spans = [f"{min(values):,.0f} to {max(values):,.0f}" for values in zip(*rates, strict=True)]
        yield f"samples/s over {len(rates)} ranks: G {spans[0]}, P {spans[1]}, end to end {spans[2]}"


class _Pass(Iterator[Any]):
    """One iteration of a loader by the script."""

    def __init__(self, conductor: Conductor, entry: _Iterated) -> None:
        self._conductor = conductor
        self._entry = entry
        self.own = iter(entry.original(entry.loader))

    def __next__(self) -> Any:
        return self._conductor.next(self._entry, self)

    def __len__(self) -> int:
        return len(self._entry.loader)
