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
from quire.cache.groups import Pieces
from quire.errors import OutOfPages
from quire.prefix.evict import POLICIES
from quire.spec.events import AllCleared, CacheEvent, Namespace, PagesRemoved, PagesStored
from quire.spec.ids import Tier
from quire.testing import ContentOracle
from quire.testing.content import slots_of_frames
from quire.testing.fuzz.choices import Choices
from quire.testing.fuzz.plans import hybrid_plan, tokens_read
from tests.cache.plain_cache import PlainCache, Prefix, Sequence

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
    "look": 4,
    "mark": 1,
}


@dataclass
class Flight:
    """A launched step: per sequence its contents and, per group, where it reads and writes them."""

    fence: int
    parts: list[tuple[Sequence, int, np.ndarray]]  # sequence, start, contents of its whole context
    reads: dict[int, list[np.ndarray]]
    writes: dict[int, np.ndarray]
    pieces: dict[int, Pieces]


class CacheMachine:
    """One cache, its model, and what has happened (`happened`, so that a run can show that it tested something)."""

    def __init__(self, choices: Choices) -> None:
        page_size = choices.between(1, 4)
        num_pages = choices.between(3, 20)
        self.context = num_pages * page_size - choices.below(page_size)
        plan = hybrid_plan(choices, num_pages, page_size, self.context, choices.between(1, 5))
        self.events: list[CacheEvent] = []
        self.cache = KVCache(
            plan,
            eviction=choices.one_of(sorted(POLICIES)),
            emit=self.events.append,
            checkpoint_interval=choices.between(1, 4 * page_size),
        )
        self.groups = range(len(plan.groups))
        self.reads = [tokens_read(group.reach, page_size) for group in plan.groups]
        for group in self.cache.groups:  # so that a page's id and its frames' ids differ
            allocator: Any = group.frames.allocator
            take, free = (
                (allocator.alloc, allocator.free)
                if group.reach.carried
                else (allocator.alloc_pages, allocator.free_pages)
            )
            frames = take(group.num_frames).tolist()
            free(np.array([frames.pop(choices.below(len(frames))) for _ in range(group.num_frames)]))
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
            "mark": bool(live),
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
        expected = hit if hit is not None and self.cache.is_current(hit) else now
        self.happened["outdated hit"] += hit is not None and expected is now
        kv = self.cache.begin(_ids(tokens), namespace, hit=hit, priority=choices.below(3))
        assert kv.num_cached == expected.num_tokens
        cached = kv.num_cached
        self.model.live.append(
            Sequence(kv, namespace, tokens, cached // self.model.page_size, cached, cached, cached, cached, cached)
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
        free = model.free()
        kvs = [s.kv for s in batch]
        short = self._short(batch, wanted)
        if short:
            error = self._refused(short[0][0], lambda: self.cache.extend(kvs, counts))
            assert (error.group, error.wanted, error.free, error.evictable) == short[0]
            return
        in_flight = [(group, self._touched(f, group)) for f in self.flights for group in self.groups]
        resident = [self._resident(group) for group in self.groups]
        moving = {int(page) for retired in self.cache.retired for page in retired.pages}
        self.cache.extend(kvs, counts)
        self._forgotten(max(0, wanted - free))
        for group, before in enumerate(resident):
            self.happened["dropped"] += len((before & self.model.cached) - self._resident(group))
        for s, count in zip(batch, counts, strict=True):
            pages = self.cache.page_ids(s.kv)[-(-s.allocated // size) :]
            assert not moving & set(pages.tolist()), "a page was handed out while a step could touch it"
            for group, frames in in_flight:
                new = self.cache.frames.column(Tier.DEVICE, group)[pages]
                assert not frames & set(new[new != 0].tolist()), "a frame was handed out while a step could touch it"
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
        fence = self.cache.open_fence()
        reads, writes, pieces = {}, {}, {}
        for group in self.groups:
            carried = self.cache.launch(group, kvs, ends)
            if carried is not None:
                pieces[group] = carried
                continue
            table = self.cache.page_table(kvs, ends, group)
            slots = (table[:, :, None] * size + np.arange(size)).reshape(len(batch), -1)
            lows = [self.reads[group](start) for start in starts.tolist()]
            reads[group] = [row[low:end] for row, low, end in zip(slots, lows, ends, strict=True)]
            writes[group] = self.cache.slots(kvs, starts, ends, group)
        model.open.add(fence)
        parts = list(zip(batch, starts.tolist(), contents, strict=True))
        self.flights.append(Flight(fence, parts, reads, writes, pieces))
        self.happened["two in flight"] += len(self.flights) == 2

    def settle(self, choices: Choices) -> None:
        if not self.flights:
            return
        flight = self.flights.pop(0)
        new = np.concatenate([contents[start:] for _, start, contents in flight.parts])
        for group, slots_written in flight.writes.items():
            self.oracle.write(group, slots_written, new)
            for (_, _, contents), slots in zip(flight.parts, flight.reads[group], strict=True):
                self.oracle.check(group, slots, contents[len(contents) - len(slots) :])
                self.num_read += len(slots)
        for group, pieces in flight.pieces.items():
            self._carry(group, pieces, flight)
        for s, _, contents in flight.parts:
            s.settled = len(contents)
        if choices.chance(50):
            for s, _, _ in flight.parts:
                if s in self.model.live:
                    self._commit(s, s.settled)
        self.cache.close_fence(flight.fence)
        self.model.close(flight.fence)

    def _carry(self, group: int, pieces: Pieces, flight: Flight) -> None:
        """Each piece continues what its request holds, and two of different requests write different frames."""
        todo = list(zip(pieces.lengths.tolist(), pieces.sources.tolist(), pieces.targets.tolist(), strict=True))
        writer: dict[int, Sequence] = {}
        for s, start, contents in flight.parts:
            at = start
            while at < len(contents):
                length, source, target = todo.pop(0)
                assert bool(at) == bool(source), "a request begins with nothing, and with nothing else"
                if at:
                    self.oracle.check(group, _ids([source]), contents[at - 1 : at])
                    self.num_read += 1
                at += length
                assert writer.setdefault(target, s) is s, "two requests write one frame"
                self.oracle.write(group, _ids([target]), contents[at - 1 : at])
            assert at == len(contents), "a piece goes beyond its request's tokens"
        assert not todo

    def mark(self, choices: Choices) -> None:
        s = choices.one_of(self.model.live)
        num_pages = choices.between(1, self.model.num_pages)
        left = self.cache.will_leave(s.kv, num_pages)
        assert left or num_pages <= s.pinned, "pages that have not settled are still to come"

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
        assert set(self._tree()) == self.model.cached, "the tree does not hold what was committed and not evicted"
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
            if self.cache.groups[group].reach.carried:
                self._check_carried(group)
                continue
            lows = [self.reads[group](s.committed // size * size) // size * size for s in live]
            column = self.cache.frames.column(Tier.DEVICE, group)
            slots = [slots_of_frames(column[own], size)[: s.settled] for s, own in zip(live, pages, strict=True)]
            table = self.cache.page_table(kvs, settled, group)
            by_table = (table[:, :, None] * size + np.arange(size)).reshape(len(live), -1)
            for s, row, own, low in zip(live, by_table, slots, lows, strict=True):
                assert row[: s.settled].tolist() == own.tolist(), "the page table names other frames"
                self.oracle.check(group, own[low:], self.oracle.contents(s.namespace, s.tokens[: s.settled])[low:])
            packed = self.cache.slots(kvs, np.zeros_like(settled), settled, group)
            assert packed.tolist() == np.concatenate(slots).tolist()

    def _check_carried(self, group: int) -> None:
        """What a request carries is what its settled tokens give, where no step in flight rewrites it."""
        carried: Any = self.cache.groups[group]
        for s in self.model.live:
            frame = carried._frame[s.kv.row : s.kv.row + 1]
            if s.settled == s.launched > s.begun and frame[0]:
                self.oracle.check(group, frame, self.oracle.contents(s.namespace, s.tokens[: s.settled])[-1:])
                self.happened["carried"] += 1

    def _check_statistics(self) -> None:
        model, found = self.model, self.cache.statistics()
        assert (found.prompt_tokens, found.hit_tokens) == (self.prompt_tokens, self.hit_tokens)
        assert (found.duplicate_pages, found.evicted_pages) == (self.duplicates, self.evicted)
        assert (found.cached_pages, found.evictable_pages) == (len(model.cached), model.evictable())
        assert found.shared_pages == sum(count > 1 for count in model.leases().values())
        for group, frames in zip(self.cache.groups, found.frames.values(), strict=True):
            owners = (frames.free, frames.private, frames.cached, frames.moving)
            assert sum(owners) == frames.total and min(owners) >= 0
            if group.reach.whole:
                assert owners == (model.free(), model.private(), len(model.cached), model.moving())
            else:
                assert frames.cached == len(self._resident(group.index) & model.cached)
            self.happened["revived"] = max(self.happened["revived"], frames.revived)
            self.happened["left"] = max(self.happened["left"], frames.left)
            self.happened["skipped"] = max(self.happened["skipped"], frames.skipped)

    # -- inside

    def _match(self, tokens: list[int], namespace: Namespace) -> PrefixHit:
        """Match, and compare with what the model would reuse."""
        model, size = self.model, self.model.page_size
        hit = self.cache.match(_ids(tokens), namespace)
        matched = model.matched(namespace, tokens)
        usable = self._resumable(namespace, tokens, min(matched, (len(tokens) - 1) // size))
        leased = model.leases()
        unpinned = sum(not leased[model.prefix(namespace, tokens, n)] for n in range(1, usable + 1))
        assert (hit.num_pages, hit.num_tokens) == (usable, usable * size), "match is not the longest usable prefix"
        assert (hit.held_back, hit.pinned[-1]) == ((matched - usable) * size, unpinned)
        assert bool(hit.limited_by) == (usable < min(matched, (len(tokens) - 1) // size))
        self.happened["short of the match"] += bool(hit.limited_by)
        return hit

    def _resumable(self, namespace: Namespace, tokens: list[int], limit: int) -> int:
        """The most pages behind which every token that any group reads next is in a page that is resident there."""
        size = self.model.page_size
        resident = [self._resident(group) for group in self.groups]

        def there(num_pages: int) -> bool:
            end = num_pages * size
            return all(
                self.model.prefix(namespace, tokens, at // size + 1) in resident[group]
                for group in self.groups
                for at in range(self.reads[group](end), end)
            )

        return max(n for n in range(limit + 1) if there(n))

    def _resident(self, group: int) -> set[Prefix]:
        """Cached prefixes whose last page has a frame in that group, read off the tree and the frame table."""
        column = self.cache.frames.column(Tier.DEVICE, group)
        return {prefix for prefix, page in self._tree().items() if column[page]}

    def _short(self, batch: list[Sequence], wanted: int) -> list[tuple[str, int, int, int]]:
        """(group, wanted, free, evictable) of each group that is short, by counting what somebody reads."""
        found = []
        leased = self.model.leases()
        for index, group in enumerate(self.cache.groups):
            need = wanted
            if group.reach.whole:
                free, evictable = self.model.free(), self.model.evictable()
            else:
                need = group.wanted(np.array([s.kv.row for s in batch], dtype=np.int32), wanted)
                free, evictable = group.num_free, len(self._idle(index, leased))
            if need > free + evictable:
                found.append((group.name, need, free, evictable))
        if wanted > self.model.free() + self.model.evictable():
            found.append(("pages", wanted, self.model.free(), self.model.evictable()))
        return found

    def _idle(self, group: int, leased: Counter[Prefix]) -> set[Prefix]:
        """Resident prefixes that no request and no step in flight reads."""
        size = self.model.page_size
        held = {
            page
            for retired in self.cache.retired
            for given in retired.given
            if given.group == group
            for page in given.unpinned.tolist()
        }
        if not self.cache.groups[group].reach.carried:
            for s in self.model.live:
                first = self.reads[group](s.committed // size * size) // size
                held |= set(self.cache.page_ids(s.kv)[first : s.pinned].tolist())
        else:
            for s in self.model.live:
                if s.launched == s.begun > 0 and not self._took_over(group, s):
                    held.add(int(self.cache.page_ids(s.kv)[s.begun // size - 1]))
        tree = self._tree()
        return {prefix for prefix in self._resident(group) if tree[prefix] not in held}

    def _took_over(self, group: int, s: Sequence) -> bool:
        carried: Any = self.cache.groups[group]
        return not len(carried.pinned(s.kv.row, carried._source[:0]))

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
        now = set(self._tree())
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
        self.happened["out of pages"] += group != "rows"
        return caught.value

    def _tree(self) -> dict[Prefix, int]:
        """Every page prefix in the tree with its page, read off its edges."""
        prefixes: dict[int, tuple[int, ...]] = {}
        found: dict[Prefix, int] = {}
        size = self.model.page_size
        for node in self.cache.tree.nodes():
            before = prefixes.get(id(node.parent), ())
            tokens = (*before, *struct.unpack(f"<{len(node.key) // 4}i", node.key))
            prefixes[id(node)] = tokens
            ends = range(len(before) + size, len(tokens) + 1, size)
            found |= {(node.namespace, tokens[:end]): p for end, p in zip(ends, node.pages.tolist(), strict=True)}
        return found

    def _everything(self) -> tuple[object, ...]:
        """All that an operation which must change nothing could have changed."""
        cache = self.cache
        columns = [cache.frames.column(Tier.DEVICE, group).tolist() for group in self.groups]
        rows = [cache.page_ids(s.kv).tolist() for s in self.model.live]
        free: list[object] = [
            (g.num_free, g.num_evictable, g.frames.is_out(np.arange(g.num_frames + 1)).tolist()) for g in cache.groups
        ]
        free.append(cache.pages.is_out(np.arange(cache.plan.num_pages + 1)).tolist())
        free += [
            g.shelf.pins(np.arange(cache.plan.num_pages + 1)).tolist() for g in cache.groups if g.shelf is not None
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

    def _touched(self, flight: Flight, group: int) -> set[int]:
        if group in flight.pieces:
            pieces = flight.pieces[group]
            return {*pieces.sources.tolist(), *pieces.targets.tolist()}
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
