"""PagedBatch: where the rows of one step come from and where their keys and values live. Host arrays, built once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels.segments import StepPlan, plan_step
from quire.spec.ids import Ids


class PagedBatch:
    """`R` sequences packed into one flat batch of `T` rows, for one step and one group. All layers share it.

    `query_starts` int32 `[R + 1]`: rows `query_starts[r]:query_starts[r + 1]` are the new tokens of sequence r.
    `context_lens` int32 `[R]`: tokens of sequence r once this step has written, its new tokens being the last of them.
    `frames` int32 `[R, max_pages]`: row r is the frame of each page, valid up to `ceil(context_lens[r] / page_size)`.
    `slots` int32 `[T]`: `frame * page_size + offset` that each row's key and value are written to.
    The arrays are not copied and must not change while the batch is in use.
    """

    __slots__ = ("_plans", "_slots", "context_lens", "frames", "page_size", "query_starts", "slots")

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
        self._plans: dict[int, StepPlan] = {}

    @property
    def num_rows(self) -> int:
        """T: rows of the flat batch that belong to a sequence."""
        return int(self.query_starts[-1])

    def slots_on(self, device: torch.device) -> Tensor:
        """`slots` as int64 `[T]` on `device`; copied there once per step."""
        if self._slots is None or self._slots.device != device:
            self._slots = torch.from_numpy(self.slots.astype(np.int64)).to(device, non_blocking=True)
        return self._slots

    def plan(self, window: int, device: torch.device) -> StepPlan:
        """How to attend with `window` (0: everything). Built on first use, then shared by all layers of the step."""
        if window and (not len(self.context_lens) or window >= int(self.context_lens.max())):
            window = 0
        found = self._plans.get(window)
        if found is None or found.device != device:
            found = plan_step(
                self.query_starts, self.context_lens, self.frames, self.page_size, window=window, device=device
            )
            self._plans[window] = found
        return found
