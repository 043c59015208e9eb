"""What callers asked to keep: against a plain model on a real cache with a tiny pool, and answer by answer."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.cache import KVCache, RequestKV
from quire.errors import InvalidInput, OutOfPages
from quire.offload import Offloads, offload_of
from quire.offload.retention import MOST_RETENTIONS, MOST_SECONDS, Granted, Retention
from quire.plan.budget import MemoryPlan
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from quire.testing.plans import small_plan
from tests.changes import TIERS, slow_unless_changed
from tests.clear import clear

PAGE = 4
ALICE, BOB = Namespace(salt="alice"), Namespace(salt="bob")


class Cache(KVCache):
    """A cache with a clock, and what these tests do with it."""

    def __init__(self, plan: MemoryPlan, *, share: float, eviction: str = "lru") -> None:
        self.now = 0.0
        offload = Offloads(retain_share=share)
        super().__init__(plan, eviction=eviction, seconds=lambda: self.now, offload=offload)
        self.kept: Retention = offload_of(self).retention

    def compute(self, tokens: Ids, namespace: Namespace = ALICE) -> int:
        """Run a prompt to its end; returns how many of its tokens were cached before."""
        kv = self.begin(tokens, namespace)
        found = kv.num_cached
        try:
            self.extend([kv], len(tokens) - found)
        except OutOfPages:
            self.finish(kv)
            raise
        self.finish(kv, tokens)
        return found

    def cached(self, tokens: Ids, namespace: Namespace = ALICE) -> int:
        """How many of its tokens, in whole pages."""
        return self.tree.match(namespace, tokens).num_pages * self.page_size


def ids(*tokens: int) -> Ids:
    return np.array(tokens, dtype=np.int32)


def prompt(number: int, num_pages: int) -> Ids:
    """A prompt like no other."""
    return np.arange(num_pages * PAGE, dtype=np.int32) + 1000 * number


def small(num_pages: int = 20, *, share: float = 0.5, context: int = 8 * PAGE) -> Cache:
    return Cache(small_plan(num_pages, PAGE, context=context), share=share)


def flood(cache: Cache, requests: int = 30, num_pages: int = 5, first: int = 500) -> None:
    for number in range(first, first + requests):
        cache.compute(prompt(number, num_pages))
    cache.audit()


def keep(cache: Cache, tokens: Ids, namespace: Namespace = ALICE, **options: object) -> Granted:
    return cache.kept.retain(tokens, namespace, **({"ttl_seconds": 300.0} | options))  # type: ignore[arg-type]


# -- what is kept


@pytest.mark.parametrize("pin", [False, True])
def test_a_flood_evicts_everything_but_what_is_kept(pin: bool) -> None:
    cache, kept, lost = small(), prompt(1, 6), prompt(2, 6)
    cache.compute(kept)
    cache.compute(lost)
    granted = keep(cache, kept, pin=pin)
    assert (granted.granted_tokens, granted.asked_tokens, granted.reason) == (24, 24, "")
    assert granted.pinned == pin and granted.expires_in_seconds == 300
    flood(cache)
    assert (cache.cached(kept), cache.cached(lost)) == (24, 0)
    assert cache.compute(np.append(kept, 7).astype(np.int32)) == 24
    cache.now = 300
    flood(cache)
    assert cache.cached(kept) == 0 and cache.kept.num_pages == len(cache.kept) == 0
    assert cache.tree.num_protected == 0 and not len(cache.kept)


def test_nothing_is_kept_of_a_budget_of_nothing() -> None:
    cache, tokens = small(share=0.0), prompt(1, 6)
    cache.compute(tokens)
    granted = keep(cache, tokens)
    assert (granted.granted_tokens, granted.retention_id) == (0, "")
    assert granted.reason == "granted 0 of 24 tokens: the budget of 0 tokens keeps nothing; raise --retain-share."
    flood(cache)
    assert cache.cached(tokens) == 0


def test_the_budget_is_one_and_says_who_has_it() -> None:
    cache = small(20, share=0.5)
    for number in range(3):
        cache.compute(prompt(number, 4))
        found = keep(cache, prompt(number, 4))
    assert found.granted_tokens == 8
    assert found.reason == "granted 8 of 16 tokens: the budget of 40 tokens had 8 left."
    cache.compute(prompt(4, 4))
    found = keep(cache, prompt(4, 4))
    assert found.granted_tokens == 0 and not found.retention_id
    assert found.reason == "granted 0 of 16 tokens: the budget of 40 tokens is taken by 3 retentions."
    assert cache.kept.num_pages == cache.kept.budget == 10
    cache.audit()


def test_a_prefix_of_what_is_kept_costs_nothing() -> None:
    cache, system = small(share=0.4), prompt(1, 5)
    ends = [np.concatenate([system, prompt(number, 1)]) for number in (2, 3, 4)]
    for tokens in ends:
        cache.compute(tokens)
        assert keep(cache, tokens).granted_tokens == 24
    assert cache.kept.num_pages == 8 and len(cache.kept) == 3
    assert keep(cache, system).reason == "" and cache.kept.num_pages == 8
    assert keep(cache, system, BOB).granted_tokens == 0, "another namespace has pages of its own"


def test_only_what_is_cached_is_granted() -> None:
    cache, tokens = small(), prompt(1, 6)
    nothing = keep(cache, tokens)
    assert nothing.reason == "granted 0 of 24 tokens: none of them is cached; ask again when they have been computed."
    cache.compute(tokens[: 3 * PAGE])
    some = keep(cache, tokens)
    assert some.granted_tokens == 12 and "only 12 of them are cached" in some.reason
    cache.compute(tokens)
    more = keep(cache, tokens)
    assert (more.granted_tokens, more.reason, more.retention_id) == (24, "", some.retention_id)
    assert cache.kept.num_pages == 6 and len(cache.kept) == 1
    tail = keep(cache, np.append(tokens, [1, 2]).astype(np.int32))
    assert tail.reason == "granted 24 of 26 tokens: the last 2 are less than a page of 4."
    assert keep(cache, ids()).granted_tokens == 0
    cache.audit()


def test_asking_again_keeps_it_longer_and_never_shorter() -> None:
    cache, tokens = small(), prompt(1, 2)
    cache.compute(tokens)
    first = keep(cache, tokens, ttl_seconds=10)
    cache.now = 5
    assert keep(cache, tokens, ttl_seconds=1).expires_in_seconds == 5
    again = keep(cache, tokens, ttl_seconds=10, priority=3)
    assert (again.retention_id, again.expires_in_seconds) == (first.retention_id, 10)
    assert [kept.priority for kept in cache.kept.listing().retentions] == [3]
    cache.now = 14.9
    assert cache.kept.expire() == 0 and len(cache.kept) == 1
    cache.now = 15
    assert cache.kept.expire() == 1 and not len(cache.kept)
    assert cache.kept._next_expiry == math.inf


def test_asking_a_thousand_times_takes_no_room() -> None:
    cache, tokens = small(), prompt(1, 2)
    cache.compute(tokens)
    for second in range(1000):
        cache.now = second / 10
        keep(cache, tokens)
    assert len(cache.kept) == 1
    assert cache.now + 300 >= cache.kept._next_expiry


def test_a_release_is_for_whom_has_the_id() -> None:
    cache, tokens = small(), prompt(1, 2)
    cache.compute(tokens)
    granted = keep(cache, tokens)
    assert len(granted.retention_id) > 40
    for wrong in ("", "retention-", granted.retention_id[:-1], granted.retention_id + "0"):
        assert not cache.kept.release(wrong)
    assert cache.kept.release(granted.retention_id)
    assert not cache.kept.release(granted.retention_id)
    assert keep(cache, tokens).retention_id != granted.retention_id
    cache.audit()


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), MOST_SECONDS + 1])
def test_times_that_cannot_be(ttl: float) -> None:
    cache = small()
    with pytest.raises(InvalidInput, match="ttl_seconds"):
        keep(cache, prompt(1, 2), ttl_seconds=ttl)


@slow_unless_changed(*TIERS)
def test_there_is_a_limit_to_how_many() -> None:
    cache, tokens = small(), prompt(1, 1)
    cache.compute(tokens)
    for number in range(MOST_RETENTIONS):
        assert keep(cache, np.append(tokens, number).astype(np.int32)).granted_tokens == PAGE
    refused = keep(cache, np.append(tokens, -1).astype(np.int32))
    assert refused.granted_tokens == 0 and "4,096 retentions" in refused.reason
    assert cache.kept.num_pages == 1
    assert cache.kept.release_all(ALICE) == MOST_RETENTIONS and cache.kept.release_all(None) == 0
    cache.audit()


def test_a_namespace_is_forgotten_alone() -> None:
    cache, tokens = small(), prompt(1, 2)
    for namespace in (ALICE, BOB):
        cache.compute(tokens, namespace)
        keep(cache, tokens, namespace)
    assert cache.kept.release_all(BOB) == 1 and cache.kept.release_all(BOB) == 0
    flood(cache)
    assert (cache.cached(tokens, ALICE), cache.cached(tokens, BOB)) == (8, 0)


# -- making room


def test_soft_retentions_make_room_in_order() -> None:
    """Lowest priority first, then what would expire first; and only as many as are needed."""
    cache = small(20, share=0.9)
    wishes = {1: (5, 100.0), 2: (0, 200.0), 3: (0, 100.0), 4: (-1, 900.0)}
    for number, (priority, ttl) in wishes.items():
        cache.compute(prompt(number, 4))
        assert keep(cache, prompt(number, 4), ttl_seconds=ttl, priority=priority).granted_tokens == 16
    assert [kept.priority for kept in cache.kept.listing().retentions] == [-1, 0, 0, 5]
    assert cache.kept.num_soft() == 16
    left = []
    for number in range(10, 14):
        assert cache.kept.give_up(4) == 4
        flood(cache, 8, 4, first=100 * number)
        left.append([kept for kept in wishes if cache.cached(prompt(kept, 4))])
    assert left == [[1, 2, 3], [1, 2], [1], []]
    assert cache.kept.totals.retentions_given_up == 4 and cache.kept.give_up(1) == 0


def test_a_request_gets_the_room_and_no_more_goes_than_must() -> None:
    cache = small(12, share=0.9)
    for number in (1, 2):
        cache.compute(prompt(number, 5))
        keep(cache, prompt(number, 5), priority=number)
    cache.compute(prompt(3, 6))
    assert (cache.cached(prompt(1, 5)), cache.cached(prompt(2, 5))) == (4, 20), "of what went, only what was needed"
    assert cache.kept.totals.retentions_given_up == 1
    cache.audit()


def test_a_pin_goes_when_its_time_is_over_and_not_before() -> None:
    cache = small(12, share=0.5, context=8 * PAGE)
    cache.compute(prompt(1, 4))
    assert keep(cache, prompt(1, 4), pin=True, ttl_seconds=60).pinned
    assert cache.kept.num_soft() == cache.kept.give_up(99) == 0
    kvs = [cache.begin(prompt(number, 4)) for number in (2, 3)]
    cache.extend(kvs[:1], 8 * PAGE)
    with pytest.raises(OutOfPages):
        cache.extend(kvs[1:], PAGE)
    cache.now = 60
    cache.extend(kvs[1:], 4 * PAGE)
    for kv in kvs:
        cache.finish(kv)
    cache.audit()


def test_pins_leave_room_for_the_longest_request() -> None:
    cache = small(12, share=0.9, context=8 * PAGE)
    for number in (1, 2):
        cache.compute(prompt(number, 3))
    assert keep(cache, prompt(1, 3), pin=True).granted_tokens == 12
    second = keep(cache, prompt(2, 3), pin=True)
    assert second.granted_tokens == 4 and second.pinned
    assert "the longest request, 32 tokens, must find room beside them" in second.reason
    cache.compute(prompt(3, 8))
    assert [cache.cached(prompt(number, 3)) for number in (1, 2)] == [12, 4]


def test_a_pin_that_has_no_room_leaves_what_was_kept_softly() -> None:
    cache = small(12, share=0.9, context=8 * PAGE)
    cache.compute(prompt(1, 6))
    soft = keep(cache, prompt(1, 6))
    refused = keep(cache, prompt(1, 6), pin=True)
    assert (refused.granted_tokens, refused.pinned, refused.retention_id) == (24, False, soft.retention_id)
    assert refused.reason.startswith("kept, but not pinned: pins may take 16 tokens, of which 16 were left")
    assert cache.kept.num_soft() == 6
    cache.compute(prompt(2, 2))
    assert keep(cache, prompt(2, 2)).pinned is False
    assert keep(cache, prompt(2, 2), pin=True).pinned and keep(cache, prompt(2, 2)).pinned
    assert cache.kept.num_soft() == 6
    cache.audit()


def test_what_a_running_request_holds_is_not_given_up_for_nothing() -> None:
    cache, tokens = small(20, share=0.9), prompt(1, 4)
    for number in (1, 2):
        cache.compute(prompt(number, 4))
        keep(cache, prompt(number, 4), priority=number)
    kv = cache.begin(np.append(tokens, 9).astype(np.int32), ALICE)
    assert cache.kept.num_soft() == 4
    hit = cache.match(np.append(prompt(2, 4), 9).astype(np.int32), ALICE)
    assert [cache.kept.num_soft_of(hit.match, pages) for pages in (0, 3, 4)] == [0, 3, 4]
    assert cache.kept.give_up(99) == 4
    assert [kept.priority for kept in cache.kept.listing().retentions] == [1], "it would have brought nothing"
    cache.finish(kv)
    assert cache.kept.num_soft() == 4 and cache.kept.give_up(4) == 4


def test_letting_go_of_a_prefix_of_what_else_is_kept_would_bring_nothing() -> None:
    cache, longer = small(20, share=0.9), prompt(1, 6)
    cache.compute(longer)
    keep(cache, longer[: 2 * PAGE], priority=-5)
    keep(cache, longer, priority=5)
    hit = cache.match(np.append(longer, 9).astype(np.int32), ALICE)
    assert [cache.kept.num_soft_of(hit.match, pages) for pages in (1, 2, 3, 6)] == [1, 2, 3, 6]
    assert cache.kept.give_up(4) == 4
    assert [kept.priority for kept in cache.kept.listing().retentions] == [-5]
    cache.audit()


def test_of_a_long_prefix_only_the_end_goes() -> None:
    cache, tokens = small(20, share=0.9, context=20 * PAGE), prompt(1, 8)
    cache.compute(tokens)
    first = keep(cache, tokens)
    assert cache.kept.give_up(3) == 3
    [left] = cache.kept.listing().retentions
    assert left.tokens == 5 * PAGE and cache.kept.num_pages == cache.kept.num_soft() == 5
    cache.audit()
    again = keep(cache, tokens)
    assert (again.granted_tokens, again.retention_id) == (8 * PAGE, first.retention_id)
    flood(cache, 1, 15)
    assert cache.cached(tokens) == 5 * PAGE == cache.kept.listing().retentions[0].tokens
    assert cache.kept.release(first.retention_id)
    flood(cache, 2, 15)
    assert cache.cached(tokens) == 0


def test_to_keep_is_not_to_use() -> None:
    cache, tokens = small(), prompt(1, 4)
    cache.compute(tokens)
    before = [(node.hits, node.last_used, node.priority) for node in cache.tree.nodes()]
    for _ in range(3):
        keep(cache, tokens, priority=9)
    cache.kept.release_all(None)
    assert [(node.hits, node.last_used, node.priority) for node in cache.tree.nodes()] == before


def test_a_pin_does_not_grow_beyond_the_room_for_pins() -> None:
    cache = small(12, share=0.9, context=8 * PAGE)
    cache.compute(prompt(1, 3))
    first = keep(cache, prompt(1, 6), pin=True)
    assert (first.granted_tokens, first.pinned) == (12, True)
    cache.compute(prompt(1, 6))
    again = keep(cache, prompt(1, 6))
    assert (again.granted_tokens, again.pinned, again.retention_id) == (16, True, first.retention_id)
    assert "pins may take 16 tokens, of which 4 were left" in again.reason


def test_who_is_told_that_something_went() -> None:
    cache = small()
    cache.compute(prompt(1, 4))
    before = cache.num_changes
    for _ in range(2):
        cache.kept.release(keep(cache, prompt(1, 4), ttl_seconds=5).retention_id)
    keep(cache, prompt(1, 4), ttl_seconds=5)
    cache.now = 6
    assert cache.kept.listing().retentions == () and cache.num_changes == before + 3


# -- against a model


_Wish = tuple[Namespace, tuple[int, ...], float, int, bool]
"""Whose, which tokens, until when, how much they count, and whether they are pinned."""


class RetentionMachine(RuleBasedStateMachine):
    """Prompts over a tiny alphabet, so that prefixes are shared, on a pool that is always too small.

    The model is a dict: what each id was granted, as a tuple of tokens, until when, how much it counts.
    """

    @initialize(share=st.sampled_from([0.0, 0.2, 0.5, 0.9]), eviction=st.sampled_from(["lru", "density"]))
    def start(self, share: float, eviction: str) -> None:
        self.cache = Cache(small_plan(14, PAGE, context=6 * PAGE), share=share, eviction=eviction)
        self.model: dict[str, _Wish] = {}
        self.running: list[tuple[RequestKV, Ids]] = []
        self.happened = Counter[str]()

    def tokens_of(self, pages: list[int]) -> Ids:
        return np.repeat(np.array(pages, dtype=np.int32), PAGE)

    pages = st.lists(st.integers(0, 1), min_size=1, max_size=5)
    namespaces = st.sampled_from([ALICE, BOB])

    def drop_expired(self) -> None:
        self.model = {key: kept for key, kept in self.model.items() if kept[2] > self.cache.now}

    def sync(self) -> None:
        """The model hears of what was given up for requests: it must be soft, and the pages must have been short."""
        ids = set(self.cache.kept._by_id)
        gone = set(self.model) - ids
        assert not ids - set(self.model)
        for key in gone:
            _, _, expires, _, pinned = self.model.pop(key)
            assert not pinned or expires <= self.cache.now, "a pin went before its time"
            self.happened["went for a request"] += 1
        for key, kept in self.model.items():
            length = self.cache.kept._by_id[key].hold.path.num_pages * PAGE
            if length != len(kept[1]):
                assert 0 < length < len(kept[1]) and not kept[4], "it may only become shorter, and no pin may"
                self.model[key] = (kept[0], kept[1][:length], *kept[2:])
                self.happened["lost its end"] += 1

    @rule(pages=pages, namespace=namespaces)
    def compute(self, pages: list[int], namespace: Namespace) -> None:
        try:
            self.cache.compute(self.tokens_of(pages), namespace)
        except OutOfPages:
            assert self.running and not self.cache.kept.num_soft()
        self.sync()

    @rule(pages=pages, namespace=namespaces)
    def begin(self, pages: list[int], namespace: Namespace) -> None:
        if len(self.running) < 3:
            tokens = np.append(self.tokens_of(pages), 9).astype(np.int32)
            self.running.append((self.cache.begin(tokens, namespace), tokens))

    @rule()
    def finish(self) -> None:
        if self.running:
            self.cache.finish(self.running.pop(0)[0])

    @rule(
        pages=pages,
        namespace=namespaces,
        ttl=st.sampled_from([1.0, 5.0, 50.0]),
        priority=st.integers(-1, 1),
        pin=st.booleans(),
    )
    def retain(self, pages: list[int], namespace: Namespace, ttl: float, priority: int, pin: bool) -> None:
        tokens, kept, now = self.tokens_of(pages), self.cache.kept, self.cache.now
        self.drop_expired()
        cached = self.cache.cached(tokens, namespace)
        granted = kept.retain(tokens, namespace, ttl_seconds=ttl, priority=priority, pin=pin)
        assert 0 <= granted.granted_tokens <= cached and granted.granted_tokens % PAGE == 0
        assert bool(granted.reason) == (granted.granted_tokens < len(tokens) or (pin and not granted.pinned))
        self.happened["asked again" if granted.retention_id in self.model else "asked"] += 1
        self.happened["pinned"] += granted.pinned
        self.happened["in part"] += 0 < granted.granted_tokens < cached
        self.happened["all"] += granted.granted_tokens == len(tokens)
        if not granted.retention_id:
            assert granted.granted_tokens == 0
            return
        _, before, expires, rank, pinned = self.model.get(granted.retention_id, (namespace, (), 0.0, priority, False))
        prefix = tuple(tokens[: granted.granted_tokens].tolist())
        assert prefix[: len(before)] == before, "what was kept is kept"
        assert granted.pinned >= pinned and granted.pinned <= (pinned or pin)
        expires = max(expires, now + ttl)
        assert granted.expires_in_seconds == expires - now
        self.model[granted.retention_id] = (namespace, prefix, expires, max(rank, priority), granted.pinned)
        if granted.granted_tokens < cached and not pin and not pinned:
            assert self.distinct() == kept.budget, "there was room for more"

    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        self.drop_expired()
        self.cache.kept.expire()
        if self.model:
            key = list(self.model)[which % len(self.model)]
            del self.model[key]
            assert self.cache.kept.release(key)
            assert not self.cache.kept.release(key)

    @rule(seconds=st.sampled_from([0.5, 3.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.cache.now += seconds
        before = len(self.model)
        self.drop_expired()
        expired = self.cache.kept.expire()
        assert expired == before - len(self.model)
        self.happened["expired"] += expired

    @rule(num_pages=st.integers(1, 6))
    def give_up(self, num_pages: int) -> None:
        kept = self.cache.kept
        self.drop_expired()
        kept.expire()
        could, free = kept.num_soft(), self.cache.admission.num_available_pages
        gave = kept.give_up(num_pages)
        self.happened["gave up"] += gave > 0
        self.happened["gave up some"] += 0 < gave < could
        assert gave == min(num_pages, could)
        assert self.cache.admission.num_available_pages == free and kept.num_soft() == could - gave
        assert self.cache.pages.num_free_pages + self.cache.tree.num_evictable == free - could + gave
        before = dict(self.model)
        self.sync()
        gone = [kept for key, kept in before.items() if self.model.get(key) != kept]
        left = [kept for key, kept in self.model.items() if before[key] == kept and not kept[4]]
        for _, _, expires, rank, _ in gone:
            for namespace, other, until, other_rank, _ in left:
                if (other_rank, until) < (rank, expires):
                    assert self.is_held_by_others(namespace, other, list(before.values())), "what counts less was kept"

    def is_held_by_others(self, namespace: Namespace, tokens: tuple[int, ...], kept: list[_Wish]) -> bool:
        """Whether letting go of these would bring nothing: longer ones, pins or requests hold all of them."""
        holders = [other for space, other, _, _, _ in kept if space == namespace]
        if sum(other[: len(tokens)] == tokens for other in holders) > 1:
            return True
        return any(
            kv.namespace == namespace and tuple(asked[: kv.num_cached].tolist())[: len(tokens)] == tokens
            for kv, asked in self.running
        )

    @rule(namespace=namespaces)
    def forget(self, namespace: Namespace) -> None:
        self.drop_expired()
        self.cache.kept.expire()
        mine = [key for key, kept in self.model.items() if kept[0] == namespace]
        assert self.cache.kept.release_all(namespace) == len(mine)
        for key in mine:
            del self.model[key]

    @rule()
    def clear(self) -> None:
        clear(self.cache)

    def distinct(self, pinned: bool = False) -> int:
        """Pages that the model keeps, each prefix counted once."""
        prefixes = {
            (namespace, tokens[:end])
            for namespace, tokens, _, _, pins in self.model.values()
            for end in range(PAGE, len(tokens) + 1, PAGE)
            if pins or not pinned
        }
        return len(prefixes)

    @invariant()
    def what_is_kept_is_there(self) -> None:
        if not hasattr(self, "cache"):
            return
        kept = self.cache.kept
        self.drop_expired()
        kept.expire()
        assert set(kept._by_id) == set(self.model)
        for namespace, tokens, _, _, _ in self.model.values():
            assert self.cache.cached(ids(*tokens), namespace) == len(tokens)
        assert kept.num_pages == self.distinct() <= kept.budget
        assert kept.num_pinned == self.distinct(pinned=True) <= max(0, 14 - 6)
        listed = [(one.tokens, one.priority, one.pinned) for one in kept.listing().retentions]
        assert sorted(listed) == sorted((len(tokens), rank, pin) for _, tokens, _, rank, pin in self.model.values())
        self.cache.audit()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for kv, _ in self.running:
                self.cache.finish(kv)
            self.cache.kept.release_all(None)
            assert self.cache.tree.num_protected == 0 and not len(self.cache.kept)
            self.cache.audit()
            clear(self.cache)
            assert self.cache.pages.num_free_pages == 14


RetentionMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestRetentionMachine = RetentionMachine.TestCase


def draw(choices: random.Random, machine: RetentionMachine) -> None:
    """One operation; what is asked for was mostly computed."""
    pages = [choices.randrange(2) for _ in range(choices.randint(1, 5))]
    namespace = choices.choice([ALICE, ALICE, BOB])
    ttl, priority, pin = choices.choice([1.0, 5.0, 50.0]), choices.randint(-1, 1), choices.random() < 0.3
    match choices.choices(range(9), [9, 12, 2, 4, 2, 2, 3, 0.3, 0.3])[0]:
        case 0:
            machine.compute(pages, namespace)
        case 1:
            machine.retain(pages, namespace, ttl, priority, pin)
        case 2:
            machine.begin(pages, namespace)
        case 3:
            machine.finish()
        case 4:
            machine.release(choices.randrange(10))
        case 5:
            machine.wait(choices.choice([0.5, 3.0, 40.0]))
        case 6:
            machine.give_up(choices.randint(1, 6))
        case 7:
            machine.forget(namespace)
        case 8:
            machine.clear()


@slow_unless_changed(*TIERS)
def test_two_hundred_lives() -> None:
    happened = Counter[str]()
    for seed in range(200):
        choices, machine = random.Random(seed), RetentionMachine()
        machine.start(share=choices.choice([0.2, 0.5, 0.9]), eviction=choices.choice(["lru", "density"]))
        for _ in range(60):
            draw(choices, machine)
            machine.what_is_kept_is_there()
        happened += machine.happened
        machine.teardown()
    assert len(happened) == 10 and min(happened.values()) > 30, happened
