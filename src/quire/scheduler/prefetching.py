"""Prefetching: pages of waiting requests' prompts are fetched from storage, and held until these requests begin.

The first requests of the queue prefetch, and others when they are considered. `ReadAhead` is the
scheduler's port to what fetches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from quire.observe.explain import FromPeer
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.tiers.prefill import PrefillAsk, PrefillPeers

if TYPE_CHECKING:
    from quire.scheduler.request import Request

_NEXT = 32
"""Waiting requests, from the first, that prefetch as soon as there is room."""


class PromptFetch(Protocol):
    """A fetch of the pages of one prompt, in pages of the prompt: those before `stored` come from the store, and
    requests can begin after `limit` now. `ask` is what a peer computes. It began at `since`, and was done at `until`, 0
    before."""

    ask: PrefillAsk | None
    limit: int
    stored: int
    since: float
    until: float

    @property
    def num_pages(self) -> int:
        """Pages of the prompt."""

    def leads_on(self, tokens: Ids) -> bool:
        """Whether another prefetch may find more for a request that waited for this one."""


F = TypeVar("F", bound=PromptFetch)


class ReadAhead(Generic[F]):
    """Bytes that requests wait for. This class is for a cache with the device alone, which has no prefetches."""

    loads: bool = False
    """Whether requests can be loaded from a lower tier."""
    peers = PrefillPeers()

    @property
    def prefetches(self) -> bool:
        """Whether there is a store, or a peer that computes prompts."""
        return False

    @property
    def can_prefetch(self) -> bool:
        """Whether another request may prefetch now."""
        return False

    def settle_moves(self) -> bool:
        """Process transfers that have ended, without waiting; returns whether there were any."""
        return False

    def wait_moves(self, seconds: float) -> bool:
        """Wait for up to `seconds` until a transfer has ended; returns False at once if none is in flight."""
        return False

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Record that a step with prompts computed so many tokens in this time, without waiting for bytes."""

    def prefetch(self, tokens: Ids, namespace: Namespace, *, may_ask: bool = True) -> F | None:
        """Start to fetch the pages of a prompt that are not cached. Returns None if there is nothing to wait
        for. Call `stop_prefetch` when the request begins or ends. It asks a peer if it `may_ask`."""
        return None

    def is_awaited(self, prefetch: F) -> bool:
        """Whether the request should wait longer. Fetched pages are held until `stop_prefetch`."""
        return False

    def stop_prefetch(self, prefetch: F) -> None:
        """The request does not wait for it any more."""

    def release_prefetched(self) -> bool:
        """Release the pages held for one waiting request; returns whether there were any."""
        return False


NOTHING_TO_READ_AHEAD: ReadAhead[Any] = ReadAhead()


class Prefetching:
    """The prefetches of one scheduler's waiting requests."""

    def __init__(self, ahead: ReadAhead[Any], page_size: int) -> None:
        self._ahead = ahead
        self._page_size = page_size

    def start(self, request: Request, later: Sequence[Request] = ()) -> None:
        """Fetch the stored pages of its prompt, once. If there are too many prefetches, that of the last of `later`
        requests stops, and starts again afterwards."""
        if request.read_ahead or not self._ahead.prefetches:
            return
        if later and not self._ahead.can_prefetch:
            last = next((other for other in reversed(later) if other.prefetch or other.prefetched), None)
            if last is not None:
                self.stop(last)
                last.read_ahead = False
        if self._ahead.can_prefetch:
            request.read_ahead = True
            request.prefetch = self._ahead.prefetch(request.tokens, request.namespace, may_ask=not request.is_for_peer)

    def start_next(self, waiting: Sequence[Request]) -> None:
        """Start prefetches for the first requests, as far as there is room."""
        if not self._ahead.prefetches:
            return
        for request in waiting[:_NEXT]:
            if not request.read_ahead:
                if not self._ahead.can_prefetch:
                    return
                self.start(request)

    def awaits(self, request: Request) -> bool:
        """Whether a request still waits for its prefetch. If several prompts begin with the fetched pages, each request
        fetches the rest of its own."""
        prefetch = request.prefetch
        if prefetch is None:
            return False
        if self._ahead.is_awaited(prefetch):
            asked = prefetch.ask is not None
            what = "its prompt, which another engine computes" if asked else "a part of its prompt that is in storage"
            request.wait_reason = f"waits for {what}"
            return True
        request.prefetch = None
        request.prefetched.append(prefetch)
        if prefetch.leads_on(request.tokens):
            request.read_ahead = False
            self.start(request)
        return request.prefetch is not None

    def asked(self, request: Request, num_cached: int) -> list[FromPeer]:
        """What peers were asked for, of a prompt that begins on `num_cached` cached tokens."""
        if request.is_for_peer:
            return []
        size, found = self._page_size, []
        for each in request.prefetched:
            if each.ask is not None:
                start, end, stop = (at * size for at in (each.stored, each.limit, each.num_pages))
                why = f"asked {each.ask.label}: {each.ask.why or 'it did not arrive'}"
                found.append(FromPeer(each.ask.label, start, end, stop, why))
        stop = max(0, request.num_tokens - 1) // size * size
        if not found and (why := self._ahead.peers.why_local(stop - num_cached)):
            found.append(FromPeer("", num_cached, num_cached, stop, why))
        return found

    def stop(self, request: Request) -> None:
        """Stop its prefetch, and release the pages that it holds."""
        if request.prefetched:
            request.fetched = request.prefetched[0].since, request.prefetched[-1].until
        for prefetch in request.prefetched:
            self._ahead.stop_prefetch(prefetch)
        request.prefetched.clear()
        if request.prefetch is not None:
            self._ahead.stop_prefetch(request.prefetch)
            request.prefetch = None
