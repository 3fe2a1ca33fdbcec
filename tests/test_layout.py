"""Layouts: columns that do not overlap, the same bytes for the same layout, structures that come back as they were."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batch import row_views
from penstock.layout import Column, Hole, Layout, Loose, lay_out, restore, storable

DTYPES = ["bool", "uint8", "int16", "bfloat16", "float32", "int64", "complex128"]
columns = st.builds(
    Column,
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
    single=st.booleans(),
)


def test_what_can_be_stored() -> None:
    assert all(map(storable, DTYPES))
    assert not any(map(storable, ["object", "str32", "datetime64[s]", "float128", "float8_e5m2", ""]))


@given(st.lists(columns, max_size=6), st.integers(0, 9))
def test_columns_are_aligned_and_do_not_overlap(columns: list[Column], rows: int) -> None:
    layout = lay_out([Hole(i) for i in range(len(columns))], columns, rows)
    end = 0
    for column in layout.columns:
        assert column.offset % 64 == 0
        assert column.offset >= end
        size = {"bfloat16": 2}.get(column.dtype) or np.dtype(column.dtype).itemsize
        end = column.offset + math.prod(column.shape) * size * (1 if column.single else rows)
    assert end <= layout.nbytes < end + 64


@given(st.lists(columns, max_size=6), st.integers(0, 9))
def test_views_cover_the_columns(columns: list[Column], rows: int) -> None:
    layout = lay_out({}, columns, rows)
    buffer = memoryview(bytearray(layout.nbytes))
    views = row_views(layout, buffer)
    for number, (view, column) in enumerate(zip(views, columns, strict=True)):
        assert view.shape == (column.shape if column.single else (rows, *column.shape))
        view[...] = number % 2
    assert all((view == number % 2).all() for number, view in enumerate(views)), "writing one changes no other"


@given(st.lists(columns, max_size=6), st.integers(0, 9))
def test_packing_loses_nothing(columns: list[Column], rows: int) -> None:
    layout = lay_out({f"f{i}": Hole(i) for i in range(len(columns))}, columns, rows)
    assert Layout.unpack(layout.packed) == layout
    assert restore(Layout.unpack(layout.packed), list(range(len(columns))), {}) == {
        f"f{i}": i for i in range(len(columns))
    }


def test_equal_layouts_are_equal_bytes_whoever_makes_them() -> None:
    def made(name: str, dtype: str) -> bytes:
        return lay_out({name: Hole(0), "x" + name: Loose(name)}, [Column((2, 3), dtype, image=True)], 5).packed

    one = made("image", "int64")
    assert one == made("".join(["im", "age"]), np.dtype("int64").name)
    code = (
        "from penstock.layout import *; import sys;"
        "t = {'image': Hole(0), 'ximage': Loose('image')};"
        "sys.stdout.buffer.write(lay_out(t, [Column((2, 3), 'int64', image=True)], 5).packed)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == one


@pytest.mark.parametrize(
    "other",
    [
        lay_out({"a": Hole(0)}, [Column((2,), "int64")], 4),
        lay_out({"a": Hole(0)}, [Column((2,), "int32")], 3),
        lay_out({"a": Hole(0)}, [Column((3,), "int64")], 3),
        lay_out({"b": Hole(0)}, [Column((2,), "int64")], 3),
        lay_out({"a": Hole(0)}, [Column((2,), "int64", image=True)], 3),
        lay_out({"a": [Hole(0)]}, [Column((2,), "int64")], 3),
        lay_out({"a": Hole(0), "b": Loose("b")}, [Column((2,), "int64")], 3),
    ],
)
def test_other_layouts_are_other_bytes(other: Layout) -> None:
    assert other.packed != lay_out({"a": Hole(0)}, [Column((2,), "int64")], 3).packed


Pair = namedtuple("Pair", "first second")


class Odd(dict[str, Any]):
    """A mapping of the user's."""


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"a": Hole(1), "b": [Hole(0), Loose("x")]}, {"a": "one", "b": ["zero", [1, 2]]}),
        (Pair(Hole(0), (Hole(1),)), Pair("zero", ("one",))),
        ([], []),
        (OrderedDict(b=Hole(0), a=Hole(1)), OrderedDict(b="zero", a="one")),
        (Odd(a=Hole(1)), Odd(a="one")),
        (Hole(1), "one"),
    ],
)
def test_structures_come_back_filled(tree: Any, expected: Any) -> None:
    layout = lay_out(tree, [Column((), "int64"), Column((), "bool")], 2)
    filled = restore(pickle.loads(pickle.dumps(layout)), ["zero", "one"], {"x": [1, 2]})
    assert filled == expected
    assert type(filled) is type(expected)
    assert list(filled) == list(expected)
