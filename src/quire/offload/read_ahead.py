"""ReadAhead: what a scheduler asks of the tiers below the device, and an engine that waits for them."""

from __future__ import annotations

from quire.offload.prefetch import Prefetch
from quire.spec.events import Namespace
from quire.spec.ids import Ids


class ReadAhead:
    """Bytes that requests wait for. This one is of a cache on the device alone, where none move."""

    @property
    def loads(self) -> bool:
        """Whether there is a tier below that requests are loaded from."""
        return False

    @property
    def stores(self) -> bool:
        """Whether there is storage to read ahead from."""
        return False

    @property
    def can_prefetch(self) -> bool:
        """Whether there is storage, and another request may read ahead from it now."""
        return False

    def settle_moves(self) -> bool:
        """Take note of bytes that have arrived in another tier; whether any had. Never waits."""
        return False

    def wait_moves(self, seconds: float) -> bool:
        """Wait until bytes have arrived somewhere, so long at most; False at once where none are on their way."""
        return False

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens, prompts among them, took that long, and waited for no bytes."""

    def prefetch(self, tokens: Ids, namespace: Namespace) -> Prefetch | None:
        """Start to fetch what of a prompt is in storage and not cached; None where there is nothing to wait for. Its
        request has to call `stop_prefetch` when it has begun, or goes away."""
        return None

    def is_awaited(self, prefetch: Prefetch) -> bool:
        """Whether its request should go on waiting for it. What has come is held until `stop_prefetch`."""
        return False

    def stop_prefetch(self, prefetch: Prefetch) -> None:
        """Its request has begun, or waits for it no more."""

    def take_back_prefetched(self) -> bool:
        """Take from a request that waits what is held for it; whether there was anything."""
        return False


NOTHING_TO_READ_AHEAD = ReadAhead()
