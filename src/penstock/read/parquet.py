"""Samples that are rows of Parquet files, Hugging Face's image and audio columns too. The only import of pyarrow.

A row is found by (file, row group, row in the group). Writers pack a row group's column as a whole, so a reader unpacks
a group once, on one thread, and keeps the latest ones within `keep_bytes`.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from penstock.errors import GraphError, MissingExtraError, SourceError
from penstock.graph import Field, Reader, Sample, Source, Spec
from penstock.read.patterns import find
from penstock.read.storage import Options, Stamp, filesystem, is_url, only_here

__all__ = ["Parquet"]


class Parquet(Source):
    """Rows in the order of the files and of the rows in each.

    `path` is a file, a folder, wildcards, `part-{0..9}.parquet` or a list of these; URLs too. `image` and `audio` name
    columns of encoded bytes, plain or as Hugging Face's {bytes, path}; `label` one of numbers. Each becomes the field
    of that name; None leaves it out. `columns` names others to take under their own names. Shuffled reading is quick
    when row groups are small (about 100 rows of images), since a group is unpacked whole; `keep_bytes` is what each
    reader keeps unpacked.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        image: str | None = "image",
        label: str | None = "label",
        *,
        audio: str | None = None,
        columns: Sequence[str] = (),
        keep_bytes: int = 64 << 20,
        storage_options: Options | None = None,
    ) -> None:
        if isinstance(columns, str):
            raise GraphError(f"parquet: columns must be a list of names, such as [{columns!r}]")
        if {"id", "image", "label", "audio"} & set(columns):
            raise GraphError(
                f"parquet: columns {list(columns)} must not be called id, image, label or audio, since fields are; "
                "name image, label and audio by their own arguments"
            )
        if isinstance(keep_bytes, bool) or not isinstance(keep_bytes, int) or keep_bytes < 0:
            raise GraphError(f"parquet: keep_bytes must be a whole number of bytes, at least 0, not {keep_bytes!r}")
        named = {"image": image, "audio": audio, "label": label} | {name: name for name in columns}
        self.columns = {field: column for field, column in named.items() if column is not None}
        if not self.columns:
            raise GraphError("parquet: no column is asked for; give image=, audio=, label= or columns=")
        self.keep_bytes = keep_bytes
        self.classes: list[str] = []
        self.options = storage_options
        self.paths = find(path, ".parquet", storage_options)
        self.clean = not any(map(only_here, self.paths))
        try:
            self._read_footers()
        except ValueError as error:
            raise SourceError(f"parquet: {error}") from error
        if not len(self):
            raise SourceError(f"parquet: no rows in {self.paths[0]} nor in {len(self.paths) - 1} others")

    def _read_footers(self) -> None:
        """Where each row group begins, and what the columns are: the same in every file, or it is an error."""
        self.stamps: list[Stamp] = []
        self._spec: dict[str, Field] = {}
        self.leaves: list[list[str]] = []
        self._firsts, self._files, self._groups = array("q", [0]), array("q"), array("q")
        digest = hashlib.blake2b(repr(self.columns).encode(), digest_size=16)
        for number, path in enumerate(self.paths):
            with _opened(path, self.options) as file:
                self.stamps.append(Stamp.of(path, self.options))
                spec, leaves = _fields(path, file.schema_arrow, self.columns)
                if number and spec != self._spec:
                    raise GraphError(
                        f"parquet: the columns of {path} are {spec}; those of {self.paths[0]} {self._spec}"
                    )
                self._spec = spec
                self.leaves.append(leaves)
                self.classes = self.classes or _class_names(file.schema_arrow, self.columns.get("label"))
                for group in range(file.metadata.num_row_groups):
                    about = file.metadata.row_group(group)
                    digest.update(repr((number, group, about.num_rows, about.total_byte_size)).encode())
                    if about.num_rows:
                        self._firsts.append(self._firsts[-1] + about.num_rows)
                        self._files.append(number)
                        self._groups.append(group)
        self._digest = digest.hexdigest()

    def __len__(self) -> int:
        return self._firsts[-1]

    def spec(self) -> Spec:
        """As the columns' types say."""
        return self._spec

    def open(self) -> Reader:
        """Opens files when rows of theirs are asked for, so that nothing of Arrow's is open across a fork."""
        return _ParquetReader(self)

    def find_row(self, id: int) -> tuple[int, int, int]:
        """File, row group in the file, and row in the group."""
        nth = bisect_right(self._firsts, id) - 1
        return self._files[nth], self._groups[nth], id - self._firsts[nth]

    def place(self, id: int) -> str:
        """`file.parquet: row 7`."""
        nth = bisect_right(self._firsts, id) - 1
        file = self._files[nth]
        return f"{self.paths[file]}: row {id - self._firsts[self._files.index(file)]}"

    def fingerprint(self) -> str:
        """Of the columns and of every row group's rows and bytes, so that files may move."""
        return self._digest

    def version(self) -> str:
        """Of where the files are, their sizes and times of change, too."""
        about = (self._digest, self.paths, repr(sorted((self.options or {}).items(), key=repr)), self.stamps)
        return hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()


