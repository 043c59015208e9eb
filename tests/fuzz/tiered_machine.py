"""TieredMachine: random operations on a small KVCache with tiers below, whose bytes move in counted time."""

from __future__ import annotations

from quire.cache import KVCache
from quire.errors import OutOfPages
from quire.offload import Offloads
from quire.offload.prefetch import Prefetch
from quire.plan.budget import MemoryPlan
from quire.prefix.evict import POLICIES
from quire.spec.events import CacheEvent
from quire.testing.choices import Choices
from tests.fuzz.cache_machine import MOST_IN_FLIGHT, WEIGHTS, CacheMachine, Did
from tests.fuzz.faults import Faults
from tests.fuzz.plain_cache import Sequence
from tests.fuzz.plans import shuffle_frames
from tests.fuzz.tier_faults import spoil
from tests.fuzz.tier_world import TierAsk, TierWorld
from tests.fuzz.tiered_cache import TieredCache
from tests.fuzz.watched_mover import WatchedMover

TIERED_WEIGHTS = {
    **WEIGHTS,
    "begin": 4,
    "extend": 6,
    "launch": 8,
    "execute": 8,
    "settle": 8,
    "finish": 6,
    "look": 1,
    "forget": 2,
    "demote": 8,
    "drop": 2,
    "recover": 5,
    "tick": 14,
    "serve": 34,
    "prefetch": 10,
    "give_up": 4,
    "spoil": 4,
}
_DRAWN = tuple(name for name, weight in TIERED_WEIGHTS.items() for _ in range(weight))
_MOST_PREFETCHES = 3
_TICKS = (0.0, 0.001, 0.1, 1.0, 20.0)
_LONG_ENOUGH_S = 100.0
_MOST_TURNS = 2_000
"""Of time, until everything that moves has ended."""


