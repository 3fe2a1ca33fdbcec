"""The state machine itself: call an event, and do what it says."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Literal

from penstock.schedule.batches import ENDS, BatchSpec, End, Key, Open, Piece
from penstock.schedule.instructions import Assign, Deliver, Dismiss, Instruction, Stranded
from penstock.schedule.queues import Backlog
from penstock.schedule.roster import Lane, Roster
from penstock.schedule.threshold import Threshold

__all__ = ["Scheduler"]


class Scheduler:
    """Call an event method; it returns what is to be done now."""

    def __init__(
        self, *, order: Literal["plan", "ready"] = "plan", blame_limit: int = 12, leave_last: bool = True
    ) -> None:
        """`leave_last`: search for the threshold; without, it stays at zero."""
        self._order = order
        self._blame_limit = blame_limit
        self._leave_last = leave_last
        self._lanes = Roster()
        self._open: dict[int, Open] = {}
        self._cancelled = 0
        """Cancelled batches that some lane still works on."""
        self._complete: set[int] = set()
        self._next_task = 0
        self._backlog = Backlog()
        self._held: Open | None = None
        """The batch that is not in the small end's backlog because its last rows are left to the large end."""
        self._notices: list[Instruction] = []
        self._resting = False
        """Batches may be missing from the small end's backlog because it rested when they were looked at."""
        self.rests = False
        self.threshold = Threshold()
        self.grain = 1
        """Rows that a lane without a grain of its own takes at a time; set from outside as the cost of a row becomes
        known. The threshold moves by as many."""

    # events

    def batch_opened(self, spec: BatchSpec) -> list[Instruction]:
        """A batch entered the window; it has memory to go to."""
        batch = self._open[spec.seq] = Open(spec)
        if spec.rows == 0:
            self._complete.add(spec.seq)
        self._offer(batch)
        return self._proceed()

    def lane_joined(
        self, lane: int, *, depth: int = 2, large_end: bool = False, grain: int | None = None
    ) -> list[Instruction]:
        """A lane can take `depth` tasks, one running and the others queued before it; each of `grain` rows, or of as
        many as the scheduler's `grain` says."""
        assert lane not in self._lanes, "a lane joins again only after it was lost"
        end: End = "large" if large_end else "small"
        gone = set(self._lanes.gone)
        if self._lanes.expect(lane, end):
            self._capacity_changed(gone)
        self._lanes[lane] = Lane(depth, end, grain)
        self._lanes.place(lane)
        return self._proceed()

    def lane_depth(self, lane: int, depth: int) -> None:
        """A lane's capacity changed, to none if it is 0; this takes effect from the next task."""
        if self._lanes[lane].depth != depth:
            self._lanes[lane].depth = depth
            self.threshold.search()
            self._lanes.place(lane)

    def lane_grain(self, lane: int, grain: int) -> None:
        """A lane takes so many rows at a time, from the next task on."""
        self._lanes[lane].grain = grain

    def small_end_rests(self, rests: bool) -> list[Instruction]:
        """While there are lanes of the large end, those of the small end take only what these cannot."""
        self.rests = rests
        return self._proceed()

    def lane_retired(self, lane: int) -> list[Instruction]:
        """A lane, or the one that would replace it, is not wanted any more: it is dismissed when its tasks are done."""
        self._leave(lane)
        if lane in self._lanes:
            self._lanes[lane].retired = True
            self._lanes.place(lane)
        self._dismiss_when_done(lane)
        return self._proceed()

    def piece_done(self, lane: int, task: int, index: int, *, returned: Collection[int] = ()) -> list[Instruction]:
        """Piece number `index` of a task was filled; the task ends with its last piece.

        But not the rows that a lane of the large end `returned`, for it cannot take them.
        """
        piece = self._lanes[lane].tasks[task][index]
        end = self._lanes[lane].end
        batch = self._open[piece.seq]
        unfit = frozenset(returned)
        back = tuple(row for row in piece.rows if row in unfit)
        if back:
            assert end == "large", "only lanes of the large end return rows"
            assert batch.spec.lane is None, "a batch that is pinned to a lane has no other to return rows to"
            batch.returned = batch.disturbed = True
        self._end_piece(lane, task, index)
        if batch.whole and not piece.whole:
            self._restart_when_quiet(batch)
        else:
            if back and not batch.cancelled:
                batch.redo["small"].append(replace(piece, rows=back, end="small"))
                self._offer(batch)
            self._fill(batch, set(piece.rows).difference(back), end)
        return self._proceed()

    def piece_refused(self, lane: int, task: int, index: int) -> list[Instruction]:
        """The lane found that this batch cannot be cut: it is begun again, whole, once no lane works on it."""
        piece = self._lanes[lane].tasks[task][index]
        batch = self._open[piece.seq]
        self._end_piece(lane, task, index)
        batch.whole = True
        batch.clear()
        self._restart_when_quiet(batch)
        return self._proceed()

    def lane_lost(self, lane: int, *, blame: int = 1, for_good: bool = False) -> list[Instruction]:
        """A lane is gone for certain: what it ran is done again. A replacement may join under the same number, and is
        expected to unless it is lost `for_good`.

        `blame` falls on the rows of the task that was running, for they may be what killed it.
        """
        lost = self._lanes.pop(lane, None)
        self._lanes.place(lane)
        if for_good:
            self._leave(lane)
        for position, pieces in enumerate(lost.tasks.values() if lost else ()):
            for piece in pieces:
                if piece.rows:
                    self._open[piece.seq].running -= 1
                    self._redo(piece, blame if position == 0 else 0)
        return self._proceed()

    def cancel(self) -> None:
        """Forget all batches. Tasks that run are waited for: `busy` says which batches' memory is still written to."""
        for batch in list(self._open.values()):
            self._cancelled += not batch.cancelled
            batch.cancelled = True
            batch.clear()
            self._forget_when_quiet(batch)
        self._complete.clear()
        self._backlog.clear()
        self._held = None

    # questions

    @property
    def window(self) -> int:
        """Batches opened and not yet delivered."""
        return len(self._open) - self._cancelled

    @property
    def busy(self) -> set[int]:
        """Batches that some lane works on."""
        return {seq for seq, batch in self._open.items() if batch.running}

    def piece(self, lane: int, task: int, index: int) -> Piece:
        """A piece of a task that was assigned."""
        return self._lanes[lane].tasks[task][index]

    def working_on(self, seq: int) -> list[int]:
        """The lanes that work on a batch."""
        return [
            number
            for number, lane in self._lanes.items()
            if any(piece.seq == seq and piece.rows for pieces in lane.tasks.values() for piece in pieces)
        ]

    def first_open(self) -> int | None:
        """The oldest batch that is not delivered."""
        return next((seq for seq, batch in self._open.items() if not batch.cancelled), None)

    # pieces that end

    def _end_piece(self, lane: int, task: int, index: int) -> None:
        pieces = self._lanes[lane].tasks[task]
        piece = pieces[index]
        pieces[index] = Piece(piece.seq, (), piece.whole)
        if not any(p.rows for p in pieces):
            del self._lanes[lane].tasks[task]
            self._lanes.place(lane)
            if self._lanes[lane].retired:
                self._dismiss_when_done(lane)
        batch = self._open[piece.seq]
        batch.running -= 1
        self._forget_when_quiet(batch)

    def _forget_when_quiet(self, batch: Open) -> None:
        if batch.cancelled and not batch.running:
            self._cancelled -= 1
            del self._open[batch.spec.seq]

    def _fill(self, batch: Open, rows: set[int], end: End) -> None:
        batch.unfilled -= rows
        if batch.unfilled or batch.cancelled:
            return
        self._complete.add(batch.spec.seq)
        told = batch.shared and not batch.disturbed and batch.threshold == self.threshold.rows and not self.rests
        if told and self._leave_last and self._lanes.has_large:
            self.threshold.judge(small_last=end == "small", step=self.grain, most=batch.spec.rows)

    def _restart_when_quiet(self, batch: Open) -> None:
        if batch.whole and not any(map(batch.has_work, batch.takers)) and not batch.running and not batch.cancelled:
            piece = batch.everything()
            batch.unfilled = set(piece.rows)
            batch.redo[piece.end].append(self._suspected(piece) if batch.blame else piece)
            self._offer(batch)

    def _redo(self, piece: Piece, blame: int) -> None:
        batch = self._open[piece.seq]
        batch.disturbed = True
        if batch.cancelled:
            self._forget_when_quiet(batch)
        elif batch.whole and not piece.whole:
            self._restart_when_quiet(batch)
        elif blame == 0:
            batch.redo[piece.end].append(piece)
        else:
            for rows in [piece.rows] if piece.whole else [(row,) for row in piece.rows]:
                batch.blame[frozenset(rows)] = batch.blame.get(frozenset(rows), 0) + blame
                batch.redo[piece.end].append(self._suspected(replace(piece, rows=rows)))
        self._offer(batch)

    def _suspected(self, piece: Piece) -> Piece:
        crashed = self._open[piece.seq].blame.get(frozenset(piece.rows), 0) >= self._blame_limit
        return replace(piece, alone=True, crashed=crashed)

    # what is to be done

    def _proceed(self) -> list[Instruction]:
        notices, self._notices = self._notices, []
        return [*notices, *self._deliveries(), *self._assignments()]

    def _deliveries(self) -> Iterator[Instruction]:
        while self._complete:
            seq = self.first_open() if self._order == "plan" else min(self._complete)
            if seq not in self._complete:
                return
            del self._open[seq]
            self._complete.remove(seq)
            yield Deliver(seq)

    def _assignments(self) -> Iterator[Instruction]:
        for number in [number for number in self._backlog.pins if number in self._lanes]:
            while self._lanes[number].has_room and self._top(number) is not None:
                yield self._assign(number)
        while (idlest := self._idlest()) is not None:
            yield self._assign(idlest)

    def _assign(self, number: int) -> Assign:
        pieces = self._pull(number)
        task = self._next_task
        self._next_task += 1
        self._lanes[number].tasks[task] = list(pieces)
        for piece in pieces:
            self._open[piece.seq].running += 1
        self._lanes.place(number)
        return Assign(number, task, tuple(pieces))

    def _pull(self, number: int) -> list[Piece]:
        """One task: rows of the oldest batch that has any; more batches only while the grain is not reached."""
        lane = self._lanes[number]
        grain = lane.grain or self.grain
        pieces: list[Piece] = []
        rows = 0
        while rows < grain and (found := self._oldest(number)) is not None:
            batch, key = found
            if pieces and batch.next_alone(key):
                break
            share = self._share(batch, grain) if key == "small" and lane.grain is None else grain
            piece = batch.take(key, lane.end, grain - rows, self._keep(batch, key), share)
            batch.threshold = self.threshold.rows
            pieces.append(piece)
            rows += len(piece.rows)
            if piece.alone or len(piece.rows) == share:
                break
        return pieces

    def _share(self, batch: Open, grain: int) -> int:
        """What a lane of the small end takes of a batch's fresh rows at the most."""
        if batch.spec.seq != self.first_open():
            return grain
        return min(grain, max(-(-len(batch.fresh["small"]) // self._lanes.count("small")), -(-grain // 2)))

    # batches that have work

    def _offer(self, batch: Open) -> None:
        for key in batch.takers:
            if batch.has_work(key):
                self._backlog.add(key, batch.spec.seq)
        self._name_stranded(batch)

    def _oldest(self, number: int) -> tuple[Open, Key] | None:
        """The oldest batch that has rows for this lane, and as whom it takes them."""
        keys: tuple[Key, Key] = (self._lanes[number].end, number)
        tops = [(top, key) for key in keys if (top := self._top(key)) is not None]
        return min(tops, key=lambda found: found[0].spec.seq, default=None)

    def _top(self, key: Key) -> Open | None:
        if key == "small":
            self._wake()
            self._release_held()
        while (seq := self._backlog.first(key)) is not None:
            batch = self._open.get(seq)
            keep = self._keep(batch, key) if batch is not None else 0
            if batch is not None and batch.has_work(key, keep):
                return batch
            self._backlog.drop_first(key)
            if keep and not self._resting:
                self._held = batch
        return None

    def _keep(self, batch: Open, key: Key) -> int:
        """Rows of the batch that must be left to others."""
        if key != "small" or not (self.threshold.rows or self.rests) or not self._lanes.has_large:
            return 0
        if self.rests and batch.shared:
            return batch.spec.rows
        mine = batch.shared and not batch.returned and batch is self._top("large")
        return self.threshold.rows if mine else 0

    def _wake(self) -> None:
        """What the small end did not take while it rested, it may take from now on."""
        resting = self.rests and self._lanes.has_large
        if self._resting and not resting:
            for batch in self._open.values():
                if batch.shared and batch.has_work("small"):
                    self._backlog.add("small", batch.spec.seq)
        self._resting = resting

    def _release_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            if held.has_work("small", self._keep(held, "small")):
                self._backlog.add("small", held.spec.seq)
            else:
                self._held = held

    def _name_stranded(self, batch: Open) -> None:
        end = batch.tied(self._lanes.gone)
        if end is not None and end != batch.stranded:
            self._notices.append(Stranded(batch.spec.seq, end))
        batch.stranded = end

    # lanes that come and go

    def _leave(self, number: int) -> None:
        gone = set(self._lanes.gone)
        if self._lanes.leave(number):
            self._capacity_changed(gone)

    def _capacity_changed(self, gone: set[End]) -> None:
        """Lanes came or went; before, these ends were without any."""
        self.threshold.search()
        if gone != self._lanes.gone:
            for batch in self._open.values():
                self._name_stranded(batch)

    def _dismiss_when_done(self, number: int) -> None:
        """A retired lane goes with its last task."""
        if number not in self._lanes or not self._lanes[number].tasks:
            self._lanes.pop(number, None)
            self._notices.append(Dismiss(number))

    def _idlest(self) -> int | None:
        """Of the lanes that there is work for; of equally idle ones, one of the small end, whose tasks are small."""
        able = [least for end in ENDS if self._top(end) is not None and (least := self._lanes.idlest(end)) is not None]
        return min(able, key=lambda least: least[0])[1] if able else None
