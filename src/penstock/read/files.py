"""One file per sample: class folders as torchvision's `ImageFolder` reads them, a flat folder, or a list of paths."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from penstock.errors import GraphError, SourceError
from penstock.graph import Field, Reader, Sample, Source, Spec
from penstock.read.names import Names, packed
from penstock.read.storage import Options, Stamp, filesystem, is_url, join, only_here, plain, read_file

__all__ = ["AUDIO_EXTENSIONS", "IMAGE_EXTENSIONS", "Files"]

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""torchvision's list."""
AUDIO_EXTENSIONS = (".wav", ".flac", ".ogg")

Labels = Literal["auto", "folders"] | None | Sequence[int] | Mapping[str, int] | Callable[[str], int]


class Files(Source):
    """Samples that are files.

    `root` is a folder or URL of a folder, searched below in sorted order, or a list of paths and URLs, kept in order.
    `labels`:

    - "folders": the folders in `root`, sorted, are the classes 0, 1, ...; as in `ImageFolder`
    - None: no field `label`
    - a sequence of integers, one for each file in order
    - a mapping from path to integer, or a function, asked once per file here; for a folder the path is relative to it
    - "auto", the default: "folders" for a folder that has folders in it, else None

    `field` names what the files hold, "image" or "audio"; `extensions` is asked of files in a folder, not of a list.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        labels: Labels = "auto",
        *,
        field: Literal["image", "audio"] = "image",
        extensions: Sequence[str] | None = None,
        storage_options: Options | None = None,
    ) -> None:
        if field not in ("image", "audio"):
            raise GraphError(f"files: field must be 'image' or 'audio', not {field!r}")
        if isinstance(extensions, str):
            raise GraphError(f"files: extensions must be a list such as ['.jpg'], not {extensions!r}")
        self.field = field
        self.classes: list[str] = []
        self._options = storage_options
        self._sizes: array[int] | None = None
        self._listed = ""
        self._labels: array[int] | None = None
        wanted = tuple(e.lower() for e in extensions or (AUDIO_EXTENSIONS if field == "audio" else IMAGE_EXTENSIONS))
        if isinstance(root, str | os.PathLike):
            self._scan(plain(root), labels, wanted)
        else:
            self._base = os.getcwd()
            self._names = Names(plain(path) for path in root)
            if not self._names:
                raise SourceError("files: the list of paths is empty")
            if isinstance(labels, str) and labels != "auto":
                raise GraphError("files: labels='folders' needs a folder; for a list give labels= themselves")
        if labels is not None and not isinstance(labels, str):
            self._labels = _given_labels(labels, self._names)
        self.clean = not only_here(self._base) and b"memory://" not in self._names.blob

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Class name to label."""
        return {name: index for index, name in enumerate(self.classes)}

    def _scan(self, root: str, labels: Labels, wanted: tuple[str, ...]) -> None:
        if isinstance(labels, str) and labels not in ("auto", "folders"):
            raise GraphError(
                f"files: labels must be 'folders', None, integers, a mapping or a function, not {labels!r}"
            )
        self._base = root if is_url(root) else os.path.abspath(root)
        tree: _Tree = _RemoteTree(root, self._options) if is_url(root) else _LocalTree(self._base)
        classes = sorted(tree.folders())
        if isinstance(labels, str) and labels == "folders" and not classes:
            raise SourceError(f"files: no class folder in {root}; labels=None takes the files of a flat folder")
        self.classes = classes if isinstance(labels, str) and classes else []
        counts: list[int] = []
        sizes = array("q")
        self._names = Names(_matching(tree, self.classes or [""], wanted, counts, sizes))
        if isinstance(tree, _RemoteTree):
            self._sizes = sizes
            self._listed = tree.digest
        empty = [name for name, count in zip(self.classes or [root], counts, strict=True) if count == 0]
        if empty:
            where = f"the classes {', '.join(empty)} of {root}" if self.classes else root
            raise SourceError(f"files: no valid file for {where}; looked for {', '.join(wanted)}")
        if self.classes:
            ids = np.repeat(np.arange(len(counts)), counts)
            self._labels = packed(ids)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def targets(self) -> Sequence[int] | None:
        """The label of each id, where there are labels."""
        return self._labels

    def spec(self) -> Spec:
        """The encoded bytes, and the label where there is one."""
        spec: dict[str, Field] = {self.field: Field("encoded")}
        return spec if self._labels is None else {**spec, "label": Field("value", (), "int64")}

    def open(self) -> Reader:
        """Nothing stays open between reads."""
        return _FilesReader(self)

    def place(self, id: int) -> str:
        """The path or URL."""
        return join(self._base, self._names[id])

    def fingerprint(self) -> str:
        """Of names and labels; a data set that moved to another folder is the same."""
        digest = hashlib.blake2b(self._names.blob, digest_size=16)
        digest.update(self._names.ends.tobytes())
        digest.update(b"" if self._labels is None else self._labels.tobytes())
        return digest.hexdigest()

    def version(self) -> str:
        """Of where the files are too, and of all that a store's listing says of them. What stands in a local file, or
        behind a URL of a list, each reader has to see for itself."""
        about = (self.fingerprint(), self._base, repr(sorted((self._options or {}).items(), key=repr)), self._listed)
        return hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()

    def sizes(self) -> Sequence[int] | None:
        """Known from the listing of a store; local folders do not list sizes, and a million `stat` are not cheap."""
        return self._sizes


