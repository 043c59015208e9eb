"""Attention by Triton kernels: tensors in, two or three launches, a tensor out. Nothing is read from the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from quire.kernels.batch import PagedBatch
from quire.kernels.fields import PagedField
from quire.kernels.terms import AttentionTerms
from quire.kernels.triton.attend import attend_tasks, merge_parts
from quire.kernels.triton.launch import Launch, hint, is_aligned
from quire.kernels.triton.numbers import device_of, stored_field
from quire.kernels.triton.tasks import KEYS, MIN_PIECE, PARTS_BYTES, Blocks, TaskPlan, new_parts, plan_tasks, to_device

_PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True, slots=True)
class Tile:
    """A program's tile: query rows times heads, keys, and how it is compiled."""

    m: int
    n: int
    stages: int
    warps: int


def tile_of(width: int, out_width: int, item_bytes: int, m: int, *, decodes: bool = False, trees: bool = False) -> Tile:
    """The tile of at most `m` queries for keys and values of `width` numbers together, and sums of `out_width`. It
    `decodes` if stored numbers are encoded; rows may follow `trees`.

    Sums stay in registers, and the keys in flight fit into shared memory: tests compile every kind for three
    architectures, and read both.
    """
    n = 16
    while n < 64 and 2 * n * width * item_bytes <= 40 * 2**10:
        n *= 2
    if trees:
        m, n = min(m, 32), min(n, 32)
    if item_bytes == 4:
        m = min(m, 16 if out_width >= 512 else 32)
        return Tile(m, n, 3, 8 if m > 16 or out_width >= 512 else 4)
    if out_width >= 512:
        return Tile(min(m, 16 if decodes else 32), n, 3, 8)
    return Tile(m, n, 3, 8 if width >= 512 else 4)


