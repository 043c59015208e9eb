"""VirtualMover: a mover on a virtual clock, for simulation and fuzzing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from quire.tiers.executor import TransferExecutor
from quire.tiers.mover import CLOSED, Mover
from quire.tiers.store import Store
from quire.tiers.transfer import LANES, Copies, Endpoint, Lane, Transfer


class VirtualMover(Mover):
    """Each lane runs one transfer after the other, at its bandwidth and latency.

    `seconds` is the clock. Bytes move when a transfer ends, as late as on a real device, or when a step waits. When a
    load begins, only its records are checked. A lane without a bandwidth needs no time for bytes, one without a latency
    starts at once; one with an infinite latency hangs. Lanes that write the same store or peer are one queue.

    `pass_until(time)`, if given, advances the clock to that time or later; the mover calls it to wait. Without it, a
    transfer that must be complete at once ends early, but its lane stays busy for the full time.
    """

    def __init__(
        self,
        copies: Copies,
        store: Store | None,
        *,
        seconds: Callable[[], float],
        bandwidths: Mapping[Lane, float],
        latency: Mapping[Lane, float],
        lanes: Sequence[Lane] = LANES,
        most_bytes: Mapping[Lane, int] | None = None,
        pass_until: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(lanes, most_bytes)
        self._executor = TransferExecutor(copies, store)
        self._seconds = seconds
        self._pass_until = pass_until
        self._bandwidths = bandwidths
        self._latency = latency
        self._queues: dict[Lane | Endpoint, deque[_Queued]] = {lane.queue: deque() for lane in lanes}
        self._closed = False

    def submit(self, transfer: Transfer) -> bool:
        now = self._seconds()
        if self._closed or not self._take(transfer, now):
            return False
        queue = self._queues[transfer.lane.queue]
        transfer.pieces = self._executor.run(transfer)
        queue.append(_Queued(transfer, now))
        if len(queue) == 1:
            self._begin(queue[0])
        return True

    def finished(self) -> list[Transfer]:
        now = self._seconds()
        while due := [queue for queue in self._queues.values() if queue and self._end_of(queue[0], now) <= now]:
            queue = self._next(due)
            if queue is None:
                break
            self._finish(queue)
        for transfer in self._overdue(now):
            self._expire(transfer)
        return self._hand_back()

    def _next(self, due: Sequence[deque[_Queued]]) -> deque[_Queued] | None:
        """The queue whose first transfer ends next, if one may."""
        return min(due, key=lambda queue: queue[0].end)

    def wait(self, seconds: float) -> bool:
        """Without `pass_until`, a caller without other work advances the clock to `next_end`."""
        next_end, until = self.next_end, self._seconds() + seconds
        if self._pass_until is not None and not self._has_news and not self._ended:
            self._pass_until(until if next_end is None else min(next_end, until))
        is_due = next_end is not None and next_end <= self._seconds()
        found = self._has_news or bool(self._ended) or is_due
        self._has_news = False
        return found

    def complete(self, transfer: Transfer) -> None:
        """Transfers before it in its queue end too."""
        if not transfer.done and self._pass_until is not None:
            self._pass_until(self.end_of(transfer))
        while not transfer.done:
            self._finish(self._queues[transfer.lane.queue])

    @property
    def next_end(self) -> float | None:
        """When the next transfer ends or expires. None: none is in flight, or all hang."""
        now = self._seconds()
        first = min((self._end_of(queue[0], now) for queue in self._queues.values() if queue), default=math.inf)
        if self._next_deadline < first:
            transfers = [queued.transfer for queue in self._queues.values() for queued in queue]
            deadlines = [transfer.expires_at for transfer in transfers if not transfer.expired]
            first = min(first, *deadlines, math.inf)
        return first if first < math.inf else None

    def end_of(self, transfer: Transfer) -> float:
        """When a transfer in flight will end, if those before it do not expire."""
        end = 0.0
        for queued in self._queues[transfer.lane.queue]:
            began = max(end, queued.submitted)
            end = queued.end if queued.begun else began + self._duration(queued.transfer)
            if queued.transfer is transfer:
                return end
        raise KeyError(transfer)

    def close(self) -> tuple[Transfer, ...]:
        self._closed = True
        for queue in self._queues.values():
            for queued in queue:
                queued.transfer.end(CLOSED)
                self._ended.append(queued.transfer)
            queue.clear()
        return ()

    def _duration(self, transfer: Transfer) -> float:
        lane = transfer.lane
        return self._latency.get(lane, 0.0) + transfer.num_bytes / self._bandwidths.get(lane, math.inf)

    def _begin(self, queued: _Queued, after: float = 0.0) -> None:
        transfer = queued.transfer
        queued.begun = True
        queued.began = max(after, queued.submitted)
        queued.end = queued.began + self._duration(transfer)
        if transfer.lane.is_remote or not transfer.lane.is_inward:
            return
        transfer.is_driven = True
        if transfer.advance():
            self._has_news = True
        else:
            queued.end = queued.began + self._latency.get(transfer.lane, 0.0)

    def _end_of(self, queued: _Queued, now: float) -> float:
        """When it ends. That is now for a stopped one, which keeps the pages that would have arrived by now."""
        transfer = queued.transfer
        may_stop = transfer.stopping and not transfer.expired and not queued.stopped
        if may_stop and transfer.lane.is_remote and transfer.lane.carries:
            queued.stopped = True
            transfer.kept_pages = sum(map(len, transfer.units))
            if now < queued.end:
                share = max(0.0, now - queued.began) / (queued.end - queued.began)
                transfer.kept_pages = int(share * max(map(len, transfer.units), default=0))
                queued.end = max(queued.began, now)
        return queued.end

    def _expire(self, transfer: Transfer) -> None:
        """A transfer past its deadline ends if it is in a queue. One that has begun uses its frames to its own end."""
        queue = self._queues[transfer.lane.queue]
        queued = next(queued for queued in queue if queued.transfer is transfer)
        self._has_news = True
        transfer.expire()
        if queued.begun:
            transfer.kept_pages = sum(map(len, transfer.units))
        else:
            queue.remove(queued)
            self._end(queued)

    def _finish(self, queue: deque[_Queued]) -> None:
        queued = queue[0]
        if queued.end > queued.transfer.expires_at and not queued.transfer.expired:
            self._expire(queued.transfer)
        while not queued.transfer.over:
            queued.transfer.advance()
        queue.popleft()
        queued.transfer.seconds = queued.end - queued.began
        self._end(queued)
        while queue and max(queued.end, queue[0].submitted) >= queue[0].transfer.expires_at:
            self._expire(queue[0].transfer)
        if queue:
            self._begin(queue[0], queued.end)

    def _end(self, queued: _Queued) -> None:
        queued.transfer.end()
        self._ended.append(queued.transfer)


class _Queued:
    """A transfer in its queue, with the times of its submission, begin and end."""

    def __init__(self, transfer: Transfer, submitted: float) -> None:
        self.transfer = transfer
        self.submitted = self.began = self.end = submitted
        self.begun = self.stopped = False
