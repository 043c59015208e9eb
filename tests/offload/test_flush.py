"""Flushing a namespace: all of it that no lease holds, nothing of others, and no trace of what was evicted before."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.cache import KVCache
from quire.errors import OutOfPages
from quire.observe.explain import Cause
from quire.offload import Offloads, offload_of
from quire.prefix.evict import POLICIES
from quire.spec.events import CacheEvent, Namespace, PagesRemoved, PagesStored
from quire.spec.ids import Ids
from quire.testing.plans import small_plan

PAGE = 4
SPACES = [Namespace(salt=salt) for salt in ("alice", "bob", "")]


def tokens_of(pages: list[int]) -> Ids:
    return np.repeat(np.array(pages, dtype=np.int32), PAGE)


def compute(cache: KVCache, tokens: Ids, namespace: Namespace) -> None:
    kv = cache.begin(tokens, namespace)
    try:
        cache.extend([kv], len(tokens) - kv.num_cached)
    except OutOfPages:
        cache.finish(kv)
    else:
        cache.finish(kv, tokens)


def cached(cache: KVCache, namespace: Namespace) -> int:
    """Pages of a namespace."""
    return sum(node.num_pages for node in cache.tree.nodes() if node.namespace == namespace)


@pytest.mark.parametrize("eviction", ["density", "lru", "s3fifo", "gdsf"])
def test_a_namespace_is_forgotten_and_others_are_not(eviction: str) -> None:
    assert eviction in POLICIES
    choices, flushed = random.Random(eviction), 0
    for _ in range(60):
        events: list[CacheEvent] = []
        cache = KVCache(small_plan(24, PAGE), eviction=eviction, explains=True, emit=events.append, offload=Offloads())
        running = []
        for _ in range(25):
            pages = [choices.randrange(3) for _ in range(choices.randint(1, 6))]
            space = choices.choice(SPACES)
            if choices.random() < 0.1 and len(running) < 3:
                running.append(cache.begin(np.append(tokens_of(pages), 9).astype(np.int32), space))
            else:
                compute(cache, tokens_of(pages), space)
        before = {space: cached(cache, space) for space in SPACES}
        held = {kv.namespace for kv in running}
        done = offload_of(cache).flush(SPACES[0])
        cache.audit()
        after = {space: cached(cache, space) for space in SPACES}
        for pages in range(3):
            assert cache.match(tokens_of([pages, pages]), SPACES[0]).num_tokens == 0
        assert done.flushed_tokens == (before[SPACES[0]] - after[SPACES[0]]) * PAGE
        assert done.held_tokens == after[SPACES[0]] * PAGE and cache.tree.roots.get(SPACES[0]) is None
        assert [after[space] for space in SPACES[1:]] == [before[space] for space in SPACES[1:]]
        if SPACES[0] not in held:
            assert done.held_tokens == 0 and not cache.tree.hidden_roots
        flushed += done.flushed_tokens
        for kv in running:
            cache.finish(kv)
        cache.audit()
        assert cached(cache, SPACES[0]) == 0 and cache.tree.roots.get(SPACES[0]) is None
        assert offload_of(cache).flush(None).held_tokens == 0
        cache.audit()
        assert cache.pages.num_free_pages == 24
        stored: set[bytes] = set()
        for event in events:
            if isinstance(event, PagesStored):
                stored |= set(event.hashes)
            elif isinstance(event, PagesRemoved):
                assert stored >= set(event.hashes)
                stored -= set(event.hashes)
        assert events and not stored, "every page that was stored was said to be removed"
    assert flushed > 1000


def test_what_was_evicted_before_is_forgotten_too() -> None:
    cache = KVCache(small_plan(8, PAGE), explains=True, offload=Offloads())
    secret, alice, bob = tokens_of([1, 2, 3, 4]), *SPACES[:2]
    compute(cache, secret, alice)
    for first in range(10, 40, 4):
        compute(cache, tokens_of([first, first + 1, first + 2, first + 3]), bob)

    def causes() -> set[Cause]:
        asked = np.append(secret, 7).astype(np.int32)
        return {
            reason.cause
            for space in (alice, bob)
            for reason in cache.admission.explain(asked, cache.match(asked, space)).reasons
        }

    assert Cause.EVICTED in causes()
    offload_of(cache).flush(alice)
    assert causes() <= {Cause.NEW, Cause.PAGE}
    cache.audit()


def test_what_a_request_holds_is_its_own_until_it_ends() -> None:
    cache, tokens = KVCache(small_plan(12, PAGE), offload=Offloads()), tokens_of([1, 2, 3, 4, 5])
    compute(cache, tokens, SPACES[0])
    kv = cache.begin(np.append(tokens[: 2 * PAGE], 9).astype(np.int32), SPACES[0])
    done = offload_of(cache).flush(SPACES[0])
    assert (done.flushed_tokens, done.held_tokens) == (3 * PAGE, 2 * PAGE)
    cache.audit()
    assert cache.match(tokens, SPACES[0]).num_tokens == 0
    compute(cache, tokens[: 2 * PAGE], SPACES[0])
    assert cache.match(tokens, SPACES[0]).num_tokens == 2 * PAGE, "it is computed again, in pages of its own"
    assert cache.pages.num_free_pages == 12 - 4
    cache.extend([kv], 3 * PAGE)
    cache.finish(kv, tokens)
    cache.audit()
    assert cache.pages.num_free_pages == 12 - 2 and cache.match(tokens, SPACES[0]).num_tokens == 2 * PAGE
    assert offload_of(cache).flush(SPACES[0]).flushed_tokens == 2 * PAGE
    assert offload_of(cache).flush(Namespace("unknown")).flushed_tokens == 0
    assert cache.pages.num_free_pages == 12
    cache.audit()