class TritonAttention:
    """The kernels on a device. Its methods are those of `AttentionKernel`. `programs` are those that keep it busy: two
    on each processor by default."""

    def __init__(self, device: torch.device, programs: int = 0) -> None:
        self._device = device
        self._given = programs

    @cached_property
    def _programs(self) -> int:
        if self._given or self._device.type != "cuda":
            return self._given or 1
        found: int = torch.cuda.get_device_properties(self._device).multi_processor_count
        return _PROGRAMS_PER_PROCESSOR * found

    def pages(
        self,
        query: Tensor,
        parts: Sequence[PagedField | None],
        batch: PagedBatch,
        terms: AttentionTerms,
        *,
        keep_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        prepared = self._prepared(query, parts, terms, trees=batch.parents is not None)
        # Alone: what is derived is kept for later steps, and would keep sinks.
        device, blocks, window, chunked = query.device, prepared.blocks, terms.window, terms.chunked
        plan = batch.derived(
            (TritonAttention, window, chunked, blocks, device),
            lambda batch: plan_tasks(batch, window, blocks, device, chunked=chunked),
        )
        table, row = _table_of(batch, device)
        scratch = plan.scratch(prepared.heads, prepared.width, device)
        call = prepared.call(query, scratch, None if keep_lse else terms.sinks, keep_lse=keep_lse)
        if plan.num_rows < len(query):
            call.out[plan.num_rows :].zero_()
        with device_of(query):
            if plan.num_small:
                prepared.attend(call, plan, (0, plan.num_small), (table, row, batch.page_size))
            if plan.num_small < plan.num_tasks:
                prepared.attend(call, plan, (plan.num_small, plan.num_tasks), (table, row, batch.page_size))
            if plan.num_merges:
                prepared.merge(call, plan.num_merges, plan.arrays["merges"], 0)
        return call.out, call.lse

    def selected(
        self, query: Tensor, parts: Sequence[PagedField | None], slots: Tensor, hidden: Tensor, terms: AttentionTerms
    ) -> tuple[Tensor, Tensor]:
        slots = slots.masked_fill(hidden, -1)
        rows, selected = slots.shape
        prepared = self._prepared(query, parts, terms, trees=False)
        wanted = max(1, self._programs // max(1, rows * prepared.programs))
        size = max(MIN_PIECE, triton.cdiv(triton.cdiv(selected, wanted), KEYS) * KEYS)
        num_parts = max(1, triton.cdiv(selected, size))
        scratch = new_parts(rows * num_parts if num_parts > 1 else 0, prepared.heads, prepared.width, query.device)
        call = prepared.call(query, scratch, None, keep_lse=True)
        with device_of(query):
            if rows:
                prepared.attend_selected(call, slots, size, num_parts)
            if num_parts > 1:
                prepared.merge(call, rows, slots, num_parts)
        assert call.lse is not None
        return call.out, call.lse

    def _prepared(
        self, query: Tensor, parts: Sequence[PagedField | None], terms: AttentionTerms, *, trees: bool
    ) -> PreparedAttention:
        """Kept with the field of keys: a layer has its own."""
        key, tail, value = parts
        assert key is not None
        name = (self, query.dtype, query.shape[1:], terms.scale, terms.softcap, trees, tail, value)
        found: PreparedAttention | None = key.kept.get(name)
        if found is None:
            found = key.kept[name] = PreparedAttention(query, parts, terms, self._programs, trees=trees)
        return found


def _table_of(batch: PagedBatch, device: torch.device) -> tuple[Tensor, int]:
    """Page tables on the device, and the entries from row to row. Those of an engine are there; others are sent."""
    if batch.table is not None:
        return batch.table.device, batch.table.device.stride(0)
    (sent,) = batch.derived((TritonAttention, device), lambda batch: to_device((batch.frames,), device))
    return sent, batch.frames.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The tensors of one call beside fields: what it reads, and what it writes. `lse` and `sinks` may be none."""

    query: Tensor
    out: Tensor
    lse: Tensor | None
    parts: Tensor
    part_lse: Tensor
    sinks: Tensor | None


class PreparedAttention:
    """What calls on the same fields have in common, with queries of one type, heads and width: tiles, constants, and
    what Triton has compiled for them. `busy` programs keep the device busy."""

    def __init__(
        self, query: Tensor, parts: Sequence[PagedField | None], terms: AttentionTerms, busy: int, *, trees: bool
    ) -> None:
        key, tail, value = (None if part is None else stored_field(part) for part in parts)
        assert key is not None
        self.heads, self.kv_heads = query.shape[1], key.heads
        self.group = self.heads // self.kv_heads
        self._entries = key.entries
        self.width = value.width if value is not None else key.width + (tail.width if tail is not None else 0)
        wide = key.wide + (tail.wide if tail is not None else 0) + (value.wide if value is not None else 0)
        sums = value.wide if value is not None else wide
        lanes = triton.next_power_of_2(self.group)
        sizes = (wide, sums, query.element_size())
        kind = {"decodes": any(field is not None and field.format for field in (key, tail, value)), "trees": trees}
        self.small = tile_of(*sizes, min(max(lanes, 16), 64), **kind)
        self.large = tile_of(*sizes, 64, **kind)
        self.lanes = min(self.group, self.small.m, self.large.m)
        self.programs = self.kv_heads * -(-self.group // self.lanes)
        most_parts = PARTS_BYTES // (4 * self.heads * (self.width + 1))
        self.blocks = Blocks(self.rows_of(self.small), self.rows_of(self.large), self.programs, busy, most_parts)
        self.scale, self.softcap = terms.scale, terms.softcap or 0.0
        self._numbers = (terms.scale, terms.softcap or 1.0, self.heads)
        self._constants = {"GROUP": self.group, "LANES": self.lanes, "SOFTCAP": bool(terms.softcap)}
        self._fields: tuple[Any, ...] = ()
        for name, field in (("KEY", key), ("TAIL", tail), ("VALUE", value)):
            self._fields += (field or key).arguments
            self._constants |= (field or key).constants(name)
            if field is None:
                self._constants[f"{name}_WIDTH"] = 0
        self._launches: dict[tuple[object, ...], Launch] = {}

    def rows_of(self, tile: Tile) -> int:
        """Rows of a task of such tiles."""
        return tile.m // self.lanes

    def call(self, query: Tensor, scratch: tuple[Tensor, Tensor], sinks: Tensor | None, *, keep_lse: bool) -> Call:
        """Allocate what is written."""
        rows = query.shape[0]
        out = query.new_empty(rows, self.heads, self.width, dtype=torch.float32 if keep_lse else query.dtype)
        lse = query.new_empty(rows, self.heads, dtype=torch.float32) if keep_lse else None
        return Call(query, out, lse, *scratch, None if sinks is None else sinks.float().contiguous())

    def attend(self, call: Call, plan: TaskPlan, tasks: tuple[int, int], pages: tuple[Tensor, int, int]) -> None:
        """Compute the tasks of a plan from the first number up to the second, which are all small or all large. `pages`
        are page tables, entries from row to row, and tokens of a page."""
        (first, stop), (table, table_row, page_size) = tasks, pages
        unused, is_small = call.part_lse, first < plan.num_small
        given = (plan.arrays["tasks"], first, *plan.of_rows, table, table_row, unused, *self._numbers, 0, 1, 1)
        launch = self._launch(call, page_size, is_small=is_small, is_selected=False, trees=plan.trees)
        kind = (plan.is_aligned, is_aligned(table))
        self._run(launch, call, (stop - first, self.programs, 1), given, kind)

    def attend_selected(self, call: Call, slots: Tensor, size: int, num_parts: int) -> None:
        """Each row reads its own `slots` `[rows, n]` that are not negative, `size` in each of its parts."""
        unused, selected = call.part_lse, slots.shape[1]
        given = (unused, 0, *(unused,) * 7, unused, 0, slots, *self._numbers, selected, size, num_parts)
        launch = self._launch(call, self._entries, is_small=True, is_selected=True, trees=False)
        self._run(launch, call, (len(slots) * num_parts, self.programs, 1), given, is_aligned(slots))

    def merge(self, call: Call, num_rows: int, merges: Tensor, num_parts: int) -> None:
        """Merge the parts of rows: as many of each if there is a number, else those of `merges`."""
        name = ("merge", num_parts > 0, call.sinks is None, call.lse is None)
        launch = self._launches.get(name)
        if launch is None:
            wide = triton.next_power_of_2(self.width)
            constants = {"SELECTED": num_parts > 0, "WIDTH": self.width, "WIDE": wide}
            constants |= {"SINKS": call.sinks is not None, "LSE": call.lse is not None}
            launch = self._launches[name] = Launch(merge_parts, constants, enable_fp_fusion=True)
        lse, sinks = _or_unused(call.lse, call), _or_unused(call.sinks, call)
        arguments = (call.out, lse, call.parts, call.part_lse, sinks, merges, self.heads, num_parts)
        launch((num_rows, self.heads, 1), arguments, (is_aligned(merges), is_aligned(sinks)))

    def _launch(self, call: Call, page: int, *, is_small: bool, is_selected: bool, trees: bool) -> Launch:
        name = (page, is_small, is_selected, trees, call.sinks is None, call.lse is None)
        found = self._launches.get(name)
        if found is None:
            tile = self.small if is_small else self.large
            constants = self._constants | {"PAGE": page, "SELECTED": is_selected, "TREES": trees}
            constants |= {"M": tile.m, "N": tile.n, "STAGES": tile.stages}
            constants |= {"SINKS": call.sinks is not None, "LSE": call.lse is not None}
            options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
            found = self._launches[name] = Launch(attend_tasks, constants, **options)
        return found

    def _run(
        self, launch: Launch, call: Call, grid: tuple[int, int, int], given: tuple[Any, ...], kind: object
    ) -> None:
        query, sinks = call.query, _or_unused(call.sinks, call)
        row, head, _ = query.stride()
        lse = _or_unused(call.lse, call)
        arguments = (query, row, head, call.out, lse, call.parts, call.part_lse, sinks, *self._fields, *given)
        launch(grid, arguments, (kind, is_aligned(query), hint(row), hint(head), is_aligned(sinks)))


def _or_unused(tensor: Tensor | None, call: Call) -> Tensor:
    """A tensor, or float32 memory that no program reads for it."""
    return call.part_lse if tensor is None else tensor
