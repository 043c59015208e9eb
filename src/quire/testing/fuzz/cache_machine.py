"""CacheMachine: random operations on a small KVCache, each compared with a model of it, and checked afterwards.

Requests are mostly drawn from what is cached, so that prefixes are shared, edges are cut under leases and two requests
compute the same pages. Steps in flight capture their places at launch; the device gets to them later, in order, and the
host hears of that later still and in any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from quire.cache import KVCache, PrefixHit
from quire.cache.picture import Picture
from quire.errors import OutOfPages
from quire.prefix.evict import POLICIES
from quire.spec.events import CacheEvent, Namespace
from quire.testing.fuzz.choices import Choices
from quire.testing.fuzz.device import Device, Part, Step, ids
from quire.testing.fuzz.events import EventFold
from quire.testing.fuzz.names import Names
from quire.testing.fuzz.plain_cache import PlainCache, Sequence
from quire.testing.fuzz.plans import hybrid_plan, shuffle_frames
from quire.testing.fuzz.watch import Watch

NAMESPACES = (Namespace(), Namespace(adapter="a"), Namespace(salt="a"), Namespace("a", "b"))
WEIGHTS = {
    "begin": 6,
    "extend": 10,
    "launch": 14,
    "execute": 14,
    "settle": 14,
    "commit": 6,
    "finish": 4,
    "evict": 1,
    "clear": 1,
    "look": 3,
    "mark": 1,
    "count": 1,
}
_DRAWN = tuple(name for name, weight in WEIGHTS.items() for _ in range(weight))
MOST_IN_FLIGHT = 3


class CacheMachine:
    """One cache, its model, and what has happened (`happened`, so that a run can show that it tested something)."""

    def __init__(self, choices: Choices) -> None:
        page_size = choices.between(1, 4)
        num_pages = choices.between(3, 24)
        self.context = num_pages * page_size - choices.below(page_size)
        plan = hybrid_plan(choices, num_pages, page_size, self.context, choices.between(1, 5))
        self._events: list[CacheEvent] = []
        self.cache = KVCache(
            plan,
            eviction=choices.one_of(sorted(POLICIES)),
            emit=self._events.append if choices.chance(30) else None,
            checkpoint_interval=choices.between(1, 4 * page_size),
        )
        self.groups = range(len(plan.groups))
        shuffle_frames(self.cache, choices)
        self.names = Names(page_size)
        self.model = PlainCache(self.names, num_pages, page_size)
        self.device = Device(self.cache, self.names)
        self.watch = Watch(self.cache, self.names, self.device, self.model)
        self.fold = EventFold(self.cache, self.names)
        self.vocabulary = choices.between(1, 3)
        self.steps: list[tuple[Step, list[Sequence]]] = []  # in flight, oldest first
        self._earlier: tuple[int, PrefixHit] | None = None
        self.evicted = self.prompt_tokens = self.hit_tokens = self.duplicates = 0
        self.happened: Counter[str] = Counter()
        self._unchanged: tuple[object, ...] | None = None  # what the operation must leave as it is
        self._afterwards: Callable[[Picture], None] | None = None  # what else to check once it has been looked at
        self._operations: dict[str, Callable[[Choices], None]] = {name: getattr(self, name) for name in WEIGHTS}

    def step(self, choices: Choices) -> str:
        """One random operation that has something to do, and all checks; returns its name."""
        operation = choices.one_of(_DRAWN)
        while not self.possible(operation):
            operation = choices.one_of(_DRAWN)
        self.run(operation, choices)
        return operation

    def possible(self, operation: str) -> bool:
        """Whether that operation has something to do."""
        live = self.model.live
        match operation:
            case "begin":
                return len(live) < self.cache.plan.max_requests
            case "extend" | "finish" | "mark":
                return bool(live)
            case "launch":
                return len(self.steps) < MOST_IN_FLIGHT and any([s.launched < s.allocated for s in live])
            case "execute":
                return any([not step.executed for step, _ in self.steps])
            case "settle":
                return bool(self.steps) and self.steps[0][0].executed
            case "commit":
                return any([s.committed < s.settled for s in live])
        return True

    def run(self, operation: str, choices: Choices) -> None:
        """One operation of that name and all checks."""
        version, evicted = self.cache.tree.version, self.evicted
        self._operations[operation](choices)
        self.happened[operation] += 1
        if self.cache.tree.version != version and self.evicted == evicted:
            self.happened["split"] += 1
        self.watch.check()
        if self._afterwards is not None:
            self._afterwards(self.watch.picture)
            self._afterwards = None
        if self._unchanged is not None:
            assert self.watch.picture.held() == self._unchanged, "what must change nothing has changed something"
            assert not self._events, "what must change nothing was told as an event"
            self._unchanged = None
        if self._events:
            self.fold.take(self._events)
            self._events.clear()
        if self.fold.on:
            self.fold.check(self.model.cached)

    # -- operations

    def look(self, choices: Choices) -> None:
        """Match without beginning; sometimes the hit is used later, when it may be out of date."""
        name = self._prompt(choices)
        self._unchanged = self.watch.picture.held()
        self._earlier = name, self._match(name)

    def begin(self, choices: Choices) -> None:
        """A request begins, perhaps on a hit that was taken earlier. With all rows taken, another one is refused."""
        hit = None
        if self._earlier is not None and choices.chance(60):
            name, hit = self._earlier
            self._earlier = None
        else:
            name = self._prompt(choices)
        if len(self.model.live) == self.cache.plan.max_requests:
            return
        now = self._match(name)
        expected = hit if hit is not None and self.cache.is_current(hit) else now
        self.happened["outdated hit"] += hit is not None and expected is now
        tokens, namespace = self.names.tokens(name), self.names.namespaces[name]
        kv = self.cache.begin(tokens, namespace, hit=hit, priority=choices.below(3))
        cached = kv.num_cached
        assert cached == expected.num_tokens, "a request begins on another prefix than was matched"
        pages = cached // self.model.page_size
        self.model.live.append(Sequence(kv, name, len(tokens), cached, pages, cached, cached, cached, cached, cached))
        self.prompt_tokens += len(tokens)
        self.hit_tokens += cached
        self.happened["hit"] += cached > 0
        if len(self.model.live) == self.cache.plan.max_requests and choices.chance(30):
            before = Picture(self.cache).held()
            self._refused("rows", lambda: self.cache.begin(tokens, namespace))
            self._unchanged = before

    def extend(self, choices: Choices) -> None:
        """Room for more tokens in some requests: all of it or, where it does not fit, an error that says why."""
        model, size = self.model, self.model.page_size
        batch = choices.some_of(model.live)
        most = 1 if choices.chance(30) else 2 * size + 1
        counts = [self._count(choices, s, most) for s in batch]
        wanted = self._pages(batch, counts)
        while wanted > model.free() + model.evictable() and batch and choices.chance(90):
            batch.pop()
            counts.pop()
            wanted = self._pages(batch, counts)
        if not batch:
            return
        free = model.free()
        kvs = [s.kv for s in batch]
        short = self._short(batch, wanted)
        if short is not None:
            self._unchanged = self.watch.picture.held()
            error = self._refused(short[0], lambda: self.cache.extend(kvs, counts))
            found = (error.group, error.wanted, error.free, error.evictable)
            assert found == short, f"the error says {found}: {short}"
            return
        self._check_new(batch, [-(-s.allocated // size) for s in batch])
        self.cache.extend(kvs, counts)
        self._forgotten(max(0, wanted - free))
        for s, count in zip(batch, counts, strict=True):
            s.allocated += count
        self.happened["batch"] += len(batch) > 1
        self.happened["decode"] += set(counts) == {1}

    def launch(self, choices: Choices) -> None:
        """A step of some requests is launched; they may get new tokens."""
        batch = choices.some_of([s for s in self.model.live if s.launched < s.allocated])
        if not batch or len(self.steps) == MOST_IN_FLIGHT:
            return
        parts = []
        for s in batch:
            start = s.launched
            s.launched = s.allocated if choices.chance(70) else choices.between(start + 1, s.allocated)
            while s.num_tokens < s.launched:
                s.name = self.names.child(s.name, self._next(choices, s))
                s.num_tokens += 1
            parts.append(Part(start, s.launched, self.names.prefix(s.name, s.launched)))
        step = self.device.launch([s.kv for s in batch], parts)
        self.model.open.add(step.fence)
        self.steps.append((step, batch))
        self.happened["two in flight"] += len(self.steps) > 1

    def execute(self, choices: Choices) -> None:
        """The device gets to the next step. The host has not heard of it yet."""
        for step, batch in self.steps:
            if not step.executed:
                self.device.execute(step)
                for s, part in zip(batch, step.parts, strict=True):
                    s.executed = part.end
                return

    def settle(self, choices: Choices) -> None:
        """The host hears of a step that is done, perhaps before it hears of an earlier one; it may commit at once."""
        done = [at for at, (step, _) in enumerate(self.steps) if step.executed]
        if not done:
            return
        at = choices.one_of(done) if choices.chance(30) else done[0]
        step, batch = self.steps.pop(at)
        self.happened["settled out of order"] += at > 0
        commits = choices.chance(50)
        for s, part in zip(batch, step.parts, strict=True):
            if s in self.model.live:
                s.settled = max(s.settled, part.end)
                if commits:
                    self._commit(s, s.settled)
        self.cache.close_fence(step.fence)
        self.model.close(step.fence)

    def mark(self, choices: Choices) -> None:
        """Another request waits for a prefix of this one."""
        s = choices.one_of(self.model.live)
        num_pages = choices.between(1, self.model.num_pages)
        left = self.cache.will_leave(s.kv, num_pages)
        assert left or num_pages <= s.pinned, "pages that have not settled are still to come"

    def commit(self, choices: Choices) -> None:
        """What has settled of one request becomes reusable, all of it or a part."""
        behind = [s for s in self.model.live if s.committed < s.settled] or self.model.live
        if behind:
            s = choices.one_of(behind)
            self._commit(s, s.settled if choices.chance(60) else choices.between(s.committed, s.settled))

    def finish(self, choices: Choices) -> None:
        """A request ends or is aborted, whatever the device is doing with it."""
        s = choices.one_of(self.model.live)
        if choices.chance(75):
            num_tokens = s.settled if choices.chance(70) else choices.between(s.committed, s.settled)
            self.cache.finish(s.kv, self.names.tokens(self.names.prefix(s.name, num_tokens)))
            self._committed(s, num_tokens)
        else:
            self.cache.finish(s.kv)
            self.happened["abort"] += 1
        self.model.finish(s)
        self.happened["fenced"] += bool(self.model.open)

    def evict(self, choices: Choices) -> None:
        """Some cached pages are forgotten."""
        wanted = choices.between(0, 3)
        expected = min(wanted, self.model.evictable())
        found = self.cache.evict(wanted)
        assert found == expected, f"{found} pages were evicted, {expected} should be"
        self._forgotten(expected)

    def clear(self, choices: Choices) -> None:
        """Now and then everything is forgotten that no request holds."""
        if choices.chance(95):
            return
        expected = self.model.evictable()
        found = self.cache.clear()
        assert found == expected, f"{found} pages were cleared, {expected} should be"
        self._forgotten(expected, counted=False)

    def count(self, choices: Choices) -> None:
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
            cached = len(self.watch.resident(group.index))
            assert frames.cached == cached, f"{group.name}: {frames.cached} frames are cached: {cached}"
            for name in ("revived", "left", "skipped"):
                happened[name] = max(happened[name], getattr(frames, name))

    # -- inside

    def _match(self, name: int) -> PrefixHit:
        """Match, and compare with what the model would reuse."""
        model, size, tokens = self.model, self.model.page_size, self.names.tokens(name)
        hit = self.cache.match(tokens, self.names.namespaces[name])
        matched = model.matched(name)
        limit = min(matched, (len(tokens) - 1) // size)
        usable = self._resumable(name, limit)
        unpinned = len(set(self.names.ends[name][:usable]) - model.leased())
        found, expected = (hit.num_pages, hit.num_tokens), (usable, usable * size)
        assert found == expected, f"match finds (pages, tokens) {found}, and {expected} can be used"
        found, expected = (hit.held_back, hit.pinned[-1]), ((matched - usable) * size, unpinned)
        assert found == expected, f"match says (tokens held back, pages pinned) {found}: {expected}"
        assert bool(hit.limited_by) == (usable < limit)
        self.happened["short of the match"] += bool(hit.limited_by)
        return hit

    def _resumable(self, name: int, limit: int) -> int:
        """The most pages behind which every token that any group reads next is in a page that is resident there."""
        size, ends = self.model.page_size, self.names.ends[name]
        pages = [self.watch.ends[end] for end in ends[:limit]]
        resident = [[group.column[page] != 0 for page in pages] for group in self.watch.picture.groups]
        for count in range(limit, 0, -1):
            end = count * size
            if all(
                self.device.reads(g, end) == end or all(there[self.device.first_page(g, end) : count])
                for g, there in enumerate(resident)
            ):
                return count
        return 0

    def _pages(self, batch: list[Sequence], counts: list[int]) -> int:
        """New pages that so many more tokens take."""
        size = self.model.page_size
        return sum([-(-(s.allocated + n) // size) + -s.allocated // size for s, n in zip(batch, counts, strict=True)])

    def _short(self, batch: list[Sequence], wanted: int) -> tuple[str, int, int, int] | None:
        """(group, wanted, free, evictable) of the first group that is short, by counting what somebody reads."""
        model = self.model
        free, evictable = model.free(), model.evictable()
        for group in self.cache.groups:
            if group.reach.whole:
                if wanted > free + evictable:
                    return group.name, wanted, free, evictable
                continue
            need = wanted
            if group.reach.carried:
                need = group.wanted(ids([s.kv.row for s in batch]), wanted)
            if need > group.num_free:
                idle = self._idle(group.index)
                if need > group.num_free + idle:
                    return group.name, need, group.num_free, idle
        if wanted > free + evictable:
            return "pages", wanted, free, evictable
        return None

    def _idle(self, g: int) -> int:
        """Resident pages of the tree that no request and no step in flight reads."""
        size, picture = self.model.page_size, self.watch.picture
        held = {page for group, unpinned, _, _ in picture.waits.parts if group == g for page in unpinned}
        carried = self.cache.groups[g].reach.carried
        for row, s in zip(picture.rows, self.model.live, strict=True):
            if not carried:
                held.update(row.pages[self.device.first_page(g, s.committed // size * size) : s.pinned])
            elif s.launched == s.begun > 0 and len(self.cache.groups[g].pinned(row.kv.row, ids([]))):
                held.add(row.pages[s.begun // size - 1])
        column = picture.groups[g].column
        return len([page for page in self.watch.ends.values() if column[page] and page not in held])

    def _check_new(self, batch: list[Sequence], first: list[int]) -> None:
        """After this operation: no page or frame that these requests have got is one that a step could touch."""
        moving = set(self.watch.picture.waits.pages)
        touched = [set().union(*[self.device.touches(step, g) for step, _ in self.steps]) for g in self.groups]
        if not moving and not any(touched):
            return

        def check(picture: Picture) -> None:
            rows = {row.kv: row.pages for row in picture.rows}
            for s, start in zip(batch, first, strict=True):
                pages = rows[s.kv][start:]
                assert moving.isdisjoint(pages), "a page was handed out while a step could touch it"
                for frames, group in zip(touched, picture.groups, strict=True):
                    new = [group.column[page] for page in pages if group.column[page]]
                    assert frames.isdisjoint(new), "a frame was handed out while a step could touch it"

        self._afterwards = check

    def _commit(self, s: Sequence, num_tokens: int) -> None:
        self.cache.commit(s.kv, self.names.tokens(self.names.prefix(s.name, num_tokens)))
        self._committed(s, num_tokens)

    def _committed(self, s: Sequence, num_tokens: int) -> None:
        duplicates = self.model.commit(s, num_tokens)
        self.duplicates += duplicates
        self.happened["duplicate"] += duplicates > 0
        self.happened["commit in flight"] += s.launched > num_tokens and bool(self.model.open)

    def _forgotten(self, expected: int, *, counted: bool = True) -> None:
        self.model.expect_evicted(expected)
        self.evicted += expected * counted
        self.happened["evicted"] += expected > 0

    def _refused(self, group: str, operation: Callable[[], object]) -> OutOfPages:
        error = self._error(operation)
        if error is None or error.group != group:
            raise AssertionError(f"'{group}' is short, and the answer is: {error}")
        self.happened["out of pages"] += group != "rows"
        return error

    def _error(self, operation: Callable[[], object]) -> OutOfPages | None:
        try:
            operation()
        except OutOfPages as error:
            return error
        return None

    def _prompt(self, choices: Choices) -> int:
        """Mostly a cached or running prefix, cut or continued, now and then with one token changed."""
        names, size = self.names, self.model.page_size
        known = [*self.model.cached, *[s.name for s in self.model.live]]
        name = choices.one_of(known) if known and choices.chance(85) else 0
        if not name:
            name = names.root(choices.one_of(NAMESPACES))
        if choices.chance(40):
            name = names.prefix(name, choices.between(0, len(names.path[name])))
        path = names.path[name]
        if path and choices.chance(25):
            at = choices.below(len(path))
            rest = path[at + 1 :]
            name = names.child(names.prefix(name, at), self._token(choices))
            for old in rest:
                name = names.child(name, names.token[old])
        for _ in range(choices.between(0, 2 * size)):
            name = names.child(name, self._token(choices))
        if choices.chance(8):
            name = names.follow(names.root(choices.one_of(NAMESPACES)), names.data[name])
        return (
            names.prefix(name, min(len(names.path[name]), self.context)) if names.path[name] else names.child(name, 0)
        )

    def _count(self, choices: Choices, s: Sequence, most: int) -> int:
        """How many tokens to make room for: often the rest of the prompt, never beyond the context."""
        known = s.num_tokens - s.allocated
        count = known if known > 0 and most > 1 and choices.chance(60) else choices.between(int(most == 1), most)
        return min(count, self.context - s.allocated)

    def _next(self, choices: Choices, s: Sequence) -> int:
        """A new token: often what another sequence with the same tokens has next, so that both compute one page."""
        names, length = self.names, s.num_tokens
        for other in self.model.live:
            if other.num_tokens > length and names.prefix(other.name, length) == s.name and choices.chance(70):
                return names.token[names.path[other.name][length]]
        return self._token(choices)

    def _token(self, choices: Choices) -> int:
        return choices.below(self.vocabulary)
