"""Prefetching: pages of waiting requests' prompts are fetched from storage, and held until these requests begin.

The first requests of the queue prefetch, and others when they are considered.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.observe.explain import FromPeer
from quire.offload.prefetch import ReadAhead
from quire.scheduler.request import Request

_NEXT = 32
"""Waiting requests, from the first, that prefetch as soon as there is room."""


class Prefetching:
    """The prefetches of one scheduler's waiting requests."""

    def __init__(self, ahead: ReadAhead, page_size: int) -> None:
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
            request.prefetch = self._ahead.prefetch(request.tokens, request.namespace, for_peer=request.is_for_peer)

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
        if self._ahead.peers is None or request.is_for_peer:
            return []
        size, found = self._page_size, []
        for each in request.prefetched:
            if each.ask is not None:
                start, end, stop = (at * size for at in (each.stored, each.limit, each.prefix.limit))
                found.append(FromPeer(each.ask.peer, start, end, stop, each.ask.why))
        stop = max(0, request.num_tokens - 1) // size * size
        if not found and (why := self._ahead.peers.why_local(stop - num_cached)):
            found.append(FromPeer("", num_cached, num_cached, stop, why))
        return found

    def stop(self, request: Request) -> None:
        """Stop its prefetch, and release the pages that it holds."""
        for prefetch in request.prefetched:
            self._ahead.stop_prefetch(prefetch)
        request.prefetched.clear()
        if request.prefetch is not None:
            self._ahead.stop_prefetch(request.prefetch)
            request.prefetch = None
