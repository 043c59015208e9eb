"""Carrier: does one transfer, piece by piece. It knows no threads and no time; movers do.

The rules of transfers are here:

    records are checked before they leave the host, and when they have come to it; a damaged one is read again before
    the store has to remove it
    a load copies nothing to the device from the first page on that has a damaged record, and no step may use the pages
    before it until the transfer has ended
    a page is in the store, or at the peer, in all of its groups or not at all, and after the pages before it
    a lookup finds nothing that the store was told to forget (`quire.tiers.forgotten`)
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
from quire.tiers.store import Answer, Store, StoreKey
from quire.tiers.transfer import GOOD, MISSING, REFUSED, Copies, Endpoint, Transfer, Units

_T = TypeVar("_T")

PIECE_BYTES = 16 << 20
"""About how much is done at a time. A load waits for no more than one piece of a save."""

_LOOKED_UP = 128
"""Pages that a store is asked for at a time. Most prompts end sooner in what is stored, and a store may need a request
for each key."""
_MOST_TOUCHED = 1024  # in one call


class Carrier:
    """Does transfers with these copies, and with this store and this peer where there are any. A peer answers as a
    store does."""

    def __init__(
        self, copies: Copies, store: Store | None, peer: Store | None = None, *, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._copies = copies
        self._remotes = {Endpoint.STORE: store, Endpoint.PEER: peer}
        self._piece_bytes = piece_bytes

    def carry(self, transfer: Transfer) -> Iterator[None]:
        """Do a transfer; it pauses after each piece. It raises what the copies or the remote raise, and the transfer
        has then failed. Its results are complete when the pieces end; to end it is left to the caller."""
        lane = transfer.lane
        if not lane.is_remote:
            yield from self._load(transfer) if lane.is_inward else self._save(transfer)
            return
        remote = self._remotes[lane.far]
        if remote is None:
            if lane.far is Endpoint.PEER:
                raise InvalidInput("there is no peer.", fix="give the mover one, or do not ask for it.")
            raise InvalidInput("there is no storage tier.", fix="give --storage, or do not ask for one.")
        if lane.carries:
            yield from (self._get if lane.is_inward else self._put)(transfer, remote)
        else:
            yield from (self._look if lane.is_inward else self._forget)(transfer, remote)

    # -- between device and host

    def _save(self, transfer: Transfer) -> Iterator[None]:
        for units in transfer.units:
            each = self._copies.bytes_of(units.group)
            for piece in _runs(len(units), each, self._piece_bytes):
                self._copies.to_host(units.group, units.device[piece], units.host[piece])
                self._copies.seal(units.group, units.host[piece], units.pages[piece])
                transfer.moved_bytes += each * (piece.stop - piece.start)
                yield

    def _load(self, transfer: Transfer) -> Iterator[None]:
        copies, whole = self._copies, transfer.units
        defects = [copies.defects(units.group, units.host, units.pages) for units in whole]
        transfer.defects = tuple(map(tuple, defects))
        if any(any(found) for found in defects):
            yield
            yield from self._load_good(transfer, defects)
            return
        transfer.announce_checked()
        yield
        for layer in copies.layers():
            for units in whole:
                copies.to_device(units.group, units.device, units.host, layer)
            transfer.announce_layer(layer)
            yield
        transfer.moved_bytes = sum(copies.bytes_of(units.group) * len(units) for units in whole)

    def _load_good(self, transfer: Transfer, defects: Sequence[Sequence[str]]) -> Iterator[None]:
        """Copy the pages before the first that is damaged in any group; those behind it are damaged or missing."""
        ends = [0] * len(transfer.units)
        for page in _pages_of(transfer.units):
            if any(defects[at][place] for at, place in page):
                break
            for at, place in page:
                ends[at] = place + 1
        for layer in self._copies.layers():
            for units, end in zip(transfer.units, ends, strict=True):
                if end:
                    self._copies.to_device(units.group, units.device[:end], units.host[:end], layer)
            yield
        transfer.defects = tuple(
            (*found[:end], *(defect or MISSING for defect in found[end:]))
            for found, end in zip(defects, ends, strict=True)
        )

    # -- between host and a remote

    def _put(self, transfer: Transfer, remote: Store) -> Iterator[None]:
        yield from self._by_pages(transfer, remote, self._put_pages, REFUSED)
        if not transfer.stopping and not any(REFUSED in defects for defects in transfer.defects):
            yield from self._touch(transfer, remote)

    def _touch(self, transfer: Transfer, store: Store) -> Iterator[None]:
        """Tell the store what was used, the first page of a prefix last: a store evicts what was used longest ago, and
        a page is of no use without those before it. A record that has gone meanwhile gets no room here."""
        found = []
        for units in transfer.touches:
            keys = units.keys(transfer.scope)
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
        transfer.answers = tuple(found)

    def _get(self, transfer: Transfer, remote: Store) -> Iterator[None]:
        yield from self._by_pages(transfer, remote, self._get_pages, MISSING)

    def _look(self, transfer: Transfer, store: Store) -> Iterator[None]:
        """Ask for some pages at a time, in the order of the prefix, until one is missing that all behind it need. Pages
        that were not asked for are a MISS. Each time asks for the marks too: the scope may be deleted meanwhile."""
        over, pages = marks_over(transfer.scope), _pages_of(transfer.units)
        found = [[Answer.MISS] * len(units) for units in transfer.units]
        for start in range(0, max(1, len(pages)), _LOOKED_UP):
            if transfer.stopping:
                break
            places = [place for page in pages[start : start + _LOOKED_UP] for place in page]
            units = transfer.units
            keys = [StoreKey(transfer.scope, units[at].pages[place], units[at].group) for at, place in places]
            answers = iter(store.exists([*(mark for _, mark in over), *keys]))
            marks = list(islice(answers, len(over)))
            marked = [scope for (scope, _), answer in zip(over, marks, strict=True) if answer is Answer.HIT]
            transfer.marked = tuple(marked)
            if marked:
                found = [[Answer.MISS] * len(units) for units in transfer.units]
                break
            ends = False
            for (at, place), answer in zip(places, answers_under(marks, answers), strict=True):
                found[at][place] = answer
                ends |= answer is not Answer.HIT and units[at].group in transfer.whole
            if ends:
                break
            yield
        transfer.answers = tuple(map(tuple, found))

    def _forget(self, transfer: Transfer, store: Store) -> Iterator[None]:
        if not transfer.units:
            yield from forget_scope(store, transfer)
        for units in transfer.units:
            store.remove(units.keys(transfer.scope))
            yield

    def _by_pages(self, transfer: Transfer, remote: Store, work: _Work, rest: str) -> Iterator[None]:
        """Work on pages in the order of the prefix, some at a time, up to the first that fails in any group. The result
        of every unit that was not done by then is `rest`."""
        found = [[rest] * len(units) for units in transfer.units]
        pages = _pages_of(transfer.units)
        sizes = [self._copies.bytes_of(units.group) for units in transfer.units]
        most = sum(sizes[at] for page in pages for at, _ in page)
        for piece in _runs(len(pages), max(1, most // max(1, len(pages))), self._piece_bytes):
            stop = min(piece.stop, transfer.kept_pages) if transfer.stopping else piece.stop
            if stop <= piece.start:
                break
            batch = _Batch.of(transfer, pages[piece.start : stop], sizes, self._copies)
            work(transfer, remote, batch)
            batch.report(found, rest)
            if batch.num_good < len(batch.pages):
                break
            yield
        transfer.defects = tuple(map(tuple, found))

    def _put_pages(self, transfer: Transfer, remote: Store, batch: _Batch) -> None:
        batch.check(self._copies, transfer)
        keys = batch.keys
        answers = remote.prepare(keys[: batch.end], batch.sizes[: batch.end])
        mine = [at for at, answer in enumerate(answers) if answer is Answer.MISS]
        completed = False
        try:
            for at, answer in enumerate(answers):
                if answer is Answer.PENDING or answer is Answer.RETRY:
                    batch.fail(at, REFUSED)
            puts = [at for at in mine if at < batch.end]
            for at, answer in zip(puts, remote.put(_at(keys, puts), _at(batch.records, puts)), strict=True):
                if answer is not Answer.HIT:
                    batch.fail(at, REFUSED)
            completed = True
            self._complete(remote, batch, mine)
        finally:
            if not completed and mine:
                remote.complete(_at(keys, mine), [False] * len(mine))
        transfer.moved_bytes += sum(batch.sizes[at] for at in mine if at < batch.end)

    @staticmethod
    def _complete(remote: Store, batch: _Batch, mine: Sequence[int]) -> None:
        """Make whole pages visible and drop the rest. Those behind a page that could not be made visible are removed:
        no lookup would find them."""
        ok = [at < batch.end for at in mine]
        visible = []
        for at, wanted, answer in zip(mine, ok, remote.complete(_at(batch.keys, mine), ok), strict=True):
            if wanted and answer is Answer.HIT:
                visible.append(at)
            elif wanted:
                batch.fail(at, REFUSED)
        orphans = [at for at in visible if at >= batch.end]
        if orphans:
            remote.remove(_at(batch.keys, orphans))

    def _get_pages(self, transfer: Transfer, remote: Store, batch: _Batch) -> None:
        transfer.asked_bytes += sum(batch.sizes)
        for at, answer in enumerate(remote.get(batch.keys, batch.records)):
            if answer is Answer.MISS:
                batch.fail(at, MISSING)
            elif answer is not Answer.HIT:
                batch.fail(at, REFUSED)
        damaged = batch.check(self._copies, transfer)
        if damaged:
            self._find_culprit(transfer, remote, batch, damaged)
        transfer.moved_bytes += sum(batch.sizes[: batch.end])

    @staticmethod
    def _find_culprit(transfer: Transfer, remote: Store, batch: _Batch, damaged: Sequence[int]) -> None:
        """Read damaged records again, into other memory, and once more where they differ now. If both of these agree,
        the host row is suspect, and the record stays. Otherwise the record is removed: it would be found again and
        again, and keep a good one from taking its place."""
        again = _read(remote, batch, damaged)
        differs = [at for at, record in again.items() if batch.records[at] != record]
        once_more = _read(remote, batch, differs) if differs else {}
        suspect = {at for at in differs if once_more.get(at) == again[at]}
        wrong = [at for at in again if at not in suspect]
        if wrong:
            remote.remove(_at(batch.keys, wrong))
        places = [place for page in batch.pages for place in page]
        transfer.suspect |= {places[at] for at in suspect}


@dataclass(slots=True)
class _Batch:
    """Consecutive pages of a transfer, and their records page by page. The first `num_good` pages are good so far,
    which are the first `end` records; `failed` has the defects of the others."""

    pages: list[list[tuple[int, int]]]  # per page: which units, and where in them
    keys: list[StoreKey]
    sizes: list[int]
    records: list[memoryview]
    page_of: list[int]
    ends: list[int]  # per page: the record behind its last
    num_good: int
    failed: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, transfer: Transfer, pages: list[list[tuple[int, int]]], sizes: Sequence[int], copies: Copies) -> _Batch:
        rows = [copies.rows(units.group) for units in transfer.units]
        keys, batch_sizes, records, page_of, ends = [], [], [], [], []
        for number, page in enumerate(pages):
            for at, place in page:
                units = transfer.units[at]
                keys.append(StoreKey(transfer.scope, units.pages[place], units.group))
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

    def check(self, copies: Copies, transfer: Transfer) -> list[int]:
        """Check the records of all good pages, group by group; returns which are damaged."""
        places = [place for page in self.pages for place in page][: self.end]
        damaged = []
        for at, units in enumerate(transfer.units):
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

    def report(self, found: list[list[str]], rest: str) -> None:
        """Write the result of each record: those of good pages are good, and others are `rest` or worse."""
        record = 0
        for number, page in enumerate(self.pages):
            for at, place in page:
                found[at][place] = GOOD if number < self.num_good else self.failed.get(record, rest)
                record += 1


_Work = Callable[[Transfer, Store, _Batch], None]


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
