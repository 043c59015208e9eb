"""ReadAhead: what schedulers and engines ask of the tiers below the device."""

from __future__ import annotations

from quire.offload.prefetch import Prefetch
from quire.spec.events import Namespace
from quire.spec.ids import Ids


class ReadAhead:
    """Bytes that requests wait for. This class is for a cache on the device alone, which has none."""

    @property
    def loads(self) -> bool:
        """Whether requests can be loaded from a tier below."""
        return False

    @property
    def stores(self) -> bool:
        """Whether there is a store."""
        return False

    @property
    def can_prefetch(self) -> bool:
        """Whether another request may read ahead from a store now."""
        return False

    def settle_moves(self) -> bool:
        """Take note of transfers that have ended, without waiting; whether there were any."""
        return False

    def wait_moves(self, seconds: float) -> bool:
        """Wait for up to `seconds` until a transfer has ended; False at once if none is under way."""
        return False

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Take note that a step with prompts computed so many tokens in this time, without waiting for bytes."""

    def prefetch(self, tokens: Ids, namespace: Namespace) -> Prefetch | None:
        """Start to fetch the pages of a prompt that are stored and not cached. None: there is nothing to wait for. Call
        `stop_prefetch` when the request begins or ends."""
        return None

    def is_awaited(self, prefetch: Prefetch) -> bool:
        """Whether the request should wait longer. Fetched pages are held until `stop_prefetch`."""
        return False

    def stop_prefetch(self, prefetch: Prefetch) -> None:
        """The request does not wait for it any more."""

    def take_back_prefetched(self) -> bool:
        """Release the pages held for one waiting request; whether there were any."""
        return False


NOTHING_TO_READ_AHEAD = ReadAhead()
