"""RunningTables: the rows of running requests, and what a step reads of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.cache.request_kv import RequestKV
from quire.cache.row_table import RowTable
from quire.cache.running import Lengths, Rows, RunningBatch
from quire.errors import InvalidInput, LeaseError
from quire.memory.allocator import slots_in_pages
from quire.memory.page_table_changes import PageTableChanges
from quire.memory.residency import Residency
from quire.plan.budget import MemoryPlan
from quire.spec.ids import Ids, Tier
from quire.spec.pages import pages_for


class RunningTables:
    """Pages and lengths by row, and the device frames behind them. `following` are the groups in which a page has its
    own frame. `_epoch` and `_ended` count changes of what a `RunningBatch` remembers, and requests that have ended."""

    def __init__(self, plan: MemoryPlan, frames: Residency, following: Sequence[int], *, follows: bool) -> None:
        self.plan = plan
        self.page_size = plan.page_size
        self.frames = frames
        self._columns = tuple(frames.of(Tier.DEVICE, group).frame for group in following)
        self._place = {group: place for place, group in enumerate(following)}
        self._table = RowTable(plan.max_requests, plan.pages_per_row, follows=follows)
        self._rows, self._flat_rows = self._table.pages, self._table.flat
        self._allocated, self._committed = self._table.allocated, self._table.committed
        self._epoch = self._ended = 0

    def allocated(self, kv: RequestKV) -> int:
        """Tokens it has room for."""
        return int(self._allocated[self._row_of(kv)])

    def committed(self, kv: RequestKV) -> int:
        """Tokens that have settled."""
        return int(self._committed[self._row_of(kv)])

    def protected(self, kv: RequestKV) -> int:
        """Tokens that the tree holds for it."""
        return kv.lease.num_pages * self.page_size

    def page_ids(self, kv: RequestKV) -> Ids:
        """Its pages in order, a copy."""
        row = self._row_of(kv)
        return self._rows[row, : pages_for(int(self._allocated[row]), self.page_size)].copy()

    def page_table(self, kvs: Sequence[RequestKV] | RunningBatch, num_tokens: Lengths, group: int = 0) -> Ids:
        """Frames of each request's pages in one group, int32 `[len(kvs), max pages]`, padded with frame 0 or with
        frames beyond `num_tokens`."""
        width = pages_for(int(num_tokens.max(initial=1)), self.page_size)
        pages = self._rows[self._rows_of(kvs), :width]
        table: Ids = self.frames.of(Tier.DEVICE, group).frame[pages]
        return table

    def page_table_changes(self) -> PageTableChanges:
        """What has changed in page tables since the last call, for `DevicePageTables.apply`. O(what changed)."""
        return self._table.changes(self._columns)

    def slots(self, kvs: Sequence[RequestKV] | RunningBatch, starts: Lengths, ends: Lengths, group: int = 0) -> Ids:
        """Physical slots (`frame * page_size + offset`) of tokens `starts[i]..ends[i]` per request, int32, packed."""
        rows, size = self._rows_of(kvs), self.page_size
        first = starts // size
        counts = np.where(ends > starts, -(-ends // size) - first, 0)
        before = rows * self._table.width + first - (np.cumsum(counts) - counts)
        places = np.repeat(before, counts) + np.arange(int(counts.sum()))
        frames = self.frames.of(Tier.DEVICE, group).frame[self._flat_rows[places]]
        return slots_in_pages(frames.astype(np.int64), counts, starts, ends, size)

    def next_slots(self, batch: RunningBatch, group: int = 0) -> Ids:
        """Slots of the last token that each request of a batch has room for: where a step after `extend(batch, 1)`
        writes."""
        self._refresh(batch)
        return batch.slots[self._place[group]].copy()

    # -- inside

    def _refresh(self, batch: RunningBatch) -> None:
        """Read a batch's state again where something else has changed the cache. Raises LeaseError if one has ended."""
        if batch.epoch == self._epoch:
            return
        if batch.ended != self._ended:
            self._rows_of(batch.kvs)
            batch.ended = self._ended
        rows, size = batch.rows, self.page_size
        batch.lengths = lengths = self._allocated[rows]
        batch.room = self.plan.context - int(lengths.max(initial=0))
        last = np.maximum(lengths - 1, 0)
        pages = self._flat_rows[rows * self._table.width + last // size]
        offset = (last % size).astype(np.int32)
        batch.filled = np.where(lengths > 0, last % size + 1, size)
        batch.slots = [column[pages] * np.int32(size) + offset for column in self._columns]
        batch.epoch = self._epoch

    def _row_of(self, kv: RequestKV) -> int:
        if not kv.alive:
            raise LeaseError("a request's cache record was used after it had finished.")
        return kv.row

    def _rows_of(self, kvs: Sequence[RequestKV] | RunningBatch) -> Rows:
        if isinstance(kvs, RunningBatch):
            if kvs.ended != self._ended:
                self._rows_of(kvs.kvs)
                kvs.ended = self._ended
            return kvs.rows
        rows = np.array([kv.row for kv in kvs], dtype=np.intp)
        if len(rows) and np.minimum.reduce(rows) < 0:
            raise LeaseError("a request's cache record was used after it had finished.")
        return rows

    def _distinct(self, rows: Rows) -> Rows:
        if len(rows) > 1 and len(set(rows.tolist())) < len(rows):
            raise InvalidInput("a request is named twice in one batch.", fix="name each request once.")
        return rows
