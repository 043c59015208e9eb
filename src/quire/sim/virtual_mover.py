"""VirtualMover: moves real bytes in time that is only counted, one thing after another, the same way every time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from quire.tiers.executor import TransferExecutor
from quire.tiers.mover import CLOSED, Mover
from quire.tiers.store import Store
from quire.tiers.transfer import LANES, Copies, Endpoint, Lane, Transfer


class VirtualMover(Mover):
    """For simulation and fuzzing: each lane carries one transfer after the other, at its bandwidth and latency.

    `seconds` tells the time. Bytes move when a transfer ends, as late as a real device may, and not before a step waits
    for a layer; only the records of a load are checked when it begins. A lane without a bandwidth takes no time for
    bytes, one without a latency starts at once; one whose latency is infinite hangs. Lanes that write the same store or
    peer are one queue.

    The mover does not move the time, unless `pass_until(time)` is given: it is called where the mover waits, and then
    it is that time, or later. Without it, what has to be complete at once ends early, and its lane is busy as long all
    the same.

    With `choose`, which returns a number below the one it is given, transfers that are due end in an order that it
    picks, and some only at a later call, as between lanes of a real machine; one queue keeps its order.
    """

    def __init__(
        self,
        copies: Copies,
        store: Store | None,
        *,
        seconds: Callable[[], float],
        bandwidths: Mapping[Lane, float],
        latency: Mapping[Lane, float],
        peer: Store | None = None,
        lanes: Sequence[Lane] = LANES,
        choose: Callable[[int], int] | None = None,
        most_bytes: Mapping[Lane, int] | None = None,
        pass_until: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(lanes, most_bytes)
        self._executor = TransferExecutor(copies, store, peer)
        self._seconds = seconds
        self._pass_until = pass_until
        self._bandwidths = bandwidths
        self._latency = latency
        self._choose = choose
        self._queues: dict[Lane | Endpoint, deque[_Passage]] = {lane.queue: deque() for lane in lanes}
        self._closed = False

    def submit(self, transfer: Transfer) -> bool:
        now = self._seconds()
        if self._closed or not self._take(transfer, now):
            return False
        queue = self._queues[transfer.lane.queue]
        transfer.pieces = self._executor.run(transfer)
        queue.append(_Passage(transfer, now))
        if len(queue) == 1:
            self._begin(queue[0])
        return True

    def finished(self) -> list[Transfer]:
        now = self._seconds()
        while due := [queue for queue in self._queues.values() if queue and self._end_of(queue[0], now) <= now]:
            if self._choose is None:
                queue = min(due, key=lambda queue: queue[0].end)
            else:
                picked = self._choose(len(due) + 1)
                if picked == len(due):
                    break
                queue = due[picked]
            self._finish(queue)
        for transfer in self._overdue(now):
            self._expire(transfer)
        return self._hand_back()

    def wait(self, seconds: float) -> bool:
        """Whether there is news by now. Without `pass_until`, a caller that has nothing else to do moves the time to
        `next_end`."""
        next_end, until = self.next_end, self._seconds() + seconds
        if self._pass_until is not None and not self._has_news and not self._ended:
            self._pass_until(until if next_end is None else min(next_end, until))
        is_due = next_end is not None and next_end <= self._seconds()
        found = self._has_news or bool(self._ended) or is_due
        self._has_news = False
        return found

    def complete(self, transfer: Transfer) -> None:
        """Those before it in its queue end too."""
        if not transfer.done and self._pass_until is not None:
            self._pass_until(self.end_of(transfer))
        while not transfer.done:
            self._finish(self._queues[transfer.lane.queue])

    @property
    def next_end(self) -> float | None:
        """When the next transfer ends or expires. None: nothing is under way, or all of it hangs."""
        now = self._seconds()
        first = min((self._end_of(queue[0], now) for queue in self._queues.values() if queue), default=math.inf)
        if self._next_deadline < first:
            passages = [passage for queue in self._queues.values() for passage in queue]
            deadlines = [passage.transfer.expires_at for passage in passages if not passage.transfer.expired]
            first = min(first, *deadlines, math.inf)
        return first if first < math.inf else None

    def end_of(self, transfer: Transfer) -> float:
        """When a transfer that has not ended will, as things are now, if those before it do not expire."""
        end = 0.0
        for passage in self._queues[transfer.lane.queue]:
            began = max(end, passage.submitted)
            end = passage.end if passage.begun else began + self._duration(passage.transfer)
            if passage.transfer is transfer:
                return end
        raise KeyError(transfer)

    def close(self) -> tuple[Transfer, ...]:
        self._closed = True
        for queue in self._queues.values():
            for passage in queue:
                passage.transfer.end(CLOSED)
                self._ended.append(passage.transfer)
            queue.clear()
        return ()

    def _duration(self, transfer: Transfer) -> float:
        lane = transfer.lane
        return self._latency.get(lane, 0.0) + transfer.num_bytes / self._bandwidths.get(lane, math.inf)

    def _begin(self, passage: _Passage, after: float = 0.0) -> None:
        transfer = passage.transfer
        passage.begun = True
        passage.began = max(after, passage.submitted)
        passage.end = passage.began + self._duration(transfer)
        if transfer.lane.is_remote or not transfer.lane.is_inward:
            return
        transfer.is_driven = True
        if transfer.advance():
            self._has_news = True
        else:
            passage.end = passage.began + self._latency.get(transfer.lane, 0.0)

    def _end_of(self, passage: _Passage, now: float) -> float:
        """When it ends, which is now for one that was stopped: it then keeps what would have come by now."""
        transfer = passage.transfer
        may_stop = transfer.stopping and not transfer.expired and not passage.stopped
        if may_stop and transfer.lane.is_remote and transfer.lane.carries:
            passage.stopped = True
            transfer.kept_pages = sum(map(len, transfer.units))
            if now < passage.end:
                share = max(0.0, now - passage.began) / (passage.end - passage.began)
                transfer.kept_pages = int(share * max(map(len, transfer.units), default=0))
                passage.end = max(passage.began, now)
        return passage.end

    def _expire(self, transfer: Transfer) -> None:
        """A transfer whose deadline has passed ends if it waits. One that has begun goes on, and may use its frames,
        until its time is over."""
        queue = self._queues[transfer.lane.queue]
        passage = next(passage for passage in queue if passage.transfer is transfer)
        if passage.begun and passage.end <= transfer.expires_at:
            return  # it has ended in time, which `choose` does not show yet
        self._has_news = True
        transfer.expire()
        if passage.begun:
            transfer.kept_pages = sum(map(len, transfer.units))
        else:
            queue.remove(passage)
            self._end(passage)

    def _finish(self, queue: deque[_Passage]) -> None:
        passage = queue[0]
        if passage.end > passage.transfer.expires_at and not passage.transfer.expired:
            self._expire(passage.transfer)
        while not passage.transfer.over:
            passage.transfer.advance()
        queue.popleft()
        passage.transfer.seconds = passage.end - passage.began
        self._end(passage)
        while queue and max(passage.end, queue[0].submitted) >= queue[0].transfer.expires_at:
            self._expire(queue[0].transfer)
        if queue:
            self._begin(queue[0], passage.end)

    def _end(self, passage: _Passage) -> None:
        passage.transfer.end()
        self._ended.append(passage.transfer)


class _Passage:
    """A transfer in its queue: since when, and until when."""

    def __init__(self, transfer: Transfer, submitted: float) -> None:
        self.transfer = transfer
        self.submitted = self.began = self.end = submitted
        self.begun = self.stopped = False
