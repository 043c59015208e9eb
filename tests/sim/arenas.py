"""Random replays of two groups that share an arena, in which frames move."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from quire.cache import KVCache
from quire.loop import Loop, Part
from quire.memory.allocator import Move
from quire.plan.budget import MemoryPlan
from quire.prefix.reach import reach_of
from quire.scheduler.step import Step
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.settings import SimulatedTiers
from quire.sim.trace_request import TraceRequest
from quire.spec.arena import ArenaLayout
from quire.spec.group import GroupSpec, ReachSpec
from quire.spec.layout import DType, Field, PageLayout
from quire.spec.speculation import SpeculativeConfig
from quire.testing.choices import Choices
from tests.sim.replays import COST

DRAFTS = SpeculativeConfig(method="ngram", num_steps=2, topk=1, num_draft_tokens=3)


def arena_plan(choices: Choices, *, drafts: bool = False) -> MemoryPlan:
    """One group that is read whole and one that is not, with frames of any two sizes and room for a few requests."""
    size, kind = choices.one_of((1, 2, 4, 16)), choices.one_of(("window", "state", "chunk"))
    small, large = choices.between(1, 3), choices.between(1, 3) if choices.chance(30) else choices.between(4, 40)
    strides = (small * size, large * size)
    reach = ReachSpec(kind, 0 if kind == "state" else choices.between(1, 6 * size))
    groups = tuple(
        GroupSpec(
            name=name,
            layout=PageLayout(size, (Field(name="k", shape=(width,), dtype=DType.UINT8, layers=(0,)),)),
            reach=reach,
        )
        for name, width, reach in (("full", small, ReachSpec()), (kind, large, reach))
    )
    plan = MemoryPlan(
        page_size=size,
        groups=groups,
        num_pages=1,
        context=1,
        max_requests=choices.between(1, 8),
        speculation=DRAFTS if drafts else None,
    )
    least = plan.tokens_per_step if kind == "state" else reach_of(reach, size).held(2**30) + plan.tokens_per_step
    num_pages = choices.between(8, 60)
    budget = 2 * sum(strides) + num_pages * strides[0] + (least + choices.below(8)) * strides[1]
    arena = ArenaLayout(budget, strides)
    num_pages = arena.most(0, least)
    return replace(plan, arena=arena, num_pages=num_pages, context=max(1, num_pages * size - 4))


def arena_trace(choices: Choices, plan: MemoryPlan, length: int) -> list[TraceRequest]:
    """Short and long prompts, most of which begin as an earlier request did."""
    found: list[TraceRequest] = []
    now = 0.0
    for index in range(length):
        shared: list[int] = []
        if found and choices.chance(60):
            earlier = choices.one_of(found)
            shared = [*earlier.prompt.tolist(), *earlier.output.tolist()][: choices.between(1, 400)]
        count = max(1, plan.context * choices.one_of((5, 20, 60)) // 100)
        own = [choices.between(1, 3) for _ in range(choices.between(1, count))]
        prompt = [*shared, *own][: max(1, plan.context - 13)]
        output = [choices.between(1, 3) for _ in range(min(choices.between(1, 12), plan.context - len(prompt)))] or [1]
        now += choices.below(20) / 1000
        tokens = np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32)
        found.append(TraceRequest(request_id=f"r{index}", prompt=tokens[0], output=tokens[1], arrival=now))
    return found


class Shaking(Part):
    """Frames change places before each launch, although nothing needs the room: any that may, to any places that their
    group can have."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self.num_moved = 0

    def attach(self, loop: Loop) -> None:
        self._cache = loop.cache

    def scheduled(self, step: Step) -> None:
        self.num_moved += shake(self._cache, self._choices)


def shake(cache: KVCache, choices: Choices) -> int:
    """Move frames of a group; how many."""
    (room,), moved = cache.parts.rooms, 0
    arena, group = room.arena, choices.below(2)  # type: ignore[attr-defined]
    pool, fixed = arena.pools[group], cache._fixed(group)
    if fixed is None:
        return 0
    used = np.flatnonzero(pool.is_out(slice(None)))
    sources = np.array([at for at in used.tolist() if at not in fixed and choices.chance(40)], dtype=np.int32)
    free = pool.take(min(pool.num_free, 2 * len(sources)))
    targets = np.array([at for at in free.tolist() if choices.chance(70)], dtype=np.int32)[: len(sources)]
    unused = np.setdiff1d(free, targets)
    sources = sources[: len(targets)]
    moved = len(sources)
    for ids in (unused, targets):
        pool.take_back(ids)
        pool.put(ids)
    if moved:
        cache._growth.move(Move(group, sources, targets))
    return moved


def run_arena_replay(seed: int, *, shakes: bool = False, tiers: bool = False, drafts: bool = False) -> Counter[str]:
    """A replay in which every read and all invariants are checked; returns what has happened."""
    choices = Choices.seeded(seed)
    plan = arena_plan(choices, drafts=drafts)
    settings = ReplaySettings(
        check="all",
        chunk=choices.one_of((8, 32, 256)),
        overlap=choices.chance(50) and not drafts,
        checkpoint_interval=choices.one_of((plan.page_size, 4 * plan.page_size, 64)),
        tiers=SimulatedTiers(host_tokens=40 * plan.page_size) if tiers else None,
        acceptance=0.6 if drafts else None,
    )
    parts = [Shaking(choices)] if shakes else []
    replay = Replay(plan, COST, settings, parts=parts)
    result = replay.run(arena_trace(choices, plan, 30))
    counters = replay.cache.counters
    return Counter(
        moved=counters.moved_frames + sum(part.num_moved for part in parts),
        hits=result.hit_tokens,
        evicted=counters.evicted_pages,
        dropped=sum(group.dropped_frames for group in replay.cache.groups),
        ended=result.count("length"),
    )
