"""What is public, and what each process has to load for it."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps

PUBLIC = {
    *("Loader", "DataLoader", "lower", "Pipe"),
    "diagnose",
    *("files", "tars", "parquet", "arrays", "dataset", "source"),
    *("PenstockError", "GraphError", "LaneError", "MissingExtraError", "OptionError", "SampleError"),
    *("SourceError", "StalledError", "StateError", "DiagnosisError"),
}
HEAVY = "numpy", "torch", "PIL", "pyarrow", "fsspec", "soundfile", "rich"
PACKAGE = Path(ps.__file__).parent.parent


def loaded(statement: str, *options: str) -> set[str]:
    """The heavy packages in a fresh interpreter after a statement."""
    code = f"import sys; sys.path.insert(0, {str(PACKAGE)!r}); {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=True)
    return {name for name in HEAVY if name in done.stdout.split()}


def test_what_is_public() -> None:
    assert set(ps.__all__) == PUBLIC
    assert len(ps.__all__) == len(PUBLIC)


def test_every_public_name_is_there_and_documented() -> None:
    for name in ps.__all__:
        assert getattr(ps, name).__doc__, name
        assert getattr(ps, name).__module__.startswith("penstock."), name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'penstock' has no attribute 'Lauder'"):
        ps.Lauder  # noqa: B018


def test_errors_form_one_tree() -> None:
    for name in ps.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(ps, name), ps.PenstockError)


def test_every_module_says_what_it_is_for_and_what_is_public() -> None:
    for module in pkgutil.walk_packages(ps.__path__, "penstock."):
        if module.name.rpartition(".")[2].startswith("_"):
            continue
        loaded = importlib.import_module(module.name)
        assert loaded.__doc__, module.name
        names = getattr(loaded, "__all__", [])
        assert sorted(names) == sorted(set(names)), module.name
        assert all(hasattr(loaded, name) for name in names), module.name


def test_importing_the_package_loads_nothing() -> None:
    assert loaded("import penstock") == set()


def test_the_coordinator_needs_the_standard_library_alone() -> None:
    """It runs isolated and without site packages, as the feed starts it."""
    assert loaded("import penstock.coordinator", "-I", "-S") == set()


@pytest.mark.parametrize("module", ["graphwork", "pipe", "fuse", "batch", "lanes.processes"])
def test_workers_do_without_torch(module: str) -> None:
    assert loaded(f"import penstock.{module}") <= {"numpy", "PIL"}
