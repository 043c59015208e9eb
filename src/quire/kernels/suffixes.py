"""Suffixes: the gathered part of sequences with few new rows, in padded blocks that are edited from step to step.

A suffix is the last part of a context: a list of slots, one per column, to which each step appends those of its new
tokens. Sequences with suffixes of similar length share a block, which one batched segment reads. The suffix of a window
is a ring buffer: position p is in column `p % window`, so that a new token overwrites the one that it hides.

A column without a token repeats a slot of the same sequence and is masked. It must not repeat a slot that was never
written: a masked NaN still makes the output NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels import segments
from quire.kernels.segments import Segment, Slots, Source, Trees, buckets, row_index
from quire.spec.ids import Bools
from quire.upload import to_device

_HIDDEN = np.float32("-inf")


@dataclass(slots=True, eq=False)
class _Block:
    """`count` suffixes of up to `width` columns each in the cells `base:base + count * width`."""

    queries: int  # new rows of each
    ring: bool
    count: int
    width: int
    base: int
    segment: Segment
    members: Slots  # rows of the suffixes, in the order of their places
    starts: Slots | None = None  # the flat row of the first of each
    seen: npt.NDArray[np.float32] | None = None  # the mask of several rows each, on the host

    @property
    def cells(self) -> slice:
        return slice(self.base, self.base + self.count * self.width)


class _Cells:
    """Slots and masks of all blocks on the host; with `mirrored`, also on the device."""

    def __init__(self, size: int, device: torch.device, *, mirrored: bool) -> None:
        with torch.inference_mode(False):  # so that later steps outside inference mode may write them
            index, mask = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.float32)
            self.on_device = (index, mask)
            if mirrored:
                self.on_device = torch.zeros_like(index, device=device), torch.zeros_like(mask, device=device)
        self.index: Slots = index.numpy()
        self.mask: npt.NDArray[np.float32] = mask.numpy()
        self.mirrored = mirrored
        self.used = 0

    def write(self, at: Slots, slots: Slots) -> None:
        """Write `slots` into the cells `at` and unmask them."""
        self.index[at] = slots
        self.mask[at] = 0
        if self.mirrored:
            index, mask = self.on_device
            sent = to_device(np.stack((at, slots)), index.device)
            index.index_copy_(0, sent[0], sent[1])
            mask.index_fill_(0, sent[0], 0)

    def upload(self, cells: slice) -> None:
        """Copy a range of cells to the device."""
        if self.mirrored:
            index, mask = self.on_device
            index[cells].copy_(to_device(self.index[cells], index.device))
            mask[cells].copy_(to_device(self.mask[cells], mask.device))


class Suffixes:
    """The suffixes of `n` sequences by their row, `0..n`, and the blocks that hold them."""

    def __init__(self, window: int, device: torch.device, *, mirrored: bool | None = None) -> None:
        """`mirrored`: the device has a copy of its own, by default if it is not the CPU."""
        self._window = window
        self._device = device
        self._mirrored = device.type != "cpu" if mirrored is None else mirrored
        self._cells = _Cells(0, device, mirrored=self._mirrored)
        self.blocks: list[_Block] = []
        none = np.zeros(0, dtype=np.int64)
        self.shift: Slots = none  # position of a suffix's first column
        self._block: Slots = none  # -1: no suffix
        self._place: Slots = none  # index among the rows of its block
        self._cell: Slots = none  # the first of its own
        self._width: Slots = none
        self._ring: Bools = np.zeros(0, dtype=np.bool_)

    def present(self) -> Bools:
        """Which rows have a suffix."""
        return np.greater_equal(self._block, 0)

    def select(self, rows: Slots) -> None:
        """Row i becomes the former row `rows[i]`, without a suffix if that is -1."""
        for name in ("shift", "_place", "_cell", "_width", "_ring"):
            old = getattr(self, name)
            setattr(self, name, old[rows] if len(old) else np.zeros(len(rows), dtype=old.dtype))
        self._block = np.where(rows < 0, -1, self._block[rows] if len(self._block) else -1)

    def append(self, rows: Slots, positions: Slots, slots: Slots) -> None:
        """The token at `positions[i]` of row `rows[i]` is in `slots[i]`. Rows without a suffix are ignored."""
        has = self._block[rows] >= 0
        if not has.all():
            rows, positions, slots = rows[has], positions[has], slots[has]
        if not len(rows):
            return
        columns, ring = positions - self.shift[rows], self._ring[rows]
        if ring.any():
            columns = np.where(ring, positions % max(self._window, 1), columns)
        full = columns >= self._width[rows]
        if full.any():
            for number in np.unique(self._block[rows[full]]).tolist():
                within = self._block[rows] == number
                self._widen(self.blocks[number], int(columns[within].max()) + 1)
            self._locate_rows()
        self._cells.write(self._cell[rows] + columns, slots)

    def pack(
        self, dirty: Slots, new: Mapping[int, Slots], queries: Slots, contexts: Slots, ring: Bools, order: Slots
    ) -> None:
        """Replace the suffixes of the rows `dirty` by `new`, by row, and pack these and those of changed blocks.

        `queries`, `contexts` and `ring` are those of all rows, `order` the order of their flat rows.
        """
        self._block[dirty] = -1
        for row, suffix in new.items():
            self.shift[row] = contexts[row] - len(suffix)
            self._ring[row] = ring[row]
        suffixes = dict(new) | self._unpacked({(int(queries[row]), bool(ring[row])) for row in new}, contexts)
        kinds: dict[tuple[int, bool], list[int]] = {}
        for row in suffixes:
            kinds.setdefault((int(queries[row]), bool(self._ring[row])), []).append(row)
        for (count, is_ring), rows in kinds.items():
            members = np.array(rows)
            lengths = np.array([len(suffixes[row]) for row in rows])
            for bucket in buckets(lengths):
                bucket = bucket[np.argsort(order[members[bucket]], kind="stable")]
                self._add(members[bucket], [suffixes[rows[at]] for at in bucket.tolist()], count, is_ring)
        self._locate_rows()
        held = np.flatnonzero(self._block >= 0)
        held = held[np.lexsort((self._place[held], self._block[held]))]
        counts = [block.count for block in self.blocks]
        for block, members in zip(self.blocks, np.split(held, np.cumsum(counts)[:-1]), strict=False):
            block.members = members

    def update_masks(self, contexts: Slots, trees: Trees | None = None) -> None:
        """Update the masks of blocks with several rows per sequence."""
        for block in self.blocks:
            if block.seen is None:
                continue
            pasts = contexts[block.members][:, None] - block.queries
            keys = np.arange(block.width) + self.shift[block.members][:, None]  # position of each column
            if trees is None:
                positions = pasts + np.arange(block.queries)  # of each row
                hidden = keys[:, None, :] > positions[:, :, None]
            else:
                assert block.starts is not None
                rows = block.starts[:, None] + np.arange(block.queries)
                positions = pasts + trees.depths[rows]
                new = np.clip(keys - pasts, -1, block.queries)  # the row whose token each column has
                hidden = ~trees.sees[rows[:, :, None], new[:, None, :]]
                own = np.take_along_axis(positions, np.minimum(new, block.queries - 1), axis=1)
                keys = np.where(new < 0, keys, own)
            if self._window:
                hidden |= keys[:, None, :] <= positions[:, :, None] - self._window
            np.copyto(block.seen, np.where(hidden, _HIDDEN, np.float32(0)))
            block.segment.folded = None
            if self._mirrored:
                assert block.segment.mask is not None
                block.segment.mask.copy_(to_device(block.seen, self._device))

    def bind_rows(self, starts: Slots, fresh: Bools) -> bool:
        """Set the flat rows of all segments: `starts[row]` is the first of a sequence.

        Rows that are `fresh` are in no segment before. Returns whether some segment has rows of both kinds.
        """
        has = self._block >= 0
        new = np.bincount(self._block[has & fresh], minlength=len(self.blocks)).tolist()
        mixed = False
        for block, count in zip(self.blocks, new, strict=True):
            flat = starts[block.members]
            if block.starts is None or not np.array_equal(block.starts, flat):
                block.starts = flat
                rows = flat if block.queries == 1 else (flat[:, None] + np.arange(block.queries)).reshape(-1)
                block.segment.rows = row_index(rows, self._device)
            block.segment.first = count == block.count
            mixed |= 0 < count < block.count
        return mixed

    def _unpacked(self, kinds: set[tuple[int, bool]], contexts: Slots) -> dict[int, Slots]:
        """Unpack blocks that lost a row or are too large, and small ones of the same kind; returns their suffixes.

        `kinds` are (new rows, ring) of the suffixes that are packed anyway.
        """
        held = np.bincount(self._block[self._block >= 0], minlength=len(self.blocks)).tolist()
        large, small = segments.MAX_BATCHED * 3 // 2, segments.MAX_BATCHED // 2
        unpacked = {
            number
            for number, (block, rows) in enumerate(zip(self.blocks, held, strict=True))
            if rows != block.count or (block.count > 1 and block.count * block.width > large)
        }
        kinds = kinds | {(self.blocks[number].queries, self.blocks[number].ring) for number in unpacked}
        unpacked |= {
            number
            for number, block in enumerate(self.blocks)
            if block.count * block.width < small and (block.queries, block.ring) in kinds
        }
        if not unpacked:
            return {}
        away = np.zeros(len(self.blocks) + 1, dtype=np.bool_)  # the last one is for rows without a suffix
        away[list(unpacked)] = True
        found = {}
        for row in np.flatnonzero(away[self._block]).tolist():
            length = self._window if self._ring[row] else int(contexts[row] - self.shift[row])
            found[row] = self._cells.index[self._cell[row] : self._cell[row] + length]
        numbers = np.cumsum(~away) - 1
        self._block = np.where(away[self._block] | (self._block < 0), -1, numbers[self._block])
        self.blocks = [block for number, block in enumerate(self.blocks) if number not in unpacked]
        return found

    def _add(self, rows: Slots, suffixes: list[Slots], queries: int, ring: bool) -> None:
        """A block of `rows` with `suffixes`."""
        lengths = np.array([len(suffix) for suffix in suffixes])
        longest = int(lengths.max())
        width = longest if ring else _with_room(longest)
        base = self._reserve(len(rows) * width)
        columns = np.arange(width)
        offsets = np.cumsum(lengths) - lengths
        column = np.minimum(columns, lengths[:, None] - 1)
        segment = Segment(slice(0, 0), Source(), 0, 0, last=True)
        block = _Block(queries, ring, len(rows), width, base, segment, rows)
        self._cells.index[block.cells] = np.concatenate(suffixes)[offsets[:, None] + column].reshape(-1)
        self._cells.mask[block.cells] = np.where(columns >= lengths[:, None], _HIDDEN, np.float32(0)).reshape(-1)
        self._cells.upload(block.cells)
        self._block[rows] = len(self.blocks)
        self._place[rows] = np.arange(len(rows))
        self.blocks.append(block)
        self._refresh(block)

    def _widen(self, block: _Block, least: int) -> None:
        """Make room for suffixes of `least` columns."""
        width = _with_room(least)
        base = self._reserve(block.count * width)
        old = self._cells.index[block.cells].reshape(block.count, -1)
        hidden = self._cells.mask[block.cells].reshape(block.count, -1)
        added = width - block.width
        block.base, block.width = base, width
        self._cells.index[block.cells] = np.concatenate((old, np.repeat(old[:, :1], added, axis=1)), axis=1).reshape(-1)
        self._cells.mask[block.cells] = np.pad(hidden, ((0, 0), (0, added)), constant_values=_HIDDEN).reshape(-1)
        self._cells.upload(block.cells)
        self._refresh(block)

    def _reserve(self, count: int) -> int:
        """The first of `count` free cells. If none are left, blocks move into twice the cells they need."""
        if self._cells.used + count > len(self._cells.index):
            needed = sum(block.count * block.width for block in self.blocks) + count
            old, self._cells = self._cells, _Cells(2 * needed + 1024, self._device, mirrored=self._mirrored)
            for block in self.blocks:
                source, block.base = block.cells, self._cells.used
                self._cells.index[block.cells], self._cells.mask[block.cells] = old.index[source], old.mask[source]
                self._cells.used += block.count * block.width
                self._refresh(block)
            self._cells.upload(slice(0, self._cells.used))
            self._locate_rows()
        base = self._cells.used
        self._cells.used += count
        return base

    def _refresh(self, block: _Block) -> None:
        """Set the cells of the block's segment."""
        index, mask = (part[block.cells] for part in self._cells.on_device)
        segment = block.segment
        segment.source, segment.stop = Source(index=index), block.width
        segment.batched = block.count
        if block.queries > 1:
            shape = (block.count, block.queries, block.width)
            if block.seen is None or block.seen.shape != shape:
                with torch.inference_mode(False):
                    seen = torch.zeros(shape, dtype=torch.float32)
                    segment.mask = torch.zeros_like(seen, device=self._device) if self._mirrored else seen
                block.seen = seen.numpy()
        elif not block.ring:
            segment.mask = mask.view(block.count, 1, block.width)

    def _locate_rows(self) -> None:
        """Recompute where the suffix of each row is."""
        places = np.array([(block.base, block.width) for block in self.blocks] or [(0, 0)], dtype=np.int64)
        bases, widths = places[self._block].T
        self._width, self._cell = widths, bases + self._place * widths


def _with_room(columns: int) -> int:
    """Columns of a block, rounded up: few are padding, and few steps widen the block."""
    room = 16 if columns < 256 else 32
    return -(-columns // room) * room
