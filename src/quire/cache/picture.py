"""Picture: everything a cache holds at one moment, read once into plain Python lists. What the audit looks at.

The only code beside the cache that knows how its parts keep their books. Pools under test are tiny, and there a list
costs a tenth of an array. A picture shares nothing with the cache but its nodes, leases and request records, so two of
them say what has changed in between. O(pages + nodes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.fences import Retired
from quire.cache.groups import GroupCache
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

    def __init__(self, cache: KVCache, kv: RequestKV) -> None:
        self.kv = kv
        self.allocated = cache.allocated(kv)
        self.committed = cache.committed(kv)
        self.pages: list[int] = cache.page_ids(kv).tolist()
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

    def __init__(self, cache: KVCache, group: GroupCache, rows: Sequence[RowPicture], retired: Sequence[Retired]):
        self.group = group
        self.column: list[int] = cache.frames.column(Tier.DEVICE, group.index).tolist()
        self.out: list[int] = np.flatnonzero(group.frames.is_out(_ALL)).tolist()
        self.num_free = group.num_free
        self.carried: list[int] = []
        self.readers: list[int] = []
        self.pins: list[int] = []
        self.shelved: list[int] = []
        self.num_evictable = group.num_evictable
        self.num_pinned = 0
        if group.reach.carried:
            for row in rows:
                self.carried += group.frames_of(row.kv.row).tolist()
        for each in retired:
            for given in each.given:
                if given.group == group.index:
                    self.carried += given.frames.tolist()
                    self.readers += given.unpinned.tolist()
        if group.shelf is not None:
            self.pins = group.shelf.pins(_ALL).tolist()
            self.shelved = np.flatnonzero(group.shelf.on_shelf(_ALL)).tolist()
            self.num_pinned = group.shelf.num_pinned
            for row in rows:
                self.readers += group.pinned(row.kv.row, np.array(row.pages[: row.shared], dtype=np.int32)).tolist()

    def held(self) -> tuple[object, ...]:
        """All of it, for comparison."""
        return self.column, self.out, self.carried, self.pins, self.shelved, self.num_evictable, self.num_free


class Picture:
    """See above. `out` are the page ids handed out, ascending; `edges` come parents first."""

    __slots__ = ("cache", "edges", "groups", "leases", "num_free", "out", "queued", "retired", "roots", "rows")

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.out: list[int] = np.flatnonzero(cache.pages.is_out(_ALL)).tolist()
        self.num_free = cache.num_free_pages
        self.retired = cache.retired
        self.rows = [RowPicture(cache, kv) for kv in cache.live_requests]
        self.groups = [GroupPicture(cache, group, self.rows, self.retired) for group in cache.groups]
        self.edges: list[Edge] = [(node, node.pages.tolist()) for node in cache.tree.nodes()]
        self.roots = list(cache.tree.roots().values())
        self.queued = cache.tree.queued()
        self.leases: list[Lease] = [row.kv.lease for row in self.rows]
        self.leases += [each.lease for each in self.retired if each.lease is not None]

    @property
    def cached(self) -> list[int]:
        """Page ids that the tree holds."""
        return [page for _, pages in self.edges for page in pages]

    @property
    def private(self) -> list[int]:
        """Page ids that running requests own alone."""
        return [page for row in self.rows for page in row.pages[row.shared :]]

    @property
    def moving(self) -> list[int]:
        """Page ids that were given up and wait for a step in flight."""
        return [page for each in self.retired for page in each.pages.tolist()]

    def held(self) -> tuple[object, ...]:
        """What an operation that must change nothing leaves as it is, for comparison. Clocks and counters are not."""
        tree = [(node, node.key, pages, node.leases) for node, pages in self.edges]
        groups = [group.held() for group in self.groups]
        return self.out, self.num_free, [row.held() for row in self.rows], groups, tree, self.retired
