"""`files` holds the samples of torchvision's `ImageFolder`, in its order, with its labels."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.read import Files

pytestmark = pytest.mark.interop
datasets = pytest.importorskip("torchvision.datasets", exc_type=ImportError)

NAMES = [
    *("dog/b.jpg", "dog/A.JPG", "dog/a-b/c.png", "dog/a/b/d.webp", "dog/a/e.bmp", "dog/.hidden.pgm", "dog/notes.txt"),
    *("Cat/1.jpeg", "Cat/10.jpeg", "Cat/2.tif", "Cat/x.tiff", "Cat/y.ppm", "été/ß.png", "stray.jpg"),
]


def make(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def test_files_are_those_of_an_image_folder(tmp_path: Path) -> None:
    root = make(tmp_path / "root", *NAMES)
    make(tmp_path / "linked", "z.png")
    (root / "link").symlink_to(tmp_path / "linked")
    theirs, ours = datasets.ImageFolder(root), Files(root)
    assert ours.classes == theirs.classes
    assert ours.class_to_idx == theirs.class_to_idx
    assert [(ours.place(i), ours.open().read(i)["label"]) for i in range(len(ours))] == theirs.samples


@pytest.mark.parametrize("names", [(), ("a/notes.txt",), ("a/1.jpg", "b/notes.txt"), ("1.jpg",)])
def test_what_an_image_folder_refuses_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    root = make(tmp_path / "root", *names)
    for made in (lambda: datasets.ImageFolder(root), lambda: Files(root, labels="folders")):
        with pytest.raises(FileNotFoundError):
            made()
