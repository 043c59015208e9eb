"""Keys and records for tests of stores, the medium of a store, and writing and reading in one call.

The bytes of a record follow from its number alone and no two numbers share them, so a mixed, torn or foreign record
shows wherever it is cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.tiers.store import Answer, Record, RecordViews, Store, StoreKey


class Medium(Protocol):
    """The disk or server below a store, which tests read and damage directly: raw bytes, a plain client."""

    def read(self, key: StoreKey) -> bytes | None:
        """The bytes of a visible record, None if there is none."""

    def write(self, key: StoreKey, record: bytes) -> None:
        """Replace a visible record by bytes of its length or shorter: a damaged or truncated medium."""

    def delete(self, key: StoreKey) -> None:
        """Delete the bytes of a visible record."""

    def keys(self) -> set[StoreKey]:
        """All visible records."""


def make_key(number: int, *, scope: int = 0, part: int = 0) -> StoreKey:
    """The key of a number."""
    page = hashlib.sha256(f"page {number}".encode()).digest()
    return StoreKey(hashlib.sha256(f"scope {scope}".encode()).digest()[:16], page, part)


def make_keys(count: int, *, scope: int = 0) -> list[StoreKey]:
    """The keys of 0, 1, ..."""
    return [make_key(number, scope=scope) for number in range(count)]


def make_record(number: int, num_bytes: int) -> bytes:
    """The record of a number, of this length."""
    return np.random.default_rng(number).bytes(num_bytes)


def write(store: Store, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
    """Prepare, put and complete: HIT for each record that is visible now, else what stopped it."""
    answers = store.prepare(keys, [RecordViews(record).num_bytes for record in records])
    mine = [index for index, answer in enumerate(answers) if answer is Answer.MISS]
    if not mine:
        return answers
    taken = store.put([keys[index] for index in mine], [records[index] for index in mine])
    done = store.complete([keys[index] for index in mine], [answer is Answer.HIT for answer in taken])
    for index, put, completed in zip(mine, taken, done, strict=True):
        answers[index] = completed if put is Answer.HIT else put
    return answers


def read(store: Store, key: StoreKey, num_bytes: int) -> bytes | None:
    """The record of one key if the store has it in this size."""
    buffer = bytearray(num_bytes)
    (answer,) = store.get([key], [buffer])
    return bytes(buffer) if answer is Answer.HIT else None
