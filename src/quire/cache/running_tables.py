"""RunningTables: the rows of running requests, and what a step reads of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quire.cache.request_kv import RequestKV
from quire.cache.running import Lengths, Rows, RowTable, RunningBatch
from quire.errors import InvalidInput, LeaseError
from quire.memory.allocator import PageFrames, slots_in_pages
from quire.memory.residency import PageTableChanges, Residency
from quire.plan.budget import MemoryPlan
from quire.spec.ids import Ids, Tier
from quire.spec.pages import pages_for


class RunningTables:
    """Pages and lengths by row, and the device frames behind them. `following` are the groups in which a page has its
    own frame, by index; `live` the requests that have begun and not finished, by row."""

    def __init__(
        self, plan: MemoryPlan, frames: Residency, following: Mapping[int, PageFrames], *, follows: bool
    ) -> None:
        self.plan = plan
        self.page_size = plan.page_size
        self.frames = frames
        self.columns = tuple(group.table.frame for group in following.values())
        self.table = RowTable(plan.max_requests, plan.pages_per_row, follows=follows)
        self.live: dict[int, RequestKV] = {}
        self._following = following
        self._last_serial = 0

    def batch(self, kvs: Sequence[RequestKV]) -> RunningBatch:
        """These requests as one, each once, for the verbs of a step. Make it again when one ends or another joins."""
        rows = self.distinct(kvs)
        return RunningBatch(kvs, rows, self.table.serials[rows])

    def allocated(self, kv: RequestKV) -> int:
        """Tokens it has room for."""
        return int(self.table.allocated[self.row_of(kv)])

    def committed(self, kv: RequestKV) -> int:
        """Tokens that have settled."""
        return int(self.table.committed[self.row_of(kv)])

    def protected(self, kv: RequestKV) -> int:
        """Tokens that the tree holds for it."""
        return kv.lease.num_pages * self.page_size

    def page_ids(self, kv: RequestKV) -> Ids:
        """Its pages in order, a copy."""
        row = self.row_of(kv)
        return self.table.pages[row, : pages_for(int(self.table.allocated[row]), self.page_size)].copy()

    def page_table(self, kvs: Sequence[RequestKV] | RunningBatch, num_tokens: Lengths, group: int = 0) -> Ids:
        """Frames of each request's pages in one group, int32 `[len(kvs), max pages]`, padded with frame 0 or with
        frames beyond `num_tokens`.

        Raises MissingFrame where the page of a request's last token has no frame, or in a group that is read as a whole
        any page: what is read there would be the padding page.
        """
        width = pages_for(int(num_tokens.max(initial=1)), self.page_size)
        pages = self.table.pages[self.rows_of(kvs), :width]
        column = self.frames.of(Tier.DEVICE, group)
        table: Ids = column.frame[pages]
        num_pages = -(-num_tokens // self.page_size)[:, None]
        read = np.arange(width) < num_pages
        if column.reclaims:  # windows pass: what is before the last page may be gone
            read &= np.arange(width) == num_pages - 1
        if np.count_nonzero(table[read]) != np.count_nonzero(read):
            raise column.missing(pages[read])
        return table

    def page_table_changes(self) -> PageTableChanges:
        """What has changed in page tables since the last call, for `DevicePageTables.apply`. O(what changed).

        Raises MissingFrame where a page of a request has no frame in a group that is read as a whole.
        """
        changes = self.table.changes(self.columns)
        for group, frames in zip(self._following.values(), changes.frames, strict=True):
            if not group.table.reclaims and np.count_nonzero(frames) != len(frames):
                pages = self.table.flat[changes.places]
                if len(read := pages[(pages != 0) & (frames == 0)]):
                    raise group.table.missing(read)
        return changes

    def slots(self, kvs: Sequence[RequestKV] | RunningBatch, starts: Lengths, ends: Lengths, group: int = 0) -> Ids:
        """Physical slots (`frame * page_size + offset`) of tokens `starts[i]..ends[i]` per request, int32, packed.

        Raises MissingFrame where a page of them has no frame.
        """
        return self.slots_in((group,), kvs, starts, ends)[0]

    def slots_in(
        self, groups: Sequence[int], kvs: Sequence[RequestKV] | RunningBatch, starts: Lengths, ends: Lengths
    ) -> list[Ids]:
        """As `slots`, in each of these groups."""
        rows, size = self.rows_of(kvs), self.page_size
        single = ends - starts == 1
        lead = len(rows) if np.count_nonzero(single) == len(rows) else int(single.argmin())
        following = [self._following[group] for group in groups]
        first = self.table.flat[rows[:lead] * self.table.width + starts[:lead] // size]
        offsets = (starts[:lead] % size).astype(np.int32)
        found = [each.table.frames(first) * np.int32(size) + offsets for each in following]
        if lead == len(rows):
            return found
        rows, starts, ends = rows[lead:], starts[lead:], ends[lead:]
        before = starts // size
        counts = np.where(ends > starts, -(-ends // size) - before, 0)
        places = np.repeat(rows * self.table.width + before - (np.cumsum(counts) - counts), counts)
        pages = self.table.flat[places + np.arange(len(places))]
        frames = [each.table.frames(pages).astype(np.int64) for each in following]
        more = [slots_in_pages(each, counts, starts, ends, size) for each in frames]
        return [np.concatenate(parts) for parts in zip(found, more, strict=True)] if lead else more

    def next_slots(self, batch: RunningBatch, group: int = 0) -> Ids:
        """Slots of the last token that each request of a batch has room for: where a step after `extend(batch, 1)`
        writes."""
        ends = self.table.allocated[batch.rows]
        return self.slots(batch, ends - 1, ends, group)

    # -- for the cache

    def last_slots(self, rows: Rows, lengths: Lengths) -> Ids:
        """The slot of the last of `lengths[i]` tokens of each row in its page's own id, int32; -1 for no tokens."""
        last = np.maximum(lengths - 1, 0)
        pages = self.table.flat[rows * self.table.width + last // self.page_size]
        slots: Ids = pages * np.int32(self.page_size) + (last % self.page_size).astype(np.int32)
        slots[lengths == 0] = -1
        return slots

    def enter(self, kv: RequestKV) -> None:
        """A request begins, in the row that was taken for it."""
        self._last_serial += 1
        self.table.serials[kv.row] = self._last_serial
        self.live[kv.row] = kv

    def leave(self, kv: RequestKV) -> None:
        """It ends, and its row is free."""
        row, kv.row, table = kv.row, -1, self.table
        table.pages[row, : pages_for(int(table.allocated[row]), self.page_size)] = 0
        table.allocated[row] = table.committed[row] = table.serials[row] = 0
        table.free.append(row)
        del self.live[row]

    def row_of(self, kv: RequestKV) -> int:
        """Its row. Raises LeaseError if it has ended."""
        if not kv.alive:
            raise LeaseError("a request's cache record was used after it had finished.")
        return kv.row

    def rows_of(self, kvs: Sequence[RequestKV] | RunningBatch) -> Rows:
        """Their rows. Raises LeaseError if one has ended."""
        if isinstance(kvs, RunningBatch):
            rows = kvs.rows
            alive = not np.count_nonzero(self.table.serials[rows] != kvs.serials)
        else:
            rows = np.array([kv.row for kv in kvs], dtype=np.intp)
            alive = bool(np.minimum.reduce(rows, initial=0) >= 0)
        if not alive:
            raise LeaseError("a request's cache record was used after it had finished.")
        return rows

    def distinct(self, kvs: Sequence[RequestKV] | RunningBatch) -> Rows:
        """Their rows, as `rows_of`. Raises InvalidInput if one is there twice."""
        rows = self.rows_of(kvs)
        if not isinstance(kvs, RunningBatch) and len(rows) > 1 and len(set(rows.tolist())) < len(rows):
            raise InvalidInput("a request is named twice in one batch.", fix="name each request once.")
        return rows
