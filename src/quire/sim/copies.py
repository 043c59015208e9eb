"""SimulatedCopies: records of frames that hold prefix hashes, so that what comes back from a tier can be checked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.memory.record import Rows
from quire.sim.device import Frames
from quire.sim.prefix_hash import Hashes, page_digests, page_weights
from quire.spec.ids import Ids
from quire.tiers.transfer import Copies

LAYER = 0
"""The one layer of simulated frames."""

_HEADER = 3  # words of a row: two of the page's key, and a sum of these and all hashes
_KEY_BYTES = 16
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


class SimulatedCopies(Copies):
    """Copies between `frames` of a simulated device, by group, and as many records as `host_frames` says.

    A row has the hashes of the frame's slots and the page's key. It is shorter than the record that it stands for,
    whose `record_bytes` movers and stores count. Without `frames`, where a replay checks nothing, rows have a header
    only.
    """

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
        self._weights = [page_weights(width) for width in widths]

    def layers(self) -> tuple[int, ...]:
        """One stands for all: how long a step waits for a layer is estimated by `VirtualClock`."""
        return (LAYER,)

    def bytes_of(self, group: int) -> int:
        """On a real device."""
        return self._record_bytes[group]

    def rows(self, group: int) -> Rows:
        """uint8 `[frames + 1, stride]`, where a stride is less than a record."""
        rows: Rows = self._rows[group].view(np.uint8)
        return rows

    def to_host(self, group: int, device: Ids, host: Ids) -> None:
        """Copy hashes."""
        if self._frames is not None:
            self._rows[group][host, _HEADER:] = self._frames[group].hashes[device]

    def to_device(self, group: int, device: Ids, host: Ids, layer: int | None) -> None:
        """Copy hashes."""
        if self._frames is not None:
            self._frames[group].hashes[device] = self._rows[group][host, _HEADER:]
            self._frames[group].update_digests(device)

    def seal(self, group: int, host: Ids, keys: Sequence[bytes]) -> None:
        """Write the keys and the sums."""
        rows = self._rows[group]
        rows[host, :2] = _heads(keys)
        rows[host, 2] = self._sums(group, host)

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
        return sums + page_digests(rows[:, _HEADER:], self._weights[group])


def _heads(keys: Sequence[bytes]) -> Hashes:
    """The first 16 bytes of each key as two words."""
    found: Hashes = np.frombuffer(b"".join(key[:_KEY_BYTES] for key in keys), dtype=np.uint64).reshape(-1, 2)
    return found
