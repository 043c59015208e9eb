"""The segments of a step's attention, whose partial results are merged, and the arithmetic of slots.

    sequence    |<------------ past ------------>|<-- new tokens -->|
                |shared run|  own run  |        suffix                |
    read as      dense      dense         gathered, padded             (up to 32 new tokens)
                |shared run|  own run  | leftovers|  causal block   |
    read as      dense      dense       gathered    new rows           (more)

*Dense*: every row of the segment sees every key of it. So no mask exists, the keys may come in any order, and rows of
several sequences whose page tables begin alike read those keys once. *Block*: rows of one chunk against keys some of
which are hidden from them (a causal square, or the edge of a sliding window). *Batched*: a few rows of each of several
sequences, each with its own keys, gathered and padded. Runs of consecutive frames are read in place; scattered slots
are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.spec.ids import Bools, Ids
from quire.spec.pages import pages_for
from quire.upload import to_device

Slots = npt.NDArray[np.int64]

MIN_SHARED_TOKENS = 256
"""Reads that a shared run must save (tokens times readers beyond the first) to get a segment of its own."""
MIN_RUN = 128
"""Number of consecutive slots from which reading in place is faster than gathering."""
MAX_RUN = 4096
"""Tokens that a segment reads in place at once, which bounds what the kernel converts or scores."""
MAX_GATHER = 1024
"""Tokens gathered for dense segments at once: few enough to stay in the CPU's cache until they are read."""
MAX_BATCHED = 4096
"""Tokens gathered for a batched segment, padding included."""
MAX_BATCHED_ROWS = 32
"""New tokens of a sequence up to which it is in batched segments."""
BLOCK_ROWS = 256
"""Rows of a chunk that share the masks at a window's edge."""


@dataclass(slots=True, eq=False)
class Source:
    """Tokens a segment reads: slots `start:stop` of the pool, the slots in `index`, or the step's own new rows."""

    start: int = 0
    stop: int = 0
    index: Tensor | None = None  # [num_tokens] int64, device
    new: bool = False

    def __len__(self) -> int:
        return self.stop - self.start if self.index is None else len(self.index)


