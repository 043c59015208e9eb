"""TieredSchedulerMachine: random requests to a real scheduler on a small cache with tiers below.

Requests wait for storage and for loads as the scheduler has them wait; where it has nothing to launch, time passes
until something has arrived, as an engine would wait for that.
"""

from __future__ import annotations

from typing import Any

from quire.scheduler.prefetching import ReadAhead
from quire.testing.choices import Choices
from tests.fuzz.scheduler_machine import SchedulerMachine
from tests.fuzz.tier_faults import spoil
from tests.fuzz.tier_world import TierAsk, TierWorld
from tests.fuzz.tiered_cache import TieredCache
from tests.fuzz.tiered_machine import end_empty, make_cache

_TURNS = 3_000
"""In which everything must have ended once nothing arrives any more."""


class TieredSchedulerMachine(SchedulerMachine):
    """As `SchedulerMachine`."""

    cache: TieredCache

    def __init__(self, choices: Choices, ask: TierAsk) -> None:
        self._ask = ask
        super().__init__(choices)

    def _follow(self, choices: Choices) -> TieredCache:
        self.world = TierWorld(self.plan, self._ask, choices)
        cache = make_cache(self.world, self.plan, None, choices, checkpoint_interval=choices.between(1, 12))
        return TieredCache(cache, self.world, None)

    def step(self, choices: Choices) -> None:
        """Time passes, something on the host is damaged or forgotten, or what happens without tiers."""
        if choices.chance(30):
            self.world.clock.now += choices.one_of((0.001, 0.1, 1.0))
        if choices.chance(3):
            self.did = ("forget",)
            self.cache.forget()
        elif choices.chance(3):
            self.did = ("drop",)
            self.cache.drop(self.plan.num_pages)
        elif choices.chance(8):
            self.did = ("demote",)
            self.cache.demote(choices.one_of((1, 3, self.plan.num_pages)))
        elif choices.chance(12) and self.world.faults:
            self.did = spoil(self.world.records, self.cache.tiers, self.world.faults, choices)
            self.cache.happened["damage"] += len(self.did) > 1
            self.cache.look_again("damage")
        else:
            super().step(choices)

    def _ahead(self) -> ReadAhead[Any]:
        return self.cache

    def end(self) -> None:
        """Everything that waits or runs comes to its end, and then nothing is held."""
        for _ in range(_TURNS):
            if not self.scheduler.has_requests and self._flight is None:
                break
            self.turn()
        else:
            raise AssertionError("requests never end")
        end_empty(self.cache)

    def _check_progress(self, *, progress: bool) -> None:
        """Where nothing is launched, what is on its way is waited for."""
        super()._check_progress(progress=progress or self.cache.wait_moves(1.0))

    def _check_empty(self) -> None:
        """What is on its way may hold something still."""
        self.cache.settle_moves()
        if self.world.mover.idle:
            self.cache.check_idle()
        self.cache.happened["empty"] += 1
