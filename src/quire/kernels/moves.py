"""Moves: what copies numbers on a device. Torch's operators, or one kernel launch for each move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from quire.kernels.fields import bytes_of, entries_of
from quire.kernels.slots import Slots
from quire.upload import to_device

_VECTOR = 16
"""Bytes that a device loads at once."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """What belongs to a frame or to a slot of a pool, in all fields and layers. `parts` are the tensors of fields,
    `[layers, frames, entries, words]` views that are contiguous in words, and the place of each in a record of
    `record_words`, which has its layers one after the other. Row `frame * entries + entry` is one entry. Words are
    uint8 or int64. Tensors must stay where they are."""

    parts: Sequence[tuple[int, Tensor]]
    record_words: int

    @classmethod
    def of(cls, fields: Sequence[tuple[int, Tensor]], record_bytes: int) -> Pieces:
        """From places in bytes, and views of bytes; words are as wide as these allow."""
        numbers = [
            number
            for place, part in fields
            for number in (place, part.storage_offset(), part.shape[3], *part.stride()[:3])
        ]
        word = torch.int64 if all(number % 8 == 0 for number in (record_bytes, *numbers)) else torch.uint8
        size = word.itemsize
        return cls([(place // size, part.view(word)) for place, part in fields], record_bytes // size)

    @property
    def word(self) -> torch.dtype:
        """The type of words."""
        return self.parts[0][1].dtype

    @property
    def entries(self) -> int:
        """Entries of a frame."""
        return self.parts[0][1].shape[2]

    @cached_property
    def widest(self) -> int:
        """Words of the largest piece."""
        return max(part.shape[3] for _, part in self.parts)

    @cached_property
    def table(self) -> Tensor:
        """On the device, int64 `[pieces, 5]`: for each field and layer the address of row 0, bytes from frame to frame
        and from entry to entry, the place in a record and the number of words."""
        size = self.word.itemsize
        found = [
            (
                layer.data_ptr(),
                layer.stride(0) * size,
                layer.stride(1) * size,
                place + at * part.shape[3],
                part.shape[3],
            )
            for place, part in self.parts
            for at, layer in enumerate(part)
        ]
        return to_device(np.array(found, dtype=np.int64), self.parts[0][1].device)

    @cached_property
    def is_aligned(self) -> bool:
        """Whether pieces begin and end where a device loads most at once, if their records do."""
        size = self.word.itemsize
        return all(
            number % _VECTOR == 0
            for place, part in self.parts
            for number in (part.data_ptr(), *(size * each for each in (place, part.shape[3], *part.stride()[:3])))
        )


@dataclass(frozen=True, eq=False)
class HostEntries:
    """Entries that are copied from frames in host memory to slots on the device. `parts` are by field the host's
    `[frames, entries, ..., width]` and the device's; entries of a frame are contiguous."""

    parts: Sequence[tuple[Tensor, Tensor]]

    @cached_property
    def entry_bytes(self) -> tuple[int, ...]:
        """Bytes of an entry, by field."""
        return tuple(target[0, 0].numel() * target.element_size() for _, target in self.parts)

    @cached_property
    def word(self) -> torch.dtype:
        """The widest that sizes and addresses of all fields allow."""
        return torch.int64 if self._divides(8) else torch.uint8

    @cached_property
    def is_aligned(self) -> bool:
        """Whether entries begin and end where a device loads most at once."""
        return self._divides(_VECTOR)

    def _divides(self, size: int) -> bool:
        return all(
            number % size == 0
            for (source, target), entry in zip(self.parts, self.entry_bytes, strict=True)
            for number in (source.data_ptr(), _frame_bytes(source), target.data_ptr(), _frame_bytes(target), entry)
        )

    @cached_property
    def table(self) -> Tensor:
        """On the device, int64 `[fields, 5]`: the address of frame 0 on the host, bytes from frame to frame, both on
        the device, and the bytes of an entry."""
        found = [
            (source.data_ptr(), _frame_bytes(source), target.data_ptr(), _frame_bytes(target), entry)
            for (source, target), entry in zip(self.parts, self.entry_bytes, strict=True)
        ]
        return to_device(np.array(found, dtype=np.int64), self.parts[0][1].device)


