"""The never-evict cache: samples in shared memory, filled in the first epoch and never pushed out of it by others.

`arena` is the memory and its index, `budget` says how much of it there may be, `finding` has the loaders of a user on
this host use one arena, `reader` puts it before a source, `keeper` watches over it. Standard library only.
"""

from __future__ import annotations

from penstock.cache.arena import Arena, Shelf, State
from penstock.cache.tally import Tally

__all__ = ["Arena", "Shelf", "State", "Tally"]