class _FilesReader(Reader):
    def __init__(self, source: Files) -> None:
        self._source = source
        self._labels = source.targets
        self._sizes = source.sizes()
        self._options = source._options
        self._requested = 0
        self._drops = False

    def read(self, id: int) -> Sample:
        if not 0 <= id < len(self._source):
            raise KeyError(f"no sample {id}; there are {len(self._source)}")
        size = None if self._sizes is None else self._sizes[id]
        data = read_file(self._source.place(id), self._options, size, drop=self._drops)
        self._requested += len(data)
        sample: Sample = {self._source.field: data}
        if self._labels is not None:
            sample["label"] = self._labels[id]
        return sample

    def requested(self) -> int:
        return self._requested

    def stamp(self, id: int) -> bytes:
        return b"" if self._sizes is not None else Stamp.of(self._source.place(id), self._options).packed()

    def drop_behind(self) -> None:
        self._drops = True


class _LocalTree:
    """The folders below a local folder."""

    def __init__(self, root: str) -> None:
        if not os.path.isdir(root):
            what = "a file; give a folder, or a list of paths" if os.path.exists(root) else "not there"
            raise SourceError(f"files: {root} is {what}")
        self._root = root

    def folders(self) -> list[str]:
        with os.scandir(self._root) as entries:
            return [entry.name for entry in entries if entry.is_dir()]

    def walk(self, top: str) -> Iterator[tuple[str, Mapping[str, int] | list[str]]]:
        """Folder and its file names, for `top` and all below it, sorted by the folder's path."""

        def stop(error: OSError) -> None:
            raise error

        start = os.path.join(self._root, top) if top else self._root
        for folder, _, names in sorted(os.walk(start, onerror=stop, followlinks=True)):
            yield os.path.relpath(folder, self._root) if folder != self._root else "", names


class _RemoteTree:
    """The same of a URL, from one listing, which also tells sizes."""

    def __init__(self, root: str, options: Options | None) -> None:
        fs, base = filesystem(root, options)
        base = base.rstrip("/")
        self._tree: dict[str, dict[str, int]] = {}
        digest = hashlib.blake2b(digest_size=16)
        for path, info in sorted(fs.find(base, detail=True).items()):
            digest.update(repr((path, Stamp.of_info(path, info))).encode())
            folder, _, name = path[len(base) :].lstrip("/").rpartition("/")
            self._tree.setdefault(folder, {})[name] = int(info["size"])
        self.digest = digest.hexdigest()
        """Of every file's size and version."""
        if not self._tree:
            raise SourceError(f"files: nothing is stored at {root}")

    def folders(self) -> list[str]:
        return list({folder.partition("/")[0] for folder in self._tree if folder})

    def walk(self, top: str) -> Iterator[tuple[str, Mapping[str, int] | list[str]]]:
        for folder in sorted(self._tree):
            if not top or folder == top or folder.startswith(top + "/"):
                yield folder, self._tree[folder]


_Tree = _LocalTree | _RemoteTree


def _matching(
    tree: _Tree, tops: Sequence[str], wanted: tuple[str, ...], counts: list[int], sizes: array[int]
) -> Iterator[str]:
    """The names of the files with a wanted extension; appends to `counts` for each top, and to `sizes` where known."""
    for top in tops:
        counts.append(0)
        for folder, names in tree.walk(top):
            for name in sorted(names):
                if name.lower().endswith(wanted):
                    counts[-1] += 1
                    if isinstance(names, Mapping):
                        sizes.append(names[name])
                    yield f"{folder}/{name}" if folder else name


def _given_labels(labels: Any, names: Names) -> array[int]:
    """The user's labels as integers in the order of the files."""
    if callable(labels):
        values = [labels(name) for name in names]
    elif isinstance(labels, Mapping):
        absent = [name for name in names if name not in labels]
        if absent:
            raise GraphError(f"files: labels= has no entry for {absent[0]!r}, nor for {len(absent) - 1} others")
        values = [labels[name] for name in names]
    else:
        values = labels
    ids = np.asarray(values)
    if ids.ndim != 1 or len(ids) != len(names):
        raise GraphError(f"files: {len(names)} labels are needed, one for each file; found shape {ids.shape}")
    if ids.dtype.kind not in "iu" or (ids.dtype.kind == "u" and ids.max() > np.iinfo(np.int64).max):
        wrong = next((i for i, value in enumerate(values) if not _fits(value)), 0)
        raise GraphError(f"files: labels must be integers of 64 bits; {names[wrong]!r} has {values[wrong]!r}")
    return packed(ids)


def _fits(value: object) -> bool:
    return isinstance(value, int | np.integer) and -(2**63) <= int(value) < 2**63
