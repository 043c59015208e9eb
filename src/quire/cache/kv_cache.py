"""KVCache: the only interface to cached memory: pages, frames, sharing and eviction."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from quire.cache.admission import Admission
from quire.cache.audit import audit
from quire.cache.groups import NO_PAGES, DamagedPages, GroupRelease, NewPages, PagedGroup
from quire.cache.growth import Growth
from quire.cache.hold import Fences, Holds, Retired
from quire.cache.offload import NO_OFFLOAD, Cached, CacheParts, OffloadFactory
from quire.cache.passing import Passing
from quire.cache.path_ends import PathEnds
from quire.cache.request_kv import CacheUse, PrefixHit, RequestKV
from quire.cache.resizing import Resizing
from quire.cache.room import Room, SharedRoom
from quire.cache.running import Batch, Counts, Lengths, RunningBatch, RunningTables
from quire.cache.session import SessionSettings
from quire.cache.sessions import Sessions
from quire.cache.states import GroupCache, StateGroup, StatePieces
from quire.cache.statistics import CacheCounters, CacheStatistics, count_frames, usage_of
from quire.cache.tenant_admission import TenantAdmission
from quire.cache.tenant_audit import tenant_faults
from quire.cache.tenant_growth import TenantGrowth
from quire.cache.tenants import Tenants
from quire.errors import InvalidInput, OutOfPages
from quire.memory.allocator import DeviceFrames, PageFrames, SlotFrames
from quire.memory.residency import Column, Residency
from quire.observe.explain import Cause, FromPeer, arrived_tokens
from quire.plan.budget import MemoryPlan
from quire.prefix.evict import DEFAULT_POLICY, eviction_policy
from quire.prefix.hashing import layout_identity
from quire.prefix.node import Lease, User
from quire.prefix.radix_cache import RadixCache
from quire.prefix.reach import reach_of
from quire.prefix.tenant_policies import ONE_TENANT, TenantPolicies
from quire.settings.tenants import TenantTerms
from quire.spec.events import CacheEvent, Namespace
from quire.spec.ids import Bools, Ids, Tier
from quire.spec.pages import ALL_TOKENS, pages_for

NAMESPACE = Namespace()
CHECKPOINT_INTERVAL = 512  # tokens between places where a request stores its state, if frames are free

_Settled = tuple[RequestKV, int, int]
"""A request, and the range of its pages that have settled now."""


class KVCache:
    """The cache of one engine: pages that requests share. Tokens are int32 arrays.

        cache = KVCache(plan)
        hit = cache.match(tokens)                           # changes nothing; hit.num_tokens are cached
        kv = cache.begin(tokens, hit=hit)                   # holds them; kv.num_cached need no computing
        cache.extend([kv], [len(tokens) - kv.num_cached])   # room for the rest: evicts, or raises OutOfPages
        slots = cache.rows.slots([kv], [kv.num_cached], [len(tokens)], group=0)    # where the step writes
        frames = cache.rows.page_table([kv], [len(tokens)], group=0)               # what it reads
        cache.commit(kv, tokens)                            # the step has settled: whole pages can be shared
        cache.finish(kv, tokens)                            # they stay until they are evicted; the rest is free

    The tensors of a group have `plan.frames_of(group)` frames and frame 0, for padding. To decode, keep `batch =
    cache.rows.batch(kvs)` until a request joins or ends; then `extend(batch, 1)` and `rows.next_slots(batch)` are array
    arithmetic. If steps are launched before the last one has settled, call `open_fence` at each launch and
    `close_fence` when the step has settled. For groups whose reach is `carried`, call `launch` in each step.

    `plan` is the `memory` of what `make_plan` returns, or a `MemoryPlan` by hand. `eviction` names a policy
    (`register_eviction`); to it a token costs more by `cost_growth` for each one before it. `emit` receives events of
    stored and removed pages, with hashes that depend on `model_identity`. With `explains`, each request gets the causes
    why no more of its prompt is cached (`RequestKV.explanation`), and the counters count tokens by cause. For that and
    the policy, `remembered` tokens of evicted prefixes stay, by default four times the pool. With `page_tables`,
    `rows.page_table_changes` reports changes to a device. `offload` moves pages to other tiers and retains some for
    callers (`quire.offload.Offloads`).

    `sessions` keep rows of requests that have ended (`quire.cache.sessions`). `tenants` have floors and ceilings, the
    first of them for requests of no other (`quire.cache.tenants`).

    `num_changes` grows when pages are freed or cached: what did not fit may fit then. Only the step loop may use it."""

    def __init__(
        self,
        plan: MemoryPlan,
        *,
        eviction: str = DEFAULT_POLICY,
        cost_growth: float = 0.0,
        share_prefixes: bool = True,
        emit: Callable[[CacheEvent], None] | None = None,
        model_identity: bytes = b"",
        checkpoint_interval: int = CHECKPOINT_INTERVAL,
        explains: bool = False,
        remembered: int | None = None,
        page_tables: bool = False,
        seconds: Callable[[], float] = time.monotonic,
        sessions: SessionSettings = SessionSettings(),  # noqa: B008 - a frozen value
        offload: OffloadFactory = NO_OFFLOAD,
        tenants: Sequence[TenantTerms] = (),
    ) -> None:
        plan.check_numbers()
        num_pages = plan.num_pages + offload.num_pages(plan)
        shares = Tenants(tenants, plan, num_pages) if tenants else None
        frames = DeviceFrames(
            plan.groups,
            [plan.frames_of(group) for group in range(len(plan.groups))],
            num_pages,
            plan.page_size,
            tiers=(Tier.DEVICE, *offload.below),
            on_host=plan.groups_on_host,
            arena=plan.arena,
            column=Column if shares is None else shares.owners.column,
        )
        table = frames.table
        self.plan = plan
        self.page_size = plan.page_size
        self.explains = explains
        self.share_prefixes = share_prefixes
        make = partial(eviction_policy, eviction)
        self.tree = RadixCache(
            plan.page_size,
            make() if shares is None else TenantPolicies(make, shares),
            emit=emit,
            identity=layout_identity(model_identity, [group.layout.fingerprint() for group in plan.groups]),
            remembered=4 * plan.num_tokens if remembered is None else remembered,
            seconds=seconds,
            placement=_PagePlacement(table) if offload.below else None,
            num_named=num_pages if offload.below else 0,
            tenants=shares or ONE_TENANT,
        )
        self.tree.policy.priced_by(cost_growth * plan.page_size)
        self.pages = frames.pages
        self.groups = _groups_of(plan, frames, self.tree, checkpoint_interval)
        following = {group.index: group.frames for group in self.groups if isinstance(group.frames, PageFrames)}
        self._partial = tuple(group for group in self.groups if not group.reach.whole)
        firsts = {group.index: group.first for group in self._partial if isinstance(group, PagedGroup)}
        self.rows = RunningTables(plan, table, following, firsts, follows=page_tables)
        self.fences = Fences(seconds)
        self.counters = CacheCounters(explained_tokens=dict.fromkeys(map(str, Cause), 0) if explains else {})
        self.num_changes = 0
        self.parts = CacheParts(
            plan=plan,
            frames=table,
            pages=self.pages,
            groups=self.groups,
            rooms=tuple(Room([group], [1], group.num_frames, self._fixed) for group in self.groups)
            if frames.arena is None
            else (SharedRoom(self.groups, frames.arena, self._fixed, caches=share_prefixes),),
            tree=self.tree,
            rows=self.rows,
            damaged=DamagedPages(table.anchor(Tier.DEVICE), self.groups),
            holds=Holds(self.tree, table, self.rows.live, self.fences),
            seconds=seconds,
            free=self._free,
            sweep=self._sweep,
            reclaim=lambda wanted, cause, pages: self._growth.reclaim(wanted, cause, pages),
            changed=self._changed,
            step_seconds=lambda: self.fences.step_seconds if len(self.rows.live) > self.sessions.num_held else 0.0,
            tenants=shares,
        )
        admits: Callable[..., Admission] = Admission
        grows: Callable[..., Growth] = Growth
        if shares is not None:
            self.parts.resized.append(shares.resized)
            self.parts.audits.append(partial(tenant_faults, shares))
            shares.attach(self.groups, self.parts.rooms, table, self.tree, self._changed)
            admits, grows = partial(TenantAdmission, shares), partial(TenantGrowth, shares)
            for group in self.groups:
                group.may_keep = shares.may_keep
        self.offload = offload.make(self.parts)
        self.sessions = Sessions(self.parts, sessions, self, self._shorten)
        self.admission = admits(self.parts, self.offload.retention)
        give_way = partial(self.sessions.give_way, for_room=True)
        self._growth = grows(self.parts, self.offload, self.counters, give_way, frames.growing)
        self.resizing = Resizing(self.parts, self._growth)
        self.passing = Passing(self.groups, self.rows, self._retire, saves=bool(offload.below))
        self._states = {group.index: group for group in self.groups if isinstance(group, StateGroup)}
        if frames.arena is not None:
            self.tree.ends_by(PathEnds(self.parts, self.offload))

    def match(self, tokens: Ids, namespace: Namespace = NAMESPACE, *, most_tokens: int = ALL_TOKENS) -> PrefixHit:
        """How much of a prompt can be reused: whole pages, as far as every group can resume, without the last token,
        which is always computed, and at most so many tokens."""
        _check_ids(tokens)
        found, size = self.tree.match(namespace, tokens), self.page_size
        choice = self.offload.choose(found, min(found.num_pages, min(max(0, len(tokens) - 1), most_tokens) // size))
        count, dropped = choice.num_pages, self.admission.num_dropped
        return PrefixHit(found, choice, count, count * size, dropped, self.num_changes, most_tokens)

    def begin(
        self,
        tokens: Ids,
        namespace: Namespace = NAMESPACE,
        *,
        hit: PrefixHit | None = None,
        priority: int = 0,
        resumed: bool = False,
        label: str = "",
        asked: Sequence[FromPeer] = (),
        user: User | None = None,
    ) -> RequestKV:
        """Open a request on the cached prefix of `tokens`, its first `num_cached` ones, and hold that until `finish`.

        A request that is `resumed` after a preemption is not counted again. In explanations, `label` names the request
        that caused an eviction, and peers were `asked` for tokens. Pages that only requests of one `user` use are its
        own. Pages of the prefix on lower tiers are loaded, and no step may be launched before `is_ready`. Raises
        OutOfPages if all `max_requests` rows are taken or there is no room for the loads.
        """
        if not self.rows.free and not self.sessions.give_way():
            held = self.sessions.num_held
            others = f", beside {held} sessions" if held else ""
            holders = f"{len(self.rows.live) - held} running requests hold them{others}"
            raise OutOfPages(group="rows", wanted=1, free=0, held_by=holders)
        grown = self.explains and hit is not None and hit.num_changes != self.num_changes
        if hit is None or grown or not self.admission.is_current(hit):
            before, hit = hit, self.match(tokens, namespace, most_tokens=hit.most_tokens if hit else ALL_TOKENS)
            hit.lacks_room = before is not None and before.lacks_room
        explanation = self.admission.explain(tokens, hit, asked) if self.explains and not resumed else None
        lease, pages = self.tree.lease(hit.match, hit.num_pages, priority=priority, user=user), hit.pages
        try:
            loads = self.offload.bring(lease, hit, label)
        except BaseException:
            self.tree.release(lease)
            raise
        row = self.rows.free.pop()
        self.tree.tenants.got_row(row, lease.node.tenant)
        storage, host = hit.choice.storage_pages * self.page_size, hit.choice.host_pages * self.page_size
        peer = sum(arrived_tokens(asked, hit.num_tokens - host, hit.num_tokens).values())
        kv = RequestKV(
            row=row,
            namespace=namespace,
            lease=lease,
            use=CacheUse(hit.num_tokens, host - storage - peer, storage, peer),
            num_prompt=len(tokens),
            label=label,
            explanation=explanation,
            shares=self.share_prefixes,
            loads=loads,
        )
        self.rows.write_run(row, 0, pages)
        for group in self._partial:
            group.begin(row, pages)
        self.offload.begun(kv, hit, resumed=resumed)
        if self._partial:
            kv.mark_ends(hit.num_pages, hit.match.num_pages, max(0, len(tokens) - 1) // self.page_size)
        self.rows.num_allocated[row] = self.rows.num_committed[row] = hit.num_tokens
        self.rows.enter(kv)
        if not resumed:
            self.counters.begun(len(tokens), hit.num_tokens, explanation)
        self.counters.peak_shared_pages = max(self.counters.peak_shared_pages, self.tree.num_shared)
        return kv

    def extend(self, kvs: Batch, counts: int | Counts) -> None:
        """Make room for `counts[i]` more tokens in each request; one number applies to all. Evicts where needed.

        Raises OutOfPages if evicting everything would not suffice, and InvalidInput for counts below zero or beyond the
        context; nothing has changed then. Growing a `RunningBatch` by one token costs array arithmetic only.
        """
        if isinstance(kvs, RunningBatch) and isinstance(counts, int) and counts == 1:
            self._growth.by_one(kvs)
        else:
            self._growth.by(kvs, self.rows.distinct(kvs), counts)

    def reserve(self, kvs: Batch, lengths: Counts) -> None:
        """As `extend`, up to `lengths[i]` tokens in each request that has less, but at most to the end of its row."""
        self._growth.up_to(kvs, self.rows.distinct(kvs), lengths)

    def commit(self, kvs: RequestKV | Sequence[RequestKV], tokens: Ids | Sequence[Ids]) -> None:
        """The steps that wrote `tokens` have settled; `tokens` are all tokens of a request from the first one. Whole
        pages become reusable. If others have cached the same tokens meanwhile, their pages replace the request's own:

            |-- protected --|-- cached by another --|-- whole pages of ours --|-- part of a page --|
                             ours are given up        enter the tree            stays private
        """
        many, all_tokens = ([kvs], [tokens]) if isinstance(kvs, RequestKV) else (kvs, tokens)
        for kv, own in zip(many, all_tokens, strict=True):  # check all of them before any change
            self._check_settled(kv, own)
        fresh: list[_Settled] = []
        private: list[_Settled] = []
        for kv, own in zip(many, all_tokens, strict=True):
            start, end = self._settle(kv, own)
            if end == start:
                continue
            if self.parts.damaged.num_damaged and kv.shares:
                kv.shares = not self.parts.damaged.have_frames(self.tree.match(kv.namespace, own).pages[start:end])
            if not kv.shares:
                private.append((kv, start, end))
                continue
            fresh.append((kv, start, end))
            ours = self._insert(kv, own, start, end)
            if len(ours):  # pages that came back to the device with this need frames before the next call of the tree
                self._committed(fresh, ours)
                fresh = []
        if fresh:
            self._committed(fresh, NO_PAGES)
        if private and self._partial:
            new = self._new_pages(private)
            self._retire(released=[part for group in self._partial for part in group.pass_by(new)])

    def _check_settled(self, kv: RequestKV, tokens: Ids) -> None:
        _check_ids(tokens)
        row = self.rows.row_of(kv)
        have, room = int(self.rows.num_committed[row]), int(self.rows.num_allocated[row])
        if not have <= len(tokens) <= room:
            raise InvalidInput(f"{len(tokens)} tokens cannot settle: {have} have, and there is room for {room}.")

    def _settle(self, kv: RequestKV, tokens: Ids) -> tuple[int, int]:
        """These tokens have settled. Returns the range of whole pages that have settled now."""
        before = int(self.rows.num_committed[kv.row])
        self.rows.num_committed[kv.row] = len(tokens)
        for group in self._states.values():
            group.settle(kv.row, len(tokens))
        return before // self.page_size, len(tokens) // self.page_size

    def _insert(self, kv: RequestKV, tokens: Ids, start: int, end: int) -> Ids:
        """Pages `start` to `end` are inserted into the tree. Returns the duplicates, which leave its row."""
        pages = self.rows.pages[kv.row]
        inserted = self.tree.insert(kv.lease, tokens[start * self.page_size : end * self.page_size], pages[start:end])
        self.counters.committed_pages += end - start
        if not len(inserted.duplicates):
            return NO_PAGES
        ours = inserted.duplicates.copy()  # a view of the row that is rewritten next
        self.parts.frames.replace_pages(ours, inserted.pages[: len(ours)])
        self.rows.write_run(kv.row, start, inserted.pages)
        self.counters.duplicate_pages += len(ours)
        return ours

    def _committed(self, fresh: Sequence[_Settled], ours: Ids) -> None:
        """These pages are in the tree. `ours` are the duplicates of the first pages of the last request."""
        self.num_changes += 1
        kv, start, _ = fresh[-1]
        released: list[GroupRelease] = []
        if self.passing.settling:
            new, theirs = self._new_pages(fresh), self.rows.pages[kv.row, start : start + len(ours)]
            released = [part for group in self.passing.settling for part in group.commit(new, ours, theirs)]
        cached: list[Cached] = []
        for each, first, end in fresh:
            cached.append(Cached(each, self.rows.pages[each.row, :end], first + (len(ours) if each is kv else 0)))
            self.offload.committed(each, cached[-1].pages, first, cached[-1].new)
        for listener in self.parts.committed:
            listener(cached)
        self._retire(ours, released=released)

    def _new_pages(self, settled: Sequence[_Settled]) -> NewPages:
        rows, starts, ends = np.array([(kv.row, start, end) for kv, start, end in settled], dtype=np.int64).T
        return NewPages([kv for kv, _, _ in settled], rows, starts, ends, self.rows.pages)

    def finish(self, kv: RequestKV, tokens: Ids | None = None, *, returns: bool = False, idle: bool = False) -> None:
        """End a request: commit `tokens` if given, release its lease, private pages and row. A request that `returns`
        will run again: its committed pages may be written back at once. If it is `idle`, no step in flight reads its
        row, and none is waited for. Raises LeaseError if it has ended."""
        row = self.rows.row_of(kv)
        if tokens is not None:
            self.commit(kv, tokens)
            if kv.shares:
                tail, num_generated = tokens[kv.lease.num_pages * self.page_size :], len(tokens) - kv.num_prompt
                kv.end = self.tree.ended(kv.lease, tail, num_generated)
        first, last = kv.lease.num_pages, pages_for(int(self.rows.num_allocated[row]), self.page_size)
        private = self._growth.pages_of(row, first, last)
        pages = self.rows.pages[row, :last].copy() if self._partial else NO_PAGES
        released = [part for group in self._partial for part in group.finish(row, pages, first)]
        if first and tokens is not None and kv.shares:
            self.offload.finished(kv, self.rows.pages[row, :first], returns=returns)
        self.rows.leave(kv)
        if idle:
            self._release(Retired(private, kv.lease, tuple(released)))
        else:
            self._retire(private, kv.lease, released)

    def _shorten(self, kv: RequestKV, num_tokens: int) -> None:
        """A row keeps room for so many tokens, and the pages after them are free."""
        row = self.rows.row_of(kv)
        keep, last = (pages_for(n, self.page_size) for n in (num_tokens, int(self.rows.num_allocated[row])))
        pages = self._growth.pages_of(row, keep, last)
        self.rows.shorten(row, num_tokens)
        self._retire(pages)

    def evict(self, num_pages: int, cause: str = "") -> int:
        """Evict up to `num_pages` pages without holds, and the pages after them on lower tiers. Returns how many."""
        victims = self.tree.evict(num_pages, cause)
        self.counters.evicted(len(victims))
        self._free(victims)
        return len(victims)

    def open_fence(self) -> int:
        """A step is launched: pages that are released from now on wait until `close_fence`."""
        return self.fences.open()

    def close_fence(self, fence: int) -> None:
        """That step has settled. Free what waited for this fence, all of it even if one part raises an error."""
        ready = self.fences.close(fence)
        self.num_changes += fence < self.sessions.last_fence  # the row of a session may be at rest now
        if len(ready) == 1:
            self._release(ready[0])
        elif ready:
            with ExitStack() as last_first:
                for each in self._growth.allocators:
                    each.free_group_begin()
                    last_first.callback(each.free_group_end)
                for retired in reversed(ready):
                    last_first.callback(self._release, retired)

    def launch(self, group: int, kvs: Batch, ends: Lengths, draws: Lengths | None = None) -> StatePieces | None:
        """The states that a step reads and writes for its requests in a group, up to `ends[i]` tokens; None if the
        group has none. Call it once per step and group, after `open_fence`. The step draws `draws[i]` tokens, all but
        the first after drafts. `commit` gets the number of accepted drafts before the next launch of the request."""
        states = self._states.get(group)
        if states is None:
            return None
        rows, asking = self.rows.rows_of(kvs), kvs.kvs if isinstance(kvs, RunningBatch) else kvs
        pieces, released = states.launch(asking, rows, ends, draws, self.rows.pages, stores=self.share_prefixes)
        self._retire(released=released)
        return pieces

    def _fixed(self, group: int) -> Ids | None:
        """Frames of a group that must not move now; None: none may. With drafts, a step that settles moves what it
        wrote to other places, which were captured at its launch."""
        if not self.parts.moved or (self.fences.num_open and self.plan.tokens_per_step > 1):
            return None
        released = [part.frames for each in self.fences.waiting for part in each.released if part.group == group]
        others = [frames for fixed in self.parts.fixed for frames in fixed(group)]
        return np.concatenate([NO_PAGES, *released, *others])

    def audit(self) -> None:
        """Check all invariants (`quire.cache.audit`). Raises AuditFailure. O(pages + nodes)."""
        audit(self.parts)

    def statistics(self) -> CacheStatistics:
        """A copy of counters and gauges."""
        tree, waiting = self.tree, self.fences.waiting
        frames = {group.name: count_frames(group, waiting) for group in self.groups}
        return CacheStatistics(
            **vars(self.counters) | {"explained_tokens": self.counters.explained_tokens.copy()},
            shared_pages=tree.num_shared,
            cached_pages=tree.num_pages,
            evictable_pages=tree.num_evictable,
            num_pages=self.plan.num_pages,
            held_pages=self.parts.holds.held_pages(),
            page_size=self.page_size,
            usage=usage_of(frames),
            frames=frames,
        )

    def _retire(self, pages: Ids = NO_PAGES, lease: Lease | None = None, released: Sequence[GroupRelease] = ()) -> None:
        """Release these as soon as no launched step reads them."""
        if (len(pages) or lease or released) and self.fences.retire(retired := Retired(pages, lease, tuple(released))):
            self._release(retired)

    def _release(self, retired: Retired) -> None:
        self.num_changes += 1
        for part in retired.released:
            self.groups[part.group].release(part)
        if retired.lease is not None:
            self.tree.release(retired.lease)
        self._free(retired.pages)
        self._sweep()

    def _sweep(self) -> None:
        """Free flushed pages that nothing holds any more. O(1) where there are none."""
        if self.tree.hidden_roots:
            self._free(self.tree.sweep())

    def _changed(self) -> None:
        self.num_changes += 1

    def _free(self, pages: Ids) -> None:
        if len(pages):
            self._growth.free(pages)


def _check_ids(tokens: Ids) -> None:
    """Raise InvalidInput for what is no int32 array. Keys are the bytes of tokens, so another type is another key."""
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32:
        kind = tokens.dtype if isinstance(tokens, np.ndarray) else type(tokens).__name__
        raise InvalidInput(f"tokens are {kind}, not an int32 array.", fix="pass np.array(tokens, dtype=np.int32).")


def _groups_of(plan: MemoryPlan, frames: DeviceFrames, tree: RadixCache, interval: int) -> tuple[GroupCache, ...]:
    groups: list[GroupCache] = []
    for index, (group, own) in enumerate(zip(plan.groups, frames.groups, strict=True)):
        reach = reach_of(group.reach, plan.page_size)
        if isinstance(own, SlotFrames):
            groups.append(StateGroup(index, reach, own, tree, plan, interval))
        else:
            groups.append(PagedGroup(index, reach, own, tree, plan.max_requests))
    return tuple(groups)


class _PagePlacement:
    """`quire.prefix.placement.Placement` for caches with tiers, from the residency table."""

    def __init__(self, table: Residency) -> None:
        self._device, self._host = table.anchor(Tier.DEVICE), table.anchor(Tier.HOST)

    def on_device(self, page: int) -> bool:
        return bool(self._device.frame[page])

    def have_copies(self, pages: Ids) -> Bools:
        return self._host.present(pages)
