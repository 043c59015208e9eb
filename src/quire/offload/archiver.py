"""Archiver: what is on the host and not in storage goes there by itself, ancestors first.

    owe       a path may have something that is not stored
    go_on     what is owed goes, several paths together, as soon as the link has room for it
    ended     what was refused is owed again, after a pause

With what is stored of a path, the store hears now and then that the rest of it is of use. The device and the host keep
a prefix that is always asked for, so that nobody ever reads it from the store, which would forget it first; behind it
nothing would be found. What the store has lost all the same is stored again.

What is owed, or on its way, keeps nothing from being evicted: frames that are read meanwhile come back when that is
over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.cache.groups import NO_PAGES
from quire.memory.residency import State
from quire.offload.below import Below, Part
from quire.offload.host_groups import HostGroup
from quire.offload.owed_paths import OwedPaths
from quire.prefix.node import Node, pages_to
from quire.prefix.radix_cache import RadixCache
from quire.spec.ids import Bools, Ids, Tier
from quire.tiers.store import Answer
from quire.tiers.transfer import GOOD, UNDAMAGED, Lane, Transfer, Units

_BATCH_BYTES = 64 << 20
_MOST_AT_ONCE = 2
"""Moves on their way. What is owed meanwhile gathers, so that a page each of many requests are one move."""
_MOST_LOOKED_AT = 256
_MOST_BEHIND = 64  # paths, one page that is not on the host
_TOUCHED_AGAIN_S = 120.0
"""A page is told to be of use once in that time, or sooner: once while a quarter of what the host holds is stored."""
_MENDED = (0,)
"""Of a path that is owed because the store had lost some of it. In a store that is too small for the path more of it is
lost by then; nobody asks, until it is used again."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 64.0


@dataclass(frozen=True, slots=True)
class _Batch:
    """What is archived of some paths of one scope, and which of their pages, by group, are told to be of use."""

    scope: bytes
    nodes: list[Node]
    parts: list[Part]
    touched: list[tuple[int, Ids]]


