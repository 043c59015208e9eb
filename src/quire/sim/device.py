"""SimulatedDevice: runs steps without a model, and checks what they read.

It draws the tokens of each request's script. Its frames hold names of contents (`quire.sim.names`), one for each token
slot of each group: a name stands for the namespace and all tokens up to its own, so for the position too. All layers
and fields of a group are written at the same slots by the same step, so one name stands for all of them; the array that
it is in stands for the group.

Every step does for every group what a forward pass would, in the order of launches:

    write    the names of its new tokens, to the slots that the cache gave
    read     every page that attention reads for a request, from the first that its reach needs to its last token

Why nothing escapes. What is read is compared with what must be there, completely and in every step: whole pages by
their digest, the last page slot by slot. The digest of a frame is computed from all of its slots again whenever one of
them is written, and what a request must find is computed from its script alone, before it runs. No result of an earlier
step is believed: the page table is taken from the cache for each step, and each entry's frame is looked up. So the
first step that reads a page which is missing, short, stale, in the wrong place or another's reports it, but for two
different contents with one 64-bit number. Digests make it affordable: a decode step compares `context / page_size`
numbers.

What it does not see: pages that no step reads, and times. For steps in flight, slots and pages are captured when a step
is launched and touched when it settles, as late as a device may; and a later step that begins a page anew, or rewrites
a carried frame, which a step in flight reads is reported when it is launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.cache import KVCache, RunningBatch
from quire.cache.states import Pieces
from quire.errors import WrongContent
from quire.plan.budget import MemoryPlan
from quire.scheduler.request import RequestState
from quire.scheduler.step import Step
from quire.sim.names import NameChain, Names, page_weights
from quire.sim.scripted_request import ScriptedRequest, scripted
from quire.spec.ids import Ids

Lengths = npt.NDArray[np.int64]
_SEVERAL = -1
_FEW_PAGES = 16384
"""A step that reads no more than this is compared as one table, padding and all."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The works of a step as arrays: work i computes tokens `starts[i]..ends[i] - 1` of its request."""

    starts: Lengths
    ends: Lengths

    @classmethod
    def of(cls, step: Step) -> Rows:
        """The works of a step, in its order."""
        return cls(step.starts, step.ends)


@dataclass(frozen=True, slots=True)
class _Reads:
    """Page tables of some works of a step, of like lengths: `rows` says which, `table` int32 `[rows, pages]`."""

    rows: Lengths
    table: Ids


@dataclass(slots=True)
class SimulatedStep:
    """A launched step. `drawn` are the tokens it draws, int64. The rest is what the device needs to check it: by group
    the pieces where requests carry a frame, the slots it writes and the tables it reads, and the lane of each work."""

    number: int
    step: Step
    fence: int
    rows: Rows
    drawn: Lengths
    pieces: dict[int, Pieces]
    writes: dict[int, Ids] = field(default_factory=dict)
    reads: dict[int, list[_Reads]] = field(default_factory=dict)
    lanes: Lengths = field(default_factory=lambda: np.empty(0, dtype=np.int64))


class SimulatedDevice:
    """The device of one cache. `check` off draws tokens and nothing else; `overlap` says whether a step may be launched
    before the one before it has settled. `frames` are given where others copy them too (`frames_of` makes them).

    Raises WrongContent where a step reads what it must not, at the settling of that step or at a launch that comes too
    early.
    """

    def __init__(
        self, cache: KVCache, *, check: bool = True, overlap: bool = False, frames: Sequence[Frames] | None = None
    ) -> None:
        self._lanes = _Lanes(cache) if check else None
        self._memory: tuple[_Memory, ...] = ()
        if self._lanes is not None:
            frames = frames if frames is not None else self.frames_of(cache.plan)
            self._memory = tuple(_Memory(cache, at, each, self._lanes, overlap) for at, each in enumerate(frames))
        self._launched = self._settled = 0
        plan = cache.plan  # memory is taken where something is written
        self._outputs: Ids = np.zeros((plan.max_requests, plan.pages_per_row * plan.tokens_per_page), dtype=np.int32)
        self._serials: Lengths = np.zeros(plan.max_requests, dtype=np.int64)  # whose outputs are in the row

    @staticmethod
    def frames_of(plan: MemoryPlan) -> list[Frames]:
        """Frames of each group, in which nothing was ever written."""
        width = {True: 1, False: plan.page_size}
        return [Frames(plan.frames_of(at), width[group.reach.carried]) for at, group in enumerate(plan.groups)]

    def launch(self, scheduled: Step, fence: int, rows: Rows, pieces: dict[int, Pieces]) -> SimulatedStep:
        """Start a step. `fence` was opened for it, and `pieces` are `KVCache.launch` of every group that has any.
        O(works) without checks."""
        requests = scripted(scheduled.requests)
        self._launched += 1
        step = SimulatedStep(self._launched, scheduled, fence, rows, self._draw(scheduled, requests, rows), pieces)
        if self._lanes is not None:
            step.lanes = self._lanes.of(requests, self._launched, self._settled)
            self._lanes.check_inputs(requests, rows)
            for memory in self._memory:
                memory.capture(step, self._settled)
        return step

    def _draw(self, step: Step, requests: Sequence[ScriptedRequest], rows: Rows) -> Lengths:
        """The next tokens of those that draw. A request's outputs are written into its row when it first computes."""
        own, drawers = step.batch.rows, step.drawers
        for at in (self._serials[own] != step.batch.serials).nonzero()[0].tolist():
            script, first = requests[at].script, requests[at].num_prompt_tokens
            self._outputs[own[at], first : len(script)] = script[first:]
        self._serials[own] = step.batch.serials
        return self._outputs[own[drawers], rows.ends[drawers]].astype(np.int64)

    def settle(self, step: SimulatedStep) -> Lengths:
        """Wait for a step: check what it does, and return the tokens it drew. Steps settle in launch order."""
        assert step.number == self._settled + 1, "steps settle in the order of their launches"
        for memory in self._memory:
            memory.run(step)
        self._settled = step.number
        return step.drawn


