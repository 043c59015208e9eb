"""Faults that are put into a running engine: each does its damage once, and knows which page it damages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quire.cache.running import RunningTables
from quire.engine.core import EngineCore
from quire.kernels.fields import PagedField, SlotIndex
from quire.models.native_decoder import NativeDecoder
from quire.prefix.node import Node

Patch = pytest.MonkeyPatch


def cached_page(core: EngineCore) -> tuple[int, int]:
    """A page in the middle of the longest cached path, and its frame in group 0."""
    longest = max(core.cache.tree.nodes(), key=lambda node: node.depth + node.num_pages)
    node: Node = longest
    page = int(node.pages[node.num_pages // 2])
    return page, int(core.cache.groups[0].table.frame[page])


def bit_flip(core: EngineCore, patch: Patch) -> None:
    """One bit of a cached page changes."""
    flip(core, cached_page(core)[1])


def flip(core: EngineCore, frame: int) -> None:
    """One bit of a frame changes."""
    core.pools[0].tensors[0][1][1, frame].view(torch.uint8).view(-1)[5] ^= 4


def neighbour_write(core: EngineCore, patch: Patch) -> None:
    """A write of a step hits a frame beside, which is cached."""
    _, frame = cached_page(core)

    def put(real: Any, field: PagedField, rows: Any, places: SlotIndex, stored: torch.Tensor) -> None:
        real(field, rows, places, stored)
        rows.frames[frame, 0] = stored[-1]

    _write_once(patch, put)


def stale_reuse(core: EngineCore, patch: Patch) -> None:
    """The frame of a cached page is free, and the next request that grows writes to it."""
    _, frame = cached_page(core)
    core.cache.groups[0].frames.allocator.free_pages(np.array([frame], dtype=np.int32))  # type: ignore[union-attr]


def skipped_write(core: EngineCore, patch: Patch) -> None:
    """The device leaves out one row of a write."""

    def put(real: Any, field: PagedField, rows: Any, places: SlotIndex, stored: torch.Tensor) -> None:
        real(field, rows, SlotIndex(places.slots[1:]), stored[1:])

    _write_once(patch, put)


def wrong_slot(core: EngineCore, patch: Patch) -> None:
    """A step is planned with one slot of the padding page."""

    def slots_in(real: Any, tables: RunningTables, *given: Any) -> list[Any]:
        found: list[Any] = real(tables, *given)
        found[0][0] = 1
        return found

    _once(patch, RunningTables, "slots_in", slots_in)


def wrong_slot_on_the_device(core: EngineCore, patch: Patch) -> None:
    """The device writes one row to another slot than planned."""

    def put(real: Any, field: PagedField, rows: Any, places: SlotIndex, stored: torch.Tensor) -> None:
        slots = places.slots.clone()
        slots[0] = 1
        real(field, rows, SlotIndex(slots), stored)

    _write_once(patch, put)


def _write_once(patch: Patch, put: Callable[..., Any]) -> None:
    """Replace the next write. Layers go one by one: in a call of all of them there is no write to replace."""
    patch.setattr(NativeDecoder, "run", lambda *given, **others: False)
    _once(patch, PagedField, "_put", put)


def _once(patch: Patch, owner: type, name: str, wrong: Callable[..., Any]) -> None:
    """Replace a method for its next call."""
    real = getattr(owner, name)

    def method(self: Any, *given: Any) -> Any:
        patch.setattr(owner, name, real)
        return wrong(real, self, *given)

    patch.setattr(owner, name, method)


FAULTS = (bit_flip, neighbour_write, stale_reuse, skipped_write, wrong_slot, wrong_slot_on_the_device)
