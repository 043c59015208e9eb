"""Rows of running requests: their pages and lengths, batches of them, and the slots and tables of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.cache.request_kv import RequestKV
from quire.errors import InvalidInput, LeaseError
from quire.memory.allocator import PageFrames, slots_in_pages
from quire.memory.residency import PageTableChanges, Residency
from quire.plan.budget import MemoryPlan
from quire.spec.ids import Ids, Tier
from quire.spec.pages import pages_for

Lengths = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]
NO_ROWS: Rows = np.empty(0, dtype=np.intp)


@dataclass(slots=True, eq=False)
class RunningBatch:
    """A set of running requests; valid until one of them ends (`RunningTables.batch`). Methods of a step process it
    without a loop over requests. `serials` show whether a row still has the same request."""

    kvs: Sequence[RequestKV]
    rows: Rows
    serials: Lengths
    seen: int = -1
    """`RunningTables.num_turnovers` when all of them were found to run."""

    def __len__(self) -> int:
        return len(self.rows)


Batch = Sequence[RequestKV] | RunningBatch
Counts = Sequence[int] | Lengths


class RunningTables:
    """The pages of running requests: int32 `[rows, width]`, and a `flat` view. Per row the tokens `num_allocated` and
    `num_committed`, and the serial number of its request, 0 for none. `live` has the running requests, by row.

    `following` are the indices of groups whose pages have frames. For those that are read in part, `firsts` has the
    first page that each row still reads. With `follows`, changed entries are recorded until `page_table_changes`.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        frames: Residency,
        following: Mapping[int, PageFrames],
        firsts: Mapping[int, Lengths],
        *,
        follows: bool,
    ) -> None:
        num_rows = plan.max_requests
        self.page_size = plan.page_size
        self.frames = frames
        self.columns = tuple(group.table.frame for group in following.values())
        self.live: dict[int, RequestKV] = {}
        self.width = plan.pages_per_row
        self.pages: Ids = np.zeros((num_rows, self.width), dtype=np.int32)
        self.flat: Ids = self.pages.reshape(-1)
        self.num_allocated: Lengths = np.zeros(num_rows, dtype=np.int64)
        self.num_committed: Lengths = np.zeros(num_rows, dtype=np.int64)
        self.serials: Lengths = np.zeros(num_rows, dtype=np.int64)
        self.free = list(range(num_rows - 1, -1, -1))
        self.num_turnovers = 0
        """Grows when the serial number of a row changes."""
        self._following = following
        self._firsts = firsts
        self._last_serial = 0
        self._written: list[Rows] | None = [] if follows else None
        self._nothing = PageTableChanges(np.empty(0, np.int32), np.empty((len(self.columns), 0), np.int32))

    def write_run(self, row: int, start: int, pages: Ids) -> None:
        """Write the pages of a row, from page `start` on."""
        self.pages[row, start : start + len(pages)] = pages
        if self._written is not None and len(pages):
            first = row * self.width + start
            self._written.append(np.arange(first, first + len(pages)))

    def write_new(self, rows: Rows, starts: Lengths, ends: Lengths, pages: Ids) -> None:
        """Write pages `starts[i]..ends[i]` of each row, given row by row."""
        counts, places = ends - starts, rows * self.width + starts
        if len(rows) == 1:
            places = np.arange(first := int(places[0]), first + len(pages))
        elif np.count_nonzero(counts == 1) < len(rows):
            places = np.repeat(places - (np.cumsum(counts) - counts), counts) + np.arange(len(pages))
        self.flat[places] = pages
        if self._written is not None:
            self._written.append(places)

    def rewritten(self, group: int, pages: Ids) -> None:
        """These pages have other frames in a group."""
        if self._written is None or group not in self._following:
            return
        changed = np.zeros(self.frames.num_pages + 1, dtype=np.bool_)
        changed[pages] = True
        rows = np.fromiter(self.live, dtype=np.intp)
        counts = -(-self.num_allocated[rows] // self.page_size)
        places = np.repeat(rows * self.width - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        self._written.append(places[changed[self.flat[places]]])

    def batch(self, kvs: Sequence[RequestKV]) -> RunningBatch:
        """A batch of these requests. Make a new one when a request ends or joins."""
        rows = self.distinct(kvs)
        return RunningBatch(kvs, rows, self.serials[rows])

    def allocated(self, kv: RequestKV) -> int:
        """Tokens that a request has room for."""
        return int(self.num_allocated[self.row_of(kv)])

    def committed(self, kv: RequestKV) -> int:
        """Tokens that have settled."""
        return int(self.num_committed[self.row_of(kv)])

    def page_ids(self, kv: RequestKV) -> Ids:
        """The page ids of a request in order, a copy."""
        row = self.row_of(kv)
        return self.pages[row, : pages_for(int(self.num_allocated[row]), self.page_size)].copy()

    def page_table(self, kvs: Batch, num_tokens: Counts, group: int = 0) -> Ids:
        """Frames of each request's pages in one group, int32 `[len(kvs), max pages]`, padded after `num_tokens`. Raises
        MissingFrame if a page that a request still reads in that group has no frame."""
        num_tokens = np.asarray(num_tokens, dtype=np.int64)
        width = pages_for(int(num_tokens.max(initial=1)), self.page_size)
        rows = self.rows_of(kvs)
        pages = self.pages[rows, :width]
        column = self.frames.of(Tier.DEVICE, group)
        table: Ids = column.frame[pages]
        read = np.arange(width) < -(-num_tokens // self.page_size)[:, None]
        if (first := self._firsts.get(group)) is not None:
            read &= np.arange(width) >= first[rows][:, None]
        if np.count_nonzero(table[read]) != np.count_nonzero(read):
            raise column.missing(pages[read])
        return table

    def page_table_changes(self) -> PageTableChanges:
        """Changes of page tables since the last call, for `DevicePageTables.apply`; one may be named twice. O(changes).
        Raises MissingFrame if a page that a request still reads in a group has no frame."""
        assert self._written is not None, "a table that does not follow what is written has no changes to report"
        if not self._written:
            return self._nothing
        written, self._written = self._written, []
        places = written[0] if len(written) == 1 else np.concatenate(written)
        pages = self.flat[places]
        frames = np.empty((len(self.columns), len(places)), dtype=np.int32)
        for at, (index, group) in enumerate(self._following.items()):
            frames[at] = self.columns[at][pages]
            if np.count_nonzero(frames[at]) != len(places):
                lacking = places[frames[at] == 0]
                if (first := self._firsts.get(index)) is not None:
                    lacking = lacking[lacking % self.width >= first[lacking // self.width]]
                if len(read := self.flat[lacking][self.flat[lacking] != 0]):
                    raise group.table.missing(read)
        return PageTableChanges(places.astype(np.int32), frames)

    def slots(self, kvs: Batch, starts: Counts, ends: Counts, group: int = 0) -> Ids:
        """Physical slots (`frame * page_size + offset`) of tokens `starts[i]..ends[i]` per request, int32, packed.
        Raises MissingFrame if one of their pages has no frame."""
        starts, ends = np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64)
        return self.slots_in((group,), kvs, starts, ends)[0]

    def slots_in(self, groups: Sequence[int], kvs: Batch, starts: Lengths, ends: Lengths | None) -> list[Ids]:
        """The `slots` in each of these groups, of one token each if `ends` is None."""
        rows, size = self.rows_of(kvs), self.page_size
        if ends is not None and (few := int((counts := ends - starts).sum())) <= 64:  # each token by itself
            starts = np.arange(few) + (starts - counts.cumsum() + counts).repeat(counts)
            rows, ends = rows.repeat(counts), None
        lead = len(rows) if ends is None or (single := counts == 1).all() else int(single.argmin())
        following = [self._following[group] for group in groups]
        before = starts[:lead] // size  # with the rest alone a third of what `divmod` costs
        first, offsets = self.flat[rows[:lead] * self.width + before], (starts[:lead] % size).astype(np.int32)
        found = [each.table.frames(first) * np.int32(size) + offsets for each in following]
        if ends is None or lead == len(rows):
            return found
        rows, starts, ends, before = rows[lead:], starts[lead:], ends[lead:], starts[lead:] // size
        counts = np.where(ends > starts, -(-ends // size) - before, 0)
        places = np.repeat(rows * self.width + before - (np.cumsum(counts) - counts), counts)
        pages = self.flat[places + np.arange(len(places))]
        more = [slots_in_pages(each.table.frames(pages), counts, starts, ends, size) for each in following]
        return [np.concatenate(parts) for parts in zip(found, more, strict=True)] if lead else more

    def next_slots(self, batch: RunningBatch, group: int = 0) -> Ids:
        """The slots that a step after `extend(batch, 1)` writes: of the last allocated token of each request."""
        ends = self.num_allocated[batch.rows]
        return self.slots(batch, ends - 1, ends, group)

    def enter(self, kv: RequestKV) -> None:
        """A request begins in `kv.row`, which is allocated."""
        self._last_serial += 1
        self.num_turnovers += 1
        self.serials[kv.row] = self._last_serial
        self.live[kv.row] = kv

    def rest(self, kv: RequestKV) -> int:
        """No step launched before reads or writes the row from now on. Returns its serial number, for `go_on`."""
        serial = int(self.serials[kv.row])
        self.serials[kv.row] = 0
        self.num_turnovers += 1
        return serial

    def go_on(self, kv: RequestKV, serial: int, num_committed: int) -> None:
        """A row at rest is computed again, after `num_committed` settled tokens."""
        self.serials[kv.row] = serial
        self.num_turnovers += 1
        self.num_committed[kv.row] = num_committed

    def shorten(self, row: int, num_tokens: int) -> None:
        """A row has room for so many tokens only. The caller frees the pages after them."""
        keep, last = (pages_for(n, self.page_size) for n in (num_tokens, int(self.num_allocated[row])))
        self.pages[row, keep:last] = 0
        self.num_allocated[row] = num_tokens

    def leave(self, kv: RequestKV) -> None:
        """A request ends, and its row is free."""
        row, kv.row = kv.row, -1
        self.pages[row, : pages_for(int(self.num_allocated[row]), self.page_size)] = 0
        self.num_allocated[row] = self.num_committed[row] = self.serials[row] = 0
        self.num_turnovers += 1
        self.free.append(row)
        del self.live[row]

    def row_of(self, kv: RequestKV) -> int:
        """The row of a request. Raises LeaseError if it has ended."""
        if not kv.alive:
            raise LeaseError("a request's cache record was used after it had finished.")
        return kv.row

    def rows_of(self, kvs: Batch) -> Rows:
        """The rows of requests, in order. Raises LeaseError if one has ended."""
        if isinstance(kvs, RunningBatch):
            rows = kvs.rows
            alive = kvs.seen == self.num_turnovers or not np.count_nonzero(self.serials[rows] != kvs.serials)
            kvs.seen = self.num_turnovers if alive else -1
        else:
            rows = np.array([kv.row for kv in kvs], dtype=np.intp)
            alive = bool(np.minimum.reduce(rows, initial=0) >= 0)
        if not alive:
            raise LeaseError("a request's cache record was used after it had finished.")
        return rows

    def distinct(self, kvs: Batch) -> Rows:
        """As `rows_of`. Raises InvalidInput if a request is given twice."""
        rows = self.rows_of(kvs)
        if not isinstance(kvs, RunningBatch) and len(rows) > 1 and len(set(rows.tolist())) < len(rows):
            raise InvalidInput("a request is named twice in one batch.", fix="name each request once.")
        return rows
