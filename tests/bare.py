"""The little of pytest that the GPU's tests use, for machines with a GPU and without pytest, hypothesis or psutil.

    install()                   # stands in for those that are missing; before the tests are imported
    report = run([path, ...])   # every test of these files, marked or not

Properties that hypothesis would try are not run here, and are listed as left out.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Report", "install", "run"]

_LEFT_OUT = "needs hypothesis"


class _Anything:
    """Whatever is asked of it, it is; for what is only looked at when a test begins."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self


class MonkeyPatch:
    """pytest's, as far as it is used."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    @classmethod
    @contextlib.contextmanager
    def context(cls) -> Iterator[MonkeyPatch]:
        patch = cls()
        try:
            yield patch
        finally:
            patch.undo()

    def setattr(self, target: Any, name: str, value: Any) -> None:
        old = inspect.getattr_static(target, name)
        self._undo.append(lambda: setattr(target, name, old))
        setattr(target, name, value)

    def delattr(self, path: str) -> None:
        module, _, name = path.rpartition(".")
        owner = importlib.import_module(module)
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        delattr(owner, name)

    def setitem(self, target: Any, name: Any, value: Any) -> None:
        missing = object()
        old = target.get(name, missing)
        self._undo.append(lambda: target.pop(name) if old is missing else target.__setitem__(name, old))
        target[name] = value

    def delitem(self, target: Any, name: Any) -> None:
        old = target.pop(name)
        self._undo.append(lambda: target.__setitem__(name, old))

    def setenv(self, name: str, value: str) -> None:
        self.setitem(os.environ, name, value)

    def delenv(self, name: str, raising: bool = True) -> None:
        if raising or name in os.environ:
            self.delitem(os.environ, name)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


class TempPathFactory:
    """Folders below one that goes at the end."""

    def __init__(self) -> None:
        self._root = tempfile.TemporaryDirectory()

    def mktemp(self, name: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=name, dir=self._root.name))


@dataclass
class _Caught:
    value: Any = None


@contextlib.contextmanager
def _raises(kind: type[BaseException], match: str = "") -> Iterator[_Caught]:
    caught = _Caught()
    try:
        yield caught
    except kind as error:
        caught.value = error
    assert caught.value is not None, f"{kind} was not raised"
    assert re.search(match, str(caught.value)), f"{match!r} is not in {caught.value}"


def _fixture(function: Any = None, **options: Any) -> Any:
    def mark(function: Any) -> Any:
        function.bare_fixture = options
        return function

    return mark(function) if function is not None else mark


class _Mark(_Anything):
    def parametrize(self, names: str | tuple[str, ...], values: Any, ids: Any = None) -> Any:
        split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        single = isinstance(names, str) and len(split) == 1
        rows = [dict(zip(split, (value,) if single else value, strict=True)) for value in values]

        def mark(function: Any) -> Any:
            function.bare_rows = [rows, *getattr(function, "bare_rows", [])]
            return function

        return mark

    def usefixtures(self, *names: str) -> Any:
        def mark(function: Any) -> Any:
            function.bare_uses = names
            return function

        return mark

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **keywords: lambda function: function


def _given(*arguments: Any, **keywords: Any) -> Any:
    def mark(function: Any) -> Any:
        def test_left_out() -> None:
            """Its body is hypothesis'."""

        test_left_out.bare_left_out = _LEFT_OUT  # type: ignore[attr-defined]
        return test_left_out

    return mark


def install() -> None:
    """Stand in for what is missing."""
    parts = {"fixture": _fixture, "raises": _raises, "mark": _Mark(), "MonkeyPatch": MonkeyPatch}
    _stand_in("pytest", {**parts, "TempPathFactory": TempPathFactory, "skip": _skip})
    strategies = _Anything()
    _stand_in("hypothesis", {"given": _given, "settings": lambda **_: lambda f: f, "strategies": strategies})
    sys.modules.setdefault("hypothesis.strategies", strategies)  # type: ignore[arg-type]
    try:
        importlib.import_module("psutil")
    except ModuleNotFoundError:
        sys.modules["psutil"] = _Anything()  # type: ignore[assignment]


