"""From ids to stored samples: files, tars, Parquet, arrays, and datasets of the user's.

Each source is a class whose constructor is what the user calls: `ps.files` is `Files`, `ps.tars` is `Tars`, and so on.
"""

from __future__ import annotations

from penstock.read.arrays import Arrays
from penstock.read.files import Files
from penstock.read.parquet import Parquet
from penstock.read.tars import Tars
from penstock.read.wrap import Dataset

__all__ = ["Arrays", "Dataset", "Files", "Parquet", "Tars"]
