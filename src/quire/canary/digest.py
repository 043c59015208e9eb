"""What frames have: 64 bits for the bytes of each frame on its device. Marks, which go when a page is written.

    words of an entry --sum--> one word per (layer, entry) --times an odd weight of its own, sum--> digest    mod 2**64

One changed word always changes the digest: its difference is multiplied by an odd number. The same operations of torch
run on every device, on the stream of the caller, and nothing waits for them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.memory.pool import Pool
from quire.spec.ids import Ids
from quire.upload import to_device

MARK = -0x5157_4952_4521_C0DF
"""The first 8 bytes of an entry that no step has written since its page was begun."""

Digests = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reading:
    """Digests and remaining marks of frames, on their way to the host: int64 `[2, frames]`. On a device that computes
    asynchronously, `ready` says whether they have arrived, and `seconds` how long the device took, once they have."""

    found: Tensor
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    @property
    def ready(self) -> bool:
        """Whether `numpy` may be called."""
        return self.events is None or bool(self.events[1].query())  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        """What it took on a device that computes asynchronously; else 0."""
        if self.events is None:
            return 0.0
        return float(self.events[0].elapsed_time(self.events[1])) / 1e3

    def numpy(self) -> tuple[Digests, Digests]:
        """Digests, and the number of marks that are left. Only if `ready`."""
        digests, marks = self.found.numpy()
        return digests, marks


class FrameDigests:
    """Digests of a pool's frames, without layers in `except_for`. A pool in host memory has sealed records instead."""

    def __init__(self, pool: Pool, except_for: Collection[int] = ()) -> None:
        self._device = pool.device
        generator = torch.Generator().manual_seed(0x51554952)
        # `[layers, frames + 1, entries, words]`, and weights `[layers, 1, entries]`
        self._words: list[tuple[Tensor, Tensor]] = []
        self._marked: list[Tensor] = []  # the first word of each entry of a token
        for field, tensor in pool.tensors:
            kept = [at for at, layer in enumerate(field.layers) if layer not in except_for]
            if not kept:
                continue
            assert kept == list(range(kept[0], kept[-1] + 1)), "the layers of a draft come after those of its target"
            chosen = tensor[kept[0] : kept[-1] + 1]
            layers, frames, entries = chosen.shape[:3]
            entry = chosen.reshape(layers, frames, entries, -1).view(torch.uint8)
            words = _as_words(entry)
            weights = torch.randint(0, 2**62, (layers, 1, words.shape[2]), generator=generator) * 2 + 1
            self._words.append((words, weights.to(self._device)))
            if field.per == 1 and words.dtype == torch.int64 and words.shape[2] == entries:
                self._marked.append(words[..., 0])
        self.bytes_per_frame = sum(words[:, 0].numel() * words.element_size() for words, _ in self._words)

    def mark(self, frames: Ids) -> None:
        """Write the mark to each entry of these frames, whose pages are begun: before the step writes."""
        at = self._index(frames)
        for first in self._marked:
            if isinstance(at, slice):
                first[:, at] = MARK
            else:
                first.index_fill_(1, at, MARK)

    def read(self, frames: Ids) -> Reading:
        """The digests of these frames."""
        events = None
        if self._device.type == "cuda":
            events = _event(), _event()
            events[0].record(torch.cuda.current_stream(self._device))
        at = self._index(frames)
        found = torch.zeros((2, len(frames)), dtype=torch.int64, device=self._device)
        for words, weights in self._words:
            chosen = words[:, at]
            found[0] += (chosen.sum(-1, dtype=torch.int64) * weights).sum((0, 2))
        for first in self._marked:
            found[1] += (first[:, at] == MARK).sum((0, 2))
        if events is None:
            return Reading(found)
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        host.copy_(found, non_blocking=True)
        events[1].record(torch.cuda.current_stream(self._device))
        return Reading(host, events)

    def describe(self, frame: int) -> list[dict[str, int]]:
        """A report of each field of a frame: words that are zero or marked, and all. Waits for the device."""
        found = []
        for words, _ in self._words:
            own = words[:, frame]
            marked = int((own == MARK).sum()) if own.dtype == torch.int64 else 0
            found.append({"words": own.numel(), "zero": int((own == 0).sum()), "marked": marked})
        return found

    def _index(self, frames: Ids) -> Tensor | slice:
        """Consecutive frames as a slice: they are read in place."""
        first, count = int(frames[0]), len(frames)
        if int(frames[-1]) - first == count - 1 and (count < 3 or bool((np.diff(frames) == 1).all())):
            return slice(first, first + count)
        return to_device(frames.astype(np.int64), self._device)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _as_words(entry: Tensor) -> Tensor:
    """Bytes `[layers, frames, entries, bytes]` as the widest words that fit, at first by entry and else by frame."""
    for dtype in (torch.int64, torch.int32):
        if _divides(dtype.itemsize, entry):
            return entry.view(dtype)
    whole = entry.reshape(*entry.shape[:2], 1, -1)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if _divides(dtype.itemsize, whole):
            return whole.view(dtype)
    return whole


def _divides(size: int, entry: Tensor) -> bool:
    return all(number % size == 0 for number in (entry.shape[3], entry.storage_offset(), *entry.stride()[:3]))
