"""The laws of the cache, each checked by walking everything. For tests, fuzzing, idle servers and doctors.

free + private + cached + moving + quarantined == num_frames        every frame and page has exactly one owner
protected <= committed <= allocated, protected % page_size == 0     per request
a row's protected pages are its lease's path                        what it reads is what it pinned
a page's pins are its readers, and without any its frame is idle    per group whose frames may go before their pages
a node's level is that of the leases at or below it                 nothing pinned is evicted, nothing else is kept
the tree's counters are the sums over its nodes

A law that holds costs one comparison of lists; only one that is broken is looked at again, to say where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from quire.cache.snapshot import Audited, GroupSnapshot, Snapshot
from quire.errors import AuditFailure
from quire.prefix.node import Node

TOKEN_BYTES = 4


def audit(cache: Audited, before: Snapshot | None = None) -> Snapshot:
    """Check every law, and return what was seen. Raises AuditFailure naming each one that is broken.

    Laws about what is as it was in `before`, a snapshot that has passed, are not checked again. O(pages + nodes).
    """
    snapshot = Snapshot(cache, before)
    pages = before is None or snapshot.out is not before.out  # whether each has changed
    rows = before is None or snapshot.requests is not before.requests
    tree = before is None or snapshot.tree is not before.tree
    waits = before is None or snapshot.waits is not before.waits
    broken: list[str] = []
    if pages or rows or tree or waits:
        broken += _page_owners(snapshot)
    if rows or tree:
        broken += _requests(snapshot)
    if tree:
        broken += _tree(snapshot)
        broken += _leases(snapshot)
    broken += _queue(snapshot)
    if snapshot.num_free + len(snapshot.out) != cache.pages.num_pages:
        broken.append(
            f"{snapshot.num_free} pages are free, but {cache.pages.num_pages - len(snapshot.out)} are not out"
        )
    for at, found in enumerate(snapshot.groups):
        group = before is None or found is not before.groups[at]
        if group or pages:
            broken += _frames(snapshot, found)
        if not found.whole and (group or tree):
            broken += _idle(found, snapshot.tree.cached)
        if not found.whole and (group or rows):
            broken += _reads(snapshot, found)
    for law in cache.parts.laws:
        broken += law(snapshot)
    if broken:
        raise AuditFailure("; ".join(broken) + ".")
    return snapshot


def _page_owners(snapshot: Snapshot) -> Iterator[str]:
    """Every page id is free, private, cached or moving, and only one of them."""
    cached, private, moving = snapshot.tree.cached, snapshot.requests.private, snapshot.waits.pages
    owned = sorted(cached + private + moving)
    num_pages = snapshot.cache.pages.num_pages
    if owned != snapshot.out:
        out = set(snapshot.out)
        free = [page for page in range(1, num_pages + 1) if page not in out]
        owners = {"free": free, "private": private, "cached": cached, "moving": moving}
        for page, count in sorted(Counter(owned + free).items()):
            if count > 1 or not 1 <= page <= num_pages:
                yield f"page {page} has {count} owners ({', '.join(n for n, pages in owners.items() if page in pages)})"
        missing = sorted(out - set(owned))
        if missing:
            yield f"{len(missing)} pages have no owner: {missing[:8]}"


def _frames(snapshot: Snapshot, found: GroupSnapshot) -> Iterator[str]:
    """No frame serves two, frames out are those of pages and of requests, and pages have what they must."""
    group, column, name = found.group, found.column, f"group '{found.group.name}'"
    resident = [page for page, frame in enumerate(column) if frame]
    used = sorted([column[page] for page in resident] + found.carried)
    if used != found.out:
        if len(set(used)) != len(used):
            yield f"{name}: a frame serves two"
        if not set(used) <= set(found.out):
            yield f"{name}: a frame in use is free"
    if found.num_free + len(used) != group.num_frames or used != found.out:
        yield f"{name}: {found.num_free} free + {len(used)} in use != {group.num_frames} frames"
    if found.num_evictable < 0 or group.num_cached < 0:
        yield f"{name} counts less than nothing: {found.num_evictable} evictable, {group.num_cached} cached"
    if column[0]:
        yield f"{name}: the padding page is bound to frame {column[0]}"
    if resident != snapshot.out:
        extra = sorted(set(resident) - set(snapshot.out) - {0})
        if extra:
            yield f"{name}: page {extra[0]} is free and has a frame"
        missing = sorted(set(snapshot.out) - set(resident))
        if snapshot.is_tiered:
            here = snapshot.cache.tree.is_here
            gone = {page for node, pages in snapshot.tree.edges if not here(node) for page in pages}
            if gone & set(resident):
                yield f"{name}: page {min(gone & set(resident))} has left the device and has a frame there"
            gone.update(snapshot.waits.pages)  # a duplicate may have given its frame to a page that was below only
            missing = [page for page in missing if page not in gone]
        if missing and group.reach.whole:
            yield f"{name}: page {missing[0]} is out and has no frame"


def _reads(snapshot: Snapshot, found: GroupSnapshot) -> Iterator[str]:
    """What a request reads of a group that is read in part is there."""
    group, column, size = found.group, found.column, snapshot.cache.page_size
    if group.reach.carried:
        return
    for row in snapshot.rows:
        first = group.reach.needed(row.committed // size).start
        if 0 in [column[page] for page in row.pages[first:]]:
            yield f"group '{group.name}': row {row.kv.row} reads a page that has no frame"


def _idle(found: GroupSnapshot, cached: list[int]) -> Iterator[str]:
    """Where frames may go before their pages: a page is pinned as often as requests read it, and else its frame
    is idle."""
    name, pins, column = f"group '{found.group.name}'", found.pins, found.column
    readers = [0] * len(pins)
    for page in found.readers:
        readers[page] += 1
    if readers != pins:
        page = next(page for page, count in enumerate(readers) if count != pins[page])
        yield f"{name}: page {page} has {pins[page]} pins and {readers[page]} readers"
    idle = sorted([page for page in cached if column[page] and not readers[page]])
    if idle != found.shelved:
        page = min(set(idle) ^ set(found.shelved))
        yield f"{name}: page {page} is {'not ' if page in idle else ''}idle"
    if found.num_evictable != len(idle) or found.num_pinned != len(readers) - readers.count(0):
        yield f"{name} miscounts: {found.num_evictable} evictable, {found.num_pinned} pinned"


def _requests(snapshot: Snapshot) -> Iterator[str]:
    """protected <= committed <= allocated; the protected part is page-aligned and is the leased path."""
    size = snapshot.cache.page_size
    pages = dict(snapshot.tree.edges)
    for row in snapshot.rows:
        protected, committed, allocated = row.shared * size, row.committed, row.allocated
        if not 0 <= protected <= committed <= allocated:
            yield (
                f"row {row.kv.row}: protected {protected}, committed {committed}, allocated {allocated} are out of "
                "order"
            )
        end = row.shared
        node: Node | None = row.kv.lease.node
        while node is not None and node.parent is not None and end >= 0:
            edge = pages.get(node, [-1])
            if row.pages[max(0, end - len(edge)) : end] != edge:
                break
            end -= len(edge)
            node = node.parent
        if end or node is None or node.parent is not None:
            yield f"row {row.kv.row}: its first {row.shared} pages are not its lease's path"


def _tree(snapshot: Snapshot) -> Iterator[str]:
    """Edges hold whole pages, children hang under their first page, parents point back; counters are sums."""
    tree, page_bytes = snapshot.cache.tree, snapshot.cache.page_size * TOKEN_BYTES
    num_pages = num_protected = num_shared = num_below = num_children = 0
    for node, pages in snapshot.tree.edges:
        length = len(pages)
        if not length or len(node.key) != length * page_bytes:
            yield f"an edge of {length} pages has {len(node.key)} bytes of tokens"
        parent = node.parent
        if parent is None or parent.children.get(node.key[:page_bytes]) is not node:
            yield "a child hangs in the wrong place"
        num_children += len(node.children)
        if not tree.is_here(node):
            num_below += length
        else:
            num_pages += length
            num_protected += length if node.level else 0
            num_shared += length if node.level > 1 else 0
        if parent is not None and node.depth != parent.depth + parent.num_pages:
            yield f"an edge begins after {parent.depth + parent.num_pages} pages and says {node.depth}"
    for root in snapshot.tree.roots:
        num_children += len(root.children)
        if not root.children and not root.ghosts and not root.level:
            yield "a root is kept that nothing needs"
    if num_children != len(snapshot.tree.edges):
        yield "a child hangs in the wrong place"
    sums = {"num_pages": num_pages, "num_protected": num_protected, "num_shared": num_shared, "num_below": num_below}
    for name, total in sums.items():
        if getattr(tree, name) != total:
            yield f"the tree counts {name} = {getattr(tree, name)}, its nodes sum to {total}"


def _queue(snapshot: Snapshot) -> Iterator[str]:
    """Every unleased leaf has its entry in the eviction queue."""
    tree = snapshot.cache.tree
    for node, pages in snapshot.tree.edges:
        leaf = tree.is_here(node) and not any(map(tree.is_here, node.children.values()))
        if not node.level and leaf and node not in snapshot.queued:
            yield f"an unleased leaf of {len(pages)} pages can never be evicted"


def _leases(snapshot: Snapshot) -> Iterator[str]:
    """A node counts exactly the leases that end at it, those that wait for a fence among them, and its level is that of
    the leases at it and below it."""
    here: dict[Node, int] = {}
    below: dict[Node, int] = {}
    for end in snapshot.tree.ends:
        here[end] = here.get(end, 0) + 1
        node: Node | None = end
        while node is not None:
            below[node] = below.get(node, 0) + 1
            node = node.parent
    for node in (*snapshot.tree.roots, *[node for node, _ in snapshot.tree.edges]):
        if node.leases != here.get(node, 0):
            yield f"a node counts {node.leases} leases and has {here.get(node, 0)}"
        if node.level != min(2, below.get(node, 0)):
            yield f"a node with {below.get(node, 0)} leases at it or below it has level {node.level}"
        if node.held != node.leases + sum([child.level for child in node.children.values()]):
            yield f"a node is held {node.held} times, which its leases and children do not make"
