"""SlowStore: a store with a delay in every call, like a network or a busy disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random
from threading import Lock

from typing_extensions import Buffer

from quire.testing.stores.wrapped_store import WrappedStore
from quire.tiers.store import Answer, Store, StoreKey


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

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        """Later."""
        self._wait()
        return super().exists(keys)

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """Later."""
        self._wait()
        return super().prepare(keys, sizes)

    def put(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Later, by the bytes."""
        self._wait(records)
        return super().put(keys, records)

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        """Later."""
        self._wait()
        return super().complete(keys, ok)

    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Later, by the bytes."""
        self._wait(records)
        return super().get(keys, records)

    def _wait(self, records: Sequence[Buffer] = ()) -> None:
        with self._lock:
            seconds = self._random.uniform(*self._seconds)
        if self._bandwidth is not None:
            seconds += sum(memoryview(record).nbytes for record in records) / self._bandwidth
        self._sleep(seconds)
