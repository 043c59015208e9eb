"""The audit: checks the invariants of a whole cache, in slices of bounded work, however many pages there are.

free + private + cached + moving + quarantined + released == num_frames    every frame and page has exactly one owner
protected <= committed <= allocated, protected % page_size == 0     per request
a row's protected pages are the path of its lease                   it pins what it reads
a page's pins are its readers, and without any its frame is idle    per group whose frames may go before their pages
a node's level is that of the leases at or below it                 eviction takes what nothing pins, and only that
the tree's counters are the sums over its nodes

`audit` does all slices at once, for tests, fuzzing and examples. A server does some of them beside its steps
(`Auditor.advance`), and pages may change between two slices. So a slice checks what must hold at any moment. What needs
the pages of all slices, that none is lost and that counters are sums, is checked if nothing has changed since the first
slice: then the audit is `whole`. `broken_law` is what a server checks after each step.

A source of slices is a generator: it yields each fault in words, and "" at the end of a slice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from quire.cache.groups import NO_PAGES, GroupRelease, PagedGroup
from quire.cache.offload import CacheParts
from quire.cache.running import Lengths
from quire.cache.states import GroupCache
from quire.errors import AuditFailure
from quire.memory.allocator import GroupFrames
from quire.prefix.node import TOKEN_BYTES, Node, User, join_ids, path_to
from quire.spec.ids import Bools, Ids, Tier

_NODES = 64  # in a slice, with about _EDGE_PAGES pages at most
_EDGE_PAGES = 2048
_TABLE_PAGES = 1 << 15  # pages of a group's table in a slice
MOST_FAULTS = 32
_ALL = slice(None)


@dataclass(slots=True)
class Audit:
    """One audit. With `whole`, nothing changed meanwhile. `longest_s` is its longest slice."""

    faults: list[str] = field(default_factory=list)
    whole: bool = False
    pages: int = 0
    nodes: int = 0
    pieces: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AuditedFrames:
    """The frames of one group on one tier. `carried()` are frames in use that no page has; `readers()` has a page for
    each request, hold and step in flight that reads its frame. `passed()` are private and not read."""

    name: str
    frames: GroupFrames[Any]
    carried: Callable[[], Sequence[int]]
    readers: Callable[[], Ids]
    passed: Callable[[], Ids] = lambda: NO_PAGES


class Auditor:
    """Audits one cache again and again. `changed` gives another value if the cache may have changed. `owner` says which
    node caches each page, by numbers from 1 on, int32 `[num_pages + 1]`, 0 for none; it is complete after the slices of
    the tree, if the audit is `whole` so far. `leaves` are the nodes it has seen that can be evicted from a tier."""

    def __init__(self, parts: CacheParts, changed: Callable[[], Hashable] = lambda: None) -> None:
        self.parts = parts
        self.owner: Ids = np.zeros(parts.pages.num_pages + 1, dtype=np.int32)
        self.leaves: dict[Tier, list[Node]] = {}
        self._changed = changed
        self._devices = [_on_device(parts, group) for group in parts.groups]
        self._numbered: list[Node] = []
        self._slices: Iterator[str] | None = None
        self._began: Hashable = None
        self.now = Audit()
        self.last: Audit | None = None
        self.audited: Hashable = None  # the state that the last whole audit has seen
        self.num_audits = self.num_whole = 0

    @property
    def is_running(self) -> bool:
        """Whether an audit has begun and not ended."""
        return self._slices is not None

    @property
    def is_due(self) -> bool:
        """Whether an audit has begun, or the cache has changed since the last whole one."""
        return self._slices is not None or self.audited is None or self._changed() != self.audited

    @property
    def is_whole(self) -> bool:
        """Whether nothing has changed since this audit began."""
        return self._changed() == self._began

    def advance(self, limit_s: float) -> Audit | None:
        """Go on for about so long, at least one slice. Returns the audit if it has ended with this."""
        began = at = perf_counter()
        if self._slices is None:
            self.now, self._began, self._slices = Audit(), self._changed(), self._run()
        while (found := next(self._slices, None)) is not None:
            if found:
                self.now.faults += [found][: MOST_FAULTS - len(self.now.faults)]
                continue
            now = perf_counter()
            self.now.pieces += 1
            self.now.longest_s, at = max(self.now.longest_s, now - at), now
            if now - began >= limit_s:
                break
        self.now.seconds += at - began
        if found is not None:
            return None
        self._slices, self.last = None, self.now
        self._numbered.clear()
        self.last.whole = self.is_whole
        self.num_audits += 1
        if self.last.whole:
            self.num_whole += 1
            self.audited = self._began
        return self.last

    def _run(self) -> Iterator[str]:
        self.owner[:] = 0
        self.leaves = {Tier.DEVICE: [], Tier.HOST: []}
        yield broken_law(self.parts)
        yield from self._tree()
        yield from self._rows()
        yield ""
        yield from self._page_owners()
        yield ""
        for each in self._devices:
            yield from self.tables(each)
            yield from self.used(each)
        for source in self.parts.audits:
            yield from source(self)
            yield ""

    # -- the tree: edge by edge

    def nodes(self) -> Iterator[list[Node]]:
        """The nodes of the tree with its roots, parents first, as many at once as fit in a slice."""
        stack = self.parts.tree.all_roots()
        while stack:
            found: list[Node] = []
            left = _EDGE_PAGES
            while stack and len(found) < _NODES and left > 0:
                node = stack.pop()
                if node.parent is None or node.run:  # else it left the tree since its parent was seen
                    found.append(node)
                    stack += node.children.values()
                    left -= node.num_pages
            yield found

    def _tree(self) -> Iterator[str]:
        """Edges are whole pages, children are found by their first page, parents are right, counters are sums."""
        tree, unit = self.parts.tree, self.parts.plan.page_size * TOKEN_BYTES
        sums = dict.fromkeys(("num_pages", "num_protected", "num_shared", "num_below"), 0)
        users: dict[User, int] = {}
        for nodes in self.nodes():
            self.now.nodes += len(nodes)
            ends = Counter(self.parts.holds.ends()) if any(node.leases for node in nodes) else {}
            here: list[Node] = []
            below: list[Node] = []
            for node in nodes:
                parent, level, length, children = node.parent, node.level, node.num_pages, node.children.values()
                if node.held != node.leases + sum([child.level for child in children]) or level != min(2, node.held):
                    yield f"a node with {node.leases} leases is held {node.held} times and has level {level}"
                if node.leases and node.leases != ends[node]:
                    yield f"a node counts {node.leases} leases and has {ends[node]}"
                if parent is None:
                    if not (children or node.evicted or level):
                        yield "a root is kept that nothing needs"
                    continue
                if len(node.key) != length * unit:
                    yield f"an edge of {length} pages has {len(node.key)} bytes of tokens"
                if parent.children.get(node.key[:unit]) is not node:
                    yield f"an edge of {length} pages hangs in the wrong place"
                if node.depth != parent.depth + parent.num_pages:
                    yield f"an edge begins after {parent.depth + parent.num_pages} pages and says {node.depth}"
                if node.user is not None:
                    users[node.user] = users.get(node.user, 0) + 1
                if not tree.is_here(node):
                    below.append(node)
                    sums["num_below"] += length
                    continue
                here.append(node)
                sums["num_pages"] += length
                sums["num_protected"] += length if level else 0
                sums["num_shared"] += length if level > 1 else 0
                if not level and not any(map(tree.is_here, children)):
                    self.leaves[Tier.DEVICE].append(node)
            yield from self._cached(here, here=True)
            yield from self._cached(below, here=False)
            yield ""
        if self.is_whole:
            for name, total in sums.items():
                if getattr(tree, name) != total:
                    yield f"the tree counts {name} = {getattr(tree, name)}, its nodes sum to {total}"
            if any(len(user.nodes) != count for user, count in users.items()):
                yield "a session has other nodes than those that it alone has used"

    def _cached(self, nodes: Sequence[Node], *, here: bool) -> Iterator[str]:
        """The pages of edges are allocated, in no other edge, and have frames on the device if the edges are `here`."""
        if not nodes:
            return
        pages, owner = join_ids([node.run for node in nodes]), self.owner
        if int(pages.view(np.uint32).max()) >= len(owner):
            yield f"an edge has page {int(pages.min())} or {int(pages.max())}, which does not exist"
            return
        out = self.parts.pages.ids.is_out(pages)
        if np.count_nonzero(out) != len(out):
            yield f"page {int(pages[~out][0])} is cached and free"
        before, first = owner[pages], len(self._numbered) + 1
        self._numbered += nodes
        numbers = np.arange(first, first + len(nodes)).repeat([node.num_pages for node in nodes])
        owner[pages] = numbers
        if np.count_nonzero(before) or np.count_nonzero(owner[pages] != numbers):
            yield from self._twice(pages, before, numbers)
        for group in self.parts.groups:
            present = group.table.frame[pages]
            if here and group.reach.whole and np.count_nonzero(present) != len(pages):
                yield f"group '{group.name}': page {int(pages[present == 0][0])} is out and has no frame"
            if not here and np.count_nonzero(present):
                gone = int(pages[present != 0][0])
                yield f"group '{group.name}': page {gone} has left the device and has a frame there"

    def _twice(self, pages: Ids, before: Ids, numbers: Lengths) -> Iterator[str]:
        """Those of these pages that another edge has too, unless it left the tree since it was seen."""
        for page, number in zip(pages.tolist(), before.tolist(), strict=True):
            if number and page in (other := self._numbered[number - 1]).pages and _is_in_tree(other):
                yield f"page {page} is cached twice"
        for page in pages[self.owner[pages] != numbers].tolist():
            yield f"page {page} is cached twice"

    # -- requests

    def _rows(self) -> Iterator[str]:
        """Lengths are in order, protected pages are the path of the lease, what is read has frames."""
        parts, rows, size = self.parts, self.parts.rows, self.parts.plan.page_size
        windows = [g for g in parts.groups if isinstance(g, PagedGroup) and not g.reach.whole]
        for kv in rows.live.values():
            pages, shared, name = rows.page_ids(kv), kv.lease.num_pages, f"row {kv.row}"
            protected, committed, allocated = shared * size, rows.committed(kv), rows.allocated(kv)
            if not 0 <= protected <= committed <= allocated:
                lengths = f"protected {protected}, committed {committed}, allocated {allocated}"
                yield f"{name}: {lengths} are out of order"
            if pages[:shared].tobytes() != b"".join([node.run for node in reversed(path_to(kv.lease.node))]):
                yield f"{name}: its first {shared} pages are not its lease's path"
            for group in windows:
                least, most = (group.reach.needed(n // size).start for n in (committed, allocated))
                first = int(group.first[kv.row])
                if not least <= first <= most:
                    yield f"group '{group.name}': {name} reads from page {first}, and not {least} to {most}"
                if np.count_nonzero(group.table.frame[pages[first:]]) < len(pages) - first:
                    yield f"group '{group.name}': {name} reads a page that has no frame"
        for node, count in Counter(parts.holds.ends()).items():
            if node.leases != count:
                yield f"a node counts {node.leases} leases and has {count}"

    def _page_owners(self) -> Iterator[str]:
        """Every page id is either free, private, cached or moving, and private pages have frames."""
        parts = self.parts
        num_pages, out = parts.pages.num_pages, parts.pages.ids.is_out(_ALL)
        num_out = int(np.count_nonzero(out))
        if parts.pages.num_free_pages + num_out != num_pages:
            yield f"{parts.pages.num_free_pages} pages are free, but {num_pages - num_out} are not out"
        private = _join(parts.rows.page_ids(kv)[kv.lease.num_pages :] for kv in parts.rows.live.values())
        for group in parts.groups:
            if group.reach.whole and np.count_nonzero(group.table.frame[private]) != len(private):
                yield f"group '{group.name}': a private page of a request is out and has no frame"
        yield ""
        for start in range(0, num_pages + 1, _TABLE_PAGES):
            yield from self._owned(slice(start, start + _TABLE_PAGES))
            yield ""

    def _owned(self, at: slice) -> Iterator[str]:
        """The owners of some pages. Without changes a page that nothing owns is lost."""
        parts, holds = self.parts, self.parts.holds
        out = parts.pages.ids.is_out(at)
        cached = self.owner[at] != 0 if self.is_whole else np.zeros(len(out), dtype=np.bool_)
        private = _join(parts.rows.page_ids(kv)[kv.lease.num_pages :] for kv in parts.rows.live.values())
        withheld = [page for pages in parts.withheld for page in pages()]
        moving = _join([_ids(withheld), *(each.pages for each in holds.fences.waiting)])
        counts = [_count(pages, at, len(out)) for pages in (private, moving)]
        num_owners = counts[0] + counts[1] + cached
        wrong = num_owners != out if self.is_whole else num_owners > out
        for place in np.flatnonzero(wrong & (num_owners > 0)).tolist() if np.count_nonzero(wrong) else ():
            owners = {"free": not out[place], "private": counts[0][place], "cached": cached[place]}
            names = ", ".join([name for name, has in (owners | {"moving": counts[1][place]}).items() if has])
            yield f"page {at.start + place} has {int(num_owners[place]) + (not out[place])} owners ({names})"
        if len(lost := np.flatnonzero(wrong & (num_owners == 0)) + at.start):
            yield f"{len(lost)} pages have no owner: {lost[:8].tolist()}"

    # -- frames

    def tables(self, group: AuditedFrames) -> Iterator[str]:
        """Pages with frames are allocated. If its frame can be reclaimed, a page has a pin per reader, or is idle."""
        table, name, waiting = group.frames.table, group.name, self.parts.holds.fences.waiting
        for start in range(0, len(table.frame), _TABLE_PAGES):
            at = slice(start, start + _TABLE_PAGES)
            frame = table.frame[at]
            present = frame != 0
            lost = present > self.parts.pages.ids.is_out(at)
            if np.count_nonzero(lost):
                yield f"{name}: page {start + int(lost.argmax())} is free and has a frame"
            if group.frames.are_page_ids and np.count_nonzero(frame[present] != start + np.flatnonzero(present)):
                yield f"{name}: a page from {start + int(present.argmax())} on has a frame that is not its id"
            if table.reclaims:
                readers, pins, idle = group.readers(), table.pins[at], table.ticket[at] != 0
                counts = _count(readers, at, len(frame))
                if np.count_nonzero(odd := counts != pins):
                    place = int(odd.argmax())
                    yield f"{name}: page {start + place} has {pins[place]} pins and {counts[place]} readers"
                cached = self.owner[at] != 0
                cached |= _count(group.passed(), at, len(frame)) > 0
                left = idle & (_count(_join(each.pages for each in waiting), at, len(frame)) > 0)
                expected = present & (counts == 0) & (cached | left if self.is_whole else idle)
                if np.count_nonzero(odd := idle != expected):
                    place = int(odd.argmax())
                    yield f"{name}: page {start + place} is {'not ' if expected[place] else ''}idle"
            yield ""

    def used(self, group: AuditedFrames) -> Iterator[str]:
        """Each allocated frame belongs to one page or request. One slice, of array operations on all pages."""
        table, frames, name = group.frames.table, group.frames, group.name
        resident = int(np.count_nonzero(table.frame))
        self.now.pages = max(self.now.pages, resident)
        carried = NO_PAGES if group.frames.are_page_ids else _ids(group.carried())
        num_used = resident + len(carried)
        if frames.num_used != num_used:
            yield f"{name}: {num_used} in use != {frames.num_used} frames that are not free"
        if table.reclaims:
            counts = int(np.count_nonzero(table.ticket)), int(np.count_nonzero(table.pins))
            if counts != (table.num_idle, table.num_pinned):
                told = f"{table.num_idle} idle of {counts[0]}, {table.num_pinned} pinned of {counts[1]}"
                yield f"{name} miscounts: {told}"
        if not group.frames.are_page_ids:
            if int(table.frame.max()) > frames.num_frames:
                yield f"{name}: a page has frame {int(table.frame.max())}, which does not exist"
                return
            in_use = np.zeros(frames.num_frames + 1, dtype=np.bool_)
            in_use[table.frame] = True
            in_use[carried] = True
            in_use[0] = False
            odd = in_use != frames.allocator.ids.is_out(_ALL)
            if np.count_nonzero(in_use) != num_used or np.count_nonzero(odd):
                yield from _odd_frames(group, in_use, odd, carried)
        yield ""


def _odd_frames(group: AuditedFrames, in_use: Bools, odd: Bools, carried: Ids) -> Iterator[str]:
    """The frames that have two owners, or are not allocated as they are `in_use`."""
    frame_of = group.frames.table.frame
    owners = np.bincount(np.concatenate((frame_of[frame_of != 0], carried)), minlength=len(in_use))
    for frame in np.flatnonzero(odd | (owners > 1))[:MOST_FAULTS].tolist():
        pages = np.flatnonzero(frame_of == frame).tolist()
        if owners[frame] > 1:
            also = " and a request" if frame in carried else ""
            yield f"{group.name}: frame {frame} serves two: pages {pages}{also}"
        else:
            yield f"{group.name}: frame {frame} is {'in use and free' if in_use[frame] else 'allocated and not in use'}"


def _on_device(parts: CacheParts, group: GroupCache) -> AuditedFrames:
    """A group's frames on the device."""
    rows, holds = parts.rows, parts.holds

    def released() -> list[GroupRelease]:
        return [part for each in holds.fences.waiting for part in each.released if part.group == group.index]

    def carried() -> list[int]:
        own = (frame for row in rows.live for frame in group.frames_of(row).tolist())
        return [*group.quarantined, *own, *(frame for part in released() for frame in part.frames.tolist())]

    def readers() -> Ids:
        pinned = [group.pinned(kv.row, rows.pages[kv.row, : kv.lease.num_pages]) for kv in rows.live.values()]
        waiting = [part.unpinned for part in released()]
        return np.concatenate([holds.readers(group.index, Tier.DEVICE), *pinned, *waiting])

    def passed() -> Ids:
        firsts = group.first if isinstance(group, PagedGroup) else np.zeros(len(rows.serials), dtype=np.int64)
        return _join(rows.pages[kv.row, kv.lease.num_pages : firsts[kv.row]] for kv in rows.live.values())

    return AuditedFrames(f"group '{group.name}'", group.frames, carried, readers, passed)