class Frames:
    """The frames of one group: `names`, uint64 `[frames + 1, slots]`, and a digest of the names of each frame."""

    def __init__(self, num_frames: int, slots: int) -> None:
        self.names: Names = np.zeros((num_frames + 1, slots), dtype=np.uint64)
        self.digests: Names = np.zeros(num_frames + 1, dtype=np.uint64)
        self._weights = page_weights(slots)

    def write(self, frames: Ids, names: Names) -> None:
        """Whole frames hold these names, `[frames, slots]`."""
        self.names[frames] = names
        self.renew(frames)

    def renew(self, frames: Ids) -> None:
        """The names of these frames have changed."""
        self.digests[frames] = (self.names[frames] * self._weights).sum(axis=1, dtype=np.uint64)


class _Lanes:
    """What requests must find: a row of names and of page digests for each request that runs."""

    def __init__(self, cache: KVCache) -> None:
        size, longest = cache.page_size, cache.plan.pages_per_row * cache.page_size
        self.chain = NameChain(longest + 1, size)
        # Steps in flight may hold as many requests again as run.
        self._owners: list[ScriptedRequest | None] = [None] * (2 * cache.plan.max_requests + 1)
        self._last_used = np.zeros(len(self._owners), dtype=np.int64)
        self._free = list(range(len(self._owners)))
        self._page_size = size
        # Zeroed memory is taken only where something is written, so a lane costs what its longest request does.
        self.names: Names = np.zeros((len(self._owners), longest), dtype=np.uint64)
        self.names_by_page: Names = self.names.reshape(len(self._owners), -1, size)
        self.digests: Names = np.zeros((len(self._owners), cache.plan.pages_per_row), dtype=np.uint64)

    def of(self, requests: Sequence[ScriptedRequest], launched: int, settled: int) -> Lengths:
        """The lane of each request in the step that is being launched; it has one until it ends or is preempted."""
        begun = [request for request in requests if request.lane < 0]
        if begun:
            self._collect(settled)
            for request in begun:
                self._begin(request)
        lanes = np.fromiter([request.lane for request in requests], dtype=np.int64, count=len(requests))
        self._last_used[lanes] = launched
        return lanes

    def check_inputs(self, requests: Sequence[ScriptedRequest], rows: Rows) -> None:
        """What prompts compute are the tokens of their scripts; single tokens are compared once, at the end."""
        for at in np.flatnonzero(rows.ends - rows.starts > 1).tolist():
            part = slice(int(rows.starts[at]), int(rows.ends[at]))
            if not np.array_equal(requests[at].tokens[part], requests[at].script[part]):
                raise WrongContent(f"request '{requests[at].request_id}' computes tokens that are not its own.")

    def owner(self, lane: int) -> str:
        """The request of a lane, for messages."""
        owner = self._owners[lane]
        return owner.request_id if owner is not None else "?"

    def _begin(self, request: ScriptedRequest) -> None:
        lane = request.lane = self._free.pop()
        self._owners[lane] = request
        names = self.chain.names(request.namespace, request.script)
        whole = len(names) // self._page_size
        self.names[lane, : len(names)] = names
        self.digests[lane, :whole] = self.chain.digests(names[: whole * self._page_size])

    def _collect(self, settled: int) -> None:
        """Take back the lanes of requests that do not run and are in no step in flight."""
        for lane, owner in enumerate(self._owners):
            if owner is not None and owner.state is not RequestState.RUNNING and self._last_used[lane] <= settled:
                owner.lane = -1
                self._owners[lane] = None
                self._free.append(lane)


