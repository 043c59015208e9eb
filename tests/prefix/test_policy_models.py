"""Eviction orders against small models of them: prompts of one page, in a pool of six."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.prefix.evict import eviction_policy
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import Namespace
from tests.covering import each_of

ROOM = 6
NAMESPACE = Namespace()


@dataclass
class Cached:
    """A page in the model: uses after it was stored, times as counts of events, and the greatest priority."""

    stored: int
    used: int
    priority: int
    hits: int = 0
    value: int = 0  # what GDSF gave it when it was last used


Key = Callable[[Cached], tuple[float, ...]]
KEYS: dict[str, Key] = {
    "lru": lambda page: (page.used,),
    "mru": lambda page: (-page.used,),
    "fifo": lambda page: (page.stored,),
    "filo": lambda page: (-page.stored,),
    "lfu": lambda page: (page.hits, page.used),
    "slru": lambda page: (0 if page.hits < 2 else 1, page.used),
    "priority": lambda page: (page.priority, page.used),
    "gdsf": lambda page: (page.value, page.used),
}


def check_policy(name: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    tree = RadixCache(1, eviction_policy(name))
    model: dict[int, Cached] = {}
    age = evictions = hits = 0  # `age`: the value of the last victim
    for now, (page, priority) in enumerate(zip(draw.zipf(1.4, 500) % 24, draw.integers(3, size=500), strict=True)):
        token, page = np.array([page], dtype=np.int32), int(page)
        match = tree.match(NAMESPACE, token)
        assert bool(match.num_pages) == (page in model), f"event {now}"
        if page in model:
            hits += 1
            cached = model[page]
            cached.hits, cached.used, cached.priority = cached.hits + 1, now, max(cached.priority, int(priority))
        else:
            if len(model) == ROOM:
                victim = min(model, key=lambda each: KEYS[name](model[each]))
                age = model.pop(victim).value
                evictions += 1
                assert tree.evict(1).tolist() == [victim], f"event {now}"
                match = tree.match(NAMESPACE, token)
            cached = model[page] = Cached(now, now, int(priority))
        cached.value = age + 1 + cached.hits
        lease = tree.lease(match, priority=int(priority))
        tree.insert(lease, token[match.num_pages :], token[match.num_pages :])
        tree.release(lease)
    assert evictions > 50 and hits > 50


@each_of("name", KEYS)
@each_of("seed", range(3))
def test_a_policy_evicts_what_its_model_does(name: str, seed: int) -> None:
    check_policy(name, seed)
