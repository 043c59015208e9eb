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
from dataclasses import dataclass, field

from quire.cache.offload import CacheParts
from quire.cache.request_kv import RequestKV
from quire.cache.states import GroupCache
from quire.errors import AuditFailure
from quire.prefix.node import TOKEN_BYTES, Node
from quire.spec.ids import Tier


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
    """One group. The last four lists are empty if no frame can be reclaimed before its page."""

    group: GroupCache
    column: list[int]  # the frame of each page, 0 for none
    out: list[int]  # frames handed out, ascending
    num_free: int
    num_evictable: int
    num_pinned: int = 0
    carried: list[int] = field(default_factory=list)  # frames of requests, or quarantined, that belong to no page
    pins: list[int] = field(default_factory=list)  # of each page
    idle: list[int] = field(default_factory=list)  # pages with idle frames, ascending
    readers: list[int] = field(default_factory=list)  # a page for each request, hold and step in flight that reads it


class Snapshot:
    """The state of a cache at one moment, as plain Python lists: for the tiny pools of tests a list costs a tenth of an
    array. It shares only nodes, leases and request records with the cache. O(pages + nodes).

    `edges` are all nodes except the roots, parents first, with their page ids; `ends` is the node of each lease; `out`
    are the allocated page ids, ascending. `moving` pages were released and wait for a step in flight or a hold; `given`
    is each `GroupRelease` that waits: group, pages to unpin, pages that lose their frames, frames to free.
    """

    def __init__(self, parts: CacheParts) -> None:
        tree, rows, holds = parts.tree, parts.rows, parts.holds
        self.parts = parts
        self.is_tiered = bool(parts.checks)
        retired = holds.fences.waiting
        self.moving = [*holds.waiting, *(page for each in retired for page in each.pages.tolist())]
        self.moving += [page for withheld in parts.withheld for page in withheld()]
        waiting = [part for each in retired for part in each.released]
        self.given = [(p.group, p.unpinned.tolist(), p.dropped.tolist(), p.frames.tolist()) for p in waiting]
        self.requests = [
            RequestSnapshot(kv, rows.allocated(kv), rows.committed(kv), rows.page_ids(kv).tolist(), kv.lease.num_pages)
            for kv in rows.live.values()
        ]
        self.private = [page for row in self.requests for page in row.pages[row.shared :]]
        self.roots = tree.all_roots()
        self.ends = [lease.node for lease in holds.leases()]
        self.edges = [(node, node.pages.tolist()) for node in tree.nodes()]
        self.cached = [page for _, pages in self.edges for page in pages]
        self.num_free = parts.pages.num_free_pages
        self.out: list[int] = parts.pages.ids.out().tolist()
        self.groups = [self._group(group) for group in parts.groups]

    def _group(self, group: GroupCache) -> GroupSnapshot:
        frames, rows = group.frames, self.parts.rows
        column = frames.table.frame.tolist()
        found = GroupSnapshot(
            group, column, frames.out().tolist(), group.num_free, group.num_evictable, carried=[*group.quarantined]
        )
        if not group.table.reclaims:
            return found
        found.readers += self.parts.holds.readers(group.index, Tier.DEVICE).tolist()
        for index, unpinned, _, given in self.given:
            if index == group.index:
                found.carried += given
                found.readers += unpinned
        for row in self.requests:
            found.readers += group.pinned(row.kv.row, rows.pages[row.kv.row, : row.shared]).tolist()
            if group.reach.in_place:
                found.carried += group.frames_of(row.kv.row).tolist()
        found.pins, found.num_pinned = group.table.pins.tolist(), group.table.num_pinned
        found.idle = group.table.ticket.nonzero()[0].tolist()
        return found


def audit(parts: CacheParts) -> Snapshot:
    """Check all invariants, and return the snapshot. Raises AuditFailure, which names each fault. O(pages + nodes)."""
    snapshot = Snapshot(parts)
    if broken := list(_broken(snapshot)):
        raise AuditFailure("; ".join(broken) + ".")
    return snapshot


