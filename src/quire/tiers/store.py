"""Store: the port of a storage backend. It may lose records, and never returns wrong ones.

A record is an opaque run of bytes with a key. A store answers and does not raise: a server that is down or a full disk
is an answer too.

    HIT      the record is there (and was read, or written)
    MISS     it is not there; from `prepare`: room is reserved
    PENDING  another writer writes it
    RETRY    the store cannot tell or do it now: unreachable, full, busy

A bounded store evicts the least recently used record. `get`, `put` and `prepare` of a visible record are uses; `exists`
is not. Keys come in the order of a prompt, and a page is useless without those before it. So if the store has a choice,
the first key of a batch counts as used last.

Writing has two phases, so that no reader finds half a record or part of a page:

    prepare(keys, sizes)   MISS: room is reserved. HIT, PENDING: another writer has it. RETRY: no room now
    put(keys, records)     HIT: taken. The bytes must not change until `complete`
    complete(keys, ok)     HIT: visible from now on. MISS: dropped, as `ok` said. RETRY: it failed and is dropped
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Condition, Lock
from typing import NamedTuple, Protocol, TypeAlias

from typing_extensions import Buffer

from quire.errors import InvalidInput

SCOPE_BYTES = 16
SCOPE_PREFIX_BYTES = 8  # the prefix that scopes of one model share (`quire.prefix.hashing.scope_of`)
_PAGE_BYTES = 32

Record: TypeAlias = "Buffer | tuple[Buffer, ...]"
"""The bytes of a record: one buffer, or several that follow each other in it, so that none is copied to join them."""


class Answer(Enum):
    """A store's answer for one key."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"
    RETRY = "retry"


class StoreKey(NamedTuple):
    """The name of one record, the same on every machine: `scope` (16 bytes, `quire.prefix.hashing.scope_of`), the key
    of the page in its chain of hashes (32 bytes), and the index of its group."""

    scope: bytes
    page: bytes
    part: int

    def pack(self) -> bytes:
        """50 bytes, for stores whose keys are bytes."""
        return self.scope + self.page + self.part.to_bytes(2, "little")

    @classmethod
    def unpack(cls, packed: bytes) -> StoreKey:
        """The inverse of `pack`. Raises InvalidInput for a wrong length."""
        if len(packed) != SCOPE_BYTES + _PAGE_BYTES + 2:
            raise InvalidInput(f"a store's key has 50 bytes, got {len(packed)}.")
        page = packed[SCOPE_BYTES : SCOPE_BYTES + _PAGE_BYTES]
        return cls(packed[:SCOPE_BYTES], page, int.from_bytes(packed[-2:], "little"))

    def __str__(self) -> str:
        """`scope/page.part` in hex, for stores whose keys are paths."""
        return f"{self.scope.hex()}/{self.page.hex()}.{self.part}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A visible record. `idle_seconds` since its last use is None if the store does not know it."""

    key: StoreKey
    num_bytes: int
    idle_seconds: float | None = None


class Store(Protocol):
    """One storage backend. Any thread may call any method; answers are in the order of the keys. Opening a store raises
    `StoreError`; after that only `entries` does, if the medium cannot be listed."""

    @property
    def largest_record(self) -> int | None:
        """Bytes of the largest record that it takes; None: it has no limit of its own."""
        return None

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        """Which records could be read now."""

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """Announce records of these sizes; the store evicts to make room."""

    def put(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        """Hand over records that were prepared with MISS. No reader finds them yet. Any other record is refused."""

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        """Make prepared records visible, or drop them. A prepared key is completed exactly once."""

    def get(self, keys: Sequence[StoreKey], records: Sequence[Record]) -> list[Answer]:
        """Read records into writable buffers of exactly their size (else MISS). A buffer is valid after HIT only."""

    def remove(self, keys: Sequence[StoreKey]) -> int:
        """Remove records; returns how many were there. Those of a server that does not answer are not counted."""

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        """All visible records, or those of one scope, in no order."""

    def close(self) -> None:
        """Wait for calls in flight, drop what was not completed, and release all resources. May be called twice."""


def bytes_of(buffer: Buffer) -> memoryview:
    """A view of the bytes of a buffer."""
    view = buffer if isinstance(buffer, memoryview) else memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class RecordViews:
    """Views of a record's buffers, in order, and the sum of their bytes."""

    __slots__ = ("num_bytes", "views")

    def __init__(self, record: Record) -> None:
        self.views = tuple(map(bytes_of, record)) if isinstance(record, tuple) else (bytes_of(record),)
        self.num_bytes = sum([view.nbytes for view in self.views])

    def join(self) -> bytes | memoryview:
        """All bytes in one buffer: a copy if there are several."""
        return self.views[0] if len(self.views) == 1 else b"".join(self.views)

    def write(self, at: int, data: memoryview) -> None:
        """Copy `data` to the bytes from `at` on, where it has room."""
        for view in self.views:
            some = data[: max(0, view.nbytes - at)]
            view[at : at + some.nbytes] = some
            data, at = data[some.nbytes :], max(0, at - view.nbytes)


def check_records(store: Store, num_bytes: int) -> None:
    """Raises InvalidInput if a store does not take records of so many bytes, and would stay empty without a word."""
    most = getattr(store, "largest_record", None)  # a registered store need not have one
    if most is not None and num_bytes > most:
        raise InvalidInput(
            f"a record has {num_bytes:,} bytes, and this store takes none above {most:,}.",
            fix="give a larger store or another one, a limit of the server that is higher, or smaller pages.",
        )


def write_record(store: Store, key: StoreKey, record: Record) -> Answer:
    """Store one record: HIT if it is there afterwards, by this call or before. A failure is dropped."""
    (answer,) = store.prepare([key], [RecordViews(record).num_bytes])
    if answer is not Answer.MISS:
        return answer
    put = False
    try:
        put = store.put([key], [record]) == [Answer.HIT]
    finally:
        (answer,) = store.complete([key], [put])
    return answer


def prepare_once(
    keys: Sequence[StoreKey], sizes: Sequence[int], prepare: Callable[[list[StoreKey], list[int]], Sequence[Answer]]
) -> list[Answer]:
    """Answers of `prepare`, which gets distinct keys; the first of a repeated key is the writer."""
    sizes_of: dict[StoreKey, int] = {}
    for key, size in zip(keys, sizes, strict=True):
        sizes_of.setdefault(key, size)
    answers = dict(zip(sizes_of, prepare(list(sizes_of), list(sizes_of.values())), strict=True))
    found = []
    for key in keys:
        found.append(answers[key])
        if answers[key] is Answer.MISS:
            answers[key] = Answer.PENDING
    return found


class Calls:
    """Calls in flight of a store. Each is a `with` block, whose value says whether it may continue."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._in_flight = 0
        self.are_open = True

    def __enter__(self) -> bool:
        """False after `close`; else the store is not closed before the block ends."""
        with self._changed:
            self._in_flight += 1
            return self.are_open

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()

    def close(self) -> bool:
        """Refuse new calls, and wait for those in flight. False: it was closed before."""
        with self._changed:
            were_open, self.are_open = self.are_open, False
            self._changed.wait_for(lambda: self._in_flight == 0)
        return were_open


class Counts(Counter[str]):
    """Events by name: a Counter whose `add` is atomic."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()

    def add(self, *names: str, **counts: int) -> None:
        """Add 1 to each of `names`, and add numbers by name."""
        with self._lock:
            self.update(names)
            self.update(counts)
