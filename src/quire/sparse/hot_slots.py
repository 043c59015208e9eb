"""Which token each slot of the hot buffers has, and which slots were used least recently.

A hot buffer is `buffer_size` slots of one cache row. Layers that share an index share the bookkeeping, so there is one
buffer here per index and row. Its tokens are always clean, because host memory has every token: a slot is overwritten
without a write-back. The newest token of a row is in a slot of its own behind the buffer, and never in the buffer.

The order of use is lazy. `stamp` has the call that used a slot last, `order` the slots as call `sorted_at` sorted them.
The slots to overwrite are the next ones in `order` that were not used since then:

    order   5  0  3  1  4  2      head: slots before it were overwritten
                  ^ head          sorted_at = 8: stamp[3] = 5, stamp[1] = 9 (used since), stamp[4] = 7, ...

A buffer is sorted again when the next slots in `order` do not suffice. Then they do, because a call never needs more
slots than those that it has not hit. Slots of one call are in this order: those that were loaded, those that were hit,
and of each the lower slot first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from quire.spec.hisparse import MOST_BUFFER_TOKENS
from quire.spec.ids import Ids

_ABSENT = 0  # in the table of slots; a slot is its number + 1
CLOCK_END = 2**16 - 2

_Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FoundSlots:
    """`slots` has the buffer slot of each selected position (`buffer_size`: the newest token; 0 where there is none),
    int32 `[n, k]`. The flat arrays are the tokens that the buffers lacked: the caller copies `position` of cache row
    `row` from host memory to `slot`."""

    slots: Ids
    row: Ids
    position: Ids
    slot: Ids


class HotSlots:
    """The hot buffers of one engine: `num_indexes` per cache row, all empty at first. Arithmetic alone: no bytes move.

    Memory: `HotBuffers.slot_table_bytes` per index and row. The system provides that of a token only where tokens were
    swapped in. The tables grow beyond `context` tokens, in one call that takes seconds if they are large.
    """

    def __init__(self, num_indexes: int, num_rows: int, buffer_size: int, *, context: int = 0) -> None:
        assert 0 < buffer_size <= MOST_BUFFER_TOKENS, "a slot is an int16"
        self.buffer_size = buffer_size
        self.hit_tokens = 0
        """Selected tokens that a buffer had. The newest tokens, which need none, do not count."""
        self.swapped_tokens = 0
        self._newest, self._none = buffer_size + 1, buffer_size + 2
        self._ranks = np.arange(buffer_size, dtype=np.uint16)
        self.shape = shape = (num_indexes, num_rows)
        self._slot_of = np.zeros((*shape, context + 1), dtype=np.int16)  # slots by position + 1
        self._position = np.full(
            (*shape, buffer_size + 3), -1, dtype=np.int32
        )  # positions by slot + 1; the ends have no meaning
        self._stamp = np.full((*shape, buffer_size + 3), CLOCK_END, dtype=np.uint16)  # last uses by slot + 1
        self._stamp[..., 1 : self._newest] = self._ranks
        self._order = np.full((*shape, 2 * buffer_size), self._newest, dtype=np.int16)  # ends with those never taken
        self._order[..., :buffer_size] = self._ranks + 1
        self._head = np.zeros(shape, dtype=np.int64)
        self._sorted_at = np.full(shape, buffer_size, dtype=np.uint16)
        self._clock = [buffer_size] * num_indexes

    def swap_in(self, index: int, rows: Ids, positions: Ids, newest: npt.NDArray[np.int64]) -> FoundSlots:
        """Find the slots of the tokens that the last token of each row selects, and make room for those that lack.

        `positions` is `[n, k]`, -1 for none, k at most the buffer. Those of a row differ, and are at most `newest`, the
        position of its last token. Rows differ. The caller copies before anything reads the slots.
        """
        count, most = positions.shape
        assert most <= self.buffer_size and len(set(rows.tolist())) == count, "wider than the buffer, or a row twice"
        self._widen(int(newest.max(initial=0)) + 2)
        loaded, hit = self._advance_clock(index)
        slot_of, stamp, position_of = (each[index].reshape(-1) for each in (self._slot_of, self._stamp, self._position))
        at_row = rows.astype(np.int64)
        positions_at, slots_at = at_row * self._slot_of.shape[-1] + 1, at_row * self._stamp.shape[-1]

        slot_of[positions_at - 1] = self._none
        slot_of[positions_at + newest] = self._newest
        found = slot_of.take(positions_at[:, None] + positions)
        slot_of[positions_at + newest] = _ABSENT
        stamp[slots_at[:, None] + found] = hit
        stamp[slots_at + self._newest] = CLOCK_END

        missing = np.flatnonzero(found == _ABSENT)
        which = missing // most
        taken = self._least_recent(index, at_row, np.bincount(which, minlength=count), hit)
        loads = positions.reshape(-1)[missing]
        places = slots_at[which] + taken
        slot_of[positions_at[which] + position_of[places]] = _ABSENT
        slot_of[positions_at[which] + loads] = taken
        position_of[places] = loads
        stamp[places] = loaded
        found.reshape(-1)[missing] = taken

        self.swapped_tokens += len(missing)
        self.hit_tokens += found.size - len(missing) - int(np.count_nonzero(found > self.buffer_size))
        slots = np.subtract(found, 1, dtype=np.int32)
        if most and positions.min(initial=0) < 0:
            slots[found == self._none] = 0
        return FoundSlots(slots, rows[which], loads, taken.astype(np.int32) - 1)

    def clear(self, rows: Ids) -> None:
        """Empty all buffers of these rows: a request begins or has ended there."""
        for slot_of, position_of in zip(self._slot_of, self._position, strict=True):
            slot_of[rows[:, None], position_of[rows] + 1] = _ABSENT
        self._position[:, rows] = -1
        self._order[:, rows, : self.buffer_size] = self._ranks + 1
        self._stamp[:, rows, 1 : self._newest] = self._ranks
        self._head[:, rows] = 0
        self._sorted_at[:, rows] = self.buffer_size

    def _least_recent(self, index: int, rows: _Places, counts: _Places, hit: int) -> npt.NDArray[np.int16]:
        """The slots + 1 to overwrite, `counts` of each row, one row after another."""
        total, width = int(counts.sum()), min(self.buffer_size, 2 * int(counts.max(initial=0)) + 1)
        slots, ranked = self._next(index, rows, width)
        lacking = np.count_nonzero(ranked, axis=1) < counts
        if lacking.any():
            self._sort(index, rows[lacking], hit)
            slots[lacking], ranked[lacking] = self._next(index, rows[lacking], width)
        places, held = np.flatnonzero(ranked), np.count_nonzero(ranked, axis=1)
        ends, first = np.cumsum(counts), np.cumsum(held) - held
        chosen = places[np.repeat(first - ends + counts, counts) + np.arange(total)]
        some = counts > 0
        self._head[index, rows[some]] += chosen[ends[some] - 1] - np.flatnonzero(some) * width + 1
        taken: npt.NDArray[np.int16] = slots.reshape(-1)[chosen]
        return taken

    def _next(self, index: int, rows: _Places, width: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.bool_]]:
        """So many slots + 1 of each row from its head on, and which of them were not used since its sort."""
        order = self._order[index].reshape(-1)
        windows = as_strided(order, (len(order) - width + 1, width), order.strides * 2, writeable=False)
        slots = windows[rows * self._order.shape[-1] + self._head[index, rows]]
        stamps = self._stamp[index].reshape(-1).take((rows * self._stamp.shape[-1])[:, None] + slots)
        return slots, stamps < self._sorted_at[index, rows][:, None]

    def _sort(self, index: int, rows: _Places, hit: int) -> None:
        """Sort the slots of these rows by their last use. Those hit in this call are not overwritten."""
        order = np.argsort(self._stamp[index, rows, 1 : self._newest], axis=1, kind="stable")
        self._order[index, rows, : self.buffer_size] = order + 1
        self._head[index, rows] = 0
        self._sorted_at[index, rows] = hit - 1

    def _advance_clock(self, index: int) -> tuple[int, int]:
        """The stamps of this call: of loads, and of hits."""
        if self._clock[index] + 2 >= CLOCK_END:
            self._sort(index, np.arange(self._stamp.shape[1]), self.buffer_size + 1)
            order = self._order[index, :, : self.buffer_size].astype(np.int64)
            np.put_along_axis(self._stamp[index], order, self._ranks[None], axis=1)
            self._clock[index] = self.buffer_size
        self._clock[index] += 2
        return self._clock[index] - 2, self._clock[index] - 1

    def _widen(self, width: int) -> None:
        """Make the table at least that wide."""
        before = self._slot_of
        if width > before.shape[-1]:
            self._slot_of = np.zeros((*before.shape[:2], max(width, 2 * before.shape[-1])), dtype=np.int16)
            self._slot_of[..., : before.shape[-1]] = before
