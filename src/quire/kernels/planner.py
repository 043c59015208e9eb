"""AttentionPlanner: splits one step's attention into segments, and edits the plan of the last step where it changed.

The plan of a sequence depends on its page table and length alone. Both are compared with those of the last step: a
sequence with the same pages keeps its segments, and its new tokens are appended to its suffix. Sequences are found by
their ids. An id is a hint: if it is wrong, the pages differ, and the sequence is planned again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch

from quire.kernels import segments
from quire.kernels.segments import (
    ChunkSegments,
    Segment,
    Sequences,
    Slots,
    Source,
    StepPlan,
    flatten_ranges,
    gathered_sources,
    row_index,
    shared_runs,
)
from quire.kernels.suffixes import Suffixes
from quire.spec.ids import Bools, Ids

MAX_CACHED_SLOTS = 1 << 24
"""Gathered slots, 8 bytes each, above which a plan is not kept for the next step."""


class AttentionPlanner:
    """Plans of the batches of one group, step after step. A plan is valid until the next batch asks for one.

    It holds, per window, the page tables of the last step's sequences and one int64 per gathered token, up to about
    `MAX_CACHED_SLOTS`; larger plans are not kept. Steps that verify drafts have plans of their own, so that steps with
    and without drafts may alternate.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[int, bool, torch.device, bool], _CachedPlan] = {}
        self._parts: dict[Hashable, AttentionPlanner] = {}

    def part(self, name: Hashable) -> AttentionPlanner:
        """A planner of its own for the part `name` of every batch."""
        return self._parts.setdefault(name, AttentionPlanner())

    def plan(self, sequences: Sequences, window: int, device: torch.device, *, chunked: bool) -> StepPlan:
        """See `PagedBatch.plan`. O(pages compared + changes since the last step)."""
        key = (window, chunked, device, sequences.verifies)
        cached = self._plans.get(key)
        if cached is None:
            cached = self._plans[key] = _CachedPlan(0 if chunked else window, device)
        elif cached.made_for is sequences:
            return cached.plan
        plan = cached.planned(sequences.cut(window) if chunked else sequences)
        cached.made_for = sequences
        if cached.num_slots > MAX_CACHED_SLOTS:
            del self._plans[key]
        return plan


@dataclass(slots=True, eq=False)
class _Unshared:
    """The segments that only one sequence reads, besides its suffix."""

    sources: list[Source] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    made_for: tuple[int, bool, bool] | None = None  # the flat row and flags that segments were built for


