"""PoolPages: the bytes of the pages of one host pool of SGLang.

    in place   the pieces that the pool names for I/O without copies, as views of its memory
    flat       a copy of the page, for pools that name no pieces, or so small ones that one copy costs less
    anchor     one byte that says the page exists, for pools without bytes

Pieces in one tensor are in the order of their addresses, which is the order of a flat page. So a page has the same
bytes whether SGLang asks for it flat (its interface v0) or in place (v1, v2).
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.errors import RefusedCombination

Payload = tuple[memoryview, ...]
_SAME_BYTES = {"page_first_direct": "layer_first"}
"""Layouts whose pages have the bytes of another one in the pools of `_BY_LAYER`: first by layer, then by row."""
_BY_LAYER = ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")
_LEAST_PIECE = 8192


class _PagePiece(NamedTuple):
    """One piece of every page: `memory` from the first page's to the last one's, `step` bytes apart."""

    memory: memoryview
    step: int
    num_bytes: int


class PoolPages:
    """Pages by the index of their first row. The pool's memory must outlive it.

    `facts` are those on which a page's bytes depend. `has_shards`: each rank of tensor parallelism has its own pages,
    even in a model whose keys and values are the same on all ranks; by heads if it `has_heads`. A page has `flat_bytes`
    in SGLang, and `payload_bytes` in a record.
    """

    def __init__(self, pool: Any, name: str) -> None:
        """Raises RefusedCombination for a pool whose pages cannot be read or written."""
        kind, layout = type(pool).__name__, str(pool.layout)
        self.pool = pool
        self.page_size = int(getattr(pool, "page_size", 1) or 1)
        try:
            self._pieces = _pieces_of(pool, self.page_size)
            if kind in _BY_LAYER and layout == "layer_first":
                self._pieces = tuple(piece for piece in self._pieces if piece.num_bytes >= _LEAST_PIECE)
            flat = torch.empty(0) if self._pieces else pool.get_dummy_flat_data_page()
        except (ValueError, NotImplementedError, AttributeError) as error:
            raise RefusedCombination(
                f"the pages of SGLang's pool '{name}' ({kind}, {layout}) cannot be stored: {error}.",
                fix="use another --hicache-mem-layout.",
            ) from error
        self._flat_dtype = flat.dtype if flat.nbytes else None
        self._anchor = (memoryview(bytearray(1)),)
        self.flat_bytes = sum(piece.num_bytes for piece in self._pieces) or flat.nbytes
        self.payload_bytes = self.flat_bytes or 1
        dtypes = dict.fromkeys(str(getattr(pool, at, "")) for at in ("dtype", "temporal_dtype", "conv_dtype"))
        self.has_heads = hasattr(pool, "head_num")
        self.has_shards = self.has_heads or hasattr(pool, "temporal_buffer")
        self.facts: dict[str, str | int] = {
            "pool": name,
            "kind": kind,
            "dtype": " ".join(dtypes).strip(),
            "page_size": self.page_size,
            "page_bytes": self.payload_bytes,
            "layout": _SAME_BYTES.get(layout, layout) if kind in _BY_LAYER else layout,
            "layers": f"{getattr(pool, 'start_layer', 0)}-{getattr(pool, 'end_layer', 0)}",
            "format": str(getattr(pool, "storage_format_tag", None) or ""),
        }

    def outgoing(self, row: int) -> Payload:
        """The bytes of the page at `row`."""
        if self._flat_dtype is not None:
            return self.flat(self.pool.get_data_page(row, flat=True))
        return self._in_place(row)

    def incoming(self, row: int) -> Payload:
        """Where the bytes of the page at `row` arrive; `arrived` follows."""
        if self._flat_dtype is not None:
            return (memoryview(bytearray(self.payload_bytes)),)
        return self._in_place(row)

    def arrived(self, row: int, payload: Payload) -> None:
        """The bytes of the page at `row` are complete."""
        if self._flat_dtype is not None:
            self.pool.set_from_flat_data_page(row, torch.frombuffer(payload[0], dtype=self._flat_dtype))

    def flat(self, page: torch.Tensor) -> Payload:
        """The bytes of a contiguous tensor in host memory that is a page, whatever its element type."""
        return (page.reshape(-1).view(torch.uint8).numpy().data,) if self.flat_bytes else self._anchor

    def _in_place(self, row: int) -> Payload:
        size = self.page_size
        found = [(row * step // size, num_bytes, memory) for memory, step, num_bytes in self._pieces]
        return tuple([memory[at : at + num_bytes] for at, num_bytes, memory in found]) or self._anchor


def _pieces_of(pool: Any, page_size: int) -> tuple[_PagePiece, ...]:
    """The pieces of the pool's pages; none where it names none. Raises ValueError if pages are not evenly spaced."""
    if getattr(pool, "shared_allocation_domain", None) is not None:
        raise ValueError("its memory moves")
    if getattr(pool, "logical_size", pool.size) != pool.size:
        raise ValueError("ranks have parts of its pages")
    last = max(0, int(pool.size) // page_size - 1)
    try:
        metas = [pool.get_page_buffer_meta(np.arange(page_size) + page * page_size) for page in (0, min(1, last), last)]
    except (ValueError, NotImplementedError):
        return ()
    if not all(metas):
        return ()
    (first, sizes), (second, _), (end, _) = metas
    sizes = [sizes] * len(first) if isinstance(sizes, int) else sizes
    steps = [after - before for before, after in zip(first, second, strict=True)]
    if end != [at + step * last for at, step in zip(first, steps, strict=True)]:
        raise ValueError("its pages are not evenly spaced")
    order = list(range(len(first)))
    memory = pool.kv_buffer
    if isinstance(memory, torch.Tensor) and all(0 <= at - memory.data_ptr() < memory.nbytes for at in first):
        order.sort(key=first.__getitem__)  # pieces in several tensors have the order in which SGLang names them
    memories = [(ctypes.c_ubyte * (steps[at] * last + sizes[at])).from_address(first[at]) for at in order]
    return tuple(
        _PagePiece(memoryview(memory).cast("B"), steps[at], sizes[at])
        for memory, at in zip(memories, order, strict=True)
    )
