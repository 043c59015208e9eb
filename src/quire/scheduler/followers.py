"""Leaders: running requests whose prompts other requests wait for, in order to reuse their pages.

A waiting request looks for a leader when it is considered. It then stores its leader and how many pages it waits for.
It is considered again when the leader has committed these pages, or is no leader any more.
"""

from __future__ import annotations

import numpy as np

from quire.cache import KVCache, PrefixHit
from quire.cache.request_kv import RequestKV
from quire.scheduler.request import Following, Request
from quire.scheduler.rows import RunningRows
from quire.spec.ids import Ids


class Leaders:
    """Of one scheduler. Call `renew` before waiting requests are considered, and `join` for each that begins."""

    def __init__(self, cache: KVCache, rows: RunningRows) -> None:
        self._cache = cache
        self._rows = rows
        self._all: list[Request] = []
        self._computing: set[RequestKV] = set()  # those that compute tokens known at their admission

    def num_computing(self) -> int:
        """Requests that are computing a prompt now."""
        return int(np.count_nonzero(self._rows.in_prefill(self._rows.order))) if self._cache.share_prefixes else 0

    def renew(self) -> None:
        """Find the leaders: requests that compute a prompt, or still store a state at the end of a page."""
        self._all, self._computing = [], set()
        if not self._cache.share_prefixes:
            return
        rows = self._rows
        leads = computes = rows.in_prefill(rows.order)
        if self._cache.admission.frees_early:
            leads = computes | (rows.settled[rows.order] % self._cache.page_size == 0)
        self._all = [rows.running[at] for at in leads.nonzero()[0].tolist()]
        self._computing = {rows.kvs[at] for at in computes.nonzero()[0].tolist()}

    def join(self, request: Request) -> None:
        """A request has just begun."""
        if self._cache.share_prefixes and request.kv is not None:
            self._all.append(request)
            self._computing.add(request.kv)

    def is_waited_for(self, following: Following) -> bool:
        """Whether the leader of this request has committed nothing new for it."""
        kv = following.leader
        return kv in self._computing and kv.shares and kv.lease.num_pages < following.num_pages

    def of(self, request: Request, hit: PrefixHit) -> tuple[Request, Following | None] | None:
        """A running request that computes more of this one's prefix than is cached, if that is worth waiting for; and
        the state to store, None if the request is to be considered again in the next step."""
        size = self._cache.page_size
        missed = slice(hit.num_pages * size, (hit.num_pages + 1) * size)  # the page that a leader has to reach at least
        first = request.tokens[missed].tobytes()
        for other in self._all:
            kv = other.kv
            if kv is None or other.namespace != request.namespace or other.tokens[missed].tobytes() != first:
                continue
            shared = min(_common_tokens(other.tokens, request.tokens), request.num_tokens - 1) // size
            if not other.in_prefill and shared * size != other.num_settled:
                continue
            if shared > hit.num_pages and self._cache.admission.will_leave(kv, shared):
                later = kv in self._computing and kv.lease.num_pages < shared
                return other, Following(kv, shared, hit.num_tokens) if later else None
        return None


def _common_tokens(left: Ids, right: Ids) -> int:
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length
