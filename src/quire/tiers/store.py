"""Store: what a storage backend has to do. It may forget, and never lies.

A store keeps records, opaque runs of bytes, by key. It answers and does not raise: a server that is down, a disk that
is full or slow, a record that another process is writing are answers too.

    HIT      it is there (and has been read, or written)
    MISS     it is not there; of `prepare`: go ahead
    PENDING  another writer is at it
    RETRY    cannot say or do it now: unreachable, full, busy

A bounded store forgets what was not used for longest. Reading and writing are use; so is `prepare` of what is there,
and `exists` is not. Of one batch the first counts as used last, where the store has a say in it: keys come in the order
of a prompt, and a page is of no use without those before it.

Writing is in two phases, so that nobody ever finds half a record, or the records of a page that failed:

    prepare(keys, sizes)   MISS: room is kept for you. HIT, PENDING: leave it to whoever has it. RETRY: no room now
    put(keys, records)     HIT: taken. The bytes must not change until `complete`
    complete(keys, ok)     HIT: visible from now on. MISS: dropped, as `ok` said. RETRY: could not, and is dropped
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from typing_extensions import Buffer

from quire.errors import InvalidInput

SCOPE_BYTES = 16
_PAGE_BYTES = 32


class Answer(Enum):
    """What a store says of one key."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"
    RETRY = "retry"


class StoreKey(NamedTuple):
    """The name of one record, the same in every process and on every machine.

    `scope` (16 bytes) stands for everything that pages are kept apart by: model, weights, layouts, adapter, salt.
    `page` (32 bytes) is the page's place in its chain of hashes, and `part` the index of the group whose frame it is.
    """

    scope: bytes
    page: bytes
    part: int

    def pack(self) -> bytes:
        """50 bytes, for stores whose keys are bytes."""
        return self.scope + self.page + self.part.to_bytes(2, "little")

    @classmethod
    def unpack(cls, packed: bytes) -> StoreKey:
        """The key that was packed. Raises InvalidInput for anything else."""
        if len(packed) != SCOPE_BYTES + _PAGE_BYTES + 2:
            raise InvalidInput(f"a store's key has 50 bytes, got {len(packed)}.")
        page = packed[SCOPE_BYTES : SCOPE_BYTES + _PAGE_BYTES]
        return cls(packed[:SCOPE_BYTES], page, int.from_bytes(packed[-2:], "little"))

    def __str__(self) -> str:
        """For stores whose keys are paths: `scope/page.part` in hex."""
        return f"{self.scope.hex()}/{self.page.hex()}.{self.part}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A visible record: its key, its bytes, and seconds since it was last used, where the store knows."""

    key: StoreKey
    num_bytes: int
    idle_seconds: float | None = None


class Store(Protocol):
    """One storage backend. Every method may be called from any thread, and answers for each key in order.

    Opening one raises `StoreError`; after that only `entries` may, where the medium cannot be listed.
    """

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        """Which records could be read now."""

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """Announce records of so many bytes; room is made by forgetting what was not used for longest."""

    def put(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Hand over records that were prepared with MISS. They are visible to nobody yet."""

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        """Make prepared records visible, or drop them. A prepared key is completed exactly once."""

    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Read records into writable buffers of exactly their size. Only after HIT is a buffer's content of use."""

    def remove(self, keys: Sequence[StoreKey]) -> int:
        """Forget records; returns how many were there."""

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        """All visible records, or those of one scope, in no order."""

    def close(self) -> None:
        """Let go of everything held. Prepared records that were not completed are dropped. May be called twice."""