class TieredMachine(CacheMachine):
    """As `CacheMachine`. Time passes between operations, loads are waited for, what failed begins again; prompts are
    fetched from a store, and records are damaged where faults are asked for."""

    cache: TieredCache

    def __init__(self, choices: Choices, ask: TierAsk) -> None:
        self._ask = ask
        self._prefetches: list[tuple[int, Prefetch]] = []
        super().__init__(choices)
        self._verbs = {name: getattr(self, name) for name in TIERED_WEIGHTS}

    def _follow(self, choices: Choices, plan: MemoryPlan, events: list[CacheEvent] | None) -> TieredCache:
        self.world = TierWorld(plan, self._ask, choices)
        cache = make_cache(
            self.world, plan, events, choices, checkpoint_interval=choices.between(1, 4 * plan.page_size)
        )
        return TieredCache(cache, self.world, events, Faults(cache) if choices.chance(30) else None)

    def step(self, choices: Choices) -> str:
        """One random operation that has something to do, and all checks; returns its name."""
        operation = choices.one_of(_DRAWN)
        while not self.possible(operation):
            operation = choices.one_of(_DRAWN)
        self.run(operation, choices)
        return operation

    def possible(self, operation: str) -> bool:
        """Whether that operation has something to do."""
        match operation:
            case "launch":
                return len(self.cache.steps) < MOST_IN_FLIGHT and bool(self._launchable())
            case "give_up":
                return bool(self._prefetches)
            case "spoil":
                return bool(self.world.faults)
            case "drop":
                return any(not group.reach.whole for group in self.cache.cache.groups)
            case "recover":
                return self.world.store is not None
        return super().possible(operation)

    def end(self) -> None:
        """Everything ends: steps, requests, what moves; then all memory can be had."""
        self.did = ("end",)
        self._finish_all()
        for _, prefetch in self._prefetches:
            self.cache.stop_prefetch(prefetch)
        end_empty(self.cache)

    # -- operations

    def clear(self, choices: Choices) -> Did:
        """All is flushed when no request runs, in lives that flush; transfers and waiting requests stay."""
        if not self.world.flushes_in_flight:
            return super().clear(choices)
        self.did = ("flush",)
        self._finish_all()
        self.cache.flush()
        return self.did

    def tick(self, choices: Choices) -> Did:
        """Time passes, and the cache hears of what has arrived. Who waited for what will not come begins again."""
        seconds = choices.one_of(_TICKS)
        self.world.clock.now += seconds
        self.did = "wait", seconds
        self.cache.settle_moves()
        for s in [s for s in self.model.live if s.kv.has_failed]:
            if s.launched == s.settled:
                self.happened["begins again"] += 1
                self.cache.finish(s.kv, returns=True)
        return self.did

    def serve(self, choices: Choices) -> Did:
        """A request from its beginning to its end, as far as there is room, while others are where they are."""
        if len(self.model.live) == self.cache.plan.max_requests:
            return self.finish(choices)
        name = self._prompt(choices)
        self.did = "serve", self.names.tokens(name).tolist(), "in", self.names.namespaces[name]
        try:
            kv = self.cache.begin(self.names.tokens(name), self.names.namespaces[name], priority=choices.below(3))
            self.cache.extend([kv], min(len(self.names.path[name]) + choices.below(3), self.context) - kv.num_cached)
        except OutOfPages:
            self.did += (": refused",)
            return self.did
        s = self.cache.followed(kv)
        for _ in range(_MOST_TURNS):
            if kv.is_ready or kv.has_failed:
                break
            self._pass_time()
        else:
            raise AssertionError("a request waits for its prefix for ever")
        while len(self.cache.steps) == MOST_IN_FLIGHT:
            self._finish_step()
        if kv.is_ready:
            self._launch([s], Choices(lambda n: 0))
            self.did += (": launched",)
        while s.launched > s.settled:
            self._finish_step()
        self.did += (": finished with", s.settled, "tokens")
        self.cache.finish(kv, self.names.tokens(self.names.prefix(s.name, s.settled)) if s.settled > s.begun else None)
        return self.did

    def prefetch(self, choices: Choices) -> Did:
        """A request waits for what of its prompt is stored."""
        if len(self._prefetches) == _MOST_PREFETCHES:
            return self.give_up(choices)
        known = sorted(self.cache.ever - self.model.cached)
        name = choices.one_of(known) if known and choices.chance(70) else self._prompt(choices)
        if name in known and len(self.names.path[name]) < self.context:
            name = self.names.child(name, self._token(choices))
        self.did = "prefetch", self.names.tokens(name).tolist()
        if choices.chance(20):
            self.cache.forget()
        found = self.cache.prefetch(self.names.tokens(name), self.names.namespaces[name])
        if found is not None:
            self._prefetches.append((name, found))
            if choices.chance(70):
                self._rest(choices)
                return self.give_up(choices)
        return self.did

    def recover(self, choices: Choices) -> Did:
        """With nothing else on its way, a request reads ahead to the end; often what is read in part of its prefix is
        in the store only."""
        known = sorted(self.model.cached if choices.chance(70) else self.cache.ever)
        name = choices.one_of(known) if known else self._prompt(choices)
        if len(self.names.path[name]) < self.context:
            name = self.names.child(name, self._token(choices))
        tokens, namespace = self.names.tokens(name), self.names.namespaces[name]
        self.did = "read ahead of", tokens.tolist(), "in", namespace
        let_all_arrive(self.cache)
        if choices.chance(60):
            self.cache.drop(choices.one_of((1, self.cache.cache.plan.num_pages)))
        obtainable = self.cache.obtainable(tokens, namespace)
        found = self.cache.prefetch(tokens, namespace)
        let_all_arrive(self.cache)
        if obtainable is not None:
            self.cache.check_obtained(tokens, namespace, obtainable)
            self.did += (": finds", obtainable, "pages")
        if found is not None:
            self.cache.stop_prefetch(found)
        return self.did

    def give_up(self, choices: Choices) -> Did:
        """A request that waits begins when it need not wait any longer, or goes away."""
        name, prefetch = self._prefetches.pop(choices.below(len(self._prefetches)))
        self.did = "wait no longer for", self.names.tokens(name).tolist()
        if choices.chance(20):
            self.cache.stop_prefetch(prefetch)
            return self.did
        for _ in range(_MOST_TURNS):
            if not self.cache.is_awaited(prefetch):
                break
            self._pass_time()
        else:
            raise AssertionError("a request waits for storage for ever")
        if len(self.model.live) < self.cache.plan.max_requests:
            self.happened["fetched"] += prefetch.limit > prefetch.prefix.start
            try:
                self.cache.begin(self.names.tokens(name), self.names.namespaces[name])
            except OutOfPages:
                self.did += (": refused",)
        self.cache.stop_prefetch(prefetch)
        return self.did

    def spoil(self, choices: Choices) -> Did:
        """A record on the host is damaged."""
        self.did = spoil(self.world.records, self.cache.tiers, self.world.faults, choices)
        self.happened["damage"] += len(self.did) > 1
        self.cache.look_again("damage")
        return self.did

    def demote(self, choices: Choices) -> Did:
        """What no lease holds leaves the device, all of it or some."""
        self.did = ("demote",)
        self.cache.demote(choices.one_of((1, 3, self.cache.cache.plan.num_pages)))
        return self.did

    def drop(self, choices: Choices) -> Did:
        """What is read in part leaves device and host, all of it or some, and its pages stay."""
        self.did = ("drop",)
        self.cache.drop(choices.one_of((1, 3, self.cache.cache.plan.num_pages)))
        return self.did

    def forget(self, choices: Choices) -> Did:
        """Nothing is left that no request holds, but for what is stored."""
        self.did = ("forget",)
        self.cache.forget()
        return self.did

    def launch(self, choices: Choices) -> Did:
        """As without tiers, for requests whose prefix is there or arriving."""
        ready = self._launchable()
        batch = choices.some_of(ready)
        if not batch or len(self.cache.steps) == MOST_IN_FLIGHT:
            return ("launch nothing",)
        return self._launch(batch, choices)

    # -- inside

    def _rest(self, choices: Choices) -> None:
        """Time passes for a while."""
        for _ in range(choices.below(12)):
            self._pass_time()

    def _finish_all(self) -> None:
        while self.cache.steps:
            self._finish_step()
        for s in list(self.model.live):
            self.cache.finish(s.kv, self.names.tokens(self.names.prefix(s.name, s.committed)))

    def _finish_step(self) -> None:
        """The oldest step is executed and settles."""
        last = Choices(lambda n: n - 1)
        self.execute(last)
        self.settle(last)

    def _launchable(self) -> list[Sequence]:
        return [s for s in self.model.live if s.launched < s.allocated and s.kv.is_ready]

    def _pass_time(self) -> None:
        end = self.world.mover.next_end
        self.world.clock.now = max(self.world.clock.now, end or 0.0) + 0.01
        self.cache.settle_moves()


