"""SimulatedDevice: runs steps without a model, and checks what they read.

It draws the tokens of each request's script. Its frames store prefix hashes (`quire.sim.trace_request`), one for each
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

Pages that no step reads are not checked, and times are estimates (`quire.sim.clock`). For steps in flight, slots and
pages are captured when a step is launched and accessed when it settles, as late as on a device. If a later step reuses
a frame that a step in flight reads, this is reported at its launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.cache import KVCache
from quire.cache.running import Lengths
from quire.cache.states import StatePieces
from quire.errors import WrongContent
from quire.loop import Launched
from quire.memory.runs import replace_ids
from quire.plan.budget import MemoryPlan
from quire.scheduler.step import Step
from quire.sim.clock import VirtualClock
from quire.sim.scripts import Contents, Scripts, scripted
from quire.sim.trace_request import Hashes, page_digests, prefix_hashes
from quire.spec.ids import Ids
from quire.tiers.transfer import Transfer

_SEVERAL = -1


@dataclass(slots=True, eq=False)
class SimulatedStep(Launched):
    """A launched step, which is done at `done` of the virtual clock. It waits for `loads`. `drawn` are the tokens it
    draws, int64, and `ends` where each work ends without its drafts.

    The other fields are for the checks: by group the pieces if requests update a state, the contents, and by group the
    slots it writes and the page tables it reads, one for each part of `Contents.whole`."""

    device: SimulatedDevice
    number: int
    done: float
    loads: list[Transfer]
    ends: Lengths
    drawn: Lengths
    pieces: dict[int, StatePieces]
    contents: Contents | None = None
    writes: dict[int, Ids] = field(default_factory=dict)
    reads: dict[int, list[Ids]] = field(default_factory=dict)

    def wait(self) -> Lengths:
        """Move the clock to its end. Raises WrongContent for what it has read."""
        return self.device.settle(self)


class SimulatedDevice:
    """The device of one cache, on a virtual clock. Without `frames` (`frames_of` creates them) it draws tokens and
    checks nothing; `overlap` says whether a step may be launched before the one before it has settled.

    `end_of` says when a load ends. Each of `delays` returns the seconds that a step waits for something else, in all
    layers together. The caller's CPU time is not counted inside `apart()`. Raises WrongContent if a step reads wrong
    content, when that step settles or when a later one is launched too early.
    """

    def __init__(
        self,
        cache: KVCache,
        frames: Sequence[Frames] | None,
        clock: VirtualClock,
        *,
        end_of: Callable[[Transfer], float],
        delays: Sequence[Callable[[Step], float]],
        apart: Callable[[], AbstractContextManager[None]],
        overlap: bool,
    ) -> None:
        self.scripts = Scripts(cache.plan, checks=frames is not None)
        self._cache, self._clock = cache, clock
        self._end_of, self._delays, self._apart = end_of, delays, apart
        self._carried = tuple(index for index, group in enumerate(cache.groups) if group.reach.in_place)
        self._memory = [_GroupMemory(cache, at, each, overlap) for at, each in enumerate(frames or ())]
        self._launched = self._settled = 0
        self._in_flight: deque[SimulatedStep] = deque()
        cache.parts.moved.append(self.move_frames)

    def launch(self, step: Step, previous: Any) -> SimulatedStep:
        """See `quire.loop.part.Device`. O(works) without checks."""
        fence, batch = self._cache.open_fence(), step.batch
        found = [self._cache.launch(index, batch, step.ends, step.draw_counts) for index in self._carried]
        with self._apart():
            self.scripts.enter(batch)
            self._launched += 1
            drawn = self.scripts.tokens[batch.rows[step.drawers], step.positions[step.draws] + 1].astype(np.int64)
            ends = step.ends - np.maximum(step.draw_counts - 1, 0)
            loads = [load for kv in batch.kvs for load in kv.loads if not load.done]
            arrives, swap = max(map(self._end_of, loads), default=0.0), sum(delay(step) for delay in self._delays)
            done = self._clock.launch(step.starts, step.ends, drafts=step.ends - ends, arrives=arrives, swap=swap)
            pieces = {index: each for index, each in zip(self._carried, found, strict=True) if each is not None}
            own = (self, self._launched, done, loads, ends, drawn, pieces)
            launched = SimulatedStep(step, fence, self._clock.now, bool(loads), *own)
            if self._memory:
                launched.contents = self.scripts.contents(step, ends)
                for memory in self._memory:
                    memory.capture(launched, launched.contents, self._settled)
            self._in_flight.append(launched)
            return launched

    def settle(self, step: SimulatedStep) -> Lengths:
        """Wait for a step: check what it does, and return the tokens it drew. Steps settle in launch order."""
        assert step is self._in_flight.popleft(), "steps settle in the order of their launches"
        with self._apart():
            for load in step.loads:
                load.wait()  # as a forward pass does before it reads them
            if step.contents is not None:
                for memory in self._memory:
                    memory.run(step, step.contents)
            self._settled = step.number
            self._clock.move_to(step.done)
            return step.drawn

    def move_frames(self, group: int, sources: Ids, targets: Ids) -> None:
        """Copy frames behind all launched steps: steps in flight do at `targets` what they have captured."""
        with self._apart():
            for memory in self._memory[group : group + 1]:
                memory.copy(sources, targets, self._in_flight)

    def move(self, launched: SimulatedStep, sources: Lengths, targets: Lengths) -> None:
        """Drafts of the simulator are chains, which lie where they belong."""
        assert not len(sources) and not len(targets)


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


class _GroupMemory:
    """The frames of one group."""

    def __init__(self, cache: KVCache, group: int, frames: Frames, overlap: bool) -> None:
        self._cache = cache
        self._group = group
        self._name = cache.groups[group].name
        self._size = cache.page_size
        self._frames = frames
        self._hashes, self._digests = frames.hashes, frames.digests
        self._read_by: Lengths = np.zeros(len(self._digests), dtype=np.int64)  # the last step launched that reads it
        self._written_by = np.zeros_like(self._read_by)  # and, for the frame of a state, the last one that writes it
        self._reader, self._writer = np.zeros_like(self._read_by), np.zeros_like(self._read_by)  # serials of requests
        reach, pages = cache.groups[group].reach, range(cache.plan.pages_per_row + 1)
        self._carried = reach.in_place
        self._firsts = np.fromiter((reach.needed(n).start for n in pages), dtype=np.int64, count=len(pages))
        self._passes = bool(self._firsts.any())
        self._columns = np.arange(max(len(pages), self._size), dtype=np.int32)
        self._overlap = overlap

    def capture(self, step: SimulatedStep, contents: Contents, settled: int) -> None:
        """Record the accesses of a step."""
        if self._carried:
            self._check_pieces(step, settled)
            return
        batch, starts, rows = step.step.batch, step.step.starts, self._cache.rows
        writes = step.writes[self._group] = rows.slots(batch, starts, step.step.ends, self._group)
        if settled + 1 < step.number:
            begun = writes[writes % self._size == 0] // self._size
            self._check_not_read(begun, settled)
        reads = step.reads[self._group] = []
        for works, _ in contents.whole:
            kvs = batch if len(works) == len(batch) else [batch.kvs[at] for at in works.tolist()]
            table = rows.page_table(kvs, step.ends[works], self._group)
            reads.append(table)
            if self._overlap:
                firsts = self._firsts[starts[works] // self._size]
                self._read_by[table[self._columns[: table.shape[1]] >= firsts[:, None]]] = step.number

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
        users = step.step.batch.serials[_owners_of(pieces, step)]
        sources, targets = pieces.sources, pieces.targets
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

    def copy(self, sources: Ids, targets: Ids, in_flight: Iterable[SimulatedStep]) -> None:
        """What is true of frames `sources`, and what steps in flight do there, is that of `targets` from now on."""
        self._hashes[targets], self._digests[targets] = self._hashes[sources], self._digests[sources]
        for known in (self._read_by, self._written_by, self._reader, self._writer):
            known[targets], known[sources] = known[sources], 0
        for step in in_flight:
            if self._carried:
                pieces = step.pieces[self._group]
                replace_ids(pieces.sources, sources, targets)
                replace_ids(pieces.targets, sources, targets)
                continue
            for table in step.reads[self._group]:
                replace_ids(table, sources, targets)
            frames, places = np.divmod(step.writes[self._group], self._size)
            replace_ids(frames, sources, targets)
            step.writes[self._group] = frames * np.int32(self._size) + places

    def run(self, step: SimulatedStep, contents: Contents) -> None:
        """Do the captured writes and reads."""
        if self._carried:
            self._carry(step.pieces[self._group], step, contents)
            return
        self._write(step.writes[self._group], step, contents.written)
        self._check(step.reads[self._group], step, contents)

    def _write(self, slots: Ids, step: SimulatedStep, contents: Hashes) -> None:
        frames = slots // self._size
        if not frames.all():
            place = int(np.flatnonzero(frames == 0)[0])
            owner = step.step.requests[int(np.searchsorted(step.step.offsets, place, side="right")) - 1].request_id
            raise WrongContent(f"request '{owner}' writes to a page of group '{self._name}' that has no frame.")
        self._hashes.reshape(-1)[slots] = contents
        written = frames if len(slots) == len(step.ends) else frames[np.flatnonzero(np.diff(frames, prepend=0))]
        self._frames.update_digests(written)

    def _check(self, reads: Sequence[Ids], step: SimulatedStep, contents: Contents) -> None:
        """Whole pages by their digests, and then, for all works at once, the slots of pages that are not full."""
        whole = step.ends // self._size
        firsts = self._firsts[step.step.starts // self._size]
        last = np.zeros(len(whole), dtype=np.int32)
        for table, (works, digests) in zip(reads, contents.whole, strict=True):
            ends, width = whole[works], table.shape[1]
            last[works] = table[np.arange(len(works)), np.minimum(ends, width - 1)]
            skip = int(firsts[works].min()) if self._passes else 0
            columns = self._columns[skip:width]
            wrong = self._digests[table[:, skip:]] != digests[:, skip:]
            wrong &= columns < ends.astype(np.int32)[:, None]
            if self._passes:
                wrong &= columns >= firsts[works, None]
            if wrong.any():
                row, column = (int(at) for at in np.argwhere(wrong)[0])
                count = int(np.count_nonzero(wrong[row]))
                self._complain(step, int(works[row]), column + skip, int(table[row, column + skip]), count)
        wrong = self._hashes[last] != contents.last
        wrong &= self._columns[: self._size] < (step.ends - whole * self._size)[:, None]
        if wrong.any():
            work = int(np.argwhere(wrong)[0][0])
            self._complain(step, work, int(whole[work]), int(last[work]), 1)

    def _complain(self, step: SimulatedStep, work: int, page: int, frame: int, count: int) -> None:
        (request,) = scripted([step.step.requests[work]])
        where = f"page {page:,} of request '{request.request_id}' in group '{self._name}'"
        if frame == 0:
            what = "has no frame"
        elif not self._hashes[frame].any():
            what = f"is in frame {frame}, where nothing was ever written"
        else:
            wanted = prefix_hashes(request.namespace, request.script)[page * self._size :][: self._size]
            right = np.count_nonzero(self._hashes[frame, : len(wanted)] == wanted)
            what = f"is in frame {frame}, which holds {right} of its {self._size} tokens"
        raise WrongContent(f"{where} {what}; {count} of the pages that its step reads are wrong.")

    def _carry(self, pieces: StatePieces, step: SimulatedStep, contents: Contents) -> None:
        """Each piece reads the state of its request so far, if there is one, and writes the new one."""
        owners, flat_ends = _owners_of(pieces, step), np.cumsum(pieces.lengths)
        order = np.arange(len(owners)) - np.searchsorted(owners, owners)  # number of each piece within its request
        flat_starts, held = flat_ends - pieces.lengths, self._hashes[:, 0]
        expected = np.where(order > 0, contents.written[flat_starts - 1], contents.before[owners])
        for turn in range(int(order.max(initial=-1)) + 1):
            now = np.flatnonzero(order == turn)
            found = np.where(pieces.sources[now] > 0, held[pieces.sources[now]], np.uint64(0))
            wrong = now[found != expected[now]]
            if len(wrong):
                at, work = wrong[0], owners[wrong[0]]
                token = int(step.step.starts[work] + flat_starts[at] - step.step.offsets[work])
                raise WrongContent(
                    f"request '{step.step.requests[work].request_id}' goes on at token {token:,} from frame "
                    f"{int(pieces.sources[at])} of group '{self._name}', which holds something else."
                )
            held[pieces.targets[now]] = contents.written[flat_ends[now] - 1]


def _owners_of(pieces: StatePieces, step: SimulatedStep) -> Lengths:
    """The work of each piece."""
    begins = np.cumsum(pieces.lengths) - pieces.lengths
    found: Lengths = np.searchsorted(step.step.offsets[1:], begins, side="right")
    return found
