"""Scheduler: who runs next, on which pages. Continuous batching with chunked prefill.

A step takes running requests first, those that decode before those that prefill, then admits waiting ones while tokens
and pages last. When pages run out, the running request that comes last in `Request.order` gives its memory back and
waits again; what it had committed stays cached. The first in that order is never preempted, so something always
finishes. While a step is in flight nothing is preempted: its settling may bring the pages.

Nobody is admitted to wait: a request gets room for its whole known prompt, or stays in the queue and says why. What of
its prompt is in storage is fetched while it waits, and held until it begins: for those that are next, and others once
they come near. What is on the host is loaded once it is admitted, and it computes as soon as that is on its way.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

import numpy as np

from quire.cache import KVCache, PrefixHit
from quire.errors import InvalidInput, OutOfPages
from quire.offload.prefetch import Prefetch
from quire.offload.read_ahead import NOTHING_TO_READ_AHEAD, ReadAhead
from quire.scheduler.batch import Batch, Work
from quire.scheduler.policy import SchedulingPolicy
from quire.scheduler.request import Request, RequestState
from quire.spec.ids import Ids
from quire.spec.pages import pages_for

_NEXT = 32
"""Waiting requests, from the first, that begin to read ahead as soon as there is room for that."""


class Scheduler:
    """The queues of one engine. Single-threaded, like the cache it allocates from. `ahead` is what brings prefixes from
    tiers below the device (`Offloading.ahead`)."""

    def __init__(
        self,
        cache: KVCache,
        policy: SchedulingPolicy,
        *,
        max_running: int,
        max_tokens: int,
        ahead: ReadAhead = NOTHING_TO_READ_AHEAD,
    ) -> None:
        self._cache = cache
        self._ahead = ahead
        self._policy = policy
        self._max_running = max_running
        self._max_tokens = max_tokens
        self._waiting: list[Request] = []  # sorted by Request.order
        self._running: list[Request] = []  # sorted by Request.order
        self._requests: dict[str, Request] = {}
        self._decoding = cache.rows.batch([])
        self._blocked_at: tuple[int, ...] | None = None
        self._arrivals = 0
        self.num_preemptions = 0

    # -- queues

    @property
    def num_running(self) -> int:
        """Requests that hold memory."""
        return len(self._running)

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests without memory, in order, each with its `wait_reason`."""
        return self._waiting

    @property
    def has_requests(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request that the plan admits. Raises what `MemoryPlan.check_request` raises, or InvalidInput for an
        id in use; then nothing was queued."""
        if request.request_id in self._requests:
            raise InvalidInput(f"request id '{request.request_id}' is in use.", fix="send another id.")
        self._cache.plan.check_request(request.num_prompt_tokens, request.max_tokens)
        request.arrival = self._arrivals
        self._arrivals += 1
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=_order)
        self._read_ahead(request)

    def _read_ahead(self, request: Request, behind: Sequence[Request] = ()) -> None:
        """Have what is stored of its prompt fetched, once. Where too many do, the last of those `behind` it that holds
        something does so later."""
        if request.read_ahead or not self._ahead.stores:
            return
        if behind and not self._ahead.can_prefetch:
            last = next((other for other in reversed(behind) if other.prefetch or other.prefetched), None)
            if last is not None:
                self._let_go(last)
                last.read_ahead = False
        if self._ahead.can_prefetch:
            request.read_ahead = True
            request.prefetch = self._ahead.prefetch(request.tokens, request.namespace)

    def _read_ahead_next(self) -> None:
        """Those that are next read ahead, as far as there is room for that."""
        for request in self._waiting[:_NEXT]:
            if not request.read_ahead:
                if not self._ahead.can_prefetch:
                    return
                self._read_ahead(request)

    def _let_go(self, request: Request) -> None:
        """Nothing is fetched for it, or held, any more."""
        for prefetch in request.prefetched:
            self._ahead.stop_prefetch(prefetch)
        request.prefetched.clear()
        if request.prefetch is not None:
            self._ahead.stop_prefetch(request.prefetch)
            request.prefetch = None

    def _has_read_ahead(self, request: Request, prefetch: Prefetch) -> None:
        """It waits no more. Where what has come is the beginning of several prompts, each asks for the rest of its."""
        request.prefetch = None
        request.prefetched.append(prefetch)
        if prefetch.leads_on(request.tokens):
            request.read_ahead = False
            self._read_ahead(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request wherever it is; its memory comes back at once, or when the step in flight has settled.

        What has settled stays cached: a client that goes away, or stops at a string, may come back.
        """
        request = self._requests.get(request_id)
        if request is not None:
            request.finish_reason = "abort"
            self._finish(request)
        return request

    # -- one step

    def schedule(self) -> Batch:
        """Decide the next step and allocate for it. May be empty: everything waits for the step in flight."""
        batch = Batch()
        self._ahead.settle_moves()
        self._read_ahead_next()
        preempted = self.num_preemptions
        decodes: list[Work] = []
        prefills: list[Request] = []
        for request in self._launchable():
            ready = request.num_ready
            if ready == 1:
                assert request.kv is not None
                decodes.append(Work(request, request.kv, request.num_launched, 1, True))
            elif ready:
                prefills.append(request)
        self._grant_decodes(batch, decodes[: self._max_tokens])
        for request in prefills:
            left = self._max_tokens - batch.num_tokens
            if left and request.state is RequestState.RUNNING:
                self._grant(batch, [self._work(request, left)])
        if preempted == self.num_preemptions and self._waiting and self._blocked_at != self._admission_state():
            self._blocked_at = self._admission_state() if self._admit(batch) else None
        for work in batch.works:
            work.request.num_launched += work.count
            work.request.pending += work.samples
        return batch

    def settle(self, batch: Batch, drawn: Sequence[int | None]) -> list[Request]:
        """The step has finished: `drawn[i]` is the token of work i, None where it drew none.

        Commits what has settled and ends requests that are done. Returns the requests that got a token, in order.
        """
        advanced = []
        size, at_every_page = self._cache.page_size, self._cache.admission.gives_back_early
        for work, token in zip(batch.works, drawn, strict=True):
            request = work.request
            if request.state is RequestState.FINISHED:
                continue
            if request.kv is work.kv:
                request.num_settled = settled = work.start + work.count
                if (at_every_page or work.count > 1) and settled // size > work.kv.lease.num_pages:
                    self._cache.commit(work.kv, request.tokens[:settled])
            if token is not None:
                request.pending -= 1
                request.append(token)
                advanced.append(request)
                if request.finish_reason is not None:
                    self._finish(request)
        return advanced

    # -- inside

    def _launchable(self) -> list[Request]:
        """Running requests whose prefix is there, or arriving layer by layer. Where one's cannot be had, it begins
        again."""
        if not self._ahead.loads:
            return self._running
        for request in list(self._running):
            if request.kv is not None and request.kv.has_failed and not request.pending:
                self._put_back(request, "a cached prefix turned out to be damaged")
        return [request for request in self._running if request.kv is not None and request.kv.is_ready]

    def _grant_decodes(self, batch: Batch, works: list[Work]) -> None:
        """As `_grant` for requests that go on by one token each, which are mostly those of the step before."""
        kvs = [work.kv for work in works]
        if kvs != self._decoding.kvs:
            self._decoding = self._cache.rows.batch(kvs)
        try:
            self._cache.extend(self._decoding, 1)
        except OutOfPages:
            self._grant(batch, works)
        else:
            batch.works = works

    def _work(self, request: Request, limit: int) -> Work:
        assert request.kv is not None
        count = self._cache.admission.at_once(request.kv, min(request.num_ready, limit))
        start = request.num_launched
        return Work(request, request.kv, start, count, samples=start + count == request.num_known)

    def _grant(self, batch: Batch, works: list[Work]) -> None:
        """Allocate for these works, in one operation, and put them into the batch; preempt until what is left fits."""
        while works:
            try:
                self._cache.extend([work.kv for work in works], [work.count for work in works])
            except OutOfPages:
                if self._cache.fences.num_open:
                    works = works[:-1]
                    continue
                victim = self._running[-1]
                self._preempt(victim)
                works = [work for work in works if work.request is not victim]
                batch.works = [work for work in batch.works if work.request is not victim]
            else:
                batch.works.extend(works)
                return

    def _preempt(self, request: Request) -> None:
        assert request.kv is not None and not request.pending
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._put_back(request, "was preempted: older requests needed its pages")

    def _put_back(self, request: Request, reason: str) -> None:
        """A running request waits again, without memory."""
        assert request.kv is not None and not request.pending
        failed = request.kv.has_failed
        self._cache.finish(request.kv, None if failed else request.tokens[: request.num_settled], returns=True)
        self._running.remove(request)
        request.kv = None
        request.read_ahead = False  # storage may have what was damaged, and what it leaves may go before its turn comes
        if failed:
            self._ahead.settle_moves()  # what was damaged is forgotten now, and can be fetched
        request.state = RequestState.WAITING
        request.num_launched = request.num_settled = 0
        request.wait_reason = reason
        insort(self._waiting, request, key=_order)

    def _admission_state(self) -> tuple[int, ...]:
        """What has to change before a request that does not fit may fit: something came back or became cached, or other
        requests wait or run."""
        return (self._cache.num_changes, self._arrivals, len(self._waiting), len(self._running))

    def _admit(self, batch: Batch) -> bool:
        """Admit waiting requests, in the policy's order. True where the next one did not fit, which another step will
        not change."""
        hits: dict[str, PrefixHit] = {}
        self._commit_settled()
        leaders = self._leaders()

        def match(request: Request) -> PrefixHit:
            hit = hits.get(request.request_id)
            if hit is None or not self._cache.admission.is_current(hit):
                hit = hits[request.request_id] = self._cache.match(request.tokens, request.namespace)
            return hit

        deferred = 0
        order = list(self._policy.arrange(self._waiting, lambda request: match(request).num_tokens))
        for place, request in enumerate(order):
            if deferred >= self._max_running:
                return False
            if len(self._running) >= self._max_running:
                request.wait_reason = f"{self._max_running} requests run, which is the limit"
                return not deferred
            if not request.read_ahead:
                self._read_ahead(request, order[place + 1 :])
            if request.prefetch is not None:
                if self._ahead.is_awaited(request.prefetch):
                    request.wait_reason = "waits for a part of its prompt that is in storage"
                    deferred += 1
                    continue
                self._has_read_ahead(request, request.prefetch)
                if request.prefetch is not None:
                    deferred += 1
                    continue
            hit = match(request)
            # Also where nothing is left of the step: a leader hears of who waits for it.
            leader = self._leader(request, hit, leaders)
            if leader is not None:
                request.wait_reason = f"waits for the prefix that {leader.request_id} is computing"
                deferred += 1
                continue
            left = self._max_tokens - batch.num_tokens
            if not left:
                return False
            if not self._fits(request, hit):
                return not deferred
            try:
                self._begin(batch, request, hit, left)
            except OutOfPages as error:
                request.wait_reason = error.message
                return not deferred
            if self._cache.share_prefixes:
                leaders.append(request)
        return False

    def _begin(self, batch: Batch, request: Request, hit: PrefixHit, limit: int) -> None:
        request.kv = self._cache.begin(
            request.tokens,
            request.namespace,
            hit=hit,
            priority=request.priority,
            resumed=request.num_cached >= 0,
            label=request.request_id,
        )
        request.num_launched = request.num_settled = request.kv.num_cached
        if request.num_cached < 0:
            request.num_cached = request.kv.num_cached
            request.num_host, request.num_storage = request.kv.num_host, request.kv.num_storage
            request.explanation = request.kv.explanation
            batch.admitted.append(request)
        self._let_go(request)
        request.state = RequestState.RUNNING
        self._waiting.remove(request)
        insort(self._running, request, key=_order)
        if request.kv.is_ready:
            self._grant(batch, [self._work(request, limit)])

    def _commit_settled(self) -> None:
        """What running requests have computed is there for the waiting ones. While nobody waits, nobody asks for it, so
        that what a request draws is committed in one piece and not page by page."""
        if not self._cache.share_prefixes:
            return
        size = self._cache.page_size
        for request in self._running:
            if request.kv is not None and request.num_settled // size > request.kv.lease.num_pages:
                self._cache.commit(request.kv, request.tokens[: request.num_settled])

    def _leaders(self) -> list[Request]:
        """Running requests that others may wait for: they compute a prompt, or have still to leave something where they
        are now, at the end of a page."""
        if not self._cache.share_prefixes:
            return []
        early, size = self._cache.admission.gives_back_early, self._cache.page_size
        return [other for other in self._running if other.in_prefill or (early and other.num_settled % size == 0)]

    def _leader(self, request: Request, hit: PrefixHit, leaders: Sequence[Request]) -> Request | None:
        """A running request that is computing more of this one's prefix than is cached: worth waiting for."""
        size = self._cache.page_size
        for other in leaders:
            if other.kv is None or other.namespace != request.namespace:
                continue
            shared = min(_common_tokens(other.tokens, request.tokens), len(request.tokens) - 1) // size
            if not other.in_prefill and shared * size != other.num_settled:
                continue
            if shared > hit.num_pages and self._cache.will_leave(other.kv, shared):
                return other
        return None

    def _fits(self, request: Request, hit: PrefixHit) -> bool:
        """Whether its whole known prompt fits beside what running requests were promised and their next pages."""
        plan, size = self._cache.plan, self._cache.page_size
        running = [(other.kv, pages_for(other.num_known, size)) for other in self._running if other.kv is not None]
        needed = plan.pages_of(request.num_tokens + plan.tokens_per_step)
        spare = pages_for(plan.tokens_per_step, size)
        request.wait_reason = self._cache.admission.why_not(hit, needed, running, spare)
        # Who runs will end; what waiting requests hold for themselves could keep the first of them out for ever.
        while request.wait_reason and not running and self._ahead.take_back_prefetched():
            request.wait_reason = self._cache.admission.why_not(hit, needed, running, spare)
        return not request.wait_reason

    def _finish(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            assert request.kv is not None
            self._cache.finish(request.kv, request.tokens[: request.num_settled])
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._let_go(request)
        request.kv = None
        request.state = RequestState.FINISHED
        del self._requests[request.request_id]


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _common_tokens(left: Ids, right: Ids) -> int:
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length
