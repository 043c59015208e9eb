"""The audit: checks the invariants of a whole cache. For tests, fuzzing, idle servers and `quire doctor`.

free + private + cached + moving + quarantined == num_frames        every frame and page has exactly one owner
protected <= committed <= allocated, protected % page_size == 0     per request
a row's protected pages are the path of its lease                   it pins what it reads
a page's pins are its readers, and without any its frame is idle    per group whose frames may go before their pages
a node's level is that of the leases at or below it                 eviction takes what nothing pins, and only that
the tree's counters are the sums over its nodes

If an invariant holds, it costs one comparison of lists. Only if it does not, the audit searches for the place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from quire.cache.offload import CacheParts
from quire.cache.snapshot import GroupSnapshot, Snapshot
from quire.errors import AuditFailure
from quire.prefix.node import TOKEN_BYTES, Node


def audit(parts: CacheParts, before: Snapshot | None = None) -> Snapshot:
    """Check all invariants, and return the snapshot. Raises AuditFailure, which names each fault. O(pages + nodes).
    Parts that equal those of `before`, a snapshot that has passed, are not checked again."""
    snapshot = Snapshot(parts, before)
    if broken := list(_broken(snapshot, before)):
        raise AuditFailure("; ".join(broken) + ".")
    return snapshot


def _broken(now: Snapshot, before: Snapshot | None) -> Iterator[str]:
    def changed(name: str) -> bool:
        return before is None or getattr(now, name) is not getattr(before, name)

    pages, rows, tree, waits = map(changed, ("out", "requests", "tree", "waits"))
    if pages or rows or tree or waits:
        yield from _page_owners(now)
    if rows or tree:
        yield from _requests(now)
    if tree:
        yield from _tree(now)
        yield from _leases(now)
    queued, is_here = now.parts.tree.queued(), now.parts.tree.is_here
    for node, pages_of in now.tree.edges:
        leaf = is_here(node) and not any(map(is_here, node.children.values()))
        if not node.level and leaf and node not in queued:
            yield f"an unleased leaf of {len(pages_of)} pages can never be evicted"
    for at, found in enumerate(now.groups):
        group = before is None or found is not before.groups[at]
        if group or pages:
            yield from _frames(now, found)
        if not found.group.reach.whole and (group or tree):
            yield from _idle(found, now.tree.cached)
        if not found.group.reach.whole and (group or rows):
            yield from _reads(now, found)
    for check in now.parts.checks:
        yield from check(now)


def _page_owners(now: Snapshot) -> Iterator[str]:
    """Every page id is either free, private, cached or moving."""
    cached, private, moving = now.tree.cached, now.requests.private, now.waits.pages
    owned, num_pages = sorted(cached + private + moving), now.parts.pages.num_pages
    if owned != now.out:
        out = set(now.out)
        free = [page for page in range(1, num_pages + 1) if page not in out]
        owners = {"free": free, "private": private, "cached": cached, "moving": moving}
        for page, count in sorted(Counter(owned + free).items()):
            if count > 1 or not 1 <= page <= num_pages:
                yield f"page {page} has {count} owners ({', '.join(n for n, pages in owners.items() if page in pages)})"
        if missing := sorted(out - set(owned)):
            yield f"{len(missing)} pages have no owner: {missing[:8]}"
    if now.num_free + len(now.out) != num_pages:
        yield f"{now.num_free} pages are free, but {num_pages - len(now.out)} are not out"


def _frames(now: Snapshot, found: GroupSnapshot) -> Iterator[str]:
    """Each allocated frame belongs to one page or request, and pages of full groups have frames."""
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
    if resident != now.out:
        if extra := set(resident) - set(now.out) - {0}:
            yield f"{name}: page {min(extra)} is free and has a frame"
        missing = set(now.out) - set(resident)
        if now.is_tiered:
            here = now.parts.tree.is_here
            gone = {page for node, pages in now.tree.edges if not here(node) for page in pages}
            if gone & set(resident):
                yield f"{name}: page {min(gone & set(resident))} has left the device and has a frame there"
            missing -= gone.union(now.waits.pages)  # the frame of a duplicate may be that of a page on lower tiers only
        if missing and group.reach.whole:
            yield f"{name}: page {min(missing)} is out and has no frame"


def _reads(now: Snapshot, found: GroupSnapshot) -> Iterator[str]:
    """The pages of a window that a request reads have frames."""
    group, size = found.group, now.parts.plan.page_size
    for row in now.requests.rows if not group.reach.in_place else ():
        first = group.reach.needed(row.committed // size).start
        if 0 in [found.column[page] for page in row.pages[first:]]:
            yield f"group '{group.name}': row {row.kv.row} reads a page that has no frame"


def _idle(found: GroupSnapshot, cached: list[int]) -> Iterator[str]:
    """In a group whose frames can be reclaimed first, a page has one pin per reader, and is idle without pins."""
    name, pins, column = f"group '{found.group.name}'", found.pins, found.column
    readers = [0] * len(pins)
    for page in found.readers:
        readers[page] += 1
    if readers != pins:
        page = next(page for page, count in enumerate(readers) if count != pins[page])
        yield f"{name}: page {page} has {pins[page]} pins and {readers[page]} readers"
    idle = sorted([page for page in cached if column[page] and not readers[page]])
    if idle != found.idle:
        page = min(set(idle) ^ set(found.idle))
        yield f"{name}: page {page} is {'not ' if page in idle else ''}idle"
    if found.num_evictable != len(idle) or found.num_pinned != len(readers) - readers.count(0):
        yield f"{name} miscounts: {found.num_evictable} evictable, {found.num_pinned} pinned"


def _requests(now: Snapshot) -> Iterator[str]:
    """protected <= committed <= allocated, and the protected pages are the leased path."""
    pages = dict(now.tree.edges)
    for row in now.requests.rows:
        name, protected = f"row {row.kv.row}", row.shared * now.parts.plan.page_size
        if not 0 <= protected <= row.committed <= row.allocated:
            lengths = f"protected {protected}, committed {row.committed}, allocated {row.allocated}"
            yield f"{name}: {lengths} are out of order"
        end = row.shared
        node: Node | None = row.kv.lease.node
        while node is not None and node.parent is not None and end >= 0:
            edge = pages.get(node, [-1])
            if row.pages[max(0, end - len(edge)) : end] != edge:
                break
            end -= len(edge)
            node = node.parent
        if end or node is None or node.parent is not None:
            yield f"{name}: its first {row.shared} pages are not its lease's path"


def _tree(now: Snapshot) -> Iterator[str]:
    """Edges are whole pages, children are found by their first page, parents are right, counters are sums."""
    tree, page_bytes = now.parts.tree, now.parts.plan.page_size * TOKEN_BYTES
    sums = dict.fromkeys(("num_pages", "num_protected", "num_shared", "num_below"), 0)
    num_children = sum(len(root.children) for root in now.tree.roots)
    for node, pages in now.tree.edges:
        length, parent = len(pages), node.parent
        if not length or len(node.key) != length * page_bytes:
            yield f"an edge of {length} pages has {len(node.key)} bytes of tokens"
        if parent is None or parent.children.get(node.key[:page_bytes]) is not node:
            yield "a child hangs in the wrong place"
        num_children += len(node.children)
        if tree.is_here(node):
            sums["num_pages"] += length
            sums["num_protected"] += length if node.level else 0
            sums["num_shared"] += length if node.level > 1 else 0
        else:
            sums["num_below"] += length
        if parent is not None and node.depth != parent.depth + parent.num_pages:
            yield f"an edge begins after {parent.depth + parent.num_pages} pages and says {node.depth}"
    if any(not root.children and not root.evicted and not root.level for root in now.tree.roots):
        yield "a root is kept that nothing needs"
    if num_children != len(now.tree.edges):
        yield "a child hangs in the wrong place"
    for name, total in sums.items():
        if getattr(tree, name) != total:
            yield f"the tree counts {name} = {getattr(tree, name)}, its nodes sum to {total}"


def _leases(now: Snapshot) -> Iterator[str]:
    """A node counts the leases that end at it, with those that wait for a step. Its level also counts those below."""
    here, below = Counter(now.tree.ends), Counter[Node]()
    for end in now.tree.ends:
        node: Node | None = end
        while node is not None:
            below[node] += 1
            node = node.parent
    for node in (*now.tree.roots, *(node for node, _ in now.tree.edges)):
        if node.leases != here[node]:
            yield f"a node counts {node.leases} leases and has {here[node]}"
        if node.level != min(2, below[node]):
            yield f"a node with {below[node]} leases at it or below it has level {node.level}"
        if node.held != node.leases + sum([child.level for child in node.children.values()]):
            yield f"a node is held {node.held} times, which its leases and children do not make"
