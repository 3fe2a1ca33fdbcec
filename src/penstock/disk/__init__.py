"""The disk tier: samples of a slow source kept in a folder on a local disk, for this job and those after it.

    plan = plan_disk(source, folder, budget)  # in the training process
    reader = DiskReader(plan, source.open())  # in every process that reads

Nothing is ever evicted: a sample that was kept stays until the folder is deleted, and a full budget keeps what it
holds. Each data set has a folder of its own, named by its identity, with two files:

- `data`: the records of samples (see record.py) one after another, in the order in which they came
- `index`: for every id 32 bytes, where its record lies and its checksum; these too with a checksum

Any number of processes of any number of jobs read and write them at once. To read takes no lock: an entry of the index
that is not whole, or that leads to what is not the record, is as good as none. To write, a process claims room at the
end of `data` while it holds the lock of the folder (microseconds), and fills it without. The size of the files is what
counts against the budget. Whoever dies while writing leaves at most the room of one record unused.

A record is checked whenever it is read, so whatever happened to the files, a damaged record counts as none: the sample
comes from its source and is kept again. What this cannot see is a source that changed under the same names; sources
say what they know of that (`Source.version`).
"""

from __future__ import annotations

from penstock.disk.plan import DiskPlan, plan_disk
from penstock.disk.reader import DiskReader
from penstock.disk.store import Disk, survey

__all__ = ["Disk", "DiskPlan", "DiskReader", "plan_disk", "survey"]
