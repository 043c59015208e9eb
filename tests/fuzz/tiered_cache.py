"""TieredCache: a cache with tiers whose every verb is followed by all checks, as far as a model can say what it does.

What is evicted, saved and fetched when is the policies' business. What must be true whatever they decide:

    the audit, the tiers' laws among them
    every frame of a cached page holds its page, on the device and on the host, but for what is on its way or damaged
    a step reads only what it must, when the loads have arrived
    what a check finds damaged has a name, is counted once, and is never read
    a page is stored in its whole groups after the page before it; keys and scopes are those of the definition
    a refusal is one: nothing that moves could have made room
    who reads ahead to the end can begin as far as device, host and store together let it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np

from quire.cache import KVCache, PrefixHit
from quire.cache.request_kv import RequestKV
from quire.cache.running import RunningBatch
from quire.counters import statistics_of
from quire.errors import OutOfPages
from quire.observe.explain import FromPeer
from quire.offload import offload_of
from quire.offload.prefetch import Prefetch
from quire.offload.tiering import Tiering
from quire.prefix.node import User, nodes_below
from quire.scheduler.prefetching import ReadAhead
from quire.spec.events import CacheEvent, Namespace
from quire.spec.ids import Ids
from quire.tiers.transfer import Lane
from tests.clear import clear
from tests.fuzz.device import Step
from tests.fuzz.faults import Faults
from tests.fuzz.followed_cache import NAMESPACE, FollowedCache
from tests.fuzz.names import Names, Page
from tests.fuzz.plain_cache import PlainCache
from tests.fuzz.plain_cache import Sequence as Followed
from tests.fuzz.snapshot import GroupSnapshot, RequestSnapshot
from tests.fuzz.tier_world import TierWorld
from tests.fuzz.tiered_device import TieredDevice
from tests.fuzz.watch import Watch


class TieredPlain(PlainCache):
    """The model: `ever` is what was ever committed. The tree may lose what no lease holds, and get it back."""

    def __init__(self, names: Names, num_pages: int, page_size: int, *, shares: bool = True) -> None:
        super().__init__(names, num_pages, page_size, shares=shares)
        self.ever: set[int] = set()
        self.withheld: Callable[[], int] = lambda: 0
        """Ids of no page that are not free: those of pieces on their way, and of records that are read or bad."""

    def free(self) -> int:
        """Pages without an owner."""
        return super().free() - self.withheld()

    def settle_evictions(self, found: Set[int]) -> None:
        """The tree holds these now."""
        if found == self.cached:
            return
        self.ever |= self.cached
        gone = self.cached - found
        assert gone.isdisjoint(self.leased()), "a page was evicted that a lease holds"
        assert found <= self.ever, "a page is cached that was never committed"
        self.cached = set(found)


class TieredWatch(Watch):
    """Frames that a load is to fill hold nothing yet, and no request begins on pages that are known to be bad."""

    def _check_pages(self, group: GroupSnapshot, wanted: list[Page | None]) -> None:
        arriving = self._arriving(group)
        if arriving:
            wanted = [None if page in arriving else content for page, content in enumerate(wanted)]
        super()._check_pages(group, wanted)

    def _check_carried(self, group: GroupSnapshot, rows: list[RequestSnapshot]) -> None:
        arriving = self._arriving(group)
        if not arriving:
            super()._check_carried(group, rows)
            return
        ends = self.ends
        self.ends = {end: page for end, page in ends.items() if page not in arriving}
        try:
            super()._check_carried(group, rows)
        finally:
            self.ends = ends

    def _arriving(self, group: GroupSnapshot) -> set[int]:
        tiers = offload_of(self._cache).tiers
        assert tiers is not None
        arriving = {
            page
            for move, moving in tiers.moving.items()
            if move.lane is Lane.LOAD
            for part in moving.parts
            if part.group == group.group.index
            for page in part.pages.tolist()
        }
        damaged, every_page = tiers.damaged, np.arange(self._cache.pages.num_pages + 1, dtype=np.int32)
        return arriving.union(np.flatnonzero(damaged.are(every_page)).tolist()) if damaged.num_damaged else arriving


class TieredCache(FollowedCache, ReadAhead[Prefetch]):
    """See the module. `world` is what is below the device."""

    model_type = TieredPlain
    device_type = TieredDevice
    watch_type = TieredWatch
    passes_early = False

    def __init__(
        self, cache: KVCache, world: TierWorld, events: list[CacheEvent] | None, faults: Faults | None = None
    ) -> None:
        self.world = world
        super().__init__(cache, events, faults, world.names)
        self.loads = self.ahead.loads
        world.records.device = self.device
        if isinstance(self.model, TieredPlain):
            self.model.withheld = self._withheld
        self._stored = 0
        self._unstored: set[int] = set()  # last names of pages that a clear has left, unused since
        self._host_books: list[bytes] = [b""] * len(cache.groups)

    @property
    def ever(self) -> set[int]:
        """The last names of pages that were cached at any time."""
        return self.model.ever if isinstance(self.model, TieredPlain) else set()

    @property
    def prefetches(self) -> bool:
        return self.ahead.prefetches

    @property
    def tiers(self) -> Tiering:
        """Of the cache."""
        tiers = offload_of(self.cache).tiers
        assert tiers is not None
        return tiers

    @property
    def ahead(self) -> ReadAhead[Any]:
        """Of the cache."""
        return offload_of(self.cache).ahead

    # -- the verbs

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
        """As the cache's; it begins on what it was matched with, or is refused where what it has to load has no
        room."""
        name = self._name(tokens, namespace)
        kept = hit if hit is not None and self.cache.admission.is_current(hit) else None
        expected = kept or self._match(name)
        is_full = len(self.model.live) == self.cache.plan.max_requests
        try:
            kv = self.cache.begin(
                tokens,
                namespace,
                hit=hit,
                priority=priority,
                resumed=resumed,
                label=label,
                asked=asked,
                user=user,
            )
        except OutOfPages as error:
            why = "rows are short or are not" if is_full != (error.group == "rows") else ""
            if not is_full and not any(expected.choice.loads):
                why = "a request was refused that loads nothing"
            if why:
                raise AssertionError(f"{why}: {error}") from error
            self.happened["begin refused"] += 1
            self._check("begin")
            raise
        assert not is_full, "a request began without a row"
        cached = kv.num_cached
        if kept is not None or self.world.settings.always:
            found = f"a request begins on {cached} tokens, {expected.num_tokens} were matched"
            assert cached == expected.num_tokens, found
        self._of[kv] = s = Followed(
            kv, name, len(tokens), cached, cached // self.page_size, cached, cached, cached, cached, cached
        )
        self.model.live.append(s)
        self.prompt_tokens += 0 if resumed else len(tokens)
        self.hit_tokens += 0 if resumed else cached
        self.happened["hit"] += cached > 0
        self.happened["loads"] += bool(kv.loads)
        self.happened["outdated hit"] += hit is not None and kept is None
        self._check("begin")
        return kv

    def extend(self, kvs: Sequence[RequestKV] | RunningBatch, counts: int | Sequence[int]) -> None:
        """As the cache's: room for all of it, or an error after everything on its way has been waited for."""
        batch = [self._of[kv] for kv in (kvs.kvs if isinstance(kvs, RunningBatch) else kvs)]
        each = [counts] * len(batch) if isinstance(counts, int) else counts
        firsts = [-(-s.allocated // self.page_size) for s in batch]
        afterwards = self._untouched(batch, firsts)
        try:
            self._grow(kvs, counts)
        except OutOfPages as error:
            if self.faults is not None and self.faults.take(error):
                self.happened["fault"] += 1
            else:
                if error.wanted <= error.free + error.evictable or self.tiers.moving:
                    raise AssertionError(f"refused although there is room, or could be: {error}") from error
                self.happened["out of pages"] += 1
            self._check("extend")
            raise
        for s, count in zip(batch, each, strict=True):
            s.allocated += count
        self.happened["batch"] += len(batch) > 1
        self._check("extend")
        if afterwards is not None:
            afterwards(self.watch.snapshot)

    def commit(self, kvs: RequestKV | Sequence[RequestKV], tokens: Ids | Sequence[Ids]) -> None:
        """As the cache's; it stays private where it would be cached behind what is damaged."""
        many, each = ([kvs], [tokens]) if isinstance(kvs, RequestKV) else (kvs, tokens)
        settling = [(self._of[kv], own) for kv, own in zip(many, each, strict=True)]
        for s, own in settling:
            self._name_of(s, own)
            self._register(s, len(own))
        duplicates = self.duplicates
        self.cache.commit(kvs, tokens)
        for s, own in settling:
            if s.kv.shares and self.duplicates > duplicates:
                self._forgotten_meanwhile(s, len(own))
            self._settled(s, self.cache.rows.committed(s.kv))
        self.happened["commit of several"] += len(settling) > 1
        self._check("commit")

    def finish(self, kv: RequestKV, tokens: Ids | None = None, *, returns: bool = False) -> None:
        """As the cache's."""
        s = self._of.pop(kv)
        if tokens is not None:
            self._name_of(s, tokens)
            self._register(s, len(tokens))
        lease, before = kv.lease, kv.lease.num_pages
        self.cache.finish(kv, tokens, returns=returns)
        if tokens is not None:
            self._settled(s, len(tokens) if lease.num_pages > before else s.committed)
            self._unstored.difference_update(self.names.ends[s.name][: s.pinned] if kv.shares else ())
        self.model.finish(s)
        self.happened["abort"] += tokens is None
        self.happened["fenced"] += bool(self.model.open)
        self._check("finish")

    def evict(self, num_pages: int) -> int:
        """As the cache's; so many pages leave the device, if so many have no lease."""
        before, idle = self._on_device(), self._idle_on_device()
        found = self.cache.evict(num_pages)
        self._check("evict")
        left = before - self._on_device()
        least = min(num_pages, idle)  # in an arena those leave too that no request can begin after
        assert left == least or (left > least and self.cache.plan.arena is not None), f"{left} left, not {least}"
        assert found >= left, f"{found} pages were evicted, and {left} of them left the device"
        self.happened["evicted"] += found > 0
        return found

    def forget(self) -> None:
        """What no lease holds is removed from the device and the host: it is in the store only, if anywhere."""
        self.cache.evict(self.cache.pages.num_pages)
        while self.tiers.evict_host(self.cache.pages.num_pages):
            pass
        self._check("forget")
        left = [node for node, _ in self.watch.snapshot.edges if not node.level]
        assert not left, "pages without a lease are cached, and all was evicted"

    def demote(self, num_frames: int) -> None:
        """Room is made for so many frames, as for a request, so that what is cached leaves the device."""
        cache = self.cache
        wanted = [group.num_free + min(num_frames, group.num_evictable) for group in cache.groups]
        if cache.plan.arena is not None:  # of one group: what both have free is not free twice
            wanted[num_frames % 2] = 0
            if self.steps:
                return
        cache.parts.reclaim(wanted, "", ())
        self._check("demote")
        short = [g.name for g, wants in zip(cache.groups, wanted, strict=True) if g.num_free < wants]
        assert not short, f"there is no room in {short}, where something could have gone"

    def drop(self, num_frames: int) -> None:
        """Up to so many frames of each group that is read in part leave the device, and the host. Their pages stay."""
        for group, host in zip(self.cache.groups, self.tiers.hosts, strict=True):
            group.evict(num_frames)
            host.evict(num_frames)
        self._check("drop")

    def clear(self) -> int:
        """As the cache's; leases hold what is left."""
        found = clear(self.cache)
        self._check("clear")
        left = [node for node, _ in self.watch.snapshot.edges if not node.level]
        assert not left, "pages without a lease are cached, and all was cleared"
        self._unstored = set(self.watch.ends)
        return found

    def flush(self) -> None:
        """All is flushed, while no request runs: nothing is found, and only transfers hold pages."""
        in_flight = not self.world.mover.idle
        tree, before = self.cache.tree, list(self.cache.tree.hidden_roots)
        done = offload_of(self.cache).flush(None)
        self._check("flush")
        hidden = [root for root in tree.hidden_roots if root not in before]
        held = sum(node.num_pages for root in hidden for node in nodes_below(root))
        assert done.held_tokens == held * self.page_size, f"a flush says {done}, and {held} pages are held"
        assert not tree.roots, "a prompt finds what was flushed"
        self.happened["flush in flight"] += in_flight

    def execute(self, step: Step, batch: Sequence[Followed]) -> None:
        """As without tiers; the time that it took is known to the cache."""
        super().execute(step, batch)
        tokens = sum(part.end - part.start for part in step.parts)
        self.world.break_even.computed(tokens, tokens * 0.01)

    def settle_moves(self) -> bool:
        """As the cache's."""
        found = self.ahead.settle_moves()
        self._check("settle moves")
        return found

    def prefetch(self, tokens: Ids, namespace: Namespace = NAMESPACE, *, may_ask: bool = True) -> Prefetch | None:
        """As the cache's."""
        found = self.ahead.prefetch(tokens, namespace, may_ask=may_ask)
        self.happened["prefetch"] += found is not None
        self._check("")
        return found

    def stop_prefetch(self, prefetch: Prefetch) -> None:
        """As the cache's."""
        self.ahead.stop_prefetch(prefetch)
        self._check("")

    @property
    def can_prefetch(self) -> bool:
        """As the cache's."""
        return self.ahead.can_prefetch

    def is_awaited(self, prefetch: Prefetch) -> bool:
        """As the cache's."""
        return self.ahead.is_awaited(prefetch)

    def wait_moves(self, seconds: float) -> bool:
        """As the cache's."""
        return self.ahead.wait_moves(seconds)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """As the cache's."""
        self.ahead.computed(num_tokens, seconds)

    def release_prefetched(self) -> bool:
        """As the cache's."""
        return self.ahead.release_prefetched()

    def obtainable(self, tokens: Ids, namespace: Namespace = NAMESPACE) -> int | None:
        """Behind how many pages a request can begin once all that is stored has come, with nothing else on its way.
        None where that depends: on what is quicker, on what a store forgets, on who makes room."""
        knows = self.world.is_faultless and self.world.settings.always and self.can_prefetch
        if not knows or self.tiers.deletion.scopes:
            return None
        name = self._name(tokens, namespace)
        ends = self.names.ends[name][: (len(tokens) - 1) // self.page_size]
        pages = [self.watch.ends.get(end, 0) for end in ends]
        here, near, far = [], [], []
        for group, host in zip(self.watch.snapshot.groups, self.tiers.hosts, strict=True):
            here.append([bool(page and group.column[page]) for page in pages])
            near.append([on or bool(page and host.table.frame[page]) for page, on in zip(pages, here[-1], strict=True)])
            stored = [self.world.has_stored(end, namespace, host.index) for end in ends]
            far.append([on or kept for on, kept in zip(near[-1], stored, strict=True)])
        found = self._most(far) if ends else 0
        fresh = found - self.model.matched(name)
        lacking, loads = self._missing(near, found), self._missing(here, found)
        if fresh > self.cache.pages.num_free_pages or (
            fresh > 0 and not any(lacking)
        ):  # a group that reads nothing is not looked up
            return None
        for at, (count, load) in enumerate(zip(lacking, loads, strict=True)):
            if count > self._room_beside(at, pages[:found]) or 0 < self.cache.groups[at].num_frames <= load:
                return None
        self.happened["recovers"] += self._most(near) < found <= self.model.matched(name)
        return found

    def check_obtained(self, tokens: Ids, namespace: Namespace, num_pages: int) -> None:
        """It can begin there now."""
        found = self._match(self._name(tokens, namespace)).num_pages
        assert found == num_pages, f"a request begins behind {found} pages, {num_pages} could be had from all tiers"
        self._check("")

    def count(self) -> None:
        """The statistics say what there is."""
        found, snapshot = self.cache.statistics(), self.watch.snapshot
        assert (found.prompt_tokens, found.hit_tokens) == (self.prompt_tokens, self.hit_tokens)
        assert (found.cached_pages, found.evictable_pages) == (self._on_device(), self._idle_on_device())
        assert statistics_of(self.tiers.sections())["tiers"]["host_pages"] == sum(
            len(pages) for node, pages in snapshot.edges if not self.cache.tree.is_here(node)
        )
        for group, frames in zip(self.cache.groups, found.frames.values(), strict=True):
            owners = (frames.free, frames.private, frames.cached, frames.moving)
            assert sum(owners) == frames.total and min(owners) >= 0, f"{group.name}: frames do not add up: {frames}"
        self._check("count")

    def look_again(self, operation: str) -> None:
        """All checks, after something that was not done to the cache."""
        self._check(operation)

    def _withheld(self) -> int:
        return sum(len(withheld()) for withheld in self.cache.parts.withheld)

    # -- checks

    def check_idle(self) -> None:
        """Nothing runs and nothing moves: nothing is held, and what was met is counted."""
        tiers, cache = self.tiers, self.cache
        assert not self.model.live and not cache.fences.waiting, "memory is held without a request"
        assert not (tiers.moving or tiers.archiver.moves or tiers.damaged_paths), "something moves for ever"
        prefetcher = offload_of(cache).prefetcher
        assert prefetcher is not None and not prefetcher.in_flight, "a prefetch never ends"
        held = cache.tree.num_protected or [node for node, _ in self.watch.snapshot.edges if node.level]
        assert not held, "a prefix is held without a request"
        found = cache.pages.num_free_pages + cache.tree.num_evictable + cache.tree.num_below + self._withheld()
        assert found == cache.pages.num_pages, f"{found} of {cache.pages.num_pages} pages can be had when nothing runs"
        self.check_counters()
        self._check_all_is_stored()
        self.happened["idle"] += 1

    def check_empty(self) -> None:
        """All was cleared: nothing is anywhere."""
        assert not self.watch.ends, "pages without a lease are cached, and all was cleared"
        for host in self.tiers.hosts:
            left = host.num_frames - host.num_free - len(host.quarantined)
            assert not left, f"{left} host frames of group '{host.name}' are lost"
        assert self.world.faults or not self.world.medium.visible, "records are stored of what was cleared"

    def check_counters(self) -> None:
        """With nothing on its way, what was moved and what was found is counted, once."""
        counters, records = self.tiers.counters, self.world.records
        counted: dict[str, int] = {}
        for (_, defect), count in counters.defects.items():
            counted[defect] = counted.get(defect, 0) + count
        assert counted == dict(records.found), f"defects are counted as {counted}, and {dict(records.found)} were found"
        assert counters.loaded_frames == records.loaded, "frames were loaded, and others counted"
        sealed = sum(self.world.settings.record_bytes[part] * count for part, count in records.saved.items())
        assert counters.links["save"].bytes == sealed, "bytes were saved, and others counted"
        is_flushed = self.happened["clear"] or self.happened["flush"]
        assert counters.saved_bytes == sealed or is_flushed, "bytes were saved, and not counted"
        ended = {link: found.moves for link, found in counters.links.items()}
        assert ended == {lane.name: count for lane, count in self.world.mover.num_ended.items()}, (
            "moves have ended, and others were counted"
        )

    def _check(self, operation: str) -> None:
        self.operations += 1
        self.happened[operation] += bool(operation)
        self.watch.check()
        self._unstored &= self.watch.ends.keys()
        wrong = self.world.wrong()
        assert not wrong, wrong[0]
        if self._events is not None:
            self._check_events(self._events)
        for group in range(len(self.cache.groups)):
            self._check_host(group)
        self._check_stored()

    def _check_events(self, events: list[CacheEvent]) -> None:
        if events:
            self._fold.take(events)
            events.clear()
        here: set[int] = set()
        kept: set[int] = set()
        names = self.names
        hidden = {node for root in self.cache.tree.hidden_roots for node in nodes_below(root)}
        for node in (node for node, _ in self.watch.snapshot.edges if node not in hidden):
            ends = names.ends[self.watch.name_of(node)][-node.num_pages :]
            here.update(ends if self.cache.tree.is_here(node) else ())
            kept.update(ends[: self.cache.tree.num_copies(node)])
        self._fold.check(here, kept)

    def _check_host(self, group: int) -> None:
        """Every page's host frame holds that page, but for what was damaged since."""
        records, host = self.world.records, self.tiers.hosts[group]
        books = records.rows(group).tobytes() + host.table.frame.tobytes()
        if books == self._host_books[group]:
            return
        self._host_books[group] = books
        column = host.table.frame.tolist()
        for end, page in self.watch.ends.items():
            row = column[page]
            if row and (group, row) not in records.damaged:
                assert records.is_names(group, row, records.names_of(group, end)), (
                    f"page {page} has host frame {row} in group {group}, which holds {records.content(group, row)[0]} "
                    f"and should hold {records.names_of(group, end)}"
                )

    def _check_stored(self) -> None:
        """A page is stored whole, after the one before it. Only what forgets nothing shows it."""
        medium = self.world.medium
        if not self.world.is_faultless or medium.version == self._stored:
            return
        self._stored = medium.version
        whole = [group.index for group in self.cache.groups if group.reach.whole]
        stored = [{self.world.keys.end_of[key.page] for key in medium.visible if key.part == g} for g in whole]
        for ends in stored:
            assert ends == stored[0], "a page is stored in one group and not in another"
            for end in ends:
                path = self.names.ends[end]
                assert len(path) < 2 or path[-2] in ends, "a page is stored, and not the one before it"

    def _check_all_is_stored(self) -> None:
        """With nothing on its way, what is on the host is stored, as far as all before it is on the host too. What a
        clear has left is stored when it is used again."""
        tiers, names = self.tiers, self.names
        if (
            self.world.store is None
            or not self.world.is_faultless
            or tiers.deletion.scopes
            or len(tiers.archiver.pending)
        ):
            return
        whole = [host.index for host in tiers.hosts if host.whole]
        reached: set[int] = set()
        for end in sorted(self.watch.ends, key=lambda end: len(names.ends[end])):
            path, namespace, page = names.ends[end], names.namespaces[end], self.watch.ends[end]
            kept = [bool(host.table.frame[page]) and not tiers.damaged.are(np.array([page]))[0] for host in tiers.hosts]
            stored = [self.world.has_stored(end, namespace, host.index) for host in tiers.hosts]
            if (len(path) > 1 and path[-2] not in reached) or not all(kept[g] for g in whole) or end in self._unstored:
                continue
            reached.add(end)
            assert all(there for there, wanted in zip(stored, kept, strict=True) if wanted), (
                f"page {page} is on the host, and never gets to storage"
            )
            self.happened["all stored"] += 1

    # -- what is expected

    def _match(self, name: int) -> PrefixHit:
        model, size, tokens = self.model, self.page_size, self.names.tokens(name)
        hit = self.cache.match(tokens, self.names.namespaces[name])
        matched = model.matched(name)
        limit = min(matched, (len(tokens) - 1) // size)
        pages = [self.watch.ends[end] for end in self.names.ends[name][:limit]]
        pages = pages[: self.tiers.damaged.before(np.array(pages, dtype=np.int32))]
        here = [[group.column[page] != 0 for page in pages] for group in self.watch.snapshot.groups]
        below = [
            [there or bool(host.table.frame[page]) for page, there in zip(pages, device, strict=True)]
            for host, device in zip(self.tiers.hosts, here, strict=True)
        ]
        near, far = self._most(here), self._most(below)
        usable = hit.num_pages
        fits = all(
            not missing or missing + group.needs(1, 0) <= group.num_frames
            for missing, group in zip(self._missing(here, far), self.cache.groups, strict=True)
        )
        expected = (far,) if fits and self.world.settings.always else (near, far)[: 1 + fits]
        assert usable in expected, (
            f"match finds {usable} pages, {near} could be used on the device, and {far} with what is on the host"
        )
        found = (hit.match.num_pages, hit.num_tokens)
        assert found == (matched, usable * size), f"match finds (pages, tokens to reuse) {found}, of {matched} pages"
        loads = self._missing(here, usable)
        assert list(hit.choice.loads or [0] * len(loads)) == loads, (
            f"match loads {hit.choice.loads}, {loads} are missing"
        )
        self.happened["host hit"] += usable > near
        self.happened["declined"] += usable < far
        return hit

    def _room_beside(self, group: int, pages: list[int]) -> int:
        """Host frames that could be had without those that a request behind these pages needs."""
        host = self.tiers.hosts[group]
        if not host.table.reclaims:
            return host.num_free
        needed = pages[self.device.first_page(group, len(pages) * self.page_size) :]
        kept = [page for page in needed if page and host.table.frame[page] and not host.table.pins[page]]
        return host.num_free + host.table.num_idle - len(kept)

    def _missing(self, here: list[list[bool]], num_pages: int) -> list[int]:
        """By group, how many frames the device lacks for a request that begins behind so many pages."""
        end = num_pages * self.page_size
        return [
            sum(not device[at] for at in range(self.device.first_page(g, end), num_pages))
            if self.device.reads(g, end) < end
            else 0
            for g, device in enumerate(here)
        ]

    def _on_device(self) -> int:
        here = self.cache.tree.is_here
        return sum(len(pages) for node, pages in self.watch.snapshot.edges if here(node))

    def _idle_on_device(self) -> int:
        here = self.cache.tree.is_here
        return sum(len(pages) for node, pages in self.watch.snapshot.edges if here(node) and not node.level)

    # -- inside

    def _forgotten_meanwhile(self, s: Followed, num_tokens: int) -> None:
        """In a commit of several, a request with duplicates is saved before the next one enters the tree. If host room
        for that was made of pages which the next one has too, its own enter the tree, and are no duplicates."""
        pages, before = slice(s.pinned, num_tokens // self.page_size), self.watch.snapshot
        had = next(row.pages[pages] for row in before.requests if row.kv is s.kv)
        rows = zip(self.names.ends[s.name][pages], had, self.cache.rows.pages[s.kv.row, pages], strict=True)
        gone = {end for end, old, new in rows if old == new} & self.model.cached
        assert gone.isdisjoint(self.model.leased()), "a commit forgot a page that a lease holds"
        here = [end for end in gone for group in before.groups if group.column[self.watch.ends[end]]]
        assert not here, "a commit forgot a page that was on the device"
        self.model.cached -= gone
        self.happened["forgotten meanwhile"] += len(gone)

    def _settled(self, s: Followed, num_tokens: int) -> None:
        """The model does what the cache has done."""
        if not s.kv.shares:
            s.committed = num_tokens
            self.happened["private"] += 1
        elif num_tokens > s.committed:
            self._committed(s, num_tokens)

    def _register(self, s: Followed, num_tokens: int) -> None:
        """Pages that may be cached from now on have keys."""
        for end in self.names.ends[s.name][: num_tokens // self.page_size]:
            self.world.keys.key(end)
