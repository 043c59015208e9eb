"""SimulatedDevice: runs steps without a model, and checks what they read.

It draws the tokens of each request's script. Its frames store prefix hashes (`quire.sim.prefix_hash`), one for each
token slot of each group. A hash represents the namespace and all tokens up to its own, and so the position too. All
layers and fields of a group are written at the same slots by the same step, so one hash represents all of them; its
array represents the group. Where a draft is wrong, other numbers are written, there and behind it.

Every step does for every group the accesses of a forward pass, in the order of launches:

    write    the hashes of its new tokens, to the slots that the cache gave
    read     every page that attention reads for a request, from the first that its reach needs to its last known token

Why nothing escapes. Each read is compared with the expected content, completely and in every step: whole pages by their
digest, the last page slot by slot. The digest of a frame is computed again from all of its slots whenever one of them
is written. The expected content of a request is computed from its script alone, before it runs. No result of an earlier
step is trusted: the page table is read from the cache for each step, and each entry's frame is looked up. So the first
step that reads a missing, short, stale, misplaced or foreign page reports it, except for two different contents with
the same 64-bit number. Digests make this affordable: a decode step compares `context / page_size` numbers.

It does not check pages that no step reads, nor times. For steps in flight, slots and pages are captured when a step is
launched and accessed when it settles, as late as on a device. If a later step reuses a frame that a step in flight
reads, this is reported at its launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.cache import KVCache, RunningBatch
from quire.cache.running import Lengths
from quire.cache.states import Pieces
from quire.errors import WrongContent
from quire.plan.budget import MemoryPlan
from quire.scheduler.request import RequestState
from quire.scheduler.step import Step
from quire.sim.arrivals import ScriptedRequest, scripted
from quire.sim.prefix_hash import Hashes, PrefixHasher, page_digests
from quire.sim.scripts import Scripts
from quire.spec.ids import Ids

_SEVERAL = -1
_GARBLED = np.uint64(2**64 - 1)
_FEW_PAGES = 16384
"""Up to this many reads, a step is compared as one table, padding included."""


@dataclass(frozen=True, slots=True)
class _PageTable:
    """Page table of some works of a step, of similar lengths: int32 `[works, pages]`."""

    works: Lengths
    table: Ids


@dataclass(slots=True)
class SimulatedStep:
    """A launched step. `drawn` are the tokens it draws, int64. The other fields are for the checks: where each work
    ends without its drafts, by group the pieces if requests update a state, the row of each work in the tables of
    expected contents, by which number the content of each flat place differs from the expected one (None: all are
    right), and by group the slots it writes and the tables it reads."""

    number: int
    step: Step
    fence: int
    ends: Lengths
    drawn: Lengths
    pieces: dict[int, Pieces]
    expected: Lengths
    garbled: Hashes | None = None
    writes: dict[int, Ids] = field(default_factory=dict)
    reads: dict[int, list[_PageTable]] = field(default_factory=dict)


class SimulatedDevice:
    """The device of one cache. Without `frames` (`frames_of` creates them) it draws tokens and checks nothing;
    `overlap` says whether a step may be launched before the one before it has settled.

    Raises WrongContent if a step reads wrong content, when that step settles or when a later one is launched too early.
    """

    def __init__(self, cache: KVCache, frames: Sequence[Frames] | None, *, overlap: bool = False) -> None:
        self._expected = _Expected(cache) if frames is not None else None
        self._memory: tuple[_GroupMemory, ...] = ()
        if frames is not None and self._expected is not None:
            groups = enumerate(frames)
            self._memory = tuple(_GroupMemory(cache, at, each, self._expected, overlap) for at, each in groups)
        self._launched = self._settled = 0
        self.scripts = Scripts(cache.plan)

    def launch(self, scheduled: Step, fence: int, pieces: dict[int, Pieces]) -> SimulatedStep:
        """Start a step. `fence` was opened for it, and `pieces` are the results of `KVCache.launch` for every group
        that has any. O(works) without checks."""
        self.scripts.enter(scheduled.batch)
        self._launched += 1
        drawers = scheduled.batch.rows[scheduled.drawers]
        drawn = self.scripts.outputs[drawers, scheduled.positions[scheduled.draws] + 1].astype(np.int64)
        ends = scheduled.ends - np.maximum(scheduled.draw_counts - 1, 0)
        step = SimulatedStep(self._launched, scheduled, fence, ends, drawn, pieces, ends[:0])
        if self._expected is not None:
            requests = scripted(scheduled.requests)
            step.expected = self._expected.rows_of(requests, self._launched, self._settled)
            step.garbled = self._garbled(scheduled, ends)
            self._expected.check_inputs(requests, scheduled, ends)
        for memory in self._memory:
            memory.capture(step, self._settled)
        return step

    def _garbled(self, step: Step, ends: Lengths) -> Hashes | None:
        """Drafts that are wrong, and what is behind them."""
        if len(step.draws) == np.count_nonzero(step.draw_counts):
            return None
        works = np.repeat(np.arange(len(step)), step.counts)
        wrong = step.tokens != self.scripts.outputs[step.batch.rows[works], step.positions]
        so_far = np.cumsum(wrong & (step.positions >= ends[works]))
        found: Hashes = np.where(so_far > so_far[step.offsets[:-1]][works], _GARBLED, np.uint64(0))
        return found

    def settle(self, step: SimulatedStep) -> Lengths:
        """Wait for a step: check what it does, and return the tokens it drew. Steps settle in launch order."""
        assert step.number == self._settled + 1, "steps settle in the order of their launches"
        for memory in self._memory:
            memory.run(step)
        self._settled = step.number
        return step.drawn


class Frames:
    """The frames of one group: `hashes`, uint64 `[frames + 1, slots]`, and a digest of the hashes of each frame."""

    def __init__(self, num_frames: int, slots: int) -> None:
        self.hashes: Hashes = np.zeros((num_frames + 1, slots), dtype=np.uint64)
        self.digests: Hashes = np.zeros(num_frames + 1, dtype=np.uint64)

    def update_digests(self, frames: Ids) -> None:
        """The hashes of these frames have changed."""
        self.digests[frames] = page_digests(self.hashes[frames])


def frames_of(plan: MemoryPlan) -> list[Frames]:
    """Empty frames of each group."""
    widths = [1 if group.reach.in_place else plan.page_size for group in plan.groups]
    return [Frames(plan.frames_of(at), width) for at, width in enumerate(widths)]


class _Expected:
    """The expected contents: a row of hashes and of page digests for each request that runs."""

    def __init__(self, cache: KVCache) -> None:
        size, longest = cache.page_size, cache.plan.pages_per_row * cache.page_size
        self._hasher = PrefixHasher(longest + 1)
        # Steps in flight may have as many requests again as are running.
        self._owners: list[ScriptedRequest | None] = [None] * (2 * cache.plan.max_requests + 1)
        self._last_used = np.zeros(len(self._owners), dtype=np.int64)
        self._free = list(range(len(self._owners)))
        self._page_size = size
        # Zeroed memory is allocated only when it is written, so a row costs as much as its longest request.
        self.hashes: Hashes = np.zeros((len(self._owners), longest), dtype=np.uint64)
        self.hashes_by_page: Hashes = self.hashes.reshape(len(self._owners), -1, size)
        self.digests: Hashes = np.zeros((len(self._owners), cache.plan.pages_per_row), dtype=np.uint64)

    def rows_of(self, requests: Sequence[ScriptedRequest], launched: int, settled: int) -> Lengths:
        """The row of each request in the step that is being launched; it has one until it ends or is preempted."""
        begun = [request for request in requests if request.expected_row < 0]
        if begun:
            self._collect(settled)
            for request in begun:
                self._begin(request)
        rows = np.fromiter([request.expected_row for request in requests], dtype=np.int64, count=len(requests))
        self._last_used[rows] = launched
        return rows

    def check_inputs(self, requests: Sequence[ScriptedRequest], step: Step, ends: Lengths) -> None:
        """The input tokens of prompts are those of their scripts; single tokens are compared once, at the end."""
        for at in np.flatnonzero(ends - step.starts > 1).tolist():
            part = slice(int(step.starts[at]), int(ends[at]))
            if not np.array_equal(requests[at].tokens[part], requests[at].script[part]):
                raise WrongContent(f"request '{requests[at].request_id}' computes tokens that are not its own.")

    def owner(self, row: int) -> str:
        """The request of a row, for messages."""
        owner = self._owners[row]
        return owner.request_id if owner is not None else "?"

    def _begin(self, request: ScriptedRequest) -> None:
        row = request.expected_row = self._free.pop()
        self._owners[row] = request
        hashes = self._hasher.hashes(request.namespace, request.script)
        whole = len(hashes) // self._page_size
        self.hashes[row, : len(hashes)] = hashes
        self.digests[row, :whole] = page_digests(self.hashes_by_page[row, :whole])

    def _collect(self, settled: int) -> None:
        """Free the rows of requests that do not run and are in no step in flight."""
        for row, owner in enumerate(self._owners):
            if owner is not None and owner.state is not RequestState.RUNNING and self._last_used[row] <= settled:
                owner.expected_row = -1
                self._owners[row] = None
                self._free.append(row)


class _GroupMemory:
    """The frames of one group."""

    def __init__(self, cache: KVCache, group: int, frames: Frames, expected: _Expected, overlap: bool) -> None:
        self._cache = cache
        self._group = group
        self._name = cache.groups[group].name
        self._expected = expected
        self._size = cache.page_size
        num_frames = cache.plan.frames_of(group) + 1
        self._carried = cache.groups[group].reach.in_place
        self._frames = frames
        self._hashes, self._digests = frames.hashes, frames.digests
        self._read_by = np.zeros(num_frames, dtype=np.int64)  # the last step launched that reads the frame
        self._written_by = np.zeros_like(self._read_by)  # and, for the frame of a state, the last one that writes it
        self._reader, self._writer = (
            np.zeros_like(self._read_by),
            np.zeros_like(self._read_by),
        )  # expected rows that do so
        reach, pages = cache.groups[group].reach, range(cache.plan.pages_per_row + 1)
        self._firsts = np.fromiter((reach.needed(n).start for n in pages), dtype=np.int64, count=len(pages))
        self._passes = bool(self._firsts.any())
        self._columns = np.arange(max(len(pages), self._size), dtype=np.int32)
        self._overlap = overlap

    def capture(self, step: SimulatedStep, settled: int) -> None:
        """Record the accesses of a step."""
        if self._carried:
            self._check_pieces(step, settled)
            return
        starts, kvs = step.step.starts, step.step.batch
        writes = step.writes[self._group] = self._cache.rows.slots(kvs, starts, step.step.ends, self._group)
        if settled + 1 < step.number:
            begun = writes[writes % self._size == 0] // self._size
            self._check_not_read(begun, settled)
        reads = step.reads[self._group] = list(self._tables(step.ends, kvs))
        if self._overlap:
            firsts = self._firsts[starts // self._size]
            for part in reads:
                read = self._columns[: part.table.shape[1]] >= firsts[part.works, None]
                self._read_by[part.table[read]] = step.number

    def _tables(self, ends: Lengths, kvs: RunningBatch) -> Iterator[_PageTable]:
        """Page tables of all works, those of similar lengths together, so that less than half of a table is padding."""
        widths = -(-ends // self._size)
        if int(widths.max()) * len(kvs) <= _FEW_PAGES:
            yield _PageTable(np.arange(len(kvs)), self._cache.rows.page_table(kvs, ends, self._group))
            return
        classes = np.frexp(widths)[1]  # widths of one class differ by less than a factor of two
        for each in np.unique(classes):
            works = np.flatnonzero(classes == each)
            some = [kvs.kvs[at] for at in works.tolist()]
            yield _PageTable(works, self._cache.rows.page_table(some, ends[works], self._group))

    def _check_not_read(self, frames: Ids, settled: int) -> None:
        taken = frames[self._read_by[frames] > settled]
        if len(taken):
            raise WrongContent(
                f"frame {int(taken[0])} of group '{self._name}' is begun anew while step "
                f"{int(self._read_by[taken[0]])}, which reads it, is in flight."
            )

    def _check_pieces(self, step: SimulatedStep, settled: int) -> None:
        """Check that the pieces are the step's tokens, that no request touches a frame that another one writes in this
        step, and that none writes a frame that another uses in a step in flight."""
        pieces = step.pieces[self._group]
        if not np.isin(step.step.offsets[1:], np.cumsum(pieces.lengths)).all() or not pieces.targets.all():
            raise WrongContent(f"the pieces of group '{self._name}' are not the tokens of the step.")
        users, sources, targets = step.expected[_owners_of(pieces, step)], pieces.sources, pieces.targets
        foreign = (self._written_by[targets] > settled) & (self._writer[targets] != users)
        foreign |= (self._read_by[targets] > settled) & (self._reader[targets] != users)
        self._writer[targets], self._written_by[targets] = users, step.number
        foreign |= self._writer[targets] != users
        foreign |= (self._written_by[sources] == step.number) & (self._writer[sources] != users)
        self._reader[sources], self._read_by[sources] = users, step.number
        self._reader[sources[self._reader[sources] != users]] = _SEVERAL
        if foreign.any():
            raise WrongContent(
                f"a request writes a frame of group '{self._name}' that another one uses at the same time."
            )

    def run(self, step: SimulatedStep) -> None:
        """Do the captured writes and reads."""
        if self._carried:
            self._carry(step.pieces[self._group], step)
            return
        self._write(step.writes[self._group], step)
        self._check(step.reads[self._group], step)

    def _write(self, slots: Ids, step: SimulatedStep) -> None:
        expected = step.expected
        if len(slots) > len(expected):  # some works compute more than one token
            expected = np.repeat(expected, step.step.counts)
        frames = slots // self._size
        if not frames.all():
            owner = self._expected.owner(int(expected[np.flatnonzero(frames == 0)[0]]))
            raise WrongContent(f"request '{owner}' writes to a page of group '{self._name}' that has no frame.")
        contents = self._expected.hashes[expected, step.step.positions]
        self._hashes.reshape(-1)[slots] = contents if step.garbled is None else contents ^ step.garbled
        written = frames if len(slots) == len(step.ends) else frames[np.flatnonzero(np.diff(frames, prepend=0))]
        self._frames.update_digests(written)

    def _check(self, reads: Sequence[_PageTable], step: SimulatedStep) -> None:
        """Whole pages by their digests, and then, for all works at once, the slots of pages that are not full."""
        expected, whole = step.expected, step.ends // self._size
        firsts = self._firsts[step.step.starts // self._size] if self._passes else None
        last = np.zeros(len(whole), dtype=np.int32)
        for part in reads:
            ends, width = whole[part.works], part.table.shape[1]
            last[part.works] = part.table[np.arange(len(ends)), np.minimum(ends, width - 1)]
            skip = 0 if firsts is None else int(firsts[part.works].min())
            table, columns = part.table[:, skip:], self._columns[skip:width]
            wrong = self._digests[table] != self._expected.digests[expected[part.works], skip:width]
            wrong &= columns < ends.astype(np.int32)[:, None]
            if firsts is not None:
                wrong &= columns >= firsts[part.works, None]
            if wrong.any():
                row, column = (int(at) for at in np.argwhere(wrong)[0])
                count = int(np.count_nonzero(wrong[row]))
                self._complain(int(expected[part.works[row]]), column + skip, int(table[row, column]), count)
        self._check_last(last, expected, whole, step.ends - whole * self._size)

    def _check_last(self, frames: Ids, expected: Lengths, pages: Lengths, lengths: Lengths) -> None:
        """The first `lengths[i]` slots of each frame."""
        by_page = self._expected.hashes_by_page
        wanted = by_page[expected, np.minimum(pages, by_page.shape[1] - 1)]
        wrong = self._hashes[frames] != wanted
        wrong &= self._columns[: self._size] < lengths[:, None]
        if wrong.any():
            row = int(np.argwhere(wrong)[0][0])
            self._complain(int(expected[row]), int(pages[row]), int(frames[row]), 1)

    def _complain(self, row: int, page: int, frame: int, count: int) -> None:
        request = self._expected.owner(row)
        where = f"page {page:,} of request '{request}' in group '{self._name}'"
        if frame == 0:
            what = "has no frame"
        elif not self._hashes[frame].any():
            what = f"is in frame {frame}, where nothing was ever written"
        else:
            right = np.count_nonzero(self._hashes[frame] == self._expected.hashes_by_page[row, page])
            what = f"is in frame {frame}, which holds {right} of its {self._size} tokens"
        raise WrongContent(f"{where} {what}; {count} of the pages that its step reads are wrong.")

    def _carry(self, pieces: Pieces, step: SimulatedStep) -> None:
        """Each piece reads the state of its request so far, if there is one, and writes the new one."""
        owners = _owners_of(pieces, step)
        rows, flat_ends = step.expected[owners], np.cumsum(pieces.lengths)
        stops = flat_ends + (step.step.starts - step.step.offsets[:-1])[owners]
        begins = stops - pieces.lengths
        order = np.arange(len(owners)) - np.searchsorted(owners, owners)  # of each piece within its request
        held, hashes = self._hashes[:, 0], self._expected.hashes
        for turn in range(int(order.max(initial=-1)) + 1):
            now = np.flatnonzero(order == turn)
            expected = np.where(begins[now] > 0, hashes[rows[now], begins[now] - 1], np.uint64(0))
            if step.garbled is not None and turn:
                expected ^= step.garbled[(flat_ends - pieces.lengths)[now] - 1]
            found = np.where(pieces.sources[now] > 0, held[pieces.sources[now]], np.uint64(0))
            wrong = np.flatnonzero(found != expected)
            if len(wrong):
                at = now[wrong[0]]
                raise WrongContent(
                    f"request '{self._expected.owner(int(rows[at]))}' goes on at token {int(begins[at]):,} from frame "
                    f"{int(pieces.sources[at])} of group '{self._name}', which holds something else."
                )
            written = hashes[rows[now], stops[now] - 1]
            held[pieces.targets[now]] = written if step.garbled is None else written ^ step.garbled[flat_ends[now] - 1]


def _owners_of(pieces: Pieces, step: SimulatedStep) -> Lengths:
    """The work of each piece."""
    begins = np.cumsum(pieces.lengths) - pieces.lengths
    found: Lengths = np.searchsorted(step.step.offsets[1:], begins, side="right")
    return found
