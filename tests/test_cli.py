"""The command `penstock`: what it prints, what it returns, and what it does not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock import cli, demo, top
from penstock.errors import MissingExtraError


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["brew"], ["top", "--once", "--json"], ["demo", "--epochs", "many"]])
def test_a_command_line_that_makes_no_sense_ends_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
    assert "usage: penstock" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["demo", "--epochs", "0"], "epoch"),
        (["demo", "--per-class", "3"], "at least 10"),
        (["top", "--once", "--interval", "0"], "positive"),
        (["top", "--once", "--interval", "nan"], "positive"),
        (["top"], "--once"),  # not a terminal
    ],
)
def test_an_error_is_one_line_and_2(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("penstock: ")
    assert error.count("\n") == 1
    assert word in error


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--data", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_control_c_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == ""


def test_the_live_view_names_the_extra_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.live", None)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with pytest.raises(MissingExtraError, match=r"penstock\[top\]"):
        top.run(1.0, "live")
    assert cli.main(["top"]) == 2
    assert "penstock[top]" in capsys.readouterr().err


@pytest.mark.processes
def test_help_and_top_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from penstock import cli; cli.main(['top', '--once', '--interval', '0.01']); "
        "print(sorted({'torch', 'numpy', 'rich', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.processes
def test_the_installed_command_is_this_one() -> None:
    installed = Path(sys.executable).with_name("penstock")
    done = subprocess.run([installed, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert "demo" in done.stdout
    assert "top" in done.stdout
