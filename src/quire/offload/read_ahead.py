"""ReadAhead: what a scheduler asks of the tiers below the device, and an engine that waits for them."""

from __future__ import annotations

from typing import Protocol

from quire.cache.offload import CacheParts
from quire.offload.prefetch import Prefetch
from quire.offload.prefetcher import Prefetcher
from quire.offload.retention import Retention
from quire.offload.tiering import Tiering
from quire.spec.events import Namespace
from quire.spec.ids import Ids


class ReadAhead(Protocol):
    """Bytes that requests wait for."""

    @property
    def loads(self) -> bool:
        """Whether there is a tier below that requests are loaded from."""

    @property
    def stores(self) -> bool:
        """Whether there is storage to read ahead from."""

    def settle_moves(self) -> bool:
        """Take note of bytes that have arrived in another tier; whether any had. Never waits."""

    def wait_moves(self, seconds: float) -> bool:
        """Wait until bytes have arrived somewhere, so long at most; False at once where none are on their way."""

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens, prompts among them, took that long, and waited for no bytes."""

    @property
    def can_prefetch(self) -> bool:
        """Whether there is storage, and another request may read ahead from it now."""

    def prefetch(self, tokens: Ids, namespace: Namespace) -> Prefetch | None:
        """Start to fetch what of a prompt is in storage and not cached; None where there is nothing to wait for."""

    def is_awaited(self, prefetch: Prefetch) -> bool:
        """Whether its request should go on waiting for it. What has come is held until `stop_prefetch`."""

    def stop_prefetch(self, prefetch: Prefetch) -> None:
        """Its request has begun, or waits for it no more."""

    def take_back_prefetched(self) -> bool:
        """Take from a request that waits what is held for it; whether there was anything."""


class TieredReadAhead:
    """Of a cache with tiers."""

    loads = True

    def __init__(self, parts: CacheParts, tiers: Tiering, prefetcher: Prefetcher, kept: Retention) -> None:
        self.stores = tiers.settings.stores
        self._parts = parts
        self._tiers = tiers
        self._prefetcher = prefetcher
        self._kept = kept

    def settle_moves(self) -> bool:
        """What has come can be used, and what turned out to be damaged is forgotten."""
        parts = self._parts
        if not self._tiers.settle():
            return False
        if parts.damaged.num_damaged:
            self._kept.lose(parts.damaged)
            self._prefetcher.lose(parts.damaged)
        parts.sweep()
        parts.changed()
        return True

    def wait_moves(self, seconds: float) -> bool:
        """Waits for the mover."""
        mover = self._tiers.mover
        return not mover.idle and mover.wait(seconds)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """What is loaded or fetched is compared with that."""
        self._tiers.break_even.computed(num_tokens, seconds)

    @property
    def can_prefetch(self) -> bool:
        """Whether the prefetcher takes one more."""
        return self.stores and self._prefetcher.has_room

    def prefetch(self, tokens: Ids, namespace: Namespace) -> Prefetch | None:
        """What the prefetcher begins."""
        return self._prefetcher.begin(tokens, namespace) if self.stores else None

    def is_awaited(self, prefetch: Prefetch) -> bool:
        """Nobody begins while a step is computed: waiting takes as long at least."""
        return self._prefetcher.is_awaited(prefetch, self._parts.step_seconds())

    def stop_prefetch(self, prefetch: Prefetch) -> None:
        """Nothing is held for it any more."""
        self._prefetcher.leave(prefetch)

    def take_back_prefetched(self) -> bool:
        """From who began to read ahead last."""
        if not self._prefetcher.give_way():
            return False
        self._parts.sweep()  # before it could be evicted to the host, and from there stored: it may have been flushed
        return True


class NothingToReadAhead:
    """Of a cache on the device alone."""

    loads = stores = can_prefetch = False

    def settle_moves(self) -> bool:
        """Nothing moves."""
        return False

    def wait_moves(self, seconds: float) -> bool:
        """Nothing moves."""
        return False

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Nothing is compared with it."""

    def prefetch(self, tokens: Ids, namespace: Namespace) -> Prefetch | None:
        """Nothing is stored."""
        return None

    def is_awaited(self, prefetch: Prefetch) -> bool:
        """Nobody waits."""
        return False

    def stop_prefetch(self, prefetch: Prefetch) -> None:
        """Nobody waits."""

    def take_back_prefetched(self) -> bool:
        """Nothing is held."""
        return False


NOTHING_TO_READ_AHEAD: ReadAhead = NothingToReadAhead()