def audit(parts: CacheParts) -> None:
    """Check all invariants now. Raises AuditFailure, which names each fault. O(pages + nodes)."""
    auditor = Auditor(parts)
    done = auditor.advance(math.inf)
    assert done is not None
    faults = list(done.faults)
    for tier, leaves in auditor.leaves.items():
        if leaves and (unknown := set(leaves) - parts.tree.queued(tier)):
            faults.append(f"{len(unknown)} unleased leaves can never be evicted from the {tier}")
    if faults:
        raise AuditFailure("; ".join(faults) + ".")


def broken_law(parts: CacheParts) -> str:
    """The first law that does not hold of those that cost a few comparisons, or "". O(groups + rows)."""
    tree, rows, pages = parts.tree, parts.rows, parts.pages
    if not 0 <= tree.num_shared <= tree.num_protected <= tree.num_pages:
        counts = f"{tree.num_pages} pages are cached, {tree.num_protected} protected and {tree.num_shared} shared"
        return f"the tree miscounts: {counts}"
    if not 0 <= pages.num_free_pages <= pages.num_pages - tree.num_pages:
        return f"{pages.num_free_pages} pages are free and {tree.num_pages} cached, of {pages.num_pages}"
    for group in parts.groups:
        used, cached, kept = group.frames.num_used, group.num_cached, len(group.quarantined)
        if min(group.num_free, cached) < 0 or cached + kept > used:
            owners = f"{group.num_free} frames are free, {cached} cached and {kept} quarantined"
            return f"group '{group.name}': {owners}, and {used} in use"
        if not 0 <= group.num_evictable <= cached:
            return f"group '{group.name}': {group.num_evictable} frames are evictable, of {cached} cached ones"
        if group.table.frame[0]:
            return f"group '{group.name}': the padding page is bound to frame {int(group.table.frame[0])}"
    for room in parts.rooms:
        if room.is_shared and not room.has([0] * len(parts.groups)):
            return f"frames of {' and '.join(group.name for group in room.groups)} have the same bytes"
    if len(rows.live) + len(rows.free) != len(rows.serials):
        return f"{len(rows.live)} rows run and {len(rows.free)} are free, of {len(rows.serials)}"
    if np.count_nonzero(rows.num_committed > rows.num_allocated):
        row = int((rows.num_committed > rows.num_allocated).argmax())
        return (
            f"row {row}: {int(rows.num_committed[row])} tokens are committed, {int(rows.num_allocated[row])} allocated"
        )
    return ""


def _ids(ids: Sequence[int]) -> Ids:
    return np.array(ids, dtype=np.int32) if ids else NO_PAGES


def _join(runs: Iterable[Ids]) -> Ids:
    return np.concatenate((NO_PAGES, *runs))


def _count(ids: Ids, at: slice, length: int) -> Lengths:
    """How often each of the `length` ids from `at.start` on occurs."""
    if at.start or length == at.stop:
        ids = ids[(ids >= at.start) & (ids < at.start + length)] - at.start
    return np.bincount(ids, minlength=length)


def _is_in_tree(node: Node) -> bool:
    """Whether a node still hangs where it says."""
    parent = node.parent
    return parent is not None and any(child is node for child in parent.children.values())
