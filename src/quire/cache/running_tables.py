"""RunningTables: the rows of running requests, and what a step reads of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quire.cache.request_kv import RequestKV
from quire.cache.row_table import RowTable
from quire.cache.running import Lengths, Rows, RunningBatch
from quire.errors import InvalidInput, LeaseError
from quire.memory.allocator import PageFrames, slots_in_pages
from quire.memory.page_table_changes import PageTableChanges
from quire.memory.residency import Residency
from quire.plan.budget import MemoryPlan
from quire.spec.ids import Ids, Tier
from quire.spec.pages import pages_for


class RunningTables:
    """Pages and lengths by row, and the device frames behind them. `following` are the groups in which a page has its
    own frame, by index. `epoch` and `ended` count changes of what a `RunningBatch` remembers, and ended requests."""

    def __init__(
        self, plan: MemoryPlan, frames: Residency, following: Mapping[int, PageFrames], *, follows: bool
    ) -> None:
        self.plan = plan
        self.page_size = plan.page_size
        self.frames = frames
        self.columns = tuple(group.column for group in following.values())
        self._following = tuple(following.values())
        self._place = {group: place for place, group in enumerate(following)}
        self.table = RowTable(plan.max_requests, plan.pages_per_row, follows=follows)
        self.live: dict[int, RequestKV] = {}  # requests that have begun and not finished, by row
        self.epoch = self.ended = 0

    def batch(self, kvs: Sequence[RequestKV]) -> RunningBatch:
        """These requests as one, each once, for the verbs of a step. Make it again when one ends or another joins."""
        return RunningBatch(kvs, self.distinct(kvs))

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
        if column.idle is not None:  # windows pass: what is before the last page may be gone
            read &= np.arange(width) == num_pages - 1
        if np.count_nonzero(table[read]) != np.count_nonzero(read):
            raise column.missing(pages[read])
        return table

    def page_table_changes(self) -> PageTableChanges:
        """What has changed in page tables since the last call, for `DevicePageTables.apply`. O(what changed).

        Raises MissingFrame where a page of a request has no frame in a group that is read as a whole.
        """
        changes = self.table.changes(self.columns)
        for place, group in enumerate(self._following):
            frames = changes.frames[place]
            if group.table.idle is None and np.count_nonzero(frames) != len(frames):
                pages = self.table.flat[changes.places]
                if len(read := pages[(pages != 0) & (frames == 0)]):
                    raise group.table.missing(read)
        return changes

    def slots(self, kvs: Sequence[RequestKV] | RunningBatch, starts: Lengths, ends: Lengths, group: int = 0) -> Ids:
        """Physical slots (`frame * page_size + offset`) of tokens `starts[i]..ends[i]` per request, int32, packed."""
        rows, size = self.rows_of(kvs), self.page_size
        first = starts // size
        counts = np.where(ends > starts, -(-ends // size) - first, 0)
        before = rows * self.table.width + first - (np.cumsum(counts) - counts)
        places = np.repeat(before, counts) + np.arange(int(counts.sum()))
        frames = self.frames.of(Tier.DEVICE, group).frames(self.table.flat[places])
        return slots_in_pages(frames.astype(np.int64), counts, starts, ends, size)

    def next_slots(self, batch: RunningBatch, group: int = 0) -> Ids:
        """Slots of the last token that each request of a batch has room for: where a step after `extend(batch, 1)`
        writes."""
        self.refresh(batch)
        return batch.slots[self._place[group]].copy()

    # -- for the cache

    def last_slots(self, rows: Rows, lengths: Lengths) -> Ids:
        """The slot of the last of `lengths[i]` tokens of each row in its page's own id, int32; -1 for no tokens."""
        last = np.maximum(lengths - 1, 0)
        pages = self.table.flat[rows * self.table.width + last // self.page_size]
        slots: Ids = pages * np.int32(self.page_size) + (last % self.page_size).astype(np.int32)
        slots[lengths == 0] = -1
        return slots

    def refresh(self, batch: RunningBatch) -> None:
        """Read a batch's state again where something else has changed the cache. Raises LeaseError if one has ended."""
        if batch.epoch == self.epoch:
            return
        if batch.ended != self.ended:
            self.rows_of(batch.kvs)
            batch.ended = self.ended
        rows = batch.rows
        batch.lengths = lengths = self.table.allocated[rows]
        batch.room = self.plan.context - int(lengths.max(initial=0))
        batch.filled = np.where(lengths > 0, (lengths - 1) % self.page_size + 1, self.page_size)
        batch.last = self.last_slots(rows, lengths)
        batch.slots = [frames.translate(batch.last) for frames in self._following]
        batch.epoch = self.epoch

    def row_of(self, kv: RequestKV) -> int:
        """Its row. Raises LeaseError if it has ended."""
        if not kv.alive:
            raise LeaseError("a request's cache record was used after it had finished.")
        return kv.row

    def rows_of(self, kvs: Sequence[RequestKV] | RunningBatch) -> Rows:
        """Their rows. Raises LeaseError if one has ended."""
        if isinstance(kvs, RunningBatch):
            if kvs.ended != self.ended:
                self.rows_of(kvs.kvs)
                kvs.ended = self.ended
            return kvs.rows
        rows = np.array([kv.row for kv in kvs], dtype=np.intp)
        if len(rows) and np.minimum.reduce(rows) < 0:
            raise LeaseError("a request's cache record was used after it had finished.")
        return rows

    def distinct(self, kvs: Sequence[RequestKV] | RunningBatch) -> Rows:
        """Their rows, as `rows_of`. Raises InvalidInput if one is there twice."""
        rows = self.rows_of(kvs)
        if not isinstance(kvs, RunningBatch) and len(rows) > 1 and len(set(rows.tolist())) < len(rows):
            raise InvalidInput("a request is named twice in one batch.", fix="name each request once.")
        return rows
