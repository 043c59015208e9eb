"""RunningRows: tokens, lengths and terms of all running requests, by their row in the cache.

A step reads and advances them with a few operations on arrays, however many requests it has. `Request` shows its own
row.

Waiting requests whose prompts a running request computes wait for it, and reuse its pages. A waiting request looks
for a leader when it is considered. It then stores its leader and how many pages it waits for. It is considered again
when the leader has committed these pages, or is no leader any more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from quire.cache import KVCache, PrefixHit
from quire.cache.request_kv import RequestKV
from quire.cache.running import Lengths, Rows
from quire.scheduler.request import Following, Request
from quire.scheduler.speculation import DraftRows
from quire.scheduler.step import TERMS, Settled, Step, StepRows, Terms, terms_of
from quire.spec.ids import Bools, Ids
from quire.spec.speculation import SpeculativeConfig

_NO_PLACES: Rows = np.empty(0, dtype=np.intp)
_order = attrgetter("order")


class RunningRows:
    """One row for each request that the cache has room for, of `width` tokens. `serials` are the cache's.

    Memory is allocated as rows are written, so a row costs as much as its longest request. `running` are the requests
    in the order of `Request.order`; `kvs` and `order` are their cache records and rows.
    """

    def __init__(self, serials: Lengths, width: int, speculation: SpeculativeConfig | None = None) -> None:
        num_rows = len(serials)
        self.width = width
        self.tokens: Ids = np.zeros((num_rows, width), dtype=np.int32)
        self.flat: Ids = self.tokens.reshape(-1)  # a view
        self._lengths: Lengths = np.zeros((6, num_rows), dtype=np.int64)
        self.known, self.launched, self.settled, self.pending, self._drafted, self._accepted = self._lengths
        self.committed: Lengths = np.zeros(num_rows, dtype=np.int64)  # whole pages
        self._prompts: Lengths = np.zeros(num_rows, dtype=np.int64)  # a copy of the field of `terms`, read in one piece
        self.drafts = DraftRows(self.flat, self.known, self.launched, self.pending, speculation)
        self.serials = serials  # serial number of each row's request; 0: none
        self.terms: Terms = np.zeros(num_rows, dtype=TERMS)
        self.openings = Counter[int]()  # how many run with each `Request.opening`
        self.running: list[Request] = []
        self.kvs: list[RequestKV] = []
        self.order: Rows = np.empty(0, dtype=np.intp)
        self._all: StepRows | None = None  # None: other requests run now
        self._decode: Step | None = None  # the last step of all, if each decodes; None: lengths changed in another way

    def bind(self, request: Request) -> None:
        """A request begins in the row of its `kv`."""
        assert request.kv is not None
        row = request.kv.row
        request.bind(self.tokens[row], self._lengths[:, row])
        self.terms[row], self._prompts[row] = terms_of(request), request.num_prompt_tokens
        self.openings[request.opening] += 1
        at = bisect_left(self.running, request.order, key=_order)
        self.running.insert(at, request)
        self.kvs.insert(at, request.kv)
        self.order = np.concatenate((self.order[:at], [row], self.order[at:]))
        self._all = None

    def unbind(self, request: Request) -> None:
        """A request leaves its row."""
        assert request.kv is not None
        row = request.kv.row
        request.unbind()
        self.openings[request.opening] -= 1
        if not self.openings[request.opening]:
            del self.openings[request.opening]
        self.drafts.remove(np.array([row]))
        at = bisect_left(self.running, request.order, key=_order)
        del self.running[at], self.kvs[at]
        self.order = np.concatenate((self.order[:at], self.order[at + 1 :]))
        self._all = None

    def together(self) -> StepRows:
        """All running requests, in order."""
        if self._all is None:
            self._all = self._step_rows(self.running.copy(), self.kvs.copy(), self.order)
        return self._all

    def of(self, requests: Sequence[Request], first: StepRows | None = None) -> StepRows:
        """A batch of these requests, for steps, after those of `first`."""
        kvs = [request.kv for request in requests if request.kv is not None]
        rows = np.array([kv.row for kv in kvs], dtype=np.intp)
        if first is None:
            return self._step_rows(list(requests), kvs, rows)
        rows = np.concatenate((first.rows, rows))
        return self._step_rows([*first.requests, *requests], [*first.kvs, *kvs], rows)

    def _step_rows(self, requests: list[Request], kvs: list[RequestKV], rows: Rows) -> StepRows:
        return StepRows(requests, kvs, rows, self.serials[rows], self.terms, self.width)

    def ready(self, batch: StepRows) -> Lengths:
        """Tokens of each request that could be launched now, without drafts: none once its last token is pending, or
        while its next draw depends on pending tokens. `batch.ones` itself, in O(1), where `decodes_again` is true."""
        if self.decodes_again(batch):
            return batch.ones
        rows = batch.rows
        pending = self.pending[rows]
        known = self.known[rows] + pending
        ready: Lengths = known - self.launched[rows]
        ready[(known >= batch.limit) | (pending > batch.most_pending)] = 0
        return ready

    def decodes_again(self, batch: StepRows) -> bool:
        """Whether each of these can launch one token, as in the last step. O(1): what `ready` finds for requests whose
        lengths only that step, and its end, have changed. False where `ready` has to look."""
        last = self._decode
        again = last is not None and last.batch is batch and batch is self._all and batch.left > 1
        return again and not batch.in_flight

    def in_prefill(self, rows: Rows) -> Bools:
        """`Request.in_prefill` of the requests of these rows."""
        known = self.known[rows] + self.pending[rows]
        found: Bools = (known - self.launched[rows] > 1) | (self.settled[rows] < self._prompts[rows])
        return found

    # -- steps

    def step(self, batch: StepRows, counts: Lengths | None = None) -> Step:
        """Launch `counts[i]` tokens of each, drafts among them; without counts, one token of each.

        What is launched is counted so, and its draws are counted as pending.
        """
        rows = batch.rows
        if counts is None and self._decode is not None and self.decodes_again(batch):
            step = self._next_tokens(batch, self._decode.ends)
            batch.left, batch.in_flight = batch.left - 1, 1
            step.is_middle = batch.left > 1
            self.launched[rows], self.pending[rows] = step.ends, 1
            self._decode = step
            return step
        starts = self.launched[rows]
        pending = self.pending[rows]
        step = self._next_tokens(batch, starts) if counts is None else self._tokens_of(batch, starts, counts, pending)
        self._decode = None
        if np.count_nonzero(pending):
            owners = step.drawers if step.is_decode else np.repeat(batch.units[:-1], step.counts)
            unknown = (step.positions >= self.known[rows][owners]) & (pending[owners] > 0)
            step.future = unknown.nonzero()[0]
        elif step.is_decode and batch is self._all and len(batch):
            batch.left, batch.in_flight = int((batch.limit - step.ends).min()), 1
            self._decode = step
        self.launched[rows] = step.ends
        self.pending[rows] = pending + step.draw_counts
        self.drafts.remove(rows)
        return step

    def _next_tokens(self, batch: StepRows, starts: Lengths) -> Step:
        every = batch.units[:-1]
        return Step(
            batch=batch,
            starts=starts,
            counts=batch.ones,
            offsets=batch.units,
            positions=starts,
            draw_counts=batch.ones,
            drawers=every,
            draws=every,
            tokens=self.flat[batch.base + starts].astype(np.int64),
            future=_NO_PLACES,
            is_decode=True,
        )

    def _tokens_of(self, batch: StepRows, starts: Lengths, counts: Lengths, pending: Lengths) -> Step:
        rows, every = batch.rows, batch.units[:-1]
        offsets = np.zeros(len(batch) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        owners = np.repeat(every, counts)
        places = np.arange(len(owners)) + (starts - offsets[:-1])[owners]
        drafts = self.drafts.counts[rows]
        last = starts + counts >= self.known[rows] + pending + drafts
        draw_counts = np.where(last, 1 + drafts, 0)
        if np.count_nonzero(draw_counts == counts) == len(counts):  # each token is followed by a draw
            drawers, draws = owners, np.arange(len(owners))
        else:
            drawers = np.repeat(every, draw_counts)
            left = np.cumsum(draw_counts)[drawers] - np.arange(len(drawers))  # draws of the work from this one on
            draws = offsets[1:][drawers] - left
        step = Step(
            batch=batch,
            starts=starts,
            counts=counts,
            offsets=offsets,
            positions=places,
            draw_counts=draw_counts,
            drawers=drawers,
            draws=draws,
            tokens=self.flat[batch.base[owners] + places].astype(np.int64),
            future=_NO_PLACES,
        )
        self.drafts.branch(step, drafts)
        return step

    def settle(self, step: Step, tokens: Lengths, kept: Lengths | None) -> tuple[Settled, Lengths, list[int]]:
        """A step has finished; it drew `tokens`, of which work i keeps its first `kept[i]`, by default all.

        Requests that are done get their `finish_reason`, and no token after it. Returns their tokens, the number of
        settled tokens of each work (-1 if its row has another request now), and the works that are done.
        """
        batch, draw_counts = step.batch, step.draw_counts
        if step is self._decode and batch is self._all:
            return self._settle_decode(step, tokens)
        self._decode = None
        live = self.serials[batch.rows] == batch.serials
        all_live = np.count_nonzero(live) == len(live)
        if step.is_decode and all_live:
            return self._settle_decode(step, tokens)
        kept = draw_counts if kept is None else kept
        several = len(step.drawers) > int(np.count_nonzero(draw_counts))
        owners, within = step.drawers, None
        if several:
            assert (kept <= draw_counts).all() and (kept[draw_counts > 0] > 0).all(), "a work keeps none of its draws"
            within = np.arange(len(owners)) - (np.cumsum(draw_counts) - draw_counts)[owners]
            some = live[owners] & (within < kept[owners])
            owners, tokens, within = owners[some], tokens[some], within[some]
        elif not all_live:
            some = live[owners]
            owners, tokens = owners[some], tokens[some]
        every = slice(None) if len(owners) == len(batch) and not several else owners  # a view is cheaper than a copy
        after = self.known[batch.rows[every]] + (1 if within is None else 1 + within)
        self.flat[batch.base[every] + (after - 1)] = tokens
        outputs = after - batch.prompt[every]
        ends = after >= batch.limit[every]
        stops = batch.stopping(owners, tokens, outputs) if batch.stops_early else None
        if stops is not None:
            ends |= stops
        noted = ends | (outputs == 1)
        done: list[int] = []
        if np.count_nonzero(ends):
            kept = kept.copy()
            done = _end(batch, owners, tokens, within, stops, ends, kept)
            if within is not None:
                some = within < kept[owners]
                owners, tokens, noted = owners[some], tokens[some], noted[some]
        settled = step.ends - (draw_counts - kept)
        if not all_live:
            settled[~live] = -1
        self._advance(batch, live if not all_live else None, settled, kept, draw_counts, several=several)
        return _settled(batch, owners, tokens, noted, kept, several=several), settled, done

    def _settle_decode(self, step: Step, tokens: Lengths) -> tuple[Settled, Lengths, list[int]]:
        """As `settle`, for a step in which each work draws one token and all requests still run."""
        batch, ends, rows = step.batch, step.ends, step.batch.rows
        self.flat[batch.base + ends] = tokens
        after = ends + 1
        self.settled[rows], self.known[rows] = ends, after
        if step is self._decode:
            batch.in_flight, self.pending[rows] = 0, 0
        else:
            self.pending[rows] -= 1
        if step.is_middle and not batch.stops_early:
            return Settled(batch.requests, batch.ones, tokens, []), ends, []
        outputs = after - batch.prompt
        at_end = after >= batch.limit
        stops = batch.stopping(step.drawers, tokens, outputs) if batch.stops_early else None
        if stops is not None:
            at_end |= stops
        done: list[int] = []
        if np.count_nonzero(at_end):
            done = _end(batch, step.drawers, tokens, None, stops, at_end, batch.ones)
        noted = (at_end | (outputs == 1)).nonzero()[0].tolist()
        return Settled(batch.requests, batch.ones, tokens, noted), ends, done

    def _advance(
        self, batch: StepRows, live: Bools | None, settled: Lengths, kept: Lengths, drawn: Lengths, *, several: bool
    ) -> None:
        rows = batch.rows
        if live is not None:
            rows, settled, kept, drawn = rows[live], settled[live], kept[live], drawn[live]
        self.settled[rows] = settled
        self.known[rows] += kept
        self.pending[rows] -= drawn
        if several:
            self.launched[rows] -= drawn - kept
            self._drafted[rows] += np.maximum(drawn - 1, 0)
            self._accepted[rows] += np.maximum(kept - 1, 0)


def _end(
    batch: StepRows,
    owners: Rows,
    tokens: Lengths,
    within: Lengths | None,
    stops: Bools | None,
    ends: Bools,
    kept: Lengths,
) -> list[int]:
    """The requests that these draws end, each with the first draw that ends it. Returns their works."""
    done = []
    for at in ends.nonzero()[0].tolist():
        work = int(owners[at])
        request = batch.requests[work]
        if request.finish_reason is None:
            kept[work] = 1 if within is None else within[at] + 1
            request.finish_reason = "length"
            if stops is not None and stops[at]:
                request.finish_reason, request.stop_token = "stop", int(tokens[at])
            done.append(work)
    return done


def _settled(batch: StepRows, owners: Rows, tokens: Lengths, noted: Bools, kept: Lengths, *, several: bool) -> Settled:
    if not several:
        whole = len(owners) == len(batch)
        requests = batch.requests if whole else [batch.requests[i] for i in owners.tolist()]
        return Settled(requests, kept[owners], tokens, noted.nonzero()[0].tolist())
    is_first = np.ones(len(owners), dtype=np.bool_)
    np.not_equal(owners[1:], owners[:-1], out=is_first[1:])
    first = is_first.nonzero()[0]
    works = owners[first]
    said = np.logical_or.reduceat(noted, first) if np.count_nonzero(noted) else noted[:0]
    requests = [batch.requests[i] for i in works.tolist()]
    return Settled(requests, kept[works], tokens, said.nonzero()[0].tolist())


class NextStep:
    """Works of the step that is being made, which have room: decodes with their drafts, if any, then others with their
    counts."""

    def __init__(self) -> None:
        self.decodes: StepRows | None = None
        self.others: list[Request] = []
        self.begun: list[Request] = []
        self.num_tokens = 0
        self._own: Lengths | None = None  # tokens of each decode; None: one each
        self._counts: list[int] = []

    def add_decodes(self, decodes: StepRows, counts: Lengths | None) -> None:
        """Requests that continue by `counts[i]` tokens each, the last known one and drafts; None: one token each."""
        self.decodes, self._own = decodes, counts
        self.num_tokens = len(decodes) if counts is None else int(counts.sum())

    def add(self, requests: list[Request], counts: list[int]) -> None:
        """Other requests, with the tokens that the step computes of each."""
        self.others += requests
        self._counts += counts
        self.num_tokens += sum(counts)

    def drop(self, request: Request) -> None:
        """The step has no room any more."""
        if self.decodes is not None and request in self.decodes.requests:
            others = np.array([at for at, r in enumerate(self.decodes.requests) if r is not request], dtype=np.intp)
            self.add_decodes(self.decodes.part(others), None if self._own is None else self._own[others])
            self.num_tokens += sum(self._counts)
        if request in self.others:
            at = self.others.index(request)
            del self.others[at]
            self.num_tokens -= self._counts.pop(at)

    def counts(self) -> Lengths | None:
        """Tokens of each work; None if each has one and decodes."""
        if self.decodes is None:
            return np.array(self._counts, dtype=np.int64)
        if not self._counts and self._own is None:
            return None
        own = self.decodes.ones if self._own is None else self._own
        return np.concatenate((own, np.array(self._counts, dtype=np.int64)))


class Leaders:
    """Leaders of one scheduler. Call `renew` before waiting requests are considered, `join` for each that begins."""

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
            common = _common_tokens(other.tokens, request.tokens)
            shared = min(common, request.num_tokens - 1, request.most_cached) // size
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
