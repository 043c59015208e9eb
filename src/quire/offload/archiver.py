"""Archiver: what is on the host and not in storage goes there by itself, ancestors first.

    archive   a path may have something that is not stored: it is pending
    go_on     what is pending goes, several paths together, as soon as the link has room for it
    ended     what was refused is pending again, after a pause

With what is stored of a path, the store hears now and then that the rest of it is of use. The device and the host keep
a prefix that is always asked for, so that it is never read from the store, which would forget it first; behind it
nothing would be found. What the store has lost all the same is stored again.

What is pending, or on its way, keeps nothing from being evicted: frames that are read meanwhile come back when that is
over.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from quire.cache.groups import NO_PAGES
from quire.memory.residency import State
from quire.offload.below import Below, Part
from quire.prefix.node import Node, pages_to
from quire.prefix.radix_cache import RadixCache
from quire.spec.ids import Bools, Ids, Tier
from quire.tiers.store import Answer
from quire.tiers.transfer import GOOD, UNDAMAGED, Lane, Transfer, Units

_BATCH_BYTES = 64 << 20
_MOST_AT_ONCE = 2
"""Moves on their way. What is pending meanwhile gathers, so that a page each of many requests are one move."""
_MOST_LOOKED_AT = 256
_MOST_BEHIND = 64  # paths, one page that is not on the host
_TOUCHED_AGAIN_S = 120.0
"""A page is told to be of use once in that time, or sooner: once while a quarter of what the host holds is stored."""
_MENDED = (0,)
"""Of a path that is pending because the store had lost some of it. In a store that is too small for the path more of it
is lost by then; it is not told again until it is used again."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 64.0

_MOST_PATHS = 4096
_MOST_ENDS = 64

_Found = list[tuple[int, Ids]]
"""Pages of groups."""


class PendingPaths:
    """Cached paths of which something has still to be moved to another tier: their last nodes, in the order in which
    they came; of each, numbers of pages behind which requests may begin. They keep nothing in the tree: of a path what
    is left of it is pending. At most 4,096; beyond that the one that came first is given up.
    """

    def __init__(self, tree: RadixCache) -> None:
        self._tree = tree
        self._ends: dict[Node, tuple[int, ...]] = {}
        self._num_forgotten = 0

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, node: Node, ends: Iterable[int] = ()) -> None:
        """A path is pending, from now on if it was not before."""
        known = self._ends.get(node, ())
        self._ends[node] = tuple(dict.fromkeys((*known, *ends)))[-_MOST_ENDS:]
        if len(self._ends) > _MOST_PATHS:
            del self._ends[next(iter(self._ends))]

    def first(self, count: int) -> Iterator[tuple[Node, Node, tuple[int, ...]]]:
        """Of those that came first: what `remove` takes, the node at which the path ends now, and its numbers. Paths
        of which nothing is left are dropped. Others may be added and removed meanwhile."""
        for node, ends in list(islice(self._ends.items(), count)):
            living = self._living(node)
            if living is None:
                self.remove(node)  # or it went while this was read
            else:
                yield node, living, ends

    def remove(self, node: Node) -> None:
        """It is not pending any more."""
        self._ends.pop(node, None)

    def forgotten(self, num_pages: int) -> None:
        """So many pages have left the cache. Paths that ended there end above it, or are no more."""
        self._num_forgotten += num_pages if self._ends else 0
        if self._num_forgotten > _MOST_PATHS:
            self._num_forgotten = 0
            before, self._ends = self._ends, {}
            for node, ends in before.items():
                if (living := self._living(node)) is not None:
                    self.add(living, ends)

    def _living(self, node: Node) -> Node | None:
        """The node, or the last one above it that is still cached; None where no prompt finds it any more."""
        while not node.run and node.parent is not None:
            node = node.parent
        root = node
        while root.parent is not None:
            root = root.parent
        return node if root is not node and self._tree.roots.get(node.namespace) is root else None


@dataclass(frozen=True, slots=True)
class _Batch:
    """What is archived of some paths of one scope, and which of their pages, by group, are told to be of use."""

    scope: bytes
    nodes: list[Node]
    parts: list[Part]
    touched: _Found


