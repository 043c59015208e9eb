"""Archiver: copies host frames to the store in the background, ancestors first.

    archive   a path may have frames that are not stored: it is pending
    go_on     submits pending paths, several together, as soon as the lane has room
    ended     refused paths are pending again, after a pause

The archiver also touches stored pages of these paths now and then. A popular prefix stays on device and host, and is
not read from the store. Without touches the store would evict it first, and a lookup would find no later page either.
Records that the store has lost are stored again. Neither pending paths nor archives in flight prevent eviction: frames
that are still read are freed afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from quire.cache.groups import NO_PAGES
from quire.cache.offload import CacheParts
from quire.memory.residency import State
from quire.offload.deletion import StoreDeletion
from quire.offload.host_groups import GroupPages, HostGroup
from quire.offload.tier_settings import TierCounters, TierSettings
from quire.prefix.node import Node, pages_to
from quire.prefix.page_names import PageNames
from quire.prefix.radix_cache import RadixCache
from quire.spec.ids import Bools, Ids, Tier
from quire.tiers.store import Answer
from quire.tiers.transfer import GOOD, UNDAMAGED, Lane, Transfer, Units

_BATCH_BYTES = 64 << 20
_MOST_AT_ONCE = 2  # archives in flight; meanwhile other paths collect, and go in one archive
_MOST_LOOKED_AT = 256
_MOST_WAITING = 64  # paths, for one page that is not on the host
_TOUCHED_AGAIN_S = 120.0  # once in this time, or until a quarter of the host's frames is archived
_LOST = (0,)
"""Ends of a path that is pending because the store has lost pages of it. It is not touched until it is used again: a
store too small for the path would lose more of it each time."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 64.0
_MOST_PATHS = 4096
_MOST_ENDS = 64


class PendingPaths:
    """Cached paths with pages to copy to another tier, oldest first, at most 4,096: their last nodes, and ends, which
    are numbers of pages after which requests may begin. They prevent no eviction; what is left of a path stays pending.
    """

    def __init__(self, tree: RadixCache) -> None:
        self._tree = tree
        self._ends: dict[Node, tuple[int, ...]] = {}
        self._num_removed = 0

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, node: Node, ends: Iterable[int] = ()) -> None:
        """Add a path, or ends of a path that is pending already."""
        known = self._ends.get(node, ())
        self._ends[node] = tuple(dict.fromkeys((*known, *ends)))[-_MOST_ENDS:]
        if len(self._ends) > _MOST_PATHS:
            del self._ends[next(iter(self._ends))]

    def first(self, count: int) -> Iterator[tuple[Node, Node, tuple[int, ...]]]:
        """The oldest paths: key for `remove`, node where it ends now, its ends. The caller may add and remove paths."""
        for node, ends in list(islice(self._ends.items(), count)):
            end = self.cached_end(node)
            if end is None:
                self.remove(node)
            else:
                yield node, end, ends

    def remove(self, node: Node) -> None:
        """Remove a path, if it is still pending."""
        self._ends.pop(node, None)

    def removed(self, num_pages: int) -> None:
        """Report that so many pages have left the cache. Sometimes, paths are replaced by what is left of them."""
        self._num_removed += num_pages if self._ends else 0
        if self._num_removed > _MOST_PATHS:
            left = list(self.first(len(self._ends)))
            self._ends, self._num_removed = {}, 0
            for _, node, ends in left:
                self.add(node, ends)

    def cached_end(self, node: Node) -> Node | None:
        """The node or its last cached ancestor; None if no prompt finds it any more."""
        while not node.run and node.parent is not None:
            node = node.parent
        root = node
        while root.parent is not None:
            root = root.parent
        return node if root is not node and self._tree.roots.get(node.namespace) is root else None


def transfer_of(
    lane: Lane, parts: Sequence[GroupPages], scope: bytes, names: PageNames, hosts: Sequence[HostGroup]
) -> Transfer:
    """A transfer of these pages on a lane, not submitted yet."""
    each = [host.record_bytes if lane.is_remote else host.copied_bytes for host in hosts]
    units = [
        Units(part.group, part.device, part.host, names.keys_of(part.pages), in_place=not each[part.group])
        for part in parts
    ]
    return Transfer(lane, units, scope, sum(len(part.pages) * each[part.group] for part in parts))


@dataclass(slots=True)
class _ArchiveBatch:
    """Pages of some paths of one scope: `parts` to archive, and `touched` pages that are stored already."""

    scope: bytes
    nodes: list[Node]
    parts: list[GroupPages]
    touched: list[tuple[int, Ids]]  # with their group