class _ParquetReader(Reader):
    def __init__(self, source: Parquet) -> None:
        self._source = source
        self._groups: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()
        self._spec = source.spec()
        self._requested = 0
        self._drops = False

    def read(self, id: int) -> Sample:
        if not 0 <= id < len(self._source):
            raise KeyError(f"no sample {id}; there are {len(self._source)}")
        file, group, row = self._source.find_row(id)
        table = self._group(file, group)
        return {
            field: _value(table.column(column)[row].as_py(), self._spec[field], column)
            for field, column in self._source.columns.items()
        }

    def _group(self, file: int, group: int) -> Any:
        with self._lock:
            table = self._groups.get((file, group))
            if table is not None:
                self._groups.move_to_end((file, group))
                return table
            table = self._unpack(file, group)
            self._groups[file, group] = table
            self._held += table.nbytes
            while self._held > self._source.keep_bytes and len(self._groups) > 1:
                self._held -= self._groups.popitem(last=False)[1].nbytes
            return table

    def _unpack(self, file: int, group: int) -> Any:
        path, expected = self._source.paths[file], self._source.stamps[file]
        with _opened(path, self._source.options) as opened:
            try:
                table = opened.read_row_group(group, columns=self._source.leaves[file], use_threads=False)
                self._account(path, opened.metadata.row_group(group), self._source.leaves[file])
            finally:
                found = Stamp.of(path, self._source.options)
                if found != expected:
                    raise OSError(
                        f"{path} changed while in use: {expected.size} bytes when the source was made, {found.size} "
                        "now (or another time of change); make the source again"
                    )
        return table

    def _account(self, path: str, group: Any, leaves: Sequence[str]) -> None:
        """Count what was read of a row group, and drop its pages where that is wanted."""
        chunks = [group.column(number) for number in range(group.num_columns)]
        wanted = [
            chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(tuple(f"{leaf}." for leaf in leaves))
        ]
        self._requested += sum(chunk.total_compressed_size for chunk in wanted)
        if self._drops and not is_url(path):
            with open(path, "rb") as file:
                for chunk in wanted:
                    start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
                    os.posix_fadvise(file.fileno(), start, chunk.total_compressed_size, os.POSIX_FADV_DONTNEED)

    def requested(self) -> int:
        return self._requested

    def drop_behind(self) -> None:
        self._drops = True

    def close(self) -> None:
        with self._lock:
            self._groups.clear()
            self._held = 0


class _opened:  # noqa: N801 - reads as a function
    """One Parquet file, open; what pyarrow raises about it comes out as OSError or ValueError with the path."""

    def __init__(self, path: str, options: Options | None) -> None:
        self._path = path
        self._options = options

    def __enter__(self) -> Any:
        pq = _pyarrow().parquet
        self._file: Any = open(self._path, "rb") if not is_url(self._path) else self._remote()
        try:
            return pq.ParquetFile(self._file, pre_buffer=False)
        except BaseException as error:
            self._file.close()
            self.__exit__(type(error), error, None)
            raise

    def _remote(self) -> Any:
        fs, inner = filesystem(self._path, self._options)
        return fs.open(inner, "rb")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._file.close()
        arrow = _pyarrow()
        if isinstance(error, arrow.ArrowInvalid | arrow.ArrowException) or (
            isinstance(error, OSError) and error.errno is None and self._path not in str(error)
        ):
            raise ValueError(f"{self._path} is no whole Parquet file: {error}") from error


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("reading Parquet files needs pyarrow: pip install penstock[parquet]") from error
    return pyarrow


