"""Mover: carries pages between device, host, store and peers while the engine computes, and says when they arrive."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Final, Protocol

from quire.errors import QuireError
from quire.tiers.carrier import PIECE_BYTES, Carrier
from quire.tiers.in_flight import InFlight
from quire.tiers.rate import Rate
from quire.tiers.store import Store
from quire.tiers.transfer import LANES, THREADS, Copies, Endpoint, Lane, Transfer

CLOSED: Final = "the mover was closed before it came to this."
"""The error of a transfer that was still waiting."""

CLOSE_S: Final = 3.0
"""How long `close` waits for calls that are under way. A store that hangs would keep the process for ever."""

LEFT: Final = "the mover was closed, and this did not end."
"""The error of a transfer that hung."""


class Mover(Protocol):
    """Takes transfers, and returns each from `finished` exactly once, when nothing touches its frames any more.

    One thread, the engine's, submits and collects. A mover keeps no frame and no page: the submitter holds what a
    transfer names. A transfer whose deadline has passed has failed at once; it comes back when its call has returned.
    """

    def submit(self, transfer: Transfer) -> bool:
        """Take a transfer. False: its lane is full, or the mover is closed; nothing was taken."""

    def finished(self) -> list[Transfer]:
        """The transfers that ended since the last call, in the order in which they ended."""

    def wait(self, seconds: float) -> bool:
        """Wait until a transfer has ended that `finished` did not return yet, or one has become `checked` or `expired`
        since the last wait; at most so long. Returns whether one has."""

    def complete(self, transfer: Transfer) -> None:
        """Wait until a transfer that was taken has ended, however long that takes; `finished` still returns it."""

    def in_flight(self, lane: Lane) -> int:
        """Bytes that were taken and not returned by `finished` yet."""

    def rate(self, lane: Lane) -> Rate:
        """The measured bytes per second of a lane, and the seconds before its first byte, as they are now."""

    @property
    def idle(self) -> bool:
        """Whether `finished` has returned everything that was taken."""

    def close(self) -> tuple[Transfer, ...]:
        """What is under way ends; what waits fails; `finished` returns both. May be called twice. To have everything
        done, collect until `idle` before.

        Returns the transfers that did not end in time. They have failed, and a thread may still be at them: the store
        and the memory of the copies must stay.
        """


class ThreadMover(Mover):
    """Does transfers on threads, of which each endpoint beside the host has its own (`_Channel`).

    A call that hangs therefore holds a thread of its endpoint only. The store and the peer stay the caller's, who
    closes them after the mover. `threads` and `most_bytes` replace values of the tables.
    """

    def __init__(
        self,
        copies: Copies,
        store: Store | None,
        *,
        peer: Store | None = None,
        lanes: Sequence[Lane] = LANES,
        threads: Mapping[Endpoint, int] = THREADS,
        most_bytes: Mapping[Lane, int] | None = None,
        piece_bytes: int = PIECE_BYTES,
        close_seconds: float | None = None,
    ) -> None:
        self._close_seconds = CLOSE_S if close_seconds is None else close_seconds
        self._carrier = Carrier(copies, store, peer, piece_bytes=piece_bytes)
        # Everything below is read and written under the lock.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # something to do, or closing
        self._news = threading.Condition(self._lock)  # something for the submitter
        self._in_flight = InFlight(most_bytes or {})
        self._rates = {lane: Rate() for lane in lanes}
        self._channels = {lane.far: _Channel(lane, {**THREADS, **threads}[lane.far]) for lane in lanes}
        self._ended: list[Transfer] = []
        self._has_news = False  # a transfer is checked or has expired
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(channel,), name=f"quire-mover-{far.value}-{number}", daemon=True)
            for far, channel in self._channels.items()
            for number in range(channel.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    # -- the submitter's side

    def submit(self, transfer: Transfer) -> bool:
        with self._lock:
            if self._closing or not self._in_flight.take(transfer, time.monotonic()):
                return False
            self._channels[transfer.lane.far].add(_Task(transfer, self._carrier.carry(transfer)))
            self._work.notify_all()
        return True

    def finished(self) -> list[Transfer]:
        with self._lock:
            self._expire()
            ended, self._ended = self._ended, []
            for transfer in ended:
                self._in_flight.give_back(transfer)
        return ended

    def wait(self, seconds: float) -> bool:
        with self._lock:
            found = self._wait_until(lambda: bool(self._ended) or self._has_news, seconds)
            self._has_news = False
        return found

    def complete(self, transfer: Transfer) -> None:
        with self._lock:
            self._wait_until(lambda: transfer.done, math.inf)

    def in_flight(self, lane: Lane) -> int:
        with self._lock:
            return self._in_flight.num_bytes(lane)

    def rate(self, lane: Lane) -> Rate:
        with self._lock:
            return copy(self._rates[lane])

    @property
    def idle(self) -> bool:
        with self._lock:
            return not self._in_flight.num_transfers

    def close(self) -> tuple[Transfer, ...]:
        with self._lock:
            self._closing = True
            for channel in self._channels.values():
                for task in channel.running:
                    task.transfer.stop()
            self._work.notify_all()
        until = time.monotonic() + self._close_seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            left = [task for channel in self._channels.values() for task in channel.running]
            for task in left:
                self._end(task, LEFT)
            for channel in self._channels.values():
                for task in channel.waiting():
                    channel.withdraw(task)
                    self._end(task, CLOSED)
        return tuple(task.transfer for task in left)

    def _wait_until(self, is_so: Callable[[], bool], seconds: float) -> bool:
        """Wait under the lock, and watch the deadlines meanwhile."""
        until = time.monotonic() + seconds
        while not is_so():
            now = time.monotonic()
            self._expire()
            if is_so():
                break
            if now >= until:
                return False
            pause = min(until, self._in_flight.next_deadline) - now
            self._news.wait(min(max(pause, 0.0), threading.TIMEOUT_MAX))
        return True

    def _expire(self) -> None:
        """Under the lock: a transfer that waits ends at its deadline, and one under way when its call returns."""
        for transfer in self._in_flight.overdue(time.monotonic()):
            transfer.expire()
            self._has_news = True
            channel = self._channels[transfer.lane.far]
            for task in channel.waiting():
                if task.transfer is transfer:
                    channel.withdraw(task)
                    self._end(task)

    # -- the threads' side

    def _run(self, channel: _Channel) -> None:
        while (task := self._next(channel)) is not None:
            self._advance(task)
            while not task.over and not self._pauses(channel, task):
                self._advance(task)
            with self._lock:
                channel.running.remove(task)
                if task.over or task.transfer.expired:
                    self._end(task, task.error)
                else:
                    channel.put_back(task)
                self._work.notify_all()

    def _next(self, channel: _Channel) -> _Task | None:
        with self._lock:
            while not self._closing:
                if (task := channel.take()) is not None:
                    return task
                self._work.wait()
        return None

    def _pauses(self, channel: _Channel, task: _Task) -> bool:
        with self._lock:
            return task.transfer.expired or channel.pauses(task, closing=self._closing)

    def _advance(self, task: _Task) -> None:
        began = time.perf_counter()
        task.advance()
        task.seconds += time.perf_counter() - began
        if task.transfer.checked and not task.over and not task.told:
            task.told = True
            with self._lock:
                self._has_news = True
                self._news.notify_all()

    def _end(self, task: _Task, error: str = "") -> None:
        """Under the lock: whoever sees that it is done finds it among those that have ended."""
        transfer = task.transfer
        if transfer.done:
            return  # it was given up
        transfer.seconds = task.seconds
        transfer.end(error)
        # Where the store had most of it already, time went by with little to show for it.
        if not transfer.error and transfer.moved_bytes * 2 >= transfer.num_bytes:
            self._rates[transfer.lane].add(transfer.moved_bytes, transfer.seconds)
        self._ended.append(transfer)
        self._news.notify_all()


class _Channel:
    """The tasks between the host and one other endpoint, and the order in which its threads take them.

    Inward tasks have requests that wait for them. With the device, they go first and are not interrupted; outward ones
    pause after each piece and keep their place. With a store or a peer, which may be slow, neither side may keep the
    other waiting: while nothing goes outward, both sides take turns; where there are two threads, one is left to inward
    tasks; and an inward task pauses after each piece if others wait, and goes behind them. Outward tasks begin in the
    order of submission, and one whose lane is `alone` waits for those before it.
    """

    def __init__(self, lane: Lane, num_threads: int) -> None:
        self.num_threads = max(1, num_threads)
        self.running: list[_Task] = []
        self._is_remote = lane.is_remote
        self._inward: deque[_Task] = deque()
        self._outward: deque[_Task] = deque()
        self._went_outward = False  # the task that was taken last

    def add(self, task: _Task) -> None:
        """Behind those that wait."""
        self._side(task).append(task)

    def put_back(self, task: _Task) -> None:
        """A task that has paused."""
        if self._is_remote:
            self._side(task).append(task)
        else:
            self._side(task).appendleft(task)

    def take(self) -> _Task | None:
        """The task that runs next; None: none may run now."""
        may_go = self._may_go_outward()
        if not self._inward and not may_go:
            return None
        is_turn = self._is_remote and not self._went_outward and not self._running_outward()
        self._went_outward = may_go and (not self._inward or is_turn)
        task = (self._outward if self._went_outward else self._inward).popleft()
        self.running.append(task)
        return task

    def pauses(self, task: _Task, *, closing: bool) -> bool:
        """Whether a task that has done a piece lets others go before it. When the mover closes, what is under way with
        a store is stopped and ends, and what is under way with the device waits and fails."""
        if not self._is_remote:
            return not task.transfer.lane.is_inward
        others_wait = bool(self._inward) or self._may_go_outward()
        return task.transfer.lane.is_inward and others_wait and not closing

    def waiting(self) -> list[_Task]:
        """The tasks that no thread is at."""
        return [*self._inward, *self._outward]

    def withdraw(self, task: _Task) -> None:
        """A task that waits is not done any more."""
        self._side(task).remove(task)

    def _side(self, task: _Task) -> deque[_Task]:
        return self._inward if task.transfer.lane.is_inward else self._outward

    def _running_outward(self) -> list[Lane]:
        return [task.transfer.lane for task in self.running if not task.transfer.lane.is_inward]

    def _may_go_outward(self) -> bool:
        running = self._running_outward()
        if not self._outward or len(running) >= max(1, self.num_threads - 1):
            return False
        return not running or not any(lane.alone for lane in (*running, self._outward[0].transfer.lane))


class Job:
    """A transfer and the pieces of it that are left to do."""

    def __init__(self, transfer: Transfer, pieces: Iterator[None]) -> None:
        self.transfer = transfer
        self.over = False  # no piece is left
        self.error = ""
        self._pieces = pieces

    def advance(self) -> None:
        """Do the next piece. An error is the last one."""
        try:
            next(self._pieces)
        except StopIteration:
            self.over = True
        except Exception as raised:
            self.over = True
            self.error = str(raised) if isinstance(raised, QuireError) else f"{type(raised).__name__}: {raised}"


class _Task(Job):
    """A job of threads."""

    seconds = 0.0  # that its pieces took
    told = False  # the submitter knows that it is checked