def _broken(now: Snapshot) -> Iterator[str]:
    for check in (_page_owners, _requests, _tree, _leases):
        yield from check(now)
    for found in now.groups:
        yield from _frames(now, found)
        if not found.group.reach.whole:
            yield from _idle(found, now.cached)
            yield from _reads(now, found)
    for more in now.parts.checks:
        yield from more(now)
    for faults in now.parts.faults:
        yield from faults()


def _page_owners(now: Snapshot) -> Iterator[str]:
    """Every page id is either free, private, cached or moving."""
    cached, private, moving = now.cached, now.private, now.moving
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
    if group.frames.are_page_ids and used != resident:
        yield f"{name}: page {next(page for page in resident if column[page] != page)} has a frame that is not its id"
    if column[0]:
        yield f"{name}: the padding page is bound to frame {column[0]}"
    if resident != now.out:
        if extra := set(resident) - set(now.out) - {0}:
            yield f"{name}: page {min(extra)} is free and has a frame"
        missing = set(now.out) - set(resident)
        if now.is_tiered:
            here = now.parts.tree.is_here
            gone = {page for node, pages in now.edges if not here(node) for page in pages}
            if gone & set(resident):
                yield f"{name}: page {min(gone & set(resident))} has left the device and has a frame there"
            missing -= gone.union(now.moving)  # the frame of a duplicate may be that of a page on lower tiers only
        if missing and group.reach.whole:
            yield f"{name}: page {min(missing)} is out and has no frame"


def _reads(now: Snapshot, found: GroupSnapshot) -> Iterator[str]:
    """The pages of a window that a request reads have frames."""
    group, size = found.group, now.parts.plan.page_size
    for row in now.requests if not group.reach.in_place else ():
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
    pages = dict(now.edges)
    for row in now.requests:
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
    tree, page_bytes, queued = now.parts.tree, now.parts.plan.page_size * TOKEN_BYTES, now.parts.tree.queued()
    sums = dict.fromkeys(("num_pages", "num_protected", "num_shared", "num_below"), 0)
    num_children = sum(len(root.children) for root in now.roots)
    owned = Counter(node.user for node, _ in now.edges if node.user is not None)
    if any(len(each.nodes) != count for each, count in owned.items()):
        yield "a session has other nodes than those that it alone has used"
    for node, pages in now.edges:
        length, parent = len(pages), node.parent
        if not length or len(node.key) != length * page_bytes:
            yield f"an edge of {length} pages has {len(node.key)} bytes of tokens"
        if parent is None or parent.children.get(node.key[:page_bytes]) is not node:
            yield "a child hangs in the wrong place"
        num_children += len(node.children)
        leaf = tree.is_here(node) and not any(map(tree.is_here, node.children.values()))
        if not node.level and leaf and node not in queued:
            yield f"an unleased leaf of {length} pages can never be evicted"
        if tree.is_here(node):
            sums["num_pages"] += length
            sums["num_protected"] += length if node.level else 0
            sums["num_shared"] += length if node.level > 1 else 0
        else:
            sums["num_below"] += length
        if parent is not None and node.depth != parent.depth + parent.num_pages:
            yield f"an edge begins after {parent.depth + parent.num_pages} pages and says {node.depth}"
    if any(not root.children and not root.evicted and not root.level for root in now.roots):
        yield "a root is kept that nothing needs"
    if num_children != len(now.edges):
        yield "a child hangs in the wrong place"
    for name, total in sums.items():
        if getattr(tree, name) != total:
            yield f"the tree counts {name} = {getattr(tree, name)}, its nodes sum to {total}"


def _leases(now: Snapshot) -> Iterator[str]:
    """A node counts the leases that end at it, with those that wait for a step. Its level also counts those below."""
    here, below = Counter(now.ends), Counter[Node]()
    for end in now.ends:
        node: Node | None = end
        while node is not None:
            below[node] += 1
            node = node.parent
    for node in (*now.roots, *(node for node, _ in now.edges)):
        if node.leases != here[node]:
            yield f"a node counts {node.leases} leases and has {here[node]}"
        if node.level != min(2, below[node]):
            yield f"a node with {below[node]} leases at it or below it has level {node.level}"
        if node.held != node.leases + sum([child.level for child in node.children.values()]):
            yield f"a node is held {node.held} times, which its leases and children do not make"
