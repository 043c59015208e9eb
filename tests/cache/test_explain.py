"""Why a prompt was not cached further: every cause by itself, and that causes always add up to the prompt."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from quire.cache import KVCache
from quire.observe.explain import Cause, Explanation
from quire.spec.events import Namespace
from quire.spec.group import ReachSpec
from quire.spec.ids import Ids
from quire.testing import small_plan
from tests.changes import CORE, slow_unless_changed


def ids(tokens: object) -> np.ndarray:
    return np.array(list(tokens), dtype=np.int32)  # type: ignore[call-overload]


def serve(cache: KVCache, tokens: np.ndarray, namespace: Namespace = Namespace(), label: str = "") -> Explanation:  # noqa: B008
    kv = cache.begin(tokens, namespace, label=label)
    cache.extend([kv], [len(tokens) - kv.num_cached])
    cache.finish(kv, tokens)
    assert kv.explanation is not None
    return kv.explanation


def causes(explanation: Explanation) -> list[tuple[str, int]]:
    return [(str(reason.cause), reason.tokens) for reason in explanation.reasons]


def explained(cache: KVCache, tokens: Ids) -> Explanation:
    return cache.admission.explain(tokens, cache.match(tokens))


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def cache(clock: list[float]) -> KVCache:
    return KVCache(small_plan(8, 4), explains=True, remembered=256, seconds=lambda: clock[0])


def test_a_prompt_that_was_never_seen(cache: KVCache) -> None:
    assert causes(serve(cache, ids(range(10)))) == [("new", 10)]


def test_the_last_token_is_computed_again_with_its_page(cache: KVCache) -> None:
    serve(cache, ids(range(8)))
    assert causes(serve(cache, ids(range(8)))) == [("hit", 4), ("last_token", 4)]


def test_the_first_token_that_differs_is_named(cache: KVCache) -> None:
    serve(cache, ids(range(12)))
    found = serve(cache, ids([*range(6), 60, 61, 62, 63]))
    assert causes(found) == [("hit", 4), ("page", 2), ("new", 4)]
    assert found.reasons[-1].start == 6 and "token 6 is the first" in found.reasons[-1].detail
    assert "whole pages of 4 tokens" in found.reasons[1].detail


def test_less_than_a_page_is_never_reused(cache: KVCache) -> None:
    serve(cache, ids(range(12)))
    assert causes(serve(cache, ids(range(7)))) == [("hit", 4), ("page", 3)]
    assert causes(serve(cache, ids(range(2)))) == [("page", 2)]


def test_a_prompt_that_was_just_sent_was_seen_to_its_last_token(cache: KVCache) -> None:
    serve(cache, ids(range(7)))
    again = serve(cache, ids(range(7)))
    assert causes(again) == [("hit", 4), ("page", 3)], "its last page was never full"
    assert "only whole pages" in again.reasons[1].detail
    assert causes(serve(cache, ids([*range(6), 60, 61]))) == [("hit", 4), ("page", 2), ("new", 2)]
    serve(cache, ids(range(100, 132)))
    assert causes(explained(cache, ids([*range(4), 4, 5]))) == [("evicted", 4), ("page", 2)], "an evicted page's, too"


def test_what_was_evicted_says_for_whom_and_when(cache: KVCache, clock: list[float]) -> None:
    serve(cache, ids(range(16)), label="first")
    clock[0] = 5.0
    serve(cache, ids(range(100, 124)), label="greedy")
    clock[0] = 12.0
    found = explained(cache, ids(range(16)))
    assert causes(found) == [("hit", 8), ("evicted", 8)]
    gone = found.reasons[1]
    assert (gone.by, gone.seconds_ago) == ("greedy", 7.0) and "evicted 7.0 s ago for greedy" in gone.detail
    serve(cache, ids(range(200, 232)), label="greedier")
    again = explained(cache, ids([*range(16), 7]))
    assert causes(again) == [("evicted", 8), ("evicted", 8), ("new", 1)]
    assert [reason.by for reason in again.reasons[:-1]] == ["greedier", "greedy"]


def test_what_comes_back_is_no_longer_said_to_be_evicted(cache: KVCache) -> None:
    serve(cache, ids(range(16)))
    serve(cache, ids(range(100, 132)))
    assert causes(serve(cache, ids(range(16)))) == [("evicted", 16)]
    assert causes(explained(cache, ids(range(17)))) == [("hit", 16), ("new", 1)]


def test_another_namespace_is_named(cache: KVCache) -> None:
    serve(cache, ids(range(8)), Namespace("lora", "tenant"))
    found = serve(cache, ids(range(9)))
    assert causes(found) == [("namespace", 8), ("new", 1)]
    assert found.reasons[0].detail == "cached for requests with adapter 'lora' and a salt of their own"


def test_at_most_512_namespaces_are_looked_at() -> None:
    cache = KVCache(small_plan(600, 4), explains=True)
    for number in range(511):
        serve(cache, ids([1000 + number] * 4), Namespace(salt=str(number)))
    serve(cache, ids(range(8)), Namespace("the 512th"))
    serve(cache, ids(range(50, 58)), Namespace("the 513th"))
    assert causes(explained(cache, ids(range(9)))) == [("namespace", 8), ("new", 1)]
    assert causes(explained(cache, ids(range(50, 59)))) == [("new", 9)]


def test_a_group_that_lost_its_frames_is_named() -> None:
    plan = small_plan(12, 4, groups=("full", "near"), reaches=(ReachSpec(), ReachSpec("window", 5)), frames=(12, 3))
    cache = KVCache(plan, explains=True)
    serve(cache, ids(range(8)))
    serve(cache, ids(range(100, 112)))
    found = explained(cache, ids(range(12)))
    assert causes(found) == [("group", 8), ("new", 4)]
    assert "'near'" in next(reason.detail for reason in found.reasons if reason.cause is Cause.GROUP)


def test_memory_of_what_was_evicted_is_bounded() -> None:
    cache = KVCache(small_plan(8, 4), explains=True, remembered=16)
    for start in range(0, 4000, 100):
        serve(cache, ids(range(start, start + 32)))
        assert cache.tree.evicted.num_bytes <= 16 * 4
    assert causes(explained(cache, ids(range(32)))) == [("new", 32)], "forgotten long ago"


@slow_unless_changed(*CORE, "src/quire/observe/")
def test_causes_add_up_and_agree_with_a_plain_memory() -> None:
    """Random prompts from a small tree of texts on a pool that evicts all the time, beside a set of all pages that were
    ever cached: what is said to be evicted had been, what is said to be new had not, with nothing forgotten."""
    rng = random.Random(5)
    size, seen = 2, Counter[str]()
    cache = KVCache(small_plan(10, size), explains=True, remembered=10**6)
    ever: set[tuple[int, ...]] = set()
    for _ in range(4_000):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 18))]
        found = serve(cache, ids(tokens))
        assert sum(reason.tokens for reason in found.reasons) == len(tokens) == found.prompt_tokens
        assert [reason.start for reason in found.reasons] == [
            sum(r.tokens for r in found.reasons[:i]) for i in range(len(found.reasons))
        ]
        known = 0
        while known + size <= len(tokens) and tuple(tokens[: known + size]) in ever:
            known += size
        by_cause = found.tokens_by_cause()
        assert by_cause["hit"] + by_cause["last_token"] + by_cause["evicted"] == known
        seen.update({cause: 1 for cause, count in by_cause.items() if count})
        ever |= {tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)}
        cache.audit()
    assert min(seen[cause] for cause in ("hit", "evicted", "last_token", "page", "new")) > 50
    explained = cache.statistics().explained_tokens
    assert explained["hit"] == cache.statistics().hit_tokens
    assert sum(explained.values()) == cache.statistics().prompt_tokens


def test_evicted_edges_that_came_back_are_forgotten() -> None:
    """A working set that is larger than the pool and smaller than what is remembered: everything comes back, always."""
    cache = KVCache(small_plan(32, 4), explains=True, remembered=10_000)
    for round_ in range(400):
        for text in range(4):
            serve(cache, ids(range(100 * text, 100 * text + 48)))
        assert len(cache.tree.evicted._order) < 200, f"round {round_}"


def test_a_hit_that_is_older_than_the_cache_is_not_explained() -> None:
    cache = KVCache(small_plan(8, 4), explains=True)
    tokens = ids(range(9))
    hit = cache.match(tokens)
    serve(cache, tokens)
    kv = cache.begin(tokens, hit=hit)
    assert kv.explanation is not None and kv.num_cached == kv.explanation.hit_tokens == 8
