"""CacheMachine: random operations on a small KVCache, each checked against PlainCache, a content oracle and the audit.

Requests are mostly drawn from what is cached, so that prefixes are shared, edges are cut under leases and two requests
compute the same pages. Steps in flight capture their slots at launch and touch memory only when they settle.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from quire.cache import KVCache, PrefixHit
from quire.cache.audit import audit
from quire.errors import OutOfPages
from quire.prefix.evict import POLICIES
from quire.spec.events import AllCleared, CacheEvent, Namespace, PagesRemoved, PagesStored
from quire.spec.ids import Tier
from quire.testing import ContentOracle, small_plan
from tests.cache.plain_cache import PlainCache, Prefix, Sequence
from tests.choices import Choices

NAMESPACES = (Namespace(), Namespace(adapter="a"), Namespace(salt="a"), Namespace("a", "b"))
WEIGHTS = {
    "begin": 8,
    "extend": 8,
    "launch": 12,
    "settle": 9,
    "commit": 4,
    "finish": 3,
    "evict": 1,
    "clear": 1,
    "look": 2,
}


@dataclass
class Flight:
    """A launched step: per sequence its contents and, per group, where it reads and writes them."""

    fence: int
    parts: list[tuple[Sequence, int, np.ndarray]]  # sequence, start, contents of its whole context
    reads: list[list[np.ndarray]]
    writes: list[np.ndarray]


class CacheMachine:
    """One cache, its model, and what has happened (`happened`, so that a run can show that it tested something)."""

    def __init__(self, choices: Choices) -> None:
        page_size = choices.between(1, 4)
        num_pages = choices.between(3, 20)
        self.context = num_pages * page_size - choices.below(page_size)
        plan = small_plan(
            num_pages,
            page_size,
            context=self.context,
            max_requests=choices.between(1, 5),
            groups=("full", "second")[: choices.between(1, 2)],
        )
        self.events: list[CacheEvent] = []
        self.cache = KVCache(plan, eviction=choices.one_of(sorted(POLICIES)), emit=self.events.append)
        self.groups = range(len(plan.groups))
        for allocator in self.cache.frame_allocators:  # so that a page's id and its frames' ids differ
            frames = allocator.alloc_pages(num_pages).tolist()
            allocator.free_pages(np.array([frames.pop(choices.below(len(frames))) for _ in range(num_pages)]))
        self.model = PlainCache(num_pages, page_size)
        self.oracle = ContentOracle(self.cache)
        self.vocabulary = choices.between(1, 3)
        self.flights: list[Flight] = []
        self.earlier: tuple[list[int], Namespace, PrefixHit] | None = None
        self.stored: dict[bytes, Namespace] = {}  # the events, folded
        self.hashes: dict[Prefix, bytes] = {}
        self.num_read = 0
        self.evicted = self.prompt_tokens = self.hit_tokens = self.duplicates = 0
        self.happened: Counter[str] = Counter()

    def step(self, choices: Choices) -> None:
        """One random operation that has something to do, and all checks."""
        operations = [name for name, weight in WEIGHTS.items() for _ in range(weight * self._possible(name))]
        self.run(choices.one_of(operations), choices)

    def _possible(self, operation: str) -> bool:
        live = self.model.live
        return {
            "begin": len(live) < self.cache.plan.max_requests,
            "extend": bool(live),
            "launch": len(self.flights) < 2 and any(s.launched < s.allocated for s in live),
            "settle": bool(self.flights),
            "commit": any(s.committed < s.settled for s in live),
            "finish": bool(live),
        }.get(operation, True)

    def run(self, operation: str, choices: Choices) -> None:
        """One operation of that name and all checks."""
        before = self.cache.tree.version, self.evicted
        getattr(self, operation)(choices)
        version, evicted = self.cache.tree.version, self.evicted
        self.happened["split"] += version != before[0] and evicted == before[1]
        self.happened[operation] += 1
        self.check()

    # -- operations

    def look(self, choices: Choices) -> None:
        """Match without beginning; sometimes the hit is used later, when it may be out of date."""
        tokens, namespace = self._prompt(choices)
        before = self._everything()
        hit = self._match(tokens, namespace)
        assert self._everything() == before, "match changed something"
        self.earlier = tokens, namespace, hit

    def begin(self, choices: Choices) -> None:
        hit = None
        if self.earlier is not None and choices.chance(60):
            tokens, namespace, hit = self.earlier
            self.earlier = None
        else:
            tokens, namespace = self._prompt(choices)
        if len(self.model.live) == self.cache.plan.max_requests:
            return
        now = self._match(tokens, namespace)
        expected = hit if hit is not None and hit.match.version == self.cache.tree.version else now
        self.happened["outdated hit"] += hit is not None and expected is now
        kv = self.cache.begin(_ids(tokens), namespace, hit=hit, priority=choices.below(3))
        assert kv.num_cached == expected.num_tokens
        cached = kv.num_cached
        self.model.live.append(
            Sequence(kv, namespace, tokens, cached // self.model.page_size, cached, cached, cached, cached)
        )
        self.prompt_tokens += len(tokens)
        self.hit_tokens += cached
        self.happened["hit"] += cached > 0
        if len(self.model.live) == self.cache.plan.max_requests:
            self._refused("rows", lambda: self.cache.begin(_ids(tokens), namespace))

    def extend(self, choices: Choices) -> None:
        model, size = self.model, self.model.page_size
        batch = self._some(choices, model.live)
        most = 1 if choices.chance(30) else 2 * size + 1
        if not batch:
            return
        counts = [self._count(choices, s, most) for s in batch]
        wanted = sum(-(-(s.allocated + n) // size) + -s.allocated // size for s, n in zip(batch, counts, strict=True))
        free, evictable = model.free(), model.evictable()
        kvs = [s.kv for s in batch]
        if wanted > free + evictable:
            error = self._refused("full", lambda: self.cache.extend(kvs, counts))
            assert (error.wanted, error.free, error.evictable) == (wanted, free, evictable)
            return
        in_flight = [(group, self._read_frames(f, group)) for f in self.flights for group in self.groups]
        moving = {int(page) for retired in self.cache.retired for page in retired.pages}
        self.cache.extend(kvs, counts)
        self._forgotten(max(0, wanted - free))
        for s, count in zip(batch, counts, strict=True):
            pages = self.cache.page_ids(s.kv)[-(-s.allocated // size) :]
            assert not moving & set(pages.tolist()), "a page was handed out while a step could touch it"
            for group, frames in in_flight:
                new = self.cache.frames.column(Tier.DEVICE, group)[pages]
                assert not frames & set(new.tolist()), "a frame was handed out while a step could touch it"
            s.allocated += count
        self.happened["batch"] += len(batch) > 1
        self.happened["decode"] += set(counts) == {1}

    def launch(self, choices: Choices) -> None:
        model, size = self.model, self.model.page_size
        batch = self._some(choices, [s for s in model.live if s.launched < s.allocated])
        if not batch or len(self.flights) == 2:
            return
        starts = np.array([s.launched for s in batch])
        for s in batch:
            s.launched = s.allocated if choices.chance(70) else choices.between(s.launched + 1, s.allocated)
            while len(s.tokens) < s.launched:
                s.tokens.append(self._next(choices, s))
        ends = np.array([s.launched for s in batch])
        kvs = [s.kv for s in batch]
        contents = [self.oracle.contents(s.namespace, s.tokens[: s.launched]) for s in batch]
        reads = []
        for group in self.groups:
            table = self.cache.page_table(kvs, ends, group)
            slots = (table[:, :, None] * size + np.arange(size)).reshape(len(batch), -1)
            reads.append([row[:end] for row, end in zip(slots, ends, strict=True)])
        writes = [self.cache.slots(kvs, starts, ends, group) for group in self.groups]
        fence = self.cache.open_fence()
        model.open.add(fence)
        self.flights.append(Flight(fence, list(zip(batch, starts.tolist(), contents, strict=True)), reads, writes))
        self.happened["two in flight"] += len(self.flights) == 2

    def settle(self, choices: Choices) -> None:
        if not self.flights:
            return
        flight = self.flights.pop(0)
        new = np.concatenate([contents[start:] for _, start, contents in flight.parts])
        for group in self.groups:
            self.oracle.write(group, flight.writes[group], new)
            for (_, _, contents), slots in zip(flight.parts, flight.reads[group], strict=True):
                self.oracle.check(group, slots, contents)
                self.num_read += len(slots)
        for s, _, contents in flight.parts:
            s.settled = len(contents)
        if choices.chance(50):
            for s, _, _ in flight.parts:
                if s in self.model.live:
                    self._commit(s, s.settled)
        self.cache.close_fence(flight.fence)
        self.model.close(flight.fence)

    def commit(self, choices: Choices) -> None:
        behind = [s for s in self.model.live if s.committed < s.settled] or self.model.live
        if behind:
            s = choices.one_of(behind)
            self._commit(s, s.settled if choices.chance(60) else choices.between(s.committed, s.settled))

    def finish(self, choices: Choices) -> None:
        if not self.model.live:
            return
        s = choices.one_of(self.model.live)
        if choices.chance(75):
            num_tokens = s.settled if choices.chance(70) else choices.between(s.committed, s.settled)
            self.cache.finish(s.kv, _ids(s.tokens[:num_tokens]))
            self._committed(s, num_tokens)
        else:
            self.cache.finish(s.kv)
            self.happened["abort"] += 1
        self.model.finish(s)
        self.happened["fenced"] += bool(self.model.open)

    def evict(self, choices: Choices) -> None:
        wanted = choices.between(0, 3)
        expected = min(wanted, self.model.evictable())
        assert self.cache.evict(wanted) == expected
        self._forgotten(expected)

    def clear(self, choices: Choices) -> None:
        if choices.chance(85):
            return
        expected = self.model.evictable()
        assert self.cache.clear() == expected
        self._forgotten(expected, counted=False)
        assert bool(self.model.cached) or isinstance(self.events[-1], AllCleared)

    # -- checks, after every operation

    def check(self) -> None:
        audit(self.cache)
        self._check_events()
        assert self._tree() == self.model.cached, "the tree does not hold what was committed and not evicted"
        self.oracle.check_cached()
        self._check_rows()
        self._check_statistics()

    def _check_events(self) -> None:
        """The events, folded, are what is cached, and every hash is what its page's tokens give."""
        for event in self.events:
            if isinstance(event, PagesStored):
                size = 4 * self.model.page_size
                pages = [event.tokens[at : at + size] for at in range(0, len(event.tokens), size)]
                chain = [event.parent]
                for page in pages:
                    chain.append(hashlib.sha256(b"quire-page-1" + chain[-1] + page).digest())
                assert tuple(chain[1:]) == event.hashes
                assert event.parent == self._seed(event.namespace) or self.stored.get(event.parent) == event.namespace
                assert not self.stored.keys() & set(event.hashes), "stored twice"
                self.stored |= dict.fromkeys(event.hashes, event.namespace)
            elif isinstance(event, PagesRemoved):
                for digest in event.hashes:
                    assert self.stored.pop(digest, None) == event.namespace, "removed what was not stored"
            else:
                assert not self.stored
        self.events.clear()
        expected = {self._hash(prefix): prefix[0] for prefix in self.model.cached}
        assert self.stored == expected, "the events do not add up to what is cached"

    def _check_rows(self) -> None:
        """What a request reads now is its own prefix, and page tables, slots and pages agree."""
        size, live = self.model.page_size, self.model.live
        kvs, pages = [s.kv for s in live], [self.cache.page_ids(s.kv) for s in live]
        settled = np.array([s.settled for s in live], dtype=np.int64)
        for s, own in zip(live, pages, strict=True):
            assert len(own) == -(-s.allocated // size)
            assert (self.cache.allocated(s.kv), self.cache.committed(s.kv)) == (s.allocated, s.committed)
            assert self.cache.protected(s.kv) == s.pinned * size
        for group in self.groups if live else ():
            slots = [self.oracle.slots_of(group, own)[: s.settled] for s, own in zip(live, pages, strict=True)]
            table = self.cache.page_table(kvs, settled, group)
            by_table = (table[:, :, None] * size + np.arange(size)).reshape(len(live), -1)
            for s, row, own in zip(live, by_table, slots, strict=True):
                assert row[: s.settled].tolist() == own.tolist(), "the page table names other frames"
                self.oracle.check(group, own, self.oracle.contents(s.namespace, s.tokens[: s.settled]))
            packed = self.cache.slots(kvs, np.zeros_like(settled), settled, group)
            assert packed.tolist() == np.concatenate(slots).tolist()

    def _check_statistics(self) -> None:
        model, found = self.model, self.cache.statistics()
        assert (found.prompt_tokens, found.hit_tokens) == (self.prompt_tokens, self.hit_tokens)
        assert (found.duplicate_pages, found.evicted_pages) == (self.duplicates, self.evicted)
        assert (found.cached_pages, found.evictable_pages) == (len(model.cached), model.evictable())
        assert found.shared_pages == sum(count > 1 for count in model.leases().values())
        for frames in found.frames.values():
            assert (frames.free, frames.private, frames.cached, frames.moving) == (
                model.free(),
                model.private(),
                len(model.cached),
                model.moving(),
            )

    # -- inside

    def _match(self, tokens: list[int], namespace: Namespace) -> PrefixHit:
        """Match, and compare with what the model would reuse."""
        model, size = self.model, self.model.page_size
        hit = self.cache.match(_ids(tokens), namespace)
        matched = model.matched(namespace, tokens)
        usable = min(matched, (len(tokens) - 1) // size)
        leased = model.leases()
        unpinned = sum(not leased[model.prefix(namespace, tokens, n)] for n in range(1, usable + 1))
        assert (hit.num_pages, hit.num_tokens) == (usable, usable * size), "match is not the longest cached prefix"
        assert (hit.held_back, hit.num_pinned) == ((matched - usable) * size, unpinned)
        return hit

    def _commit(self, s: Sequence, num_tokens: int) -> None:
        self.cache.commit(s.kv, _ids(s.tokens[:num_tokens]))
        self._committed(s, num_tokens)

    def _committed(self, s: Sequence, num_tokens: int) -> None:
        duplicates = self.model.commit(s, num_tokens)
        self.duplicates += duplicates
        self.happened["duplicate"] += duplicates > 0
        self.happened["commit in flight"] += s.launched > num_tokens and bool(self.model.open)

    def _forgotten(self, expected: int, *, counted: bool = True) -> None:
        """As many pages as needed were evicted, and none that a lease holds. Which ones is the policy's business."""
        now = self._tree()
        assert now <= self.model.cached
        gone = self.model.cached - now
        assert len(gone) == expected, "evicted more or less than needed"
        assert not gone & set(self.model.leases()), "evicted a page that a lease holds"
        self.model.cached = now
        self.evicted += expected * counted
        self.happened["evicted"] += expected > 0

    def _refused(self, group: str, operation: Any) -> OutOfPages:
        before = self._everything()
        with pytest.raises(OutOfPages) as caught:
            operation()
        assert caught.value.group == group
        assert self._everything() == before, "a refused operation changed something"
        self.happened["out of pages"] += group == "full"
        return caught.value

    def _tree(self) -> set[Prefix]:
        """Every page prefix in the tree, read off its edges."""
        prefixes: dict[int, tuple[int, ...]] = {}
        found: set[Prefix] = set()
        size = self.model.page_size
        for node in self.cache.tree.nodes():
            before = prefixes.get(id(node.parent), ())
            tokens = (*before, *struct.unpack(f"<{len(node.key) // 4}i", node.key))
            prefixes[id(node)] = tokens
            found |= {(node.namespace, tokens[:end]) for end in range(len(before) + size, len(tokens) + 1, size)}
        return found

    def _everything(self) -> tuple[object, ...]:
        """All that an operation which must change nothing could have changed."""
        cache = self.cache
        columns = [cache.frames.column(Tier.DEVICE, group).tolist() for group in self.groups]
        rows = [cache.page_ids(s.kv).tolist() for s in self.model.live]
        free = [
            (a.num_free_pages, a.is_out(np.arange(a.num_pages + 1)).tolist())
            for a in (cache.pages, *cache.frame_allocators)
        ]
        nodes = [(node.key, node.pages.tolist(), node.leases, node.hits, node.last_used) for node in cache.tree.nodes()]
        return columns, rows, free, nodes, cache.statistics(), len(self.events), cache.retired, len(cache.live_requests)

    def _prompt(self, choices: Choices) -> tuple[list[int], Namespace]:
        """Mostly a cached or running prefix, cut or continued, now and then with one token changed."""
        known = [*sorted(self.model.cached, key=repr), *((s.namespace, tuple(s.tokens)) for s in self.model.live)]
        namespace, source = choices.one_of(known) if known and choices.chance(85) else (choices.one_of(NAMESPACES), ())
        tokens = list(source[: choices.between(0, len(source))]) if choices.chance(40) else list(source)
        if tokens and choices.chance(25):
            tokens[choices.below(len(tokens))] = self._token(choices)
        tokens += [self._token(choices) for _ in range(choices.between(0, 2 * self.model.page_size))]
        if choices.chance(8):
            namespace = choices.one_of(NAMESPACES)
        return tokens[: self.context] or [0], namespace

    def _count(self, choices: Choices, s: Sequence, most: int) -> int:
        """How many tokens to make room for: often the rest of the prompt, never beyond the context."""
        known = len(s.tokens) - s.allocated
        count = known if known > 0 and most > 1 and choices.chance(60) else choices.between(most == 1, most)
        return min(count, self.context - s.allocated)

    def _next(self, choices: Choices, s: Sequence) -> int:
        """A new token: often what another sequence with the same tokens has next, so that both compute one page."""
        length = len(s.tokens)
        for other in self.model.live:
            if len(other.tokens) > length and other.tokens[:length] == s.tokens and choices.chance(70):
                return other.tokens[length]
        return self._token(choices)

    def _token(self, choices: Choices) -> int:
        return choices.below(self.vocabulary)

    def _some(self, choices: Choices, sequences: list[Sequence]) -> list[Sequence]:
        left = list(sequences)
        if not left:
            return []
        return [left.pop(choices.below(len(left))) for _ in range(choices.between(1, len(left)))]

    def _read_frames(self, flight: Flight, group: int) -> set[int]:
        return {int(slot) // self.model.page_size for slots in flight.reads[group] for slot in slots}

    def _hash(self, prefix: Prefix) -> bytes:
        """The chained hash of a page, from its definition."""
        if not prefix[1]:
            return self._seed(prefix[0])
        if prefix not in self.hashes:
            size = self.model.page_size
            parent = self._hash((prefix[0], prefix[1][:-size]))
            page = struct.pack(f"<{size}i", *prefix[1][-size:])
            self.hashes[prefix] = hashlib.sha256(b"quire-page-1" + parent + page).digest()
        return self.hashes[prefix]

    def _seed(self, namespace: Any) -> bytes:
        layouts = "".join(group.layout.fingerprint() for group in self.cache.plan.groups)
        identity = hashlib.sha256(bytes(8) + layouts.encode()).digest()
        parts = [identity, namespace.adapter.encode(), namespace.salt.encode()]
        return hashlib.sha256(b"quire-namespace-1" + b"".join(struct.pack("<Q", len(p)) + p for p in parts)).digest()


def _ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def run_cache(seed: int, steps: int) -> Counter[str]:
    """A machine with that seed for that many steps; returns what has happened."""
    choices = Choices.seeded(seed)
    machine = CacheMachine(choices)
    for _ in range(steps):
        machine.step(choices)
    return machine.happened