@dataclass(slots=True, eq=False)
class Segment:
    """Rows, their source of keys, and the mask between them. `first`, `last`: no earlier or later segment has these
    rows."""

    rows: slice | Tensor  # of the flat batch; int64 `[n]` if they are not consecutive
    source: Source
    start: int  # the keys are tokens `start:stop` of the source
    stop: int
    causal: bool = False
    mask: Tensor | None = None  # added to the scores; float32 [rows, keys], batched [sequences, rows of each, keys]
    batched: int = 0  # sequences; the rows of the i-th read the i-th of as many equal parts of the source
    first: bool = False
    last: bool = False
    folded: Tensor | None = None  # the mask once for each head of a group, as attention made it in this step


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Segments in the order to run them. `start_empty`: some segment is the first of only some of its rows.

    A planner edits its last plan for the next step: a plan is valid in its own step only.
    """

    segments: tuple[Segment, ...]
    start_empty: bool


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """Drafts that branch: sequences whose rows do not simply follow each other.

    `branching` `[R]` says which. `depths` int64 `[T]` is the position of a row less the tokens before the step.
    `sees` `[T, most rows + 2]`: whether a row sees the n-th row of its sequence, which is itself or one that it
    follows; n = -1 is the past. It says nothing of rows that are in no batched segment.
    """

    branching: Bools
    depths: Slots
    sees: Bools

    @classmethod
    def of(cls, parents: Ids, starts: Slots) -> Trees | None:
        """The trees of rows that follow `parents`, as in `PagedBatch`; None if all rows are chains."""
        counts, rows = np.diff(starts), np.arange(starts[-1])
        owners = np.repeat(np.arange(len(counts)), counts)
        firsts = starts[owners]
        branches = parents != np.where(rows == firsts, -1, rows - 1)
        if not branches.any():
            return None
        assert ((parents == -1) | ((parents >= firsts) & (parents < rows))).all(), "a row follows a row before it"
        branching = np.bincount(owners[branches], minlength=len(counts)) > 0
        most = max(MAX_BATCHED_ROWS, int(counts[branching].max()))  # longer chunks are in no batched segment
        sees = np.zeros((len(rows), most + 2), dtype=np.bool_)
        sees[:, -1] = True
        row = ancestor = rows[counts[owners] <= most]
        depths = rows - firsts
        depths[row] = -1
        while len(row):
            sees[row, ancestor - firsts[row]] = True
            depths[row] += 1
            above = parents[ancestor]
            row, ancestor = row[above >= 0], above[above >= 0]
        return cls(branching, depths, sees)


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Runs of rows `starts[i]:starts[i + 1]`, each the last of a context of positions `lows[i]:contexts[i]`.

    `ids` identify sequences within a step and in the next one. `frames` as in `PagedBatch`, `trees` those of the batch.
    It `verifies` drafts if no sequence has many rows, and some have several.
    """

    starts: Slots
    lows: Slots
    contexts: Slots
    frames: Ids
    ids: Slots
    page_size: int
    queries: Slots
    trees: Trees | None = None
    verifies: bool = False

    def cut(self, size: int) -> Sequences:
        """A sequence per chunk of `size` positions that has rows: rows read their own chunk only.

        The last chunk of a sequence keeps its id; earlier chunks are complete.
        """
        pasts = self.contexts - self.queries
        first, last = pasts // size, -(-self.contexts // size)
        if (last - first == 1).all():
            return replace(self, lows=first * size)
        owners = np.repeat(np.arange(len(first)), last - first)
        chunks = flatten_ranges(first, last)
        contexts = np.minimum((chunks + 1) * size, self.contexts[owners])
        counts = contexts - np.maximum(chunks * size, pasts[owners])
        starts = np.concatenate(([0], np.cumsum(counts)))
        ids = np.where(contexts == self.contexts[owners], self.ids[owners], -1 - np.arange(len(owners)))
        return Sequences(starts, chunks * size, contexts, self.frames[owners], ids, self.page_size, counts)

    def take(self, some: Slots) -> Sequences:
        """A selection of the sequences; `starts` has no end."""
        names = ("starts", "lows", "contexts", "frames", "ids", "queries")
        return replace(self, **{name: getattr(self, name)[some] for name in names})

    def slot_runs(self, sequence: int, low: int, high: int) -> tuple[Slots, Slots]:
        """Starts and ends of the maximal runs of consecutive slots of positions `low:high`, in order."""
        size = self.page_size
        first, stop = low // size, pages_for(high, size)
        frames = self.frames[sequence, first:stop].astype(np.int64)
        cuts = np.flatnonzero(np.diff(frames) != 1) + 1
        begins = frames[np.concatenate(([0], cuts))] * size
        ends = (frames[np.concatenate((cuts - 1, [len(frames) - 1]))] + 1) * size
        begins[0] += low - first * size
        ends[-1] -= stop * size - high
        return begins, ends

    def slots_of(self, sequences: Slots, lows: Slots, highs: Slots) -> Slots:
        """Slots of positions `lows[i]:highs[i]` of each of some sequences, one after another."""
        return self.slots_at(np.repeat(sequences, highs - lows), flatten_ranges(lows, highs))

    def slots_at(self, sequences: Slots, positions: Slots) -> Slots:
        """The slot of position `positions[i]` of sequence `sequences[i]`."""
        pages = positions // self.page_size
        found: Slots = self.frames[sequences, pages] * np.int64(self.page_size)
        found += positions - pages * self.page_size
        return found

    def sources(self, sequence: int, low: int, high: int, device: torch.device) -> list[Source]:
        """The sources of dense segments that cover positions `low:high`: runs in place, the rest gathered."""
        if low >= high:
            return []
        runs, rest, _ = self.split_runs(sequence, low, high)
        return runs + gathered_sources(rest, device)

    def split_runs(self, sequence: int, low: int, high: int) -> tuple[list[Source], Slots, bool]:
        """Positions `low:high`: long runs of slots in place, the slots between them, and whether a run is last."""
        begins, ends = self.slot_runs(sequence, low, high)
        in_place = ends - begins >= MIN_RUN
        runs = [
            Source(at, min(at + MAX_RUN, end))
            for begin, end in zip(begins[in_place].tolist(), ends[in_place].tolist(), strict=True)
            for at in range(begin, end, MAX_RUN)
        ]
        return runs, flatten_ranges(begins[~in_place], ends[~in_place]), bool(in_place[-1])


