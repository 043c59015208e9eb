"""EventFold: the events of a cache, added up. The sum must be what is cached, page by page and hash by hash."""

from __future__ import annotations

from collections.abc import Iterable, Set

from quire.cache import KVCache
from quire.spec.events import CacheEvent, PagesRemoved, PagesStored
from quire.spec.ids import Tier
from tests.fuzz.names import Names
from tests.fuzz.page_keys import PageKeys


class EventFold:
    """`stored` has the names of the pages that routers believe to be on the device, by hash, and `below` of those with
    a copy on the host. `on` once there was an event."""

    def __init__(self, cache: KVCache, names: Names) -> None:
        self._keys = PageKeys(names, [group.layout.fingerprint() for group in cache.plan.groups])
        self._names = names
        self._page_bytes = 4 * cache.page_size
        self.stored: dict[bytes, int] = {}
        self.below: dict[bytes, int] = {}
        self.on = False

    def take(self, events: Iterable[CacheEvent]) -> None:
        """Add these. Each names pages as its definition does, none twice, and none that are not there."""
        self.on = True
        for event in events:
            if isinstance(event, PagesStored):
                self._store(event)
            elif isinstance(event, PagesRemoved):
                tier = self._of(event.tier)
                for digest in event.hashes:
                    name = tier.pop(digest, None)
                    assert name is not None, "an event removes a page that was not stored"
                    assert self._names.namespaces[name] == event.namespace, "an event names another namespace"
            else:
                assert not self.stored and not self.below, "all is said to be cleared, and pages were not removed"

    def check(self, cached: Set[int], kept: Set[int] = frozenset()) -> None:
        """What is stored is what is cached, and kept below."""
        assert set(self.stored.values()) == cached, "the events do not add up to what is cached"
        assert set(self.below.values()) == kept, "the events do not add up to what has copies below the device"

    def _of(self, tier: Tier) -> dict[bytes, int]:
        return self.stored if tier is Tier.DEVICE else self.below

    def _store(self, event: PagesStored) -> None:
        seed = self._keys.seed(event.namespace)
        tier = self._of(event.tier)
        name = self.stored.get(event.parent) or self.below.get(event.parent)
        name = self._names.root(event.namespace) if event.parent == seed else name
        assert name is not None, "an event names a parent that is not stored"
        assert self._names.namespaces[name] == event.namespace, "an event names another namespace"
        digest, size = event.parent, self._page_bytes
        assert len(event.tokens) == size * len(event.hashes)
        for at, stored in enumerate(event.hashes):
            page = event.tokens[at * size : at * size + size]
            digest = self._keys.follow(digest, page)
            assert digest == stored, "a page's hash is not that of its tokens and of the page before"
            name = self._names.follow(name, page)
            assert digest not in tier, "a page is stored twice"
            tier[digest] = name
