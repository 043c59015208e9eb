"""StepPlan: how one step's attention splits into segments whose partial results are merged. Host arithmetic, per step.

    sequence    |<------------ past ------------>|<-- new tokens -->|
                |shared run|  own run  | leftovers|  causal block   |
    read as      dense      dense       gathered    new rows

*Dense*: every row of the segment sees every key of it, so no mask exists, the keys may come in any order, and rows of
several sequences whose page tables begin alike read those keys once. *Block*: rows of one chunk against keys some of
which they may not see (a causal square, or the edge of a sliding window). *Batched*: one row per sequence, each with
its own few keys, gathered and padded. Runs of consecutive frames are read in place; only what is scattered is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.spec.ids import Ids
from quire.spec.pages import pages_for

Slots = npt.NDArray[np.int64]

MIN_SHARED_TOKENS = 256
"""Reads a shared run must save (tokens times readers beyond the first) to be worth a segment of its own."""
MIN_RUN = 128
"""Tokens of consecutive slots from which reading in place beats gathering."""
MAX_RUN = 4096
"""Tokens a segment reads in place at once, for the kernel's sake: what it converts or scores has a bounded size."""
MAX_GATHER = 1024
"""Tokens gathered for dense segments at once: few enough that they are still in the cache when they are read."""
MAX_BATCHED = 4096
"""Tokens gathered for a batched segment, padding included."""
BLOCK_ROWS = 256
"""Rows of a chunk that share the masks at a window's edge."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Tokens a segment reads: slots `start:stop` of the pool, the slots in `index`, or the step's own new rows."""

    start: int = 0
    stop: int = 0
    index: Tensor | None = None  # [num_tokens] int64, device
    new: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows, what they read, and which of it they see. `first` and `last` say whether others touch the same rows."""

    rows: slice | Tensor  # of the flat batch; int64 `[num_rows]` where they are not consecutive
    num_rows: int
    source: Source
    start: int  # the keys are tokens `start:stop` of the source
    stop: int
    causal: bool = False
    mask: Tensor | None = None  # added to the scores; float32 [rows, keys], batched [rows, 1, 1, keys]
    batched: bool = False  # row i reads the i-th of `num_rows` equal parts of the source
    first: bool = False
    last: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Segments in the order to run them. `start_empty`: some rows meet their first segment beside rows that do not."""

    segments: tuple[Segment, ...]
    start_empty: bool
    device: torch.device


def plan_step(
    query_starts: Ids,
    context_lens: Ids,
    frames: Ids,
    page_size: int,
    *,
    window: int,
    chunked: bool = False,
    device: torch.device,
) -> StepPlan:
    """The plan of one step; see `PagedBatch` for the arrays. O(pages compared for sharing + tokens gathered)."""
    sequences = _Sequences.whole(query_starts, context_lens)
    if chunked:
        sequences, owners = sequences.cut(window)
        frames, window = frames[owners], 0
    planner = _Planner(sequences, frames, page_size, window, device)
    planner.add_shared_runs()
    planner.add_chunks()
    planner.add_decodes()
    return planner.finish()


@dataclass(frozen=True, slots=True, eq=False)
class _Sequences:
    """Runs of rows `starts[i]:starts[i + 1]`, each the last of a context of positions `lows[i]:contexts[i]`."""

    starts: Slots
    lows: Slots
    contexts: Slots

    @classmethod
    def whole(cls, query_starts: Ids, context_lens: Ids) -> _Sequences:
        """The sequences of a batch, each with all of its context."""
        lows = np.zeros(len(context_lens), dtype=np.int64)
        return cls(query_starts.astype(np.int64), lows, context_lens.astype(np.int64))

    def cut(self, size: int) -> tuple[_Sequences, Slots]:
        """A sequence per chunk of `size` positions that has rows, and whose it was: rows read their own chunk only."""
        pasts = self.contexts - np.diff(self.starts)
        first, last = pasts // size, -(-self.contexts // size)
        owners = np.repeat(np.arange(len(first)), last - first)
        chunks = flatten_ranges(first, last)
        contexts = np.minimum((chunks + 1) * size, self.contexts[owners])
        counts = contexts - np.maximum(chunks * size, pasts[owners])
        starts = np.concatenate(([0], np.cumsum(counts)))
        return _Sequences(starts, chunks * size, contexts), owners


