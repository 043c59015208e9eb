"""A store in a dictionary that keeps the port's contract, and refuses what a test tells it to."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from typing_extensions import Buffer

from quire.errors import InvalidInput
from quire.tiers.store import Answer, Entry, StoreKey
from tests.tiers.array_copies import page_key


class DictStore:
    """Keeps at most `most_bytes`, of which what was used last, and of a batch the first. Any key in `refused[method]`
    is answered RETRY there, and a method named in `failing` raises."""

    def __init__(self, most_bytes: int = 1 << 30) -> None:
        self.visible: dict[StoreKey, bytes] = {}  # least recently used first
        self.prepared: dict[StoreKey, int] = {}
        self.held: dict[StoreKey, Buffer] = {}
        self.refused: dict[str, set[StoreKey]] = {"prepare": set(), "put": set(), "complete": set(), "get": set()}
        self.failing: set[str] = set()
        self.log: list[tuple[str, int]] = []
        self.gates: dict[str, threading.Semaphore] = {}
        self.entered = threading.Semaphore(0)
        self.most_bytes = most_bytes
        self._lock = threading.Lock()

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        self._note("exists", len(keys))
        with self._lock:
            return [Answer.HIT if key in self.visible else Answer.MISS for key in keys]

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        self._note("prepare", len(keys))
        with self._lock:
            self._use(keys)
            return [self._prepare(key, size) for key, size in zip(keys, sizes, strict=True)]

    def _use(self, keys: Sequence[StoreKey]) -> None:
        for key in reversed(keys):
            if key in self.visible:
                self.visible[key] = self.visible.pop(key)

    def _prepare(self, key: StoreKey, size: int) -> Answer:
        if key in self.visible:
            return Answer.HIT
        if key in self.prepared:
            return Answer.PENDING
        while self.num_bytes + size > self.most_bytes and self.visible:
            del self.visible[next(iter(self.visible))]
        if key in self.refused["prepare"] or self.num_bytes + size > self.most_bytes:
            return Answer.RETRY
        self.prepared[key] = size
        return Answer.MISS

    def put(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        self._note("put", len(keys))
        with self._lock:
            answers = []
            for key, record in zip(keys, records, strict=True):
                assert memoryview(record).nbytes == self.prepared[key]
                taken = key not in self.refused["put"]
                if taken:
                    self.held[key] = record
                answers.append(Answer.HIT if taken else Answer.RETRY)
            return answers

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        self._note("complete", len(keys))
        with self._lock:
            answers = []
            for key, wanted in zip(keys, ok, strict=True):
                del self.prepared[key]  # a KeyError: it was not prepared, or was completed before
                record = self.held.pop(key, None)
                if not wanted:
                    answers.append(Answer.MISS)
                elif key in self.refused["complete"]:
                    answers.append(Answer.RETRY)
                else:
                    assert record is not None, "completed without its bytes"
                    self.visible[key] = bytes(record)
                    answers.append(Answer.HIT)
            self._use(keys)
            return answers

    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        self._note("get", len(keys))
        with self._lock:
            self._use(keys)
            return [self._get(key, record) for key, record in zip(keys, records, strict=True)]

    def _get(self, key: StoreKey, record: Buffer) -> Answer:
        if key in self.refused["get"]:
            return Answer.RETRY
        if key not in self.visible:
            return Answer.MISS
        memoryview(record)[:] = self.visible[key]
        return Answer.HIT

    def remove(self, keys: Sequence[StoreKey]) -> int:
        self._note("remove", len(keys))
        with self._lock:
            return sum(self.visible.pop(key, None) is not None for key in keys)

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        with self._lock:
            return iter([Entry(key, len(record)) for key, record in self.visible.items() if scope in (None, key.scope)])

    def close(self) -> None:
        self.prepared.clear()
        self.held.clear()

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.visible.values())) + sum(self.prepared.values())

    def spoil(self, key: StoreKey, at: int = -1) -> None:
        """Damage a byte of a visible record."""
        record = bytearray(self.visible[key])
        record[at] ^= 1
        self.visible[key] = bytes(record)

    def hold(self, name: str) -> threading.Semaphore:
        """Calls of this name wait from now on, each for one release."""
        self.gates[name] = threading.Semaphore(0)
        return self.gates[name]

    def _note(self, name: str, count: int) -> None:
        self.log.append((name, count))
        if name in self.gates:
            self.entered.release()
            assert self.gates[name].acquire(timeout=60)
        if name in self.failing:
            raise InvalidInput(f"{name} failed.")


class WatchedPeer(DictStore):
    """A peer that writes down in `wrong` when it is given the frame of a page that is not `busy`: one that was handed
    back already."""

    def __init__(self, busy: set[int]) -> None:
        super().__init__()
        self.busy = busy
        self.wrong: list[str] = []

    def put(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        self._watch("put", keys)
        return super().put(keys, records)

    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        self._watch("get", keys)
        return super().get(keys, records)

    def _watch(self, name: str, keys: Sequence[StoreKey]) -> None:
        pages = {page_key(number) for number in tuple(self.busy)}
        self.wrong += [f"{name} of a page that nothing holds" for key in keys if key.page not in pages]
