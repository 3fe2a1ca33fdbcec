"""What README and docs show works: every block of Python runs, every link leads somewhere.

The ```python blocks of a page run one after another, as one script, in a folder with

- data/train and data/val: class folders of JPEGs
- data/shards/train-{000..001}.tar: the same images after WebDataset's convention, jpg and cls
- data/train.parquet: the same with Hugging Face's image column and `label`
- data/speech: class folders of WAV files

Blocks below a line `<!-- torchvision -->` need torchvision: pages that have them also run in the interop tier.
"""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.demo.images import generate

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)")
ONLY_THERE = "<!-- torchvision -->"


def script(page: Path, torchvision: bool) -> str:
    """The page's Python, each line at its place in the page, so that errors name it."""
    lines: list[str] = []
    language: str | None = None
    marked = False
    for line in page.read_text().splitlines():
        fence = FENCE.match(line)
        runs = language == "python" and fence is None and (torchvision or not marked)
        lines.append(line if runs else "")
        if fence is not None:
            marked = marked and language is None
            language = fence[1] if language is None else None
        elif line.strip():
            marked = line.strip() == ONLY_THERE or (marked and language is not None)
    return "\n".join(lines)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    generate(folder, 20).rename(folder / "data")
    images = [
        (path, label)
        for label, where in enumerate(sorted((folder / "data/train").iterdir()))
        for path in where.iterdir()
    ]
    shards(folder / "data/shards", images)
    table(folder / "data/train.parquet", images)
    speech(folder / "data/speech")
    return folder


def shards(folder: Path, images: list[tuple[Path, int]]) -> None:
    folder.mkdir()
    for number in range(2):
        with tarfile.open(folder / f"train-{number:03}.tar", "w") as tar:
            for index, (path, label) in enumerate(images[number::2]):
                for suffix, content in (("jpg", path.read_bytes()), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{index:06}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def table(path: Path, images: list[tuple[Path, int]]) -> None:
    pyarrow: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    rows = [{"bytes": file.read_bytes(), "path": file.name} for file, _ in images]
    columns = {"image": pyarrow.array(rows), "label": pyarrow.array([label for _, label in images])}
    parquet.write_table(pyarrow.table(columns), path, row_group_size=50)


def speech(folder: Path) -> None:
    soundfile: Any = pytest.importorskip("soundfile")
    for name in ("no", "yes"):
        (folder / name).mkdir(parents=True)
        for number in range(8):
            wave = np.random.default_rng(number).normal(0, 0.1, 8000 + 900 * number)
            soundfile.write(folder / name / f"{number}.wav", wave, 22050 if number % 2 else 16000)


def run(page: Path, data: Path, monkeypatch: pytest.MonkeyPatch, torchvision: bool) -> None:
    monkeypatch.chdir(data)
    monkeypatch.setenv("XDG_CACHE_HOME", str(data / "cache"))
    exec(compile(script(page, torchvision), str(page), "exec"), {"__name__": page.stem})


def named(pages: list[Path]) -> list[Any]:
    return [pytest.param(page, id=page.stem) for page in pages]


@pytest.mark.processes
@pytest.mark.parametrize("page", named([page for page in PAGES if script(page, False).strip()]))
def test_the_python_of_a_page_runs(page: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(page, data, monkeypatch, torchvision=False)


@pytest.mark.interop
@pytest.mark.parametrize("page", named([page for page in PAGES if script(page, False) != script(page, True)]))
def test_the_python_of_a_page_that_uses_torchvision_runs(
    page: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchvision", reason="needs the full build of torch")
    run(page, data, monkeypatch, torchvision=True)


@pytest.mark.parametrize("page", named(PAGES))
def test_links_between_files_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_code_in_fences_is_told_apart(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na = 1\n```\n```sh\nmake\n```\n<!-- torchvision -->\n```python\nb = 2\n```\n```python\nc = 3\n```"
    )
    assert script(page, False).split() == ["a", "=", "1", "c", "=", "3"]
    assert script(page, True).split() == ["a", "=", "1", "b", "=", "2", "c", "=", "3"]
    assert script(page, True).splitlines()[1] == "a = 1"
