"""Tombstones: delete a scope in a store so that it stays deleted if the process dies before the end.

    1  write a tombstone, a record under a key that no page has      no lookup finds the scope any more
    2  remove the records, in batches
    3  remove the tombstone                                          the scope is as if never used

Each lookup also looks up the tombstones over its pages. If it finds one, it returns nothing, and its process continues
at step 2. So a process that is killed between 1 and 3 leaves records that use space and are never returned.

A tombstone has the size of a record of its scope and is newer than all of them. So an LRU store evicts those first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain, islice

from quire.errors import StoreError
from quire.memory.record import HEADER_BYTES, RecordFormat
from quire.tiers.store import SCOPE_BYTES, SCOPE_PREFIX_BYTES, Answer, Store, StoreKey, write_record
from quire.tiers.transfer import Transfer

_PART = 0xFFFF  # no group has this number
_AT_ONCE = 1024
_LEAST_BYTES = HEADER_BYTES + 1


def tombstone_of(scope: bytes) -> StoreKey:
    """The key of the tombstone of a scope, or of all scopes with this prefix."""
    page = hashlib.sha256(b"quire-forgotten-1" + scope).digest()
    return StoreKey(scope.ljust(SCOPE_BYTES, b"\0"), page, _PART)


def tombstones_over(scope: bytes) -> tuple[tuple[bytes, StoreKey], ...]:
    """The tombstones that can hide a scope, each with the scope or prefix that it hides."""
    return tuple((part, tombstone_of(part)) for part in (scope[:SCOPE_PREFIX_BYTES], scope))


def tombstone_scope(key: StoreKey) -> bytes | None:
    """The scope, or the prefix of scopes, that a tombstone hides; None for the key of a page."""
    return next((part for part, tombstone in tombstones_over(key.scope) if tombstone == key), None)


def delete_scope(store: Store, transfer: Transfer) -> Iterator[None]:
    """Remove all records of the scopes with prefix `transfer.scope`; `transfer.hidden` once none is found. Raises
    StoreError if the store cannot be listed, records remain, or it was stopped; then the tombstone stays."""
    scope = transfer.scope
    try:
        entries = store.entries(scope if len(scope) == SCOPE_BYTES else None)
        listed = (entry for entry in entries if entry.key.scope.startswith(scope))
        first = list(islice(listed, 1))
    except StoreError:
        transfer.hidden = _write_tombstone(store, scope, _LEAST_BYTES)
        raise
    if not first:
        return
    transfer.hidden = _write_tombstone(store, scope, max(_LEAST_BYTES, first[0].num_bytes))
    yield
    total = left = 0
    tombstones: set[StoreKey] = {tombstone_of(scope)} if transfer.hidden else set()
    rest = chain(first, listed)
    while batch := [entry.key for entry in islice(rest, _AT_ONCE)]:
        if transfer.stopping:
            raise StoreError(f"it was stopped when {total - left:,} records had been removed.")
        pages = [key for key in batch if key.part != _PART]
        tombstones.update(key for key in batch if key.part == _PART)  # tombstones of scopes with this prefix
        total += len(pages)
        if store.remove(pages) < len(pages):
            left += sum(answer is not Answer.MISS for answer in store.exists(pages))
        yield
    if left:
        raise StoreError(f"{left:,} of {total:,} records could not be removed.", fix="look at the store's log.")
    if store.remove(list(tombstones)) < len(tombstones) and Answer.HIT in store.exists(list(tombstones)):
        raise StoreError("the tombstone of the scope could not be removed.", fix="look at the store's log.")


def _write_tombstone(store: Store, scope: bytes, num_bytes: int) -> bool:
    """Returns whether the tombstone is there. A store that accepts no records may still remove some."""
    key = tombstone_of(scope)
    payload = bytes(num_bytes - HEADER_BYTES)
    header = RecordFormat(_PART, bytes(16), len(payload)).header(key.page, (payload,))
    return write_record(store, key, (header, payload)) is Answer.HIT
