"""The promise of tiers, over time: next to never slower than computing everything, and used where clearly quicker.

Virtual clocks. Links and stores become slow, fail and recover; then so many requests come as that lasts.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest

from quire.offload import offload_of
from quire.settings.fields import PrefetchPolicy
from quire.spec.ids import Ids
from quire.tiers.break_even import BreakEven
from quire.tiers.store import Answer, StoreKey
from quire.tiers.transfer import Lane
from tests.changes import TIERS, slow_unless_changed
from tests.covering import few
from tests.offload.cached_bytes import ALICE, PAGE, asking, tokens_of
from tests.offload.tiered_cache import TieredCache
from tests.tiers.scripted_store import ScriptedStore

SLOWER = 0.02  # of the time to compute everything
TRIALS = 0.02  # of the time that goes by
LEARNING = 40  # prompts' time to compute, each time that something changes
TOKEN_BYTES = 100_000
LONG = 2000.0  # seconds without a change, after which what is quicker must have been found


@dataclass
class Spent:
    """Seconds with tiers and with computing everything, and what was asked for and loaded after `LONG`."""

    beside: float = 0.0
    without: float = 0.0
    longest: float = 0.0  # to compute
    seconds: float = 0.0  # that went by
    changes: int = 0
    tokens: int = 0
    loaded: int = 0

    def add(self, beside: float, without: float) -> None:
        self.beside += beside
        self.without += without
        self.longest = max(self.longest, without)

    def check(self) -> None:
        allowed = self.without * (1 + SLOWER) + TRIALS * self.seconds + LEARNING * self.changes * self.longest
        assert self.beside <= allowed, (
            f"{self.beside:.0f} s, {self.without:.0f} s without tiers, {allowed:.0f} s allowed"
        )
        assert self.loaded >= 0.8 * self.tokens, f"{self.loaded} of {self.tokens} tokens that are quicker loaded"


# -- one link, many requests at once


def check_link(seed: int) -> None:
    """Loads of several requests are under way at once, one after the other; others decide meanwhile. Saves are as fast
    as they like. Every request is looked at a few times before it begins."""
    draw = random.Random(seed)
    rate = 10 ** draw.uniform(3.7, 5)  # tokens per second
    lengths = [draw.randrange(2_000, 20_000) for _ in range(6)]
    pause = max(lengths) / rate * draw.uniform(0.1, 2)
    now, spent = 0.0, Spent()
    even = BreakEven(lambda: now)
    for _ in range(5):
        even.computed(2048, 2048 / rate)
    for _ in range(draw.randrange(2, 5)):
        spent.changes += 1
        speed = draw.choice([0.1, 0.5, 0.9, 1.2, 4.0, 20.0])  # times as fast as computing
        even.moved(Lane.SAVE, 10**9, 10**9 / (rate * TOKEN_BYTES * draw.choice([0.5, 3.0, 30.0])))
        under_way: deque[tuple[float, int, float]] = deque()  # (end, bytes, seconds)
        began, free, is_measured = now, now, False
        while now < began + 2 * LONG:
            while under_way and under_way[0][0] <= now:
                _, num_bytes, seconds = under_way.popleft()
                even.moved(Lane.LOAD, num_bytes, seconds)
                is_measured = True
            tokens = draw.choice(lengths)
            num_bytes, compute = tokens * TOKEN_BYTES, tokens / rate
            queued = sum(size for _, size, _ in under_way)
            for _ in range(draw.randrange(4)):
                even.pays(Lane.LOAD, tokens, num_bytes, queued)
            loads = even.decide(Lane.LOAD, tokens, num_bytes, queued)
            taken = compute
            if loads:
                seconds = compute / speed * draw.uniform(0.95, 1.05)
                free = max(free, now) + seconds
                under_way.append((free, num_bytes, seconds))
                taken = free - now
            if is_measured or not loads:  # no estimate could have known
                spent.add(taken, compute)
            if now > began + LONG and speed > 3 and queued == 0:
                spent.tokens += tokens
                spent.loaded += tokens * loads
            now += pause * draw.uniform(0.5, 1.5)
        for _, num_bytes, seconds in under_way:
            even.moved(Lane.LOAD, num_bytes, seconds)
    spent.seconds = now
    spent.check()


# -- a cache and its store


class FickleStore(ScriptedStore):
    """In a bad time it says what it has, and gives nothing; or says nothing."""

    fails = ""

    def exists(self, keys: list[StoreKey]) -> list[Answer]:  # type: ignore[override]
        return [Answer.RETRY] * len(keys) if self.fails == "exists" else super().exists(keys)

    def get(self, keys: list[StoreKey], records: object) -> list[Answer]:  # type: ignore[override]
        return [Answer.RETRY] * len(keys) if self.fails == "get" else super().get(keys, records)  # type: ignore[arg-type]


class Clients:
    """They come back in turns to prompts that have left device and host meanwhile, or only the device."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.store = FickleStore()
        deep = self.draw.random() < 0.6  # through the store
        self.world = TieredCache(
            num_pages=10,
            host=10 if deep else 60,
            always=False,
            prefetch=PrefetchPolicy.BREAK_EVEN,
            store=self.store,
            stores=deep,
            seconds=1e-4,
        )
        self.deep = deep
        self.prompts = [tokens_of(range(10 * i, 10 * i + 8)) for i in range(5)]
        self.rate = 8 * PAGE / self.draw.uniform(0.2, 2.0)
        self.spent = Spent()
        for tokens in self.prompts * 2:
            self.world.compute(tokens)
            self.world.drain()
        self.even = self.world.tiers.break_even
        self._learn()

    def run(self) -> None:
        world = self.world
        for _ in range(self.draw.randrange(2, 4)):
            self.spent.changes += 1
            quick = self._change()
            began = world.now
            while world.now < began + 2 * LONG:
                tokens = self.draw.choice(self.prompts)
                cached, compute = self._request(tokens)
                if quick and world.now > began + LONG:
                    self.spent.tokens += len(tokens)
                    self.spent.loaded += cached
                self._pass(compute * self.draw.uniform(10, 50))
        self.spent.seconds = world.now
        self.spent.check()

    def _change(self) -> bool:
        """Whether what is below the device is clearly quicker from now on."""
        latency, compute = self.world.latency, 8 * PAGE / self.rate
        self.store.fails = self.draw.choice(["", "", "", "get", "exists"]) if self.deep else ""
        times = {link: self.draw.choice([0.01, 0.01, 0.3, 2.0]) for link in (Lane.LOAD, Lane.FETCH, Lane.LOOK)}
        if not self.deep:
            times[Lane.FETCH] = times[Lane.LOOK] = 0.0
        for link, share in times.items():
            latency[link] = compute * share
        return not self.store.fails and sum(times.values()) < 0.2

    def _learn(self) -> None:
        self.even.computed(1000, 1000 / self.rate)

    def _pass(self, seconds: float) -> None:
        until = self.world.now + seconds
        while (end := self.world.mover.next_end) is not None and end < until:
            self.world.advance()
        self.world.now = max(until, self.world.now)
        self.world.ahead.settle_moves()

    def _request(self, tokens: Ids) -> tuple[int, float]:
        """How much of a prompt was reused, and the time to compute all of it."""
        world, cache, prompt = self.world, self.world.cache, asking(tokens)
        began = world.now
        prefetch = offload_of(cache).ahead.prefetch(prompt, ALICE) if offload_of(cache).ahead.can_prefetch else None
        while prefetch is not None and offload_of(cache).ahead.is_awaited(prefetch):
            self._pass(0.02 * len(tokens) / self.rate)
        for _ in range(self.draw.randrange(4)):
            cache.match(prompt, ALICE)
        kv = world.begin(prompt)
        if prefetch is not None:
            offload_of(cache).ahead.stop_prefetch(prefetch)
        cached = kv.num_cached
        self._pass((len(tokens) - cached) / self.rate)
        if cached < len(tokens):
            self._learn()
        world.grow(kv, prompt)
        world.finish(kv, tokens)
        compute = len(tokens) / self.rate
        here = np.count_nonzero(cache.groups[0].table.present(cache.tree.match(ALICE, tokens).pages))
        assert here == 8
        self.spent.add(world.now - began, compute)
        return cached, compute


@slow_unless_changed(*TIERS)
@pytest.mark.parametrize("seed", range(12))
def test_a_link_never_costs_more_than_it_may(seed: int) -> None:
    check_link(seed)


@slow_unless_changed(*TIERS)
@pytest.mark.parametrize("seed", few(range(12), 4))
def test_a_cache_with_tiers_never_costs_more_than_it_may(seed: int) -> None:
    Clients(seed).run()
