"""RemoteStore: the common part of stores on a server. A record stays in the caller's memory until `complete`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from quire.tiers.store import Answer, Counts, Record, RecordViews, Store, StoreKey, prepare_once

_Item = TypeVar("_Item")
_NAME = re.compile(r"([0-9a-f]{32})/([0-9a-f]{64})\.(\d{1,5})", re.ASCII)


@dataclass(slots=True)
class _Announced:
    """A record's size, and the caller's memory of it after `put`."""

    num_bytes: int
    record: RecordViews | None = None


class RemoteStore(Store):
    """The writing half of the store port, without copies. A key is announced at most once, so a second writer in this
    process gets PENDING whatever the server has. `failures` counts errors by kind."""

    def __init__(self, failures: Counts) -> None:
        self.failures = failures
        self._announced: dict[StoreKey, _Announced] = {}

    def _claim(self, keys: list[StoreKey], sizes: list[int]) -> list[Answer]:
        """The answers of `prepare` for distinct keys."""
        return self.exists(keys)

    def _send(self, keys: list[StoreKey], records: list[RecordViews]) -> list[Answer]:
        """Store claimed records: HIT or RETRY."""
        raise NotImplementedError

    def _unclaim(self, keys: list[StoreKey]) -> None:
        """Claimed records will not be sent."""

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """The server is not asked about announced keys, and makes room when the bytes arrive."""
        return prepare_once(keys, sizes, self._prepare)

    def _prepare(self, keys: list[StoreKey], sizes: list[int]) -> list[Answer]:
        mine: dict[StoreKey, int] = {}
        for key, size in zip(keys, sizes, strict=True):
            announced = _Announced(size)
            if self._announced.setdefault(key, announced) is announced:  # atomic
                mine[key] = size
        answers = dict.fromkeys(mine, Answer.RETRY)
        try:
            answers.update(zip(mine, self._claim(list(mine), list(mine.values())), strict=True))
        finally:
            for key, answer in answers.items():
                if answer is not Answer.MISS:
                    self._announced.pop(key, None)
        return [answers.get(key, Answer.PENDING) for key in keys]

    def put(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        answers = [Answer.RETRY] * len(keys)
        for index, (key, record) in enumerate(zip(keys, map(RecordViews, records), strict=True)):
            announced = self._announced.get(key)
            if announced is not None and announced.num_bytes == record.num_bytes:
                announced.record = record
                answers[index] = Answer.HIT
        return answers

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        answers = [Answer.MISS] * len(keys)
        sending: dict[int, RecordViews] = {}
        dropped: list[StoreKey] = []
        for index, (key, good) in enumerate(zip(keys, ok, strict=True)):
            announced = self._announced.pop(key, None)
            if announced is None:
                continue
            answers[index] = Answer.RETRY if good else Answer.MISS
            if good and announced.record is not None:
                sending[index] = announced.record
            else:
                dropped.append(key)
        self._unclaim(dropped)
        sent = self._send([keys[index] for index in sending], list(sending.values()))
        for index, answer in zip(sending, sent, strict=True):
            answers[index] = answer
        return answers

    def _drop_announced(self) -> None:
        dropped, self._announced = self._announced, {}
        self._unclaim(list(dropped))


def key_of(name: str) -> StoreKey | None:
    """The inverse of `str(key)`; None for another name."""
    parts = _NAME.fullmatch(name)
    return None if parts is None else StoreKey(bytes.fromhex(parts[1]), bytes.fromhex(parts[2]), int(parts[3]))


def in_parts(items: Sequence[_Item], most: int) -> Iterator[Sequence[_Item]]:
    """Slices of at most `most` items."""
    for start in range(0, len(items), most):
        yield items[start : start + most]


def batches(sizes: Sequence[int], most: int, most_bytes: int) -> Iterator[list[int]]:
    """Indices of records in batches of at most `most` and `most_bytes`; a larger record is alone."""
    batch: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        if batch and (total + size > most_bytes or len(batch) == most):
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += size
    if batch:
        yield batch
