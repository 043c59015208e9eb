"""PageIndex and EventOrder: what is lost, late or comes twice is found out, and the index has what engines have."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from quire.observe.kv_batch import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from quire.routing.page_index import EventOrder, PageIndex
from quire.spec.events import Namespace
from quire.spec.ids import Ids

PAGE = 2
ENGINE, WHICH = st.integers(0, 1), st.integers(0, 99)
PLAIN, SALTED = Namespace(), Namespace(adapter="a", salt="s")
Path = tuple[int, ...]


def tokens_of(path: Path) -> Ids:
    """A prompt whose pages are those of a path."""
    return np.repeat(np.array(path, dtype=np.int32), PAGE)


def stored(pages: Sequence[int], parent: int | None, tokens: Ids, medium: str = "GPU", size: int = PAGE) -> BlockStored:
    return BlockStored(list(pages), parent, tokens.tolist(), size, None, medium, None)


class Engine:
    """What one engine has, and its publisher, which keeps the last batches. Hashes are other ones after a restart."""

    def __init__(self) -> None:
        self.pages: dict[Path, set[str]] = {}  # media, by all pages up to this one
        self.hashes: dict[Path, int] = {}
        self.queue: list[KvEvent] = []
        self.kept: list[tuple[int, list[KvEvent]]] = []
        self.first = self.next = 0

    def hash_of(self, path: Path) -> int | None:
        return self.hashes.setdefault(path, hash((path, self.first)) % 2**64) if path else None

    def store(self, path: Path, end: int, medium: str) -> None:
        """Pages from `end` on of a path."""
        run = [path[:at] for at in range(end + 1, len(path) + 1)]
        for each in run:
            self.pages.setdefault(each, set()).add(medium)
        hashes = [self.hash_of(each) or 0 for each in run]
        self.queue.append(stored(hashes, self.hash_of(path[:end]), tokens_of(path[end:]), medium))

    def remove(self, path: Path, medium: str) -> None:
        self.pages[path].discard(medium)
        if not self.pages[path]:
            del self.pages[path]
        self.queue.append(BlockRemoved([self.hash_of(path) or 0], medium))

    def clear(self) -> None:
        self.pages.clear()
        self.queue.append(AllBlocksCleared())

    def tell_all(self) -> None:
        pages = sorted(self.pages.items(), key=lambda each: len(each[0]))
        self.clear()
        for path, media in pages:
            for medium in media:
                self.store(path, len(path) - 1, medium)

    def publish(self) -> tuple[int, list[KvEvent]]:
        batch = self.next, self.queue
        self.kept, self.queue, self.next = [*self.kept, batch][-3:], [], self.next + 1
        return batch

    def restart(self) -> None:
        self.clear()
        self.queue, self.kept = [AllBlocksCleared()], []
        self.first = self.next = self.next + 5

    def again(self, start: int) -> list[tuple[int, list[KvEvent]]]:
        if not self.kept or self.kept[0][0] > max(start, self.first):
            self.tell_all()
        return [batch for batch in self.kept if batch[0] >= start]

    def held(self, path: Path) -> tuple[int, int]:
        """As the index should say."""
        ends = [len(path), len(path)]
        for at in reversed(range(len(path))):
            media = self.pages.get(path[: at + 1], set())
            ends = [at if "GPU" not in media else ends[0], at if not media else ends[1]]
        return PAGE * ends[0], PAGE * ends[1]


class Machine(RuleBasedStateMachine):
    """Two engines, an index, and a network that loses, delays, repeats and mixes up messages."""

    @initialize()
    def begin(self) -> None:
        self.engines = [Engine(), Engine()]
        self.index, self.orders = PageIndex(2, PAGE), [EventOrder(), EventOrder()]
        self.sent: list[list[tuple[int, list[KvEvent]]]] = [[], []]
        self.asked: list[int | None] = [None, None]

    @rule(engine=ENGINE, path=st.lists(st.integers(0, 1), min_size=1, max_size=3), host=st.booleans())
    def store(self, engine: int, path: list[int], host: bool) -> None:
        found, end = self.engines[engine], 0
        while tuple(path[: end + 1]) in found.pages and end < len(path) - 1:
            end += 1
        found.store(tuple(path), end, "CPU" if host else "GPU")

    @rule(engine=ENGINE, which=WHICH)
    def remove(self, engine: int, which: int) -> None:
        """A page behind which there is none on that tier, nor anywhere if it goes for good."""
        pages = self.engines[engine].pages
        leaves = [
            (path, medium)
            for path, media in sorted(pages.items())
            for medium in sorted(media)
            if not any(more[:-1] == path and (medium in pages[more] or media == {medium}) for more in pages)
        ]
        if leaves:
            self.engines[engine].remove(*leaves[which % len(leaves)])

    @rule(engine=ENGINE, restarts=st.booleans())
    def lose_all(self, engine: int, restarts: bool) -> None:
        (self.engines[engine].restart if restarts else self.engines[engine].clear)()

    @rule(engine=ENGINE, is_lost=st.booleans(), twice=st.booleans())
    def publish(self, engine: int, is_lost: bool, twice: bool) -> None:
        batch = self.engines[engine].publish()
        self.sent[engine] += [] if is_lost else [batch] * (1 + twice)

    @rule(engine=ENGINE, which=WHICH)
    def arrive(self, engine: int, which: int) -> None:
        if sent := self.sent[engine]:
            number, events = sent.pop(which % len(sent))
            self.index.apply(engine, self.orders[engine].receive(number, events))
            self.ask(engine)

    @rule(engine=ENGINE)
    def answer(self, engine: int) -> None:
        if (start := self.asked[engine]) is not None:
            self.asked[engine] = None
            self.index.apply(engine, self.orders[engine].told_again(self.engines[engine].again(start)))
            self.ask(engine)

    def ask(self, engine: int, known: int = 0) -> None:
        if (start := self.orders[engine].asks(known)) is not None:
            self.asked[engine] = start

    @rule()
    def rest(self) -> None:
        """All that is under way arrives, and the index has what the engines have."""
        for engine in (0, 1):
            for _ in range(20):
                while self.sent[engine]:
                    self.arrive(engine, -1)
                self.ask(engine, self.engines[engine].next)
                self.answer(engine)
                if not self.engines[engine].queue and self.orders[engine].next == self.engines[engine].next:
                    break
                self.publish(engine, is_lost=False, twice=False)
            else:
                raise AssertionError("it never comes to rest")
        paths = {path for engine in self.engines for path in engine.pages}
        for path in (*paths, *((*path, 0) for path in paths), (0,)):
            assert self.index.held(tokens_of(path), PLAIN) == [engine.held(path) for engine in self.engines]
        for number, engine in enumerate(self.engines):
            assert self.index.num_pages(number) == len(engine.pages)


TestPageIndex = Machine.TestCase
TestPageIndex.settings = settings(max_examples=60, stateful_step_count=50)


def check_index(seed: int) -> None:
    """A long life of such engines."""
    random, machine = Random(seed), Machine()
    machine.begin()
    for _ in range(400):
        engine, which, chance = random.randrange(2), random.randrange(100), random.random
        match random.choice(("store", "store", "remove", "lose_all", "publish", "publish", "arrive", "arrive", "rest")):
            case "store":
                path = [random.randrange(3) for _ in range(random.randrange(1, 5))]
                machine.store(engine=engine, path=path, host=chance() < 0.5)
            case "remove":
                machine.remove(engine=engine, which=which)
            case "lose_all" if chance() < 0.1:
                machine.lose_all(engine=engine, restarts=chance() < 0.5)
            case "publish":
                machine.publish(engine=engine, is_lost=chance() < 0.3, twice=chance() < 0.2)
            case "arrive":
                machine.arrive(engine=engine, which=which)
                machine.answer(engine=random.randrange(2))
            case "rest" if chance() < 0.3:
                machine.rest()
    machine.rest()


@pytest.mark.parametrize("seed", range(5))
def test_long_lives_of_engines(seed: int) -> None:
    check_index(seed)


def test_pages_are_of_a_namespace_and_of_a_size() -> None:
    """Two that differ in one of adapter and salt, or that only together read the same, share nothing."""
    index, tokens = PageIndex(1, PAGE), tokens_of((1, 2))
    both = BlockStored([1, 2], None, tokens.tolist(), PAGE, None, "GPU", "a", cache_salt="s")
    index.apply(0, [both, stored([3], None, tokens_of((5, 5)), size=2 * PAGE)])
    assert index.held(tokens, SALTED) == [(4, 4)]
    for other in (PLAIN, Namespace("a"), Namespace(salt="s"), Namespace("as"), Namespace("s", "a")):
        assert index.held(tokens, other) == [(0, 0)]
    assert index.held(tokens_of((5, 5)), PLAIN) == [(0, 0)] and index.num_pages(0) == 2


def test_only_whole_pages_count() -> None:
    index = PageIndex(1, PAGE)
    index.apply(0, [stored([1], None, tokens_of((1,)))])
    assert index.held(tokens_of((1, 1))[:3], PLAIN) == [(2, 2)] and index.held(tokens_of((1,))[:1], PLAIN) == [(0, 0)]


def test_what_is_behind_a_page_that_was_missed_is_ignored() -> None:
    index = PageIndex(1, PAGE)
    index.apply(0, [stored([2], 1, tokens_of((2,))), BlockRemoved([1], "GPU")])
    assert index.num_pages(0) == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 1, 0, 0)])
def test_batches_are_applied_in_order(order: tuple[int, ...]) -> None:
    made: list[KvEvent] = [stored([at], None, tokens_of((at,))) for at in range(3)]
    found = EventOrder()
    assert [event for at in order for event in found.receive(at, [made[at]])] == made
    assert found.asks() is None and found.asks(known=4) == 3 and found.asks(known=5) is None