class ChunkSegments:
    """The segments of one step's chunks, in the order to run them."""

    def __init__(self, sequences: Sequences, window: int, device: torch.device) -> None:
        self._sequences = sequences
        self._window = window
        self._device = device
        self._masks: dict[tuple[int, int, int], Tensor] = {}
        self.found: list[Segment] = []

    def add(self, sequence: int, done: int) -> None:
        """Plan a sequence from position `done` on: the positions before its rows, then their causal square."""
        start, stop = (int(self._sequences.starts[at]) for at in (sequence, sequence + 1))
        context = int(self._sequences.contexts[sequence])
        if self._window and context > self._window:
            self._add_windowed(sequence, start, stop)
            return
        fresh = done == int(self._sequences.lows[sequence])
        rows, count = slice(start, stop), stop - start
        for source in self._sequences.sources(sequence, done, context - count, self._device):
            self.found.append(Segment(rows, source, 0, len(source), first=fresh))
            fresh = False
        new = Source(start, stop, new=True)
        self.found.append(Segment(rows, new, 0, count, causal=True, first=fresh, last=True))

    def _add_windowed(self, sequence: int, start: int, stop: int) -> None:
        """A chunk some of whose rows no longer see the first token. Per block of rows, the keys are
        `[low, edge)` leaving the window row by row, `[edge, begin)` seen by all, and the block's own square.
        """
        window, past = self._window, int(self._sequences.contexts[sequence]) - (stop - start)
        base = max(0, past - window + 1)
        source = self._source(sequence, base, past, start, stop)
        size = max(1, min(BLOCK_ROWS, window - 1))
        for offset in range(0, stop - start, size):
            count = min(size, stop - start - offset)
            rows, begin = slice(start + offset, start + offset + count), past + offset
            low = max(0, begin - window + 1)
            edge = min(max(begin + count - window + 1, low), begin)  # the last row sees one key before it, if any
            fresh = True
            if edge - low > 1:
                mask = self._edge_mask(count, edge - low, begin - window + 1 - low)
                self.found.append(Segment(rows, source, low - base, edge - base, mask=mask, first=True))
                fresh = False
            else:
                edge = low
            if edge < begin:
                self.found.append(Segment(rows, source, edge - base, begin - base, first=fresh))
                fresh = False
            own = begin - base
            self.found.append(Segment(rows, source, own, own + count, causal=True, first=fresh, last=True))

    def _source(self, sequence: int, base: int, past: int, start: int, stop: int) -> Source:
        """The tokens from position `base` to the end of the context, in order."""
        if base == past:
            return Source(start, stop, new=True)
        begins, ends = self._sequences.slot_runs(sequence, base, past + stop - start)
        if len(begins) == 1:
            return Source(int(begins[0]), int(ends[0]))
        return Source(index=to_device(flatten_ranges(begins, ends), self._device))

    def _edge_mask(self, rows: int, keys: int, shift: int) -> Tensor:
        """Row i sees key j of the edge from `j >= i + shift` on (`shift` <= 0 if the context begins inside it)."""
        found = self._masks.get((rows, keys, shift))
        if found is None:
            hidden = np.arange(keys)[None, :] < np.arange(rows)[:, None] + shift
            found = to_device(np.where(hidden, np.float32("-inf"), np.float32(0)), self._device)
            self._masks[rows, keys, shift] = found
        return found


def gathered_sources(slots: Slots, device: torch.device) -> list[Source]:
    """`slots`, gathered."""
    if not len(slots):
        return []
    return [Source(index=part) for part in torch.split(to_device(slots, device), MAX_GATHER)]


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
    pending = [(np.flatnonzero(full_pages > 0), 0, 0)]  # members that agree up to `depth`, runs used up to `first`
    while pending:
        candidates, first, depth = pending.pop()
        candidates = candidates[full_pages[candidates] > depth]
        if len(candidates) < 2:
            continue
        column = frames[candidates, depth]
        order = np.argsort(column, kind="stable")
        bounds = np.concatenate(([0], np.flatnonzero(np.diff(column[order])) + 1, [len(order)]))
        for family in np.flatnonzero(np.diff(bounds) > 1).tolist():
            members = candidates[order[bounds[family] : bounds[family + 1]]]  # ascending, since the sort is stable
            limit = int(full_pages[members].min())
            table = frames[members, depth:limit]
            differs = np.flatnonzero((table != table[0]).any(axis=0))
            stop = depth + int(differs[0]) if len(differs) else limit
            worthwhile = (len(members) - 1) * (stop - first) * page_size >= MIN_SHARED_TOKENS
            if worthwhile:
                yield members, first, stop
            pending.append((members, stop if worthwhile else first, stop))


def buckets(lengths: Slots) -> Iterator[Slots]:
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


def row_index(rows: Slots, device: torch.device) -> slice | Tensor:
    """Numbers int64, ascending, as an index: a slice if they are consecutive."""
    if int(rows[-1]) - int(rows[0]) == len(rows) - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return to_device(rows, device)
