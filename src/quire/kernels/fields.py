"""Fields of a pool as kernels write and read them, by slot: one field, and the fields that have keys and values.

Rows that are read are gathered, and decoded if they are encoded, in scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from typing import Any, ClassVar, Protocol

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


class PagedField:
    """The rows of `frames` `[frames, entries, *stored]`, a pool's layer, by slot (`frame * entries + offset`).

    A row is `shape` numbers. With `kv_format` it is stored encoded: `stored` is the stored shape, and `scales`
    `[frames, entries, *scale_shape]` is the layer of its scales, if the format has any; entries beyond a row's own
    scales are padding. `writer` writes, in place of torch's operators. `kept` is what kernels keep of a field.
    """

    on_host: ClassVar[bool] = False
    """Whether the frames are in host memory, and the device reads them."""

    __slots__ = ("_frames", "_kv_format", "_rows", "_scale_frames", "_scales", "_writer", "kept")

    def __init__(
        self,
        frames: Tensor,
        scales: Tensor | None = None,
        kv_format: KVFormat | None = None,
        *,
        writer: Writer | None = None,
    ) -> None:
        self._frames = frames
        self._writer = writer
        self._kv_format = kv_format
        self._scale_frames: Tensor | None = None
        self.kept: dict[Hashable, Any] = {}
        if kv_format is not None:
            assert (scales is not None) == (kv_format.scale is not None), f"{kv_format.name} and its scales"
        if kv_format is not None and scales is not None:
            width = frames.shape[-1] * frames.element_size() * 8 // kv_format.bits
            self._scale_frames = scales[..., : kv_format.scale_width(width)]
        self._rows = self._by_slot(frames)
        self._scales = None if self._scale_frames is None else self._by_slot(self._scale_frames)

    def write(self, slots: Tensor, rows: Tensor) -> Tensor:
        """Store `rows` `[T, *shape]` at `slots` int64 `[T]`; returns them as a reader of the slots sees them.

        They are rounded as they are stored, so that a row is the same in the step that writes it and in later ones. If
        a slot repeats (padding in frame 0), any of its rows may win.
        """
        if self._writer is not None:
            return self._writer(self, slots, rows)
        if self._kv_format is None:
            stored = rows.to(self._rows.dtype)
            self._put(self._rows, slots, stored)
            return stored.to(rows.dtype)
        stored, scales = encode(rows, self._kv_format)
        self._put(_bytes_of(self._rows), slots, _bytes_of(stored))
        if self._scales is not None and scales is not None:
            self._put(_bytes_of(self._scales), slots, _bytes_of(scales))
        return decode(stored, scales, self._kv_format, rows.dtype)

    def gather(self, index: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        """Rows of slots `index` int64 `[n]`, `[n, *shape]`, in scratch memory `name`: valid until its next use."""
        rows = self._gathered(self._rows, index, name)
        if self._kv_format is None:
            return rows.to(dtype)
        scales = None if self._scales is None else self._gathered(self._scales, index, f"{name} scales")
        return self._decoded(rows, scales, dtype, f"{name} gathered")

    def head(self, number: int) -> PagedField:
        """One of the heads of rows `[heads, dim]`, as rows `[1, dim]`."""
        known: PagedField | None = self.kept.get(("head", number))
        if known is not None:
            return known
        found, one = copy(self), (..., slice(number, number + 1), slice(None))
        found.kept = {}
        found._frames, found._rows = self._frames[one], self._rows[one]
        if self._scale_frames is not None and self._scales is not None:
            found._scale_frames, found._scales = self._scale_frames[one], self._scales[one]
        self.kept["head", number] = found
        return found

    @property
    def stored(self) -> tuple[Tensor, Tensor | None, KVFormat | None]:
        """For kernels that read entries in place: frames `[frames, entries, *stored]` with any stride between frames,
        those of their scales, and the format of both."""
        return self._frames, self._scale_frames, self._kv_format

    def _decoded(self, rows: Tensor, scales: Tensor | None, dtype: torch.dtype, name: str) -> Tensor:
        """Encoded rows in `dtype`, in scratch memory `name`."""
        assert self._kv_format is not None
        width = rows.shape[-1] * 8 // self._kv_format.bits
        out = _workspace.take(name, dtype, rows.device, *rows.shape[:-1], width)
        return decode(rows, scales, self._kv_format, dtype, out)

    # How rows are found by slot; see `HostedField`.

    def _by_slot(self, frames: Tensor) -> Tensor:
        return frames.flatten(0, 1)

    def _put(self, rows: Tensor, slots: Tensor, stored: Tensor) -> None:
        rows.index_copy_(0, slots, stored)

    def _gathered(self, rows: Tensor, index: Tensor, name: str) -> Tensor:
        out = _workspace.take(name, rows.dtype, rows.device, len(index), *rows.shape[1:])
        torch.index_select(_bytes_of(rows), 0, index, out=_bytes_of(out))
        return out


class HostedField(PagedField):
    """A field whose frames are strided views of records in host memory (`HostedPool`). `device` is where rows come from
    and are read: those that are read are copied there, and writing waits for those that are written."""

    on_host: ClassVar[bool] = True

    __slots__ = ("_device",)

    def __init__(
        self, frames: Tensor, scales: Tensor | None, kv_format: KVFormat | None, *, device: torch.device
    ) -> None:
        self._device = device
        super().__init__(frames, scales, kv_format)

    def _by_slot(self, frames: Tensor) -> Tensor:
        return frames

    def _put(self, rows: Tensor, slots: Tensor, stored: Tensor) -> None:
        entries = entries_of(rows)
        new = stored.cpu().contiguous().view(torch.uint8).numpy()
        entries[np.divmod(slots.cpu().numpy(), entries.shape[1])] = new.view(entries.dtype)[..., 0]

    def _gathered(self, rows: Tensor, index: Tensor, name: str) -> Tensor:
        entries = entries_of(rows)
        found = entries[np.divmod(index.cpu().numpy(), entries.shape[1])]
        return bytes_of(found).view(rows.dtype).to(self._device)


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

    __slots__ = ("_keys", "_values")

    def __init__(self, keys: PagedField, values: PagedField) -> None:
        self._keys = keys
        self._values = values

    def head(self, number: int) -> KVFields:
        """One of several KV heads."""
        return KVFields(self._keys.head(number), self._values.head(number))

    def parts(self) -> tuple[PagedField, PagedField | None, PagedField | None]:
        """The field of keys, None for the rest of a key, and the field of values."""
        return self._keys, None, self._values

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values; returns them as a reader sees them."""
        return self._keys.write(slots, key), self._values.write(slots, value)

    def gather(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._keys.gather(index, dtype, "key"), self._values.gather(index, dtype, "value")


class LatentFields:
    """Latents and rotary keys, side by side as one head: both are the key and the value, `[n, 1, rank + rope_dim]`.

    The value needs the latents alone, so the rest of an output is cut off. That costs less than a second read, and
    fused kernels need equal widths. Its methods are those of `KVReader`; rows are copies in scratch memory.
    """

    __slots__ = ("_latents", "_ropes")

    def __init__(self, latents: PagedField, ropes: PagedField) -> None:
        self._latents = latents
        self._ropes = ropes

    def parts(self) -> tuple[PagedField, PagedField | None, PagedField | None]:
        """The two fields of a key, and None: the value is the key."""
        return self._latents, self._ropes, None

    def write(self, slots: Tensor, latent: Tensor, rope: Tensor) -> None:
        """Store rows `[T, rank]` and `[T, rope_dim]`."""
        self._latents.write(slots, latent)
        self._ropes.write(slots, rope)

    def gather(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return _joined(self._latents.gather(index, dtype, "latent"), self._ropes.gather(index, dtype, "rope"))


def _joined(latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    joined = _workspace.take("joined", latent.dtype, latent.device, latent.shape[0], latent.shape[1] + rope.shape[1])
    row = torch.cat((latent, rope), dim=-1, out=joined).unsqueeze(1)
    return row, row
