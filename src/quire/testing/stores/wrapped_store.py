"""WrappedStore: forwards every call to another store. Subclasses change some calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from typing_extensions import Buffer

from quire.tiers.store import Answer, Entry, Store, StoreKey


class WrappedStore(Store):
    """A store around another one, `inner`, which it closes."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        """As the inner one."""
        return self.inner.exists(keys)

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """As the inner one."""
        return self.inner.prepare(keys, sizes)

    def put(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """As the inner one."""
        return self.inner.put(keys, records)

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        """As the inner one."""
        return self.inner.complete(keys, ok)

    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """As the inner one."""
        return self.inner.get(keys, records)

    def remove(self, keys: Sequence[StoreKey]) -> int:
        """As the inner one."""
        return self.inner.remove(keys)

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        """As the inner one."""
        return self.inner.entries(scope)

    def close(self) -> None:
        """As the inner one."""
        self.inner.close()
