"""The laws of the cache, each checked by walking everything. Expensive: for tests, idle servers and doctors.

free + private + cached + moving + quarantined == num_frames        every frame and page has exactly one owner
protected <= committed <= allocated, protected % page_size == 0     per request
a row's protected pages are its lease's path                        what it reads is what it pinned
a page's pins are its readers, and without any it is on the shelf   per group whose frames may go before their pages
a node's leases are the leases at or below it                       nothing pinned is evicted, nothing else is kept
the tree's counters are the sums over its nodes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.groups import GroupCache
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
        *_counts(cache),
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
    owned = _concatenate(list(owners.values()))
    foreign = owned[(owned < 1) | (owned > cache.plan.num_pages)]
    count = np.bincount(owned[(owned >= 1) & (owned <= cache.plan.num_pages)], minlength=cache.plan.num_pages + 1)
    for page in [*np.unique(foreign).tolist(), *np.flatnonzero(count > 1).tolist()]:
        holders = ", ".join(name for name, pages in owners.items() if page in pages)
        yield f"page {page} has {int((owned == page).sum())} owners ({holders})"
    missing = every[count[1:] == 0]
    if len(missing):
        yield f"{len(missing)} pages have no owner: {missing[:8].tolist()}"
    if cache.pages.num_free_pages != len(owners["free"]):
        yield f"{cache.pages.num_free_pages} pages are in the free list, but {len(owners['free'])} are not out"


def _frames(cache: KVCache) -> Iterator[str]:
    """Per group: no frame serves two, frames out are those of pages and of requests, and pages have what they must."""
    for index, group in enumerate(cache.groups):
        column = cache.frames.column(Tier.DEVICE, index)
        bound = column[column != 0]
        carried = _carried(cache, index, group)
        used = np.concatenate((bound, carried))
        if column[0] != 0:
            yield f"group '{group.name}': the padding page is bound to frame {int(column[0])}"
        if len(np.unique(used)) != len(used):
            yield f"group '{group.name}': a frame serves two"
        if not group.frames.is_out(used).all():
            yield f"group '{group.name}': a frame in use is free"
        if group.num_free + len(used) != group.num_frames:
            yield f"group '{group.name}': {group.num_free} free + {len(used)} in use != {group.num_frames} frames"
        yield from _residency(cache, group, column)
        yield from _shelf(cache, index, group, column)


def _residency(cache: KVCache, group: GroupCache, column: Ids) -> Iterator[str]:
    """A free page has no frame. One that is out has one, where a group is read as a whole or somebody reads it."""
    out = cache.pages.is_out(np.arange(cache.plan.num_pages + 1, dtype=np.int32))
    if (column != 0)[~out].any():
        yield f"group '{group.name}': page {int(np.flatnonzero((column != 0) & ~out)[0])} is free and has a frame"
    if group.reach.whole and not (column != 0)[out].all():
        yield f"group '{group.name}': page {int(np.flatnonzero((column == 0) & out)[0])} is out and has no frame"
    if group.reach.whole or group.reach.carried:
        return
    for kv in cache.live_requests:
        pages = cache.page_ids(kv)[group.reach.needed(cache.committed(kv) // cache.page_size).start :]
        if not (column[pages] != 0).all():
            yield f"group '{group.name}': row {kv.row} reads a page that has no frame"


def _counts(cache: KVCache) -> Iterator[str]:
    """What statistics say of a group's frames adds up, and nothing is counted twice."""
    for name, frames in cache.statistics().frames.items():
        if min(frames.free, frames.private, frames.cached, frames.moving) < 0:
            yield f"group '{name}' counts less than nothing: {frames}"