class _Memory:
    """The frames of one group."""

    def __init__(self, cache: KVCache, group: int, frames: Frames, lanes: _Lanes, overlap: bool) -> None:
        self._cache = cache
        self._group = group
        self._name = cache.groups[group].name
        self._lanes = lanes
        self._size = cache.page_size
        num_frames = cache.plan.frames_of(group) + 1
        self._carried = cache.groups[group].reach.carried
        self._frames = frames
        self._held, self._digests = frames.names, frames.digests
        self._read_by = np.zeros(num_frames, dtype=np.int64)  # the last step launched that reads the frame
        self._written_by = np.zeros_like(self._read_by)  # and, of a carried frame, the last one that writes it
        self._reader, self._writer = np.zeros_like(self._read_by), np.zeros_like(self._read_by)  # lanes that do so
        reach, pages = cache.groups[group].reach, range(cache.plan.pages_per_row + 1)
        self._firsts = np.fromiter((reach.needed(n).start for n in pages), dtype=np.int64, count=len(pages))
        self._passes = bool(self._firsts.any())
        self._columns = np.arange(max(len(pages), self._size), dtype=np.int32)
        self._overlap = overlap

    # -- launching

    def capture(self, step: SimulatedStep, settled: int) -> None:
        """Take down what the step will touch."""
        if self._carried:
            self._check_pieces(step, settled)
            return
        rows, kvs = step.rows, step.step.batch
        writes = step.writes[self._group] = self._cache.rows.slots(kvs, rows.starts, rows.ends, self._group)
        if settled + 1 < step.number:
            begun = writes[writes % self._size == 0] // self._size
            self._check_nobody_reads(begun, settled)
        reads = step.reads[self._group] = list(self._tables(rows, kvs))
        if self._overlap:
            firsts = self._firsts[rows.starts // self._size]
            for part in reads:
                read = self._columns[: part.table.shape[1]] >= firsts[part.rows, None]
                self._read_by[part.table[read]] = step.number

    def _tables(self, rows: Rows, kvs: RunningBatch) -> Iterator[_Reads]:
        """Page tables of all works, those of like lengths together, so that little of a table is padding."""
        widths = -(-rows.ends // self._size)
        if int(widths.max()) * len(kvs) <= _FEW_PAGES:
            yield _Reads(np.arange(len(kvs)), self._cache.rows.page_table(kvs, rows.ends, self._group))
            return
        order = np.argsort(-widths)
        for part in _alike(widths[order]):
            members = order[part]
            table = self._cache.rows.page_table(
                [kvs.kvs[at] for at in members.tolist()], rows.ends[members], self._group
            )
            yield _Reads(members, table)

    def _check_nobody_reads(self, frames: Ids, settled: int) -> None:
        taken = frames[self._read_by[frames] > settled]
        if len(taken):
            raise WrongContent(
                f"frame {int(taken[0])} of group '{self._name}' is begun anew while step "
                f"{int(self._read_by[taken[0]])}, which reads it, is in flight."
            )

    def _check_pieces(self, step: SimulatedStep, settled: int) -> None:
        """The pieces are the step's tokens, and no request touches a frame that another one writes in this step, or
        writes one that another uses in a step in flight."""
        pieces, rows = step.pieces[self._group], step.rows
        ends = np.cumsum(pieces.lengths)
        if not np.isin(np.cumsum(rows.ends - rows.starts), ends).all() or not pieces.targets.all():
            raise WrongContent(f"the pieces of group '{self._name}' are not the tokens of the step.")
        owners = _owners_of(pieces, rows)
        users, sources, targets = step.lanes[owners], pieces.sources, pieces.targets
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

    # -- running

    def run(self, step: SimulatedStep) -> None:
        """Write and read what was captured."""
        if self._carried:
            self._carry(step.pieces[self._group], step)
            return
        self._write(step.writes[self._group], step)
        self._check(step.reads[self._group], step)

    def _write(self, slots: Ids, step: SimulatedStep) -> None:
        rows, lanes, positions = step.rows, step.lanes, step.rows.starts
        if len(slots) > len(positions):  # some works compute more than one token
            counts = rows.ends - rows.starts
            positions = np.arange(len(slots)) + np.repeat(rows.starts - (np.cumsum(counts) - counts), counts)
            lanes = np.repeat(lanes, counts)
        frames = slots // self._size
        if not frames.all():
            owner = self._lanes.owner(int(lanes[np.flatnonzero(frames == 0)[0]]))
            raise WrongContent(f"request '{owner}' writes to a page of group '{self._name}' that has no frame.")
        self._held.reshape(-1)[slots] = self._lanes.names[lanes, positions]
        touched = frames if len(slots) == len(rows.starts) else frames[np.flatnonzero(np.diff(frames, prepend=0))]
        self._frames.renew(touched)

    def _check(self, reads: Sequence[_Reads], step: SimulatedStep) -> None:
        """Whole pages by their digests, and then, for all works at once, the slots of pages that are not full."""
        rows, lanes = step.rows, step.lanes
        whole = rows.ends // self._size
        firsts = self._firsts[rows.starts // self._size] if self._passes else None
        last = np.zeros(len(whole), dtype=np.int32)
        for part in reads:
            ends, width = whole[part.rows], part.table.shape[1]
            last[part.rows] = part.table[np.arange(len(ends)), np.minimum(ends, width - 1)]
            skip = 0 if firsts is None else int(firsts[part.rows].min())
            table, columns = part.table[:, skip:], self._columns[skip:width]
            wrong = self._digests[table] != self._lanes.digests[lanes[part.rows], skip:width]
            wrong &= columns < ends.astype(np.int32)[:, None]
            if firsts is not None:
                wrong &= columns >= firsts[part.rows, None]
            if wrong.any():
                row, column = (int(at) for at in np.argwhere(wrong)[0])
                count = int(np.count_nonzero(wrong[row]))
                self._complain(int(lanes[part.rows[row]]), column + skip, int(table[row, column]), count)
        self._check_last(last, lanes, whole, rows.ends - whole * self._size)

    def _check_last(self, frames: Ids, lanes: Lengths, pages: Lengths, lengths: Lengths) -> None:
        """The first `lengths[i]` slots of each frame."""
        wanted = self._lanes.names_by_page[lanes, np.minimum(pages, self._lanes.names_by_page.shape[1] - 1)]
        wrong = self._held[frames] != wanted
        wrong &= self._columns[: self._size] < lengths[:, None]
        if wrong.any():
            row = int(np.argwhere(wrong)[0][0])
            self._complain(int(lanes[row]), int(pages[row]), int(frames[row]), 1)

    def _complain(self, lane: int, page: int, frame: int, count: int) -> None:
        request = self._lanes.owner(lane)
        where = f"page {page:,} of request '{request}' in group '{self._name}'"
        if frame == 0:
            what = "has no frame"
        elif not self._held[frame].any():
            what = f"is in frame {frame}, where nothing was ever written"
        else:
            missing = np.count_nonzero(self._held[frame] == self._lanes.names[lane, page * self._size :][: self._size])
            what = f"is in frame {frame}, which holds {missing} of its {self._size} tokens"
        raise WrongContent(f"{where} {what}; {count} of the pages that its step reads are wrong.")

    def _carry(self, pieces: Pieces, step: SimulatedStep) -> None:
        """Each piece reads what its request holds so far, if that is anything, and writes what it holds then."""
        rows = step.rows
        owners = _owners_of(pieces, rows)
        ends = np.cumsum(pieces.lengths)
        starts = ends - pieces.lengths
        flat = rows.starts - (np.cumsum(rows.ends - rows.starts) - (rows.ends - rows.starts))  # position of flat row 0
        lanes, begins, stops = step.lanes[owners], starts + flat[owners], ends + flat[owners]
        order = np.arange(len(owners)) - np.searchsorted(owners, owners)  # of each piece within its request
        held, names = self._held[:, 0], self._lanes.names
        for turn in range(int(order.max(initial=-1)) + 1):
            now = np.flatnonzero(order == turn)
            expected = np.where(begins[now] > 0, names[lanes[now], begins[now] - 1], np.uint64(0))
            found = np.where(pieces.sources[now] > 0, held[pieces.sources[now]], np.uint64(0))
            wrong = np.flatnonzero(found != expected)
            if len(wrong):
                at = now[wrong[0]]
                raise WrongContent(
                    f"request '{self._lanes.owner(int(lanes[at]))}' goes on at token {int(begins[at]):,} from frame "
                    f"{int(pieces.sources[at])} of group '{self._name}', which holds something else."
                )
            held[pieces.targets[now]] = names[lanes[now], stops[now] - 1]


def _alike(widths: Lengths, start: int = 0) -> Iterator[slice]:
    """Parts of `widths`, which fall, that are cheap as tables as wide as their first row: they are cut where that saves
    the most, as long as it saves more than another table costs."""
    cuts = np.arange(1, len(widths))
    saved = (widths[0] - widths[1:]) * (len(widths) - cuts)
    best = int(saved.argmax()) if len(saved) else 0
    if not len(saved) or saved[best] < _FEW_PAGES:
        yield slice(start, start + len(widths))
        return
    yield from _alike(widths[: best + 1], start)
    yield from _alike(widths[best + 1 :], start + best + 1)


def _owners_of(pieces: Pieces, rows: Rows) -> Lengths:
    """The work of each piece."""
    ends = np.cumsum(pieces.lengths)
    found: Lengths = np.searchsorted(np.cumsum(rows.ends - rows.starts), ends - pieces.lengths, side="right")
    return found