class _CachedPlan:
    """The last plan for one window and its inputs, by *row*: a sequence with few new tokens."""

    def __init__(self, window: int, device: torch.device) -> None:
        self.window = window
        self.device = device
        self.made_for: Sequences | None = None
        self.plan = StepPlan((), False)
        none = np.zeros(0, dtype=np.int64)
        self.ids = self.queries = none  # of all sequences
        self.runs: list[tuple[Slots, int, int]] = []  # that they share
        self.run_sources: dict[bytes, list[Source]] = {}
        self.shared_stops = none  # positions of each sequence up to which these reach
        self.rows = Sequences(none, none, none, np.zeros((0, 0), dtype=np.int32), none, 1, none)
        self.order = none  # the sequence of each row
        self.row_shared_stops = none  # the same by row
        self.limits = none  # length of its suffix or growing run above which it is planned again
        self.ends = none  # the slot after its growing run, which new tokens extend; -1: no such run
        self.transient: Bools = np.zeros(0, dtype=np.bool_)  # valid for one step only
        self.page_tables: Ids = np.zeros((0, 0), dtype=np.int32)
        self.unshared: list[_Unshared] = []
        self.suffixes = Suffixes(window, device)
        self.num_slots = 0  # gathered slots that are kept for the next step

    def planned(self, seqs: Sequences) -> StepPlan:
        """The plan of a step."""
        same = self._is_same(seqs)
        before = self.rows
        if not same:
            before = self._match(seqs)
        rows = self.rows = seqs if len(self.order) == len(seqs.ids) else seqs.take(self.order)
        changed = self._changed(before)
        if not same or changed.any():
            self._share(seqs)
        shared_stops = self.shared_stops[self.order]
        changed |= shared_stops != self.row_shared_stops
        again = changed | self._outgrown(before)
        self._append(before, ~again)
        if not same or again.any():
            self.row_shared_stops = shared_stops
            self._replan(np.flatnonzero(again))
            self.plan = self._assembled(seqs)
        self.suffixes.update_masks(rows.contexts, rows.trees)
        return self.plan

    # What has changed -------------------------------------------------------------------------------------------------

    def _is_same(self, seqs: Sequences) -> bool:
        """Whether the sequences are those of the last step, in their order, and all of them are rows."""
        return (
            len(self.order) == len(seqs.ids)
            and np.array_equal(self.ids, seqs.ids)
            and np.array_equal(self.queries, seqs.queries)
            and bool(self._few(seqs).all())
        )

    def _few(self, seqs: Sequences) -> Bools:
        """Which sequences are rows."""
        few: Bools = (seqs.queries >= 1) & (seqs.queries <= segments.MAX_BATCHED_ROWS)
        if self.window > segments.MAX_BATCHED // 2:  # a batched segment has room for one of them
            few &= (seqs.queries == 1) | ~self._cut(seqs.contexts)
        if seqs.trees is not None:
            few |= seqs.trees.branching
        return few

    def _cut(self, contexts: Slots) -> Bools:
        """Which sequences have rows that no longer see the first token."""
        cut: Bools = contexts > self.window if self.window else np.zeros(len(contexts), dtype=np.bool_)
        return cut

    def _match(self, seqs: Sequences) -> Sequences:
        """Reorder the state by row to this step's sequences. Returns each row's last index, -1 for new rows."""
        before = self.rows
        self.ids, self.queries = seqs.ids.copy(), seqs.queries
        self.order = np.flatnonzero(self._few(seqs))
        place = {number: row for row, number in enumerate(before.ids.tolist())}
        ids, queries = seqs.ids[self.order], seqs.queries[self.order]
        old = np.array([place.get(number, -1) for number in ids.tolist()], dtype=np.int64)
        if len(before.ids):
            old[before.queries[old] != queries] = -1
        if np.array_equal(old, np.arange(len(before.ids))):
            return before
        fresh = old < 0

        def matched(array: Slots) -> Slots:
            return np.where(fresh, -1, array[old] if len(array) else -1)

        self.suffixes.select(old)
        self.row_shared_stops, self.limits, self.ends = (
            matched(self.row_shared_stops),
            matched(self.limits),
            matched(self.ends),
        )
        self.transient = matched(self.transient.astype(np.int64)) == 1
        self.unshared = [self.unshared[row] if row >= 0 else _Unshared() for row in old.tolist()]
        page_tables = np.full((len(old), self.page_tables.shape[1]), -1, dtype=np.int32)
        page_tables[~fresh] = self.page_tables[old[~fresh]]
        self.page_tables = page_tables
        return Sequences(
            before.starts, matched(before.lows), matched(before.contexts), before.frames, ids, seqs.page_size, queries
        )

    def _changed(self, before: Sequences) -> Bools:
        """Rows whose pages, or whose way of reading them, differ from the plan. Updates `page_tables`."""
        rows = self.rows
        cut = self._cut(rows.contexts)
        changed: Bools = (rows.contexts < before.contexts) | (before.contexts < 0) | (rows.lows != before.lows)
        changed |= cut != self._cut(before.contexts)
        width, size = rows.frames.shape[1], rows.page_size
        if self.page_tables.shape[1] < width:
            missing = width + width // 4 - self.page_tables.shape[1]
            self.page_tables = np.pad(self.page_tables, ((0, 0), (0, missing)), constant_values=-1)
        reads = np.where(cut, rows.contexts - self.window, rows.lows) // size  # the first page that is still read
        planned = -(-before.contexts // size)
        first, stop = int(reads.min(initial=width)), min(int(planned.max(initial=0)), width)
        differs = self.page_tables[:, first:stop] != rows.frames[:, first:stop]
        some = np.flatnonzero(differs.any(axis=1))
        if len(some):
            at, page = np.nonzero(differs[some])
            row, page = some[at], page + first
            self.page_tables[row, page] = rows.frames[row, page]
            changed[row[(page >= reads[row]) & (page < planned[row])]] = True
        self.page_tables[:, stop:width] = rows.frames[:, stop:]
        return changed

    def _share(self, seqs: Sequences) -> None:
        """Find the sequences whose page tables begin with the same frames."""
        pasts = seqs.contexts - seqs.queries
        alone = self._cut(seqs.contexts) | (seqs.queries == 0) | (seqs.lows > 0)
        full_pages = np.where(alone, 0, pasts // seqs.page_size)
        self.runs = list(shared_runs(seqs.frames, full_pages, seqs.page_size))
        self.shared_stops = seqs.lows.copy()
        for members, _, stop in self.runs:
            self.shared_stops[members] = stop * seqs.page_size

    def _outgrown(self, before: Sequences) -> Bools:
        """Rows whose suffix or run has grown too long, whose run ends, or whose plan is transient."""
        rows = self.rows
        outgrown: Bools = self.transient | (rows.contexts - self.suffixes.shift > self.limits)
        if self.window:  # a ring has one column for several of so many tokens
            outgrown |= rows.contexts - before.contexts > self.window
        grows = np.flatnonzero(self.ends >= 0)
        if len(grows):
            counts = rows.contexts[grows] - before.contexts[grows]
            goes_on = rows.slots_at(grows, rows.contexts[grows] - 1) == self.ends[grows]
            outgrown[grows] |= (counts > 1) | ((counts == 1) & ~goes_on)
        return outgrown

    # The parts of a plan ----------------------------------------------------------------------------------------------

    def _append(self, before: Sequences, kept: Bools) -> None:
        """Append the new tokens of the rows that are `kept` to their segments."""
        rows = self.rows
        counts = np.where(kept, rows.contexts - before.contexts, 0)
        if (counts == 1).all():
            at, positions = np.arange(len(counts)), rows.contexts - 1
        else:
            at = np.repeat(np.arange(len(counts)), counts)
            positions = flatten_ranges(rows.contexts - counts, rows.contexts)
        self.suffixes.append(at, positions, rows.slots_at(at, positions))
        for row in np.flatnonzero((self.ends >= 0) & (counts > 0)).tolist():
            source, segment = self.unshared[row].sources[-1], self.unshared[row].segments[-1]
            source.stop += 1
            segment.stop += 1
            self.ends[row] += 1

    def _replan(self, dirty: Slots) -> None:
        """Plan the rows `dirty` from their pages."""
        rows = self.rows
        for row in dirty.tolist():
            self.unshared[row] = _Unshared()
        self.ends[dirty], self.transient[dirty] = -1, False
        cut = self._cut(rows.contexts)
        seen = rows.contexts - np.where(rows.queries > 1, rows.queries, 0)  # positions beyond those only in suffixes
        lows = np.where(cut, np.maximum(rows.contexts - rows.queries + 1 - self.window, 0), self.row_shared_stops)
        suffixes: dict[int, Slots] = {}
        whole = []
        for row in dirty.tolist():
            low, high = int(lows[row]), int(seen[row])
            if high - low < 2 * segments.MIN_RUN or (cut[row] and rows.queries[row] > 1):
                whole.append(row)
            elif not cut[row]:
                suffix = self._split(row, low, high)
                if len(suffix):
                    suffixes[row] = suffix
            elif not self._split_window(row, low, high):
                whole.append(row)
        several = np.array(whole, dtype=np.int64)
        lengths = (rows.contexts - lows)[several]
        slots = rows.slots_of(several, lows[several], rows.contexts[several])
        ring = cut & (rows.queries == 1)
        self.transient[dirty] |= (cut & ~ring)[dirty]
        for row, suffix in zip(whole, np.split(slots, np.cumsum(lengths)[:-1]), strict=False):
            suffixes[row] = np.roll(suffix, lows[row] % self.window) if ring[row] else suffix
        for row, suffix in suffixes.items():
            short = len(suffix) < 2 * segments.MIN_RUN
            self.limits[row] = 2 * segments.MIN_RUN + (0 if short else segments.MAX_GATHER)
        self.limits[ring] = np.iinfo(np.int64).max
        self.suffixes.pack(dirty, suffixes, rows.queries, rows.contexts, ring, rows.starts)

    def _split(self, row: int, low: int, high: int) -> Slots:
        """Cut positions `low:high`, which all new tokens see, into runs and gathers.

        Returns the suffix: the other positions, and several new tokens. It is empty if new tokens extend the last run.
        """
        rows = self.rows
        runs, rest, run_is_last = rows.split_runs(row, low, high)
        if run_is_last and rows.queries[row] == 1:
            self.unshared[row].sources = gathered_sources(rest, self.device) + runs
            self.ends[row], self.limits[row] = runs[-1].stop, segments.MAX_RUN
            self.suffixes.shift[row] = rows.contexts[row] - len(runs[-1])
            return rest[:0]
        whole = max(len(rest) - 1, 0) // segments.MAX_GATHER * segments.MAX_GATHER
        self.unshared[row].sources = gathered_sources(rest[:whole], self.device) + runs
        high_, context = np.array([high]), rows.contexts[row : row + 1]
        return np.concatenate((rest[whole:], rows.slots_of(np.array([row]), high_, context)))

    def _split_window(self, row: int, low: int, high: int) -> bool:
        """Cut a window into runs and gathers, for this step only. Returns False if too little of it is in runs."""
        runs, rest, _ = self.rows.split_runs(row, low, high)
        if self.window <= segments.MAX_BATCHED and 2 * sum(map(len, runs)) < self.window:
            return False
        self.unshared[row].sources = runs + gathered_sources(rest, self.device)
        self.transient[row] = True
        return True

    def _assembled(self, seqs: Sequences) -> StepPlan:
        """All segments in the order to run them; those of unchanged rows are reused."""
        found = self._shared(seqs)
        shared, has_suffix = self.row_shared_stops > self.rows.lows, self.suffixes.present()
        fresh = ~shared
        columns = (self.rows.starts, self.rows.queries, shared, has_suffix)
        each = zip(self.unshared, *(column.tolist() for column in columns), strict=False)
        for row, (own, start, queries, after, before) in enumerate(each):
            if own.sources:
                fresh[row] = False
                if own.made_for != (start, after, before):
                    own.made_for = (start, after, before)
                    own.segments = _dense(slice(start, start + queries), own.sources)
                    own.segments[0].first = not after
                    own.segments[-1].last = not before
                found += own.segments
        start_empty = self.suffixes.bind_rows(self.rows.starts, fresh)
        found += [block.segment for block in self.suffixes.blocks]
        gathered = [segment.source.index for segment in found if segment.source.index is not None]
        self.num_slots = sum(map(len, gathered))
        if len(self.order) < len(seqs.ids):
            chunks = ChunkSegments(seqs, self.window, self.device)
            others = np.setdiff1d(np.flatnonzero(seqs.queries), self.order)
            for sequence in others.tolist():
                chunks.add(sequence, int(self.shared_stops[sequence]))
            found += chunks.found
        return StepPlan(tuple(found), start_empty)

    def _shared(self, seqs: Sequences) -> list[Segment]:
        """Dense segments of the rows of all sequences that read the same frames."""
        found, sources = [], {}
        for members, first, stop in self.runs:
            leader, size = int(members[0]), seqs.page_size
            key = seqs.frames[leader, first:stop].tobytes()
            sources[key] = self.run_sources.get(key) or seqs.sources(leader, first * size, stop * size, self.device)
            rows = flatten_ranges(seqs.starts[members], seqs.starts[members + 1])
            run = _dense(row_index(rows, self.device), sources[key])
            run[0].first = first == 0
            found += run
        self.run_sources = sources
        return found


def _dense(rows: slice | torch.Tensor, sources: list[Source]) -> list[Segment]:
    """A segment of `rows` for each source."""
    return [Segment(rows, source, 0, len(source)) for source in sources]
