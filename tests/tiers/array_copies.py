"""Copies between numpy arrays: small, real, and independent of the pools."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.spec.ids import Ids
from quire.tiers.transfer import Units

HEADER = 16


def page_key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


def ids(*frames: int) -> Ids:
    return np.array(frames, dtype=np.int32)


def units(group: int, device: Sequence[int], host: Sequence[int], pages: Sequence[int]) -> Units:
    return Units(group, ids(*device), ids(*host), tuple(page_key(page) for page in pages))


class ArrayCopies:
    """A frame of group g has `parts[g]` parts of `widths[g]` bytes. A record is 16 bytes of digest and the payload, in
    rows a little longer than that. `log` has every call; a call named in `failing` raises; one in `held` waits."""

    queues = False

    def __init__(
        self,
        parts: Sequence[int] = (2, 1),
        widths: Sequence[int] = (24, 40),
        *,
        num_device: int = 16,
        num_host: int = 16,
    ) -> None:
        self.device = [
            np.zeros((count, num_device + 1, width), dtype=np.uint8) for count, width in zip(parts, widths, strict=True)
        ]
        self.sizes = [HEADER + count * width for count, width in zip(parts, widths, strict=True)]
        self.host = [np.zeros((num_host + 1, size + 5), dtype=np.uint8) for size in self.sizes]
        self.log: list[str] = []
        self.failing: set[str] = set()
        self.held: dict[str, threading.Semaphore] = {}
        self.entered = threading.Semaphore(0)  # one for each call that is held, or was

    def bytes_of(self, group: int) -> int:
        return self.sizes[group]

    def rows(self, group: int) -> npt.NDArray[np.uint8]:
        return self.host[group]

    def to_host(self, group: int, device: Ids, host: Ids) -> None:
        self._note("to_host")
        payload = self.device[group][:, device].swapaxes(0, 1).reshape(len(device), -1)
        self.host[group][host, HEADER : self.sizes[group]] = payload

    def to_device(self, group: int, device: Ids, host: Ids) -> None:
        self._note("to_device")
        parts, _, width = self.device[group].shape
        payload = self.host[group][host, HEADER : self.sizes[group]].reshape(len(host), parts, width)
        self.device[group][:, device] = payload.swapaxes(0, 1)

    def seal(self, group: int, host: Ids, keys: Sequence[bytes]) -> None:
        self._note("seal")
        for frame, key in zip(host, keys, strict=True):
            self.host[group][frame, :HEADER] = np.frombuffer(self._digest(group, int(frame), key), dtype=np.uint8)

    def defects(self, group: int, host: Ids, keys: Sequence[bytes]) -> list[str]:
        self._note("defects")
        return [
            "" if self.host[group][frame, :HEADER].tobytes() == self._digest(group, int(frame), key) else "digest"
            for frame, key in zip(host, keys, strict=True)
        ]

    def calls(self, name: str) -> int:
        return self.log.count(name)

    def fill(self, group: int, frames: Ids, seed: int) -> npt.NDArray[np.uint8]:
        """Random bytes on the device; returns a copy of them."""
        shape = self.device[group][:, frames].shape
        content = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        self.device[group][:, frames] = content
        return content

    def hold(self, name: str) -> threading.Semaphore:
        """Calls of this name wait from now on, each for one release."""
        self.held[name] = threading.Semaphore(0)
        return self.held[name]

    def _digest(self, group: int, frame: int, key: bytes) -> bytes:
        payload = self.host[group][frame, HEADER : self.sizes[group]].tobytes()
        return hashlib.blake2b(key + bytes([group]) + payload, digest_size=HEADER).digest()

    def _note(self, name: str) -> None:
        self.log.append(name)
        if name in self.held:
            self.entered.release()
            assert self.held[name].acquire(timeout=60)
        if name in self.failing:
            raise OSError(f"{name} failed")