class Moves:
    """Torch's operators, for any device; a subclass has faster ones for its own.

    Indices are in range, and targets of one move differ, unless a method says otherwise.
    """

    def set_entries(self, tables: Tensor, changes: Tensor) -> None:
        """Set entries of `tables` int32 `[groups, rows, width]`, contiguous. Entry `changes[0, i]` of the `rows *
        width` of group g becomes `changes[1 + g, i]`; `changes` is int32 `[1 + groups, n]`, contiguous."""
        tables.flatten(1).index_copy_(1, changes[0].long(), changes[1:])

    def gather(self, pieces: Pieces, rows: Tensor, records: Tensor) -> None:
        """Write the pieces of `rows` int64 `[n]` to `records` `[n, record_words]`, contiguous; other words stay."""
        for place, part in pieces.parts:
            _part_of(records, place, part).copy_(part[:, *_entry_of(pieces, rows)].transpose(0, 1))

    def scatter(self, pieces: Pieces, rows: Tensor, records: Tensor) -> None:
        """The other way. Pieces of other rows stay."""
        for place, part in pieces.parts:
            part[:, *_entry_of(pieces, rows)] = _part_of(records, place, part).transpose(0, 1)

    def move(self, pieces: Pieces, sources: Tensor, targets: Tensor) -> None:
        """Copy the pieces of row `sources[i]` to row `targets[i]`, int64 `[n]`. All are read before any is written."""
        for _, part in pieces.parts:
            if pieces.entries == 1:  # whole frames: a fifth of what indexing costs
                frames = part[:, :, 0]  # `index_select` would copy all, where these are parts
                read = frames.index_select(1, sources) if part.is_contiguous() else frames[:, sources]
                frames.index_copy_(1, targets, read)
            else:
                part[:, *_entry_of(pieces, targets)] = part[:, *_entry_of(pieces, sources)]

    def read_states(self, layer: Tensor, sources: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """States `[n, *shape]`, a copy, of frames `sources` int64 `[n]` of `layer` `[frames, 1, *shape]`; zeros if the
        source is frame 0. They are converted to `dtype` if there is one."""
        states = layer[sources, 0]
        absent = (sources == 0).view(-1, *(1,) * (states.dim() - 1))
        states = states.masked_fill_(absent, 0)
        return states if dtype is None else states.to(dtype)

    def write_states(self, layer: Tensor, targets: Tensor, states: Tensor) -> None:
        """Store `states` `[n, *shape]` in frames `targets` int64 `[n]` of `layer`, converted to its element type."""
        layer[targets, 0] = states.to(layer.dtype)

    def swap_in(self, entries: HostEntries, frames: Slots, places: Slots, targets: Tensor) -> None:
        """Copy entry `places[i]` of the host's frame `frames[i]`, int64 `[n]`, to slot `targets[i]`, in all fields."""
        for source, target in entries.parts:
            rows = entries_of(source)[frames, places]
            if target.device.type == "cpu":
                entries_of(target)[np.divmod(targets.numpy(), target.shape[1])] = rows
            else:
                at = (targets // target.shape[1], targets % target.shape[1])
                target.view(torch.uint8)[at] = bytes_of(rows).to(target.device)


def _frame_bytes(frames: Tensor) -> int:
    """Bytes from frame to frame of `[frames, entries, ...]`."""
    return frames.stride(0) * frames.element_size()


def _entry_of(pieces: Pieces, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The frames and entries of rows."""
    return rows // pieces.entries, rows % pieces.entries


def _part_of(records: Tensor, place: int, part: Tensor) -> Tensor:
    """Where a field is in `records`: `[n, layers, words]`."""
    layers, _, _, size = part.shape
    return records[:, place : place + layers * size].view(len(records), layers, size)


TORCH = Moves()