class Archiver:
    """Of one cache. `moves` are those on their way."""

    def __init__(self, below: Below, tree: RadixCache, seconds: Callable[[], float]) -> None:
        self.moves: dict[Transfer, _Batch] = {}
        self.pending = PendingPaths(tree)
        self._below = below
        self._seconds = seconds
        self._stored = [below.table.of(Tier.STORAGE, host.index) for host in below.hosts]
        self._pages = below.table.anchor(Tier.STORAGE)
        self._on_host = below.table.anchor(Tier.HOST)
        self._gaps: dict[int, list[Node]] = {}  # by a page that is nowhere below the device, what is behind it there
        self._period_ends = -math.inf
        self._num_since = 0  # frames that were archived in this period
        self._is_full = False  # the link; until a move has ended
        self._due_at = -math.inf
        self._pause = _FIRST_PAUSE_S

    # -- what is stored

    def stored(self, group: int, pages: Ids) -> None:
        """The frames of these pages in that group have come from the store."""
        self._stored[group].mark(pages, State.RESIDENT)
        self._on_host.mark(pages, State.FETCHED)
        self.came(pages)

    def not_stored(self, group: int, pages: Ids) -> None:
        """The store does not have the frames of these pages in that group: it is given them when they are here."""
        self._stored[group].unmark(pages, State.RESIDENT)

    def came(self, pages: Ids) -> None:
        """These pages are on the host now: what is behind them there can be stored."""
        for page in pages.tolist() if self._gaps else ():
            for node in self._gaps.pop(page, ()):
                self.archive(node)

    def forgotten(self, pages: Ids) -> None:
        """These pages have left the cache."""
        for column in self._stored:
            column.unmark(pages, State.RESIDENT)
        self._pages.unmark(pages, State.TOUCHED)
        for page in pages.tolist() if self._gaps else ():
            self._gaps.pop(page, None)
        self.pending.forgotten(len(pages))

    def forget_all(self) -> None:
        """Nothing is stored any more."""
        for column in self._stored:
            column.unmark(slice(None), State.RESIDENT)

    def storable(self, pages: Ids) -> int:
        """How many of a path's first pages are stored or could be now. A page is stored behind the one before it, or
        no lookup would find it."""
        hosts = [host for host in self._below.hosts if host.whole]
        there = [self._is_stored(host.index, pages) | host.good(pages) for host in hosts]
        return int(np.argmin(np.append(np.logical_and.reduce(there), False))) if there else len(pages)

    def _is_stored(self, group: int, pages: Ids) -> Bools:
        return self._stored[group].has(pages, State.RESIDENT)

    # -- what is pending

    def archive(self, node: Node) -> None:
        """Store what is on the host of the path to a node and not stored yet."""
        if self._below.settings.stores:
            self.pending.add(node)

    @property
    def is_due(self) -> bool:
        """Whether something could go now."""
        return len(self.moves) < _MOST_AT_ONCE and self._may_go

    @property
    def _may_go(self) -> bool:
        return bool(len(self.pending)) and not self._is_full and self._seconds() >= self._due_at

    def hasten(self) -> None:
        """What is pending is tried once more now, whatever was refused."""
        self._due_at = -math.inf

    def go_on(self, *, hurries: bool = False) -> None:
        """Start to archive what is pending. A caller that `hurries` is about to give up copies: these wait for no
        company."""
        below = self._below
        while self._may_go if hurries else self.is_due:
            batch = self._gather()
            if not batch.nodes:
                # Either nothing is pending any more, or what is to be deleted in its scope has to be first.
                self._due_at = self._seconds() + _FIRST_PAUSE_S if len(self.pending) else self._due_at
                return
            move = below.move_of(Lane.ARCHIVE, batch.parts, batch.scope)
            move.touches = tuple(
                Units(group, NO_PAGES, NO_PAGES, below.names.keys_of(pages)) for group, pages in batch.touched
            )
            if not below.mover.submit(move):
                self._is_full = bool(self.moves)
                self._due_at = self._due_at if self.moves else self._seconds() + _FIRST_PAUSE_S
                self._undo(batch)
                return
            self.moves[move] = batch
            for part in batch.parts:
                below.hosts[part.group].begin_reading(part.host)

    def _gather(self) -> _Batch:
        """As many paths of one scope as make a batch. What of them is archived counts as stored from now on."""
        below = self._below
        self._go_through_time()
        scope, num_bytes = b"", 0
        nodes: list[Node] = []
        archived: dict[int, list[Ids]] = defaultdict(list)
        touched: dict[int, list[Ids]] = defaultdict(list)
        for key, node, why in self.pending.first(_MOST_LOOKED_AT):
            its = below.names.scope(node.namespace)
            if below.deletion.is_to_come(its) or (nodes and its != scope):
                continue
            lacking, is_rest = self._lacking(node, _BATCH_BYTES - num_bytes)
            useful = self._of_use(node) if why != _MENDED else []
            if not is_rest:
                self.pending.remove(key)
            if not lacking and not useful:
                continue
            scope = its
            nodes.append(node)
            for group, pages in useful:
                self._pages.mark(pages, State.TOUCHED)
                touched[group].append(pages)
            for group, pages in lacking:
                self._stored[group].mark(pages, State.RESIDENT)
                self._pages.mark(pages, State.TOUCHED)
                archived[group].append(pages)
                num_bytes += len(pages) * below.settings.record_bytes[group]
            if is_rest or num_bytes >= _BATCH_BYTES:
                break
        parts = [
            Part(group, pages, NO_PAGES, NO_PAGES, below.hosts[group].column[pages])
            for group, pages in _joined(archived)
        ]
        return _Batch(scope, nodes, parts, _joined(touched))

    def _undo(self, batch: _Batch) -> None:
        for part in batch.parts:
            self._stored[part.group].unmark(part.pages, State.RESIDENT)
        for _, pages in batch.touched:
            self._pages.unmark(pages, State.TOUCHED)
        for node in batch.nodes:
            self.pending.add(node)

    def _go_through_time(self) -> None:
        """A new period begins when the last has been long enough, or when much was stored in it."""
        num_frames = sum(host.num_frames for host in self._below.hosts)
        if self._seconds() >= self._period_ends or 4 * self._num_since >= num_frames:
            self._pages.unmark(slice(None), State.TOUCHED)
            self._period_ends = self._seconds() + _TOUCHED_AGAIN_S
            self._num_since = 0

    def _of_use(self, node: Node) -> _Found:
        """What is stored of a path and was not told to be of use in this period."""
        pages = pages_to(node)
        pages = pages[~self._pages.has(pages, State.TOUCHED)]
        useful = [(host.index, pages[self._is_stored(host.index, pages)]) for host in self._below.hosts]
        return [(group, some) for group, some in useful if len(some)]

    def _lacking(self, node: Node, most_bytes: int) -> tuple[_Found, bool]:
        """What of a path could be stored and is not, up to a page behind which so many bytes have come; and whether
        that leaves any."""
        below, pages = self._below, pages_to(node)
        num_storable = self.storable(pages)
        self._note_gap(node, pages[num_storable:])
        pages = pages[:num_storable]
        lacking = []
        num_bytes = np.zeros(len(pages), dtype=np.int64)
        for host in below.hosts:
            lacks = host.good(pages) & ~self._is_stored(host.index, pages) & ~below.damaged.are(pages)
            lacking.append((host.index, lacks))
            num_bytes += lacks * below.settings.record_bytes[host.index]
        last = int(np.searchsorted(np.cumsum(num_bytes), most_bytes)) + 1
        found = [(group, pages[:last][lacks[:last]]) for group, lacks in lacking]
        return [(group, some) for group, some in found if len(some)], bool(num_bytes[last:].any())

    def _note_gap(self, node: Node, pages: Ids) -> None:
        """Of a path, these cannot be stored, since the first of them is not on the host, and some of them are."""
        if any(host.good(pages).any() for host in self._below.hosts):
            waiting = self._gaps.setdefault(int(pages[0]), [])
            if node not in waiting and len(waiting) < _MOST_BEHIND:
                waiting.append(node)

    # -- what has ended

    def ended(self, move: Transfer) -> None:
        """A move has ended. Where the store refused, or failed, the rest is tried again."""
        below, counters = self._below, self._below.counters
        batch = self.moves.pop(move)
        self._is_full = False
        below.break_even.moved(Lane.ARCHIVE, move.moved_bytes, move.seconds)
        counters.failed_moves += bool(move.error)
        num_good = num_refused = 0
        for part, units, defects in zip(batch.parts, move.units, move.defects, strict=True):
            host = below.hosts[part.group]
            good = np.array([defect == GOOD for defect in defects], dtype=np.bool_)
            wrong = np.array([defect not in UNDAMAGED for defect in defects], dtype=np.bool_)
            left = part.pages[self._are(part.pages, units) & ~good]
            self._stored[part.group].unmark(left, State.RESIDENT)
            self._pages.unmark(left, State.TOUCHED)
            archived = int(np.count_nonzero(good))
            num_good += archived
            num_refused += int(np.count_nonzero(~good & ~wrong))
            counters.archived_frames += archived
            counters.archived_bytes += archived * below.settings.record_bytes[part.group]
            counters.corrupt(Tier.HOST, defects)
            same = host.column[part.pages] == part.host
            host.damage(part.pages[wrong & same])  # it is forgotten when a load finds it
            host.end_reading(part.host)
        counters.unstored_frames += num_refused
        self._num_since += num_good
        if num_good:
            self._pause = _FIRST_PAUSE_S
        if self._lost(move, batch):
            for node in batch.nodes:
                self.pending.add(node, _MENDED)
        if num_refused:
            for node in (*batch.nodes[1:], *batch.nodes[:1]):  # if the first was refused, it keeps no other waiting
                self.pending.add(node)
            self._due_at = self._seconds() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)

    def _lost(self, move: Transfer, batch: _Batch) -> int:
        """How many of the records that were told to be of use the store does not have any more."""
        num_lost = 0
        for units, (group, pages), answers in zip(move.touches, batch.touched, move.answers, strict=False):
            lost = np.array([answer is Answer.MISS for answer in answers], dtype=np.bool_) & self._are(pages, units)
            self._stored[group].unmark(pages[lost], State.RESIDENT)
            num_lost += int(np.count_nonzero(lost))
        self._below.counters.lost_frames += num_lost
        return num_lost

    def _are(self, pages: Ids, units: Units) -> Bools:
        """Per page: whether it still is what it was when these were sent."""
        sent = np.frombuffer(b"".join(units.pages), dtype=np.uint8).reshape(len(pages), -1)
        same: Bools = (self._below.names.keys[pages] == sent).all(axis=1)
        return same


def _joined(runs: dict[int, list[Ids]]) -> _Found:
    """Pages of several paths, by group."""
    return [(group, np.concatenate(runs[group])) for group in sorted(runs)]
