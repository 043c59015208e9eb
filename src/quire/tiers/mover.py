"""Mover: moves pages between device, host, store and peers while the engine computes."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from quire.tiers.break_even import Rate
from quire.tiers.executor import PIECE_BYTES, TransferExecutor
from quire.tiers.store import Store
from quire.tiers.transfer import LANES, Copies, Endpoint, Lane, Transfer

THREADS: Final[Mapping[Endpoint, int]] = {Endpoint.DEVICE: 1, Endpoint.STORE: 2, Endpoint.PEER: 2}
"""Threads for each endpoint except the host. An endpoint that hangs blocks only its own threads."""

CLOSED: Final = "the mover was closed before it came to this."  # why a waiting transfer failed
LEFT: Final = "the mover was closed, and this did not end."  # why a hanging transfer failed

CLOSE_S: Final = 3.0
"""How long `close` waits for calls in flight. A store that hangs would otherwise block the process forever."""

_MOST_TRANSFERS = 1024  # in flight on one lane; bytes do not bound transfers that have none


class Mover(ABC):
    """Takes transfers, and returns each from `finished` exactly once, when nothing uses its frames any more.

    One thread, the engine's, submits and collects, and it holds the frames that a transfer names. Each lane bounds the
    bytes in flight; `most_bytes` replaces the bounds of the table. A larger transfer is accepted if it is alone.
    """

    def __init__(self, lanes: Sequence[Lane], most_bytes: Mapping[Lane, int] | None) -> None:
        self._most_bytes = most_bytes or {}
        self.rates = {lane: Rate() for lane in lanes}  # measured; amounts are bytes
        self._bytes: Counter[Lane] = Counter()
        self._transfers: Counter[Lane] = Counter()
        self._watched: set[Transfer] = set()  # with a deadline that has not passed
        self._next_deadline = math.inf  # at the earliest; the transfer may have ended
        self._ended: list[Transfer] = []
        self._has_news = False  # a transfer became checked or expired

    @abstractmethod
    def submit(self, transfer: Transfer) -> bool:
        """Take a transfer. False: its lane is full, or the mover is closed."""

    @abstractmethod
    def finished(self) -> list[Transfer]:
        """The transfers that ended since the last call, in the order in which they ended."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Wait at most so long for a transfer that `finished` has not returned yet, or for one that became `checked` or
        `expired` since the last wait. Returns whether there is one."""

    @abstractmethod
    def complete(self, transfer: Transfer) -> None:
        """Wait without limit until a submitted transfer has ended; `finished` still returns it."""

    @abstractmethod
    def close(self) -> tuple[Transfer, ...]:
        """End the running transfers and fail the waiting ones; `finished` returns both. May be called twice. Returns
        those that did not end in time: they failed, but a thread may still use the store and the memory of copies."""

    def in_flight(self, lane: Lane) -> int:
        """Bytes submitted and not yet returned by `finished`."""
        return self._bytes[lane]

    @property
    def idle(self) -> bool:
        """Whether `finished` has returned every submitted transfer."""
        return not any(self._transfers.values())

    # -- for movers

    def _take(self, transfer: Transfer, now: float) -> bool:
        """Count a transfer as in flight; its deadline starts now. False: the lane is full."""
        lane = transfer.lane
        count, num_bytes = self._transfers[lane], self._bytes[lane] + transfer.num_bytes
        if count and (num_bytes > self._most_bytes.get(lane, lane.most_bytes) or count >= _MOST_TRANSFERS):
            return False
        self._transfers[lane], self._bytes[lane] = count + 1, num_bytes
        transfer.expires_at = now + transfer.limit_s
        if transfer.expires_at < math.inf:
            self._watched.add(transfer)
            self._next_deadline = min(self._next_deadline, transfer.expires_at)
        return True

    def _overdue(self, now: float) -> list[Transfer]:
        """Transfers in flight whose deadline has passed since the last call, the earliest first."""
        if now < self._next_deadline:
            return []
        passed = [transfer for transfer in self._watched if transfer.done or transfer.expires_at <= now]
        self._watched.difference_update(passed)
        self._next_deadline = min((transfer.expires_at for transfer in self._watched), default=math.inf)
        return sorted((transfer for transfer in passed if not transfer.done), key=lambda late: late.expires_at)

    def _hand_back(self) -> list[Transfer]:
        ended, self._ended = self._ended, []
        for transfer in ended:
            self._bytes[transfer.lane] -= transfer.num_bytes
            self._transfers[transfer.lane] -= 1
            self._watched.discard(transfer)
            assert self._transfers[transfer.lane] >= 0, "a transfer was handed back twice"
            # If the store had most of the bytes already, the time says nothing about the lane.
            if not transfer.error and transfer.moved_bytes * 2 >= transfer.num_bytes:
                self.rates[transfer.lane].add(transfer.moved_bytes, transfer.seconds)
        return ended


class ThreadMover(Mover):
    """Runs transfers on threads of each far endpoint (`_Channel`). The caller owns the store, and closes it after the
    mover. `threads` and `most_bytes` replace values of the tables."""

    def __init__(
        self,
        copies: Copies,
        store: Store | None,
        *,
        lanes: Sequence[Lane] = LANES,
        threads: Mapping[Endpoint, int] = THREADS,
        most_bytes: Mapping[Lane, int] | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        super().__init__(lanes, most_bytes)
        self._executor = TransferExecutor(copies, store, piece_bytes=piece_bytes)
        # The lock guards everything below, and `_ended` and `_watched` of the base class.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # something to do, or closing
        self._news = threading.Condition(self._lock)  # for the submitter
        self._channels = {lane.far: _Channel(lane.is_remote) for lane in lanes}
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(channel,), name=f"quire-mover-{far.value}-{number}", daemon=True)
            for far, channel in self._channels.items()
            for number in range(threads.get(far, THREADS[far]))
        ]
        for thread in self._threads:
            thread.start()

    # -- the submitter's side

    def submit(self, transfer: Transfer) -> bool:
        with self._lock:
            if self._closing or not self._take(transfer, time.monotonic()):
                return False
            transfer.pieces = self._executor.run(transfer)
            self._channels[transfer.lane.far].add(transfer)
            self._work.notify_all()
        return True

    def finished(self) -> list[Transfer]:
        with self._lock:
            self._expire()
            return self._hand_back()

    def wait(self, seconds: float) -> bool:
        with self._lock:
            found = self._wait_until(lambda: bool(self._ended) or self._has_news, seconds)
            self._has_news = False
        return found

    def complete(self, transfer: Transfer) -> None:
        with self._lock:
            self._wait_until(lambda: transfer.done, math.inf)

    def close(self) -> tuple[Transfer, ...]:
        channels = self._channels.values()
        with self._lock:
            self._closing = True
            for channel in channels:
                for transfer in channel.running:
                    transfer.stop()
            self._work.notify_all()
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            left = tuple(transfer for channel in channels for transfer in channel.running)
            for transfer in left:
                self._end(transfer, LEFT)
            for channel in channels:
                while channel.waiting:
                    self._end(channel.waiting.pop(0), CLOSED)
        return left

    def _wait_until(self, is_so: Callable[[], bool], seconds: float) -> bool:
        """Under the lock: wait, and check deadlines meanwhile."""
        until = time.monotonic() + seconds
        while not is_so():
            now = time.monotonic()
            self._expire()
            if is_so():
                break
            if now >= until:
                return False
            pause = min(until, self._next_deadline) - now
            self._news.wait(min(max(pause, 0.0), threading.TIMEOUT_MAX))
        return True

    def _expire(self) -> None:
        """Under the lock: a waiting transfer ends at its deadline, a running one when its call returns."""
        for transfer in self._overdue(time.monotonic()):
            transfer.expire()
            self._has_news = True
            waiting = self._channels[transfer.lane.far].waiting
            if transfer in waiting:
                waiting.remove(transfer)
                self._end(transfer)

    # -- the threads' side

    def _run(self, channel: _Channel) -> None:
        transfer, is_checked = None, False
        while True:
            with self._lock:
                transfer = self._next(channel, transfer, is_checked)
            if transfer is None:
                return
            is_checked = transfer.advance()

    def _next(self, channel: _Channel, transfer: Transfer | None, is_checked: bool) -> Transfer | None:
        """Under the lock: the next transfer for a thread that has done a piece of one. None: the mover closes."""
        if transfer is not None:
            if is_checked:
                self._has_news = True
                self._news.notify_all()
            is_over = transfer.over or transfer.expired
            if not is_over and not channel.pauses(transfer, closing=self._closing):
                return transfer
            channel.running.remove(transfer)
            if is_over:
                self._end(transfer)
            else:
                channel.add(transfer, paused=True)
            self._work.notify_all()
        while not self._closing:
            if (transfer := channel.take()) is not None:
                return transfer
            self._work.wait()
        return None

    def _end(self, transfer: Transfer, error: str = "") -> None:
        """Under the lock, so that a transfer that is done is in `_ended`."""
        if not transfer.done:  # `close` may have ended it
            transfer.end(error)
            self._ended.append(transfer)
            self._news.notify_all()


class _Channel:
    """The transfers between the host and one far endpoint, and their order.

    With the device, inward transfers go first and are not interrupted; outward ones pause after each piece and keep
    their place. With a remote, which may be slow, both directions take turns while nothing goes outward; an inward
    transfer pauses after each piece if others wait, and goes to the end. Outward ones run one at a time, in order."""

    def __init__(self, is_remote: bool) -> None:
        self.running: list[Transfer] = []
        self.waiting: list[Transfer] = []
        self._is_remote = is_remote
        self._went_outward = False  # the last one

    def add(self, transfer: Transfer, *, paused: bool = False) -> None:
        """Add a transfer at the end, or in front if it has `paused` and keeps its place."""
        self.waiting.insert(0 if paused and not self._is_remote else len(self.waiting), transfer)

    def take(self) -> Transfer | None:
        inward, outward = self._next(inward=True), self._next(inward=False)
        prefers_outward = inward is None or (self._is_remote and not self._went_outward)
        transfer = outward if outward is not None and prefers_outward else inward
        if transfer is not None:
            self._went_outward = transfer is outward
            self.waiting.remove(transfer)
            self.running.append(transfer)
        return transfer

    def pauses(self, transfer: Transfer, *, closing: bool) -> bool:
        """Whether a transfer pauses after a piece. During a close, remote ones continue; saves fail."""
        if not self._is_remote:
            return not transfer.lane.is_inward
        others_wait = any(self._next(inward=inward) is not None for inward in (True, False))
        return transfer.lane.is_inward and others_wait and not closing

    def _next(self, *, inward: bool) -> Transfer | None:
        """The first waiting transfer of a direction, if it may begin."""
        if not inward and not all(transfer.lane.is_inward for transfer in self.running):
            return None
        return next((transfer for transfer in self.waiting if transfer.lane.is_inward is inward), None)