class _Planner:
    def __init__(self, sequences: _Sequences, frames: Ids, page_size: int, window: int, device: torch.device) -> None:
        self.starts = sequences.starts
        self.contexts = sequences.contexts
        self.lows = sequences.lows
        self.queries = np.diff(self.starts)
        self.pasts = self.contexts - self.queries
        self.frames = frames
        self.page_size = page_size
        self.window = window
        self.device = device
        self.cut = self.contexts > window if window else np.zeros(len(self.contexts), dtype=np.bool_)
        self.done = self.lows.copy()  # positions up to which shared runs cover the past
        self._parts: list[tuple[Slots, Segment]] = []  # with the rows it covers
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    # Shared runs ------------------------------------------------------------------------------------------------------

    def add_shared_runs(self) -> None:
        """Dense segments of the rows of all sequences that read the same frames from their first page on."""
        full_pages = np.where(self.cut | (self.queries == 0) | (self.lows > 0), 0, self.pasts // self.page_size)
        for members, first, stop in shared_runs(self.frames, full_pages, self.page_size):
            rows = flatten_ranges(self.starts[members], self.starts[members + 1])
            self._add_dense(rows, int(members[0]), first * self.page_size, stop * self.page_size)
            self.done[members] = stop * self.page_size

    # Chunks -----------------------------------------------------------------------------------------------------------

    def add_chunks(self) -> None:
        """Sequences with several new tokens: what precedes them, then the square of the new tokens themselves."""
        for sequence in np.flatnonzero(self.queries > 1).tolist():
            start, stop = int(self.starts[sequence]), int(self.starts[sequence + 1])
            if self.cut[sequence]:
                self._add_windowed_chunk(sequence, start, stop)
                continue
            rows = np.arange(start, stop)
            self._add_dense(rows, sequence, int(self.done[sequence]), int(self.pasts[sequence]))
            self._add(rows, Source(start, stop, new=True), 0, stop - start, causal=True)

    def _add_windowed_chunk(self, sequence: int, start: int, stop: int) -> None:
        """A chunk some of whose rows no longer see the first token. Per block of rows, the keys are
        `[low, edge)` leaving the window row by row, `[edge, begin)` seen by all, and the block's own square.
        """
        window, past = self.window, int(self.pasts[sequence])
        base = max(0, past - window + 1)
        source = self._chunk_source(sequence, base, start, stop)
        size = max(1, min(BLOCK_ROWS, window - 1))
        for offset in range(0, stop - start, size):
            count = min(size, stop - start - offset)
            rows = np.arange(start + offset, start + offset + count)
            begin = past + offset
            low = max(0, begin - window + 1)
            edge = min(max(begin + count - window + 1, low), begin)  # the last row sees one key before it, if any
            if edge - low > 1:
                mask = self._edge_mask(count, edge - low, begin - window + 1 - low)
                self._add(rows, source, low - base, edge - base, mask=mask)
            else:
                edge = low
            if edge < begin:
                self._add(rows, source, edge - base, begin - base)
            self._add(rows, source, begin - base, begin - base + count, causal=True)

    def _chunk_source(self, sequence: int, base: int, start: int, stop: int) -> Source:
        """The tokens from position `base` to the end of the context, in order."""
        if base == self.pasts[sequence]:
            return Source(start, stop, new=True)
        begins, ends = self._slot_runs(sequence, base, int(self.contexts[sequence]))
        if len(begins) == 1:
            return Source(int(begins[0]), int(ends[0]))
        return Source(index=self._to_device(flatten_ranges(begins, ends)))

    def _edge_mask(self, rows: int, keys: int, shift: int) -> Tensor:
        """Row i sees key j of the edge from `j >= i + shift` on (`shift` <= 0 where the context begins inside it)."""
        found = self._masks.get((rows, keys, shift))
        if found is None:
            hidden = np.arange(keys)[None, :] < np.arange(rows)[:, None] + shift
            found = self._to_device(np.where(hidden, np.float32("-inf"), np.float32(0)))
            self._masks[rows, keys, shift] = found
        return found

    # Decodes ----------------------------------------------------------------------------------------------------------

    def add_decodes(self) -> None:
        """Sequences with one new token: long consecutive runs read in place, the rest gathered in padded batches."""
        sequences = np.flatnonzero(self.queries == 1)
        if not len(sequences):
            return
        rows = self.starts[sequences]
        highs = self.contexts[sequences]
        lows = np.where(self.cut[sequences], highs - self.window, self.done[sequences])
        short = highs - lows < 2 * MIN_RUN
        slots = [self._slots_of(sequences[short], lows[short], highs[short])]
        owners, lengths = [rows[short]], [(highs - lows)[short]]
        for i in np.flatnonzero(~short).tolist():
            begins, ends = self._slot_runs(int(sequences[i]), int(lows[i]), int(highs[i]))
            in_place = ends - begins >= MIN_RUN
            self._add_runs(rows[i : i + 1], begins[in_place], ends[in_place])
            rest = flatten_ranges(begins[~in_place], ends[~in_place])
            whole = len(rest) - len(rest) % MAX_GATHER
            self._add_gathered(rows[i : i + 1], rest[:whole])
            if whole < len(rest):  # a row is in a batched segment once, so that parts are merged one by one
                slots.append(rest[whole:])
                owners.append(rows[i : i + 1])
                lengths.append(np.array([len(rest) - whole]))
        if sum(map(len, owners)):
            self._add_batched(np.concatenate(owners), np.concatenate(lengths), np.concatenate(slots))

    def _add_batched(self, rows: Slots, lengths: Slots, slots: Slots) -> None:
        """Batched segments of `rows`, row i reading the next `lengths[i]` of `slots`, padded with its own last one."""
        offsets = np.cumsum(lengths) - lengths
        for bucket in _buckets(lengths):
            members = bucket[np.argsort(rows[bucket], kind="stable")]
            longest = int(lengths[members].max())
            column = np.minimum(np.arange(longest)[None, :], lengths[members][:, None] - 1)
            index = self._to_device(slots[offsets[members][:, None] + column].reshape(-1))
            mask = None
            if int(lengths[members].min()) < longest:
                padding = np.arange(longest)[None, :] >= lengths[members][:, None]
                values = np.where(padding, np.float32("-inf"), np.float32(0))
                mask = self._to_device(values[:, None, None, :])
            self._add(rows[members], Source(index=index), 0, longest, mask=mask, batched=True)

    # Parts ------------------------------------------------------------------------------------------------------------

    def _add_dense(self, rows: Slots, sequence: int, low: int, high: int) -> None:
        """Dense segments of `rows` against positions `low:high` of `sequence`: runs in place, the rest gathered."""
        if low >= high:
            return
        begins, ends = self._slot_runs(sequence, low, high)
        in_place = ends - begins >= MIN_RUN
        self._add_runs(rows, begins[in_place], ends[in_place])
        self._add_gathered(rows, flatten_ranges(begins[~in_place], ends[~in_place]))

    def _add_runs(self, rows: Slots, begins: Slots, ends: Slots) -> None:
        """Dense segments that read slots `begins[i]:ends[i]` in place."""
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            for at in range(begin, end, MAX_RUN):
                stop = min(at + MAX_RUN, end)
                self._add(rows, Source(at, stop), 0, stop - at)

    def _add_gathered(self, rows: Slots, slots: Slots) -> None:
        """Dense segments that gather `slots`."""
        for at in range(0, len(slots), MAX_GATHER):
            part = slots[at : at + MAX_GATHER]
            self._add(rows, Source(index=self._to_device(part)), 0, len(part))

    def _slot_runs(self, sequence: int, low: int, high: int) -> tuple[Slots, Slots]:
        """Begins and ends of the maximal runs of consecutive slots that hold positions `low:high`, in order."""
        size = self.page_size
        first, stop = low // size, pages_for(high, size)
        frames = self.frames[sequence, first:stop].astype(np.int64)
        cuts = np.flatnonzero(np.diff(frames) != 1) + 1
        begins = frames[np.concatenate(([0], cuts))] * size
        ends = (frames[np.concatenate((cuts - 1, [len(frames) - 1]))] + 1) * size
        begins[0] += low - first * size
        ends[-1] -= stop * size - high
        return begins, ends

    def _slots_of(self, sequences: Slots, lows: Slots, highs: Slots) -> Slots:
        """Slots of positions `lows[i]:highs[i]` of each sequence, one after another."""
        positions = flatten_ranges(lows, highs)
        owners = np.repeat(sequences, highs - lows)
        found: Slots = self.frames[owners, positions // self.page_size].astype(np.int64) * self.page_size
        return found + positions % self.page_size

    def _add(
        self,
        rows: Slots,
        source: Source,
        start: int,
        stop: int,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
        batched: bool = False,
    ) -> None:
        index = self._row_index(rows)
        segment = Segment(index, len(rows), source, start, stop, causal=causal, mask=mask, batched=batched)
        self._parts.append((rows, segment))

    def finish(self) -> StepPlan:
        """The segments with `first` and `last` set."""
        left = np.zeros(int(self.starts[-1]), dtype=np.int64)  # segments still to come, per row
        for rows, _ in self._parts:
            left[rows] += 1
        total = left.copy()
        segments, start_empty = [], False
        for rows, segment in self._parts:
            fresh = left[rows] == total[rows]
            start_empty |= bool(fresh.any() and not fresh.all())
            left[rows] -= 1
            segments.append(replace(segment, first=bool(fresh.all()), last=not left[rows].any()))
        return StepPlan(tuple(segments), start_empty, self.device)

    def _row_index(self, rows: Slots) -> slice | Tensor:
        if int(rows[-1]) - int(rows[0]) == len(rows) - 1 and (np.diff(rows) == 1).all():
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return self._to_device(rows)

    def _to_device(self, array: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def flatten_ranges(starts: Slots, stops: Slots) -> Slots:
    """`starts[0]:stops[0]`, then `starts[1]:stops[1]`, ... as one array."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    if not len(ends):
        return np.zeros(0, dtype=np.int64)
    flat: Slots = np.arange(ends[-1], dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
    return flat


def shared_runs(frames: Ids, full_pages: Slots, page_size: int) -> Iterator[tuple[Slots, int, int]]:
    """(members, first, stop): sequences whose page tables agree on pages `first:stop` and on every page before.

    Only the first `full_pages[r]` pages of sequence r may be shared. A member of a run is a member of every run before
    it in the same table, so its runs are consecutive from page 0.
    """
    pending = [(np.flatnonzero(full_pages > 0), 0, 0)]  # members that agree up to `depth`, runs taken up to `first`
    while pending:
        candidates, first, depth = pending.pop()
        candidates = candidates[full_pages[candidates] > depth]
        if len(candidates) < 2:
            continue
        column = frames[candidates, depth]
        order = np.argsort(column, kind="stable")
        for members in np.split(candidates[order], np.flatnonzero(np.diff(column[order])) + 1):
            if len(members) < 2:
                continue
            members = np.sort(members)
            limit = int(full_pages[members].min())
            table = frames[members, depth:limit]
            differs = np.flatnonzero((table != table[0]).any(axis=0))
            stop = depth + int(differs[0]) if len(differs) else limit
            worthwhile = (len(members) - 1) * (stop - first) * page_size >= MIN_SHARED_TOKENS
            if worthwhile:
                yield members, first, stop
            pending.append((members, stop if worthwhile else first, stop))


def _buckets(lengths: Slots) -> Iterator[Slots]:
    """Indices of `lengths` in groups whose padding to the longest is small and which fit the workspace."""
    order = np.argsort(lengths, kind="stable")
    in_order: Sequence[int] = lengths[order].tolist()
    begin = 0
    for end in range(1, len(in_order) + 1):
        full = end == len(in_order)
        if not full:
            longest = in_order[end]
            full = longest > in_order[begin] * 1.5 + 32 or longest * (end + 1 - begin) > MAX_BATCHED
        if full:
            yield order[begin:end]
            begin = end