def _fields(path: str, schema: Any, columns: dict[str, str]) -> tuple[dict[str, Field], list[str]]:
    """The spec of the columns asked for, and the leaf columns to read for them."""
    spec: dict[str, Field] = {}
    leaves: list[str] = []
    for field, column in columns.items():
        if column not in schema.names:
            argument = f"{field}=" if field in ("image", "label", "audio") else "columns="
            remedy = f"name another with {argument}" + (
                ", or leave it out with None" if argument == f"{field}=" else ""
            )
            raise GraphError(f"parquet: no column {column!r} in {path}, only {', '.join(schema.names)}; {remedy}")
        kind = schema.field(column).type
        leaf = column
        if field in ("image", "audio"):
            leaf = _encoded_leaf(path, column, kind)
            spec[field] = Field("encoded")
        else:
            spec[field] = _value_field(kind)
        if field == "label" and spec[field].kind != "value":
            raise GraphError(f"parquet: the label column {column!r} of {path} is {kind}; numbers are needed")
        if field == "label" and np.dtype(str(spec[field].dtype)).kind in "iub":
            spec[field] = Field("value", (), "int64")
        leaves.append(leaf)
    return spec, leaves


def _encoded_leaf(path: str, column: str, kind: Any) -> str:
    types = _pyarrow().types

    def binary(of: Any) -> bool:
        return bool(types.is_binary(of) or types.is_large_binary(of) or types.is_fixed_size_binary(of))

    if binary(kind):
        return column
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0 and binary(kind.field("bytes").type):
        return f"{column}.bytes"
    raise GraphError(
        f"parquet: the column {column!r} of {path} is {kind}; encoded bytes are needed, as binary or as Hugging Face's "
        "struct of bytes and path"
    )


def _value_field(kind: Any) -> Field:
    """What a column gives: numbers and lists of them are arrays, all else what pyarrow's `as_py` makes of it."""
    types = _pyarrow().types

    def number(of: Any) -> bool:
        return bool(types.is_boolean(of) or types.is_integer(of) or types.is_floating(of))

    if number(kind):
        return Field("value", (), np.dtype(kind.to_pandas_dtype()).name)
    if types.is_fixed_size_list(kind) and number(kind.value_type):
        return Field("value", (kind.list_size,), np.dtype(kind.value_type.to_pandas_dtype()).name)
    if (types.is_list(kind) or types.is_large_list(kind)) and number(kind.value_type):
        return Field("value", (None,), np.dtype(kind.value_type.to_pandas_dtype()).name)
    return Field("any")


def _value(value: Any, field: Field, column: str) -> Any:
    if field.kind == "any":
        return value
    if field.kind == "encoded" and isinstance(value, dict):
        value = value["bytes"]
    if value is None or value == b"":
        what = "empty" if value == b"" else "null"
        hint = " (it may hold only a path; embed the files' bytes when writing)" if field.kind == "encoded" else ""
        raise ValueError(f"the column {column!r} is {what} in this row{hint}")
    if field.kind == "encoded":
        return value
    if not field.shape:
        number = np.dtype(str(field.dtype)).type(value)
        return int(number) if field.dtype == "int64" else number
    return np.asarray(value, field.dtype)


def _class_names(schema: Any, label: str | None) -> list[str]:
    """Hugging Face's names of the labels, where the file tells them."""
    about = (schema.metadata or {}).get(b"huggingface")
    if about is None or label is None:
        return []
    try:
        names = json.loads(about)["info"]["features"][label]["names"]
    except (ValueError, KeyError, TypeError):
        return []
    return [str(name) for name in names]
