"""KVCache: the one door to cached memory for everything above. Pages, frames, sharing and eviction behind seven verbs.

    match    how much of a prompt is cached                     changes nothing
    begin    open a request on that prefix                      leases it
    extend   room for more tokens, for a whole batch            evicts if it must; all or nothing
    commit   tokens that have settled become reusable           duplicates are given up
    finish   end a request                                      private pages are given up
    evict    forget cached pages                                on demand; extend does it by itself
    audit    check every law                                    see `quire.cache.audit`

What a request gives up goes through a fence: its pages are handed out again, and its lease is released, only when every
step that was in flight at that moment has settled (`open_fence`, `close_fence`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from quire.cache.admission import first_refusal, group_claim, pages_claim
from quire.cache.audit import audit
from quire.cache.build import build_groups
from quire.cache.explain import explain_prompt, names_of
from quire.cache.fences import Fences, Retired
from quire.cache.groups import NO_PAGES, Given, Pieces, RowPages
from quire.cache.kept_frames import KeptFrames
from quire.cache.prefetch import Prefetch
from quire.cache.prefetcher import Prefetcher
from quire.cache.prefix_hit import Choice, PrefixHit
from quire.cache.request_kv import RequestKV
from quire.cache.resuming import resume_point
from quire.cache.retention import RETAIN_SHARE, Retention
from quire.cache.room import Room
from quire.cache.running import Lengths, Rows, RunningBatch
from quire.cache.running_tables import RunningTables
from quire.cache.statistics import CacheStatistics, cache_statistics
from quire.cache.tier_settings import TierSettings
from quire.cache.tiering import Tiering
from quire.cache.worth_loading import choose, stands
from quire.errors import InvalidInput, OutOfPages
from quire.memory.allocator import in_order, page_allocator
from quire.memory.frames import FrameTable
from quire.observe.explain import Cause, Explanation
from quire.plan.budget import MemoryPlan
from quire.prefix.evict import DEFAULT_POLICY, eviction_policy
from quire.prefix.flush import sweep
from quire.prefix.hashing import layout_identity
from quire.prefix.node import Lease
from quire.prefix.shelf import Rank
from quire.prefix.tiered import TieredRadixCache
from quire.spec.events import CacheEvent, Namespace
from quire.spec.ids import Ids, Tier
from quire.spec.pages import pages_for

NAMESPACE = Namespace()
CHECKPOINT_INTERVAL = 512  # tokens between places where a request leaves what it carries, if frames are to spare


class KVCache(RunningTables):
    """The cache of one engine, on the plan's pages. Single-threaded: the engine's step loop is its only caller.

    `plan` is the `memory` of what `quire.plan.planner.make_plan` returns, or made by hand (`quire.testing.small_plan`).
    With `explains`, every request that begins learns why no more of its prompt was cached (`RequestKV.explanation`),
    and the tokens are counted by cause. Of evicted prefixes the newest `remembered` tokens are kept for that and for
    the eviction policy, by default four times what the pool holds. `seconds` is the clock that says when it happened.
    With `page_tables`, `page_table_changes` tells a device what it has to hear of. `retain_share` is what of the plan's
    pages may be kept for callers (`retention`).
    """

    def __init__(
        self,
        plan: MemoryPlan,
        *,
        eviction: str = DEFAULT_POLICY,
        share_prefixes: bool = True,
        emit: Callable[[CacheEvent], None] | None = None,
        model_identity: bytes = b"",
        checkpoint_interval: int = CHECKPOINT_INTERVAL,
        explains: bool = False,
        remembered: int | None = None,
        page_tables: bool = False,
        seconds: Callable[[], float] = time.monotonic,
        tiers: TierSettings | None = None,
        retain_share: float = RETAIN_SHARE,
    ) -> None:
        num_pages = plan.num_pages + (tiers.num_pages(plan) if tiers is not None else 0)
        below = (Tier.HOST,) if tiers is not None else ()
        following = [index for index, group in enumerate(plan.groups) if not group.reach.carried]
        table = FrameTable(num_pages, len(plan.groups), (Tier.DEVICE, *below))
        super().__init__(plan, table, following, follows=page_tables)
        self.explains = explains
        self._seconds = seconds
        self.share_prefixes = share_prefixes
        identity = layout_identity(model_identity, [group.layout.fingerprint() for group in plan.groups])
        self.tree = TieredRadixCache(
            plan.page_size,
            eviction_policy(eviction),
            emit=emit,
            identity=identity,
            remembered=4 * plan.num_tokens if remembered is None else remembered,
            seconds=seconds,
        )
        self.pages = page_allocator(num_pages, plan.page_size, "pages")
        self.groups = build_groups(plan, table, self.pages, self.tree, checkpoint_interval)
        self.holders: list[Callable[[], Sequence[Lease]]] = []  # who else keeps prefixes, for audits
        self.tiers = None
        if tiers is not None:
            self.tiers = Tiering(tiers, plan, table, self.groups, self.tree, identity, self._give_back, seconds)
            self.holders.append(self.tiers.leases)
        self.prefetcher = None
        if self.tiers is not None and tiers is not None and tiers.stores:
            self.prefetcher = Prefetcher(self.tiers, self.tree, self.groups, self.pages, seconds)
            self.holders.append(self.prefetcher.leases)
        self.retention = Retention(
            self.tree,
            plan,
            KeptFrames(self.groups, self.tiers, largest=pages_for(plan.largest_request, plan.page_size)),
            share=retain_share,
            seconds=seconds,
            on_let_go=self._room_came_back,
        )
        self.holders.append(lambda: self.retention.leases)
        self._room = Room(self)
        self._partial = tuple(group for group in self.groups if not group.reach.whole)
        self._settling = self.groups if self.tiers is not None else self._partial  # those that hear of what settles
        self._carried = tuple(group for group in self.groups if group.reach.carried)
        self._scarce = tuple(g for g in self.groups if g.reach.carried or g.num_frames < num_pages)
        self._fences = Fences(seconds)
        self.num_changes = 0  # how often something came back or became cached: whom it was too full for may ask again
        self._live: dict[int, RequestKV] = {}
        self._prompt_tokens = self._hit_tokens = 0
        self._causes = dict.fromkeys(map(str, Cause), 0)  # prompt tokens, while `explains`
        self._committed_pages = self._duplicate_pages = 0
        self._evicted_pages = self._evictions = self._peak_shared = 0

    # -- the verbs

    def match(self, tokens: Ids, namespace: Namespace = NAMESPACE) -> PrefixHit:
        """How many leading tokens of a prompt can be reused: where every group can resume, in whole pages.

        At most all but one token: the last one is always computed, since its output is what the request came for.
        """
        found, size = self.tree.match(namespace, tokens), self.page_size
        limit = min(found.num_pages, max(0, len(tokens) - 1) // size)
        if self.tiers is not None and limit:
            chosen = choose(self.tiers, found, limit, size)
            held_back = (found.num_pages - chosen.num_pages) * size
            return PrefixHit(found, size, held_back, self._num_dropped, self.num_changes, chosen)
        num_pages, limited = resume_point(self._partial, found.pages[:limit])
        held_back = (found.num_pages - num_pages) * size
        return PrefixHit(found, size, held_back, self._num_dropped, self.num_changes, Choice(num_pages, limited))

    def is_current(self, hit: PrefixHit) -> bool:
        """Whether a hit still holds: no edge was cut since, no page lost a frame, and what it would load is worth it as
        before. It may have become longer."""
        is_same = hit.match.version == self.tree.version and hit.num_dropped == self._num_dropped
        return is_same and (self.tiers is None or stands(self.tiers, hit.choice))

    def begin(
        self,
        tokens: Ids,
        namespace: Namespace = NAMESPACE,
        *,
        hit: PrefixHit | None = None,
        priority: int = 0,
        resumed: bool = False,
        label: str = "",
    ) -> RequestKV:
        """Open a request on the cached prefix of `tokens`, which stays until `finish`. Takes no memory.

        Its first `num_cached` tokens are allocated and committed; the rest has to be computed. A request that is
        `resumed` after a preemption is not counted again in the statistics. `label` names it to those whose prefixes
        are evicted for it. What of the prefix is below the device is loaded: room is made for that, and no step may be
        launched for the request before `is_ready`. Raises OutOfPages when all `max_requests` rows are taken, or where
        there is no room to load.
        """
        if not self._table.free:
            raise OutOfPages(group="rows", wanted=1, free=0, held_by=f"{len(self._live)} running requests hold them")
        grown = self.explains and hit is not None and hit.num_changes != self.num_changes
        if hit is None or grown or not self.is_current(hit):
            hit = self.match(tokens, namespace)
        explanation = self.explain(tokens, namespace, hit=hit) if self.explains and not resumed else None
        lease = self.tree.lease(hit.match, hit.num_pages, priority=priority)
        pages = hit.pages
        loads = self._room.bring(lease, namespace, pages, label) if self.tiers is not None else []
        row = self._table.free.pop()
        kv = RequestKV(
            row, namespace, lease, hit.num_tokens, len(tokens), label, explanation, shares=self.share_prefixes
        )
        kv.loads = loads
        kv.num_storage = hit.choice.storage_pages * self.page_size
        kv.num_host = hit.choice.host_pages * self.page_size - kv.num_storage
        self._table.write_run(row, 0, pages)
        for group in self._partial:
            group.begin(row, pages)
        if self.tiers is not None:
            self.tiers.begun(hit.choice, namespace, lease.node, pages, resumed=resumed)
        if self._partial:
            kv.mark_ends(hit.num_pages, hit.num_matched, max(0, len(tokens) - 1) // self.page_size)
        self._allocated[row] = self._committed[row] = hit.num_tokens
        self._live[row] = kv
        if not resumed:
            self._prompt_tokens += len(tokens)
            self._hit_tokens += hit.num_tokens
            if explanation is not None:
                for reason in explanation.reasons:
                    self._causes[reason.cause] += reason.tokens
        self._peak_shared = max(self._peak_shared, self.tree.num_shared)
        return kv

    def explain(self, tokens: Ids, namespace: Namespace = NAMESPACE, *, hit: PrefixHit | None = None) -> Explanation:
        """Why a prompt's prefix is cached as far as it is and not further: a cause for every token. Changes nothing."""
        if hit is None or not self.is_current(hit):
            hit = self.match(tokens, namespace)
        parting = self.tree.parting(namespace, tokens)
        return explain_prompt(len(tokens), self.page_size, hit, parting, self._seconds())

    def batch(self, kvs: Sequence[RequestKV]) -> RunningBatch:
        """These requests as one, each once, for the verbs of a step. Make it again when one ends or another joins."""
        return RunningBatch(kvs, self._distinct(self._rows_of(kvs)))

    def extend(self, kvs: Sequence[RequestKV] | RunningBatch, counts: int | Sequence[int] | Lengths) -> None:
        """Make room for `counts[i]` more tokens in each request (one number: in every one), evicting cached pages if
        that is needed.

        One vectorised operation for the batch; only requests that reach a new page cost an id, and the next token of a
        `RunningBatch` costs arithmetic only. Raises OutOfPages, with nothing evicted and nothing changed, where even
        evicting everything would not do, and InvalidInput for counts below zero or beyond the plan's context.
        """
        if isinstance(kvs, RunningBatch) and isinstance(counts, int) and counts == 1:
            self._extend_by_one(kvs)
            return
        rows = self._rows_of(kvs) if isinstance(kvs, RunningBatch) else self._distinct(self._rows_of(kvs))
        after = self._allocated[rows] + np.asarray(counts, dtype=np.int64)
        if len(rows) and (np.min(counts) < 0 or np.maximum.reduce(after) > self.plan.context):
            raise self._beyond_context(int(after.max()))
        self._extend_to(kvs, rows, after)

    def reserve(self, kvs: Sequence[RequestKV] | RunningBatch, lengths: Sequence[int] | Lengths) -> None:
        """Make room for `lengths[i]` tokens in each request that has less: how far a step may run ahead of what has
        settled. As `extend`, but that it may go beyond the plan's context, as far as rows are longer than that, where
        it is cut."""
        rows = self._rows_of(kvs) if isinstance(kvs, RunningBatch) else self._distinct(self._rows_of(kvs))
        most = np.minimum(np.asarray(lengths, dtype=np.int64), self._table.width * self.page_size)
        self._extend_to(kvs, rows, np.maximum(self._allocated[rows], most))

    def _extend_to(self, kvs: Sequence[RequestKV] | RunningBatch, rows: Rows, after: Lengths) -> None:
        """Room for `after[i]` tokens in each row, which has no more than that."""
        before = self._allocated[rows]
        have = -(-before // self.page_size)
        new = -(-after // self.page_size) - have
        num_new = int(new.sum())
        self._make_room(rows, num_new, kvs)
        pages = self._grow(rows, num_new)
        if len(rows) == 1:
            self._table.write_run(int(rows[0]), int(have[0]), pages)
        elif num_new:
            first = rows * self._table.width + have - (np.cumsum(new) - new)
            places: Rows = np.repeat(first, new) + np.arange(num_new)
            self._table.write(places, pages)
        self._allocated[rows] = after
        self._epoch += 1

    def _extend_by_one(self, batch: RunningBatch) -> None:
        """The next token of every request of a batch."""
        self._refresh(batch)
        if batch.room < 1 and len(batch):
            raise self._beyond_context(self.plan.context + 1)
        rows, lengths, filled, size = batch.rows, batch.lengths, batch.filled, self.page_size
        crossing = (filled == size).nonzero()[0]
        num_new = len(crossing)
        if num_new or self._carried:
            self._make_room(rows, num_new, batch)
            pages = self._grow(rows, num_new)
            if num_new:
                filled[crossing] = 0
                self._table.write(rows[crossing] * self._table.width + lengths[crossing] // size, pages)
        lengths += 1
        filled += 1
        batch.room -= 1
        self._allocated[rows] = lengths
        self._epoch = batch.epoch = self._epoch + 1
        for slots, column in zip(batch.slots, self._columns, strict=True):
            slots += 1
            if num_new:
                slots[crossing] = column[pages] * np.int32(size)

    def commit(self, kv: RequestKV, tokens: Ids) -> None:
        """Say that `tokens`, all of the request's from its first on, have settled: the steps that wrote them are done.

        Their whole pages become reusable. Where another request cached the same tokens meanwhile, its pages take the
        place of ours in the row, and ours are given up:

            |-- protected --|-- cached by another --|-- whole pages of ours --|-- part of a page --|
                             ours are retired         enter the tree            stays private
        """
        row = self._row_of(kv)
        if not self._committed[row] <= len(tokens) <= self._allocated[row]:
            have, room = self._committed[row], self._allocated[row]
            raise InvalidInput(f"{len(tokens)} tokens cannot settle: {have} have, and there is room for {room}.")
        start, end = int(self._committed[row]) // self.page_size, len(tokens) // self.page_size
        self._committed[row] = len(tokens)
        if end == start:
            return
        if self.tiers is not None and self.tiers.num_bad and kv.shares:
            kv.shares = not self.tiers.is_bad_from(self.tree.match(kv.namespace, tokens).pages[start:end])
        pages = self._rows[row]
        if not kv.shares:
            whole = RowPages(row, pages, end)
            cached = kv.lease.num_pages
            self._retire(given=[part for group in self._partial for part in group.passed(whole, cached)])
            return
        inserted = self.tree.insert(kv.lease, tokens[start * self.page_size : end * self.page_size], pages[start:end])
        duplicates = inserted.duplicates
        if len(duplicates):
            duplicates = duplicates.copy()  # a view of the row that is rewritten next
            self._table.write_run(row, start, inserted.pages)
            self._epoch += 1
        self.num_changes += 1
        self._committed_pages += end - start
        self._duplicate_pages += len(duplicates)
        given: list[Given] = []
        if self._settling:
            whole = RowPages(row, pages, end)
            given = [part for group in self._settling for part in group.commit(whole, start, duplicates, kv.marks)]
        if self.tiers is not None:
            self.tiers.committed(kv, tokens[: end * self.page_size], pages[:end], start, start + len(duplicates))
        self._retire(duplicates, given=given)

    def finish(self, kv: RequestKV, tokens: Ids | None = None, *, returns: bool = False) -> None:
        """End a request: commit `tokens` if given, release its lease, give up its private pages and its row.

        Without `tokens` nothing more becomes reusable: for aborts and preemption. What was committed stays cached, and
        where it `returns` is worth a copy below the device at once.
        Raises LeaseError if it has ended already.
        """
        row = self._row_of(kv)
        if tokens is not None:
            self.commit(kv, tokens)
            if kv.shares:
                self.tree.ended(kv.lease, tokens[kv.lease.num_pages * self.page_size :], len(tokens) - kv.num_prompt)
        first, last = kv.lease.num_pages, pages_for(int(self._allocated[row]), self.page_size)
        private = self._rows[row, first:last].copy()
        given: list[Given] = []
        if self._partial:
            whole = RowPages(row, self._rows[row, :last].copy(), first)
            given = [part for group in self._partial for part in group.finish(whole)]
        if self.tiers is not None and first and tokens is not None and kv.shares:
            self.tiers.finished(kv, self._rows[row, :first].copy(), returns=returns)
        self._rows[row, :last] = 0
        self._allocated[row] = self._committed[row] = 0
        del self._live[row]
        self._table.free.append(row)
        kv.row = -1
        self._epoch += 1
        self._ended += 1
        self._retire(private, kv.lease, given)

    def evict(self, num_pages: int, cause: str = "") -> int:
        """Forget up to `num_pages` cached pages that no request holds, and what is cached behind them below the device,
        for `cause`; returns how many were."""
        victims = self.tree.evict(num_pages, cause)
        self._evicted_pages += len(victims)
        self._evictions += bool(len(victims))
        self._give_back(victims)
        return len(victims)

    def clear(self) -> int:
        """Forget everything cached that nobody holds, in all tiers; returns the number of pages.

        What requests hold stays cached, and what is kept for callers: `quire.cache.flush.flush` ends both.
        """
        if self.tiers is not None:
            self.tiers.forget_stored(None)
        if self.prefetcher is not None:
            self.prefetcher.abandon(None)
        pages = self.tree.clear()
        self._give_back(pages)
        return len(pages)

    def sweep(self) -> None:
        """Give back what was flushed while somebody held it and is held no longer. O(1) if nothing is."""
        if self.tree.orphans:
            self._give_back(sweep(self.tree))

    def will_leave(self, kv: RequestKV, num_pages: int) -> bool:
        """Whether a running request has still to compute, or to leave for others to begin on, the end of its first
        `num_pages` pages. From now on it means to: another one waits for that prefix."""
        row = self._row_of(kv)
        if self.share_prefixes and not kv.shares:
            return False
        kv.marks.setdefault(num_pages, Rank.USED)
        return num_pages > kv.lease.num_pages or any(group.owes(row, num_pages) for group in self.groups)

    # -- below the device

    @property
    def loads(self) -> bool:
        """Whether there is a tier below that requests are loaded from."""
        return self.tiers is not None

    def is_ready(self, kv: RequestKV) -> bool:
        """Whether a step may be launched for a request: its prefix is there, or arrives layer by layer."""
        return not kv.loads or (self.tiers is not None and self.tiers.is_ready(kv))

    def has_failed(self, kv: RequestKV) -> bool:
        """Whether a part of a request's prefix cannot be had: it has to `finish`, without tokens, and begin again."""
        return bool(kv.loads) and self.tiers is not None and self.tiers.has_failed(kv)

    def prefetch(self, tokens: Ids, namespace: Namespace = NAMESPACE) -> Prefetch | None:
        """Start to fetch what of a prompt is in storage and not cached; None where there is nothing to wait for."""
        return self.prefetcher.begin(tokens, namespace) if self.prefetcher is not None else None

    @property
    def can_prefetch(self) -> bool:
        """Whether there is storage, and another request may read ahead from it now."""
        return self.prefetcher is not None and self.prefetcher.has_room

    def is_awaited(self, prefetch: Prefetch) -> bool:
        """Whether its request should go on waiting for it. What has come is held until `stop_prefetch`."""
        step = self._fences.step_seconds if self._live else 0.0  # nobody begins while one is computed
        return self.prefetcher is not None and self.prefetcher.is_awaited(prefetch, step)

    def stop_prefetch(self, prefetch: Prefetch) -> None:
        """Its request has begun, or waits for it no more."""
        if self.prefetcher is not None:
            self.prefetcher.leave(prefetch)

    def take_back_prefetched(self) -> bool:
        """Take from a request that waits what is held for it; whether there was anything."""
        return self._room.take_back()

    def settle_moves(self) -> bool:
        """Take note of bytes that have arrived in another tier; whether any had. Never waits."""
        if self.tiers is None or not self.tiers.settle():
            return False
        if self.tiers.num_bad:
            self.retention.lose(self.tiers.bad)
            if self.prefetcher is not None:
                self.prefetcher.lose(self.tiers.bad)
        self.sweep()
        self.num_changes += 1
        return True

    def wait_moves(self, seconds: float) -> bool:
        """Wait until bytes have arrived somewhere, so long at most; False at once where none are on their way."""
        return self.tiers is not None and not self.tiers.mover.idle and self.tiers.mover.wait(seconds)

    # -- steps in flight

    def open_fence(self) -> int:
        """A step is being launched: pages given up from now on wait for it."""
        return self._fences.open()

    def close_fence(self, fence: int) -> None:
        """That step has settled."""
        for retired in self._fences.close(fence):
            self._release(retired.pages, retired.lease, retired.given)

    def launch(self, group: int, kvs: Sequence[RequestKV] | RunningBatch, ends: Lengths) -> Pieces | None:
        """What the step being launched does in that group with the frames that requests carry, which moves them on to
        `ends[i]` tokens; None for a group of which requests carry none. Once per step, after `open_fence`."""
        if not self.groups[group].reach.carried:
            return None
        rows = self._rows_of(kvs)
        asking = kvs.kvs if isinstance(kvs, RunningBatch) else kvs
        launched = self.groups[group].launch(asking, rows, ends, self._rows, leaves=self.share_prefixes)
        if launched is None:
            return None
        pieces, given = launched
        self._retire(given=given)
        return pieces

    @property
    def steps_in_flight(self) -> int:
        """Fences that are open."""
        return self._fences.num_open

    # -- reading

    @property
    def gives_back_early(self) -> bool:
        """Whether what settles sets frames free, so that it is worth a commit at the end of every page."""
        return bool(self._partial)

    def at_once(self, kv: RequestKV, count: int) -> int:
        """How many of `count` tokens, at least one, `extend` may be asked for at once where frames are short of which
        a request gives back what it has passed: the rest fits when these have settled."""
        slack = -int(self._allocated[self._row_of(kv)]) % self.page_size
        passing = [
            g.num_free + g.num_evictable + self.retention.num_soft_frames(g.index)
            for g in self.groups
            if not g.reach.whole and not g.reach.carried
        ]
        return max(1, min(count, slack + min(passing) * self.page_size)) if passing else count

    @property
    def num_free_pages(self) -> int:
        """Pages free now."""
        return self.pages.num_free_pages

    @property
    def num_available_pages(self) -> int:
        """Pages that `extend` could find: free ones, evictable ones, and those that are kept until they are missed."""
        return self.num_free_pages + self.tree.num_evictable + self.retention.num_soft

    def why_not(self, hit: PrefixHit, num_pages: int, running: Sequence[tuple[RequestKV, int]], reserve: int) -> str:
        """Why a request of `num_pages` pages that begins on `hit` does not fit now; "" where it does.

        It must fit beside what `running` requests take beyond what they have until each has the pages that go with it,
        and `reserve` pages more for each of them.
        """
        rows = self._rows_of([kv for kv, _ in running])
        reached = np.array([pages for _, pages in running], dtype=np.int64)
        have = -(-self._allocated[rows] // self.page_size)
        kept = self.retention
        claims = [group_claim(group, kept, hit, num_pages, rows, have, reached, reserve) for group in self.groups]
        claims.append(pages_claim(self.num_available_pages, kept, hit, num_pages, have, reached, reserve))
        return first_refusal(claims, len(running))

    @property
    def live_requests(self) -> tuple[RequestKV, ...]:
        """Requests that have begun and not finished."""
        return tuple(self._live.values())

    @property
    def retired(self) -> tuple[Retired, ...]:
        """What was given up and waits for a step in flight."""
        return self._fences.waiting

    def audit(self) -> None:
        """Check every law (`quire.cache.audit`). Raises AuditFailure. O(pages + nodes)."""
        audit(self)

    def statistics(self) -> CacheStatistics:
        """A snapshot of counters and gauges."""
        return cache_statistics(self)

    # -- inside

    @property
    def _num_dropped(self) -> int:
        dropped = sum(group.dropped_frames for group in self.groups)
        return dropped if self.tiers is None else dropped + self.tiers.num_dropped

    def _make_room(self, rows: Rows, num_new: int, kvs: Sequence[RequestKV] | RunningBatch) -> None:
        """Evict until these rows can take `num_new` pages, or raise OutOfPages before anything is evicted.

        What goes for it, and in which order, is `quire.cache.room`'s.
        """
        if num_new <= self.pages.num_free_pages and all(
            (len(rows) if group.reach.carried else num_new) <= group.num_free for group in self._scarce
        ):
            return
        self._room.make(rows, num_new, names_of(kvs, self._allocated[rows] % self.page_size == 0))

    def _grow(self, rows: Rows, num_new: int) -> Ids:
        """So many new pages for these rows, with frames in every group, or nothing at all. Raises OutOfPages."""
        pages = self.pages.alloc_pages(num_new) if num_new else NO_PAGES
        groups = self.groups if num_new else self._carried
        taken: list[Ids] = []
        try:
            for group in groups:
                taken.append(group.take(rows, pages))  # noqa: PERF401 - what was taken before a failure goes back
        except OutOfPages:
            for group, frames in zip(groups, taken, strict=False):
                group.frames.untake(frames)
            self.pages.free_pages(pages)
            raise
        for group, frames in zip(groups, taken, strict=True):
            group.grow(rows, pages, frames)
        return pages

    def _retire(self, pages: Ids = NO_PAGES, lease: Lease | None = None, given: Sequence[Given] = ()) -> None:
        """Give these up, now or when no launched step can touch them any more."""
        if not len(pages) and lease is None and not given:
            return
        if not self._fences.num_open or self._fences.retire(Retired(pages, lease, tuple(given))):
            self._release(pages, lease, given)

    def _release(self, pages: Ids, lease: Lease | None, given: Sequence[Given]) -> None:
        self.num_changes += 1
        for part in given:
            self.groups[part.group].give_back(part)
        if lease is not None:
            self.tree.release(lease)
        self._give_back(pages)
        self.sweep()

    def _room_came_back(self) -> None:
        """Requests that wait may fit now: what they wait for counts as a change."""
        self.num_changes += 1

    def _give_back(self, pages: Ids) -> None:
        if not len(pages):
            return
        pages = in_order(pages)
        for group in self.groups:
            group.forget(pages)
        if self.tiers is not None:
            self.tiers.forgotten(pages)
        self.pages.free_pages(pages)

    def _beyond_context(self, length: int) -> InvalidInput:
        return InvalidInput(
            f"a request cannot go to {length:,} tokens: it only grows, and the plan's context is "
            f"{self.plan.context:,} tokens.",
            fix="plan for a longer context, or end the request before.",
        )
