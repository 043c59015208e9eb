"""Auditor: the audit of a whole cache in pieces, so that no step waits for it, however many pages there are.

Each piece checks what must hold at any moment: an edge of the tree, the arrays of a group, a row. Pages may change
between two pieces. What can only be said of all pages at one moment, that none is lost and that counters are sums, is
said if nothing changed from the first piece to the last: then the audit is `whole`. An idle engine is audited so.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from quire.cache.offload import CacheParts
from quire.memory.allocator import PageFrames
from quire.memory.allocator.id_pool import IdPool
from quire.memory.residency import Column
from quire.prefix.node import TOKEN_BYTES, Node
from quire.spec.ids import Ids, Tier

_NODES = 64  # in a piece, with about _EDGE_PAGES pages at most
_EDGE_PAGES = 2048
_TABLE_PAGES = 1 << 15  # of a group's table in a piece
MOST_FAULTS = 32


@dataclass(slots=True)
class Audit:
    """One audit. With `whole`, nothing changed meanwhile. `longest_s` is its longest piece."""

    faults: list[str] = field(default_factory=list)
    whole: bool = False
    pages: int = 0
    nodes: int = 0
    pieces: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Frames:
    """The frames of one group on one tier, by page."""

    name: str
    table: Column
    num_frames: int
    quarantined: Collection[int]
    ids: IdPool | None  # None: other owners are checked elsewhere


class HostFrames(Protocol):
    """The frames of one group in host memory. With `are_page_ids` a page has the frame of its own number."""

    name: str
    table: Column
    num_frames: int
    quarantined: deque[int]
    are_page_ids: bool
    allocator: Any


class Auditor:
    """Audits one cache again and again, with the frames of its `hosts`. `changed` gives another value if the cache may
    have changed."""

    def __init__(
        self,
        parts: CacheParts,
        changed: Callable[[], Hashable],
        hosts: Sequence[HostFrames] = (),
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._parts = parts
        self._changed = changed
        self._seconds = seconds
        self._owner: Ids = np.zeros(parts.pages.num_pages + 1, dtype=np.int32)
        self._frames = [
            _Frames(
                f"group '{group.name}'",
                group.table,
                group.num_frames,
                group.quarantined,
                None if group.frames.are_page_ids else group.frames.allocator.ids,
            )
            for group in parts.groups
        ]
        self._frames += [
            _Frames(
                f"host group '{host.name}'",
                host.table,
                host.num_frames,
                host.quarantined,
                None if host.are_page_ids else host.allocator.ids,
            )
            for host in hosts
        ]
        self._copies = parts.frames.anchor(Tier.HOST) if hosts else None
        self._page_of: Ids = np.zeros(1 + max(each.num_frames for each in self._frames), dtype=np.int32)
        self._found: list[Node] = []  # by number, from 1 on
        self._pieces: Iterator[None] | None = None
        self._began: Hashable = None
        self._sums = [0, 0, 0, 0]
        self.now = Audit()
        self.last: Audit | None = None
        self.audited: Hashable = None  # the state that the last whole audit has seen
        self.num_audits = self.num_whole = 0

    @property
    def is_running(self) -> bool:
        """Whether an audit has begun and not ended."""
        return self._pieces is not None

    @property
    def is_due(self) -> bool:
        """Whether an audit has begun, or the cache has changed since the last whole one."""
        return self._pieces is not None or self.audited is None or self._changed() != self.audited

    def advance(self, limit_s: float) -> Audit | None:
        """Go on for about so long, at least one piece. Returns the audit if it has ended with this."""
        began = at = self._seconds()
        if self._pieces is None:
            self.now, self._began = Audit(), self._changed()
            self._pieces = self._run()
        ended = False
        while not ended:
            ended = next(self._pieces, self) is self
            now = self._seconds()
            self.now.pieces += 1
            self.now.longest_s, at = max(self.now.longest_s, now - at), now
            if now - began >= limit_s:
                break
        self.now.seconds += at - began
        if not ended:
            return None
        self._pieces, self.last = None, self.now
        self.num_audits += 1
        if self.last.whole:
            self.num_whole += 1
            self.audited = self._began
        self._found.clear()
        return self.last

    def _run(self) -> Iterator[None]:
        self._owner[:] = 0
        self._sums = [0, 0, 0, 0]
        yield
        for frames in self._frames:
            yield from self._group(frames)
        yield from self._tree()
        self._say(*self._rows())
        yield
        self.now.whole = self._changed() == self._began
        if self.now.whole:
            self._say(*self._all())

    def _say(self, *faults: str) -> None:
        self.now.faults += faults[: MOST_FAULTS - len(self.now.faults)]

    # -- groups: arrays by page

    def _group(self, group: _Frames) -> Iterator[None]:
        """No two pages share a frame, all frames of pages are allocated, pins and idle frames are counted."""
        table, found = group.table, 0
        self._page_of[:] = 0
        for start in range(0, len(table.frame), _TABLE_PAGES):
            found += self._slice(group, slice(start, start + _TABLE_PAGES))
            yield
        self.now.pages = max(self.now.pages, found)
        if table.reclaims:
            counts = int(np.count_nonzero(table.ticket)), int(np.count_nonzero(table.pins))
            if counts != (table.num_idle, table.num_pinned):
                told = f"{table.num_idle} idle of {counts[0]}, {table.num_pinned} pinned of {counts[1]}"
                self._say(f"{group.name} miscounts: {told}")
            yield

    def _slice(self, group: _Frames, at: slice) -> int:
        """Some pages of a group's table; returns how many of them have a frame."""
        table, name = group.table, group.name
        pages = np.flatnonzero(table.frame[at]).astype(np.int32) + np.int32(at.start)
        frames = table.frame[pages]
        if len(frames) and not 0 < int(frames.min()) <= int(frames.max()) <= group.num_frames:
            self._say(f"{name}: a page has frame {int(frames.min())} or {int(frames.max())}, which does not exist")
            return len(pages)
        before = self._page_of[frames]
        self._page_of[frames] = pages
        for others in (before, self._page_of[frames]):
            # A frame that came from another page since that page was looked at is not shared.
            twice = (others != 0) & (others != pages)
            twice[twice] = table.frame[others[twice]] == frames[twice]
            if twice.any():
                first = int(twice.argmax())
                both = sorted((int(others[first]), int(pages[first])))
                self._say(f"{name}: frame {int(frames[first])} serves pages {both}")
        if group.ids is not None:
            out = group.ids.is_out(frames)
            if not out.all():
                self._say(f"{name}: frame {int(frames[~out][0])} of a page is free")
            if len(group.quarantined) and np.isin(frames, np.array(group.quarantined, dtype=np.int32)).any():
                self._say(f"{name}: a quarantined frame serves a page")
        if table.reclaims:
            pins = table.pins[at]
            if len(pins) and int(pins.min()) < 0:
                self._say(f"{name}: page {at.start + int(pins.argmin())} has {int(pins.min())} pins")
            if ((table.ticket[at] != 0) & ((pins != 0) | (table.frame[at] == 0))).any():
                self._say(f"{name}: a page is idle that has pins, or no frame")
        return len(pages)

    # -- the tree: edge by edge

    def _tree(self) -> Iterator[None]:
        stack = list(self._parts.tree.all_roots())
        while stack:
            left = _EDGE_PAGES
            for _ in range(min(_NODES, len(stack))):
                node = stack.pop()
                children = list(node.children.values())
                self._say(*self._node(node, children))
                stack += children
                left -= node.num_pages
                if left <= 0:
                    break
            yield

    def _node(self, node: Node, children: list[Node]) -> Iterator[str]:
        tree, unit = self._parts.tree, self._parts.plan.page_size * TOKEN_BYTES
        pages, parent = node.pages, node.parent
        self.now.nodes += 1
        if parent is not None:
            if not len(pages):
                return  # it left the tree since its parent was seen
            if len(node.key) != len(pages) * unit:
                yield f"an edge of {len(pages)} pages has {len(node.key)} bytes of tokens"
            if parent.children.get(node.key[:unit]) is not node:
                yield f"an edge of page {int(pages[0])} hangs in the wrong place"
            if node.depth != parent.depth + parent.num_pages:
                yield f"an edge begins after {parent.depth + parent.num_pages} pages and says {node.depth}"
            yield from self._owners(node, pages)
            if self._copies is not None:
                yield from self._tiers(node, parent, self._copies)
            if tree.is_here(node):
                for at, counted in enumerate((True, node.level > 0, node.level > 1)):
                    self._sums[at] += len(pages) if counted else 0
            else:
                self._sums[3] += len(pages)
        if node.held != node.leases + sum([child.level for child in children]) or node.level != min(2, node.held):
            yield f"a node with {node.leases} leases is held {node.held} times and has level {node.level}"

    def _tiers(self, node: Node, parent: Node, copies: Column) -> Iterator[str]:
        """The pages of an edge are on the device, all and with their parents, or have copies; copies are of its first
        pages."""
        count = self._parts.tree.num_copies(node)
        if self._parts.tree.is_here(node):
            if parent.parent is not None and not self._parts.tree.is_here(parent):
                yield f"an edge of page {int(node.pages[0])} is on the device and its parent is not"
        elif count != node.num_pages:
            yield f"an edge has {count} copies of {node.num_pages} pages that are nowhere else"
        if int(np.count_nonzero(copies.frame[node.pages])) != count:
            yield f"an edge of page {int(node.pages[0])} has copies after a page without one"

    def _owners(self, node: Node, pages: Ids) -> Iterator[str]:
        """The pages of an edge are allocated, and of no other edge."""
        if int(pages.min()) < 1 or int(pages.max()) >= len(self._owner):
            yield f"an edge has page {int(pages.min())} or {int(pages.max())}, which does not exist"
            return
        out = self._parts.pages.ids.is_out(pages)
        if not out.all():
            yield f"page {int(pages[~out][0])} is cached and free"
        for page in pages[self._owner[pages] != 0].tolist():
            other = self._found[int(self._owner[page]) - 1]
            if other is not node and page in other.pages and _is_in_tree(other):
                yield f"page {page} is cached twice"
        self._found.append(node)
        self._owner[pages] = len(self._found)

    # -- requests

    def _rows(self) -> Iterator[str]:
        """Lengths are in order, protected pages are the path of the lease, private pages have one owner and frames."""
        rows, size = self._parts.rows, self._parts.plan.page_size
        private = []
        for kv in list(rows.live.values()):
            pages, shared, name = rows.page_ids(kv), kv.lease.num_pages, f"row {kv.row}"
            lengths = shared * size, rows.committed(kv), rows.allocated(kv)
            if not 0 <= lengths[0] <= lengths[1] <= lengths[2]:
                yield f"{name}: protected {lengths[0]}, committed {lengths[1]}, allocated {lengths[2]} are out of order"
            end, node = shared, kv.lease.node
            while node.parent is not None and end > 0:
                if not np.array_equal(pages[max(0, end - node.num_pages) : end], node.pages):
                    break
                end, node = end - node.num_pages, node.parent
            if end or node.parent is not None:
                yield f"{name}: its first {shared} pages are not its lease's path"
            private.append(pages[shared:])
        every = np.concatenate([np.empty(0, dtype=np.int32), *private])
        if len(np.unique(every)) != len(every):
            yield "two requests have the same private page"
        if len(every) and not self._parts.pages.ids.is_out(every).all():
            yield "a private page of a request is free"
        for group in self._parts.groups:
            if group.reach.whole and len(every) and not group.table.present(every).all():
                yield f"group '{group.name}': a private page has no frame"

    # -- everything, if nothing has changed

    def _all(self) -> Iterator[str]:
        parts, tree = self._parts, self._parts.tree
        sums = dict(zip(("num_pages", "num_protected", "num_shared", "num_below"), self._sums, strict=True))
        for name, total in sums.items():
            if getattr(tree, name) != total:
                yield f"the tree counts {name} = {getattr(tree, name)}, its nodes sum to {total}"
        owned = self._owner != 0
        for kv in parts.rows.live.values():
            owned[parts.rows.page_ids(kv)[kv.lease.num_pages :]] = True
        for each in parts.holds.fences.waiting:
            owned[each.pages] = True
        for pages in (parts.holds.waiting, *(withheld() for withheld in parts.withheld)):
            owned[np.array(pages, dtype=np.int32)] = True
        lost = np.flatnonzero(parts.pages.ids.is_out(slice(None)) & ~owned)
        if len(lost):
            yield f"{len(lost)} pages have no owner: {lost[:8].tolist()}"
        for group in parts.groups:
            if isinstance(group.frames, PageFrames) and not group.frames.are_page_ids:
                used = int(np.count_nonzero(group.table.frame)) + len(group.quarantined)
                if group.num_free + used != group.num_frames and not parts.holds.fences.waiting:
                    yield f"group '{group.name}': {group.num_free} free + {used} in use != {group.num_frames} frames"


def _is_in_tree(node: Node) -> bool:
    """Whether a node still hangs where it says."""
    parent = node.parent
    return parent is not None and any(child is node for child in parent.children.values())
