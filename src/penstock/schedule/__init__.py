"""The scheduler: events in, instructions out. No clock, no I/O, no knowledge of what a lane is made of.

It holds the batches of the window, in order. Each batch is a list of rows sorted by size; lanes pull tiny-batches from
it, each by its own grain: some from the small end, others, which large samples suit, from the large one. Rows of a lost
lane come back and are redone. A batch is complete when every row was filled exactly once; complete batches are
delivered in order, or as they come.

The following is how it is meant to behave. If the implementation differs, it is a bug.

- Every row of every batch is in exactly one of: waiting, running on one lane, filled.
- A row is assigned again only after the lane that ran it was lost or returned it, or said that the batch must be done
  whole.
- Rows that were running when lanes were lost collect blame and are then run alone, each in a task of its own, so that
  a later loss tells which of them is the cause. Rows whose blame reaches the limit are assigned as crashed: the lane
  reports them as bad samples instead of running them.
- Rows that a lane of the large end returned go to lanes of the small end from then on; they collect no blame for it.
- A batch pinned to a lane is only ever assigned to that lane's number. Any other that must be done whole goes to a
  lane of the small end. Rows of an exact batch are tied to an end, and are only ever assigned to lanes of that end,
  until they are returned. Where rows are tied to an end whose lanes are all gone for good, the batch is named as
  stranded.
- Lanes of the small end leave the last rows of a batch, as many as the threshold says, to those of the large end, and
  go on with the next batch. They do so only while a lane of the large end takes tasks, only in the batch from which it
  takes next, and not once rows of that batch were returned. So they are idle only while no more rows than that wait.
- While the small end rests and a lane of the large end takes tasks, lanes of the small end take nothing that the large
  end could take, too, but for pieces that are redone.
- Of the oldest batch, which is waited for, lanes without a grain of their own take no more than their share of the rows
  that are left, but half a grain at least: so it is done sooner, and they end together.
- A retired lane gets no more tasks, keeps those it has, and is dismissed when the last of them is done.
- An event costs the same with one lane and with a thousand, with one batch in the window and with a thousand; but for
  the event that the last lane of an end is gone for good, or that one comes again, or that the small end rests no more.
"""

from __future__ import annotations

from penstock.schedule.batches import BatchSpec, End, Piece
from penstock.schedule.instructions import Assign, Deliver, Dismiss, Instruction, Stranded
from penstock.schedule.machine import Scheduler
from penstock.schedule.threshold import Threshold

__all__ = [
    "Assign",
    "BatchSpec",
    "Deliver",
    "Dismiss",
    "End",
    "Instruction",
    "Piece",
    "Scheduler",
    "Stranded",
    "Threshold",
]