class Archiver:
    """Of one cache. `moves` are those on their way."""

    def __init__(self, below: Below, tree: RadixCache, seconds: Callable[[], float]) -> None:
        self.moves: dict[Transfer, _Batch] = {}
        self.owed = OwedPaths(tree)
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
                self.owe(node)

    def forgotten(self, pages: Ids) -> None:
        """These pages have left the cache."""
        for column in self._stored:
            column.unmark(pages, State.RESIDENT)
        self._pages.unmark(pages, State.TOUCHED)
        for page in pages.tolist() if self._gaps else ():
            self._gaps.pop(page, None)
        self.owed.forgotten(len(pages))

    def forget_all(self) -> None:
        """Nothing is stored any more."""
        for column in self._stored:
            column.unmark(slice(None), State.RESIDENT)

    def storable(self, pages: Ids) -> int:
        """How many of a path's first pages are stored or could be now. A page is stored behind the one before it, or
        nobody would find it."""
        hosts = [host for host in self._below.hosts if host.whole]
        there = [self._is_stored(host.index, pages) | host.good(pages) for host in hosts]
        return int(np.argmin(np.append(np.logical_and.reduce(there), False))) if there else len(pages)

    # -- what is owed

    def owe(self, node: Node) -> None:
        """Store what is on the host of the path to a node and not stored yet."""
        if self._below.settings.stores:
            self.owed.add(node)

    @property
    def is_due(self) -> bool:
        """Whether something could go now."""
        waits = self._is_full or len(self.moves) >= _MOST_AT_ONCE or self._seconds() < self._due_at
        return bool(len(self.owed)) and not waits

    def hasten(self) -> None:
        """What is owed is tried once more now, whatever was refused."""
        self._due_at = -math.inf

    def go_on(self, *, hurries: bool = False) -> None:
        """Start to archive what is owed. Who `hurries` is about to give up copies: then it waits for no company."""
        below = self._below
        while self.is_due or (hurries and len(self.owed) and not self._is_full and self._seconds() >= self._due_at):
            batch = self._gather()
            if not batch.nodes:
                # Either nothing is owed any more, or what is to be forgotten in its scope has to be first.
                self._due_at = self._seconds() + _FIRST_PAUSE_S if len(self.owed) else self._due_at
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

    def _undo(self, batch: _Batch) -> None:
        for part in batch.parts:
            self._stored[part.group].unmark(part.pages, State.RESIDENT)
        for _, pages in batch.touched:
            self._pages.unmark(pages, State.TOUCHED)
        for node in batch.nodes:
            self.owed.add(node)

    def ended(self, move: Transfer) -> None:
        """A move has ended. Where the store refused, or failed, the rest is tried again."""
        below = self._below
        batch = self.moves.pop(move)
        self._is_full = False
        below.break_even.moved(Lane.ARCHIVE, move.moved_bytes, move.seconds)
        counters = below.counters
        counters.failed_moves += bool(move.error)
        num_good = num_refused = 0
        for part, units, defects in zip(batch.parts, move.units, move.defects, strict=True):
            host = below.hosts[part.group]
            good = np.array([defect == GOOD for defect in defects], dtype=np.bool_)
            wrong = np.array([defect not in UNDAMAGED for defect in defects], dtype=np.bool_)
            same = host.column[part.pages] == part.host
            left = part.pages[self._are(part.pages, units) & ~good]
            self._stored[part.group].unmark(left, State.RESIDENT)
            self._pages.unmark(left, State.TOUCHED)
            archived = int(np.count_nonzero(good))
            num_good += archived
            num_refused += int(np.count_nonzero(~good & ~wrong))
            counters.archived_frames += archived
            counters.archived_bytes += archived * below.settings.record_bytes[part.group]
            if wrong.any():
                counters.corrupt(Tier.HOST, [defect for defect in defects if defect not in UNDAMAGED])
                host.damage(part.pages[wrong & same])  # whoever loads it finds out
            host.end_reading(part.host)
        counters.unstored_frames += num_refused
        self._num_since += num_good
        if num_good:
            self._pause = _FIRST_PAUSE_S
        if self._lost(move, batch):
            for node in batch.nodes:
                self.owed.add(node, _MENDED)
        if num_refused:
            self._again(batch.nodes)

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

    def _again(self, nodes: Sequence[Node]) -> None:
        """These paths are owed again. The first goes last: if it was the one refused, it keeps no other waiting."""
        for node in (*nodes[1:], *nodes[:1]):
            self.owe(node)
        self._due_at = self._seconds() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)

    def _gather(self) -> _Batch:
        """As many paths of one scope as make a batch. What of them is archived counts as stored from now on."""
        below = self._below
        self._go_through_time()
        scope, num_bytes = b"", 0
        nodes: list[Node] = []
        parts: dict[int, list[Part]] = {}
        touched: dict[int, list[Ids]] = {}
        for key, node, why in self.owed.first(_MOST_LOOKED_AT):
            its = below.names.scope(node.namespace)
            if below.deletion.is_to_come(its) or (nodes and its != scope):
                continue
            lacking, is_rest = self._lacking(node, _BATCH_BYTES - num_bytes)
            useful = self._of_use(node) if why != _MENDED else []
            if not is_rest:
                self.owed.remove(key)
            if not lacking and not useful:
                continue
            scope = its
            nodes.append(node)
            for group, pages in useful:
                self._pages.mark(pages, State.TOUCHED)
                touched.setdefault(group, []).append(pages)
            for part in lacking:
                self._stored[part.group].mark(part.pages, State.RESIDENT)
                self._pages.mark(part.pages, State.TOUCHED)
                parts.setdefault(part.group, []).append(part)
                num_bytes += len(part.pages) * below.settings.record_bytes[part.group]
            if is_rest or num_bytes >= _BATCH_BYTES:
                break
        told = [(group, np.concatenate(pages)) for group, pages in sorted(touched.items())]
        return _Batch(scope, nodes, [_joined(parts[group]) for group in sorted(parts)], told)

    def _go_through_time(self) -> None:
        """A new period begins when the last has been long enough, or when much was stored in it."""
        num_frames = sum(host.num_frames for host in self._below.hosts)
        if self._seconds() >= self._period_ends or 4 * self._num_since >= num_frames:
            self._pages.unmark(slice(None), State.TOUCHED)
            self._period_ends = self._seconds() + _TOUCHED_AGAIN_S
            self._num_since = 0

    def _of_use(self, node: Node) -> list[tuple[int, Ids]]:
        """By group, what is stored of a path and was not told to be of use in this period."""
        pages = pages_to(node)
        pages = pages[~self._pages.has(pages, State.TOUCHED)]
        useful = [(host.index, pages[self._is_stored(host.index, pages)]) for host in self._below.hosts]
        return [(group, some) for group, some in useful if len(some)]

    def _lacking(self, node: Node, most_bytes: int) -> tuple[list[Part], bool]:
        """What of a path could be stored and is not, up to a page behind which so many bytes have come; and whether
        that leaves any."""
        below = self._below
        pages = pages_to(node)
        self._note_gap(node, pages[self.storable(pages) :])
        pages = pages[: self.storable(pages)]
        found: list[tuple[HostGroup, np.ndarray]] = []
        num_bytes = np.zeros(len(pages), dtype=np.int64)
        for host in below.hosts:
            lacking = host.good(pages) & ~self._is_stored(host.index, pages) & ~below.damaged.are(pages)
            at = lacking.nonzero()[0]
            if len(at):
                found.append((host, at))
                num_bytes[at] += below.settings.record_bytes[host.index]
        last = int(np.searchsorted(np.cumsum(num_bytes), most_bytes)) + 1
        is_rest = bool(num_bytes[last:].any())
        parts = []
        for host, places in found:
            at = places[places < last]
            if len(at):
                parts.append(Part(host.index, pages[at], at, NO_PAGES, host.column[pages[at]]))
        return parts, is_rest

    def _note_gap(self, node: Node, pages: Ids) -> None:
        """Of a path, these cannot be stored, since the first of them is not on the host, and some of them are."""
        if any(host.good(pages).any() for host in self._below.hosts):
            waiting = self._gaps.setdefault(int(pages[0]), [])
            if node not in waiting and len(waiting) < _MOST_BEHIND:
                waiting.append(node)

    def _is_stored(self, group: int, pages: Ids) -> Bools:
        return self._stored[group].has(pages, State.RESIDENT)


def _joined(parts: Sequence[Part]) -> Part:
    """Pages of several paths in one group."""
    if len(parts) == 1:
        return parts[0]
    pages, at, host = (np.concatenate([getattr(part, name) for part in parts]) for name in ("pages", "at", "host"))
    return Part(parts[0].group, pages, at, NO_PAGES, host)
