"""EventOrder: the batches of events that one engine publishes, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.observe.kv_batch import KvEvent


@dataclass(slots=True)
class EventOrder:
    """Puts the batches of one engine in order, which may be lost, late, or come twice. `next` is the number of the
    first that was not taken yet."""

    next: int = 0
    _early: dict[int, Sequence[KvEvent]] = field(default_factory=dict)
    _is_asked: bool = False

    def receive(self, number: int, events: Sequence[KvEvent]) -> list[KvEvent]:
        """A batch has come: the events that can be applied now."""
        if number >= self.next:
            self._early[number] = events
        found: list[KvEvent] = []
        while (batch := self._early.pop(self.next, None)) is not None:
            found += batch
            self.next += 1
        return found

    def asks(self, known: int = 0) -> int | None:
        """The number from which on the engine should tell everything again; None while nothing is missing, or it was
        asked already. The engine is known to have published the numbers before `known`."""
        if self._is_asked or not (self._early or known > self.next):
            return None
        self._is_asked = True
        return self.next

    def told_again(self, batches: Sequence[tuple[int, Sequence[KvEvent]]]) -> list[KvEvent]:
        """The answer to `asks`: the events that can be applied now. What is not in it is not kept any more, or never
        was: numbers of an engine that was started again begin higher."""
        self._is_asked = False
        self.next = max(self.next, min((number for number, _ in (*batches, *self._early.items())), default=0))
        self._early = {number: batch for number, batch in self._early.items() if number >= self.next}
        return [event for batch in batches for event in self.receive(*batch)]
