"""CacheMachine: random operations on a small KVCache.

Requests are mostly drawn from what is cached, so that prefixes are shared, edges are cut under leases and two requests
compute the same pages. Steps in flight capture their places at launch; the device gets to them later, in order, and the
host hears of that later still and in any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from quire.cache import KVCache, PrefixHit
from quire.errors import OutOfPages
from quire.offload import Offloads
from quire.plan.budget import MemoryPlan
from quire.prefix.evict import POLICIES
from quire.spec.events import CacheEvent, Namespace
from quire.testing.choices import Choices
from tests.fuzz.device import Part, Step
from tests.fuzz.faults import Faults
from tests.fuzz.followed_cache import FollowedCache
from tests.fuzz.plain_cache import Sequence
from tests.fuzz.plans import hybrid_plan, shuffle_frames

NAMESPACES = (Namespace(), Namespace(adapter="a"), Namespace(salt="a"), Namespace("a", "b"))
WEIGHTS = {
    "begin": 6,
    "extend": 10,
    "launch": 14,
    "execute": 14,
    "settle": 14,
    "commit": 6,
    "pass_by": 4,
    "finish": 4,
    "evict": 1,
    "clear": 1,
    "look": 3,
    "mark": 1,
    "count": 1,
}
_DRAWN = tuple(name for name, weight in WEIGHTS.items() for _ in range(weight))
MOST_IN_FLIGHT = 3
Did = tuple[Any, ...]
"""What an operation did; `tell` puts it into words on request."""


class CacheMachine:
    """One cache and what is done to it. `cache.happened` says what was, so that a run can show that it tested it."""

    def __init__(self, choices: Choices) -> None:
        page_size = choices.between(1, 4)
        num_pages = choices.between(3, 24)
        self.context = num_pages * page_size - choices.below(page_size)
        plan = hybrid_plan(choices, num_pages, page_size, self.context, choices.between(1, 5))
        events: list[CacheEvent] | None = [] if choices.chance(30) else None
        self.cache = self._follow(choices, plan, events)
        cache, self._faults = self.cache.cache, self.cache.faults
        self.names, self.model = self.cache.names, self.cache.model
        self._vocabulary = choices.between(1, 3)
        self._batches: dict[Step, list[Sequence]] = {}
        self._earlier: tuple[int, PrefixHit] | None = None
        self._running = cache.rows.batch([])
        self._verbs: dict[str, Callable[[Choices], Did]] = {name: getattr(self, name) for name in WEIGHTS}
        self.did: Did = ("make a cache",)

    def _follow(self, choices: Choices, plan: MemoryPlan, events: list[CacheEvent] | None) -> FollowedCache:
        """The cache, and what checks it."""
        cache = KVCache(
            plan,
            eviction=choices.one_of(sorted(POLICIES)),
            emit=events.append if events is not None else None,
            share_prefixes=not choices.chance(6),
            checkpoint_interval=choices.between(1, 4 * plan.page_size),
            offload=Offloads(),
        )
        shuffle_frames(cache, choices)
        return FollowedCache(cache, events, Faults(cache) if choices.chance(30) else None)

    def end(self) -> None:
        """Nothing has to come to an end here."""

    @property
    def happened(self) -> Counter[str]:
        """What has happened, by name."""
        return self.cache.happened

    @property
    def operations(self) -> int:
        """Verbs so far, each with all checks."""
        return self.cache.operations

    def step(self, choices: Choices) -> str:
        """One random operation that has something to do, and all checks; returns its name."""
        operation = choices.one_of(_DRAWN)
        while not self.possible(operation):
            operation = choices.one_of(_DRAWN)
        self.run(operation, choices)
        return operation

    def possible(self, operation: str) -> bool:
        """Whether that operation has something to do."""
        live, steps = self.model.live, self.cache.steps
        match operation:
            case "extend" | "finish" | "mark":
                return bool(live)
            case "launch":
                return len(steps) < MOST_IN_FLIGHT and any(s.launched < s.allocated for s in live)
            case "execute":
                return any(not step.executed for step in steps)
            case "settle":
                return bool(steps) and steps[0].executed
            case "commit" | "pass_by":
                return any(s.committed < s.settled for s in live)
        return True

    def run(self, operation: str, choices: Choices) -> None:
        """One operation of that name and all checks. `did` says what it was, also where it fails."""
        self.did = (operation,)
        version, evicted = self.cache.cache.tree.version, self.cache.evicted
        self.did = self._verbs[operation](choices)
        if self.cache.cache.tree.version != version and self.cache.evicted == evicted:
            self.happened["split"] += 1

    def tell(self, did: Did) -> str:
        """What was done, in words."""
        if did[0] in ("begin", "match") and len(did) > 1:
            name = did[1]
            did = (did[0], self.names.tokens(name).tolist(), "in", self.names.namespaces[name], *did[2:])
        return " ".join(str(part) for part in did)

    # -- operations; each returns what it did

    def look(self, choices: Choices) -> Did:
        """Match without beginning; sometimes the hit is used later, when it may be out of date."""
        name = self._prompt(choices)
        self._earlier = name, self.cache.match(self.names.tokens(name), self.names.namespaces[name])
        return "match", name

    def begin(self, choices: Choices) -> Did:
        """A request begins, perhaps on a hit that was taken earlier; with all rows taken it is refused."""
        if len(self.model.live) == self.cache.plan.max_requests and choices.chance(90):
            return self.finish(choices)
        hit = None
        if self._earlier is not None and choices.chance(60):
            name, hit = self._earlier
            self._earlier = None
        else:
            name = self._prompt(choices)
        tokens, namespace = self.names.tokens(name), self.names.namespaces[name]
        self.did = "begin", name, *(("on an earlier hit",) if hit is not None else ())
        try:
            self.cache.begin(tokens, namespace, hit=hit, priority=choices.below(3))
        except OutOfPages:
            self.did += (": refused",)
        return self.did

    def extend(self, choices: Choices) -> Did:
        """Room for more tokens in some requests, now and then with an allocation that fails on the way."""
        model, size = self.model, self.model.page_size
        batch = choices.some_of(model.live)
        if choices.chance(25):
            return self._decode(choices, batch)
        most = 1 if choices.chance(30) else 2 * size + 1
        counts = [self._count(choices, s, most) for s in batch]
        if sum(counts) // size > model.free() + model.evictable() and choices.chance(90):
            batch, counts = batch[:1], [min(1, counts[0])]
        if self._faults is not None and choices.chance(15):
            self._faults.arm(choices)
        self.did = "extend", [model.live.index(s) for s in batch], "by", counts
        try:
            self.cache.extend([s.kv for s in batch], counts)
        except OutOfPages:
            self.did += (": refused",)
        if self._faults is not None:
            self._faults.disarm()
        return self.did

    def _decode(self, choices: Choices, batch: list[Sequence]) -> Did:
        """Room for the next token of requests that run together, mostly those of the last time."""
        if not self._running.kvs or not all(kv.alive for kv in self._running.kvs) or choices.chance(20):
            self._running = self.cache.cache.rows.batch([s.kv for s in batch])
        if any(self.cache.rows.allocated(kv) == self.context for kv in self._running.kvs):
            return ("extend nothing",)
        rows = [self.cache.followed(kv) for kv in self._running.kvs]
        self.did = "extend", [self.model.live.index(s) for s in rows], "by the next token"
        try:
            self.cache.extend(self._running, 1)
        except OutOfPages:
            self.did += (": refused",)
        return self.did

    def launch(self, choices: Choices) -> Did:
        """A step of some requests is launched; they may get new tokens."""
        batch = choices.some_of([s for s in self.model.live if s.launched < s.allocated])
        if not batch or len(self.cache.steps) == MOST_IN_FLIGHT:
            return ("launch nothing",)
        return self._launch(batch, choices)

    def execute(self, choices: Choices) -> Did:
        """The device gets to the next step. The host has not heard of it yet."""
        step = next((step for step in self.cache.steps if not step.executed), None)
        if step is not None:
            self.cache.execute(step, self._batches[step])
        return ("execute",)

    def settle(self, choices: Choices) -> Did:
        """The host hears of a step that is done, perhaps before it hears of an earlier one; it may commit at once."""
        done = [step for step in self.cache.steps if step.executed]
        if not done:
            return ("settle nothing",)
        step = choices.one_of(done) if choices.chance(30) else done[0]
        commits = choices.chance(50)
        self.did = "settle step", step.fence, *(("and commit",) if commits else ())
        behind = []
        for s, part in zip(self._batches.pop(step), step.parts, strict=True):
            if s in self.model.live:
                s.settled = max(s.settled, part.end)
                if s.settled > s.committed:
                    behind.append(s)
        if commits and behind:  # a step at once, as a scheduler does
            tokens = [self.names.tokens(self.names.prefix(s.name, s.settled)) for s in behind]
            self.cache.commit([s.kv for s in behind], tokens)
        self.cache.close_fence(step)
        return self.did

    def mark(self, choices: Choices) -> Did:
        """Another request waits for a prefix of this one."""
        at = choices.below(len(self.model.live))
        num_pages = choices.between(1, self.model.num_pages)
        self.cache.will_leave(self.model.live[at].kv, num_pages)
        return "wait for", num_pages, "pages of", at

    def commit(self, choices: Choices) -> Did:
        """What has settled of one request becomes reusable, all of it or a part."""
        behind = [s for s in self.model.live if s.committed < s.settled] or self.model.live
        if not behind:
            return ("commit nothing",)
        s = choices.one_of(behind)
        num_tokens = s.settled if choices.chance(60) else choices.between(s.committed, s.settled)
        self.did = "commit", num_tokens, "tokens of", self.model.live.index(s)
        self.cache.commit(s.kv, self.names.tokens(self.names.prefix(s.name, num_tokens)))
        return self.did

    def pass_by(self, choices: Choices) -> Did:
        """Windows of some requests move on as far as has settled, and their pages stay private."""
        behind = [s for s in self.model.live if s.committed < s.settled and choices.chance(70)]
        self.did = "pass by", [(self.model.live.index(s), s.settled) for s in behind]
        batch = self.cache.cache.rows.batch([s.kv for s in behind])
        whole = np.array([s.settled // self.cache.page_size for s in behind], dtype=np.int64)
        self.cache.pass_by(batch, np.arange(len(behind)), whole)
        return self.did

    def finish(self, choices: Choices) -> Did:
        """A request ends or is aborted, whatever the device is doing with it."""
        at = choices.below(len(self.model.live))
        s = self.model.live[at]
        if choices.chance(25):
            self.did = "abort", at
            self.cache.finish(s.kv)
            return self.did
        num_tokens = s.settled if choices.chance(70) else choices.between(s.committed, s.settled)
        self.did = "finish", at, "with", num_tokens, "tokens"
        self.cache.finish(s.kv, self.names.tokens(self.names.prefix(s.name, num_tokens)))
        return self.did

    def evict(self, choices: Choices) -> Did:
        """Some cached pages are forgotten."""
        num_pages = choices.between(0, 3)
        self.did = "evict", num_pages
        self.cache.evict(num_pages)
        return self.did

    def clear(self, choices: Choices) -> Did:
        """Now and then everything is forgotten that no request holds."""
        if choices.chance(90):
            return self.evict(choices)
        self.cache.clear()
        return ("clear",)

    def count(self, choices: Choices) -> Did:
        """The statistics say what there is."""
        self.cache.count()
        return ("count",)

    # -- inside

    def _launch(self, batch: list[Sequence], choices: Choices) -> Did:
        parts = []
        for s in batch:
            start = s.launched
            s.launched = s.allocated if choices.chance(70) else choices.between(start + 1, s.allocated)
            while s.num_tokens < s.launched:
                s.name = self.names.child(s.name, self._next(choices, s))
                s.num_tokens += 1
            parts.append(Part(start, s.launched, self.names.prefix(s.name, s.launched)))
        self.did = "launch", [(self.model.live.index(s), p.start, p.end) for s, p in zip(batch, parts, strict=True)]
        step = self.cache.device.launch([s.kv for s in batch], parts)
        self._batches[step] = batch
        self.cache.launched(step)
        return self.did

    def _prompt(self, choices: Choices) -> int:
        """Mostly a cached or running prefix, cut or continued, now and then with one token changed."""
        names, size = self.names, self.model.page_size
        known = [*self.model.cached, *[s.name for s in self.model.live]]
        name = choices.one_of(known) if known and choices.chance(85) else names.root(choices.one_of(NAMESPACES))
        if choices.chance(40):
            name = names.prefix(name, choices.between(0, len(names.path[name])))
        path = names.path[name]
        if path and choices.chance(25):
            at = choices.below(len(path))
            name = names.child(names.prefix(name, at), self._token(choices))
            for old in path[at + 1 :]:
                name = names.child(name, names.token[old])
        for _ in range(choices.between(0, 2 * size)):
            name = names.child(name, self._token(choices))
        if choices.chance(8):
            name = names.named(choices.one_of(NAMESPACES), names.data[name])
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
        return choices.below(self._vocabulary)
