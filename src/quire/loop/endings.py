"""EndingsPart: tells the eviction policy how outputs ended, when that is known."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.counters import Section
from quire.loop.part import End, Part
from quire.prefix.policy import EvictionPolicy
from quire.scheduler.request import Request
from quire.spec.ending import Ending

if TYPE_CHECKING:
    from quire.loop.loop import Loop

MOST_ENDED = 1024
"""Requests, the last ones to end, whose ending may still be told."""


class EndingsPart(Part):
    """`ending_of(request)` says how the output of a request ended that ends now, as far as the loop knows. What only
    its reader sees, as whether it calls tools, is told later."""

    def __init__(self, ending_of: Callable[[Request], Ending | None]) -> None:
        self._ending_of = ending_of
        self._policy: EvictionPolicy  # set with the loop
        self._ended: OrderedDict[str, object] = OrderedDict()  # what the policy has of them, by id

    def attach(self, loop: Loop) -> None:
        self._policy = loop.cache.tree.policy

    def ended(self, request: Request, end: End, error: Exception | None) -> None:
        if request.end is None:
            return
        self._ended[request.request_id] = request.end
        if (ending := self._ending_of(request)) is not None:
            self.tell(request.request_id, ending)
        elif len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)

    def tell(self, request_id: str, ending: Ending) -> bool:
        """How the output of a request ended. False: it runs, or it is known already, or it is not known any more."""
        memo = self._ended.pop(request_id, None)
        if memo is not None:
            self._policy.told(memo, ending)
        return memo is not None

    def counters(self) -> list[Section]:
        found = self._policy.counters()
        return [] if found is None else [("eviction", found)]