class Archiver:
    """The archiver of one cache. `moves` are the archives in flight."""

    def __init__(
        self,
        settings: TierSettings,
        parts: CacheParts,
        hosts: Sequence[HostGroup],
        counters: TierCounters,
        deletion: StoreDeletion,
    ) -> None:
        self.moves: dict[Transfer, _ArchiveBatch] = {}
        self.pending = PendingPaths(parts.tree)
        self._settings = settings
        self._hosts = hosts
        self._counters = counters
        self._deletion = deletion
        self._names = parts.tree.names
        self._damaged = parts.damaged
        self._seconds = parts.seconds
        self._stored = [parts.frames.of(Tier.STORAGE, host.index) for host in hosts]
        self._pages = parts.frames.anchor(Tier.STORAGE)
        self._gaps: dict[int, list[Node]] = {}  # key: a page that is not on a lower tier; nodes after it
        self._period_ends = -math.inf
        self._num_since = 0  # frames archived in this period
        self._is_full = False  # the lane, until a transfer has ended
        self._due_at = -math.inf
        self._pause = _FIRST_PAUSE_S

    def store_is_empty(self) -> None:
        """Another engine has flushed the store. What it deleted is archived again only when it is used again."""
        for column in self._stored:
            column.unmark(slice(None), State.RESIDENT)

    def saved(self, pages: Ids) -> None:
        """These pages are on the host now: archive the paths that wait for them."""
        for page in pages.tolist() if self._gaps else ():
            for node in self._gaps.pop(page, ()):
                self.archive(node)

    def removed(self, pages: Ids) -> None:
        """These pages have left the cache."""
        for column in self._stored:
            column.unmark(pages, State.RESIDENT)
        self._pages.unmark(pages, State.TOUCHED)
        for page in pages.tolist() if self._gaps else ():
            self._gaps.pop(page, None)
        self.pending.removed(len(pages))

    def storable(self, pages: Ids) -> int:
        """How many first pages of a path are stored or on the host. No lookup finds a page without its ancestors."""
        there = [self._is_stored(host, pages) | host.good(pages) for host in self._hosts if host.whole]
        return int(np.argmin(np.append(np.logical_and.reduce(there), False))) if there else len(pages)

    def _is_stored(self, host: HostGroup, pages: Ids) -> Bools:
        return self._stored[host.index].has(pages, State.RESIDENT)

    def archive(self, node: Node) -> None:
        """Archive the path to a node, later."""
        if self._settings.stores:
            self.pending.add(node)

    @property
    def is_due(self) -> bool:
        """Whether `go_on` may submit an archive now."""
        return len(self.moves) < _MOST_AT_ONCE and self._may_submit

    @property
    def _may_submit(self) -> bool:
        return bool(len(self.pending)) and not self._is_full and self._seconds() >= self._due_at

    def hasten(self) -> None:
        """Try pending paths now, without the pause after a refusal."""
        self._due_at = -math.inf

    def go_on(self, *, urgent: bool = False) -> None:
        """Submit archives of pending paths. `urgent`, before host evictions: as many as the lane accepts."""
        while self._may_submit if urgent else self.is_due:
            batch = self._gather()
            if not batch.nodes:
                # Paths that are pending now wait for a deletion in their scope.
                self._due_at = self._seconds() + _FIRST_PAUSE_S if len(self.pending) else self._due_at
                return
            move = transfer_of(Lane.ARCHIVE, batch.parts, batch.scope, self._names, self._hosts)
            touched = [(group, self._names.keys_of(pages)) for group, pages in batch.touched]
            move.touches = tuple(Units(group, NO_PAGES, NO_PAGES, keys) for group, keys in touched)
            if not self._settings.mover.submit(move):
                self._is_full = bool(self.moves)
                self._due_at = self._due_at if self.moves else self._seconds() + _FIRST_PAUSE_S
                self._undo(batch)
                return
            self.moves[move] = batch
            for part in batch.parts:
                self._hosts[part.group].begin_reading(part.host)

    def _gather(self) -> _ArchiveBatch:
        """As many paths of one scope as make a batch. Their archived pages count as stored from now on."""
        num_frames = sum(host.num_frames for host in self._hosts)
        if self._seconds() >= self._period_ends or 4 * self._num_since >= num_frames:
            self._pages.unmark(slice(None), State.TOUCHED)
            self._period_ends = self._seconds() + _TOUCHED_AGAIN_S
            self._num_since = 0
        batch = _ArchiveBatch(b"", [], [], [])
        num_bytes = 0
        archived: list[list[Ids]] = [[] for _ in self._hosts]
        touched: list[list[Ids]] = [[] for _ in self._hosts]
        for key, node, ends in self.pending.first(_MOST_LOOKED_AT):
            scope = self._names.scope(node.namespace)
            if self._deletion.covers(scope, submitted=False) or (batch.nodes and scope != batch.scope):
                continue
            lacking, is_rest = self._lacking(node, _BATCH_BYTES - num_bytes)
            untouched = self._untouched(node) if ends != _LOST else []
            if not is_rest:
                self.pending.remove(key)
            if not any(map(len, (*lacking, *untouched))):
                continue
            batch.scope = scope
            batch.nodes.append(node)
            for group, pages in enumerate(untouched):
                self._pages.mark(pages, State.TOUCHED)
                touched[group].append(pages)
            for group, pages in enumerate(lacking):
                self._stored[group].mark(pages, State.RESIDENT)
                self._pages.mark(pages, State.TOUCHED)
                archived[group].append(pages)
            num_bytes += self._settings.num_bytes(map(len, lacking))
            if is_rest or num_bytes >= _BATCH_BYTES:
                break
        for group, pages in _joined(archived):
            frames = self._hosts[group].table.frame[pages]
            batch.parts.append(GroupPages(group, pages, NO_PAGES, NO_PAGES, frames))
        batch.touched = _joined(touched)
        return batch

    def _undo(self, batch: _ArchiveBatch) -> None:
        for part in batch.parts:
            self._stored[part.group].unmark(part.pages, State.RESIDENT)
        for _, pages in batch.touched:
            self._pages.unmark(pages, State.TOUCHED)
        for node in batch.nodes:
            self.pending.add(node)

    def _untouched(self, node: Node) -> list[Ids]:
        """Stored pages of a path that were not touched in this period, by group."""
        pages = pages_to(node)
        pages = pages[~self._pages.has(pages, State.TOUCHED)]
        return [pages[self._is_stored(host, pages)] for host in self._hosts]

    def _lacking(self, node: Node, most_bytes: int) -> tuple[list[Ids], bool]:
        """Pages of a path to archive, by group, up to about so many bytes, and whether there are more."""
        pages = pages_to(node)
        num_storable = self.storable(pages)
        gap = pages[num_storable:]
        if any(host.good(gap).any() for host in self._hosts):  # these wait until the first of them is on the host
            waiting = self._gaps.setdefault(int(gap[0]), [])
            if node not in waiting and len(waiting) < _MOST_WAITING:
                waiting.append(node)
        pages = pages[:num_storable]
        lacking = []
        num_bytes = np.zeros(len(pages), dtype=np.int64)
        for host in self._hosts:
            lacks = host.good(pages) & ~self._is_stored(host, pages) & ~self._damaged.are(pages)
            lacking.append(lacks)
            num_bytes += lacks * self._settings.record_bytes[host.index]
        last = int(np.searchsorted(np.cumsum(num_bytes), most_bytes)) + 1
        return [pages[:last][lacks[:last]] for lacks in lacking], bool(num_bytes[last:].any())

    def ended(self, move: Transfer) -> list[tuple[Node, Ids]]:
        """Process an ended archive. Pages that were not stored are pending again. Returns paths with pages whose only
        copies are damaged; a load finds, and deletes, other damage."""
        counters, batch = self._counters, self.moves.pop(move)
        self._is_full = False
        self._settings.break_even.moved(Lane.ARCHIVE, move.moved_bytes, move.seconds)
        counters.failed_moves += bool(move.error)
        num_stored = num_refused = 0
        lost = NO_PAGES
        for part, units, defects in zip(batch.parts, move.units, move.defects, strict=True):
            host = self._hosts[part.group]
            good = np.array([defect == GOOD for defect in defects], dtype=np.bool_)
            wrong = np.array([defect not in UNDAMAGED for defect in defects], dtype=np.bool_)
            left = part.pages[self._have_keys(part.pages, units) & ~good]
            self._stored[part.group].unmark(left, State.RESIDENT)
            self._pages.unmark(left, State.TOUCHED)
            num_stored += int(np.count_nonzero(good))
            num_refused += int(np.count_nonzero(~good & ~wrong))
            counters.archived_bytes += int(np.count_nonzero(good)) * self._settings.record_bytes[part.group]
            counters.corrupt("host", defects)
            same = host.table.frame[part.pages] == part.host
            host.damage(part.pages[wrong & same])
            host.end_reading(part.host)
            lost = np.concatenate((lost, host.only_copies(part.pages[wrong & same])))
        counters.archived_frames += num_stored
        counters.unstored_frames += num_refused
        self._num_since += num_stored
        if num_stored:
            self._pause = _FIRST_PAUSE_S
        for node in batch.nodes if self._take_lost(move, batch) else ():
            self.pending.add(node, _LOST)
        if num_refused:
            for node in (*batch.nodes[1:], *batch.nodes[:1]):  # a path that is refused again must not block others
                self.pending.add(node)
            self._due_at = self._seconds() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
        ends = [self.pending.cached_end(node) for node in batch.nodes] if len(lost) else []
        return [(node, lost) for node in ends if node is not None]

    def _take_lost(self, move: Transfer, batch: _ArchiveBatch) -> int:
        """Unmark touched records that the store has lost, and return their number."""
        num_lost = 0
        for units, (group, pages), answers in zip(move.touches, batch.touched, move.answers, strict=False):
            lost = np.array([answer is Answer.MISS for answer in answers], dtype=np.bool_)
            lost &= self._have_keys(pages, units)
            self._stored[group].unmark(pages[lost], State.RESIDENT)
            num_lost += int(np.count_nonzero(lost))
        self._counters.lost_frames += num_lost
        return num_lost

    def _have_keys(self, pages: Ids, units: Units) -> Bools:
        """Per page: whether it still has the key that was sent."""
        sent = np.frombuffer(b"".join(units.pages), dtype=np.uint8).reshape(len(pages), -1)
        same: Bools = (self._names.keys[pages] == sent).all(axis=1)
        return same


def _joined(runs: list[list[Ids]]) -> list[tuple[int, Ids]]:
    """The pages of groups that have any."""
    return [(group, np.concatenate(found)) for group, found in enumerate(runs) if any(map(len, found))]
