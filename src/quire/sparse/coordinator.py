"""HiSparseCoordinator: the hot buffers on the device, filled from host memory in each layer of a step that decodes.

```
 host     record of a page: every token of the prefix, written in the step that computes it
 device   hot buffer of a cache row and layer:  0 1 2 ... buffer_size - 1 | newest
                                                LRU over positions          reserved
```
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.counters import counter, gauge
from quire.kernels.batch import PagedBatch
from quire.kernels.moves import TORCH, HostEntries, Moves
from quire.memory.pool import Pool
from quire.plan.budget import MemoryPlan
from quire.sparse.hot_slots import HotSlots
from quire.upload import to_device

Positions = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class SwapIn:
    """What the layers of one index read in one step, and the tokens that each of them copies first: from `sources`
    (frames and entries of the host's group) to slots `targets` of the hot pool, int64 `[misses]`."""

    slots: Tensor
    hidden: Tensor
    sources: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    targets: Tensor


@dataclass(frozen=True, kw_only=True)
class HiSparseCounters:
    """Counters and sizes of hot buffers. If `lossy`, outputs differ from those of full attention."""

    PREFIX: ClassVar = "hisparse_"
    hit_tokens: int = counter("Selected tokens that a hot buffer had, counted once for layers that read the same ones.")
    swapped_tokens: int = counter(
        "Selected tokens that were copied to a hot buffer from host memory, counted in the same way."
    )
    swapped_bytes: int = counter("Bytes that were copied from host memory to hot buffers, in all layers.")
    backed_up_tokens: int = counter(
        "Tokens of decoding requests that were written to host memory as they were computed."
    )
    lossy: bool = False
    device_buffer_size: int = gauge("Tokens of the hot buffer of a request.")
    host_bytes: int = gauge("Bytes of latents, or of keys and values, in host memory.")
    hot_bytes: int = gauge("Bytes of all hot buffers on the device.")


class HiSparseCoordinator:
    """The hot buffers of all cache rows. `hosted` has the latents of all pages, and refers to this.

    Each buffer belongs to the request that `admit` has seen last in its row. Its tokens never differ from those on the
    host, so that nothing is written back. Bookkeeping is done once per index and step; layers that share an index copy
    the same tokens, each its own.
    """

    def __init__(self, plan: MemoryPlan, hosted: Pool, device: torch.device) -> None:
        assert plan.hot is not None
        self.hosted = hosted
        self.pool = Pool(hosted.layout, plan.device_frames_of(plan.hot.group), device=device, touched=False)
        hosted.buffers, hosted.buffer_bytes = self, self.pool.num_bytes
        self.buffer_size = plan.hot.buffer_size
        self.top_k = plan.hot.top_k
        self._row_slots = plan.hot_frames_per_row * plan.page_size
        self._first_slot = plan.page_size  # frame 0 is padding
        self._owners = plan.index_owners
        self.hot = HotSlots(len(self._owners), plan.max_requests, self.buffer_size, context=plan.context)
        self._serials = np.zeros(plan.max_requests, dtype=np.int64)
        self._backed_up = self._swapped_bytes = 0
        self.moves: Moves = TORCH
        """What copies from host memory; kernels need it to be pinned."""
        self._entries: dict[int, HostEntries] = {}

    def admit(self, rows: npt.NDArray[np.intp], serials: npt.NDArray[np.int64]) -> None:
        """A step computes these rows next. `serials` are the numbers of their requests: the buffer of a row whose
        request is another than before is cleared."""
        changed = rows[self._serials[rows] != serials]
        if len(changed):
            self.hot.clear(changed)
            self._serials[rows] = serials

    def newest(self, batch: PagedBatch) -> Tensor:
        """The slot in the hot pool of the newest token of each sequence of `batch`, int64, on its device."""
        return batch.derived("newest hot slots", lambda _: self._to_device(self._bases(batch) + self.buffer_size))

    def swap_in(self, ordinal: int, batch: PagedBatch, positions: Positions) -> SwapIn:
        """Make the tokens at `positions` `[sequences, n]` (-1 for none) of call `ordinal` readable in the
        hot pool, for sequences of `batch` with one new token each. The newest is written by the caller, also to host
        memory, before. Layers that share an index pass the positions of its owner."""
        index = bisect_right(self._owners, ordinal) - 1
        found = batch.derived(("hot slots", index), lambda _: self._plan(index, batch, positions))
        self._copy(ordinal, found)
        return found

    def counters(self) -> HiSparseCounters:
        """Counters and gauges now, without what the host holds."""
        return HiSparseCounters(
            hit_tokens=self.hot.hit_tokens,
            swapped_tokens=self.hot.swapped_tokens,
            swapped_bytes=self._swapped_bytes,
            backed_up_tokens=self._backed_up,
            device_buffer_size=self.buffer_size,
            hot_bytes=self.pool.num_bytes,
        )

    def _bases(self, batch: PagedBatch) -> npt.NDArray[np.int64]:
        """The first slot of the buffer of each sequence."""
        assert batch.ids is not None, "cache rows identify hot buffers"
        return batch.ids * self._row_slots + self._first_slot

    def _plan(self, index: int, batch: PagedBatch, positions: Positions) -> SwapIn:
        assert batch.ids is not None, "cache rows identify hot buffers"
        rows = batch.ids.astype(np.int32)
        newest = batch.context_lens.astype(np.int64) - 1
        found = self.hot.swap_in(index, rows, positions, newest)
        self._backed_up += len(rows) if index == 0 else 0
        bases = self._bases(batch)
        place = np.empty(int(rows.max()) + 1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        sequences = place[found.row]
        page, entry = np.divmod(found.position.astype(np.int64), batch.page_size)
        frames = batch.frames[sequences, page].astype(np.int64)
        hidden = positions < 0
        # Where no token is read, the newest is: other slots may have what a request before left, also NaN.
        slots = bases[:, None] + np.where(hidden, self.buffer_size, found.slots)
        return SwapIn(
            slots=self._to_device(slots),
            hidden=self._to_device(hidden),
            sources=(frames, entry),
            targets=self._to_device(bases[sequences] + found.slot),
        )

    def _copy(self, ordinal: int, swapped: SwapIn) -> None:
        """Copy what a layer lacks, as it is stored."""
        if not len(swapped.targets):
            return
        entries = self._entries_of(ordinal)
        self._swapped_bytes += len(swapped.targets) * sum(entries.entry_bytes)
        self.moves.swap_in(entries, *swapped.sources, swapped.targets)

    def _entries_of(self, ordinal: int) -> HostEntries:
        """Entries of a layer on both sides."""
        if ordinal not in self._entries:
            names = [field.name for field in self.pool.layout.fields if self.pool.has(field.name, ordinal)]
            parts = [(self.hosted.layer(name, ordinal), self.pool.layer(name, ordinal)) for name in names]
            self._entries[ordinal] = HostEntries(parts)
        return self._entries[ordinal]

    def _to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        return to_device(array, self.pool.device)


def hot_buffers_of(pools: Iterable[Pool]) -> HiSparseCoordinator | None:
    """What fills the hot buffers of the pool whose frames are in host memory; None without one."""
    return next((pool.buffers for pool in pools if pool.on_host), None)
