"""EventsPart: an engine publishes what its cache stores and removes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from quire.counters import Section
from quire.loop import Part
from quire.observe.kv_batch import KvBatches
from quire.observe.kv_publisher import KvPublisher
from quire.prefix.radix_cache import RadixCache
from quire.transfer.address import is_loopback

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

logger = logging.getLogger(__name__)


class EventsPart(Part):
    """The events of one tree and their publisher, which it closes. A step costs a look at a queue; an event is appended
    to it, and nothing is hashed here."""

    def __init__(self, tree: RadixCache, publisher: KvPublisher) -> None:
        self._tree, self.publisher = tree, publisher
        tree.names.follow(publisher.append)

    @property
    def is_due(self) -> bool:
        return self.publisher.is_due

    def after_step(self, *, idle: bool) -> None:
        if self.publisher.takes_all():
            self._tree.tell_all()
        self.publisher.flush()

    def counters(self) -> Sequence[Section]:
        return [("kv_events", self.publisher.counters())]

    def close(self) -> None:
        self.publisher.close()


def kv_event_parts(engine: EngineCore) -> Iterator[Part]:
    """The part that publishes events; none unless it is told where."""
    config, cache = engine.config, engine.cache
    if config.kv_events is None:
        return
    for address in (config.kv_events, config.kv_events_replay):
        if address is not None and not _stays_here(address):
            logger.warning(
                "%s: all who reach it can read the tokens and salts of all prompts, without a key.",
                address,
            )
    kind = "full_attention" if len(cache.groups) > 1 else None  # readers count no other
    batches = KvBatches(cache.page_size, cache.tree.names.seed, kind)
    publisher = KvPublisher(batches, config.kv_events, config.kv_events_replay, lambda: engine.wake())
    yield EventsPart(cache.tree, publisher)


def _stays_here(address: str) -> bool:
    return is_loopback(address.removeprefix("tcp://").rpartition(":")[0].strip("[]"))
