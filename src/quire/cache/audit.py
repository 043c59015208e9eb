"""The laws of the cache, each checked by walking everything. Expensive: for tests, idle servers and doctors.

free + private + cached + moving + quarantined == num_frames        every frame and page has exactly one owner
protected <= committed <= allocated, protected % page_size == 0     per request
a row's protected pages are its lease's path                        what it reads is what it pinned
a node's leases are the leases at or below it                       nothing pinned is evicted, nothing else is kept
the tree's counters are the sums over its nodes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from quire.errors import AuditFailure
from quire.prefix.node import Lease, Node
from quire.spec.ids import Ids, Tier

if TYPE_CHECKING:
    from quire.cache.kv_cache import KVCache

TOKEN_BYTES = 4


def audit(cache: KVCache) -> None:
    """Check every law. Raises AuditFailure naming each one that does not hold. O(pages + nodes)."""
    broken = [
        *_page_owners(cache),
        *_frames(cache),
        *_requests(cache),
        *_tree_shape(cache),
        *_lease_counts(cache),
        *_tree_counters(cache),
        *_evictable(cache),
    ]
    if broken:
        raise AuditFailure("; ".join(broken) + ".")


def private_pages(cache: KVCache) -> Ids:
    """Pages that running requests own alone."""
    parts = [cache.page_ids(kv)[kv.lease.num_pages :] for kv in cache.live_requests]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def _page_owners(cache: KVCache) -> Iterator[str]:
    """Every page id is free, private, cached or moving, and only one of them."""
    every = np.arange(1, cache.plan.num_pages + 1, dtype=np.int32)
    owners: dict[str, Ids] = {
        "free": every[~cache.pages.is_out(every)],
        "private": private_pages(cache),
        "cached": _concatenate([node.pages for node in cache.tree.nodes()]),
        "moving": _concatenate([retired.pages for retired in cache.retired]),
    }
    count = Counter(int(page) for pages in owners.values() for page in pages)
    wrong = {page: n for page, n in count.items() if n > 1 or not 1 <= page <= cache.plan.num_pages}
    for page in sorted(wrong):
        holders = ", ".join(name for name, pages in owners.items() if page in pages)
        yield f"page {page} has {wrong[page]} owners ({holders})"
    lost = cache.plan.num_pages - len(count)
    if lost > 0:
        missing = sorted(set(range(1, cache.plan.num_pages + 1)) - set(count))
        yield f"{lost} pages have no owner: {missing[:8]}"
    if cache.pages.num_free_pages != len(owners["free"]):
        yield f"{cache.pages.num_free_pages} pages are in the free list, but {len(owners['free'])} are not out"


def _frames(cache: KVCache) -> Iterator[str]:
    """Per group: a page that is out has one frame, no frame serves two pages, and frames out are frames bound."""
    out = cache.pages.is_out(np.arange(cache.plan.num_pages + 1, dtype=np.int32))
    for group, allocator in enumerate(cache.frame_allocators):
        name = cache.plan.groups[group].name
        column = cache.frames.column(Tier.DEVICE, group)
        bound = column[column != 0]
        if column[0] != 0:
            yield f"group '{name}': the padding page is bound to frame {int(column[0])}"
        if len(np.unique(bound)) != len(bound):
            yield f"group '{name}': a frame is bound to two pages"
        if not np.array_equal(column != 0, out):
            page = int(np.flatnonzero((column != 0) != out)[0])
            state = "out" if out[page] else "free"
            yield f"group '{name}': page {page} is {state} and its frame is {int(column[page])}"
        if not allocator.is_out(bound).all():
            yield f"group '{name}': a bound frame is free"
        free, total = allocator.num_free_pages, cache.plan.frames_of(group)
        if free + len(bound) != total:
            yield f"group '{name}': {free} free + {len(bound)} bound != {total} frames"


def _requests(cache: KVCache) -> Iterator[str]:
    """protected <= committed <= allocated; the protected part is page-aligned and is the leased path."""
    for kv in cache.live_requests:
        protected, committed, allocated = cache.protected(kv), cache.committed(kv), cache.allocated(kv)
        if not 0 <= protected <= committed <= allocated:
            yield f"row {kv.row}: protected {protected}, committed {committed}, allocated {allocated} are out of order"
        path = cache.tree.path_pages(kv.lease)
        if not np.array_equal(path, cache.page_ids(kv)[: kv.lease.num_pages]):
            yield f"row {kv.row}: its first {kv.lease.num_pages} pages are not its lease's path"


def _tree_shape(cache: KVCache) -> Iterator[str]:
    """Edges hold whole pages, children hang under their first page, parents point back."""
    page_bytes = cache.page_size * TOKEN_BYTES
    for node in (*cache.tree.roots().values(), *cache.tree.nodes()):
        if not node.is_root and (not len(node.pages) or len(node.key) != len(node.pages) * page_bytes):
            yield f"an edge of {len(node.pages)} pages has {len(node.key)} bytes of tokens"
        for first, child in node.children.items():
            if child.parent is not node or child.key[:page_bytes] != first:
                yield "a child hangs in the wrong place"
        if node.is_root and not node.children and not node.leases:
            yield "a root is kept that nothing needs"


def _lease_counts(cache: KVCache) -> Iterator[str]:
    """A node counts exactly the leases at it and below it, those that wait for a fence among them."""
    expected: Counter[int] = Counter()
    for lease in _leases(cache):
        node: Node | None = lease.node
        while node is not None:
            expected[id(node)] += 1
            node = node.parent
    for node in (*cache.tree.roots().values(), *cache.tree.nodes()):
        if node.leases != expected[id(node)]:
            yield f"a node counts {node.leases} leases and has {expected[id(node)]}"


def _tree_counters(cache: KVCache) -> Iterator[str]:
    tree = cache.tree
    sums = {"num_pages": 0, "num_protected": 0, "num_shared": 0}
    for node in tree.nodes():
        sums["num_pages"] += len(node.pages)
        sums["num_protected"] += len(node.pages) * (node.leases > 0)
        sums["num_shared"] += len(node.pages) * (node.leases > 1)
    for name, total in sums.items():
        if getattr(tree, name) != total:
            yield f"the tree counts {name} = {getattr(tree, name)}, its nodes sum to {total}"


def _evictable(cache: KVCache) -> Iterator[str]:
    """Every unleased leaf has its entry in the eviction queue."""
    queued = cache.tree.queued()
    for node in cache.tree.nodes():
        if node.is_leaf and not node.leases and node not in queued:
            yield f"an unleased leaf of {len(node.pages)} pages can never be evicted"


def _leases(cache: KVCache) -> list[Lease]:
    waiting = [retired.lease for retired in cache.retired if retired.lease is not None]
    return [kv.lease for kv in cache.live_requests] + waiting


def _concatenate(parts: list[Ids]) -> Ids:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
