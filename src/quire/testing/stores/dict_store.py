"""DictStore: the smallest complete store, in a dictionary. It is not persistent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import RLock

from quire.tiers.store import Answer, Entry, Record, RecordViews, Store, StoreKey


class DictStore(Store):
    """Keeps at most `most_bytes`, prepared ones counted in, and evicts what was not used for longest: of a batch the
    last first. `version` changes whenever `visible` does. `prepared` has the sizes of records between `prepare` and
    `complete`, `taken` the buffers of those that were put."""

    def __init__(self, most_bytes: int = 1 << 30) -> None:
        self.visible: dict[StoreKey, bytes] = {}
        self.version = 0
        self.prepared: dict[StoreKey, int] = {}
        self.taken: dict[StoreKey, Record] = {}
        self._used: dict[StoreKey, int] = {}
        self._uses = 0
        self._most_bytes = most_bytes
        self._lock = RLock()

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        with self._lock:
            return [Answer.HIT if key in self.visible else Answer.MISS for key in keys]

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """RETRY if the prepared records leave no space. HIT counts as use, of the first key last."""
        with self._lock:
            self._use(keys)
            return [self._prepare(key, size) for key, size in zip(keys, sizes, strict=True)]

    def put(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        """RETRY for a record that was not prepared in this size. Refers to the buffers until `complete`."""
        with self._lock:
            return [self._put(key, record) for key, record in zip(keys, records, strict=True)]

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        """Never RETRY. MISS for a record that was not put."""
        with self._lock:
            return [self._complete(key, good) for key, good in zip(keys, ok, strict=True)]

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        with self._lock:
            self._use(keys)
            return [self._get(key, record) for key, record in zip(keys, records, strict=True)]

    def remove(self, keys: Sequence[StoreKey]) -> int:
        with self._lock:
            found = sum(self.visible.pop(key, None) is not None for key in keys)
            self.version += found
            return found

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        with self._lock:
            return iter([Entry(key, len(record)) for key, record in self.visible.items() if scope in (None, key.scope)])

    def close(self) -> None:
        """Remove all records and refuse new ones."""
        with self._lock:
            for held in (self.visible, self.prepared, self.taken):
                held.clear()
            self._most_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of visible and of prepared records."""
        return sum(map(len, self.visible.values())) + sum(self.prepared.values())

    def _use(self, keys: Sequence[StoreKey]) -> None:
        """The first counts as used last."""
        for key in reversed(keys):
            self._uses += 1
            self._used[key] = self._uses

    def _prepare(self, key: StoreKey, size: int) -> Answer:
        if key in self.visible:
            return Answer.HIT
        if key in self.prepared:
            return Answer.PENDING
        if sum(self.prepared.values()) + size > self._most_bytes:
            return Answer.RETRY
        while self.num_bytes + size > self._most_bytes:
            del self.visible[min(self.visible, key=self._used.__getitem__)]
            self.version += 1
        self.prepared[key] = size
        return Answer.MISS

    def _put(self, key: StoreKey, record: Record) -> Answer:
        if self.prepared.get(key) != RecordViews(record).num_bytes:
            return Answer.RETRY
        self.taken[key] = record
        return Answer.HIT

    def _complete(self, key: StoreKey, good: bool) -> Answer:
        self.prepared.pop(key, None)
        record = self.taken.pop(key, None)
        if not good or record is None:
            return Answer.MISS
        self.visible[key] = bytes(RecordViews(record).join())
        self.version += 1
        return Answer.HIT

    def _get(self, key: StoreKey, record: Record) -> Answer:
        found = self.visible.get(key)
        if found is None or len(found) != RecordViews(record).num_bytes:
            return Answer.MISS
        RecordViews(record).write(0, memoryview(found))
        return Answer.HIT
