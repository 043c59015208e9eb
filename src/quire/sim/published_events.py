"""EventWire: the events of several engines on their way to the index of a router."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from quire.loop import Part
from quire.observe.kv_batch import KvBatches, KvEvent
from quire.observe.kv_publisher import MOST_KEPT
from quire.routing.event_order import EventOrder
from quire.routing.page_index import PageIndex
from quire.sim.arrivals import Inbox
from quire.sim.replay import Replay
from quire.spec.events import AllCleared, CacheEvent

_BEAT_S = 1.0  # after a batch was lost, a message without events shows the gap, as one of the real publisher does


class SimulatedPublisher(Part):
    """Publishes the events of one engine: a batch for each step that has any. As `quire.observe.kv_publisher` does, it
    keeps batches for readers that missed some, and begins with a higher number when it is started again. `sends` takes
    the time, the number and the events of a batch."""

    def __init__(self, sends: Callable[[float, int, Sequence[KvEvent]], None]) -> None:
        self._sends = sends
        self._first = self._next = 0
        self._queue: list[CacheEvent] = []
        self._kept: deque[tuple[int, Sequence[KvEvent]]] = deque(maxlen=MOST_KEPT)

    def follow(self, replay: Replay) -> None:
        """The engine whose events these are; it is empty."""
        self._clock, self._tree = replay.clock, replay.cache.tree
        self._batches = KvBatches(replay.cache.page_size, self._tree.names.seed)
        self._tree.names.follow(self._queue.append)

    def after_step(self, *, idle: bool) -> None:
        self.publish(self._clock.now)

    def publish(self, now: float) -> None:
        """Send what has happened since the last batch, if anything has: at this time, or when the engine is further."""
        if self._queue:
            events, number = self._batches.events(self._queue), self._next
            self._queue.clear()
            self._next += 1
            self._kept.append((number, events))
            self._sends(max(now, self._clock.now), number, events)

    def started_again(self, now: float) -> None:
        """The engine was started again at this time, and has nothing."""
        self._queue[:] = [AllCleared()]
        self._kept.clear()
        self._first = self._next = max(self._next, round(1e6 * now)) + 1
        self.publish(now)

    def again(self, start: int, now: float) -> list[tuple[int, Sequence[KvEvent]]]:
        """The batches from number `start` on that are kept. Everything cached is told anew if that is not all."""
        found = [batch for batch in self._kept if batch[0] >= start]
        if self._kept[0][0] > max(start, self._first):
            self._tree.tell_all()
            self.publish(now)
        return found


class EventWire:
    """Carries batches to an index: each arrives `delay` seconds after it was sent, or never, with a chance of `loss`
    that is drawn from `seed`. What was asked for again arrives after twice the delay, and is never lost."""

    def __init__(self, index: PageIndex, num_engines: int, *, delay: float, loss: float, seed: int) -> None:
        self._index, self._delay, self._loss = index, delay, loss
        self._chances = np.random.default_rng(seed)
        self._due: Inbox[Callable[[], None]] = Inbox()
        self._orders = [EventOrder() for _ in range(num_engines)]
        self.publishers = [SimulatedPublisher(partial(self._send, at)) for at in range(num_engines)]
        self.num_lost = self.num_asked = 0

    def pass_until(self, now: float) -> None:
        """Apply what has arrived by this time."""
        for arrive in self._due.until(now):
            arrive()

    def _send(self, engine: int, now: float, number: int, events: Sequence[KvEvent]) -> None:
        arrives = now + self._delay
        if self._chances.random() >= self._loss:
            self._due.push(arrives, partial(self._receive, engine, arrives, number, events))
        else:
            self.num_lost += 1
            self._due.push(arrives + _BEAT_S, partial(self._ask, engine, arrives + _BEAT_S, number + 1))

    def _receive(self, engine: int, now: float, number: int, events: Sequence[KvEvent]) -> None:
        self._index.apply(engine, self._orders[engine].receive(number, events))
        self._ask(engine, now)

    def _ask(self, engine: int, now: float, known: int = 0) -> None:
        start = self._orders[engine].asks(known)
        if start is not None:
            self.num_asked += 1
            answered = now + 2 * self._delay
            self._due.push(answered, partial(self._answered, engine, answered, start))

    def _answered(self, engine: int, now: float, start: int) -> None:
        self._index.apply(engine, self._orders[engine].told_again(self.publishers[engine].again(start, now)))
        self._ask(engine, now)
