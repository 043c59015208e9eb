"""Fields of a pool as kernels write and read them, by slot: one field, and the fields that have keys and values.

Rows that are read are gathered, and decoded if they are encoded, in scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.codec import decode, encode
from quire.kernels.workspace import Workspace
from quire.spec.kv_format import KVFormat

_workspace = Workspace()

Writer = Callable[["PagedField", Tensor, Tensor], Tensor]
"""`PagedField.write` of a field."""


class SlotIndex:
    """The `slots` int64 `[n]` of rows, on the device of fields; a slot is `frame * entries + offset`. Fields whose
    frames have other distances find the same rows elsewhere: what one of them derives is kept for the next one."""

    __slots__ = ("_found", "slots")

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots
        self._found: dict[int, Tensor] = {}

    def rows(self, entries: int, ratio: int) -> Tensor:
        """Numbers of rows, int64 `[n]`, where a frame of `entries` rows begins `ratio` rows after the one before."""
        if ratio == entries:
            return self.slots
        key = ratio << 32 | entries
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = (self.slots // entries).mul_(ratio - entries).add_(self.slots)
        return found


class PagedField:
    """The rows of `frames` `[frames, entries, *stored]`, a pool's layer, by slot (`frame * entries + offset`). Entries
    of one frame are contiguous; frames have any distance.

    A row is `shape` numbers. With `kv_format` it is stored encoded: `stored` is the stored shape, and `scales`
    `[frames, entries, *scale_shape]` is the layer of its scales, if the format has any; entries beyond a row's own
    scales are padding. `writer` writes, in place of torch's operators. With a `reader` the frames are in host memory:
    rows come from that device and are read there, and writing waits for those that are written. `kept` is what kernels
    keep of a field.
    """

    __slots__ = ("_frames", "_kv_format", "_reader", "_scale_frames", "_writer", "kept")

    def __init__(
        self,
        frames: Tensor,
        scales: Tensor | None = None,
        kv_format: KVFormat | None = None,
        *,
        writer: Writer | None = None,
        reader: torch.device | None = None,
    ) -> None:
        self._frames = _Rows(frames)
        self._writer = writer
        self._reader = reader
        self._kv_format = kv_format
        self._scale_frames: _Rows | None = None
        self.kept: dict[Hashable, Any] = {}
        if kv_format is not None:
            assert (scales is not None) == (kv_format.scale is not None), f"{kv_format.name} and its scales"
        if kv_format is not None and scales is not None:
            width = frames.shape[-1] * frames.element_size() * 8 // kv_format.bits
            self._scale_frames = _Rows(scales[..., : kv_format.scale_width(width)])

    @property
    def on_host(self) -> bool:
        """Whether the frames are in host memory, and a device reads them."""
        return self._reader is not None

    def write(self, slots: Tensor | SlotIndex, rows: Tensor) -> Tensor:
        """Store `rows` `[T, *shape]` at `slots` int64 `[T]`; returns them as a reader of the slots sees them.

        They are rounded as they are stored, so that a row is the same in the step that writes it and in later ones. If
        a slot repeats (padding in frame 0), any of its rows may win.
        """
        if self._writer is not None:
            return self._writer(self, slots.slots if isinstance(slots, SlotIndex) else slots, rows)
        places = slots if isinstance(slots, SlotIndex) else SlotIndex(slots)
        if self._kv_format is None:
            stored = rows if rows.dtype is self._frames.dtype else rows.to(self._frames.dtype)
            self._put(self._frames, places, stored)
            return rows if stored is rows else stored.to(rows.dtype)
        stored, scales = encode(rows, self._kv_format)
        self._put(self._frames, places, stored)
        if self._scale_frames is not None and scales is not None:
            self._put(self._scale_frames, places, scales)
        return decode(stored, scales, self._kv_format, rows.dtype)

    def gather(self, index: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        """Rows of slots `index` int64 `[n]`, `[n, *shape]`, in scratch memory `name`: valid until its next use."""
        places = SlotIndex(index)
        rows = self._gathered(self._frames, places, name)
        if self._kv_format is None:
            return rows.to(dtype)
        scales = None if self._scale_frames is None else self._gathered(self._scale_frames, places, f"{name} scales")
        shape = (*rows.shape[:-1], rows.shape[-1] * 8 // self._kv_format.bits)
        out = _workspace.take(f"{name} gathered", dtype, rows.device, *shape)
        return decode(rows, scales, self._kv_format, dtype, out)

    def head(self, number: int) -> PagedField:
        """One of the heads of rows `[heads, dim]`, as rows `[1, dim]`."""
        known: PagedField | None = self.kept.get(("head", number))
        if known is not None:
            return known
        found = copy(self)
        found.kept = {}
        found._frames = self._frames.head(number)
        found._scale_frames = None if self._scale_frames is None else self._scale_frames.head(number)
        self.kept["head", number] = found
        return found

    @property
    def stored(self) -> tuple[Tensor, Tensor | None, KVFormat | None]:
        """For kernels that read entries in place: frames `[frames, entries, *stored]` with any stride between frames,
        those of their scales, and the format of both."""
        scales = self._scale_frames
        return self._frames.frames, None if scales is None else scales.frames, self._kv_format

    def _put(self, rows: _Rows, places: SlotIndex, stored: Tensor) -> None:
        if self._reader is not None:
            places, stored = SlotIndex(places.slots.to(rows.frames.device)), stored.to(rows.frames.device)
        rows.put(places, stored)

    def _gathered(self, rows: _Rows, places: SlotIndex, name: str) -> Tensor:
        if self._reader is None:
            return rows.gather(places, name)
        return rows.gather(SlotIndex(places.slots.to(rows.frames.device)), name).to(self._reader)


class _Rows:
    """The entries of `frames` `[frames, entries, *stored]` as rows of one tensor, in place, where the distance of
    frames is a number of rows; otherwise an entry has two indices, its frame and its place there, which is slower."""

    __slots__ = ("_are_bytes", "_entries", "_flat", "_ratio", "dtype", "frames")

    def __init__(self, frames: Tensor) -> None:
        self.frames = frames
        self.dtype = frames.dtype
        self._are_bytes = frames.element_size() == 1
        count, entries = frames.shape[:2]
        self._entries = entries
        bits = _bytes_of(frames)
        self._flat: Tensor | None = None
        self._ratio = 1
        if entries == 1:
            self._flat = bits[:, 0]
        elif frames.stride(0) % frames.stride(1) == 0:
            self._ratio = frames.stride(0) // frames.stride(1)
            shape = ((count - 1) * self._ratio + entries, *bits.shape[2:])
            self._flat = bits.as_strided(shape, bits.stride()[1:], bits.storage_offset())

    def head(self, number: int) -> _Rows:
        """The rows of one head."""
        return _Rows(self.frames[..., number : number + 1, :])

    def put(self, places: SlotIndex, stored: Tensor) -> None:
        """Store `[n, *stored]` at these places."""
        if self._are_bytes:
            stored = stored.view(torch.uint8)
        if self._flat is not None:
            self._flat.index_copy_(0, places.rows(self._entries, self._ratio), stored)
        else:
            _bytes_of(self.frames)[places.slots // self._entries, places.slots % self._entries] = stored

    def gather(self, places: SlotIndex, name: str) -> Tensor:
        """The rows at these places, in scratch memory `name`."""
        frames, entries = self.frames, self._entries
        if self._flat is None:
            return _bytes_of(frames)[places.slots // entries, places.slots % entries].view(self.dtype)
        out = _workspace.take(name, self.dtype, frames.device, len(places.slots), *frames.shape[2:])
        torch.index_select(self._flat, 0, places.rows(entries, self._ratio), out=_bytes_of(out))
        return out


def entries_of(rows: Tensor) -> npt.NDArray[np.void]:
    """The entries of `rows` `[frames, entries, ..., width]` on the CPU, in place: `[frames, entries, ...]`, vectors
    that numpy moves as one. Copies of scattered vectors are several times faster than those of tensors."""
    found = rows.view(torch.uint8).numpy()
    return found.view(f"V{found.shape[-1]}")[..., 0]


def bytes_of(entries: npt.NDArray[np.void]) -> Tensor:
    """The vectors of `entries` `[...]` as bytes, uint8 `[..., bytes]`."""
    return torch.from_numpy(entries[..., np.newaxis].view(np.uint8))


def _bytes_of(rows: Tensor) -> Tensor:
    """Elements of one byte as integers, which every device can copy by index."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


