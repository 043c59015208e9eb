"""HostRecords: the copies between a device whose frames hold names and small host records of real bytes.

A record has the real header and two halves: the names of a frame, and the same names turned around, so that half of a
record is not taken for all of it. Whatever passes its check is compared with what its key says, by code that is not the
check's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.memory.record import HEADER_BYTES, RecordFormat
from quire.plan.budget import MemoryPlan
from quire.prefix.reach import reach_of
from quire.spec.ids import Ids
from tests.fuzz.device import Device
from tests.fuzz.names import Page
from tests.fuzz.page_keys import PageKeys

_TURNED = 0x5A5A5A5A5A5A5A5A
_NAME_BYTES = 8


class HostRecords:
    """See `quire.tiers.transfer.Copies`. `wrong` has what must never have happened, in words; its driver reads them.

    `damaged` says which records hold something else than was written, and by what fault: `(group, host frame)`. `met`
    counts faults that a check has seen, with the name that it gave them, `found` the names alone. `saved` counts
    frames by group, `loaded` those of all.
    """

    queues = False

    def __init__(self, plan: MemoryPlan, keys: PageKeys, frames: Sequence[int]) -> None:
        self._keys = keys
        self._carried = [reach_of(group.reach, plan.page_size).in_place for group in plan.groups]
        self._slots = [1 if carried else plan.page_size for carried in self._carried]
        self._formats = [
            RecordFormat(part, bytes.fromhex(group.layout.fingerprint())[:16], 2 * _NAME_BYTES * self._slots[part])
            for part, group in enumerate(plan.groups)
        ]
        self._rows = [
            np.zeros((count + 1, found.num_bytes), dtype=np.uint8)
            for count, found in zip(frames, self._formats, strict=True)
        ]
        self.wrong: list[str] = []
        self.damaged: dict[tuple[int, int], str] = {}
        self.lied: Callable[[int, bytes], str] = lambda group, key: ""
        self.met: Counter[tuple[str, str]] = Counter()
        self.found: Counter[str] = Counter()
        self.saved: Counter[int] = Counter()
        self.loaded = 0
        self.hosted = plan.hot.group if plan.hot is not None else None

    @property
    def device(self) -> Device:
        """That of the cache whose frames are copied. Set it after construction."""
        return self._device

    @device.setter
    def device(self, device: Device) -> None:
        self._device = device
        if self.hosted is not None:
            device.pages[self.hosted] = _InPlace(self, self.hosted, device.pages[self.hosted])

    # -- as movers use it

    def bytes_of(self, group: int) -> int:
        """Of one record."""
        return self._formats[group].num_bytes

    def rows(self, group: int) -> npt.NDArray[np.uint8]:
        """The records, uint8 `[frames + 1, bytes]`."""
        return self._rows[group]

    def to_host(self, group: int, device: Ids, host: Ids) -> None:
        """What the frames hold now."""
        assert group != self.hosted, "records that are read in place were copied"
        for frame, row in zip(device.tolist(), host.tolist(), strict=True):
            self.write(group, row, self._held(group, frame))
        self.saved[group] += len(host)

    def write(self, group: int, row: int, names: Page) -> None:
        """The payload of a record."""
        written = np.array(names, dtype=np.int64)
        payload = np.concatenate((written, (written ^ _TURNED)[::-1]))
        self._rows[group][row, HEADER_BYTES:] = payload.view(np.uint8)
        self.damaged.pop((group, row), None)

    def to_device(self, group: int, device: Ids, host: Ids) -> None:
        """Of a record whose halves differ, a frame holds nothing that looks like names."""
        assert group != self.hosted, "records that are read in place were copied"
        for frame, row in zip(device.tolist(), host.tolist(), strict=True):
            names, turned = self.content(group, row)
            self._hold(group, frame, names if names == turned else (-1,) * len(names))
        self.loaded += len(host)

    def seal(self, group: int, host: Ids, keys: Sequence[bytes]) -> None:
        """What is sealed is what the keys say; else a frame was written while it was copied."""
        self._formats[group].seal(self._rows[group], host, keys)
        for row, key in zip(host.tolist(), keys, strict=True):
            if not self._is_content_of(group, row, key):
                self.wrong.append(f"host frame {row} of group {group} was saved as another page's, or written to")

    def defects(self, group: int, host: Ids, keys: Sequence[bytes]) -> list[str]:
        """As the real check says, which is checked here."""
        found = self._formats[group].defects(self._rows[group], host, keys)
        for row, key, defect in zip(host.tolist(), keys, found, strict=True):
            fault = self.damaged.get((group, row), "") or self.lied(group, key)
            if defect:
                self.found[defect] += 1
                self.met[fault or "no fault", defect] += 1
                if fault:
                    self.damaged[group, row] = fault
                else:
                    self.wrong.append(f"a record of group {group} without a fault fails its check: {defect}")
            elif not self._is_content_of(group, row, key):
                self.wrong.append(f"a record of group {group} passed its check, and is wrong ({fault or 'no fault'})")
            else:
                self.damaged.pop((group, row), None)
                if group == self.hosted:
                    list.__setitem__(self.device.pages[group], row, self.content(group, row)[0])
        return found

    # -- looking

    def content(self, group: int, row: int) -> tuple[Page, Page]:
        """The names in a record, as each half has them."""
        payload = self._rows[group][row, HEADER_BYTES:].view(np.int64)
        slots = self._slots[group]
        return tuple(payload[:slots].tolist()), tuple((payload[slots:] ^ _TURNED)[::-1].tolist())

    def is_names(self, group: int, row: int, names: Page) -> bool:
        """Whether a record holds just these names."""
        return self.content(group, row) == (names, names)

    def names_of(self, group: int, end: int) -> Page:
        """What the frame of the page with that last name holds."""
        names = self._keys.names
        return (end,) if self._carried[group] else names.pages[end][-1]

    def _is_content_of(self, group: int, row: int, key: bytes) -> bool:
        end = self._keys.end_of.get(key)
        return end is not None and self.is_names(group, row, self.names_of(group, end))

    def _held(self, group: int, frame: int) -> Page:
        if self._carried[group]:
            return (self.device.carried[group][frame],)
        return self.device.pages[group][frame]

    def _hold(self, group: int, frame: int, names: Page) -> None:
        if self._carried[group]:
            self.device.carried[group][frame] = names[0]
        else:
            self.device.pages[group][frame] = names


class _InPlace(list[Page]):
    """Frames of a device that are records on the host: what is written to one is in the other at once."""

    def __init__(self, records: HostRecords, group: int, pages: list[Page]) -> None:
        super().__init__(pages)
        self._records, self._group = records, group

    def __setitem__(self, frame: Any, names: Any) -> None:
        super().__setitem__(frame, names)
        self._records.write(self._group, frame, names)
