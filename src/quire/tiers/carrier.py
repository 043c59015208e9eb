"""Carrier: what is done for a move, piece by piece. It knows no threads and no time; movers do.

The laws of moving are here:

    records are checked before they leave the host, and when they have come to it; one that is damaged is read again
    before the store has to forget it
    a LOAD copies nothing to the device from the first page on that has a damaged record; nobody is told to use what is
    before it until the move has ended
    a page is in the store in all of its groups or not at all, and after the pages before it
    nothing is found that the store was told to forget (`quire.tiers.forgotten`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import islice, pairwise
from typing import TypeVar

from quire.errors import InvalidInput
from quire.spec.ids import Ids
from quire.tiers.forgotten import answers_under, forget_scope, marks_over
from quire.tiers.moves import GOOD, MISSING, REFUSED, Copies, Link, Move, Units
from quire.tiers.store import Answer, Store, StoreKey

_T = TypeVar("_T")

PIECE_BYTES = 16 << 20
"""About how much is done at a time. A load waits for no more than one piece of a save."""

_LOOKED_FOR = 128
"""Pages that a store is asked for at a time. Most prompts end sooner in what is stored, and a store may need a request
for each key."""
_MOST_TOUCHED = 1024  # in one call


class Carrier:
    """Does moves with these copies, and with this store where there is one."""

    def __init__(self, copies: Copies, store: Store | None, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._copies = copies
        self._store = store
        self._piece_bytes = piece_bytes

    def carry(self, move: Move) -> Iterator[None]:
        """Do a move; it pauses after each piece. Whatever copies or the store raise comes out of it, and the move has
        then failed. `move.defects` are complete when it has ended; ending the move is left to the caller."""
        work = {
            Link.SAVE: self._save,
            Link.LOAD: self._load,
            Link.ARCHIVE: self._archive,
            Link.FETCH: self._fetch,
            Link.LOOK: self._look,
            Link.FORGET: self._forget,
        }
        return work[move.link](move)

    # -- between device and host

    def _save(self, move: Move) -> Iterator[None]:
        for units in move.units:
            each = self._copies.bytes_of(units.group)
            for piece in _runs(len(units), each, self._piece_bytes):
                self._copies.to_host(units.group, units.device[piece], units.host[piece])
                self._copies.seal(units.group, units.host[piece], units.pages[piece])
                move.moved_bytes += each * (piece.stop - piece.start)
                yield

    def _load(self, move: Move) -> Iterator[None]:
        copies = self._copies
        defects = [copies.defects(units.group, units.host, units.pages) for units in move.units]
        move.defects = tuple(map(tuple, defects))
        if any(any(found) for found in defects):
            yield
            yield from self._load_good(move, defects)
            return
        move.announce_checked()
        yield
        for layer in copies.layers():
            for units in move.units:
                copies.to_device(units.group, units.device, units.host, layer)
            move.announce_layer(layer)
            yield
        move.moved_bytes = sum(copies.bytes_of(units.group) * len(units) for units in move.units)

    def _load_good(self, move: Move, defects: Sequence[Sequence[str]]) -> Iterator[None]:
        """Copy the pages before the first that is damaged in any group; those behind it are damaged or missing."""
        ends = [0] * len(move.units)
        for page in _pages_of(move.units):
            if any(defects[at][place] for at, place in page):
                break
            for at, place in page:
                ends[at] = place + 1
        for layer in self._copies.layers():
            for units, end in zip(move.units, ends, strict=True):
                if end:
                    self._copies.to_device(units.group, units.device[:end], units.host[:end], layer)
            yield
        move.defects = tuple(
            (*found[:end], *(defect or MISSING for defect in found[end:]))
            for found, end in zip(defects, ends, strict=True)
        )

    # -- between host and storage

    def _archive(self, move: Move) -> Iterator[None]:
        yield from self._by_pages(move, self._archive_pages, REFUSED)
        if not move.stopping and not any(REFUSED in defects for defects in move.defects):
            yield from self._touch(move)

    def _touch(self, move: Move) -> Iterator[None]:
        """Tell the store what is of use, the first page of a prefix last: a store forgets what was used longest ago,
        and behind a page that is gone nothing is found. What it does not have any more gets no room here."""
        store, found = self._need_store(), []
        for units in move.touches:
            keys = units.keys(move.scope)
            answers: list[Answer] = []
            for stop in range(len(keys), 0, -_MOST_TOUCHED):
                some = keys[max(0, stop - _MOST_TOUCHED) : stop]
                there = store.exists(some)
                hits = [key for key, answer in zip(some, there, strict=True) if answer is Answer.HIT]
                prepared = store.prepare(hits, [self._copies.bytes_of(units.group)] * len(hits)) if hits else []
                gone = [key for key, answer in zip(hits, prepared, strict=True) if answer is Answer.MISS]
                if gone:
                    store.complete(gone, [False] * len(gone))
                answers[:0] = there
                yield
            found.append(tuple(answers))
        move.answers = tuple(found)

    def _fetch(self, move: Move) -> Iterator[None]:
        yield from self._by_pages(move, self._fetch_pages, MISSING)

    def _look(self, move: Move) -> Iterator[None]:
        """Ask for some pages at a time, in the order of the prefix, until one is missing that all behind it need. What
        was not asked for is a MISS. The marks are asked for each time: the scope may be forgotten meanwhile."""
        store, over, pages = self._need_store(), marks_over(move.scope), _pages_of(move.units)
        found = [[Answer.MISS] * len(units) for units in move.units]
        for start in range(0, max(1, len(pages)), _LOOKED_FOR):
            if move.stopping:
                break
            places = [place for page in pages[start : start + _LOOKED_FOR] for place in page]
            keys = [StoreKey(move.scope, move.units[at].pages[place], move.units[at].group) for at, place in places]
            answers = iter(store.exists([*(mark for _, mark in over), *keys]))
            marks = list(islice(answers, len(over)))
            move.marked = tuple(scope for (scope, _), answer in zip(over, marks, strict=True) if answer is Answer.HIT)
            if move.marked:
                found = [[Answer.MISS] * len(units) for units in move.units]
                break
            ends = False
            for (at, place), answer in zip(places, answers_under(marks, answers), strict=True):
                found[at][place] = answer
                ends |= answer is not Answer.HIT and move.units[at].group in move.whole
            if ends:
                break
            yield
        move.answers = tuple(map(tuple, found))

    def _forget(self, move: Move) -> Iterator[None]:
        store = self._need_store()
        if not move.units:
            yield from forget_scope(store, move)
        for units in move.units:
            store.remove(units.keys(move.scope))
            yield

    def _by_pages(self, move: Move, work: _Work, rest: str) -> Iterator[None]:
        """Work on pages in the order of the prefix, some at a time, up to the first that fails in any group. Everything
        that was not done by then is `rest`."""
        store = self._need_store()
        found = [[rest] * len(units) for units in move.units]
        pages = _pages_of(move.units)
        sizes = [self._copies.bytes_of(units.group) for units in move.units]
        most = sum(sizes[at] for page in pages for at, _ in page)
        for piece in _runs(len(pages), max(1, most // max(1, len(pages))), self._piece_bytes):
            stop = min(piece.stop, move.kept_pages) if move.stopping else piece.stop
            if stop <= piece.start:
                break
            batch = _Batch.of(move, pages[piece.start : stop], sizes, self._copies)
            work(move, store, batch)
            batch.tell(found, rest)
            if batch.num_good < len(batch.pages):
                break
            yield
        move.defects = tuple(map(tuple, found))

    def _archive_pages(self, move: Move, store: Store, batch: _Batch) -> None:
        batch.check(self._copies, move)
        keys = batch.keys
        answers = store.prepare(keys[: batch.end], batch.sizes[: batch.end])
        mine = [at for at, answer in enumerate(answers) if answer is Answer.MISS]
        completed = False
        try:
            for at, answer in enumerate(answers):
                if answer is Answer.PENDING or answer is Answer.RETRY:
                    batch.fail(at, REFUSED)
            puts = [at for at in mine if at < batch.end]
            for at, answer in zip(puts, store.put(_at(keys, puts), _at(batch.records, puts)), strict=True):
                if answer is not Answer.HIT:
                    batch.fail(at, REFUSED)
            completed = True
            self._complete(store, batch, mine)
        finally:
            if not completed and mine:
                store.complete(_at(keys, mine), [False] * len(mine))
        move.moved_bytes += sum(batch.sizes[at] for at in mine if at < batch.end)

    @staticmethod
    def _complete(store: Store, batch: _Batch, mine: Sequence[int]) -> None:
        """Make whole pages visible and drop the rest. Those behind a page that could not be made visible are taken
        back: nobody would find them."""
        ok = [at < batch.end for at in mine]
        visible = []
        for at, wanted, answer in zip(mine, ok, store.complete(_at(batch.keys, mine), ok), strict=True):
            if wanted and answer is Answer.HIT:
                visible.append(at)
            elif wanted:
                batch.fail(at, REFUSED)
        orphans = [at for at in visible if at >= batch.end]
        if orphans:
            store.remove(_at(batch.keys, orphans))

    def _fetch_pages(self, move: Move, store: Store, batch: _Batch) -> None:
        move.asked_bytes += sum(batch.sizes)
        for at, answer in enumerate(store.get(batch.keys, batch.records)):
            if answer is Answer.MISS:
                batch.fail(at, MISSING)
            elif answer is not Answer.HIT:
                batch.fail(at, REFUSED)
        damaged = batch.check(self._copies, move)
        if damaged:
            self._blame(move, store, batch, damaged)
        move.moved_bytes += sum(batch.sizes[: batch.end])

    @staticmethod
    def _blame(move: Move, store: Store, batch: _Batch, damaged: Sequence[int]) -> None:
        """Read what is damaged again, into other memory, and once more where that is something else. Where the store
        says the same twice then, the row was doubtful, and the store's record stays. Otherwise that is removed, or it
        would be found again and again, and keep a good one from taking its place."""
        again = _read(store, batch, damaged)
        other = [at for at, record in again.items() if batch.records[at] != record]
        once_more = _read(store, batch, other) if other else {}
        doubtful = {at for at in other if once_more.get(at) == again[at]}
        wrong = [at for at in again if at not in doubtful]
        if wrong:
            store.remove(_at(batch.keys, wrong))
        places = [place for page in batch.pages for place in page]
        move.doubtful |= {places[at] for at in doubtful}

    def _need_store(self) -> Store:
        if self._store is None:
            raise InvalidInput("there is no storage tier.", fix="give --storage, or do not ask for one.")
        return self._store


@dataclass(slots=True)
class _Batch:
    """Consecutive pages of a move, and their records page by page. The first `num_good` pages are good so far, which
    are the first `end` records; what failed has a name."""

    pages: list[list[tuple[int, int]]]  # per page: which units, and where in them
    keys: list[StoreKey]
    sizes: list[int]
    records: list[memoryview]
    page_of: list[int]
    ends: list[int]  # per page: the record behind its last
    num_good: int
    failed: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, move: Move, pages: list[list[tuple[int, int]]], sizes: Sequence[int], copies: Copies) -> _Batch:
        rows = [copies.rows(units.group) for units in move.units]
        keys, batch_sizes, records, page_of, ends = [], [], [], [], []
        for number, page in enumerate(pages):
            for at, place in page:
                units = move.units[at]
                keys.append(StoreKey(move.scope, units.pages[place], units.group))
                batch_sizes.append(sizes[at])
                records.append(rows[at][units.host[place], : sizes[at]].data)
                page_of.append(number)
            ends.append(len(keys))
        return cls(pages, keys, batch_sizes, records, page_of, ends, len(pages))

    @property
    def end(self) -> int:
        """Records of good pages."""
        return self.ends[self.num_good - 1] if self.num_good else 0

    def fail(self, at: int, defect: str) -> None:
        """Record `at` is not good, so neither is its page, nor any page behind it."""
        self.num_good = min(self.num_good, self.page_of[at])
        self.failed.setdefault(at, defect)

    def check(self, copies: Copies, move: Move) -> list[int]:
        """Check the records of all good pages, group by group; returns which are damaged."""
        places = [place for page in self.pages for place in page][: self.end]
        damaged = []
        for at, units in enumerate(move.units):
            records = [number for number, (group, _) in enumerate(places) if group == at]
            if not records:
                continue
            first, last = places[records[0]][1], places[records[-1]][1] + 1
            host: Ids = units.host[first:last]
            for number, defect in zip(records, copies.defects(units.group, host, units.pages[first:last]), strict=True):
                if defect != GOOD:
                    self.fail(number, defect)
                    damaged.append(number)
        return damaged

    def tell(self, found: list[list[str]], rest: str) -> None:
        """Write down what became of each record: those of good pages are good, and others are `rest` or worse."""
        record = 0
        for number, page in enumerate(self.pages):
            for at, place in page:
                found[at][place] = GOOD if number < self.num_good else self.failed.get(record, rest)
                record += 1


_Work = Callable[[Move, Store, _Batch], None]


def _at(items: Sequence[_T], where: Sequence[int]) -> list[_T]:
    return [items[at] for at in where]


def _runs(count: int, each: int, most: int) -> Iterator[slice]:
    """Consecutive slices of `count` things of `each` bytes, of at most `most` bytes where one fits."""
    step = max(1, most // each)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _pages_of(units: Sequence[Units]) -> list[list[tuple[int, int]]]:
    """All pages in the order of the prefix; for each, which units it is in and where in them."""
    found: dict[bytes, list[tuple[int, int]]] = {page: [] for page in _prefix(units)}
    for at, group in enumerate(units):
        for place, page in enumerate(group.pages):
            found[page].append((at, place))
    return list(found.values())


def _prefix(units: Sequence[Units]) -> Sequence[bytes]:
    """The pages of all units, each behind all that come before it in any of them."""
    longest = max((group.pages for group in units), key=len, default=())
    known = set(longest)
    if all(known.issuperset(group.pages) for group in units):
        return longest
    order: TopologicalSorter[bytes] = TopologicalSorter()
    for group in units:
        for page in group.pages[:1]:
            order.add(page)
        for before, page in pairwise(group.pages):
            order.add(page, before)
    return tuple(order.static_order())


def _read(store: Store, batch: _Batch, places: Sequence[int]) -> dict[int, bytearray]:
    """What the store has of these records of a batch, in memory of its own."""
    records = [bytearray(batch.sizes[at]) for at in places]
    answers = store.get(_at(batch.keys, places), records)
    return {at: record for at, record, answer in zip(places, records, answers, strict=True) if answer is Answer.HIT}
