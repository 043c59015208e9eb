"""Containment of damaged pages that something holds: it tries again when a lease was released, and only then."""

from __future__ import annotations

import numpy as np
import pytest

from quire.cache import KVCache
from quire.cache.hold import Reason
from quire.canary.containment import Containment
from quire.canary.finding import Finding, Kind
from quire.prefix.radix_cache import RadixCache
from quire.spec.ids import Ids
from quire.testing import small_plan

PROMPTS = [np.array(tokens, dtype=np.int32) for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [9, 9, 9, 9])]


def compute(cache: KVCache, tokens: Ids) -> None:
    kv = cache.begin(tokens)
    cache.extend([kv], [len(tokens) - kv.num_cached])
    cache.finish(kv, tokens)


@pytest.fixture
def cache() -> KVCache:
    found = KVCache(small_plan(12, 2))
    for tokens in PROMPTS:
        compute(found, tokens)
    return found


def finding(cache: KVCache, page: int) -> Finding:
    frame = int(cache.groups[0].table.frame[page])
    kind, group = Kind.BYTES, cache.groups[0].name
    return Finding(
        kind=kind,
        group=group,
        index=0,
        page=page,
        frame=frame,
        position=0,
        step=2,
        good_step=1,
        wrote_step=0,
        wrote_request="r",
    )


def test_the_tree_is_walked_only_after_a_lease_was_released(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    walks = []
    real = RadixCache.nodes
    monkeypatch.setattr(RadixCache, "nodes", lambda tree: walks.append(tree) or real(tree))
    containment = Containment(cache.parts)
    match = cache.tree.match(cache.match(PROMPTS[0]).match.namespace, PROMPTS[0])
    holds = [cache.parts.holds.add(Reason.SAVE, lease=cache.tree.pin_path(match, pages)) for pages in (2, 3)]
    running = cache.begin(PROMPTS[2])
    containment.add([finding(cache, page) for page in match.pages[1:3].tolist()])
    assert containment.go_on() == 0 and containment.is_waiting
    assert len(walks) == 1, "one walk for all damaged pages"
    for _ in range(8):  # steps in which a request grows, and nothing ends
        cache.extend([running], [1])
        assert containment.go_on() == 0
    assert len(walks) == 1
    cache.parts.holds.release(holds[1])
    assert containment.go_on() == 1, "the last page is held no more"
    cache.parts.holds.release(holds[0])
    assert containment.go_on() == 2, "the page and the other branch"
    assert not containment.is_waiting and len(walks) == 1
    assert [len(group.quarantined) for group in cache.groups] == [1]
    cache.finish(running)
    cache.audit()


def test_damaged_pages_that_left_the_cache_are_damaged_no_more(cache: KVCache) -> None:
    containment = Containment(cache.parts)
    page = int(cache.match(PROMPTS[2]).match.pages[0])
    found = finding(cache, page)
    cache.evict(12)
    containment.add([found])
    assert containment.go_on() == 0 and not containment.is_waiting
    assert not cache.parts.damaged.num_damaged
    compute(cache, PROMPTS[2])
    assert cache.match(np.append(PROMPTS[2], PROMPTS[2])).num_tokens == 4
