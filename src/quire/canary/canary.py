"""Canary: cached pages of the device are looked at again, and what is found.

    launched     a step is about to write: its slots are noted, and the pages that it begins are marked
    committed    pages became cached: they are watched, and wait for a stamp
    admitted     a request begins on cached pages: these must be those of its prompt, and are looked at next
    look         between two steps, as far as the budget goes: stamps, then pages of hits, then the next pages of a
                 sweep over the tree, which also finds pages that came from lower tiers

Nothing here waits for the device. On one that computes asynchronously, digests are compared when they have arrived.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from quire.cache.offload import Cached, CacheParts
from quire.cache.request_kv import RequestKV
from quire.canary.budget import Budget
from quire.canary.chain import Words, chain, next_chains, seed_of
from quire.canary.digest import FrameDigests, Reading
from quire.canary.finding import Finding, Kind
from quire.canary.stamps import Asked, Stamps
from quire.canary.writes import Longs, Writes
from quire.counters import counter, gauge
from quire.memory.pool import Pool
from quire.memory.residency import State
from quire.memory.runs import replace_ids
from quire.prefix.node import TOKEN_BYTES, Node
from quire.spec.events import Namespace
from quire.spec.ids import Ids, Tier

_IDLE_S = 0.25
_PIECE = 64  # pages of an edge that a sweep takes at once
_MOST_NAMES = 4096
_MOST_IN_FLIGHT = 4  # readings
_MOST_HITS = 1 << 16  # pages


@dataclass(slots=True)
class _Watched:
    """One group of frames on the device."""

    index: int
    name: str
    digests: FrameDigests
    stamps: Stamps
    writes: Writes | None  # None: its frames have no slots of tokens
    owners: Longs  # index: page; serial number of the request that wrote it; 0: a lower tier had it


class _Looking(NamedTuple):
    """A reading of frames that has not been compared yet."""

    group: _Watched
    asked: Asked
    reading: Reading
    stamps: bool  # for stamps; otherwise to compare with them


@dataclass(kw_only=True)
class CanaryCounters:
    """Counters of a canary, and of what its findings led to."""

    PREFIX: ClassVar = "canary_"
    share: float = gauge("Share of the time that the canary may take.")
    seconds: float = counter("Seconds that the canary has taken.")
    stamped_pages: int = counter("Frames of cached pages that got a stamp.")
    hit_pages: int = counter("Frames that were looked at because a request began on them.")
    swept_pages: int = counter("Frames that a sweep looked at.")
    found_pages: int = counter("Frames that were not what they had been.")
    waiting_pages: int = gauge("Frames that wait for a stamp.")
    sweeps: int = counter("Sweeps over all cached pages that have ended.")
    sweep_seconds: float = gauge("Seconds that the last sweep took.")
    sweep_steps: int = gauge("Steps during the last sweep.")
    quarantined_frames: int = counter("Of these, frames that were set aside.")
    recomputed_requests: int = counter("Requests that were computed again because they had read such a page.")


class Canary:
    """The canary of one cache on `pools`, one for each group. Layers in `except_for` are those of drafts: wrong bytes
    there cost a draft, never a token. `share` is that of the time, math.inf for everything at once: then each call of
    `look` looks at the whole cache. `follow` is called after frames are read on a device's stream: from then on, copies
    that overwrite them have to follow what is on that stream."""

    def __init__(
        self,
        parts: CacheParts,
        pools: Sequence[Pool],
        *,
        share: float,
        except_for: Sequence[int] = (),
        follow: Callable[[], None] = lambda: None,
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._parts = parts
        self._follow = follow
        self._tree, self._size = parts.tree, parts.plan.page_size
        self._anchor = parts.frames.anchor(Tier.DEVICE)
        num_pages = self._anchor.num_pages
        self._groups = [
            _Watched(
                index=group.index,
                name=group.name,
                digests=FrameDigests(pools[group.index], except_for),
                stamps=Stamps(group.table, group.num_frames),
                writes=None if group.reach.in_place else Writes(group.num_frames, self._size),
                owners=np.zeros(num_pages + 1, dtype=np.int64),
            )
            for group in parts.groups
            if not group.frames.are_page_ids
        ]
        self._by_index = {group.index: group for group in self._groups}
        self._marks_anchor = all(group.stamps.column is not self._anchor for group in self._groups)
        self._chains: Words = np.zeros(num_pages + 1, dtype=np.uint64)
        self._first: Longs = np.zeros(num_pages + 1, dtype=np.int64)  # position of each watched page
        self._seeds: OrderedDict[Namespace, int] = OrderedDict()
        self._names: OrderedDict[int, str] = OrderedDict()  # requests by serial number
        self._seconds = seconds
        self.budget = Budget(share)
        self.turn = 0  # steps launched
        self._last = -math.inf  # when `look` was called
        self._hits: deque[tuple[int, Ids]] = deque()  # and the turn of each
        self._in_flight: deque[_Looking] = deque()
        self._num_hits = 0  # pages in there
        self._found: list[Finding] = []
        self._walk = self._pieces()
        self._began: tuple[float, int] = (seconds(), 0)  # the sweep: when, and in which turn
        self.totals = CanaryCounters()
        parts.committed.append(self._committed)
        parts.moved.append(self.moved_frames)

    # -- what the engine tells

    def launched(
        self, positions: Longs, serials: Longs, counts: Longs, names: Sequence[Any], batches: Sequence[Any]
    ) -> None:
        """A step is about to run that writes `batches[group].slots` at these positions, `counts[i]` of them for the
        request `serials[i]`. `names` are its requests, or nothing if they are those of the step before."""
        began = self._seconds()
        self.turn += 1
        for request, serial in zip(names, serials.tolist(), strict=False):
            self._names[serial] = request.request_id
        while len(self._names) > _MOST_NAMES:
            self._names.popitem(last=False)
        marks = self.budget.saved_s > 0
        for group in self._groups:
            if group.writes is not None:
                slots = batches[group.index].slots
                group.writes.launched(self.turn, slots, positions, serials, counts)
                if marks and len(begun := slots[slots % self._size == 0]):
                    group.digests.mark(begun // self._size)
        self.budget.beside(self._seconds() - began)

    def moved(self, group: int, sources: Ids, targets: Ids) -> None:
        """What was written to slots was copied to others."""
        found = self._by_index.get(group)
        if found is not None and found.writes is not None:
            self._overwritten(found)
            found.writes.moved(sources, targets)

    def moved_frames(self, group: int, sources: Ids, targets: Ids) -> None:
        """Frames are elsewhere from now on, with their bytes. What is being read was read where it was."""
        found = self._by_index[group]
        self._overwritten(found)
        found.stamps.moved(sources, targets)
        if found.writes is not None:
            found.writes.moved_frames(sources, targets)
        for looking in self._in_flight:
            if looking.group is found:
                replace_ids(looking.asked.frames, sources, targets)

    def admitted(self, kv: RequestKV, tokens: Ids) -> None:
        """A request begins on cached pages. Those must be of its first tokens."""
        if not kv.num_cached:
            return
        began = self._seconds()
        pages = self._parts.rows.pages[kv.row, : kv.num_cached // self._size].copy()
        expected = chain(self._seed(kv.namespace), tokens[: kv.num_cached], 0, self._size)
        known = self._anchor.has(pages, State.WATCHED)
        for page in pages[known & (self._chains[pages] != expected)].tolist():
            self._find(Kind.WRONG_PREFIX, self._groups[0], page)
        self._hits.append((self.turn, pages))
        self._num_hits += len(pages)
        while self._num_hits > _MOST_HITS:
            self._num_hits -= len(self._hits.popleft()[1])  # the sweep looks at them
        self.budget.beside(self._seconds() - began)

    # -- between two steps

    @property
    def is_due(self) -> bool:
        """Whether `look` should be called although there is no step: it has waited long enough."""
        return self._seconds() - self._last >= _IDLE_S and bool(self._tree.num_pages)

    def look(self) -> list[Finding]:
        """Look at as many pages as the budget allows. Returns the damage that was found since the last call."""
        began = self._last = self._seconds()
        for group in self._groups:
            if group.writes is not None and group.writes.is_full:
                self._overwritten(group)
        if self._in_flight:
            self._compare()
        if self.budget.earn(began) and len(self._in_flight) < _MOST_IN_FLIGHT:
            num_reads = len(self._in_flight)
            num_items = self._read(self.budget.items())
            if len(self._in_flight) > num_reads:
                self._follow()
            self._compare()
            self.budget.spend(self._seconds() - began, num_items)
        else:
            self.budget.beside(self._seconds() - began)
        found, self._found = self._found, []
        return found

    def counters(self) -> CanaryCounters:
        """Counters and gauges now."""
        return replace(
            self.totals,
            share=min(self.budget.share, 1.0),
            seconds=self.budget.spent_s,
            waiting_pages=sum(group.stamps.num_due for group in self._groups),
        )

    # -- inside: reading

    def _read(self, most: int) -> int:
        """Ask for digests of about `most` frames at most, a quarter of them for the sweep; returns how many."""
        swept = most // 4
        left = most - swept
        for group in self._groups:
            if left > 0 and group.stamps.num_due:
                self._overwritten(group)
                left -= self._ask(group, group.stamps.due(left), stamps=True)
        while left > 0 and self._hits:
            turn, pages = self._hits.popleft()
            if len(pages) > left:
                self._hits.appendleft((turn, pages[left:]))
                pages = pages[:left]
            self._num_hits -= len(pages)
            asked = self._again(pages, turn)
            left -= asked
            self.totals.hit_pages += asked
        left += swept
        while left > 0 and (piece := next(self._walk, None)) is not None:
            asked = self._again(piece, self.turn + 1)
            left -= max(1, asked)
            self.totals.swept_pages += asked
        if left > 0:
            self._swept()
        return max(1, most - left)

    def _again(self, pages: Ids, turn: int) -> int:
        """Look again at those of these pages that have a stamp, and were not looked at since `turn`. Returns the
        number of frames."""
        return sum(self._ask(group, group.stamps.stamped(pages, turn), stamps=False) for group in self._groups)

    def _ask(self, group: _Watched, asked: Asked, *, stamps: bool) -> int:
        if len(asked.pages):
            self._in_flight.append(_Looking(group, asked, group.digests.read(asked.frames), stamps))
        return len(asked.pages)

    def _compare(self) -> None:
        """Compare the digests that have arrived, in the order in which they were asked for."""
        while self._in_flight and self._in_flight[0].reading.ready:
            group, asked, reading, stamps = self._in_flight.popleft()
            digests, marks = reading.numpy()
            self.budget.spend(reading.seconds, len(asked.pages), on_device=True)
            if not stamps:
                self._overwritten(group)  # the better explanation
                for page in group.stamps.differ(asked, digests, self.turn).tolist():
                    self._find(Kind.BYTES, group, page)
                continue
            here = group.stamps.stamp(asked, digests)
            self.totals.stamped_pages += int(np.count_nonzero(here))
            owners = group.owners[asked.pages]
            own = here & (owners > 0)
            for page in asked.pages[own & (marks > 0)].tolist():
                self._find(Kind.UNWRITTEN, group, page)
            if group.writes is not None:
                own &= ~group.writes.are_whole(asked.frames, self._first[asked.pages], owners)
                for page in asked.pages[own].tolist():
                    self._find(Kind.WRONG_SLOT, group, page)

    def _overwritten(self, group: _Watched) -> None:
        """Sort in the writes of the last steps. None of them was to a page that was cached."""
        if group.writes is None:
            return
        frames, turns = group.writes.sort_in()
        if len(frames):
            for page in group.stamps.overwritten(frames, turns).tolist():
                self._find(Kind.OVERWRITTEN, group, page)

    def _find(self, kind: Kind, group: _Watched, page: int) -> None:
        frame = int(group.stamps.column.frame[page])
        step, serial = group.writes.last(frame) if group.writes is not None else (0, 0)
        group.stamps.column.unmark(np.array([page], dtype=np.int32), State.STAMPED)  # so each damage is found once
        beside = {}
        for other in (frame - 1, frame + 1):
            if group.writes is not None and 1 <= other <= self._parts.groups[group.index].num_frames:
                at, who = group.writes.last(other)
                beside[str(other)] = [at, self._names.get(who, "")]
        self.totals.found_pages += 1
        self._found.append(
            Finding(
                kind=kind,
                group=group.name,
                index=group.index,
                page=page,
                frame=frame,
                position=int(self._first[page]),
                step=self.turn,
                good_step=group.stamps.last_good(page),
                wrote_step=step,
                wrote_request=self._names.get(serial, "a load, or a request that is not known any more"),
                neighbours=beside,
                fields=group.digests.describe(frame),
            )
        )

    # -- inside: pages become cached

    def _committed(self, cached: Sequence[Cached]) -> None:
        began = self._seconds()
        serials = self._parts.rows.serials
        single = [each for each in cached if 0 < each.new == len(each.pages) - 1]
        if len(single) < 2 or not self._watch_each(single):
            single = []
        for kv, pages, new in cached:
            if new < len(pages) and not (single and 0 < new == len(pages) - 1):
                previous = int(pages[new - 1]) if new else 0
                self._watch(kv.lease.node, pages[new:].copy(), new, previous, owner=int(serials[kv.row]))
        self.budget.beside(self._seconds() - began)

    def _watch_each(self, cached: Sequence[Cached]) -> bool:
        """As `_watch`, of one page after others in each of several requests, with the same number of calls for any
        number of them: so decodes cache their pages. False if the chain of a page before is not known; nothing has
        changed then."""
        size, rows = self._size, np.array([kv.row for kv, _, _ in cached])
        news = np.array([new for _, _, new in cached])
        before, pages = (self._parts.rows.pages[rows, at] for at in (news - 1, news))
        if not self._anchor.has(before, State.WATCHED).all() or self._anchor.has(pages, State.WATCHED).any():
            return False
        width = size * TOKEN_BYTES
        starts = [(new - kv.lease.node.depth) * width for kv, _, new in cached]
        if min(starts) < 0:
            return False
        keys = (kv.lease.node.key[at : at + width] for (kv, _, _), at in zip(cached, starts, strict=True))
        tokens = np.frombuffer(b"".join(keys), dtype=np.int32).reshape(-1, size)
        self._first[pages] = news * size
        self._chains[pages] = next_chains(self._chains[before], tokens, (news * size).astype(np.uint64))
        self._watched(pages, pages, self._parts.rows.serials[rows])
        return True

    def _watch(self, node: Node, pages: Ids, first: int, previous: int, *, owner: int) -> None:
        """Watch pages on the path to `node`: page `first` of the path, after page `previous`, and those after it."""
        known = self._anchor.has(pages, State.WATCHED)
        if not known.all():
            self._chains[pages] = self._chain_of(node, first, len(pages), previous)
            self._first[pages] = (first + np.arange(len(pages))) * self._size
        self._watched(pages, pages[~known], np.full(len(pages), owner))

    def _watched(self, pages: Ids, new: Ids, owners: Longs) -> None:
        """Pages whose chains are known, those that are `new` among them, get stamps."""
        if self._marks_anchor and len(new):
            self._anchor.mark(new, State.WATCHED)
        for group in self._groups:
            fresh = group.stamps.watch(pages, self.turn)
            group.owners[pages[fresh]] = owners[fresh]

    def _chain_of(self, node: Node, first: int, count: int, previous: int) -> Words:
        """The chains of `count` pages of the path to `node`, from page `first` on, which follows page `previous`."""
        known = not first or bool(self._anchor.has(np.array([previous]), State.WATCHED)[0])
        begin = first if known else 0
        before = int(self._chains[previous]) if begin else self._seed(node.namespace)
        parts, above = [], node
        while above.depth > begin and above.parent is not None:
            parts.append(above.key)
            above = above.parent
        parts.append(above.key[(begin - above.depth) * self._size * TOKEN_BYTES :])
        tokens = np.frombuffer(b"".join(reversed(parts)), dtype=np.int32)[: (first + count - begin) * self._size]
        return chain(before, tokens, begin * self._size, self._size)[first - begin :]

    def _seed(self, namespace: Namespace) -> int:
        found = self._seeds.get(namespace)
        if found is None:
            found = self._seeds[namespace] = seed_of(namespace)
            if len(self._seeds) > _MOST_NAMES:
                self._seeds.popitem(last=False)
        return found

    # -- inside: the sweep

    def _pieces(self) -> Iterator[Ids]:
        """The pages of all edges on the device, piece by piece, as the tree is when each is taken. Pages that are not
        watched yet are, from then on."""
        stack = list(self._tree.all_roots())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            start = 0
            while start < node.num_pages and self._tree.is_here(node):
                pages = node.pages[start : start + _PIECE].copy()
                if any(group.stamps.lacks(pages) for group in self._groups):
                    parent = node.parent
                    above = node.pages[:start] if start or parent is None else parent.pages
                    self._watch(node, pages, node.depth + start, int(above[-1]) if len(above) else 0, owner=0)
                start += len(pages)
                yield pages

    def _swept(self) -> None:
        """The sweep has seen all edges: the next one begins."""
        now = self._seconds()
        self.totals.sweep_seconds, self.totals.sweep_steps = now - self._began[0], self.turn - self._began[1]
        self._began = now, self.turn
        self.totals.sweeps += 1
        self._walk = self._pieces()
