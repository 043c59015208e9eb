"""Stores around another store: one that subclasses change, and one with a delay, like a network or a busy disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from threading import Lock

from quire.tiers.store import Answer, Entry, Record, RecordViews, Store, StoreKey


class WrappedStore(Store):
    """Forwards every call to `inner`, which it closes. `before` is called first where a call takes time, with the
    records of the call."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def before(self, records: Sequence[Record] = ()) -> None:
        """Nothing; for subclasses."""

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        self.before()
        return self.inner.exists(keys)

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        self.before()
        return self.inner.prepare(keys, sizes)

    def put(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        self.before(records)
        return self.inner.put(keys, records)

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        self.before()
        return self.inner.complete(keys, ok)

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        self.before(records)
        return self.inner.get(keys, records)

    def remove(self, keys: Sequence[StoreKey]) -> int:
        return self.inner.remove(keys)

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        return self.inner.entries(scope)

    def close(self) -> None:
        self.inner.close()


class SlowStore(WrappedStore):
    """Waits before each call between `seconds[0]` and `seconds[1]`, and for records also their bytes at `bandwidth`, in
    bytes a second. The times follow from `seed`; `sleep` is called with them."""

    def __init__(
        self,
        inner: Store,
        seconds: tuple[float, float],
        *,
        bandwidth: float | None = None,
        seed: int = 0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._seconds, self._bandwidth, self._sleep = seconds, bandwidth, sleep
        self._random, self._lock = Random(seed), Lock()

    def before(self, records: Sequence[Record] = ()) -> None:
        with self._lock:
            seconds = self._random.uniform(*self._seconds)
        if self._bandwidth is not None:
            seconds += sum(RecordViews(record).num_bytes for record in records) / self._bandwidth
        self._sleep(seconds)