class _SkippedError(Exception):
    pass


def _skip(reason: str) -> None:
    raise _SkippedError(reason)


def _stand_in(name: str, parts: dict[str, Any]) -> None:
    module = ModuleType(name)
    module.__dict__.update(parts)
    sys.modules[name] = module


@dataclass
class Report:
    """What became of the tests."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


class _Module:
    """The tests of a file, and its fixtures."""

    def __init__(self, path: Path) -> None:
        self.module = importlib.import_module(path.stem)
        functions = [(name, value) for name, value in vars(self.module).items() if inspect.isfunction(value)]
        self.tests = [(name, value) for name, value in functions if name.startswith("test_")]
        self.fixtures: dict[str, Any] = {name: value for name, value in functions if hasattr(value, "bare_fixture")}
        self.kept: dict[str, Any] = {}
        self.end = contextlib.ExitStack()

    def call(self, function: Any, row: dict[str, Any]) -> None:
        with contextlib.ExitStack() as stack:
            made: dict[str, Any] = {}
            for name, fixture in self.fixtures.items():
                if fixture.bare_fixture.get("autouse") or name in getattr(function, "bare_uses", ()):
                    self.value(name, stack, made)
            wanted = [name for name in inspect.signature(function).parameters if name not in row]
            function(**row, **{name: self.value(name, stack, made) for name in wanted})

    def value(self, name: str, stack: contextlib.ExitStack, made: dict[str, Any]) -> Any:
        """A fixture's value: one for the file, or one for the test."""
        kept = made
        if name not in ("monkeypatch", "tmp_path"):
            options = self.fixtures[name].bare_fixture if name in self.fixtures else {"scope": "module"}
            if options.get("scope") in ("module", "session"):
                kept, stack = self.kept, self.end
        if name not in kept:
            kept[name] = self._made(name, stack, made)
        return kept[name]

    def _made(self, name: str, stack: contextlib.ExitStack, made: dict[str, Any]) -> Any:
        if name == "monkeypatch":
            return stack.enter_context(MonkeyPatch.context())
        if name == "tmp_path_factory":
            return TempPathFactory()
        if name == "tmp_path":
            return Path(stack.enter_context(tempfile.TemporaryDirectory()))
        function = self.fixtures[name]
        needed = {wanted: self.value(wanted, stack, made) for wanted in inspect.signature(function).parameters}
        if inspect.isgeneratorfunction(function):
            return stack.enter_context(contextlib.contextmanager(function)(**needed))
        return function(**needed)


def run(paths: Sequence[Path], until: float = float("inf")) -> Report:
    """Run all tests of the files; none begins when the monotonic clock is past `until`."""
    report = Report()
    for path in paths:
        try:
            module = _Module(path)
        except Exception:  # a file that cannot be imported is as bad as one that fails
            report.failed[path.stem] = traceback.format_exc()
            print(report.failed[path.stem], flush=True)
            continue
        with module.end:
            for name, function in module.tests:
                for number, row in enumerate(_rows(function)):
                    _run(module, f"{path.stem}::{name}[{number}]", function, row, report, until)
    return report


def _rows(function: Any) -> Iterator[dict[str, Any]]:
    for combination in itertools.product(*getattr(function, "bare_rows", [])):
        yield {name: value for row in combination for name, value in row.items()}


def _run(module: _Module, name: str, function: Any, row: dict[str, Any], report: Report, until: float) -> None:
    left_out = getattr(function, "bare_left_out", "no time" if time.monotonic() > until else "")
    if left_out:
        report.left_out[name] = left_out
        return
    start = time.perf_counter()
    try:
        module.call(function, row)
    except _SkippedError as reason:
        report.left_out[name] = str(reason)
        return
    except Exception:  # a test may fail with anything
        report.failed[name] = traceback.format_exc()
    else:
        report.passed.append(name)
    seconds = time.perf_counter() - start
    print(f"{'FAILED' if name in report.failed else 'passed'} {seconds:6.2f} s  {name}", flush=True)
    if name in report.failed:
        print(report.failed[name], flush=True)
