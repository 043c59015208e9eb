"""Mutants of an index of events, and of what a router believes."""

from __future__ import annotations

from collections.abc import Sequence

from quire.observe.kv_batch import KvEvent
from quire.routing.page_index import EventOrder, PageIndex
from quire.sim.routers import SimulatedPublisher
from tests.mutants.mutants import Patch, mutant


@mutant("page index", "an event that came late brings back a page that was removed, and prompts go where nothing is")
def batches_are_applied_as_they_come(patch: Patch) -> None:
    def receive(order: EventOrder, number: int, events: Sequence[KvEvent]) -> list[KvEvent]:
        order.next = max(order.next, number + 1)
        return list(events)

    patch.setattr(EventOrder, "receive", receive)


@mutant("page index", "a router that waits for messages of before a restart knows nothing of an engine any more")
def a_restart_is_waited_for(patch: Patch) -> None:
    def told_again(order: EventOrder, batches: Sequence[tuple[int, Sequence[KvEvent]]]) -> list[KvEvent]:
        order._is_asked = False
        return [event for batch in batches for event in order.receive(*batch)]

    patch.setattr(EventOrder, "told_again", told_again)


@mutant("page index", "a page that left the device and is on the host is believed gone")
def one_medium_is_all(patch: Patch) -> None:
    real = PageIndex._remove

    def remove(index: PageIndex, engine: int, pages: Sequence[int], bits: int) -> None:
        real(index, engine, pages, index._bit(engine, "GPU") * 3)

    patch.setattr(PageIndex, "_remove", remove)


@mutant("index of caches", "what was cached before a restart is believed to be there after it")
def a_restart_tells_nothing(patch: Patch) -> None:
    patch.setattr(SimulatedPublisher, "started_again", lambda publisher, now: publisher._queue.clear())
