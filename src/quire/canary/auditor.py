"""Auditor: the audit of a whole cache in pieces, so that no step waits for it, however many pages there are.

Each piece checks what must hold at any moment: an edge of the tree, the arrays of a group, a row. Pages may change
between two pieces. What can only be said of all pages at one moment, that none is lost and that counters are sums, is
said if nothing changed from the first piece to the last: then the audit is `whole`. An idle engine is audited so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np

from quire.cache.offload import CacheParts
from quire.cache.states import GroupCache
from quire.memory.allocator import PageFrames
from quire.prefix.node import TOKEN_BYTES, Node
from quire.spec.ids import Ids

_NODES = 64  # in a piece
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


class Auditor:
    """Audits one cache again and again. `changed` gives another value if the cache may have changed."""

    def __init__(
        self,
        parts: CacheParts,
        changed: Callable[[], Hashable],
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._parts = parts
        self._changed = changed
        self._seconds = seconds
        self._owner: Ids = np.zeros(parts.pages.num_pages + 1, dtype=np.int32)
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
        for group in self._parts.groups:
            self._say(*self._group(group))
            yield
        yield from self._tree()
        self._say(*self._rows())
        yield
        self.now.whole = self._changed() == self._began
        if self.now.whole:
            self._say(*self._all())

    def _say(self, *faults: str) -> None:
        self.now.faults += faults[: MOST_FAULTS - len(self.now.faults)]

    # -- groups: arrays by page

    def _group(self, group: GroupCache) -> Iterator[str]:
        """No two pages share a frame, all frames of pages are allocated, pins and idle frames are counted."""
        table, name = group.table, f"group '{group.name}'"
        frames = table.frame[table.frame != 0]
        self.now.pages = max(self.now.pages, len(frames))
        if len(frames) and int(np.bincount(frames).max()) > 1:
            frame = int(np.bincount(frames).argmax())
            yield f"{name}: frame {frame} serves pages {np.flatnonzero(table.frame == frame)[:4].tolist()}"
        if group.index != self._parts.frames.hosted:
            out = group.frames.allocator.ids.is_out(frames)
            if not out.all():
                yield f"{name}: frame {int(frames[~out][0])} of a page is free"
            quarantined = np.array(group.quarantined, dtype=np.int32)
            if np.isin(quarantined, frames).any():
                yield f"{name}: a quarantined frame serves a page"
        if not table.reclaims:
            return
        if len(table.pins) and int(table.pins.min()) < 0:
            yield f"{name}: page {int(table.pins.argmin())} has {int(table.pins.min())} pins"
        idle = table.ticket != 0
        if (idle & ((table.pins != 0) | (table.frame == 0))).any():
            yield f"{name}: a page is idle that has pins, or no frame"
        counts = int(np.count_nonzero(idle)), int(np.count_nonzero(table.pins))
        if counts != (table.num_idle, table.num_pinned):
            yield f"{name} miscounts: {table.num_idle} idle of {counts[0]}, {table.num_pinned} pinned of {counts[1]}"

    # -- the tree: edge by edge

    def _tree(self) -> Iterator[None]:
        stack = list(self._parts.tree.all_roots())
        while stack:
            for node in [stack.pop() for _ in range(min(_NODES, len(stack)))]:
                children = list(node.children.values())
                self._say(*self._node(node, children))
                stack += children
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
            if tree.is_here(node):
                for at, counted in enumerate((True, node.level > 0, node.level > 1)):
                    self._sums[at] += len(pages) if counted else 0
            else:
                self._sums[3] += len(pages)
        if node.held != node.leases + sum([child.level for child in children]) or node.level != min(2, node.held):
            yield f"a node with {node.leases} leases is held {node.held} times and has level {node.level}"

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
            if isinstance(group.frames, PageFrames) and group.index != parts.frames.hosted:
                used = int(np.count_nonzero(group.table.frame)) + len(group.quarantined)
                if group.num_free + used != group.num_frames and not parts.holds.fences.waiting:
                    yield f"group '{group.name}': {group.num_free} free + {used} in use != {group.num_frames} frames"


def _is_in_tree(node: Node) -> bool:
    """Whether a node still hangs where it says."""
    parent = node.parent
    return parent is not None and any(child is node for child in parent.children.values())
