"""Random replays of a cache whose size changes while requests run, with every read checked.

Memory that was given back is wiped, as the system does, so that a read of it is noticed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count

import numpy as np

from quire.errors import InvalidInput
from quire.loop import Loop, Part
from quire.loop.resizing import ResizingPart
from quire.loop.tenants import parts_for_tenants
from quire.plan.budget import MemoryPlan
from quire.prefix.reach import reach_of
from quire.settings.tenants import tenants_of
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.settings import SimulatedTiers
from quire.spec.arena import ArenaLayout
from quire.spec.events import Namespace
from quire.spec.group import GroupSpec, ReachSpec
from quire.spec.layout import DType, Field, PageLayout
from quire.spec.pages import pages_for
from quire.testing.choices import Choices
from tests.sim.arenas import DRAFTS, arena_plan, arena_trace
from tests.sim.replays import COST

KINDS = (("full",), ("full", "window"), ("full", "state"), ("full", "chunk"), ("full", "other"), ("window",))

TENANTS = ("default", "one", "two")
MOST_TURNS = 20_000


class Arenas:
    """A plan of the most bytes that two groups share, and plans of fewer, in some of which a request of the whole
    context does not fit."""

    def __init__(self, choices: Choices, *, drafts: bool) -> None:
        self.plan = arena_plan(choices, drafts=drafts)
        arena, pages = self.plan.arena, self.plan.pages_of(self.plan.context)
        assert arena is not None
        self._arena, self._beside = arena, arena.room - self.plan.num_pages * arena.strides[0]
        self._least = self._beside + pages * arena.strides[0]

    def smaller(self, choices: Choices) -> MemoryPlan:
        """Any size from half of what the context needs on."""
        arena, least = self._arena, self._least // 2 if choices.chance(30) else self._least
        budget = arena.budget - arena.room + choices.between(min(least, arena.room), arena.room)
        arena = ArenaLayout(budget, arena.strides)
        num_pages = max(0, arena.room - self._beside) // arena.strides[0]
        return replace(self.plan, arena=arena, num_pages=min(num_pages, self.plan.num_pages))


class Sizes:
    """A plan of the most frames, and plans of fewer, in some of which a request of the whole context does not fit."""

    def __init__(self, choices: Choices, *, drafts: bool) -> None:
        size, kinds = choices.one_of((1, 2, 4, 16)), choices.one_of(KINDS)
        layout = PageLayout(size, (Field(name="k", shape=(1,), dtype=DType.UINT8, layers=(0,)),))
        reaches = [
            ReachSpec() if kind in ("full", "other") else ReachSpec(kind, 0 if kind == "state" else 3 * size)
            for kind in kinds
        ]
        groups = tuple(
            GroupSpec(name=kind, layout=layout, reach=reach) for kind, reach in zip(kinds, reaches, strict=True)
        )
        least, most = choices.between(16, 30), choices.between(30, 80)
        base = MemoryPlan(
            page_size=size,
            groups=groups,
            num_pages=most,
            context=least * size - 8,
            max_requests=choices.between(1, 8),
            speculation=DRAFTS if drafts and "state" not in kinds else None,
        )
        spare = base.tokens_per_step
        self.least_pages, self._kinds, self._reaches, self._size = least, kinds, reaches, size
        self.floors = [
            least if reach.kind == "full" else 2 * spare if reach.kind == "state" else self._window(reach) + spare
            for reach in reaches
        ]
        self.plan = replace(base, frames=tuple(max(n, most * n // least) for n in self.floors))

    def _window(self, reach: ReachSpec) -> int:
        return reach_of(reach, self._size).held(2**30) + pages_for(256, self._size)

    def smaller(self, choices: Choices) -> MemoryPlan:
        """Frames of each group anywhere between half of what the context needs, for windows all of it, and all."""
        halves = choices.chance(30)
        frames = tuple(
            choices.between(n // 2 if halves and reach.kind == "full" else n, most)
            for n, most, reach in zip(self.floors, self.plan.frames, self._reaches, strict=True)
        )
        whole = [n for n, reach in zip(frames, self._reaches, strict=True) if reach.kind == "full"]
        num_pages = min(whole, default=self.plan.num_pages)
        return replace(self.plan, frames=frames, num_pages=num_pages)


class Resizes(Part):
    """Aims at other sizes at random, at which tenants have their floors, and wipes what is given back."""

    def __init__(self, choices: Choices, sizes: Sizes | Arenas) -> None:
        self._choices, self._sizes, self._turns = choices, sizes, count()
        self.happened: Counter[str] = Counter()

    def attach(self, loop: Loop) -> None:
        self._cache, self._loop = loop.cache, loop
        self.part = ResizingPart(loop.cache, self._wipe, count(step=0.02).__next__)
        self.part.attach(loop)

    def before_schedule(self) -> None:
        choices, resizing = self._choices, self._cache.resizing
        assert next(self._turns) < MOST_TURNS, "a request waits for ever"
        self.happened["reached"] += resizing.reached
        if choices.chance(10) and self._fits(plan := self._sizes.smaller(choices)):
            self.part.aim(plan, preempts=choices.chance(30))
            self.happened["reached at once" if resizing.reached else "waits"] += 1
            self._cache.audit()
        if choices.chance(2):
            held, plan = self._cache.statistics().usage > 0, resizing.plan
            self.part.aim(plan, released=True)
            self._cache.audit()
            if resizing.reached:
                assert all(frames.released == frames.total for frames in self._cache.statistics().frames.values())
                self.happened["released in use"] += held
            self.part.aim(plan)
        if self._cache.parts.tenants is not None and choices.chance(3):
            self._change()
        self.part.before_schedule()

    def _fits(self, plan: MemoryPlan) -> bool:
        try:
            for part in parts_for_tenants(self._cache):
                part.fits(plan)
        except InvalidInput:
            return False
        return True

    def _change(self) -> None:
        """A tenant has other terms, if what waits and runs allows it."""
        (part,) = parts_for_tenants(self._cache)
        part.attach(self._loop)
        before = part.listing()
        try:
            part.change(self._choices.one_of(TENANTS), terms(self._choices))
            self.happened["changed"] += 1
        except InvalidInput:
            assert part.listing() == before

    def _wipe(self) -> None:
        for memory in self._loop.device._memory:  # type: ignore[attr-defined]
            group = self._cache.groups[memory._group]
            last = group.room.last_of(group, group.room.ids.last_present)
            gone = np.arange(last + 1, len(memory._frames.hashes), dtype=np.int32)
            memory._frames.hashes[gone] = 0
            memory._frames.update_digests(gone)


def terms(choices: Choices) -> dict[str, object]:
    """Those of a tenant, so that the floors of all are at most the memory."""
    floor, ceiling = choices.one_of(("0", "10%", "25%", "33%")), choices.one_of((None, None, "50%", "80%"))
    return {"floor": floor, "ceiling": ceiling, "weight": choices.one_of((0.5, 1, 3))}


def run_resized_replay(
    seed: int, *, tiers: bool = False, drafts: bool = False, arena: bool = False, tenants: bool = False
) -> Counter[str]:
    """A replay in which every read and all invariants are checked; returns what has happened."""
    choices = Choices.seeded(seed)
    sizes = Arenas(choices, drafts=drafts) if arena else Sizes(choices, drafts=drafts)
    plan = sizes.plan
    settings = ReplaySettings(
        check="all",
        chunk=choices.one_of((8, 32, 256)),
        overlap=choices.chance(50) and not drafts,
        checkpoint_interval=choices.one_of((plan.page_size, 4 * plan.page_size, 64)),
        tiers=SimulatedTiers(host_tokens=100 * plan.page_size) if tiers else None,
        acceptance=0.6 if plan.speculation is not None else None,
        tenants=tenants_of({name: terms(choices) for name in TENANTS}) if tenants else (),
    )
    part = Resizes(choices, sizes)
    replay = Replay(plan, COST, settings, parts=[part])
    trace = arena_trace(choices, plan, 30)
    if tenants:
        trace = [replace(each, namespace=Namespace(salt=choices.one_of(("one/", "two/", "")))) for each in trace]
    result = replay.run(trace)
    counters = replay.cache.counters
    refused = sum(record.end == "refused" for record in result.records)
    return part.happened + Counter(
        moved=counters.moved_frames,
        hits=result.hit_tokens,
        evicted=replay.cache.resizing.num_evicted,
        ended=result.count("length"),
        refused=refused,
        preempted=result.preemptions,
    )
