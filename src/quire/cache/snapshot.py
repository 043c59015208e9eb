"""Snapshot: everything a cache holds at one moment, read once into plain Python lists. What the audit looks at.

The only code beside the cache that knows how its parts keep their books. Pools under test are tiny, and there a list
costs a tenth of an array. A snapshot shares nothing with the cache but its nodes, leases and request records, so two of
them say what has changed in between. O(pages + nodes).

Whoever takes one snapshot after the other gives the last one as `before`: what is byte for byte as it was is not turned
into lists again, and is the same object in both, so that it need not be checked again either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from quire.cache.fences import Fences, Retired
from quire.cache.groups import GroupCache
from quire.cache.hold import Holds
from quire.cache.request_kv import RequestKV
from quire.cache.running_tables import RunningTables
from quire.memory.allocator import BaseTokenToKVPoolAllocator
from quire.memory.residency import Residency
from quire.prefix.node import Lease, Node
from quire.prefix.radix_cache import RadixCache
from quire.spec.ids import Tier

_ALL = slice(None)
GivenSnapshot = tuple[int, list[int], list[int], list[int]]
"""A group, and the pages that are unpinned there, the pages whose frames are dropped, the frames that are free."""


Law = Callable[["Snapshot"], Iterator[str]]
"""Says of a snapshot what is broken."""


class _Parts(Protocol):
    @property
    def laws(self) -> list[Law]: ...

    @property
    def holds(self) -> Holds: ...

    @property
    def frames(self) -> Residency: ...


class Audited(Protocol):
    """What is looked at of a cache."""

    page_size: int
    tree: RadixCache
    pages: BaseTokenToKVPoolAllocator
    groups: tuple[GroupCache, ...]
    rows: RunningTables
    fences: Fences

    @property
    def parts(self) -> _Parts: ...


class RequestSnapshot:
    """One running request: lengths in tokens, `pages` from the first on, `shared` of them cached."""

    __slots__ = ("allocated", "committed", "kv", "pages", "shared")

    def __init__(self, kv: RequestKV, allocated: int, committed: int, pages: list[int]) -> None:
        self.kv = kv
        self.allocated = allocated
        self.committed = committed
        self.pages = pages
        self.shared = kv.lease.num_pages


class Requests:
    """What running requests hold: `rows` in the order in which they began, and in `private` the pages that they own
    alone."""

    __slots__ = ("books", "private", "rows")

    def __init__(self, cache: Audited, books: tuple[object, ...]) -> None:
        size = cache.page_size
        self.books = books
        self.rows: list[RequestSnapshot] = []
        self.private: list[int] = []
        for kv in cache.rows.live.values():
            allocated = cache.rows.allocated(kv)
            pages: list[int] = cache.rows.table.pages[kv.row, : -(-allocated // size)].tolist()
            self.rows.append(RequestSnapshot(kv, allocated, cache.rows.committed(kv), pages))
            self.private += pages[kv.lease.num_pages :]


class Waits:
    """What was given up and waits for a step in flight: page ids, leases, and what was given up in single groups."""

    __slots__ = ("books", "leases", "pages", "parts")

    def __init__(self, retired: tuple[Retired, ...], held: list[int]) -> None:
        self.pages: list[int] = list(held)
        self.parts: list[GivenSnapshot] = []
        self.leases: list[Lease] = []
        for each in retired:
            self.pages += each.pages.tolist()
            self.parts += [(g.group, g.unpinned.tolist(), g.dropped.tolist(), g.frames.tolist()) for g in each.given]
            if each.lease is not None:
                self.leases.append(each.lease)
        self.books = (self.pages, self.parts, self.leases)


class Tree:
    """The nodes but the roots, parents first, and the page ids of each; `cached` has them all, `roots` the roots.

    `ends` are the nodes that leases pin, those of running requests first.
    """

    __slots__ = ("books", "cached", "edges", "ends", "roots")

    def __init__(self, books: tuple[object, ...], nodes: Sequence[Node], roots: list[Node], ends: list[Node]) -> None:
        self.books = books
        self.edges: list[tuple[Node, list[int]]] = [(node, node.pages.tolist()) for node in nodes]
        self.cached: list[int] = [page for _, pages in self.edges for page in pages]
        self.roots = roots
        self.ends = ends


class GroupSnapshot:
    """One group: `column[page]` is the page's frame, 0 where it has none; `out` are the frames handed out, ascending.

    `carried` are frames that belong to requests and to no page. `pins[page]` counts pins, `shelved` are the pages
    whose frames are idle, ascending, and `readers` has a page once for each request and each step in flight that reads
    it; all three are empty where no frame goes before its page.
    """

    __slots__ = (
        "books",
        "carried",
        "column",
        "group",
        "num_evictable",
        "num_free",
        "num_pinned",
        "out",
        "pins",
        "readers",
        "shelved",
        "whole",
    )

    def __init__(
        self,
        cache: Audited,
        group: GroupCache,
        books: tuple[object, ...],
        rows: Sequence[RequestSnapshot],
        waits: Waits,
    ) -> None:
        self.group = group
        self.whole = group.reach.whole
        self.books = books
        self.carried: list[int] = []
        self.readers: list[int] = []
        self.column: list[int] = group.frames.column.tolist()
        self.out: list[int] = group.frames.is_out(_ALL).nonzero()[0].tolist()
        self.num_free = group.num_free
        self.num_evictable = group.num_evictable
        self.pins: list[int] = []
        self.shelved: list[int] = []
        self.num_pinned = 0
        idle = group.table.idle
        if idle is not None:
            for index, unpinned, _, given in waits.parts:
                if index == group.index:
                    self.carried += given
                    self.readers += unpinned
            for row in rows:
                self.readers += group.pinned(row.kv.row, cache.rows.table.pages[row.kv.row, : row.shared]).tolist()
                if group.reach.carried:
                    self.carried += group.frames_of(row.kv.row).tolist()
            self.readers += cache.parts.holds.readers(group.index, Tier.DEVICE).tolist()
            self.pins = idle.pins.tolist()
            self.shelved = idle.ticket.nonzero()[0].tolist()
            self.num_pinned = idle.num_pinned


class Snapshot:
    """See above. `out` are the page ids handed out, ascending, `num_free` those that the free list counts."""

    __slots__ = (
        "cache",
        "groups",
        "is_tiered",
        "num_free",
        "out",
        "out_books",
        "queued",
        "requests",
        "tree",
        "waits",
    )

    def __init__(self, cache: Audited, before: Snapshot | None = None) -> None:
        self.cache = cache
        self.is_tiered = bool(cache.parts.laws)
        waits = Waits(cache.fences.waiting, cache.parts.holds.waiting)
        self.waits: Waits = before.waits if before is not None and before.waits.books == waits.books else waits
        self.requests = self._requests(cache, before)
        self.tree = self._tree(cache, before)
        self.queued = cache.tree.queued()
        self.num_free = cache.pages.num_free_pages
        self.out_books = cache.pages.is_out(_ALL).tobytes()
        self.out: list[int]
        if before is not None and self.out_books == before.out_books:
            self.out = before.out
        else:
            self.out = cache.pages.is_out(_ALL).nonzero()[0].tolist()
        self.groups: list[GroupSnapshot] = [self._group(cache, group, before) for group in cache.groups]

    @property
    def rows(self) -> list[RequestSnapshot]:
        """Running requests, in the order in which they began."""
        return self.requests.rows

    def held(self) -> tuple[object, ...]:
        """What an operation that must change nothing leaves as it is, for comparison. Clocks and counters are not."""
        groups = [group.books for group in self.groups]
        return self.out_books, self.num_free, self.requests.books, self.tree.books, groups, self.waits.books

    def _requests(self, cache: Audited, before: Snapshot | None) -> Requests:
        live, table = tuple(cache.rows.live.values()), cache.rows.table
        lengths = table.allocated.tobytes(), table.committed.tobytes()
        books = (live, [kv.lease.num_pages for kv in live], table.pages.tobytes(), lengths)
        if before is not None and before.requests.books == books:
            return before.requests
        return Requests(cache, books)

    def _tree(self, cache: Audited, before: Snapshot | None) -> Tree:
        tree = cache.tree
        nodes = list(tree.nodes())
        roots = tree.all_roots()
        ends = [row.kv.lease.node for row in self.requests.rows] + [lease.node for lease in self.waits.leases]
        ends += [lease.node for lease in cache.parts.holds.leases()]
        edges = [
            (n, n.parent, n.key, n.run, n.depth, n.leases, n.level, n.held, (*n.children,) if n.children else None)
            for n in nodes
        ]
        tiers = [(tree.is_here(n), tree.num_copies(n)) for n in nodes] if self.is_tiered else None
        tops = [(n, n.depth, n.leases, n.level, n.held, (*n.children,), not n.ghosts) for n in roots]
        books = (edges, tops, ends, tree.num_pages, tree.num_protected, tree.num_shared, tree.num_below, tiers)
        if before is not None and before.tree.books == books:
            return before.tree
        return Tree(books, nodes, roots, ends)

    def _group(self, cache: Audited, group: GroupCache, before: Snapshot | None) -> GroupSnapshot:
        frames = group.frames
        allocator = frames.allocator
        books = (
            frames.table.books(),
            allocator.is_out(_ALL).tobytes(),
            frames.num_free,
            group.num_evictable,
            group.books(),
        )
        if before is not None:
            old = before.groups[group.index]
            read_in_part = not group.reach.whole  # then what it holds depends on what rows and steps in flight do
            same = not read_in_part or (self.requests is before.requests and self.waits is before.waits)
            same &= not self.is_tiered and not (read_in_part and len(cache.parts.holds))
            if same and old.books == books:
                return old
        return GroupSnapshot(cache, group, books, self.requests.rows, self.waits)
