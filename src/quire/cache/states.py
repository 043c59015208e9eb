"""StateGroup: a group in which each request updates one frame in place, and stores earlier states as checkpoints.

No frame is copied. To store its frame with the page that ends there, a request continues in another frame: the next
piece of work reads the old frame and writes the new one. The page gets the old frame when the step has settled. A
request that begins on a cached prefix reads the frame of the prefix's last page and writes its own.

    position      0 ........ n1 ........ n2 ...... end            n1, n2: ends of pages where it stores its frame
    pieces        |-- A -----|-- A to B -|-- B to C --|           A, B: checkpoints; C: the request's own

Checkpoints serve other requests. Checkpoints are stored only if a frame is free; `skipped` counts the others. If steps
compute drafts, a request has one more frame per draft. Each draft is a piece that writes one of them. When the step has
settled, the frame of the last accepted draft becomes the request's own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quire.cache.groups import NO_PAGES, GroupBase, GroupRelease, NewPages, PagedGroup
from quire.cache.request_kv import RequestKV
from quire.cache.running import Lengths, Rows
from quire.memory.allocator import SlotFrames
from quire.memory.runs import replace_ids
from quire.plan.budget import MemoryPlan
from quire.prefix.radix_cache import RadixCache
from quire.prefix.reach import Reach
from quire.spec.ids import Bools, Ids
from quire.spec.rank import Rank


@dataclass(frozen=True, slots=True)
class StatePieces:
    """Work of one step in one group of states: consecutive runs of tokens, request by request, in order. Run i has
    `lengths[i]` tokens. It reads frame `sources[i]` (0: an empty state) and writes frame `targets[i]`."""

    lengths: Ids
    sources: Ids
    targets: Ids


@dataclass(slots=True)
class Checkpoint:
    """A frame with the state of a request after `num_pages` pages."""

    num_pages: int
    frame: int
    rank: Rank


class StateGroup(GroupBase):
    """See the module. Its methods are those of `PagedGroup`. Unmarked checkpoints are `interval` tokens apart."""

    frames: SlotFrames

    def __init__(
        self, index: int, reach: Reach, frames: SlotFrames, tree: RadixCache, plan: MemoryPlan, interval: int
    ) -> None:
        super().__init__(index, reach, frames, tree)
        max_requests, num_drafts = plan.max_requests, plan.tokens_per_step - 1
        self._page_size = plan.page_size
        self._interval = max(plan.page_size, interval - interval % plan.page_size)
        self._frame = np.zeros(max_requests, dtype=np.int32)  # the frame of each row; 0: none yet
        self._position = np.zeros(max_requests, dtype=np.int64)  # tokens in that frame, without drafts
        self._num_drafts = num_drafts  # frames of a row beside its own
        self._draft_frames = np.zeros((max_requests, num_drafts), dtype=np.int32)  # after each draft of a step
        self._source = np.zeros(max_requests, dtype=np.int32)  # cached page that the row begins on; 0: none
        self._previous_frame = np.zeros(max_requests, dtype=np.int32)  # at the last page's end; 0: none
        self._previous_pages = np.zeros(max_requests, dtype=np.int64)
        self._previous_rank = np.zeros(max_requests, dtype=np.int8)
        # Checkpoints of each row for pages that are not settled.
        self._unsettled: list[list[Checkpoint]] = [[] for _ in range(max_requests)]
        self._oldest = np.full(max_requests, sys.maxsize)  # pages of the first of them
        self._last: Rows | None = None  # rows of the last launch
        self._is_taking = False  # between `take` and `grow` or `untake`

    def would_pin(self, pages: Ids, evictable: int) -> int:
        return 0  # the request can take over an idle frame: see `wanted`

    def needs(self, num_pages: int, num_cached: int) -> int:
        return 1 + self._num_drafts

    def remaining(self, rows: Rows, have: Lengths, reached: Lengths) -> Lengths:
        found: Lengths = (self._frame[rows] == 0) * np.int64(1 + self._num_drafts)
        return found

    def position(self, row: int) -> int:
        """The tokens after which a row's frame is, those of launched steps among them."""
        return int(self._position[row])

    def frames_of(self, row: int) -> Ids:
        frames = [each.frame for each in self._unsettled[row]]
        if self._previous_frame[row]:
            frames.append(int(self._previous_frame[row]))
        if self._frame[row]:
            frames += [int(self._frame[row]), *self._draft_frames[row].tolist()]
        return np.array(frames, dtype=np.int32)

    def num_of(self, row: int, num_pages: int) -> int:
        return len(self.frames_of(row))

    @property
    def num_optional(self) -> int:
        num_previous = int(np.count_nonzero(self._previous_frame))
        return (sum(map(len, self._unsettled)) + num_previous) * self.room.is_shared

    def pinned(self, row: int, pages: Ids) -> Ids:
        source: Ids = self._source[row : row + 1]
        return source[:0] if source[0] == 0 else source

    def wanted(self, rows: Rows, num_new: int) -> int:
        """Allocate a frame for each row without one. If too few are left, rows use that of the page they begin on."""
        if rows is self._last:
            return 0  # launched rows have frames
        missing = rows[self._frame[rows] == 0]
        wanted = len(missing) * (1 + self._num_drafts)
        if not wanted:
            return 0
        short = self.room.short_of(self, wanted, num_new)
        return wanted - (min(short, len(self._takeable(missing))) if short > 0 else 0)

    def wishes(self, kvs: Sequence[RequestKV], rows: Rows, ends: Lengths | None) -> int:
        """Frames for the checkpoints that rows will store next, beside `wanted`, if the room is shared: nothing is set
        apart for them there. `ends` are the tokens that each will have, None: one more."""
        if not self.room.is_shared:
            return 0
        wishes = sum(kvs[at].shares for at in (self._previous_frame[rows] == 0).nonzero()[0].tolist())
        starts = self._position[rows]
        ends = starts if ends is None else ends
        for at in (ends > starts + 1).nonzero()[0].tolist():
            start, stop = int(starts[at]), int(ends[at])
            wishes += kvs[at].shares and sum(start < page * self._page_size < stop for page in kvs[at].marks)
        return int(wishes)

    def begin(self, row: int, pages: Ids) -> None:
        if len(pages):
            self.table.pin(pages[-1:], Rank.USED)
            self._source[row] = pages[-1]
        self._position[row] = len(pages) * self._page_size

    def take(self, rows: Rows, new_pages: Ids) -> None:
        num_missing = 0 if rows is self._last else len(rows) - int(np.count_nonzero(self._frame[rows]))
        if num_missing:
            slots = self.frames.allocator
            slots.alloc_group_begin(min(num_missing * (1 + self._num_drafts), slots.available_size()))
            self._is_taking = True

    def untake(self, new_pages: Ids) -> None:
        if self._is_taking:
            self.frames.allocator.alloc_group_end()
            self._is_taking = False

    def grow(self, rows: Rows, new_pages: Ids) -> None:
        if not self._is_taking:
            return
        self._is_taking = False
        slots = self.frames.allocator
        frames = slots.alloc(slots.num_set_aside)
        slots.alloc_group_end()
        began = missing = rows[self._frame[rows] == 0]
        short = len(missing) * (1 + self._num_drafts) - len(frames)
        if short:
            for row in self._takeable(missing)[:short].tolist():
                page = self._source[row : row + 1].copy()
                self.table.unpin(page, Rank.PASSED)
                self._frame[row] = self.table.unbind(page)[0]
                self._source[row] = 0
                self.dropped_frames += 1
            missing = rows[self._frame[rows] == 0]
        self._frame[missing] = frames[: len(missing)]
        self._draft_frames[began] = frames[len(missing) :].reshape(len(began), self._num_drafts)

    def launch(
        self, kvs: Sequence[RequestKV], rows: Rows, ends: Lengths, draws: Lengths | None, table: Ids, *, stores: bool
    ) -> tuple[StatePieces, list[GroupRelease]]:
        """The work of a step, up to `ends[i]` tokens, and the frames that its requests release at the launch. The step
        draws `draws[i]` tokens, by default one at most. After drafts, all but the first are its last tokens. `table`
        holds all rows of pages. With `stores`, frames may be stored for other requests."""
        starts = self._position[rows]
        lengths = (ends - starts).astype(np.int32)
        if rows is self._last and np.count_nonzero(lengths == 1) == len(rows):  # so there are no drafts
            return self._next(kvs, rows, starts, lengths, table, stores=stores)
        self._last = rows
        drafts = np.zeros(len(rows), np.int64)
        if draws is not None:
            drafts = np.minimum(np.maximum(draws - 1, drafts), self._num_drafts)  # a fifth of what `clip` costs
        ends = ends - drafts
        lengths = (ends - starts).astype(np.int32)
        sources = self._frame[rows]
        grown = np.count_nonzero(lengths > 0) == np.count_nonzero(sources) == len(rows)
        assert grown, "a request was launched that had not grown"
        plain = (self._source[rows] == 0) & (starts > 0)
        plain &= drafts == 0
        self._position[rows] = ends
        targets = sources
        if stores:
            filled = starts % self._page_size
            plain &= filled + lengths <= self._page_size
            exchange = self._exchanges(kvs, rows, starts, (plain & (filled == 0)).nonzero()[0])
            plain &= filled > 0
            targets = self._exchange(exchange, rows, starts, sources)
            plain[exchange] = True
        if np.count_nonzero(plain) == len(rows):
            return StatePieces(lengths, sources, targets), []
        cut: list[tuple[int, int, int]] = []
        counts = np.ones(len(rows), dtype=np.int64)  # pieces of each request
        released: list[GroupRelease] = []
        for at in np.flatnonzero(~plain).tolist():  # where a request begins or a page ends
            kv = kvs[at]
            pieces = self._pieces(kv, int(starts[at]), int(ends[at]), stores=stores and kv.shares)
            chain = [int(self._frame[kv.row]), *self._draft_frames[kv.row, : drafts[at]].tolist()]
            pieces += [(1, source, target) for source, target in pairwise(chain)]
            counts[at] = len(pieces)
            cut += pieces
            if self._oldest[kv.row] <= kv.lease.num_pages:
                released += self._store(table[kv.row], self._pop_settled(kv.row, kv.lease.num_pages))
            page = self.pinned(kv.row, NO_PAGES)
            if len(page):
                released.append(GroupRelease(self.index, page.copy(), Rank.USED))
                self._source[kv.row] = 0
        found = np.empty((3, int(counts.sum())), dtype=np.int32)
        uncut = np.repeat(plain, counts)
        found[:, uncut] = lengths[plain], sources[plain], targets[plain]
        if cut:
            found[:, ~uncut] = np.array(cut, dtype=np.int32).T
        return StatePieces(*found), released

    def num_own(self) -> Lengths:
        counts: Lengths = (self._frame != 0) * (1 + self._num_drafts) + (self._previous_frame != 0)
        for row in np.flatnonzero(self._oldest != sys.maxsize).tolist():
            counts[row] += len(self._unsettled[row])
        return counts

    def settle(self, row: int, num_tokens: int) -> None:
        """The first `num_tokens` tokens have settled; some of them may have been drafts."""
        accepted = num_tokens - int(self._position[row])
        if accepted > 0:
            frames = self._draft_frames[row]
            self._frame[row], frames[accepted - 1] = frames[accepted - 1], self._frame[row]
            self._position[row] = num_tokens

    def restore(self, pages: Ids) -> Ids:
        frames = self.frames.allocator.alloc(len(pages))
        self.table.bind(pages, frames)
        return frames

    def is_pending(self, row: int, num_pages: int) -> bool:
        """Whether other requests can begin later, but not yet, after the row's first `num_pages` settled pages."""
        if self._position[row] <= num_pages * self._page_size:
            return True  # the next step stores the frame there
        return any(each.num_pages == num_pages for each in self._unsettled[row])

    @property
    def may_free(self) -> bool:
        """See `PagedGroup`."""
        return int(self._oldest.min()) != sys.maxsize

    def frees(self, rows: Rows, num_pages: Lengths) -> Bools:
        return num_pages >= self._oldest[rows]

    def give_up(self, lack: int) -> bool:
        """Free checkpoints not stored yet, if a shared room lacks nothing then: returns that. No step is in flight."""
        frames = [each.frame for some in self._unsettled for each in some]
        frames += self._previous_frame[self._previous_frame != 0].tolist()
        stride = self.room.strides[self.room.indices.index(self.index)]
        if not self.room.is_shared or not 0 < lack <= len(frames) * stride:
            return False
        self.frames.allocator.free(frames)
        self._previous_frame[:] = 0
        self._unsettled = [[] for _ in self._unsettled]
        self._oldest[:] = sys.maxsize
        self.skipped += len(frames)
        return True

    def commit(self, new: NewPages, ours: Ids, theirs: Ids) -> list[GroupRelease]:
        released: list[GroupRelease] = []
        for kv, end in zip(new.kvs, new.ends.tolist(), strict=True):
            if self._oldest[kv.row] <= end:
                released += self._store(new.table[kv.row], self._pop_settled(kv.row, end))
        return released

    def finish(self, row: int, pages: Ids, protected: int) -> list[GroupRelease]:
        """The later one of the last two frames that ends at a settled page goes to that page; the other is free."""
        settled, unused = self._pop_settled(row, protected), self._pop_settled(row, sys.maxsize)
        last: list[Checkpoint] = []
        if self._previous_frame[row]:
            frame, rank = int(self._previous_frame[row]), Rank(self._previous_rank[row])
            last.append(Checkpoint(int(self._previous_pages[row]), frame, rank))
        num_pages, rest = divmod(int(self._position[row]), self._page_size)
        drafts = []
        if self._frame[row]:
            last.append(Checkpoint(-1 if rest else num_pages, int(self._frame[row]), Rank.USED))
            drafts = self._draft_frames[row].tolist()
        usable = [each for each in last if 0 < each.num_pages <= protected and not self._source[row]]
        latest = max(usable, key=lambda each: each.num_pages, default=None)
        released = self._store(pages, [*settled, latest] if latest else settled)
        frames = [each.frame for each in (*unused, *last) if each is not latest] + drafts
        source = self.pinned(row, NO_PAGES).copy()
        released.append(GroupRelease(self.index, source, Rank.USED, frames=np.array(frames, dtype=np.int32)))
        self._frame[row] = self._source[row] = self._previous_frame[row] = self._position[row] = 0
        return released

    def release(self, released: GroupRelease) -> None:
        self.table.unpin(released.unpinned, released.rank)
        self.frames.allocator.free(released.frames)

    def pass_by(self, new: NewPages) -> list[GroupRelease]:
        return []  # such a request stores nothing

    def evict(self, num_frames: int, most: Rank = Rank.USED, tenant: int = 0) -> int:
        pages = self.table.reclaim(num_frames, most, tenant)
        self.frames.drop(pages)
        self.dropped_frames += len(pages)
        self._tree.lost(pages)
        return len(pages)

    def moved(self, sources: Ids, targets: Ids) -> Ids:
        for frames in (self._frame, self._draft_frames, self._previous_frame):
            replace_ids(frames, sources, targets)
        for checkpoint in (each for some in self._unsettled for each in some):
            frame = np.array([checkpoint.frame], dtype=np.int32)
            replace_ids(frame, sources, targets)
            checkpoint.frame = int(frame[0])
        return super().moved(sources, targets)

    def _next(
        self, kvs: Sequence[RequestKV], rows: Rows, starts: Lengths, lengths: Ids, table: Ids, *, stores: bool
    ) -> tuple[StatePieces, list[GroupRelease]]:
        """As `launch` for the requests of the last call, if each computes one token: only those at the end of a page
        may continue in another frame."""
        released: list[GroupRelease] = []
        sources = targets = self._frame[rows]
        self._position[rows] = starts + 1
        if stores and len(at_end := (starts % self._page_size == 0).nonzero()[0]):
            exchange = self._exchanges(kvs, rows, starts, at_end)
            targets = self._exchange(exchange, rows, starts, sources)
            for at in np.setdiff1d(at_end, exchange).tolist() if len(exchange) < len(at_end) else ():
                kv, start = kvs[at], int(starts[at])
                ((_, _, targets[at]),) = self._pieces(kv, start, start + 1, stores=kv.shares)
                if self._oldest[kv.row] <= kv.lease.num_pages:
                    released += self._store(table[kv.row], self._pop_settled(kv.row, kv.lease.num_pages))
        return StatePieces(lengths, sources, targets), released

    def _exchange(self, places: Rows, rows: Rows, starts: Lengths, sources: Ids) -> Ids:
        """Requests at these places continue in the frame of their earlier checkpoint. Returns the frames of all."""
        targets, at_end = sources.copy(), rows[places]
        targets[places] = self._frame[at_end] = self._previous_frame[at_end]
        self._previous_frame[at_end] = sources[places]
        self._previous_pages[at_end] = starts[places] // self._page_size
        self._previous_rank[at_end] = Rank.USED
        return targets

    def _exchanges(self, kvs: Sequence[RequestKV], rows: Rows, starts: Lengths, places: Rows) -> Rows:
        """Requests at the end of a page that only exchange their frame with an earlier checkpoint, as most decodes."""
        if not len(places):
            return places
        there = starts[places]
        usual = (there % self._interval != 0) & (self._previous_frame[rows[places]] != 0)
        some = [kvs[at] for at in places.tolist()]
        pages = (there // self._page_size).tolist()
        plain = [kv.shares and kv.last_mark < page for kv, page in zip(some, pages, strict=True)]
        found: Rows = places if all(plain) and np.count_nonzero(usual) == len(usual) else places[usual & plain]
        return found

    def _takeable(self, rows: Rows) -> Rows:
        """Rows that alone pin the page that they begin on, and so can take its frame."""
        sources = self._source[rows]
        found: Rows = rows[(sources != 0) & (self.table.pins[sources] == 1)]
        return found

    def _pieces(self, kv: RequestKV, start: int, end: int, *, stores: bool) -> list[tuple[int, int, int]]:
        """(length, source, target) of each piece of one request's tokens `start..end`."""
        row, current = kv.row, int(self._frame[kv.row])
        page = self._source[row : row + 1]
        source = int(self.table.frames(page)[0]) if page[0] else current * (start > 0)
        pieces: list[tuple[int, int, int]] = []
        for at, rank in self._stops(kv, start, end) if stores else ():
            if at > start:
                pieces.append((at - start, source, current))
                start, source = at, current
            if source == current:  # otherwise it has written nothing yet: the page that it begins on has that frame
                current = self._checkpoint(row, at // self._page_size, current, rank) or current
        pieces.append((end - start, source, current))
        self._frame[row] = current
        return pieces

    def _stops(self, kv: RequestKV, start: int, end: int) -> list[tuple[int, Rank | None]]:
        """Where in `start..end - 1` tokens to store the state, in order, with the rank: at marks and at multiples of
        the interval. None if only at `start`, the end of a page, which needs no piece."""
        size = self._page_size
        stops: dict[int, Rank | None] = {}
        if start and start % size == 0:
            stops[start] = None
        first = -(-max(start, 1) // self._interval) * self._interval
        stops |= dict.fromkeys(range(first, end, self._interval), Rank.PASSED)
        stops |= {
            num_pages * size: rank for num_pages, rank in kv.marks.items() if max(start, 1) <= num_pages * size < end
        }
        return sorted(stops.items(), key=lambda stop: stop[0])

    def _checkpoint(self, row: int, num_pages: int, frame: int, rank: Rank | None) -> int:
        """Store `frame` as a checkpoint after `num_pages` pages. Returns the frame to continue in, or 0."""
        checkpoint = Checkpoint(num_pages, frame, Rank.USED if rank is None else rank)
        following = 0 if rank is None and self._previous_frame[row] else self._spare(row, checkpoint.rank)
        if following and rank is not None:
            self._unsettled[row].append(checkpoint)
            self._oldest[row] = self._unsettled[row][0].num_pages
            return following
        if not following:  # reuse the frame of an earlier page's end
            following = int(self._previous_frame[row])
        if following:
            self._previous_frame[row], self._previous_pages[row] = frame, num_pages
            self._previous_rank[row] = checkpoint.rank
        if not following or rank is not None:
            self.skipped += 1
        return following

    def _pop_settled(self, row: int, num_pages: int) -> list[Checkpoint]:
        """Remove the checkpoints of a row's first `num_pages` pages, and return them."""
        checkpoints = self._unsettled[row]
        rest = self._unsettled[row] = [each for each in checkpoints if each.num_pages > num_pages]
        self._oldest[row] = rest[0].num_pages if rest else sys.maxsize
        return checkpoints[: len(checkpoints) - len(rest)]

    def _spare(self, row: int, rank: Rank) -> int:
        """A free frame that no request will need, for a resume point of a row of this rank; 0 if there is none."""
        still_to_come = int(np.count_nonzero(self._frame == 0)) * (1 + self._num_drafts)
        if self.room.short_of(self, still_to_come + 1) > 0:
            return 0
        if self.may_keep is not None:
            if not self.may_keep(self.index, row, rank):
                return 0
        elif not self.num_free and not self.evict(1, rank):
            return 0
        return int(self.frames.allocator.alloc(1)[0])

    def _store(self, pages: Ids, checkpoints: Sequence[Checkpoint]) -> list[GroupRelease]:
        """Move these frames to their pages. A page that has a frame keeps it."""
        released = []
        for each in checkpoints:
            page = pages[each.num_pages - 1 : each.num_pages].copy()
            frame = np.array([each.frame], dtype=np.int32)
            if self.table.present(page)[0]:
                released.append(GroupRelease(self.index, frames=frame))
            else:
                self.table.bind(page, frame)
                self.left += 1
            self.table.pin(page, each.rank)  # a step in flight may still read the frame
            released.append(GroupRelease(self.index, page, each.rank))
        return released


GroupCache = PagedGroup | StateGroup
