"""SimulatedStore: a storage tier in a dictionary, bounded in the bytes that its records would take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from typing_extensions import Buffer

from quire.tiers.store import Answer, Entry, Store, StoreKey


class SimulatedStore(Store):
    """Keeps records of at most `most_bytes` and forgets what was not used for longest.

    A record's bytes are those it was prepared with, whatever is put: in a simulation that is less (`SimulatedCopies`).
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._visible: dict[StoreKey, tuple[bytes, int]] = {}  # with its bytes; least recently used first
        self._prepared: dict[StoreKey, int] = {}
        self._taken: dict[StoreKey, Buffer] = {}

    @property
    def num_bytes(self) -> int:
        """Of all records, prepared ones among them."""
        return self._num_bytes

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        """HIT or MISS."""
        return [Answer.HIT if key in self._visible else Answer.MISS for key in keys]

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """RETRY where there is no room beside what is prepared. HIT counts as use, of the first key last."""
        answers = [self._prepare(key, size) for key, size in zip(keys, sizes, strict=True)]
        for key in reversed(keys):
            if key in self._visible:
                self._visible[key] = self._visible.pop(key)
        return answers

    def put(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Keeps the buffers as they are until `complete`."""
        self._taken.update(zip(keys, records, strict=True))
        return [Answer.HIT] * len(keys)

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        """Never RETRY."""
        for key, good in zip(keys, ok, strict=True):
            size, record = self._prepared.pop(key), self._taken.pop(key, None)
            if good:
                assert record is not None, "a record was completed and never put"
                self._visible[key] = (bytes(record), size)
            else:
                self._num_bytes -= size
        return [Answer.HIT if good else Answer.MISS for good in ok]

    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """HIT or MISS; what is read counts as used."""
        answers = []
        for key, record in zip(keys, records, strict=True):
            found = self._visible.pop(key, None)
            if found is not None:
                self._visible[key] = found
                memoryview(record)[:] = found[0]
            answers.append(Answer.MISS if found is None else Answer.HIT)
        return answers

    def remove(self, keys: Sequence[StoreKey]) -> int:
        """At once."""
        return sum(map(self._forget, keys))

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        """As they are now."""
        return iter([Entry(key, size) for key, (_, size) in self._visible.items() if scope in (None, key.scope)])

    def close(self) -> None:
        """Drops what was prepared."""
        self._num_bytes -= sum(self._prepared.values())
        self._prepared.clear()
        self._taken.clear()

    def _prepare(self, key: StoreKey, size: int) -> Answer:
        if key in self._visible:
            return Answer.HIT
        if key in self._prepared:
            return Answer.PENDING
        while self._visible and self._num_bytes + size > self._most_bytes:
            self._forget(next(iter(self._visible)))
        if self._num_bytes + size > self._most_bytes:
            return Answer.RETRY
        self._prepared[key] = size
        self._num_bytes += size
        return Answer.MISS

    def _forget(self, key: StoreKey) -> bool:
        found = self._visible.pop(key, None)
        if found is not None:
            self._num_bytes -= found[1]
        return found is not None
