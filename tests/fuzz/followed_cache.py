"""FollowedCache: a KVCache whose every verb is also done to a model, compared with it, and followed by all checks.

Its driver, random operations or a scheduler, uses it as the cache. What is read through it without changing
anything goes to the cache as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.cache import KVCache, PrefixHit
from quire.cache.request_kv import RequestKV
from quire.cache.running import Lengths, Rows, RunningBatch
from quire.cache.states import GroupCache
from quire.errors import OutOfPages
from quire.observe.explain import FromPeer
from quire.prefix.node import User
from quire.spec.arena import ArenaLayout
from quire.spec.events import CacheEvent, Namespace
from quire.spec.ids import Bools, Ids
from quire.spec.pages import ALL_TOKENS
from tests.clear import clear
from tests.fuzz.device import Device, Step
from tests.fuzz.events import EventFold
from tests.fuzz.faults import Faults
from tests.fuzz.names import Names
from tests.fuzz.plain_cache import PlainCache
from tests.fuzz.plain_cache import Sequence as Followed
from tests.fuzz.raw import RawData
from tests.fuzz.snapshot import Snapshot
from tests.fuzz.watch import Watch

NAMESPACE = Namespace()


class FollowedCache:
    """One cache, its model, the device's memory, and what has happened.

    `events` is the list that the cache emits to, None where it emits none. `operations` counts verbs, each with its
    checks. Raises AssertionError or AuditFailure where something is wrong.
    """

    model_type: type[PlainCache] = PlainCache
    device_type: type[Device] = Device
    watch_type: type[Watch] = Watch
    passes_early = True
    """Whether windows move on before pages are cached."""

    def __init__(
        self,
        cache: KVCache,
        events: list[CacheEvent] | None,
        faults: Faults | None = None,
        names: Names | None = None,
    ) -> None:
        self.cache = cache
        self.page_size = cache.page_size
        self.names = names or Names(cache.page_size)
        self.model = self.model_type(self.names, cache.pages.num_pages, cache.page_size, shares=cache.share_prefixes)
        self.device = self.device_type(cache, self.names)
        self.watch = self.watch_type(cache, self.names, self.device, self.model)
        self.steps: list[Step] = []
        self.happened: Counter[str] = Counter()
        self.operations = 0
        self.evicted = self.prompt_tokens = self.hit_tokens = self.duplicates = 0
        self._events = events
        self._fold = EventFold(cache, self.names)
        self.faults = faults
        self._of: dict[RequestKV, Followed] = {}
        self._groups = range(len(cache.groups))
        self._lengths: Sequence[int] | None = None  # that `reserve` asks for

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def followed(self, kv: RequestKV) -> Followed:
        """The model's record of a running request."""
        return self._of[kv]

    # -- the verbs

    def match(self, tokens: Ids, namespace: Namespace = NAMESPACE, *, most_tokens: int = ALL_TOKENS) -> PrefixHit:
        """As the cache's; what it finds is the most that the model could reuse, and nothing has changed."""
        unchanged = self.watch.raw
        if most_tokens != ALL_TOKENS:
            assert most_tokens == 0, "no request here asks for log-probabilities of its prompt"
            hit = self.cache.match(tokens, namespace, most_tokens=0)
            assert hit.num_tokens == 0
            self._same(unchanged)
            return hit
        hit = self._match(self._name(tokens, namespace))
        self._check("match")
        self._same(unchanged)
        return hit

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
        """As the cache's; it begins on what it was matched with, if that still holds."""
        name = self._name(tokens, namespace)
        now = self._match(name)
        expected = hit if hit is not None and self.cache.admission.is_current(hit) else now
        if len(self.model.live) == self.cache.plan.max_requests:
            unchanged = self.watch.raw
            error = self._refused("rows", lambda: self.cache.begin(tokens, namespace))
            self._check("begin")
            self._same(unchanged)
            raise error
        kv = self.cache.begin(
            tokens, namespace, hit=hit, priority=priority, resumed=resumed, label=label, asked=asked, user=user
        )
        cached = kv.num_cached
        assert cached == expected.num_tokens, f"a request begins on {cached} tokens, {expected.num_tokens} were matched"
        self._of[kv] = s = Followed(
            kv, name, len(tokens), cached, cached // self.page_size, cached, cached, cached, cached, cached
        )
        self.model.live.append(s)
        if not resumed:
            self.prompt_tokens += len(tokens)
            self.hit_tokens += cached
        self.happened["outdated hit"] += hit is not None and expected is now
        self.happened["hit"] += cached > 0
        self._check("begin")
        return kv

    def extend(self, kvs: Sequence[RequestKV] | RunningBatch, counts: int | Sequence[int]) -> None:
        """As the cache's: room for all of it or, where it does not fit, an error that says why, and no change."""
        model, size = self.model, self.page_size
        asked = counts
        batch = [self._of[kv] for kv in (kvs.kvs if isinstance(kvs, RunningBatch) else kvs)]
        counts = [counts] * len(batch) if isinstance(counts, int) else counts
        self.happened["running batch"] += isinstance(kvs, RunningBatch)
        firsts = [-(-s.allocated // size) for s in batch]
        wanted = sum([-(-(s.allocated + n) // size) for s, n in zip(batch, counts, strict=True)]) - sum(firsts)
        free = model.free()
        short = self._short(batch, wanted)
        if short is not None:
            unchanged = self.watch.raw
            error = self._refused(short[0], lambda: self._grow(kvs, asked))
            found = (error.group, error.wanted, error.free, error.evictable)
            assert found == short, f"the error says {found}: {short}"
            self._check("extend")
            self._same(unchanged)
            raise error
        afterwards = self._untouched(batch, firsts)
        try:
            self._grow(kvs, asked)
        except OutOfPages as error:
            if self.faults is None or not self.faults.take(error):
                raise AssertionError(f"an allocation was refused that fits: {error}") from error
            self.happened["fault"] += 1
            model.allow_evicted(max(0, wanted - free) if self.cache.plan.arena is None else self._evicted())
            self._check("extend")
            self.evicted = self.cache.statistics().evicted_pages
            raise
        self._forgotten(max(0, wanted - free) if self.cache.plan.arena is None else self._evicted())
        self.happened["copied"] = self.device.num_copied
        for s, count in zip(batch, counts, strict=True):
            s.allocated += count
        self.happened["batch"] += len(batch) > 1
        self.happened["decode"] += set(counts) == {1}
        self._check("extend")
        if afterwards is not None:
            afterwards(self.watch.snapshot)

    def reserve(self, kvs: Sequence[RequestKV] | RunningBatch, lengths: Sequence[int]) -> None:
        """As the cache's; what it does is to extend those that have less."""
        asking = kvs.kvs if isinstance(kvs, RunningBatch) else kvs
        most = self.cache.plan.pages_per_row * self.page_size
        have = [self.cache.rows.allocated(kv) for kv in asking]
        self._lengths = lengths
        try:
            self.extend(kvs, [max(0, min(n, most) - old) for n, old in zip(lengths, have, strict=True)])
        finally:
            self._lengths = None

    def _grow(self, kvs: Sequence[RequestKV] | RunningBatch, counts: int | Sequence[int]) -> None:
        """Call the verb that `extend` or `reserve` follows."""
        if self._lengths is None:
            self.cache.extend(kvs, counts)
        else:
            self.cache.reserve(kvs, self._lengths)

    def commit(self, kvs: RequestKV | Sequence[RequestKV], tokens: Ids | Sequence[Ids]) -> None:
        """As the cache's."""
        many, each = ([kvs], [tokens]) if isinstance(kvs, RequestKV) else (kvs, tokens)
        settling = [(self._of[kv], own) for kv, own in zip(many, each, strict=True)]
        for s, own in settling:
            self._name_of(s, own)
        self.cache.commit(kvs, tokens)
        for s, own in settling:
            self._committed(s, len(own))
        self.happened["commit of several"] += len(settling) > 1
        self._check("commit")

    @property
    def passing(self) -> FollowedCache:
        """What has `pass_by`."""
        return self

    @property
    def commits(self) -> bool:
        """As the cache's passing."""
        return self.cache.passing.commits

    def is_due(self, num_steps: int, num_rows: int) -> bool:
        """As the cache's passing."""
        return self.cache.passing.is_due(num_steps, num_rows)

    def frees(self, rows: Rows, num_pages: Lengths) -> Bools:
        """As the cache's passing."""
        return self.cache.passing.frees(rows, num_pages)

    def pass_by(self, batch: RunningBatch, places: Rows, num_pages: Lengths) -> Rows:
        """As the cache's."""
        left = self.cache.passing.pass_by(batch, places, num_pages)
        for at, count in zip(places.tolist(), num_pages.tolist(), strict=True):
            if self.passes_early and (s := self._of.get(batch.kvs[at])) is not None:
                assert s.settled >= count * self.page_size, "a window moves on before its tokens have settled"
                self.happened["pass"] += s.passed < count * self.page_size
                s.passed = max(s.passed, count * self.page_size)
        self._check("pass")
        return left

    def finish(self, kv: RequestKV, tokens: Ids | None = None, *, returns: bool = False) -> None:
        """As the cache's."""
        s = self._of.pop(kv)
        if tokens is not None:
            self._name_of(s, tokens)
        self.cache.finish(kv, tokens, returns=returns)
        if tokens is not None:
            self._committed(s, len(tokens))
        self.model.finish(s)
        self.happened["abort"] += tokens is None
        self.happened["fenced"] += bool(self.model.open)
        self._check("finish")

    def evict(self, num_pages: int) -> int:
        """As the cache's; it evicts as much as there is."""
        expected = min(num_pages, self.model.evictable())
        found = self.cache.evict(num_pages)
        if self.cache.plan.arena is not None:  # those go too that no request can begin after
            assert found == self._evicted() >= expected, f"{found} pages were evicted, at least {expected} should be"
            expected = found
        assert found == expected, f"{found} pages were evicted, {expected} should be"
        self._forgotten(expected)
        self._check("evict")
        return found

    def clear(self) -> int:
        """As the cache's."""
        expected = self.model.evictable()
        found = clear(self.cache)
        assert found == expected, f"{found} pages were cleared, {expected} should be"
        self._forgotten(expected, counted=False)
        self._check("clear")
        return found

    def will_leave(self, kv: RequestKV, num_pages: int) -> bool:
        """As the cache's: pages that have not settled are still to come, but not of a request that shares none."""
        left = self.cache.admission.will_leave(kv, num_pages)
        assert kv.shares or not left, "a request that keeps what it computes to itself says that it leaves it"
        unsettled = num_pages > self._of[kv].pinned
        assert left or not (kv.shares and unsettled), "pages that have not settled are not still to come"
        self._check("mark")
        return left

    def launched(self, step: Step) -> None:
        """A step was launched on the device."""
        self.model.open.add(step.fence)
        self.steps.append(step)
        self.happened["two in flight"] += len(self.steps) > 1
        self._check("launch")

    def execute(self, step: Step, batch: Sequence[Followed]) -> None:
        """The device gets to a step: the next one, whose requests are these."""
        self.device.execute(step)
        for s, part in zip(batch, step.parts, strict=True):
            s.executed = part.path_end
            if part.path_end > len(self.names.path[s.name]):
                s.name, s.num_tokens = part.name, part.path_end
        self._check("execute")

    def verified(self, step: Step, at: int, s: Followed, name: int, sources: list[int], targets: list[int]) -> None:
        """Part `at` of an executed step, of this request, computed drafts, and its tokens up to `name` are right. What
        was computed for these is moved from the places `sources` of the part to `targets`."""
        self.device.move(step, at, sources, targets)
        s.name, s.num_tokens = name, len(self.names.path[name])
        s.executed = s.launched = s.num_tokens
        self.happened["moved"] += len(sources)

    def close_fence(self, step: Step) -> None:
        """The host has heard that a step is done; perhaps before it hears of an earlier one."""
        self.happened["settled out of order"] += step is not self.steps[0]
        self.steps.remove(step)
        self.cache.close_fence(step.fence)
        self.model.close(step.fence)
        self._check("settle")

    def count(self) -> None:
        """The statistics say what there is."""
        model, found, happened = self.model, self.cache.statistics(), self.happened
        assert (found.prompt_tokens, found.hit_tokens) == (self.prompt_tokens, self.hit_tokens)
        assert (found.duplicate_pages, found.evicted_pages) == (self.duplicates, self.evicted)
        assert (found.cached_pages, found.evictable_pages) == (len(model.cached), model.evictable())
        held = Counter([end for name in model.leases() for end in self.names.ends[name]])
        assert found.shared_pages == sum([count > 1 for count in held.values()])
        for group, frames in zip(self.cache.groups, found.frames.values(), strict=True):
            owners = (frames.free, frames.private, frames.cached, frames.moving)
            assert sum(owners) == frames.total and min(owners) >= 0, f"{group.name}: frames do not add up: {frames}"
            cached = len(self.watch.resident(group.index)) + len(self._passed(group))
            assert frames.cached == cached, f"{group.name}: {frames.cached} frames are cached: {cached}"
            for name in ("dropped", "revived", "left", "skipped"):
                happened[name] = max(happened[name], getattr(frames, name))
        self._check("count")

    # -- what is expected

    def _passed(self, group: GroupCache) -> set[int]:
        """Pages with frames that are not cached, and that their requests read no more: of requests that run, and of
        those that have given them up."""
        if group.reach.whole or group.reach.in_place:
            return set()
        snapshot, size, passed = self.watch.snapshot, self.page_size, set[int]()
        for row, s in zip(snapshot.requests, self.model.live, strict=True):
            first = self.device.first_page(group.index, max(s.committed // size * size, s.passed))
            passed.update(row.pages[s.pinned : first])
        given = {page for at, unpinned in snapshot.given if at == group.index for page in unpinned}
        passed.update(page for page in snapshot.moving if page in given or group.table.ticket[page])
        return {page for page in passed if snapshot.groups[group.index].column[page]}

    def _match(self, name: int) -> PrefixHit:
        model, size, tokens = self.model, self.page_size, self.names.tokens(name)
        hit = self.cache.match(tokens, self.names.namespaces[name])
        matched = model.matched(name)
        limit = min(matched, (len(tokens) - 1) // size)
        pages = [self.watch.ends[end] for end in self.names.ends[name][:limit]]
        usable = self._most([[group.column[page] != 0 for page in pages] for group in self.watch.snapshot.groups])
        unpinned = len(set(self.names.ends[name][:usable]) - model.leased()) if usable else 0
        found = (hit.num_pages, hit.num_tokens)
        assert found == (usable, usable * size), f"match finds (pages, tokens) {found}, and {usable} pages can be used"
        found = (hit.match.num_pages, hit.match.num_evictable(usable))
        assert found == (matched, unpinned), f"match says (pages, pages pinned) {found}: {(matched, unpinned)}"
        limited_by = hit.choice.limited_by
        assert bool(limited_by) == (usable < limit), f"match is limited by '{limited_by}'"
        self.happened["short of the match"] += bool(limited_by)
        return hit

    def _most(self, resident: list[list[bool]]) -> int:
        """The most pages behind which every token that any group reads next is in a page that is resident there."""
        size, device = self.page_size, self.device
        for count in range(len(resident[0]), 0, -1):
            end = count * size
            if all(
                device.reads(g, end) == end or False not in there[device.first_page(g, end) : count]
                for g, there in enumerate(resident)
            ):
                return count
        return 0

    def _short(self, batch: list[Followed], wanted: int) -> tuple[str, int, int, int] | None:
        """(group, wanted, free, evictable) of the first group that is short, by counting what requests read."""
        free, evictable = self.model.free(), self.model.evictable()
        if (layout := self.cache.plan.arena) is not None:
            short = self._short_of_bytes(layout, batch, wanted)
            return short or (("pages", wanted, free, evictable) if wanted > free + evictable else None)
        for group in self.cache.groups:
            if group.reach.whole:
                if wanted > free + evictable:
                    return group.name, wanted, free, evictable
                continue
            need = wanted
            if group.reach.in_place:
                need = group.wanted(np.array([s.kv.row for s in batch], dtype=np.int32), wanted)
            if need > group.num_free:
                idle = self._idle(group.index)
                if need > group.num_free + idle:
                    return group.name, need, group.num_free, idle
        if wanted > free + evictable:
            return "pages", wanted, free, evictable
        return None

    def _short_of_bytes(
        self, layout: ArenaLayout, batch: list[Followed], wanted: int
    ) -> tuple[str, int, int, int] | None:
        """The same if two groups share bytes: what stays and what is wanted of both, one from each end."""
        rows = np.array([s.kv.row for s in batch], dtype=np.intp)
        needs = [group.wanted(rows, wanted) for group in self.cache.groups]
        ends = []
        for group, need in zip(self.cache.groups, needs, strict=True):
            idle = self.model.evictable() if group.reach.whole else self._idle(group.index)
            pool: Any = group.frames.allocator.ids
            fixed = self.cache._fixed(group.index)
            least = pool.extent if fixed is None else pool.places_of(fixed)
            spare = 0
            if group.reach.in_place and not self.model.open and wanted <= self.model.free() + self.model.evictable():
                own = 1 + self.cache.plan.tokens_per_step - 1
                held = [len(group.frames_of(s.kv.row)) for s in self.model.live]
                spare = sum([max(0, count - own) for count in held])
            ends.append(
                (
                    max(group.frames.num_used - idle - spare + need, least),
                    max(group.frames.num_used - idle + need, least),
                )
            )
        small, large = min(layout.strides), max(layout.strides)
        lack = [
            sum([stride * end[at] for stride, end in zip(layout.strides, ends, strict=True)])
            + small
            + large
            - layout.budget // small * small
            for at in (0, 1)
        ]
        if lack[0] <= 0:
            return None
        at = max((0, 1), key=lambda at: needs[at] * layout.strides[at])
        fits = needs[at] - -(-lack[1] // layout.strides[at])
        free = min(self.cache.groups[at].num_free, max(0, fits))
        return self.cache.groups[at].name, needs[at], free, max(0, fits - free)

    def _evicted(self) -> int:
        """Pages that the cache says it has evicted since this was last known; in an arena as many as bytes lack."""
        return self.cache.statistics().evicted_pages - self.evicted

    def _idle(self, g: int) -> int:
        """Resident pages, cached or passed, that no request and no step in flight reads."""
        size, snapshot = self.page_size, self.watch.snapshot
        held = {page for group, unpinned in snapshot.given if group == g for page in unpinned}
        group = self.cache.groups[g]
        for row, s in zip(snapshot.requests, self.model.live, strict=True):
            if not group.reach.in_place:
                first = self.device.first_page(g, max(s.committed // size * size, s.passed))
                held.update(row.pages[first : s.pinned])
            elif s.launched == s.begun > 0 and len(group.pinned(row.kv.row, self.names.tokens(0))):
                held.add(row.pages[s.begun // size - 1])
        column = snapshot.groups[g].column
        pages = {page for page in self.watch.ends.values() if column[page]}
        return len((pages | self._passed(group)) - held)

    def _untouched(self, batch: list[Followed], firsts: list[int]) -> Callable[[Snapshot], None] | None:
        """What to check after an allocation: no page and no frame of it is one that a step could touch still."""
        withheld = {page for each in self.cache.parts.withheld for page in each()}  # until a transfer ends
        moving = set(self.watch.snapshot.moving) - withheld
        if not moving and not self.steps:
            return None

        def check(snapshot: Snapshot) -> None:
            touched = [set().union(*[self.device.touches(step, g) for step in self.steps]) for g in self._groups]
            rows = {row.kv: row.pages for row in snapshot.requests}
            for s, first in zip(batch, firsts, strict=True):
                pages = rows[s.kv][first:]
                assert moving.isdisjoint(pages), "a page was handed out while a step could touch it"
                for frames, group in zip(touched, snapshot.groups, strict=True):
                    new = [group.column[page] for page in pages if group.column[page]]
                    assert frames.isdisjoint(new), "a frame was handed out while a step could touch it"

        return check

    # -- inside

    def _check(self, operation: str) -> None:
        self.operations += 1
        self.happened[operation] += 1
        self.watch.check()
        if self._events is not None:
            if self._events:
                self._fold.take(self._events)
                self._events.clear()
            self._fold.check(self.model.cached)

    def _same(self, before: RawData) -> None:
        assert self.watch.raw == before, "what must change nothing has changed something"

    def _committed(self, s: Followed, num_tokens: int) -> None:
        duplicates = self.model.commit(s, num_tokens)
        self.duplicates += duplicates
        self.happened["duplicate"] += duplicates > 0
        self.happened["commit in flight"] += s.launched > num_tokens and bool(self.model.open)

    def _forgotten(self, expected: int, *, counted: bool = True) -> None:
        self.model.expect_evicted(expected)
        self.evicted += expected * counted
        self.happened["evicted"] += expected > 0

    def _refused(self, group: str, operation: Callable[[], object]) -> OutOfPages:
        try:
            operation()
        except OutOfPages as error:
            if error.group != group:
                raise AssertionError(f"'{group}' is short, and the error names '{error.group}'") from error
            self.happened["out of pages"] += group != "rows"
            return error
        raise AssertionError(f"'{group}' is short, and nothing was refused")

    def _name(self, tokens: Ids, namespace: Namespace) -> int:
        return self.names.named(namespace, tokens.tobytes())

    def _name_of(self, s: Followed, tokens: Ids) -> None:
        """What is committed are the request's own tokens; a scheduler says here what they are."""
        name = self._name(tokens, self.names.namespaces[s.name])
        if len(tokens) > s.num_tokens:
            s.name, s.num_tokens = name, len(tokens)
        assert self.names.prefix(s.name, len(tokens)) == name, "a request commits tokens that are not its own"
