"""ChoosingMover: a virtual mover whose lanes end in any order, as those of a real machine do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from quire.tiers.transfer import Transfer
from quire.tiers.virtual_mover import VirtualMover, _Queued


class ChoosingMover(VirtualMover):
    """With `choose`, which returns a number below its argument, due transfers end in the order that it picks, and some
    only at a later call. One queue keeps its order."""

    def __init__(self, *args: Any, choose: Callable[[int], int] | None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.choose = choose

    def _next(self, due: Sequence[deque[_Queued]]) -> deque[_Queued] | None:
        if self.choose is None:
            return super()._next(due)
        picked = self.choose(len(due) + 1)
        return due[picked] if picked < len(due) else None

    def _expire(self, transfer: Transfer) -> None:
        """A transfer that ended in time, and was not picked yet, does not expire."""
        queue = self._queues[transfer.lane.queue]
        queued = next(queued for queued in queue if queued.transfer is transfer)
        if not queued.begun or queued.end > transfer.expires_at:
            super()._expire(transfer)
