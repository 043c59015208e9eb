"""Match and Insertion: what the tree answers."""

from __future__ import annotations

from quire.prefix.node import Node
from quire.spec.events import Namespace
from quire.spec.ids import Ids


class Match:
    """How far a prefix is cached. A snapshot: valid until the tree changes; `RadixCache.lease` makes it last.

    `pages` are the page ids of the matched pages, in order, not to be written. `path` holds the nodes they come from,
    the last one possibly matched in part. The first `num_here` pages are on the device.
    """

    __slots__ = ("namespace", "num_here", "num_pages", "pages", "path", "version")

    def __init__(
        self, namespace: Namespace, pages: Ids, path: list[Node], version: int, num_here: int | None = None
    ) -> None:
        self.namespace = namespace
        self.pages = pages
        self.num_pages = len(pages)
        self.path = path
        self.version = version
        self.num_here = self.num_pages if num_here is None else num_here

    def num_evictable(self, num_pages: int) -> int:
        """How many of the first `num_pages` pages are on the device and held by no lease now; leases hold from the root
        on."""
        end = first = min(num_pages, self.num_here)
        for node in reversed(self.path):
            if node.level:
                break
            first = min(first, node.depth)
        return end - first


class Insertion:
    """What `RadixCache.insert` did: the pages that now stand for the inserted tokens, and the caller's pages that were
    not taken because those tokens were cached already (the caller still owns these)."""

    __slots__ = ("duplicates", "pages")

    def __init__(self, pages: Ids, duplicates: Ids) -> None:
        self.pages = pages
        self.duplicates = duplicates
