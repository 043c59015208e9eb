"""Faults of tiers, by name: what is done to records on the host and to a store, and whose fault it is what is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from quire.offload.tiering import Tiering
from quire.spec.ids import Tier
from quire.testing.choices import Choices
from quire.testing.stores import Fault, FaultyStore, WrappedStore
from quire.tiers.store import Answer, Record, RecordViews, Store, StoreKey
from quire.tiers.tombstones import tombstone_scope
from quire.tiers.transfer import Lane
from tests.fuzz.host_records import HostRecords
from tests.fuzz.page_keys import PageKeys

IN_STORE: Final[dict[str, tuple[Fault, ...]]] = {
    "truncate-record": (Fault.TRUNCATED,),
    "exchange-pages": (Fault.EXCHANGED,),
    "stale-slot": (Fault.STALE,),
    "torn-write": (Fault.TORN,),
    "bit-flip": (Fault.FLIPPED,),
    "fail-store": (Fault.PUT_FAILS, Fault.GET_FAILS, Fault.COMPLETE_FAILS, Fault.LOST, Fault.UNREACHABLE),
    "full-disk": (Fault.FULL,),
}
ON_HOST: Final = ("truncate-record", "drop-field", "exchange-pages", "stale-slot", "bit-flip")
FAULTS: Final = (*IN_STORE, "drop-field", "slow-store")
"""All that can be injected. `slow-store` is a matter of time, and `full-disk` of room, too."""

DAMAGING: Final = tuple(name for name in FAULTS if name not in ("fail-store", "full-disk", "slow-store"))
"""Those after which bytes are not what they were. Each that a check has met must have been named."""

_LIES = {fault: name for name, faults in IN_STORE.items() for fault in faults}


def spoil(records: HostRecords, tiers: Tiering, faults: Collection[str], choices: Choices) -> tuple[object, ...]:
    """Damage a record of a cached page, if there is one and one of `faults` is about records; says what was done."""
    names = [name for name in ON_HOST if name in faults]
    first, count = choices.below(len(tiers.hosts)), len(tiers.hosts)
    found = [(group % count, _rows(tiers, group % count)) for group in range(first, first + count)]
    group, rows = next(((group, rows) for group, rows in found if rows), (0, []))
    if not names or not rows:
        return ("damage nothing",)
    fault, row = choices.one_of(names), choices.one_of(rows)
    if not _damage(records, fault, group, row, choices.one_of(rows), choices):
        return ("damage nothing",)
    return fault, "on host frame", row, "of group", group


def _rows(tiers: Tiering, group: int) -> list[int]:
    """Records whose damage a check can notice. What steps read in place is checked when it has left the device."""
    rows = [row for row in tiers.hosts[group].table.frame.tolist() if row and not _is_read(tiers, group, row)]
    here = tiers.table.of(Tier.DEVICE, group).frame
    return [row for row in rows if not here[row]] if tiers.hosts[group].are_page_ids else rows


def _is_read(tiers: Tiering, group: int, row: int) -> bool:
    """Whether a load that has checked this record is about to copy it: then no check can notice."""
    return any(
        move.checked and not move.done and part.group == group and row in part.host
        for move, moving in tiers.moving.items()
        if move.lane is Lane.LOAD
        for part in moving.parts
    )


def _damage(records: HostRecords, fault: str, group: int, row: int, other: int, choices: Choices) -> bool:
    """Do that to a host record that no transfer reads; whether it has changed. `other` is another row in use."""
    rows = records.rows(group)
    record, before = rows[row], rows[row].copy()
    half = (len(record) - 64) // 2
    match fault:
        case "truncate-record":
            record[choices.below(len(record)) :] = 0
        case "drop-field":
            record[64 + half * choices.below(2) :][:half] = 0
        case "exchange-pages":
            record[:] = rows[other]
        case "stale-slot":
            record[:] = rows[0]  # what lay there before anything did
        case "bit-flip":
            record[choices.below(len(record))] ^= 1 << choices.below(8)
    if np.array_equal(record, before):
        return False
    records.damaged[group, row] = fault
    return True


class WatchedStore(WrappedStore):
    """A faulty store, and which cache gets wrong answers. `wrong` has what its caller must never do, in words.

    `injected` counts lies by the name of their fault.
    """

    def __init__(self, inner: Store, keys: PageKeys, faults: Collection[str], *, seed: int, percent: int) -> None:
        kinds = [kind for name in faults for kind in IN_STORE.get(name, ())]
        self._faulty = FaultyStore(inner, seed=seed, kinds=kinds, percent=percent)
        super().__init__(self._faulty)
        self._keys = keys
        self._prepared: dict[StoreKey, int] = {}
        self._put: set[StoreKey] = set()
        self._lies: dict[tuple[int, bytes], str] = {}  # about what was read last
        self._torn: set[tuple[int, bytes]] = set()
        self.wrong: list[str] = []
        self.injected: Counter[str] = Counter()

    def refusals(self) -> dict[str, int]:
        """How often it did not do what it was asked, by fault."""
        names = [name for name in IN_STORE if name not in DAMAGING]
        return {name: sum(self._faulty.happened[kind] for kind in IN_STORE[name]) for name in names}

    def lied(self, group: int, page: bytes) -> str:
        """The fault that a record of this page has, as far as it came from here."""
        return "torn-write" if (group, page) in self._torn else self._lies.get((group, page), "")

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """Nothing is stored in a scope that is not its own, or under an unknown key, except tombstones of flushes."""
        for key in keys:
            if tombstone_scope(key) is not None:
                continue
            end = self._keys.end_of.get(key.page)
            if end is None or self._keys.scope(self._keys.names.namespaces[end]) != key.scope:
                self.wrong.append("a record was stored under a key or in a scope that is not its page's")
        answers = super().prepare(keys, sizes)
        self._prepared.update(
            {key: size for key, size, answer in zip(keys, sizes, answers, strict=True) if answer is Answer.MISS}
        )
        return answers

    def put(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        """What is put was prepared, in that size. Remembers what was taken, and how."""
        for key, record in zip(keys, records, strict=True):
            self._torn.discard((key.part, key.page))
            if self._prepared.get(key) != RecordViews(record).num_bytes:
                self.wrong.append("a record was put that was not prepared in its size")
        before = len(self._faulty.keys)
        answers = super().put(keys, records)
        self._put.update(key for key, answer in zip(keys, answers, strict=True) if answer is Answer.HIT)
        for _, key in self._faulty.keys[before:]:
            self._torn.add((key.part, key.page))
            self.injected["torn-write"] += 1
        return answers

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        """Only what was put is completed, and only what was prepared is dropped."""
        if not self._prepared.keys() >= set(keys):
            self.wrong.append("a record was completed that was not prepared")
        for key in keys:
            self._prepared.pop(key, None)
        missing = [key for key, good in zip(keys, ok, strict=True) if good and key not in self._put]
        if missing:
            self.wrong.append("a record was made visible whose bytes the store never took")
        answers = super().complete(keys, [good and key not in missing for key, good in zip(keys, ok, strict=True)])
        self._put.difference_update(keys)
        return answers

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        """Remembers which answers are lies."""
        for key in keys:
            self._lies.pop((key.part, key.page), None)
        before = len(self._faulty.keys)
        answers = super().get(keys, records)
        for fault, key in self._faulty.keys[before:]:
            if fault in _LIES:
                self._lies[key.part, key.page] = _LIES[fault]
                self.injected[_LIES[fault]] += 1
        return answers
