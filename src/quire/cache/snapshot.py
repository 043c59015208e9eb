"""Snapshot: the whole state of a cache at one moment, as plain Python lists. The audit reads it.

Pools under test are tiny, and for these a list costs a tenth of an array. A snapshot shares only nodes, leases and
request records with the cache, so two snapshots can be compared. O(pages + nodes).

The `raw` of a part is all data that the part was read from. If it equals that of the snapshot `before`, both share the
part, and the audit does not check it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.cache.offload import CacheParts
from quire.cache.request_kv import RequestKV
from quire.cache.states import GroupCache
from quire.prefix.node import Lease, Node
from quire.spec.ids import Tier

_ALL = slice(None)

ReleaseSnapshot = tuple[int, list[int], list[int], list[int]]
"""`GroupRelease`: group, pages to unpin, pages that lose their frames, frames to free."""


@dataclass(slots=True)
class RequestSnapshot:
    """One running request: lengths in tokens, page ids in order, the first `shared` of them cached."""

    kv: RequestKV
    allocated: int
    committed: int
    pages: list[int]
    shared: int


@dataclass(slots=True)
class Requests:
    """Running requests in the order in which they began, and their `private` pages."""

    raw: object
    rows: list[RequestSnapshot]
    private: list[int]


@dataclass(slots=True)
class Waits:
    """What was released and waits for a step in flight or a hold."""

    raw: object
    pages: list[int]
    given: list[ReleaseSnapshot]
    leases: list[Lease]


@dataclass(slots=True)
class Tree:
    """`edges`: all nodes except the roots, parents first, with their page ids; `ends`: the node of each lease."""

    raw: object
    edges: list[tuple[Node, list[int]]]
    cached: list[int]
    roots: list[Node]
    ends: list[Node]


@dataclass(slots=True)
class GroupSnapshot:
    """One group. The last four lists are empty if no frame can be reclaimed before its page."""

    raw: object
    group: GroupCache
    column: list[int]  # the frame of each page, 0 for none
    out: list[int]  # frames handed out, ascending
    num_free: int
    num_evictable: int
    num_pinned: int = 0
    carried: list[int] = field(default_factory=list)  # frames of requests that belong to no page
    pins: list[int] = field(default_factory=list)  # of each page
    idle: list[int] = field(default_factory=list)  # pages with idle frames, ascending
    readers: list[int] = field(default_factory=list)  # a page for each request, hold and step in flight that reads it


class Snapshot:
    """See above. `out` are the allocated page ids, ascending; `num_free` is the count of the free list."""

    def __init__(self, parts: CacheParts, before: Snapshot | None = None) -> None:
        self.parts = parts
        self.is_tiered = bool(parts.checks)
        self.waits = self._waits(before)
        self.requests = self._requests(before)
        self.tree = self._tree(before)
        self.num_free = parts.pages.num_free_pages
        out = parts.pages.ids.is_out(_ALL)
        self.raw_out = out.tobytes()
        same = before is not None and before.raw_out == self.raw_out
        self.out: list[int] = before.out if before is not None and same else out.nonzero()[0].tolist()
        self.groups = [self._group(group, before) for group in parts.groups]

    def held(self) -> tuple[object, ...]:
        """All raw data without clocks and counters, to check that an operation changed nothing."""
        groups = [group.raw for group in self.groups]
        return self.raw_out, self.num_free, self.requests.raw, self.tree.raw, groups, self.waits.raw

    def _waits(self, before: Snapshot | None) -> Waits:
        retired = self.parts.holds.fences.waiting
        pages = [*self.parts.holds.waiting, *(page for each in retired for page in each.pages.tolist())]
        parts = [part for each in retired for part in each.released]
        given = [(part.group, *(ids.tolist() for ids in (part.unpinned, part.dropped, part.frames))) for part in parts]
        leases = [each.lease for each in retired if each.lease is not None]
        raw = (pages, given, leases)
        return before.waits if before is not None and before.waits.raw == raw else Waits(raw, pages, given, leases)

    def _requests(self, before: Snapshot | None) -> Requests:
        live, table = list(self.parts.rows.live.values()), self.parts.rows
        shared = [kv.lease.num_pages for kv in live]
        raw = (live, shared, table.pages.tobytes(), table.num_allocated.tobytes(), table.num_committed.tobytes())
        if before is not None and before.requests.raw == raw:
            return before.requests
        rows = [
            RequestSnapshot(
                kv, table.allocated(kv), table.committed(kv), table.page_ids(kv).tolist(), kv.lease.num_pages
            )
            for kv in live
        ]
        return Requests(raw, rows, [page for row in rows for page in row.pages[row.shared :]])

    def _tree(self, before: Snapshot | None) -> Tree:
        tree = self.parts.tree
        nodes, roots = list(tree.nodes()), tree.all_roots()
        ends = [lease.node for lease in self.parts.holds.leases()]
        edges = [
            (n, n.parent, n.key, n.run, n.depth, n.leases, n.level, n.held, (*n.children,) if n.children else None)
            for n in nodes
        ]
        tiers = [(tree.is_here(n), tree.num_copies(n)) for n in nodes] if self.is_tiered else None
        tops = [(n, n.depth, n.leases, n.level, n.held, (*n.children,), not n.evicted) for n in roots]
        raw = (edges, tops, ends, tree.num_pages, tree.num_protected, tree.num_shared, tree.num_below, tiers)
        if before is not None and before.tree.raw == raw:
            return before.tree
        found = [(node, node.pages.tolist()) for node in nodes]
        return Tree(raw, found, [page for _, pages in found for page in pages], roots, ends)

    def _group(self, group: GroupCache, before: Snapshot | None) -> GroupSnapshot:
        frames, table, holds = group.frames, self.parts.rows, self.parts.holds
        out = frames.allocator.ids.is_out(_ALL)
        held = holds.readers(group.index, Tier.DEVICE).tolist()
        counts = frames.num_free, group.num_evictable
        raw = (frames.table.contents(), out.tobytes(), counts, group.row_data(), held)
        if before is not None and before.groups[group.index].raw == raw and not self.is_tiered:
            owners = self.requests is before.requests and self.waits is before.waits
            if group.reach.whole or owners:  # depends on rows and on steps in flight
                return before.groups[group.index]
        column, is_out = frames.table.frame.tolist(), out.nonzero()[0].tolist()
        found = GroupSnapshot(raw, group, column, is_out, group.num_free, group.num_evictable)
        if not group.table.reclaims:
            return found
        found.readers += held
        for index, unpinned, _, given in self.waits.given:
            if index == group.index:
                found.carried += given
                found.readers += unpinned
        for row in self.requests.rows:
            found.readers += group.pinned(row.kv.row, table.pages[row.kv.row, : row.shared]).tolist()
            if group.reach.in_place:
                found.carried += group.frames_of(row.kv.row).tolist()
        found.pins, found.num_pinned = group.table.pins.tolist(), group.table.num_pinned
        found.idle = group.table.ticket.nonzero()[0].tolist()
        return found
