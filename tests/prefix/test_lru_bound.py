"""LRUBound and Guard: counted hits of LRU against a real LRU, what happens where density is bad; endings."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.prefix import hit_density
from quire.prefix.evict import eviction_policy
from quire.prefix.hit_density import CLASSES, Endings, HitDensity
from quire.prefix.hit_table import AGES, HitTable, Table
from quire.prefix.lru_bound import Guard
from quire.prefix.policy import EvictionPolicy
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from tests.prefix.test_hit_density import check_candidates, check_worth

NAMESPACE = Namespace()
NO_IDS: Ids = np.empty(0, dtype=np.int32)


class World:
    """A tree of pages of one token, in a pool; requests come one at a time, and each must fit."""

    def __init__(self, policy: EvictionPolicy, pool: int) -> None:
        self.tree = RadixCache(1, policy, remembered=1_000_000)
        self.pool = pool

    def serve(self, request: Iterable[int], ending: int = 0) -> int:
        tree, tokens = self.tree, np.array(list(request), dtype=np.int32)
        match = tree.match(NAMESPACE, tokens)
        lease = tree.lease(match)
        rest = tokens[match.num_pages :]
        tree.evict(tree.num_pages + len(rest) - self.pool)
        half = len(rest) // 2
        for part in (rest[:half], rest[half:]):
            tree.insert(lease, part, part)
        tree.ended(lease, np.array([ending], dtype=np.int32) if ending else NO_IDS, int(ending > 0))
        tree.release(lease)
        assert tree.num_pages <= self.pool
        assert tree.queued() == {node for node in tree.nodes() if not node.children}, "a leaf can never be evicted"
        return match.num_pages


def traffic(seed: int, requests: int = 400) -> list[list[int]]:
    """Conversations that go on, branch, start anew under shared prompts, and come back after a while."""
    draw = np.random.default_rng(seed)
    paths = [[at, at, at] for at in range(3)]
    found = []
    for number in range(requests):
        path = paths[int(len(paths) * draw.random() ** 0.4)]
        path = [*path[: int(draw.integers(1, len(path) + 1))], *([10 + number] * int(draw.integers(0, 4)))][:20]
        paths.append(path)
        found.append(path)
    return found


def check_bound(seed: int) -> None:
    """Hits of the guarded order and of LRU differ by exactly what the guard counts, at every request."""
    policy = HitDensity()
    own, lru = World(policy, 30 + seed % 40), World(eviction_policy("lru"), 30 + seed % 40)
    ahead = 0
    for number, request in enumerate(traffic(seed)):
        ahead += own.serve(request) - lru.serve(request)
        guard = policy.guard
        assert guard.won_pages - guard.lost_pages == ahead, f"request {number} of {seed}"
    assert guard.won_pages and guard.lost_pages, "nothing was different"


@pytest.mark.parametrize("seed", range(12))
def test_the_hits_of_lru_are_counted_exactly(seed: int) -> None:
    check_bound(seed)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(0, 3)), max_size=60),
    st.integers(12, 30),
)
def test_whatever_comes_the_bound_is_that_of_lru(drawn: list[tuple[int, int, int]], pool: int) -> None:
    policy = HitDensity()
    own, lru = World(policy, pool), World(eviction_policy("lru"), pool)
    paths: list[list[int]] = [[]]
    ahead = 0
    for number, (which, length, new) in enumerate(drawn):
        path = [*paths[which % len(paths)][:length], *([100 + number] * new)][:12]
        if path:
            paths.append(path)
            ahead += own.serve(path) - lru.serve(path)
    assert policy.guard.won_pages - policy.guard.lost_pages == ahead
    assert len(policy.guard.bound._pages) <= policy.guard.bound.num_pages + 1


def recent(requests: int) -> list[list[int]]:
    """A new prompt after every three others, which are those used last more often than earlier ones."""
    draw = np.random.default_rng(2)
    return [[max(0, at // 4 - (at % 4 > 0) * int(draw.exponential(3)))] * 4 for at in range(requests)]


def youngest_first(table: HitTable, kinds: Ids, ages: Ids) -> Table:
    """Worth by which the youngest leaves go first."""
    found: Table = ages / AGES[-1]
    return found


def hits(policy: EvictionPolicy, requests: list[list[int]], pool: int) -> int:
    world = World(policy, pool)
    return sum(map(world.serve, requests))


def check_bad_order(patch: pytest.MonkeyPatch) -> None:
    """An order that loses everything loses to LRU a few requests only, in spite of its trials."""
    patch.setattr(HitTable, "of_all", youngest_first)
    patch.setattr(HitTable, "of", lambda table, kind, age: age / AGES[-1])
    policy = HitDensity()
    best, own = hits(eviction_policy("lru"), recent(1_500), 40), hits(policy, recent(1_500), 40)
    assert 1 <= policy.guard.num_switches <= 5
    assert own > 0.98 * best > 4_000


def test_a_bad_order_gives_way_to_lru(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        check_bad_order(monkeypatch)
    assert "eviction is by last use for now" in caplog.text and "by hit density again" in caplog.text


def check_by_use(patch: pytest.MonkeyPatch) -> None:
    """While LRU decides, and a run has the candidates of one tick, each request hits what it hits with LRU."""
    patch.setattr(hit_density, "RUNS", 1 << 20)
    patch.setattr(Guard, "_switch", lambda guard, *, by_use: None)
    policy = HitDensity()
    policy.guard.by_use = True
    own, lru = World(policy, 60), World(eviction_policy("lru"), 60)
    for number, request in enumerate(traffic(5)):
        policy._rank_at = 0
        assert own.serve(request) == lru.serve(request), number


def test_while_lru_decides_the_order_is_that_of_lru(monkeypatch: pytest.MonkeyPatch) -> None:
    check_by_use(monkeypatch)


def check_part() -> None:
    """The more an order has lost, the older is what it may evict."""
    guard = Guard()
    guard.ended(100)
    guard.bound.now, guard.bound.horizon = 1_000, 200
    ages = []
    for lost in (0, 20, 60, 100, 100, 200):
        guard._count(0, lost)
        ages.append(guard.protected_age())
    assert ages[0] == 0 and ages == sorted(set(ages[:-1])) + ages[-1:] and ages[-1] == 800, ages
    assert guard.by_use


def test_losses_protect_what_was_used_last() -> None:
    check_part()


def test_an_order_that_wins_again_decides_again() -> None:
    loop = [[turn % 20] * 4 for turn in range(3_000)]  # twice as long as the pool: LRU hits nothing
    policy = HitDensity()
    policy.guard.by_use = True
    assert hits(policy, loop, 40) > 3_000
    assert not policy.guard.by_use and policy.guard.num_switches == 1


def endings() -> Callable[[int], int]:
    known = Endings()
    return lambda token: known.class_of(token.to_bytes(4, "little"))[0]


def check_endings() -> None:
    draw = np.random.default_rng(0)
    class_of = endings()
    assert class_of(5) == 0, "a class of its own after one output"
    drawn = [int(draw.choice([7, 8, draw.integers(100, 10_000)], p=[0.5, 0.2, 0.3])) for _ in range(2_000)]
    classes = {token: class_of(token) for token in drawn}
    assert len({classes[7], classes[8], 0}) == 3 and max(classes.values()) < CLASSES
    assert Counter(classes.values())[0] > 500


def test_frequent_last_tokens_are_classes_and_others_are_not() -> None:
    check_endings()
    known = Endings()
    for token in range(100_000):
        known.class_of(token.to_bytes(4, "little"))
    assert len(known._counts) < 20, "memory is not bounded"


def test_the_class_of_an_ending_that_is_rare_now_is_given_to_another() -> None:
    known = Endings()
    for token in (1, 2, 3):
        for _ in range(20):
            known.class_of(bytes([token]))
    given_up = [known.class_of(b"new") for _ in range(80)]
    assert given_up[0] == (0, False) and given_up[-1][0] > 0
    assert sum(is_new for _, is_new in given_up) == 1


def agents(requests: int) -> list[tuple[list[int], int]]:
    """After a call, token 1, a session goes on soon; after an answer, token 2, after all the others or never."""
    draw = np.random.default_rng(1)
    sessions = [[1_000 + at] * 8 for at in range(8)]
    found = []
    for number in range(requests):
        at = int(draw.integers(3)) if number % 4 else int(draw.integers(3, 8))
        ends = draw.random() < 0.2
        sessions[at] = [*sessions[at][:40], *([number + 10] * 4)]
        found.append((sessions[at], 2 if ends else 1))
        if ends:
            sessions[at] = [2_000 + number] * 8
    return found


def check_agents() -> None:
    """What ended with an answer goes first."""
    rates = []
    for name, told in (("lru", True), ("density", False), ("density", True)):
        world = World(eviction_policy(name), 180)
        rates.append(sum(world.serve(request, ending if told else 0) for request, ending in agents(3_000)))
    assert rates[2] > 1.02 * max(rates[:2]), rates


def test_calls_of_tools_stay_and_answers_go() -> None:
    check_agents()


def with_patch(check: Callable[[pytest.MonkeyPatch], None]) -> Callable[[], None]:
    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            check(patch)

    return run


GUARD = [
    lambda: check_bound(1),
    check_worth,
    with_patch(lambda patch: check_candidates(0, patch)),
    with_patch(check_bad_order),
    with_patch(check_by_use),
    check_part,
    check_endings,
    check_agents,
]
