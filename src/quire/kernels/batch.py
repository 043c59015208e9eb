"""PagedBatch: where the rows of one step come from and where their keys and values live. Host arrays, built once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.kernels.segments import Slots, StepPlan, flatten_ranges, plan_step
from quire.spec.ids import Ids

T = TypeVar("T")


class PagedBatch:
    """`R` sequences packed into one flat batch of `T` rows, for one step and one group. All layers share it.

    `query_starts` int32 `[R + 1]`: rows `query_starts[r]:query_starts[r + 1]` are the new tokens of sequence r.
    `context_lens` int32 `[R]`: tokens of sequence r once this step has written, its new tokens being the last of them.
    `frames` int32 `[R, max_pages]`: row r is the frame of each page, valid up to `ceil(context_lens[r] / page_size)`.
    `slots` int32 `[T]`: `frame * page_size + offset` that each row's key and value are written to.
    The arrays are not copied and must not change while the batch is in use.
    """

    __slots__ = ("_derived", "_plans", "_slots", "context_lens", "frames", "page_size", "query_starts", "slots")

    def __init__(self, *, query_starts: Ids, context_lens: Ids, frames: Ids, slots: Ids, page_size: int) -> None:
        assert page_size >= 1
        assert len(query_starts) == len(context_lens) + 1
        assert len(frames) == len(context_lens)
        assert len(slots) >= query_starts[-1]
        assert (np.diff(query_starts) <= context_lens).all(), "a sequence's new tokens are part of its context"
        self.query_starts = query_starts
        self.context_lens = context_lens
        self.frames = frames
        self.slots = slots
        self.page_size = page_size
        self._slots: Tensor | None = None
        self._plans: dict[tuple[int, bool], StepPlan] = {}
        self._derived: dict[object, Any] = {}

    @property
    def num_rows(self) -> int:
        """T: rows of the flat batch that belong to a sequence."""
        return int(self.query_starts[-1])

    def positions(self) -> Slots:
        """The position in its sequence of each of the T rows, int64."""
        stops = self.context_lens.astype(np.int64)
        return flatten_ranges(stops - np.diff(self.query_starts), stops)

    def slots_on(self, device: torch.device) -> Tensor:
        """`slots` as int64 `[T]` on `device`; copied there once per step."""
        if self._slots is None or self._slots.device != device:
            self._slots = torch.from_numpy(self.slots.astype(np.int64)).to(device, non_blocking=True)
        return self._slots

    def plan(self, window: int, device: torch.device, *, chunked: bool = False) -> StepPlan:
        """How to attend with `window` (0: everything). Built on first use, then shared by all layers of the step.

        `chunked`: rows read the keys of their own chunk of `window` tokens, instead of the last `window`.
        """
        if window and (not len(self.context_lens) or window >= int(self.context_lens.max())):
            window = 0
        chunked = chunked and window > 0
        found = self._plans.get((window, chunked))
        if found is None or found.device != device:
            found = plan_step(
                self.query_starts,
                self.context_lens,
                self.frames,
                self.page_size,
                window=window,
                chunked=chunked,
                device=device,
            )
            self._plans[window, chunked] = found
        return found

    def part(self, sequences: Slots) -> tuple[Slots, PagedBatch]:
        """The flat rows int64 of some sequences of this batch, and a batch of these rows and sequences alone."""
        starts, stops = self.query_starts[sequences].astype(np.int64), self.query_starts[sequences + 1].astype(np.int64)
        rows = flatten_ranges(starts, stops)
        batch = PagedBatch(
            query_starts=np.concatenate(([0], np.cumsum(stops - starts))).astype(np.int32),
            context_lens=self.context_lens[sequences],
            frames=self.frames[sequences],
            slots=self.slots[rows],
            page_size=self.page_size,
        )
        return rows, batch

    def derived(self, name: Hashable, build: Callable[[PagedBatch], T]) -> T:
        """What `build` makes of this batch; made on first use, then shared by all layers of the step."""
        if name not in self._derived:
            self._derived[name] = build(self)
        found: T = self._derived[name]
        return found
