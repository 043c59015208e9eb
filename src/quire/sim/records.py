"""SimulatedCopies and SimulatedStore: records of prefix hashes, so that pages that come back from a tier are checked.

Such a record is shorter than the one that it represents. Movers and stores count the bytes of the real one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from typing_extensions import Buffer

from quire.memory.record import Rows
from quire.sim.device import Frames
from quire.sim.prefix_hash import Hashes, page_digests
from quire.spec.ids import Ids
from quire.tiers.store import Answer, Entry, Store, StoreKey
from quire.tiers.transfer import Copies

LAYER = 0
"""The one layer of simulated frames. `VirtualClock` estimates how long a step waits for layers."""

_HEADER = 3  # words of a row: two of the page's key, and a sum of these and all hashes
_KEY_BYTES = 16
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


class SimulatedCopies(Copies):
    """Copies between `frames` of a simulated device, by group, and `host_frames` records of each group, which have
    `record_bytes` on a real device. Without `frames`, in a replay without checks, rows have a header only."""

    def __init__(
        self, frames: Sequence[Frames] | None, host_frames: Sequence[int], record_bytes: Sequence[int]
    ) -> None:
        self._frames = frames
        self._record_bytes = tuple(record_bytes)
        widths = [0] * len(host_frames) if frames is None else [each.hashes.shape[1] for each in frames]
        self._rows: list[Hashes] = [
            np.zeros((count + 1, _HEADER + width), dtype=np.uint64)
            for count, width in zip(host_frames, widths, strict=True)
        ]

    def layers(self) -> tuple[int, ...]:
        return (LAYER,)

    def bytes_of(self, group: int) -> int:
        return self._record_bytes[group]

    def rows(self, group: int) -> Rows:
        """uint8 `[frames + 1, stride]`, where a stride is less than a record."""
        rows: Rows = self._rows[group].view(np.uint8)
        return rows

    def to_host(self, group: int, device: Ids, host: Ids) -> None:
        if self._frames is not None:
            self._rows[group][host, _HEADER:] = self._frames[group].hashes[device]

    def to_device(self, group: int, device: Ids, host: Ids, layer: int | None) -> None:
        if self._frames is not None:
            self._frames[group].hashes[device] = self._rows[group][host, _HEADER:]
            self._frames[group].update_digests(device)

    def seal(self, group: int, host: Ids, keys: Sequence[bytes]) -> None:
        self._rows[group][host, :2] = _heads(keys)
        self._rows[group][host, 2] = self._sums(group, host)

    def defects(self, group: int, host: Ids, keys: Sequence[bytes]) -> list[str]:
        """ "key", or "digest", or ""."""
        rows = self._rows[group]
        foreign = (rows[host, :2] != _heads(keys)).any(axis=1)
        changed = rows[host, 2] != self._sums(group, host)
        if not foreign.any() and not changed.any():
            return [""] * len(host)
        pairs = zip(foreign.tolist(), changed.tolist(), strict=True)
        return ["key" if key else "digest" if digest else "" for key, digest in pairs]

    def _sums(self, group: int, host: Ids) -> Hashes:
        rows = self._rows[group][host]
        sums: Hashes = rows[:, 0] * _FIRST + rows[:, 1] * _SECOND
        return sums + page_digests(rows[:, _HEADER:])


def _heads(keys: Sequence[bytes]) -> Hashes:
    """The first 16 bytes of each key as two words."""
    found: Hashes = np.frombuffer(b"".join(key[:_KEY_BYTES] for key in keys), dtype=np.uint64).reshape(-1, 2)
    return found


class SimulatedStore(Store):
    """Stores records of at most `most_bytes` in a dictionary, and evicts the least recently used. A record counts with
    the bytes for which it was prepared. It answers RETRY only if `prepare` finds no room."""

    def __init__(self, most_bytes: int) -> None:
        self.num_bytes = 0  # of all records, with prepared ones
        self._most_bytes = most_bytes
        self._visible: dict[StoreKey, tuple[bytes, int]] = {}  # with its bytes; least recently used first
        self._prepared: dict[StoreKey, int] = {}
        self._taken: dict[StoreKey, Buffer] = {}

    def exists(self, keys: Sequence[StoreKey]) -> list[Answer]:
        return [Answer.HIT if key in self._visible else Answer.MISS for key in keys]

    def prepare(self, keys: Sequence[StoreKey], sizes: Sequence[int]) -> list[Answer]:
        """HIT counts as a use, that of the first key as the latest."""
        answers = [self._prepare(key, size) for key, size in zip(keys, sizes, strict=True)]
        for key in reversed(keys):
            if key in self._visible:
                self._visible[key] = self._visible.pop(key)
        return answers

    def put(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """Does not change the buffers until `complete`."""
        self._taken.update(zip(keys, records, strict=True))
        return [Answer.HIT] * len(keys)

    def complete(self, keys: Sequence[StoreKey], ok: Sequence[bool]) -> list[Answer]:
        for key, good in zip(keys, ok, strict=True):
            size, record = self._prepared.pop(key), self._taken.pop(key, None)
            if good:
                assert record is not None, "a record was completed and never put"
                self._visible[key] = (bytes(record), size)
            else:
                self.num_bytes -= size
        return [Answer.HIT if good else Answer.MISS for good in ok]

    def get(self, keys: Sequence[StoreKey], records: Sequence[Buffer]) -> list[Answer]:
        """HIT counts as use."""
        answers = []
        for key, record in zip(keys, records, strict=True):
            found = self._visible.pop(key, None)
            if found is not None:
                self._visible[key] = found
                memoryview(record)[:] = found[0]
            answers.append(Answer.MISS if found is None else Answer.HIT)
        return answers

    def remove(self, keys: Sequence[StoreKey]) -> int:
        return sum(map(self._remove, keys))

    def entries(self, scope: bytes | None = None) -> Iterator[Entry]:
        return iter([Entry(key, size) for key, (_, size) in self._visible.items() if scope in (None, key.scope)])

    def close(self) -> None:
        self.num_bytes -= sum(self._prepared.values())
        self._prepared.clear()
        self._taken.clear()

    def _prepare(self, key: StoreKey, size: int) -> Answer:
        if key in self._visible:
            return Answer.HIT
        if key in self._prepared:
            return Answer.PENDING
        while self._visible and self.num_bytes + size > self._most_bytes:
            self._remove(next(iter(self._visible)))
        if self.num_bytes + size > self._most_bytes:
            return Answer.RETRY
        self._prepared[key] = size
        self.num_bytes += size
        return Answer.MISS

    def _remove(self, key: StoreKey) -> bool:
        found = self._visible.pop(key, None)
        if found is not None:
            self.num_bytes -= found[1]
        return found is not None