class KVReader(Protocol):
    """Keys `[n, kv_heads, key_dim]` and values `[n, kv_heads, value_dim]` of n slots."""

    def gather(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The rows of slots `index` int64 `[n]`, valid until the next call."""


class KVFields:
    """A field of keys and a field of values. Its methods are those of `KVReader`."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: PagedField, second: PagedField) -> None:
        self._first = first
        self._second = second

    def head(self, number: int) -> KVFields:
        """One of several KV heads."""
        return KVFields(self._first.head(number), self._second.head(number))

    def parts(self) -> tuple[PagedField, PagedField | None, PagedField | None]:
        """The field of keys, that of the rest of a key, and that of values; without one, the value is the key."""
        return self._first, None, self._second

    def write(self, slots: Tensor | SlotIndex, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Store new rows of both fields, `[T, *shape]` each; returns them as a reader sees them."""
        slots = slots if isinstance(slots, SlotIndex) else SlotIndex(slots)
        return self._first.write(slots, first), self._second.write(slots, second)

    def gather(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._first.gather(index, dtype, "key"), self._second.gather(index, dtype, "value")


class LatentFields(KVFields):
    """A field of latents and a field of rotary keys, side by side as one head: both are the key and the value,
    `[n, 1, rank + rope_dim]`.

    The value needs the latents alone, so the rest of an output is cut off. That costs less than a second read, and
    fused kernels need equal widths. Rows are copies in scratch memory.
    """

    __slots__ = ()

    def parts(self) -> tuple[PagedField, PagedField | None, PagedField | None]:
        return self._first, self._second, None

    def gather(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        latent, rope = self._first.gather(index, dtype, "latent"), self._second.gather(index, dtype, "rope")
        joined = _workspace.take("joined", dtype, latent.device, len(latent), latent.shape[1] + rope.shape[1])
        row = torch.cat((latent, rope), dim=-1, out=joined).unsqueeze(1)
        return row, row
