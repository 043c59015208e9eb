"""RecordFormat: a frame's bytes after a header that identifies their page; one format for memory, stores and peers.

Little endian:

     0  magic b"QUR1"          4
     4  part                   2   index of the group
     6  flags                  2   0
     8  payload length         8
    16  layout                16   first half of the layout's SHA-256 fingerprint
    32  key                   16   first half of the page's SHA-256 key
    48  digest                16   xxh3_128 of the payload, big endian, seeded by xxh3_64 of the 48 bytes above
    64  payload                    the fields of the layout in order, each [layers, entries, *shape]

The seed binds the digest to key, layout, length and group, so a record with the header of another page, or a changed
header, fails the check. The digest detects accidents, not attacks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer
from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest

from quire.spec.ids import Ids
from quire.spec.layout import PageLayout
from quire.spec.record_size import HEADER_BYTES as HEADER_BYTES

Records = npt.NDArray[np.uint8]
"""Records in memory: uint8 `[num_frames + 1, stride]`, C-contiguous. Row i holds the record of frame i."""


class QueuedCopy(Protocol):
    """A copy of records to the device that runs beside the steps there."""

    def order(self) -> None:
        """What steps compute from now on follows the copy. The host does not wait."""

    def wait(self) -> None:
        """The host waits until it is complete."""


_MAGIC = b"QUR1"
_HEAD = struct.Struct("<4sHHQ16s")
_LENGTH = struct.Struct("<Q")
_SIGNED = 48
_KEY_BYTES = 16
_LAYOUT_BYTES = 16


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """The records of one group: its index, the first 16 bytes of its layout's fingerprint, and the bytes of a frame."""

    part: int
    layout_digest: bytes
    payload_bytes: int
    _head: bytes = dataclass_field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert len(self.layout_digest) == _LAYOUT_BYTES
        head = _HEAD.pack(_MAGIC, self.part, 0, self.payload_bytes, self.layout_digest)
        object.__setattr__(self, "_head", head)

    @classmethod
    def of(cls, part: int, layout: PageLayout) -> RecordFormat:
        """The format of the group at index `part`, with this layout."""
        return cls(part, bytes.fromhex(layout.fingerprint())[:_LAYOUT_BYTES], layout.bytes_per_frame)

    @property
    def num_bytes(self) -> int:
        """Bytes of a record: header and payload."""
        return HEADER_BYTES + self.payload_bytes

    def seal(self, rows: Records, frames: Ids, keys: Sequence[bytes]) -> None:
        """Write the headers of rows `frames` for their payloads, which it reads once; `keys[i]` has 32 bytes."""
        memory, starts = self._records(rows, frames)
        size = self.num_bytes
        for start, key in zip(starts, keys, strict=True):
            memory[start : start + HEADER_BYTES] = self.header(key, (memory[start + HEADER_BYTES : start + size],))

    def defects(self, rows: Records, frames: Ids, keys: Sequence[bytes]) -> list[str]:
        """The first defect of each row as the record of its page: "magic" (also unknown flags), "group", "length",
        "layout", "key", "digest", or "" for none. Reads every payload once."""
        memory, starts = self._records(rows, frames)
        size = self.num_bytes
        return [
            self.defect(memory[start : start + HEADER_BYTES], key, (memory[start + HEADER_BYTES : start + size],))
            for start, key in zip(starts, keys, strict=True)
        ]

    def header(self, key: bytes, payload: Sequence[Buffer]) -> bytes:
        """The 64 bytes before a payload, which may be in several buffers; reads it once. `key` has 32 bytes."""
        signed = self._head + key[:_KEY_BYTES]
        return signed + _digest_of(payload, signed)

    def defect(self, header: Buffer, key: bytes, payload: Sequence[Buffer]) -> str:
        """The first defect of a header and a payload as the record of a page, as in `defects`."""
        signed, found = self._head + key[:_KEY_BYTES], bytes(header)
        if not found.startswith(signed):
            return _first_difference(found, signed)
        return "" if found[_SIGNED:] == _digest_of(payload, signed) else "digest"

    def _records(self, rows: Records, frames: Ids) -> tuple[memoryview, Iterable[int]]:
        """The rows as one array of bytes, and the offsets of the records of `frames` in it."""
        num_rows, stride = rows.shape
        assert stride >= self.num_bytes, "rows too short for these records"
        assert rows.flags.c_contiguous, "rows with gaps between them"
        chosen = np.asarray(frames, dtype=np.int64)
        assert not len(chosen) or (chosen.min() >= 0 and chosen.max() < num_rows), "a frame without a row"
        return rows.reshape(-1).data, (chosen * stride).tolist()


def check_record(record: Buffer) -> str:
    """The first defect of a record of unknown page and group: "magic", "length", "digest", or "" for none. Bytes after
    the payload are ignored, so that a whole row of a pool is valid."""
    memory = memoryview(record).cast("B")
    if len(memory) < HEADER_BYTES:
        return "length"
    signed = bytes(memory[:_SIGNED])
    if signed[:4] != _MAGIC or signed[6:8] != b"\0\0":
        return "magic"
    (payload_bytes,) = _LENGTH.unpack_from(signed, 8)
    if len(memory) < HEADER_BYTES + payload_bytes:
        return "length"
    digest = xxh3_128_digest(memory[HEADER_BYTES : HEADER_BYTES + payload_bytes], xxh3_64_intdigest(signed))
    return "" if memory[_SIGNED:HEADER_BYTES] == digest else "digest"


def _digest_of(payload: Sequence[Buffer], signed: bytes) -> bytes:
    seed = xxh3_64_intdigest(signed)
    if len(payload) == 1:
        return xxh3_128_digest(payload[0], seed)
    digest = xxh3_128(seed=seed)
    for part in payload:
        digest.update(part)
    return digest.digest()


def _first_difference(found: bytes, expected: bytes) -> str:
    if found[:4] != expected[:4] or found[6:8] != expected[6:8]:
        return "magic"
    for name, start, stop in (("group", 4, 6), ("length", 8, 16), ("layout", 16, 32)):
        if found[start:stop] != expected[start:stop]:
            return name
    return "key"
