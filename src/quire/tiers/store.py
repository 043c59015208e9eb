"""Store: the port of a storage backend. It may lose records, and never returns wrong ones.

A store keeps records, opaque runs of bytes, by key. It answers and does not raise: a server that is down, a full or
slow disk, and a record that another process writes are answers too.

    HIT      the record is there (and was read, or written)
    MISS     it is not there; from `prepare`: go ahead
    PENDING  another writer writes it
    RETRY    the store cannot tell or do it now: unreachable, full, busy

A bounded store evicts what was used longest ago. `get`, `put` and `prepare` of a record that is there are uses, and
`exists` is not. In one batch the first key counts as used last, where the store has a choice: keys come in the order of
a prompt, and a page is of no use without those before it.

Writing has two phases, so that no reader finds half a record, or the records of a page that failed:

    prepare(keys, sizes)   MISS: room is reserved. HIT, PENDING: another writer has it. RETRY: no room now
    put(keys, records)     HIT: taken. The bytes must not change until `complete`
    complete(keys, ok)     HIT: visible from now on. MISS: dropped, as `ok` said. RETRY: failed, and is dropped
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
    """A store's answer for one key."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"
    RETRY = "retry"


class StoreKey(NamedTuple):
    """The name of one record, the same in every process and on every machine.

    `scope` (16 bytes) stands for everything that separates pages: model, weights, layouts, adapter, salt. `page` (32
    bytes) is the page's place in its chain of hashes, and `part` the index of the group whose frame it is.
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
        """Announce records of these sizes; the store makes room by evicting what was used longest ago."""

    def put(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Hand over records that were prepared with MISS. No reader finds them yet."""

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        """Make prepared records visible, or drop them. A prepared key is completed exactly once."""

    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Read records into writable buffers of exactly their size. A buffer is valid after HIT only."""

    def remove(self, keys: Sequence[StoreKey]) -> int:
        """Remove records; returns how many were there."""

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        """All visible records, or those of one scope, in no order."""

    def close(self) -> None:
        """Release everything. Prepared records that were not completed are dropped. May be called twice."""