def _shelf(cache: KVCache, index: int, group: GroupCache, column: Ids) -> Iterator[str]:
    """Where frames may go before their pages: a page is pinned as often as requests read it, and else on the shelf."""
    if group.shelf is None:
        return
    every = np.arange(cache.plan.num_pages + 1, dtype=np.int32)
    pins = np.zeros(len(every), dtype=np.int32)
    for kv in cache.live_requests:
        pages = cache.page_ids(kv)[: kv.lease.num_pages]
        np.add.at(pins, group.pinned(kv.row, pages), 1)
    for retired in cache.retired:
        for given in retired.given:
            if given.group == index:
                np.add.at(pins, given.unpinned, 1)
    if not np.array_equal(pins, group.shelf.pins(every)):
        page = int(np.flatnonzero(pins != group.shelf.pins(every))[0])
        yield f"group '{group.name}': page {page} has {group.shelf.pins(every)[page]} pins and {pins[page]} readers"
    cached = np.zeros(len(every), dtype=np.bool_)
    cached[_concatenate([node.pages for node in cache.tree.nodes()])] = True
    idle = cached & (column != 0) & (pins == 0)
    if not np.array_equal(idle, group.shelf.on_shelf(every)):
        page = int(np.flatnonzero(idle != group.shelf.on_shelf(every))[0])
        yield f"group '{group.name}': page {page} is {'not ' if idle[page] else ''}on the shelf"
    if group.num_evictable != int(idle.sum()) or group.shelf.num_pinned != int((pins > 0).sum()):
        yield f"group '{group.name}' miscounts: {group.num_evictable} evictable, {group.shelf.num_pinned} pinned"


def _carried(cache: KVCache, index: int, group: GroupCache) -> Ids:
    """Frames that requests own, and those of theirs that wait for a step in flight."""
    parts = [given.frames for retired in cache.retired for given in retired.given if given.group == index]
    parts += [group.frames_of(kv.row) for kv in cache.live_requests]
    return _concatenate(parts)


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
        if not node.is_root and (not node.num_pages or len(node.key) != node.num_pages * page_bytes):
            yield f"an edge of {node.num_pages} pages has {len(node.key)} bytes of tokens"
        for first, child in node.children.items():
            if child.parent is not node or child.key[:page_bytes] != first:
                yield "a child hangs in the wrong place"
            if child.depth != node.depth + node.num_pages:
                yield f"an edge begins after {node.depth + node.num_pages} pages and says {child.depth}"
        if node.is_root and not node.children and not node.ghosts and not node.level:
            yield "a root is kept that nothing needs"


def _lease_counts(cache: KVCache) -> Iterator[str]:
    """A node counts exactly the leases that end at it, those that wait for a fence among them, and its level is that of
    the leases at it and below it."""
    here = Counter(id(lease.node) for lease in _leases(cache))
    below: Counter[int] = Counter()
    for lease in _leases(cache):
        node: Node | None = lease.node
        while node is not None:
            below[id(node)] += 1
            node = node.parent
    for node in (*cache.tree.roots().values(), *cache.tree.nodes()):
        if node.leases != here[id(node)]:
            yield f"a node counts {node.leases} leases and has {here[id(node)]}"
        if node.level != min(2, below[id(node)]):
            yield f"a node with {below[id(node)]} leases at it or below it has level {node.level}"
        if node.held != node.leases + sum(child.level for child in node.children.values()):
            yield f"a node is held {node.held} times, which its leases and children do not make"


def _tree_counters(cache: KVCache) -> Iterator[str]:
    tree = cache.tree
    sums = {"num_pages": 0, "num_protected": 0, "num_shared": 0}
    for node in tree.nodes():
        sums["num_pages"] += node.num_pages
        sums["num_protected"] += node.num_pages * (node.level > 0)
        sums["num_shared"] += node.num_pages * (node.level > 1)
    for name, total in sums.items():
        if getattr(tree, name) != total:
            yield f"the tree counts {name} = {getattr(tree, name)}, its nodes sum to {total}"


def _evictable(cache: KVCache) -> Iterator[str]:
    """Every unleased leaf has its entry in the eviction queue."""
    queued = cache.tree.queued()
    for node in cache.tree.nodes():
        if node.is_leaf and not node.level and node not in queued:
            yield f"an unleased leaf of {node.num_pages} pages can never be evicted"


def _leases(cache: KVCache) -> list[Lease]:
    waiting = [retired.lease for retired in cache.retired if retired.lease is not None]
    return [kv.lease for kv in cache.live_requests] + waiting


def _concatenate(parts: list[Ids]) -> Ids:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
