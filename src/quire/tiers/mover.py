"""Mover: carries frames between device, host and storage while the engine computes, and says when it has."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from quire.errors import QuireError
from quire.tiers.carrier import PIECE_BYTES, Carrier
from quire.tiers.in_flight import MOST_BYTES, InFlight
from quire.tiers.moves import Copies, Link, Move
from quire.tiers.rate import Rate
from quire.tiers.store import Store

CLOSED: Final = "the mover was closed before it came to this."
"""Why a move failed that was still waiting."""

CLOSE_S: Final = 3.0
"""What closing waits for calls that are under way. A store that hangs would keep the process for ever."""

LEFT: Final = "the mover was closed, and this did not end."
"""Why a move failed that hung."""

_READS = (Link.LOOK, Link.FETCH)
_WRITES = (Link.ARCHIVE, Link.FORGET)


class Mover(Protocol):
    """Moves are submitted, and come back by `finished` when they have ended, every one exactly once.

    One thread, the engine's, submits and collects. A mover keeps no frame and no page: what a move names is held by
    whoever submitted it.
    """

    def submit(self, move: Move) -> bool:
        """Take a move. False: too much is under way on its link, or the mover is closed; nothing was taken."""

    def finished(self) -> list[Move]:
        """Those that ended since the last call, in the order in which they ended."""

    def wait(self, seconds: float) -> bool:
        """Wait until something has ended that `finished` did not return yet, or a LOAD has become `checked` since the
        last wait; at most so long. Returns whether something has."""

    def complete(self, move: Move) -> None:
        """Have a move that was taken ended before this returns, however long that takes; `finished` still returns
        it."""

    def in_flight(self, link: Link) -> int:
        """Bytes that were taken and not returned by `finished` yet."""

    def bandwidth(self, link: Link) -> float | None:
        """Measured bytes per second, an average that forgets, without the time to the first byte. None: not known."""

    def latency(self, link: Link) -> float | None:
        """Measured seconds to the first byte. None: not known."""

    @property
    def idle(self) -> bool:
        """Whether `finished` has returned all that was taken."""

    def close(self) -> tuple[Move, ...]:
        """What is under way ends; what waits fails; `finished` returns both. May be called twice. To have everything
        done, collect until `idle` before.

        Returns what did not come to its end in time. It has failed, and a thread may be at it still: then the store
        and what the copies are made in must stay.
        """


class ThreadMover(Mover):
    """Moves on threads of its own: one that copies between device and host, and some that wait for the store.

    Loads go before saves, of which one piece at most is in their way. Of the store's threads one is kept for reading
    where there are two, and they take turns, piece by piece; while none writes, reads and writes take turns, so that
    neither keeps the other from the store. Writes begin in the order in which they came, and to forget waits for the
    writes before it. The store stays the caller's, who closes it after the mover.
    """

    def __init__(
        self,
        copies: Copies,
        store: Store | None,
        *,
        storage_threads: int = 2,
        most_bytes: Mapping[Link, int] = MOST_BYTES,
        piece_bytes: int = PIECE_BYTES,
        close_seconds: float | None = None,
    ) -> None:
        self._close_seconds = CLOSE_S if close_seconds is None else close_seconds
        self._carrier = Carrier(copies, store, piece_bytes=piece_bytes)
        self._in_flight = InFlight(most_bytes)
        self._rates = {link: Rate() for link in Link}
        # Everything below is read and written under the lock.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # something to do, or closing
        self._news = threading.Condition(self._lock)  # something for the submitter
        self._loads: deque[_Task] = deque()
        self._saves: deque[_Task] = deque()
        self._reads: deque[_Task] = deque()
        self._writes: deque[_Task] = deque()
        self._copying: _Task | None = None
        self._running: list[_Task] = []  # on the store's threads
        self._most_writes = max(1, storage_threads - 1)
        self._wrote = False  # what the store's threads began last
        self._ended: list[Move] = []
        self._has_checked = False
        self._closing = False
        targets = [self._copy_moves] + [self._store_moves] * max(1, storage_threads)
        self._threads = [
            threading.Thread(target=target, name=f"quire-mover-{number}", daemon=True)
            for number, target in enumerate(targets)
        ]
        for thread in self._threads:
            thread.start()

    # -- the submitter's side

    def submit(self, move: Move) -> bool:
        queues = {Link.LOAD: self._loads, Link.SAVE: self._saves} | dict.fromkeys(_READS, self._reads)
        with self._lock:
            if self._closing or not self._in_flight.take(move):
                return False
            queues.get(move.link, self._writes).append(_Task(move, self._carrier.carry(move)))
            self._work.notify_all()
        return True

    def finished(self) -> list[Move]:
        with self._lock:
            ended, self._ended = self._ended, []
            for move in ended:
                self._in_flight.give_back(move)
        return ended

    def wait(self, seconds: float) -> bool:
        with self._lock:
            found = self._news.wait_for(lambda: self._ended or self._has_checked, seconds)
            self._has_checked = False
        return bool(found)

    def complete(self, move: Move) -> None:
        with self._lock:
            self._news.wait_for(lambda: move.done)

    def in_flight(self, link: Link) -> int:
        with self._lock:
            return self._in_flight.num_bytes(link)

    def bandwidth(self, link: Link) -> float | None:
        with self._lock:
            return self._rates[link].per_second

    def latency(self, link: Link) -> float | None:
        with self._lock:
            return self._rates[link].start

    @property
    def idle(self) -> bool:
        with self._lock:
            return not self._in_flight.num_moves

    def close(self) -> tuple[Move, ...]:
        with self._lock:
            self._closing = True
            for task in self._running:
                task.move.stop()
            self._work.notify_all()
        until = time.monotonic() + self._close_seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            left = [*self._running, *([self._copying] if self._copying is not None else [])]
        for task in left:
            self._end(task, LEFT)
        for queue in (self._loads, self._saves, self._reads, self._writes):
            while queue:
                self._end(queue.popleft(), CLOSED)
        return tuple(task.move for task in left)

    # -- the threads' side

    def _copy_moves(self) -> None:
        while (task := self._next_copy()) is not None:
            ended = self._advance(task)
            while task.move.link is Link.LOAD and not ended:
                ended = self._advance(task)
            with self._lock:
                self._copying = None
                if not ended:
                    self._saves.appendleft(task)

    def _next_copy(self) -> _Task | None:
        with self._lock:
            self._work.wait_for(lambda: self._closing or self._loads or self._saves)
            if self._closing:
                return None
            self._copying = self._loads.popleft() if self._loads else self._saves.popleft()
            return self._copying

    def _store_moves(self) -> None:
        while (task := self._next_stored()) is not None:
            ended = self._advance(task)
            while not ended and not self._gives_turn(task):
                ended = self._advance(task)
            with self._lock:
                self._running.remove(task)
                if not ended:
                    self._reads.append(task)
                self._work.notify_all()

    def _gives_turn(self, task: _Task) -> bool:
        """Whether a read goes on later, since others wait."""
        with self._lock:
            return not self._closing and task.move.link in _READS and bool(self._reads or self._may_write())

    def _next_stored(self) -> _Task | None:
        with self._lock:
            self._work.wait_for(lambda: self._closing or self._reads or self._may_write())
            if self._closing:
                return None
            self._wrote = self._may_write() and (not self._reads or self._is_turn_to_write())
            task = self._writes.popleft() if self._wrote else self._reads.popleft()
            self._running.append(task)
            return task

    def _is_turn_to_write(self) -> bool:
        return not self._wrote and all(task.move.link not in _WRITES for task in self._running)

    def _may_write(self) -> bool:
        writing = [task.move.link for task in self._running if task.move.link in _WRITES]
        if not self._writes or len(writing) >= self._most_writes:
            return False
        return Link.FORGET not in (*writing, self._writes[0].move.link) or not writing

    def _advance(self, task: _Task) -> bool:
        """Do the next piece. True: that was all, and the move has ended."""
        error = ""
        began = time.perf_counter()
        try:
            next(task.pieces)
            ended = False
        except StopIteration:
            ended = True
        except Exception as raised:
            ended, error = True, described(raised)
        task.seconds += time.perf_counter() - began
        if ended:
            self._end(task, error)
        elif task.move.checked and not task.told:
            task.told = True
            with self._lock:
                self._has_checked = True
                self._news.notify_all()
        return ended

    def _end(self, task: _Task, error: str) -> None:
        move = task.move
        with self._lock:
            if move.done:
                return  # it was given up
            move.seconds = task.seconds
            move.end(error)  # under the lock: whoever sees that it is done finds it among those that have ended
            # Where the store had most of it already, time went by with little to show for it.
            if not error and move.moved_bytes * 2 >= move.num_bytes:
                self._rates[move.link].add(move.moved_bytes, move.seconds)
            self._ended.append(move)
            self._news.notify_all()


class _Task:
    """A move, how far it has come, and how long that took."""

    __slots__ = ("move", "pieces", "seconds", "told")

    def __init__(self, move: Move, pieces: Iterator[None]) -> None:
        self.move = move
        self.pieces = pieces
        self.seconds = 0.0
        self.told = False


def described(error: Exception) -> str:
    """Why a move failed, in one line."""
    return str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
