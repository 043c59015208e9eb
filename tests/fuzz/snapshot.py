"""Snapshot: a cache at one moment, as plain lists: for the tiny pools of lives a list costs a tenth of an array."""

from __future__ import annotations

from dataclasses import dataclass

from quire.cache.offload import CacheParts
from quire.cache.request_kv import RequestKV
from quire.cache.states import GroupCache


@dataclass(slots=True)
class RequestSnapshot:
    """One running request: lengths in tokens, page ids in order, the first `shared` of them cached."""

    kv: RequestKV
    allocated: int
    committed: int
    pages: list[int]
    shared: int


@dataclass(slots=True)
class GroupSnapshot:
    """One group: the frame of each page, 0 for none."""

    group: GroupCache
    column: list[int]


class Snapshot:
    """Shares only nodes, leases and request records with the cache. O(pages + nodes).

    `edges` are all nodes except the roots, parents first, with their page ids. `moving` pages were released and wait
    for a step in flight; `given` is each `GroupRelease` that waits: its group, and the pages to unpin.
    """

    def __init__(self, parts: CacheParts) -> None:
        tree, rows, holds = parts.tree, parts.rows, parts.holds
        retired = holds.fences.waiting
        self.moving = [page for each in retired for page in each.pages.tolist()]
        self.moving += [page for withheld in parts.withheld for page in withheld()]
        self.given = [(part.group, part.unpinned.tolist()) for each in retired for part in each.released]
        self.requests = [
            RequestSnapshot(kv, rows.allocated(kv), rows.committed(kv), rows.page_ids(kv).tolist(), kv.lease.num_pages)
            for kv in rows.live.values()
        ]
        self.roots = tree.all_roots()
        self.edges = [(node, node.pages.tolist()) for node in tree.nodes()]
        self.num_free = parts.pages.num_free_pages
        self.groups = [GroupSnapshot(group, group.table.frame.tolist()) for group in parts.groups]
