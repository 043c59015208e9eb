"""Prefetching: what of waiting requests' prompts is fetched from storage, and held for them until they begin.

Those that are next read ahead, and others once they come near.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.offload.prefetch import ReadAhead
from quire.scheduler.request import Request

_NEXT = 32
"""Waiting requests, from the first, that begin to read ahead as soon as there is room for that."""


class Prefetching:
    """What is asked of storage for the waiting requests of one scheduler."""

    def __init__(self, ahead: ReadAhead) -> None:
        self._ahead = ahead

    def start(self, request: Request, behind: Sequence[Request] = ()) -> None:
        """Have what is stored of its prompt fetched, once. Where too many do, the last of those `behind` it that holds
        something does so later."""
        if request.read_ahead or not self._ahead.stores:
            return
        if behind and not self._ahead.can_prefetch:
            last = next((other for other in reversed(behind) if other.prefetch or other.prefetched), None)
            if last is not None:
                self.let_go(last)
                last.read_ahead = False
        if self._ahead.can_prefetch:
            request.read_ahead = True
            request.prefetch = self._ahead.prefetch(request.tokens, request.namespace)

    def start_next(self, waiting: Sequence[Request]) -> None:
        """Those that are next read ahead, as far as there is room for that."""
        if not self._ahead.stores:
            return
        for request in waiting[:_NEXT]:
            if not request.read_ahead:
                if not self._ahead.can_prefetch:
                    return
                self.start(request)

    def awaits(self, request: Request) -> bool:
        """Whether a request goes on waiting for what is fetched for it. Where what has come is the beginning of
        several prompts, each asks for the rest of its own."""
        prefetch = request.prefetch
        if prefetch is None:
            return False
        if self._ahead.is_awaited(prefetch):
            request.wait_reason = "waits for a part of its prompt that is in storage"
            return True
        request.prefetch = None
        request.prefetched.append(prefetch)
        if prefetch.leads_on(request.tokens):
            request.read_ahead = False
            self.start(request)
        return request.prefetch is not None

    def let_go(self, request: Request) -> None:
        """Nothing is fetched for it, or held, any more."""
        for prefetch in request.prefetched:
            self._ahead.stop_prefetch(prefetch)
        request.prefetched.clear()
        if request.prefetch is not None:
            self._ahead.stop_prefetch(request.prefetch)
            request.prefetch = None
