"""TritonMoves: numbers copied in one launch for each move."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.moves import HostEntries, Moves, Pieces
from quire.kernels.slots import Slots
from quire.kernels.triton.numbers import device_of
from quire.upload import to_device

_ENTRIES = 256
"""Entries of page tables that a program sets."""
_WORDS = 1024
"""That a program copies."""
_MOST_PROGRAMS = 65_535  # on the last axis of a grid
_VECTOR = tl.constexpr(16)
_TYPES = {torch.int64: tl.int64, torch.uint8: tl.uint8}


@triton.jit(do_not_specialize=["count"])
def set_table_entries(tables, group_entries, changes, count, N: tl.constexpr):
    """Set N entries of the tables of one group, `group_entries` long. `changes` has `count` places, and as many entries
    for each group."""
    at, group = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1).to(tl.int64)
    inside = at < count
    place = tl.load(changes + at, mask=inside, other=0)
    frame = tl.load(changes + (group + 1) * count + at, mask=inside, other=0)
    tl.store(tables + group * group_entries + place, frame, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def move_pieces(
    table, rows, records, record_words, ENTRIES: tl.constexpr,
    N: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr, GATHER: tl.constexpr
):  # fmt: skip
    """Copy N words of SIZE bytes of one piece of one row, to or from its record; `table` is that of `Pieces`, whose
    frames have so many ENTRIES."""
    index, table = tl.program_id(0).to(tl.int64), table + tl.program_id(1) * 5
    words, row = tl.load(table + 4), tl.load(rows + index)
    place = tl.load(table) + row // ENTRIES * tl.load(table + 1) + row % ENTRIES * tl.load(table + 2)
    piece = place.to(tl.pointer_type(records.dtype.element_ty))
    record = records + index * record_words + tl.load(table + 3)
    if ALIGNED:
        piece, record = tl.multiple_of(piece, _VECTOR), tl.multiple_of(record, _VECTOR)
        words = tl.multiple_of(words, _VECTOR // SIZE)
    at = tl.program_id(2) * N + tl.arange(0, N)
    inside = at < words
    if GATHER:
        tl.store(record + at, tl.load(piece + at, mask=inside), mask=inside)
    else:
        tl.store(piece + at, tl.load(record + at, mask=inside), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["frames", "places", "targets"])  # which is another each step
def swap_in_entries(
    table, frames, places, targets, ENTRIES: tl.constexpr,
    TYPE: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Copy N words, of TYPE and SIZE bytes, of one entry of one field from host memory to frames of so many ENTRIES;
    `table` is that of `HostEntries`."""
    index, table = tl.program_id(0), table + tl.program_id(1) * 5
    entry, target = tl.load(table + 4), tl.load(targets + index)
    there = tl.load(table) + tl.load(frames + index) * tl.load(table + 1) + tl.load(places + index) * entry
    here = tl.load(table + 2) + target // ENTRIES * tl.load(table + 3) + target % ENTRIES * entry
    source, into = there.to(tl.pointer_type(TYPE)), here.to(tl.pointer_type(TYPE))
    words = entry // SIZE
    if ALIGNED:
        source, into = tl.multiple_of(source, _VECTOR), tl.multiple_of(into, _VECTOR)
        words = tl.multiple_of(words, _VECTOR // SIZE)
    at = tl.program_id(2) * N + tl.arange(0, N)
    inside = at < words
    tl.store(into + at, tl.load(source + at, mask=inside), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["sources"])
def read_rows(layer, layer_row, sources, out, numbers, N: tl.constexpr):
    """Copy N numbers of one row of `layer`, or zeros if that is row 0."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(sources + index)
    at = tl.program_id(1) * N + tl.arange(0, N)
    inside = at < numbers
    there = tl.where(row != 0, numbers, 0)
    found = tl.load(layer + row * layer_row + at, mask=at < there, other=0)
    tl.store(out + index * numbers + at, found.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["targets"])
def write_rows(layer, layer_row, targets, states, numbers, N: tl.constexpr):
    """The other way; row 0 is one of many."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(targets + index)
    at = tl.program_id(1) * N + tl.arange(0, N)
    inside = at < numbers
    given = tl.load(states + index * numbers + at, mask=inside)
    tl.store(layer + row * layer_row + at, given.to(layer.dtype.element_ty), mask=inside)


class TritonMoves(Moves):
    """Moves in one launch each. `swap_in` reads host memory, which is pinned, by its own addresses."""

    def set_entries(self, tables: Tensor, changes: Tensor) -> None:
        assert tables.is_contiguous() and changes.is_contiguous()
        groups, count = len(tables), changes.shape[1]
        if groups and count:
            with device_of(tables):
                set_table_entries[(triton.cdiv(count, _ENTRIES), groups)](
                    tables, tables.stride(0), changes, count, N=_ENTRIES
                )

    def gather(self, pieces: Pieces, rows: Tensor, records: Tensor) -> None:
        _move(pieces, rows, records, gathers=True)

    def scatter(self, pieces: Pieces, rows: Tensor, records: Tensor) -> None:
        _move(pieces, rows, records, gathers=False)

    def move(self, pieces: Pieces, sources: Tensor, targets: Tensor) -> None:
        records = torch.empty((len(sources), pieces.record_words), dtype=pieces.word, device=sources.device)
        self.gather(pieces, sources, records)
        self.scatter(pieces, targets, records)

    def read_states(self, layer: Tensor, sources: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        out = layer.new_empty((len(sources), *layer.shape[2:]), dtype=dtype or layer.dtype)
        numbers = layer[0].numel()
        if len(sources):
            n = min(triton.next_power_of_2(numbers), _WORDS)
            with device_of(layer):
                read_rows[(len(sources), triton.cdiv(numbers, n))](layer, layer.stride(0), sources, out, numbers, N=n)
        return out

    def write_states(self, layer: Tensor, targets: Tensor, states: Tensor) -> None:
        numbers, states = layer[0].numel(), states.contiguous()
        assert states.numel() == len(targets) * numbers
        if len(targets):
            n = min(triton.next_power_of_2(numbers), _WORDS)
            with device_of(layer):
                write_rows[(len(targets), triton.cdiv(numbers, n))](
                    layer, layer.stride(0), targets, states, numbers, N=n
                )

    def swap_in(self, entries: HostEntries, frames: Slots, places: Slots, targets: Tensor) -> None:
        if not len(targets):
            return
        size, table = entries.word.itemsize, entries.table
        words = max(entries.entry_bytes) // size
        n = min(triton.next_power_of_2(words), _WORDS)
        sources = to_device(np.stack((frames, places)), table.device)
        with device_of(table):
            swap_in_entries[(len(targets), len(table), triton.cdiv(words, n))](
                table,
                sources[0],
                sources[1],
                targets,
                ENTRIES=entries.parts[0][1].shape[1],
                TYPE=_TYPES[entries.word],
                SIZE=size,
                N=n,
                ALIGNED=entries.is_aligned,
                num_warps=1 if n < _WORDS else 4,
            )


def _move(pieces: Pieces, rows: Tensor, records: Tensor, *, gathers: bool) -> None:
    if not len(rows) or not pieces.parts:
        return
    assert records.is_contiguous() and records.shape[1] == pieces.record_words and records.dtype == pieces.word
    size = pieces.word.itemsize
    n = min(triton.next_power_of_2(pieces.widest), _WORDS)
    while triton.cdiv(pieces.widest, n) > _MOST_PROGRAMS:
        n *= 2
    is_aligned = pieces.is_aligned and records.data_ptr() % 16 == 0 and pieces.record_words * size % 16 == 0
    with device_of(records):
        move_pieces[(len(rows), len(pieces.table), triton.cdiv(pieces.widest, n))](
            pieces.table,
            rows,
            records,
            pieces.record_words,
            ENTRIES=pieces.entries,
            N=n,
            SIZE=size,
            ALIGNED=is_aligned,
            GATHER=gathers,
            num_warps=1 if n < _WORDS else 4,
        )
