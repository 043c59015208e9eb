"""The Triton kernels of attention by torch's operators, with the kernels' arguments: for a device in Python, which has
no kernels. Shapes follow from sizes alone, as in a kernel, so that a graph can record it.

Plans of tasks, page tables by row and the order of launches are those of `TritonAttention`; what is computed here is
another program, in float32. Trees are not emulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
from torch import Tensor

from quire.kernels.backend import AttentionBackend
from quire.kernels.codec import decode
from quire.kernels.fields import PagedField
from quire.kernels.moves import TORCH
from quire.kernels.triton import attention, write
from quire.kernels.triton.attention import Call, PreparedAttention, TritonAttention
from quire.kernels.triton.tasks import TaskPlan


class EmulatedAttention(PreparedAttention):
    """`PreparedAttention`, whose launches are operators."""

    def __init__(self, query: Tensor, parts: Any, *args: Any, trees: bool) -> None:
        super().__init__(query, parts, *args, trees=trees)
        assert not trees
        self._parts = parts

    def attend(self, call: Call, plan: TaskPlan, tasks: tuple[int, int], pages: tuple[Tensor, int, int]) -> None:
        super().attend(call, plan, tasks, pages)
        (first, stop), (table, table_row, page) = tasks, pages
        device, given = call.query.device, plan.arrays
        tile = self.small if first < plan.num_small else self.large
        lanes = torch.arange(self.rows_of(tile), device=device)
        at, count, begin, end, of_table = given["tasks"].view(-1, 5)[first:stop].long().unbind(1)
        valid = lanes < count[:, None]
        entry = (at[:, None] + lanes).clamp(max=len(given["task_rows"]) - 1)
        row = torch.where(valid, given["task_rows"][entry], 0).long()
        place = torch.where(valid, given["places"][entry], -1).long()
        tables = table.view(-1, table_row)
        position = torch.arange(tables.shape[1] * page, device=device)
        there = (position >= begin[:, None]) & (position < end[:, None])
        slots = tables.index_select(0, of_table).long()[..., None] * page + torch.arange(page, device=device)
        slots = torch.where(there, slots.flatten(1), 0)
        seen = (position >= given["lows"][row][..., None]) & (position <= given["highs"][row][..., None])
        seen &= there[:, None] & valid[..., None]
        self._attend(call, row, place, valid, slots, seen)

    def attend_selected(self, call: Call, slots: Tensor, size: int, num_parts: int) -> None:
        super().attend_selected(call, slots, size, num_parts)
        rows, selected = slots.shape
        program = torch.arange(rows * num_parts, device=slots.device)
        row, part = (program // num_parts)[:, None], (program % num_parts)[:, None]
        position = torch.arange(selected, device=slots.device)
        mine = (position >= part * size) & (position < (part + 1) * size)
        own = slots.index_select(0, row[:, 0])
        seen = (mine & (own >= 0))[:, None]
        place = program[:, None] if num_parts > 1 else torch.full_like(row, -1)
        self._attend(call, row, place, torch.ones_like(row, dtype=torch.bool), own.clamp(min=0), seen)

    def _attend(self, call: Call, row: Tensor, place: Tensor, valid: Tensor, slots: Tensor, seen: Tensor) -> None:
        """Rows int64 `[n, m]` of n tasks against the tokens at `slots` `[n, l]` that they have `seen` `[n, m, l]`."""
        key, value = self._read(slots)
        score = torch.einsum("nmhd,nlhd->nmhl", call.query[row].float(), key) * self.scale
        if self.softcap:
            score = self.softcap * torch.tanh(score / self.softcap)
        score = score.masked_fill(~seen[:, :, None], float("-inf"))
        peak = score.amax(-1, keepdim=True)
        weight = torch.exp(score - torch.where(peak == float("-inf"), 0.0, peak))
        total = weight.sum(-1, keepdim=True)
        lse = (peak + total.log()).squeeze(-1)
        if call.sinks is not None:
            sink = torch.exp(call.sinks[None, None, :, None] - torch.where(peak == float("-inf"), 0.0, peak))
            total = total + torch.where((place < 0)[..., None, None], sink, 0.0)
        found = torch.einsum("nmhl,nlhd->nmhd", weight, value) / torch.where(total > 0, total, 1.0)
        for into, lses, where in ((call.out, call.lse, valid & (place < 0)), (call.parts, call.part_lse, place >= 0)):
            index = torch.where(where, row if into is call.out else place, len(into)).flatten()
            _store(into, index, found.flatten(0, 1))
            if lses is not None:
                _store(lses, index, lse.flatten(0, 1))

    def merge(self, call: Call, num_rows: int, merges: Tensor, num_parts: int) -> None:
        super().merge(call, num_rows, merges, num_parts)
        place = torch.arange(len(call.parts), device=merges.device)
        if num_parts:
            row = torch.arange(num_rows, device=merges.device)
            begin, count = row * num_parts, torch.full_like(row, num_parts)
        else:
            row, begin, count = merges.view(-1, 3)[:num_rows].long().unbind(1)
        mine = ((place >= begin[:, None]) & (place < (begin + count)[:, None]))[..., None]
        score = call.part_lse[None].masked_fill(~mine, float("-inf"))
        base = score.amax(1, keepdim=True)
        base = torch.where(base == float("-inf"), 0.0, base)
        weight = torch.exp(score - base)
        total = weight.sum(1)
        values = torch.where(mine[..., None], call.parts[None], 0.0)
        acc = (weight[..., None] * values).sum(1)
        if call.lse is not None:
            _store(call.lse, row, base.squeeze(1) + total.log())
        if call.sinks is not None:
            total = total + torch.exp(call.sinks - base.squeeze(1))
        _store(call.out, row, acc / torch.where(total > 0, total, 1.0)[..., None])

    def _read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[tasks, tokens, heads, dim]` of all query heads, float32."""
        key, tail, value = (None if part is None else self._rows(part, slots) for part in self._parts)
        assert key is not None
        if tail is not None:
            key = torch.cat((key, tail), dim=-1)
        return key, key if value is None else value

    def _rows(self, part: PagedField, slots: Tensor) -> Tensor:
        assert part.stored is not None
        rows, scales, kv_format = part.stored
        at = slots.flatten() // rows.shape[1], slots.flatten() % rows.shape[1]
        plain = rows[at]
        if kv_format is not None:
            factors = None if scales is None else scales[at]
            plain = decode(plain, factors, kv_format, torch.float32)
        plain = plain.unsqueeze(1) if plain.dim() == 2 else plain
        return plain.float().repeat_interleave(self.heads // plain.shape[1], dim=1).unflatten(0, slots.shape)


def _store(into: Tensor, index: Tensor, rows: Tensor) -> None:
    """Write rows to their places; those whose place is the length of `into` are not written."""
    wide = torch.zeros((len(into) + 1, *into.shape[1:]), dtype=into.dtype, device=into.device)
    wide.index_copy_(0, index, rows.to(into.dtype))
    written = torch.zeros(len(into) + 1, dtype=torch.bool, device=into.device)
    written.index_fill_(0, index, True)
    mask = written[:-1].view(-1, *(1,) * (into.dim() - 1))
    into.copy_(torch.where(mask, wide[:-1], into))


class _Compiling:
    """A kernel that computes nothing. What it returns is kept for launches of one kind, as compiled code is."""

    def __init__(self, kernel: Any, compiled: list[str]) -> None:
        self.arg_names, self._name, self._compiled = kernel.arg_names, kernel.__name__, compiled

    def __getitem__(self, grid: object) -> Any:
        def launch(*_: Any, **__: Any) -> Any:
            self._compiled.append(self._name)
            return _Kept()

        return launch


class _Kept:
    def __getitem__(self, grid: object) -> Any:
        return lambda *_: None


def _write(field: PagedField, slots: Tensor, rows: Tensor) -> Tensor:
    """The writer's launch, and what torch's operators write."""
    write.write_rows(field, slots, rows)
    plain = copy(field)
    plain._writer = None
    return plain.write(slots, rows)


@contextmanager
def emulated_kernels(programs: int = 6) -> Iterator[list[str]]:
    """Backends of the Triton kernels compute by operators inside the block; `programs` keep the device busy. Yields the
    names of kernels that a GPU would compile, or find compiled, as they are launched for the first time in a layer."""
    compiled: list[str] = []
    with ExitStack() as stack:
        for module, name in ((attention, "attend_tasks"), (attention, "merge_parts"), (write, "write_tiles")):
            stack.enter_context(patch.object(module, name, _Compiling(getattr(module, name), compiled)))
        stack.enter_context(patch.object(write, "device_of", lambda tensor: nullcontext()))
        stack.enter_context(patch.object(attention, "PreparedAttention", EmulatedAttention))
        stack.enter_context(patch.object(attention, "device_of", lambda tensor: nullcontext()))
        given = {
            (AttentionBackend, "writer"): _write,
            (AttentionBackend, "moves"): TORCH,
            (TritonAttention, "_programs"): programs,
        }
        for (kind, name), value in given.items():
            stack.enter_context(patch.object(kind, name, PropertyMock(return_value=value)))
        yield compiled
