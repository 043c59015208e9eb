"""EventLog: the cache's events in order, each with a sequence number, for routers and replicas to follow."""

from __future__ import annotations

from collections import deque

from quire.spec.events import CacheEvent


class EventLog:
    """The last `capacity` events. If a reader requests events that were dropped, it gets the first sequence number that
    is left. Then it has to rebuild from a snapshot."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._events: deque[CacheEvent] = deque(maxlen=capacity)
        self._next = 0

    @property
    def next_sequence(self) -> int:
        """The number that the next event will have; the first is 0."""
        return self._next

    def append(self, event: CacheEvent) -> None:
        """Record an event as number `next_sequence`."""
        self._events.append(event)
        self._next += 1

    def since(self, sequence: int) -> tuple[int, list[CacheEvent]]:
        """Events from number `sequence` on, and the number of the first one returned: higher than `sequence` if older
        ones were dropped."""
        first = max(sequence, self._next - len(self._events))
        return first, list(self._events)[len(self._events) - (self._next - first) :]
