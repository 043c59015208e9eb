"""TransferExecutor: runs one transfer, piece by piece, without threads or clocks (movers have those).

Invariants of transfers:

    records are checked before they leave the host and after they arrive; a corrupt one is read again before it is
    removed from the store
    a load copies only the pages before the first corrupt record; then no step uses them until the transfer has ended
    a page is in a store in all of its groups or in none, and only after the pages before it
    a lookup finds nothing that is being deleted (`quire.tiers.tombstones`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from graphlib import TopologicalSorter

from quire.errors import InvalidInput
from quire.memory.record import QueuedCopy
from quire.spec.ids import Ids
from quire.tiers.store import Answer, Store, StoreKey
from quire.tiers.tombstones import delete_scope, tombstones_over
from quire.tiers.transfer import GOOD, MISSING, REFUSED, Copies, Lane, Transfer, Units

PIECE_BYTES = 16 << 20  # bytes in one piece; a load waits for at most one piece of a save
_LOOKED_UP = 128  # pages per lookup: most prompts miss early, and a store may need a request for each key
_MOST_TOUCHED = 1024  # in one call


class TransferExecutor:
    """Runs transfers with these copies and this store."""

    def __init__(self, copies: Copies, store: Store | None, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._copies = copies
        self._store = store
        self._piece_bytes = piece_bytes

    def run(self, transfer: Transfer) -> Iterator[None]:
        """Run a transfer, one piece per step; raises the errors of the copies or the store. The caller ends it."""
        lane = transfer.lane
        if not lane.is_remote:
            yield from self._load(transfer) if lane.is_inward else self._save(transfer)
            return
        if lane is Lane.RECEIVE:
            yield from self._by_pages(transfer, self._check_pages, MISSING)
            return
        store = self._store
        if store is None:
            raise InvalidInput("there is no storage tier.", fix="give --storage, or do not ask for one.")
        if not lane.carries:
            yield from (self._look if lane.is_inward else self._delete)(transfer, store)
        elif lane.is_inward:
            yield from self._by_pages(transfer, partial(self._get_pages, store), MISSING)
        else:
            yield from self._by_pages(transfer, partial(self._put_pages, store), REFUSED)
            if not transfer.stopping and not any(REFUSED in defects for defects in transfer.defects):
                yield from self._touch(transfer, store)

    # -- between device and host

    def _save(self, transfer: Transfer) -> Iterator[None]:
        for units in transfer.units:
            each = self._copies.bytes_of(units.group)
            for piece in _runs(len(units), each, self._piece_bytes):
                if not units.in_place:
                    self._copies.to_host(units.group, units.device[piece], units.host[piece])
                    transfer.moved_bytes += each * (piece.stop - piece.start)
                self._copies.seal(units.group, units.host[piece], units.pages[piece])
                yield

    def _load(self, transfer: Transfer) -> Iterator[None]:
        """Copy the pages before the first that is corrupt in any group; later ones are corrupt or missing."""
        copies, whole = self._copies, transfer.units
        found = [copies.defects(units.group, units.host, units.pages) for units in whole]
        is_good = not any(map(any, found))
        ends = [len(units) for units in whole] if is_good else _ends_before_corruption(whole, found)
        transfer.defects = tuple(
            (*defects[:end], *(defect or MISSING for defect in defects[end:]))
            for defects, end in zip(found, ends, strict=True)
        )
        if not copies.queues:  # a step may be launched, and waits itself
            transfer.are_good = is_good
            yield
        queued: list[QueuedCopy] = []
        try:
            for units, end in zip(whole, ends, strict=True):
                for piece in _runs(0 if units.in_place else end, copies.bytes_of(units.group), self._piece_bytes):
                    copy = copies.to_device(units.group, units.device[piece], units.host[piece])
                    if copy is not None:
                        queued.append(copy)
                    else:
                        yield
            if is_good:
                copied = [units for units in whole if not units.in_place]
                transfer.moved_bytes = sum(copies.bytes_of(units.group) * len(units) for units in copied)
                transfer.arrived(queued)
                yield
        finally:
            for copy in queued:
                copy.wait()

    # -- between host and store

    def _touch(self, transfer: Transfer, store: Store) -> Iterator[None]:
        """Count records as used, the first page of a prefix last (see `quire.tiers.store`). Evicted ones stay out."""
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

    def _look(self, transfer: Transfer, store: Store) -> Iterator[None]:
        """Look up pages until one is missing that all later ones need; the rest is a MISS."""
        # Each lookup includes the tombstones: the scope may be deleted meanwhile.
        over, pages = tombstones_over(transfer.scope), _pages_of(transfer.units)
        found = [[Answer.MISS] * len(units) for units in transfer.units]
        for start in range(0, max(1, len(pages)), _LOOKED_UP):
            if transfer.stopping:
                break
            places = [place for page in pages[start : start + _LOOKED_UP] for place in page]
            units = transfer.units
            keys = [StoreKey(transfer.scope, units[at].pages[place], units[at].group) for at, place in places]
            answers = store.exists([*(tombstone for _, tombstone in over), *keys])
            tombstones, answers = answers[: len(over)], answers[len(over) :]
            deleted = [scope for (scope, _), answer in zip(over, tombstones, strict=True) if answer is Answer.HIT]
            transfer.deleted_scopes = tuple(deleted)
            if deleted:
                found = [[Answer.MISS] * len(units) for units in transfer.units]
                break
            hidden = (
                Answer.MISS if Answer.PENDING in tombstones else Answer.RETRY if Answer.RETRY in tombstones else None
            )
            ends = False
            for (at, place), said in zip(places, answers, strict=True):
                found[at][place] = answer = hidden or said
                ends |= answer is not Answer.HIT and units[at].group in transfer.whole
            if ends:
                break
            yield
        transfer.answers = tuple(map(tuple, found))

    def _delete(self, transfer: Transfer, store: Store) -> Iterator[None]:
        if not transfer.units:
            yield from delete_scope(store, transfer)
        for units in transfer.units:
            store.remove(units.keys(transfer.scope))
            yield

    def _by_pages(self, transfer: Transfer, work: _Work, rest: str) -> Iterator[None]:
        """Do `work` on pages up to the first that fails in any group. Units without an answer get `rest`."""
        found = [[rest] * len(units) for units in transfer.units]
        pages = _pages_of(transfer.units)
        num_bytes = sum(self._copies.bytes_of(units.group) * len(units) for units in transfer.units)
        for piece in _runs(len(pages), max(1, num_bytes // max(1, len(pages))), self._piece_bytes):
            stop = min(piece.stop, transfer.kept_pages) if transfer.stopping else piece.stop
            if stop <= piece.start:
                break
            batch = _Batch(transfer, pages[piece.start : stop], self._copies)
            work(transfer, batch)
            for record in batch.records:
                is_good = record.page < batch.num_good
                found[record.units][record.place] = GOOD if is_good else record.defect or rest
            if batch.num_good < stop - piece.start:
                break
            yield
        transfer.defects = tuple(map(tuple, found))

    def _put_pages(self, store: Store, transfer: Transfer, batch: _Batch) -> None:
        batch.check(self._copies, transfer)
        records = batch.good()
        mine: list[_Record] = []
        answers = store.prepare(_keys(records), [record.num_bytes for record in records])
        for record, answer in zip(records, answers, strict=True):
            if answer is Answer.MISS:
                mine.append(record)
            elif answer is not Answer.HIT:
                batch.fail(record, REFUSED)
        puts = [record for record in mine if record.page < batch.num_good]
        try:
            answers = store.put(_keys(puts), [record.data for record in puts])
        except BaseException:
            store.complete(_keys(mine), [False] * len(mine))
            raise
        for record, answer in zip(puts, answers, strict=True):
            if answer is not Answer.HIT:
                batch.fail(record, REFUSED)
        self._complete(store, batch, mine)
        transfer.moved_bytes += sum(record.num_bytes for record in mine if record.page < batch.num_good)

    @staticmethod
    def _complete(store: Store, batch: _Batch, mine: Sequence[_Record]) -> None:
        """Make whole pages visible and drop the rest. Remove the pages after one that did not become visible."""
        ok = [record.page < batch.num_good for record in mine]
        visible = []
        for record, wanted, answer in zip(mine, ok, store.complete(_keys(mine), ok), strict=True):
            if wanted and answer is Answer.HIT:
                visible.append(record)
            elif wanted:
                batch.fail(record, REFUSED)
        unreachable = [record for record in visible if record.page >= batch.num_good]
        if unreachable:
            store.remove(_keys(unreachable))

    def _get_pages(self, store: Store, transfer: Transfer, batch: _Batch) -> None:
        records = batch.records
        transfer.asked_bytes += sum(record.num_bytes for record in records)
        answers = store.get(_keys(records), [record.data for record in records])
        for record, answer in zip(records, answers, strict=True):
            if answer is not Answer.HIT:
                batch.fail(record, MISSING if answer is Answer.MISS else REFUSED)
        if corrupt := batch.check(self._copies, transfer):
            self._recheck(transfer, store, corrupt)
        transfer.moved_bytes += sum(record.num_bytes for record in batch.good())

    def _check_pages(self, transfer: Transfer, batch: _Batch) -> None:
        batch.check(self._copies, transfer)
        transfer.moved_bytes += sum(record.num_bytes for record in batch.good())

    @staticmethod
    def _recheck(transfer: Transfer, store: Store, corrupt: Sequence[_Record]) -> None:
        """Read corrupt records again into other memory, and once more if the two reads differ. If the reads agree, the
        host row is suspect and the record stays. Otherwise it is removed."""
        again = _read(store, corrupt)
        differs = [record for record, data in again.items() if record.data != data]
        once_more = _read(store, differs) if differs else {}
        suspect = [record for record in differs if once_more.get(record) == again[record]]
        wrong = [record for record in again if record not in suspect]
        if wrong:
            store.remove(_keys(wrong))
        transfer.suspect |= {(record.units, record.place) for record in suspect}


@dataclass(slots=True, eq=False)
class _Record:
    """The record of one page in one unit of a transfer. Simulated `data` is shorter than `num_bytes`."""

    key: StoreKey
    num_bytes: int
    data: memoryview
    units: int
    place: int  # in them
    page: int  # number of the page in the batch
    defect: str = GOOD


class _Batch:
    """The records of consecutive pages of a transfer; the first `num_good` pages are good so far."""

    def __init__(self, transfer: Transfer, pages: list[_Places], copies: Copies) -> None:
        self.num_good = len(pages)
        self.records: list[_Record] = []
        sizes = [copies.bytes_of(units.group) for units in transfer.units]
        rows = [copies.rows(units.group)[:, :size] for units, size in zip(transfer.units, sizes, strict=True)]
        for number, page in enumerate(pages):
            for at, place in page:
                units = transfer.units[at]
                key = StoreKey(transfer.scope, units.pages[place], units.group)
                self.records.append(_Record(key, sizes[at], rows[at][units.host[place]].data, at, place, number))

    def good(self) -> list[_Record]:
        return [record for record in self.records if record.page < self.num_good]

    def fail(self, record: _Record, defect: str) -> None:
        """A record is bad, so its page and all later ones are, too."""
        self.num_good = min(self.num_good, record.page)
        record.defect = record.defect or defect

    def check(self, copies: Copies, transfer: Transfer) -> list[_Record]:
        """Check the records of good pages, group by group; returns the corrupt ones."""
        good, corrupt = self.good(), []
        for at, units in enumerate(transfer.units):
            records = [record for record in good if record.units == at]
            if not records:
                continue
            host: Ids = units.host[[record.place for record in records]]
            found = copies.defects(units.group, host, [record.key.page for record in records])
            for record, defect in zip(records, found, strict=True):
                if defect != GOOD:
                    self.fail(record, defect)
                    corrupt.append(record)
        return corrupt


_Work = Callable[[Transfer, _Batch], None]
_Places = list[tuple[int, int]]  # units of one page: index of the units, and the place in them


def _keys(records: Iterable[_Record]) -> list[StoreKey]:
    return [record.key for record in records]


def _read(store: Store, records: Sequence[_Record]) -> dict[_Record, bytearray]:
    read = [bytearray(record.data.nbytes) for record in records]
    answers = store.get(_keys(records), read)
    return {record: data for record, data, answer in zip(records, read, answers, strict=True) if answer is Answer.HIT}


def _runs(count: int, each: int, most: int) -> Iterator[slice]:
    """Slices over `count` items of `each` bytes: at most `most` bytes, at least one item."""
    step = max(1, most // each)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _ends_before_corruption(units: Sequence[Units], defects: Sequence[Sequence[str]]) -> list[int]:
    """For each of `units`, the number of pages before the first that is corrupt in any of them."""
    ends = [0] * len(units)
    for page in _pages_of(units):
        if any(defects[at][place] for at, place in page):
            break
        for at, place in page:
            ends[at] = place + 1
    return ends


def _pages_of(units: Sequence[Units]) -> list[_Places]:
    """All pages in the order of the prefix."""
    found: dict[bytes, _Places] = {page: [] for page in _prefix(units)}
    for at, group in enumerate(units):
        for place, page in enumerate(group.pages):
            found[page].append((at, place))
    return list(found.values())


def _prefix(units: Sequence[Units]) -> Sequence[bytes]:
    """The pages of all units, each after all that precede it in any of them."""
    longest = max((group.pages for group in units), key=len, default=())
    known = set(longest)
    if all(known.issuperset(group.pages) for group in units):
        return longest
    order: TopologicalSorter[bytes] = TopologicalSorter()
    for group in units:
        for at, page in enumerate(group.pages):
            order.add(page, *group.pages[max(0, at - 1) : at])
    return list(order.static_order())
