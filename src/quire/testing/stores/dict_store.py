"""DictStore: the smallest store that keeps the port's contract, in a dictionary. Records are gone when it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import RLock

from typing_extensions import Buffer

from quire.tiers.store import Answer, Entry, Store, StoreKey


class DictStore(Store):
    """Keeps at most `most_bytes`, prepared ones counted in, and forgets what was not used for longest: of a batch the
    last first. `version` changes whenever `visible` does. `prepared` has the sizes of records between `prepare` and
    `complete`, `taken` the buffers of those that were put."""

    def __init__(self, most_bytes: int = 1 << 30) -> None:
        self.visible: dict[StoreKey, bytes] = {}  # least recently used first
        self.version = 0
        self.prepared: dict[StoreKey, int] = {}
        self.taken: dict[StoreKey, Buffer] = {}
        self._most_bytes = most_bytes
        self._lock = RLock()

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        """Never RETRY."""
        with self._lock:
            return [Answer.HIT if key in self.visible else Answer.MISS for key in keys]

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """RETRY where there is no room beside what is prepared. HIT counts as use, of the first key last."""
        with self._lock:
            self._use(keys)
            return [self._prepare(key, size) for key, size in zip(keys, sizes, strict=True)]

    def put(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Keeps the buffers as they are until `complete`."""
        with self._lock:
            for key, record in zip(keys, records, strict=True):
                assert memoryview(record).nbytes == self.prepared[key], "a record of another size than was prepared"
                self.taken[key] = record
            return [Answer.HIT] * len(keys)

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        """Never RETRY."""
        with self._lock:
            for key, good in zip(keys, ok, strict=True):
                del self.prepared[key]
                record = self.taken.pop(key, None)
                if good:
                    assert record is not None, "a record was completed and never put"
                    self.visible[key] = bytes(record)
                    self.version += 1
            self._use(keys)
            return [Answer.HIT if good else Answer.MISS for good in ok]

    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """RETRY for a record of another size than its buffer."""
        with self._lock:
            self._use(keys)
            return [self._get(key, memoryview(record)) for key, record in zip(keys, records, strict=True)]

    def remove(self, keys: Sequence[StoreKey]) -> int:
        """At once."""
        with self._lock:
            found = sum(self.visible.pop(key, None) is not None for key in keys)
            self.version += found
            return found

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        """As they are now."""
        with self._lock:
            return iter([Entry(key, len(record)) for key, record in self.visible.items() if scope in (None, key.scope)])

    def close(self) -> None:
        """Drops what was prepared."""
        self.prepared.clear()
        self.taken.clear()

    @property
    def num_bytes(self) -> int:
        """Of visible and of prepared records."""
        return sum(map(len, self.visible.values())) + sum(self.prepared.values())

    def _use(self, keys: Sequence[StoreKey]) -> None:
        """The first counts as used last."""
        for key in reversed(keys):
            if key in self.visible:
                self.visible[key] = self.visible.pop(key)

    def _prepare(self, key: StoreKey, size: int) -> Answer:
        if key in self.visible:
            return Answer.HIT
        if key in self.prepared:
            return Answer.PENDING
        while self.visible and self.num_bytes + size > self._most_bytes:
            del self.visible[next(iter(self.visible))]
            self.version += 1
        if self.num_bytes + size > self._most_bytes:
            return Answer.RETRY
        self.prepared[key] = size
        return Answer.MISS

    def _get(self, key: StoreKey, record: memoryview) -> Answer:
        if key not in self.visible:
            return Answer.MISS
        found = self.visible[key]
        if len(found) != record.nbytes:
            return Answer.RETRY
        record[:] = found
        return Answer.HIT
