"""A life of a cache over threads: requests, reading ahead and forgetting at random, and all that is read is checked."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from quire.cache import RequestKV
from quire.errors import OutOfPages
from quire.offload.prefetch import Prefetch
from quire.spec.events import Namespace
from quire.spec.ids import Ids
from tests.offload.cached_bytes import asking
from tests.offload.threaded_cache import NAMESPACES, ThreadedCache, name_of

EPOCHS = (0, 1)
_OPEN = 4
_WAITING = 3

Say = Callable[[dict[str, Any]], None]


class RandomLife:
    """Operations on `cache`, drawn by `rng`. `say` hears what outlives the process: a flush that is to be, and one that
    the store has done. Beside other caches on the same store it does not `flush`: what they have is theirs. `happened`
    counts operations."""

    def __init__(
        self, cache: ThreadedCache, prompts: Sequence[Ids], rng: random.Random, say: Say, *, flushes: bool = True
    ) -> None:
        self.cache = cache
        self._prompts = prompts
        self._rng = rng
        self._say = say
        self.happened: Counter[str] = Counter()
        self._open: list[tuple[RequestKV, Ids]] = []
        self._waiting: list[tuple[Prefetch, Ids, Namespace]] = []
        self._unflushed: list[tuple[dict[str, int], bytes]] = []
        self._weighted = {
            self.begin: 20,
            self.extend: 30,
            self.finish: 14,
            self.abort: 3,
            self.prefetch: 12,
            self.wait_up: 14,
            self.make_room: 4,
            self.forget: 2,
            self.rest: 6,
            self.flush: float(flushes),
            self.change_epoch: 0.5,
            self.drain: 0.5,
        }

    def read_back(self) -> int:
        """Read ahead what is stored of every prompt, and begin on it; returns how many tokens came from storage."""
        for namespace in NAMESPACES:
            for tokens in self._prompts:
                self.cache.fetch(tokens, namespace)
                kv = self.cache.begin(asking(tokens), namespace)
                self.cache.finish(kv)
        return self.storage_hits

    def store_all(self) -> None:
        """Every prompt of the first namespace is used twice, leaves the device and is stored, whatever the policy."""
        self.cache.tiers.archiver.hasten()
        for tokens in self._prompts:
            for _ in range(2):
                self.cache.compute(tokens, NAMESPACES[0])
                self.cache.drain()
        self._free_up(self.cache.plan.num_pages)
        self.cache.drain()
        self.forget()

    def step(self) -> None:
        """One operation."""
        self.cache.ahead.settle_moves()
        self._tell_flushed()
        (act,) = self._rng.choices(list(self._weighted), list(self._weighted.values()))
        self.happened[act.__name__] += 1
        act()

    def steps(self, count: int) -> None:
        """So many operations."""
        for _ in range(count):
            self.step()

    def end(self) -> None:
        """All requests end, one way or the other; then nothing is held."""
        for prefetch, _, _ in self._waiting:
            self.cache.ahead.stop_prefetch(prefetch)
        while self._open:
            self.finish()
        self.cache.drain()
        self._tell_flushed()
        self.cache.check_rest()

    @property
    def storage_hits(self) -> int:
        """Tokens that requests have begun on and that came from the store."""
        tiers = self.cache.tiers
        assert tiers is not None
        return tiers.counters.storage_hit_tokens

    # -- operations

    def begin(self) -> None:
        if len(self._open) < _OPEN:
            self._begin(self._rng.choice(self._prompts), self._rng.choice(NAMESPACES))

    def _begin(self, tokens: Ids, namespace: Namespace) -> None:
        try:
            self._open.append((self.cache.begin(tokens, namespace), tokens))
        except OutOfPages:
            self.happened["refused"] += 1

    def extend(self) -> None:
        if not self._open:
            return
        kv, tokens = self._rng.choice(self._open)
        have = self.cache.cache.rows.allocated(kv)
        target = tokens[: min(len(tokens), have + self._rng.choice((1, 3, 9, 40)))]
        self._grow(kv, tokens, target)

    def _grow(self, kv: RequestKV, tokens: Ids, target: Ids) -> bool:
        try:
            self.cache.grow(kv, target)
        except OutOfPages:  # what other requests hold is in its way: they may be what never ends
            self.happened["preempted"] += 1
            self._open = [each for each in self._open if each[0] is not kv]
            self.cache.finish(kv)
            return False
        if self._rng.random() < 0.7:
            self.cache.cache.commit(kv, target)
        return True

    def finish(self) -> None:
        if self._open:
            kv, tokens = self._rng.choice(self._open)
            if self._grow(kv, tokens, tokens):
                self._open.remove((kv, tokens))
                self.cache.finish(kv, tokens)

    def abort(self) -> None:
        if self._open:
            kv, _ = self._open.pop(self._rng.randrange(len(self._open)))
            self.cache.finish(kv)

    def prefetch(self) -> None:
        tokens, namespace = self._rng.choice(self._prompts), self._rng.choice(NAMESPACES)
        found = self.cache.ahead.prefetch(tokens, namespace) if len(self._waiting) < _WAITING else None
        if found is not None:
            self._waiting.append((found, tokens, namespace))

    def wait_up(self) -> None:
        if not self._waiting:
            return
        prefetch, tokens, namespace = self._waiting.pop(self._rng.randrange(len(self._waiting)))
        if self._rng.random() < 0.2:
            self.cache.ahead.stop_prefetch(prefetch)
            return
        while self.cache.ahead.is_awaited(prefetch):
            assert self.cache.advance()
        if len(self._open) < _OPEN:
            self._begin(tokens, namespace)
        self.cache.ahead.stop_prefetch(prefetch)

    def make_room(self) -> None:
        self._free_up(self._rng.choice((1, 4, 20)))

    def _free_up(self, count: int) -> None:
        cache = self.cache.cache
        wanted = [group.num_free + min(count, group.num_evictable) for group in cache.groups]
        cache.parts.reclaim(wanted, "", ())

    def forget(self) -> None:
        """What no lease holds is in the store only."""
        cache = self.cache.cache
        cache.evict(cache.pages.num_pages)
        while self.cache.tiers.evict_host(cache.pages.num_pages):
            pass

    def rest(self) -> None:
        self.cache.ahead.wait_moves(self._rng.choice((0.0005, 0.003)))

    def drain(self) -> None:
        self.cache.drain()
        self.cache.cache.audit()

    def flush(self) -> None:
        namespace = self._rng.choice((*NAMESPACES, None))
        tiers = self.cache.tiers
        assert tiers is not None
        names = [name_of(self.cache.epoch, each) for each in (NAMESPACES if namespace is None else (namespace,))]
        generations = {name: self.cache.generations.newest.get(name, 0) + 1 for name in names}
        self._say({"flushing": generations})
        self._unflushed.append(
            (generations, tiers.names.scope_prefix if namespace is None else tiers.names.scope(namespace))
        )
        self.cache.flush(namespace)

    def _tell_flushed(self) -> None:
        """What the store has forgotten, it has forgotten for good."""
        tiers = self.cache.tiers
        assert tiers is not None
        waiting = set(tiers.deletion.scopes)
        for generations, scope in self._unflushed:
            if scope not in waiting:
                self._say({"flushed": generations})
        self._unflushed = [each for each in self._unflushed if each[1] in waiting]

    def change_epoch(self) -> None:
        self.cache.set_epoch(self._rng.choice(EPOCHS))
