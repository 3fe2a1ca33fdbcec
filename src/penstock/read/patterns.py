"""Patterns to lists of files: braces, wildcards, folders and lists, local or on a store; in an order that is fixed."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator

from penstock.errors import SourceError
from penstock.read.storage import Options, filesystem, is_url, plain

__all__ = ["braces", "find", "respell"]

Pattern = str | os.PathLike[str]

_RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?")


def braces(pattern: str) -> list[str]:
    """The words a shell makes of a pattern: `a{0..2}`, `{000..012}`, `{a,b}`, nested; other braces stay as they are."""
    start, stop, parts = _first_brace(pattern)
    if not parts:
        return [pattern]
    head, tails = pattern[:start], braces(pattern[stop:])
    return [head + word + tail for part in parts for word in part for tail in tails]


def _first_brace(pattern: str) -> tuple[int, int, list[list[str]]]:
    """The first braces that mean something: where they start and stop, and the words of each alternative."""
    for start in (i for i, c in enumerate(pattern) if c == "{"):
        stop, parts = _split(pattern, start)
        if stop and len(parts) > 1:
            return start, stop, [braces(part) for part in parts]
        if stop and (match := _RANGE.fullmatch(parts[0])) and (words := list(_words(*match.groups()))):
            return start, stop, [words]
    return 0, 0, []


def _split(pattern: str, start: int) -> tuple[int, list[str]]:
    """Where the brace at `start` closes (0 if it does not), and what stands between its own commas."""
    depth, begin, parts = 0, start + 1, []
    for i in range(start, len(pattern)):
        char = pattern[i]
        depth += (char == "{") - (char == "}")
        if (char == "," and depth == 1) or depth == 0:
            parts.append(pattern[begin:i])
            begin = i + 1
        if depth == 0:
            return i + 1, parts
    return 0, []


def _words(first: str, last: str, step: str | None) -> Iterator[str]:
    """A range, both ends included; zeros in front of either end set the width."""
    if first.isalpha() != last.isalpha():
        return
    start, stop = (ord(first), ord(last)) if first.isalpha() else (int(first), int(last))
    stride = abs(int(step or 1)) or 1
    padded = any(re.match(r"-?0\d", end) for end in (first, last))
    width = max(len(first), len(last)) if padded else 0
    for value in range(start, stop + 1, stride) if start <= stop else range(start, stop - 1, -stride):
        yield chr(value) if first.isalpha() else f"{value:0{width}d}"


def find(pattern: Pattern | Iterable[Pattern], suffix: str, options: Options | None = None) -> list[str]:
    """The files that a pattern or a list of patterns names; a folder stands for its files with this suffix.

    Wildcards and folders give their files sorted; lists and braces keep their order. What names nothing is an error.
    """
    if isinstance(pattern, str | os.PathLike):
        pattern = [pattern]
    found: list[str] = []
    missing: list[str] = []
    for text in map(plain, pattern):
        for word in [text] if not is_url(text) and os.path.exists(text) else braces(text):
            files = _remote(word, suffix, options) if is_url(word) else _local(word, suffix)
            found += files
            if not files:
                missing.append(word)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise SourceError(f"no {suffix} file at {', '.join(missing[:3])}{more}; {len(found)} others were found")
    if not found:
        raise SourceError(f"an empty list was given; expected at least one path of a {suffix} file")
    return found


def _local(path: str, suffix: str) -> list[str]:
    path = os.path.abspath(path)
    if os.path.isdir(path):
        below = glob.iglob(os.path.join(glob.escape(path), "**", f"*{suffix}"), recursive=True)
        return sorted(file for file in below if os.path.isfile(file))
    if os.path.exists(path):
        return [path]
    matches = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []
    return [file for match in matches for file in _local(match, suffix)]


def _remote(url: str, suffix: str, options: Options | None) -> list[str]:
    fs, inner = filesystem(url, options)
    if glob.has_magic(inner):
        return sorted(respell(url, inner, path) for path in fs.glob(inner))
    if fs.isfile(inner):
        return [url]
    return sorted(respell(url, inner, path) for path in fs.find(inner) if path.endswith(suffix))


def respell(url: str, inner: str, found: str) -> str:
    """The URL of another path of the same file system, given the URL of one."""
    return url.replace(inner, found) if inner and inner in url else f"{url.split('://')[0]}://{found.lstrip('/')}"