def make_cache(
    world: TierWorld,
    plan: MemoryPlan,
    events: list[CacheEvent] | None,
    choices: Choices,
    *,
    checkpoint_interval: int,
) -> KVCache:
    """A cache of that plan above that world, with frames in any order."""
    cache = KVCache(
        plan,
        eviction=choices.one_of(sorted(POLICIES)),
        emit=events.append if events is not None else None,
        checkpoint_interval=checkpoint_interval,
        seconds=world.clock,
        offload=Offloads(world.settings),
    )
    shuffle_frames(cache, choices)
    return cache


def end_empty(cache: TieredCache) -> None:
    """With no request left, all is flushed or cleared, and then nothing is anywhere."""
    if cache.world.flushes_in_flight:
        cache.flush()
    else:
        come_to_rest(cache)
        cache.clear()
    come_to_rest(cache)
    cache.check_empty()


def come_to_rest(cache: TieredCache) -> None:
    """Time passes until nothing moves; then nothing is held."""
    let_all_arrive(cache)
    cache.world.clock.now += _LONG_ENOUGH_S  # what waits for its time has come to it
    let_all_arrive(cache)
    cache.settle_moves()
    cache.check_idle()


def let_all_arrive(cache: TieredCache) -> None:
    """Time passes until nothing moves. It must not take for ever."""
    mover: WatchedMover = cache.world.mover
    for _ in range(_MOST_TURNS):
        cache.settle_moves()
        if mover.idle:
            break
        cache.world.clock.now = max(cache.world.clock.now, mover.next_end or 0.0)
    else:
        raise AssertionError("something moves for ever")
