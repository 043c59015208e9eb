"""Scheduler: which requests run next, on which pages. Continuous batching with chunked prefill.

A step takes running requests first, those that decode before those that prefill, then admits waiting ones while tokens
and pages last. If pages run out, the last running request in `Request.order` frees its memory and waits again; its
committed pages stay cached. The first in that order is never preempted, so that some request always finishes. While a
step is in flight nothing is preempted: the step may free pages when it settles.

A request is admitted only if its whole known prompt fits; otherwise it stays in the queue with a reason. Pages of its
prompt in storage are fetched while it waits (`quire.scheduler.prefetching`). Pages on the host are loaded at admission,
and it computes as soon as they are on their way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import numpy as np

from quire.cache import KVCache, PrefixHit
from quire.cache.admission import Claim
from quire.cache.request_kv import RequestKV
from quire.cache.running import NO_ROWS, Lengths, Rows
from quire.errors import InvalidInput, OutOfPages
from quire.scheduler.chunk_budget import Backlog, ChunkBudget
from quire.scheduler.policy import WaitingRequests
from quire.scheduler.prefetching import NOTHING_TO_READ_AHEAD, Prefetching, ReadAhead
from quire.scheduler.request import Request, RequestState
from quire.scheduler.rows import Leaders, NextStep, RunningRows
from quire.scheduler.sessions import held_row, make_room, turn_of
from quire.scheduler.step import Settled, Step, StepRows
from quire.spec.ids import Bools, Ids
from quire.spec.pages import pages_for


class Scheduler:
    """The queues of one engine. Single-threaded, as the cache is. `ahead` fetches prefixes from lower tiers
    (`Offloading.ahead`), `chunks` limits prompts beside decodes; by default it does not."""

    def __init__(
        self,
        cache: KVCache,
        waiting: WaitingRequests,
        *,
        max_running: int,
        max_tokens: int,
        ahead: ReadAhead[Any] = NOTHING_TO_READ_AHEAD,
        chunks: ChunkBudget | None = None,
    ) -> None:
        self._cache = cache
        self.chunks = chunks if chunks is not None else ChunkBudget(math.inf)
        self._ahead = ahead
        self._max_running = max_running
        self._max_tokens = max_tokens
        self._per_step = cache.plan.tokens_per_step
        self.queue = waiting
        self._waiting = waiting.requests
        self._requests: dict[str, Request] = {}
        width = cache.plan.pages_per_row * cache.plan.tokens_per_page
        self._rows = RunningRows(cache.rows.serials, width, cache.plan.speculation)
        self._decoding = self._rows.together()  # decodes of the last step
        self._prefetching = Prefetching(ahead, cache.page_size)
        self._leaders = Leaders(cache, self._rows)
        self._lacks_room = False  # for the first that waits
        self._quiet_at: tuple[int, ...] | None = None
        self._late = 0  # decode steps since windows have moved on
        self._arrivals = 0
        self.num_preemptions = 0

    # -- queues

    @property
    def num_running(self) -> int:
        """Requests that hold memory."""
        return len(self._rows.running)

    @property
    def num_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests without memory, in order, each with its `wait_reason`."""
        return self._waiting

    @property
    def lacks_room(self) -> bool:
        """Whether the first waiting request waits for pages."""
        return self._lacks_room and bool(self._waiting)

    @property
    def has_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request that the plan admits. Raises what `Resizing.check` raises, or InvalidInput for an
        id in use; nothing was queued then."""
        if request.request_id in self._requests:
            raise InvalidInput(f"request id '{request.request_id}' is in use.", fix="send another id.")
        self._cache.resizing.check(request.num_prompt_tokens, request.max_tokens)
        self._cache.admission.check(request.namespace, request.num_prompt_tokens, request.max_tokens)
        request.set_arrival(self._arrivals)
        request.opening = hash((request.namespace, request.tokens[: self._cache.page_size].tobytes()))
        request.turn = turn_of(self._cache.sessions, request)
        self._arrivals += 1
        self._requests[request.request_id] = request
        self.queue.add(request)
        self._prefetching.start(request)

    def abort(self, request_id: str, *, failed: bool = False) -> Request | None:
        """End a request in any state; its memory is free at once, or when the step in flight has settled.

        Settled tokens stay cached: a client that disconnects, or ends at a stop string, may return. Its session holds
        its row, unless its step has `failed`.
        """
        request = self._requests.get(request_id)
        if request is not None:
            if failed and request.turn is not None:
                request.turn.refusal = "the turn failed"
            request.finish_reason = "abort"
            self._finish(request)
        return request

    @property
    def tokens(self) -> Ids:
        """The tokens of all rows, int32 `[rows, width]`. A drafter may write drafts after the known ones."""
        return self._rows.tokens

    def drafting(self) -> tuple[StepRows, Ids, Lengths, Lengths]:
        """All running requests; the tokens of all rows; how many of its row each request has; and how many tokens ahead
        its next step may draft. That is as far as the plan reserves room and the request may still draw, and 0 while a
        step that draws its next token is in flight."""
        running, rows = self._rows.together(), self._rows
        return running, rows.tokens, rows.known[running.rows], rows.drafts.room(running)

    def draft(self, batch: StepRows, counts: Lengths, tokens: Ids, parents: Ids | None = None) -> None:
        """The next step of request i computes the first `counts[i]` of `tokens[i]` too, no further ahead than
        `drafting` said, and `settle` is told how many were right. `parents` as in `DraftRows.write`."""
        self._rows.drafts.write(batch, counts, tokens, parents)

    @property
    def requests(self) -> Iterable[Request]:
        """Requests that wait or run."""
        return self._requests.values()

    def compute_again(self, request: Request, reason: str) -> None:
        """A running request waits again, and none of its pages that are not cached yet ever are: they were computed
        from damaged ones. No step may be in flight. Its tokens stay."""
        self._put_back(request, reason, damaged=True)

    def preempt_last(self, reason: str) -> None:
        """The last running request waits again. No step may be in flight."""
        self._preempt(self._victim(), reason)

    # -- one step

    def schedule(self) -> Step:
        """Decide the next step and allocate for it. It may be empty: all requests wait for the step in flight."""
        next_step = NextStep()
        self._ahead.settle_moves()
        self._prefetching.start_next(self._waiting)
        preempted = self.num_preemptions
        looks = bool(self._waiting) and (self._quiet_at is None or self._quiet_at != self._admission_state())
        # Before the step is made: a commit may give a request pages that are still arriving on the device.
        if looks:
            self._commit_settled()
        running = self._launchable()
        ready = self._rows.ready(running)
        decoding = None if ready is running.ones or np.count_nonzero(ready == 1) == len(running) else ready == 1
        if looks or decoding is not None:  # they may want more frames than decodes
            self._pass_late()
        self._grant_decodes(next_step, running, decoding)
        prompts = NO_ROWS if decoding is None else (ready > 1).nonzero()[0]
        if len(prompts) or self._waiting:
            self._limit(next_step, running, prompts, ready[prompts])
        for at in prompts.tolist():
            left, request = self._left(next_step), running.requests[at]
            if left and request.state is RequestState.RUNNING:
                self._grant(next_step, [request], [self._chunk(request, int(ready[at]), left)])
        if looks and preempted == self.num_preemptions:
            is_quiet = self._admit(next_step) and preempted == self.num_preemptions
            self._quiet_at = self._admission_state() if is_quiet and self._waiting else None
        return self._step(next_step)

    def settle(self, step: Step, tokens: Lengths, kept: Lengths | None = None) -> Settled:
        """The step has finished. The step drew `tokens`, one for each of `step.draws`, of which work i keeps the first
        `kept[i]`, by default all, and at least one if it drew any.

        Commits settled tokens and ends requests that are done. Returns the tokens of each request.
        """
        found, settled, done = self._rows.settle(step, np.asarray(tokens, dtype=np.int64), kept)
        requests, committing = step.requests, self._committing(step, settled)
        for at in done:  # in the order of works, as if each had settled alone
            earlier = int(np.searchsorted(committing, at))
            self._commit([requests[each] for each in committing[:earlier].tolist()])
            self._finish(requests[at])
            committing = committing[earlier:]
        if len(committing):
            self._commit([requests[each] for each in committing.tolist()])
        return found

    def measured(self, step: Step, seconds: float) -> None:
        """A step took this time and waited for no bytes: that is what such steps cost."""
        self.chunks.measured(step, seconds)
        if step.computes_prompts:
            self._ahead.computed(step.num_tokens, seconds)

    # -- inside

    def _committing(self, step: Step, settled: Lengths) -> Rows:
        """Works to commit now, in order, given the number of settled tokens of each: prompts, page by page, and
        requests whose commit frees frames, or whose states need the number of accepted drafts."""
        admission, passing, rows = self._cache.admission, self._cache.passing, step.batch.rows
        if step.is_decode and not admission.frees_early:
            return rows[:0]
        size = self._cache.page_size
        if step.is_decode:
            self._late += 1
            if passing.is_due(self._late, len(rows)):
                self._pass_late()
            if not passing.commits:
                return rows[:0]
            at_end = (settled % size == 0).nonzero()[0]
            found: Rows = at_end[passing.frees(rows[at_end], settled[at_end] // size)]
            return found
        pages = settled // size
        whole = (pages > self._rows.committed[rows]) & (step.counts > np.maximum(step.draw_counts, 1))
        if admission.has_states:
            whole |= (step.draw_counts > 1) & (settled >= 0)
        if admission.frees_early:
            others = (~whole & (settled % size < step.counts)).nonzero()[0]  # those that may have filled a page
            whole[passing.pass_by(step.batch, others, pages[others])] = True
        return whole.nonzero()[0]

    def _pass_late(self) -> None:
        """Windows move on as far as has settled. While all decode, they do so every few steps, for all at once. Commits
        nothing: a step is being made, and a request may get pages that are still arriving."""
        if self._late:
            self._late, running = 0, self._rows.together()
            whole = self._rows.settled[running.rows] // self._cache.page_size
            self._cache.passing.pass_by(running, running.units[:-1], whole)

    def _commit(self, requests: Sequence[Request]) -> None:
        """Settled tokens of these requests can be reused."""
        kvs = [request.kv for request in requests if request.kv is not None]
        if kvs:
            rows = [kv.row for kv in kvs]
            settled, tokens = self._rows.settled[rows], self._rows.tokens
            lengths = settled.tolist()
            self._cache.commit(kvs, [tokens[row, :length] for row, length in zip(rows, lengths, strict=True)])
            self._rows.committed[rows] = settled // self._cache.page_size

    def _launchable(self) -> StepRows:
        """Running requests whose prefix is resident, or arriving. A request whose prefix is lost begins
        again."""
        if not self._ahead.loads:
            return self._rows.together()
        absent = set()
        for request in [request for request in self._rows.running if request.kv is not None and request.kv.loads]:
            assert request.kv is not None
            if request.kv.has_failed and not request.pending:
                self._put_back(request, "a cached prefix turned out to be damaged")
            elif not request.kv.is_ready:
                absent.add(request)
        running = self._rows.together()
        if not absent:
            return running
        there = [at for at, request in enumerate(running.requests) if request not in absent]
        return running.part(np.array(there, dtype=np.intp))

    def _grant_decodes(self, next_step: NextStep, running: StepRows, decoding: Bools | None) -> None:
        """Allocate for requests that continue by one token each, and their drafts. Usually they are all, which is None,
        or those of the step before, and none of them is examined."""
        if decoding is None and len(running) <= self._max_tokens:
            decodes = running
        else:
            every = running.units[:-1] if decoding is None else decoding.nonzero()[0]
            places = every[: self._max_tokens]
            decodes, serials = self._decoding, running.serials[places]
            if not np.array_equal(serials, decodes.serials):
                decodes = running.part(places)
        shared = bool(self._waiting) or len(decodes) < len(running)
        counts = self._rows.drafts.tokens_of(decodes, self._max_tokens - len(decodes), shared=shared)
        self._decoding = decodes
        if not len(decodes):
            return
        try:
            if self._per_step == 1:
                self._cache.extend(decodes, 1)
            else:
                self._cache.reserve(decodes, self._rows.launched[decodes.rows] + self._per_step)
        except OutOfPages:
            self._pass_late()
            self._rows.drafts.remove(decodes.rows)
            self._grant(next_step, decodes.requests, decodes.ones.tolist())
        else:
            next_step.add_decodes(decodes, counts)

    def _limit(self, next_step: NextStep, running: StepRows, prompts: Rows, counts: Lengths) -> None:
        """Limit what the step computes of prompts beside requests that decode."""
        if not self.chunks.limits:
            return
        rows, decodes = self._rows, running.rows[:0]
        admits = self._waiting and not self._lacks_room and self.num_running < self._max_running
        if len(prompts) or admits:
            decodes = running.rows[~rows.in_prefill(running.rows)]
        num_drafts = next_step.num_tokens - (len(next_step.decodes) if next_step.decodes is not None else 0)
        waiting = (len(self._waiting), self.queue.num_tokens) if admits else (0, 0)
        starts = rows.launched[running.rows[prompts]]
        self.chunks.begin(rows.known[decodes], num_drafts, Backlog(starts, counts, *waiting))

    def _left(self, next_step: NextStep) -> int:
        """How many more tokens of prompts the step may compute."""
        return 0 if self.chunks.spent else self._max_tokens - next_step.num_tokens

    def _chunk(self, request: Request, ready: int, limit: int) -> int:
        """How many tokens of a prompt to compute now."""
        assert request.kv is not None
        count, admission = self.chunks.take(request.num_launched, ready, limit), self._cache.admission
        return admission.at_once(request.kv, count) if admission.frees_early else count

    def _grant(self, next_step: NextStep, requests: list[Request], counts: list[int]) -> None:
        """Allocate for these, in one operation, and add them to the step. If they do not fit, preempt until the rest
        fits; while a step is in flight, add the first ones that fit."""
        while requests:
            try:
                self._allocate(requests, counts)
                break
            except OutOfPages:
                if self._cache.fences.num_open:
                    num_fit = self._allocate_first(requests, counts)
                    requests, counts = requests[:num_fit], counts[:num_fit]
                    break
            victim = self._victim()
            if victim in requests:
                at = requests.index(victim)
                requests, counts = requests[:at] + requests[at + 1 :], counts[:at] + counts[at + 1 :]
            next_step.drop(victim)
            self._preempt(victim)
        next_step.add(requests, counts)

    def _allocate_first(self, requests: Sequence[Request], counts: Sequence[int]) -> int:
        """Allocate for as many of the first ones as fit, if not all do. Returns how many. O(log) attempts."""
        fit, short = 0, len(requests)  # the first `fit` have room; the first `short` do not fit
        while short - fit > 1:
            middle = (fit + short) // 2
            try:
                self._allocate(requests[fit:middle], counts[fit:middle])
                fit = middle
            except OutOfPages:
                short = middle
        return fit

    def _allocate(self, requests: Sequence[Request], counts: Sequence[int]) -> None:
        """Make room for so many more tokens of each, or raise OutOfPages with nothing changed."""
        kvs = [request.kv for request in requests if request.kv is not None]
        if self._per_step == 1:
            self._cache.extend(kvs, counts)
        else:
            self._cache.reserve(kvs, [r.num_launched + n for r, n in zip(requests, counts, strict=True)])

    def _step(self, next_step: NextStep) -> Step:
        """Make and launch the step."""
        decodes = next_step.decodes
        counts = next_step.counts()
        if decodes is not None and counts is None:
            step = self._rows.step(decodes)
        else:
            of = self._rows.of(next_step.others, decodes) if next_step.others or decodes is None else decodes
            step = self._rows.step(of, counts)
        step.admitted = [request for request in next_step.begun if request.is_new and request.kv is not None]
        for request in step.admitted:
            request.is_new = False
        return step

    def _victim(self) -> Request:
        """The request that is preempted first."""
        running, is_over = self._rows.running, self._cache.tree.tenants.is_over
        return next((request for request in reversed(running) if is_over(request.namespace)), running[-1])

    def _preempt(self, request: Request, reason: str = "was preempted: older requests needed its pages") -> None:
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._put_back(request, reason)

    def _put_back(self, request: Request, reason: str, *, damaged: bool = False) -> None:
        """A running request waits again, without memory."""
        kv, settled = request.kv, request.num_settled
        assert kv is not None and not request.pending
        failed = damaged or kv.has_failed
        self._rows.unbind(request)
        request.kv = None
        self._cache.finish(kv, None if failed else request.tokens[:settled], returns=True)
        request.read_ahead = False  # storage may have the damaged pages
        if failed:
            self._ahead.settle_moves()  # the damaged pages are deleted now, and can be fetched
        request.state = RequestState.WAITING
        request.start_at(0)
        request.wait_reason = reason
        self.queue.add(request)

    def _admission_state(self) -> tuple[int, ...]:
        """What has to change before a waiting request may be admitted: pages were freed or cached, a prompt is
        computed, or the waiting or running requests change."""
        computing = self._leaders.num_computing()
        return (self._cache.num_changes, self._arrivals, len(self._waiting), self.num_running, computing)

    def _admit(self, next_step: NextStep) -> bool:
        """Admit waiting requests, in the policy's order. True if another attempt is useless until `_admission_state`
        changes."""
        hits: dict[str, PrefixHit] = {}
        self._leaders.renew()

        def match(request: Request) -> PrefixHit:
            hit = hits.get(request.request_id)
            if hit is None or not self._cache.admission.is_current(hit):
                hit = hits[request.request_id] = self._cache.match(
                    request.tokens, request.namespace, most_tokens=request.most_cached
                )
            return hit

        def cached(request: Request) -> int:
            following = request.follows
            return following.num_cached if following and self._follows(request) else match(request).num_tokens

        deferred, quiet, passed, tenants = 0, True, False, self._cache.tree.tenants
        order = iter(self.queue.in_order(cached))
        while (request := next(order, None)) is not None:
            if deferred >= self._max_running:
                return quiet
            if self.num_running >= self._max_running:
                request.wait_reason = f"{self._max_running} requests run, which is the limit"
                return quiet
            if passed and (why := tenants.blocks(request.namespace, request.num_tokens // self._cache.page_size)):
                request.wait_reason = why
                continue
            if not request.read_ahead and self._ahead.prefetches:
                later = [] if self._ahead.can_prefetch else list(order)
                self._prefetching.start(request, later)
                order = iter(later) if later else order
            if self._prefetching.awaits(request):
                deferred, quiet = deferred + 1, False
                continue
            if self._follows(request):
                deferred += 1
                continue
            hit = match(request)
            num_held, row = held_row(self._cache.sessions, request, hit.num_tokens)
            if num_held < 0:
                request.wait_reason = "waits for the last step of its session's turn before"
                deferred, quiet = deferred + 1, False
                continue
            # Also if the step has no tokens left: a leader marks the place that a follower waits for.
            leader = self._leaders.of(request, hit) if row is None else None
            if leader is not None:
                request.wait_reason = f"waits for the prefix that {leader[0].request_id} is computing"
                request.follows = leader[1]
                deferred, quiet = deferred + 1, quiet and leader[1] is not None
                continue
            left = self._left(next_step)
            if not left:
                request.wait_reason = self.chunks.why if self.chunks.spent else request.wait_reason
                return False
            self._lacks_room = not self._fits(request, row or hit)
            if self._lacks_room and row is not None and not self.num_running and request.turn is not None:
                self._cache.sessions.give_up(request.turn)
                hit, num_held = match(request), 0
                self._lacks_room = not self._fits(request, hit)
            is_alone = self._lacks_room and not self.num_running
            if is_alone and hit.num_pages and self._cache.plan.arena is not None:  # the bytes it begins on are not room
                hit = self._cache.match(request.tokens, request.namespace, most_tokens=0)
                hit.lacks_room = True
                self._lacks_room = not self._fits(request, hit)
            if not self._lacks_room:
                try:
                    self._begin(next_step, request, hit, left, num_held)
                except OutOfPages as error:
                    request.wait_reason, self._lacks_room = error.message, True
            if not self._lacks_room:
                self._lacks_room = passed
                self._leaders.join(request)
            elif tenants.passes(request.namespace):
                deferred, passed = deferred + 1, True
            else:
                return quiet
        return quiet

    def _follows(self, request: Request) -> bool:
        """Whether it waits for a leader that has committed nothing new."""
        return request.follows is not None and self._leaders.is_waited_for(request.follows)

    def _begin(self, next_step: NextStep, request: Request, hit: PrefixHit, limit: int, num_held: int) -> None:
        """A request begins on a hit, or after the `num_held` tokens that its session holds."""
        again = request.use is not None
        if num_held and request.turn is not None:
            kv = request.kv = self._cache.sessions.resume(
                request.turn,
                request.tokens,
                num_held,
                num_cached=hit.num_tokens,
                priority=request.priority,
                again=again,
                label=request.request_id,
            )
            self._decoding = self._decoding.part(self._decoding.rows[:0])  # its row may have been one of these
        else:
            kv = request.kv = self._cache.begin(
                request.tokens,
                request.namespace,
                hit=hit,
                priority=request.priority,
                resumed=again,
                label=request.request_id,
                asked=self._prefetching.asked(request, hit.num_tokens),
                user=request.turn.session.user if request.turn is not None else None,
            )
            if request.turn is not None:
                self._cache.sessions.began(request.turn, request.num_tokens, kv.num_cached, again=again)
        request.start_at(kv.num_cached)
        self._rows.bind(request)
        self._rows.committed[kv.row] = self._cache.rows.committed(kv) // self._cache.page_size
        if request.use is None:
            request.use, request.explanation = kv.use, kv.explanation
            self.chunks.admitted(request.num_tokens, kv.num_cached)
        next_step.begun.append(request)
        self._prefetching.stop(request)
        request.state, request.follows = RequestState.RUNNING, None
        self.queue.remove(request)
        if kv.is_ready:
            self._grant(next_step, [request], [self._chunk(request, request.num_known - request.num_launched, limit)])

    def _commit_settled(self) -> None:
        """Commit what running requests have computed, for the waiting ones. If no waiting prompt begins with the same
        page, it is committed at once later and not page by page. A request that lacks room may get it from duplicates
        that a commit frees."""
        rows, order = self._rows, self._rows.order
        asked = self._lacks_room or not rows.openings.keys().isdisjoint(self.queue.openings.keys())
        if not self._cache.share_prefixes or not asked:
            return
        whole = (rows.settled[order] // self._cache.page_size > rows.committed[order]).nonzero()[0]
        places = whole.tolist()
        if not self._lacks_room:
            openings = rows.terms["opening"][order[whole]].tolist()
            places = [*compress(places, map(self.queue.openings.__contains__, openings))]
        self._commit([rows.running[at] for at in places])

    def _fits(self, request: Request, begins: PrefixHit | RequestKV) -> bool:
        """Whether its whole known prompt fits, beside what is reserved for running requests and their next pages. If it
        does without rows of sessions, some of these end."""
        if reason := self._cache.resizing.why_nothing_fits:
            request.wait_reason = reason
            return False
        plan, size = self._cache.plan, self._cache.page_size
        sessions, why_not = self._cache.sessions, self._cache.admission.why_not
        rows = self._rows.order
        reached = -(-(self._rows.known[rows] + self._rows.pending[rows]) // size)
        # No further than its end, up to which the plan has admitted it.
        ahead = min(request.num_tokens + self._per_step, request.num_prompt_tokens + request.max_tokens)
        needed = plan.pages_of(ahead)
        spare = pages_for(self._per_step, size)
        claim = Claim(begins, needed, rows, reached, spare)
        own = request.turn.session if request.turn is not None else None
        request.wait_reason = make_room(sessions, why_not, claim, own if isinstance(begins, RequestKV) else None)
        # Running requests end. Pages held for waiting requests could block the first of them for ever.
        while request.wait_reason and not len(rows) and self._ahead.release_prefetched():
            request.wait_reason = why_not(claim)
        return not request.wait_reason

    def _finish(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            kv, settled = request.kv, request.num_settled
            assert kv is not None
            launched = request.num_launched
            self._rows.unbind(request)
            request.kv = None
            if request.turn is None:
                self._cache.finish(kv, request.tokens[:settled])
            else:
                request.grant = self._cache.sessions.end(request.turn, kv, request.tokens, settled, launched)
            request.end = kv.end
        else:
            self.queue.remove(request)
            if request.turn is not None:
                request.grant = self._cache.sessions.leave(request.turn, "it was aborted before it ran")
        self._prefetching.stop(request)
        request.state = RequestState.FINISHED
        del self._requests[request.request_id]
