"""Picture: everything a cache holds at one moment, read once into plain Python lists. What the audit looks at.

The only code beside the cache that knows how its parts keep their books. Pools under test are tiny, and there a list
costs a tenth of an array. A picture shares nothing with the cache but its nodes, leases and request records, so two of
them say what has changed in between. O(pages + nodes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.cache.groups import Given, GroupCache
from quire.cache.request_kv import RequestKV
from quire.prefix.node import Lease, Node
from quire.spec.ids import Tier

if TYPE_CHECKING:
    from quire.cache.kv_cache import KVCache

_ALL = slice(None)
Edge = tuple[Node, list[int]]
"""A node that is not a root, and the ids of its pages."""


class RowPicture:
    """One running request: lengths in tokens, `pages` from the first on, `shared` of them cached."""

    __slots__ = ("allocated", "committed", "kv", "pages", "shared")

    def __init__(self, kv: RequestKV, allocated: int, committed: int, pages: list[int]) -> None:
        self.kv = kv
        self.allocated = allocated
        self.committed = committed
        self.pages = pages
        self.shared = kv.lease.num_pages

    def held(self) -> tuple[object, ...]:
        """All of it, for comparison."""
        return self.kv, self.allocated, self.committed, self.pages, self.shared


class GroupPicture:
    """One group: `column[page]` is the page's frame, 0 where it has none; `out` are the frames handed out, ascending.

    `carried` are frames that belong to requests and to no page. `pins[page]` counts pins, `shelved` are the pages on
    the shelf, ascending, and `readers` has a page once for each request and each step in flight that reads it; all
    three are empty where no frame goes before its page.
    """

    __slots__ = ("carried", "column", "group", "num_evictable", "num_free", "num_pinned", "out", "pins", "readers")
    __slots__ += ("shelved",)

    def __init__(self, cache: KVCache, group: GroupCache, rows: Sequence[RowPicture], given: Sequence[Given]) -> None:
        self.group = group
        self.column: list[int] = cache.frames.column(Tier.DEVICE, group.index).tolist()
        self.out: list[int] = group.frames.is_out(_ALL).nonzero()[0].tolist()
        self.num_free = group.num_free
        self.num_evictable = group.num_evictable
        self.carried: list[int] = []
        self.readers: list[int] = []
        self.pins: list[int] = []
        self.shelved: list[int] = []
        self.num_pinned = 0
        for part in given:
            if part.group == group.index:
                self.carried += part.frames.tolist()
                self.readers += part.unpinned.tolist()
        if group.reach.carried:
            for row in rows:
                self.carried += group.frames_of(row.kv.row).tolist()
        shelf = group.shelf
        if shelf is not None:
            self.pins = shelf.pins(_ALL).tolist()
            self.shelved = shelf.on_shelf(_ALL).nonzero()[0].tolist()
            self.num_pinned = shelf.num_pinned
            for row in rows:
                self.readers += group.pinned(row.kv.row, cache.row_pages(row.kv, row.shared)).tolist()

    def held(self) -> tuple[object, ...]:
        """All of it, for comparison."""
        return self.column, self.out, self.carried, self.pins, self.shelved, self.num_evictable, self.num_free


class Picture:
    """See above. `out` are the page ids handed out, ascending; `edges` come parents first.

    `cached`, `private` and `moving` are the page ids that the tree holds, that running requests own alone, and that
    were given up and wait for a step in flight.
    """

    __slots__ = ("cache", "cached", "edges", "groups", "leases", "moving", "num_free", "out", "private", "queued")
    __slots__ += ("retired", "roots", "rows")

    def __init__(self, cache: KVCache) -> None:
        tree, size = cache.tree, cache.page_size
        self.cache = cache
        self.out: list[int] = cache.pages.is_out(_ALL).nonzero()[0].tolist()
        self.num_free = cache.num_free_pages
        self.rows: list[RowPicture] = []
        self.leases: list[Lease] = []
        self.private: list[int] = []
        for kv in cache.live_requests:
            allocated, committed = cache.allocated(kv), cache.committed(kv)
            row = RowPicture(kv, allocated, committed, cache.row_pages(kv, -(-allocated // size)).tolist())
            self.rows.append(row)
            self.leases.append(kv.lease)
            self.private += row.pages[row.shared :]
        self.retired = cache.retired
        self.moving: list[int] = []
        given: list[Given] = []
        for each in self.retired:
            self.moving += each.pages.tolist()
            given += each.given
            if each.lease is not None:
                self.leases.append(each.lease)
        self.edges: list[Edge] = [(node, node.pages.tolist()) for node in tree.nodes()]
        self.cached: list[int] = [page for _, pages in self.edges for page in pages]
        self.roots = list(tree.roots().values())
        self.queued = tree.queued()
        self.groups = [GroupPicture(cache, group, self.rows, given) for group in cache.groups]

    def held(self) -> tuple[object, ...]:
        """What an operation that must change nothing leaves as it is, for comparison. Clocks and counters are not."""
        tree = [(node, node.key, pages, node.leases) for node, pages in self.edges]
        groups = [group.held() for group in self.groups]
        return self.out, self.num_free, [row.held() for row in self.rows], groups, tree, self.retired
