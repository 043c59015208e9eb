"""Attention by Triton kernels: tensors in, two or three launches, a tensor out. Nothing is read from the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from quire.kernels.fields import PagedField
from quire.kernels.page_arrays import PageArrays
from quire.kernels.triton.attend import attend_tasks, merge_parts
from quire.kernels.triton.numbers import StoredField, device_of
from quire.kernels.triton.tasks import KEYS, MIN_PIECE, Blocks, plan_tasks, to_device

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
    """The kernels on a device. `programs` are those that keep it busy: two on each processor by default."""

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
        arrays: PageArrays,
        *,
        scale: float,
        window: int = 0,
        chunked: bool = False,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        keep_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """`paged_attention` of `query` `[T, heads, key_dim]`; float32 with the log-sum-exp `[T, heads]` if kept.

        `parts` are those of a reader.
        """
        call = _Call(query, parts, scale, softcap, trees=arrays.parents is not None)
        device = query.device
        blocks = Blocks(call.rows_of(call.small), call.rows_of(call.large), call.programs, self._programs)
        plan = arrays.derived(
            (TritonAttention, window, chunked, blocks, device),
            lambda arrays: plan_tasks(arrays, window, blocks, device, chunked=chunked),
        )
        table, row = _table_of(arrays, device)
        call.prepare(plan.num_parts, sinks, keep_lse=keep_lse)
        if plan.num_rows < len(query):
            call.out[plan.num_rows :].zero_()
        found = {name: plan.arrays[name] for name in call.names}
        common = {**found, "table": table, "table_row": row, "PAGE": arrays.page_size}
        for tile, first, stop in ((call.small, 0, plan.num_small), (call.large, plan.num_small, plan.num_tasks)):
            if first < stop:
                call.launch(tile, stop - first, {**common, "first_task": first, "TREES": plan.trees})
        if plan.num_merges:
            call.merge(plan.num_merges, plan.arrays["merges"], 0)
        return call.out, call.lse

    def selected(
        self,
        query: Tensor,
        parts: Sequence[PagedField | None],
        slots: Tensor,
        hidden: Tensor,
        *,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """`attend_selected`."""
        slots = slots.masked_fill(hidden, -1)
        rows, selected = slots.shape
        call = _Call(query, parts, scale, softcap)
        wanted = max(1, self._programs // max(1, rows * call.programs))
        size = max(MIN_PIECE, triton.cdiv(triton.cdiv(selected, wanted), KEYS) * KEYS)
        num_parts = max(1, triton.cdiv(selected, size))
        call.prepare(rows * num_parts if num_parts > 1 else 0, None, keep_lse=True)
        own = {"slots": slots, "selected": selected, "size": size, "num_parts": num_parts}
        if rows:
            call.launch(call.small, rows * num_parts, {**own, "SELECTED": True})
        if num_parts > 1:
            call.merge(rows, slots, num_parts)
        assert call.lse is not None
        return call.out, call.lse


def _table_of(arrays: PageArrays, device: torch.device) -> tuple[Tensor, int]:
    """Page tables on the device, and the entries from row to row. Those of an engine are there; others are sent."""
    if arrays.table is not None:
        return arrays.table.device, arrays.table.device.stride(0)
    (sent,) = arrays.derived((TritonAttention, device), lambda arrays: to_device((arrays.frames,), device))
    return sent, arrays.frames.shape[1]


class _Call:
    """The tensors and constants of one call."""

    names = ("tasks", "task_rows", "places", "lows", "highs", "branches", "pasts", "sees")

    def __init__(
        self,
        query: Tensor,
        parts: Sequence[PagedField | None],
        scale: float,
        softcap: float | None,
        *,
        trees: bool = False,
    ) -> None:
        key, tail, value = (None if part is None else StoredField(part) for part in parts)
        assert key is not None
        self.query = query
        self.heads, self.kv_heads = query.shape[1], key.heads
        self.group = self.heads // self.kv_heads
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
        self.constants: dict[str, Any] = {
            "GROUP": self.group,
            "LANES": self.lanes,
            "PAGE": 1,
            "SELECTED": False,
            "TREES": False,
            "SOFTCAP": bool(softcap),
        }
        self.arguments: dict[str, Any] = {"query": query, "scale": scale, "softcap": softcap or 1.0}
        self.arguments |= {"query_row": query.stride(0), "query_head": query.stride(1), "heads": self.heads}
        for name, field in (("key", key), ("tail", tail), ("value", value)):
            self._add(name, field or key, absent=field is None)

    def _add(self, name: str, field: StoredField, *, absent: bool) -> None:
        names = ("", "_token", "_head", "_scales", "_scale_token", "_scale_head")
        self.arguments |= {f"{name}{end}": given for end, given in zip(names, field.arguments, strict=True)}
        self.constants |= field.constants(name.upper())
        if absent:
            self.constants[f"{name.upper()}_WIDTH"] = 0

    def rows_of(self, tile: Tile) -> int:
        """Rows of a task of such tiles."""
        return tile.m // self.lanes

    def prepare(self, num_parts: int, sinks: Tensor | None, *, keep_lse: bool) -> None:
        """Allocate what is written. Unused arguments are the query, which no program reads for them."""
        query = self.query
        rows, kept = query.shape[0], torch.float32 if keep_lse else query.dtype
        self.out = query.new_empty(rows, self.heads, self.width, dtype=kept)
        self.lse = query.new_empty(rows, self.heads, dtype=torch.float32) if keep_lse else None
        self.parts = query.new_empty(max(num_parts, 1), self.heads, self.width, dtype=torch.float32)
        self.part_lse = query.new_empty(max(num_parts, 1), self.heads, dtype=torch.float32)
        self.sinks = None if sinks is None else sinks.float().contiguous()
        self.shared: dict[str, Any] = {
            "out": self.out,
            "lse": self.part_lse if self.lse is None else self.lse,
            "parts": self.parts,
            "part_lse": self.part_lse,
            "sinks": self.part_lse if self.sinks is None else self.sinks,
            "SINKS": self.sinks is not None,
            "LSE": keep_lse,
        }

    def launch(self, tile: Tile, num_tasks: int, given: dict[str, Any]) -> None:
        """Compute tasks."""
        unused = dict.fromkeys((*self.names, "table", "slots"), self.part_lse)
        numbers = {"first_task": 0, "table_row": 0, "selected": 0, "size": 1, "num_parts": 1}
        with device_of(self.query):
            attend_tasks[(num_tasks, self.programs)](
                **{**unused, **numbers, **self.constants, **self.arguments, **self.shared, **given},
                M=tile.m,
                N=tile.n,
                STAGES=tile.stages,
                num_warps=tile.warps,
                num_stages=tile.stages,
                enable_fp_fusion=True,
            )

    def merge(self, num_rows: int, merges: Tensor, num_parts: int) -> None:
        """Merge the parts of rows: as many of each if there is a number, else those of `merges`."""
        wide = triton.next_power_of_2(self.width)
        given = {"merges": merges, "heads": self.heads, "num_parts": num_parts}
        with device_of(self.query):
            merge_parts[(num_rows, self.heads)](
                **{**self.shared, **given}, SELECTED=num_parts > 0, WIDTH=self.width, WIDE=wide, enable_fp_fusion=True
            )
