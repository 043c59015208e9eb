"""ElasticMemory: the KV memory of a serving engine gets smaller and larger (`quire.cache.resizing`).

What leaves the pools is given back to the system, and what comes again is provided beside the steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.counters import Section, counter, gauge
from quire.engine.memory_pressure import PressureSizes
from quire.engine.messages import Later, MemoryHolder, MemoryReport, MemorySize, ResizeRequest
from quire.engine.tier_size import HostMemorySize
from quire.errors import InvalidInput, PlanError, QuireError, RefusedCombination
from quire.loop import Part
from quire.loop.resizing import ResizingPart
from quire.loop.tenants import parts_for_tenants
from quire.offload import offload_of
from quire.plan.budget import MemoryPlan, format_bytes
from quire.plan.plan import size_within
from quire.settings.setting import exact_bytes

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

logger = logging.getLogger(__name__)

_MOST_HOLDERS = 16
_LONGEST_S = 600.0


@dataclass(frozen=True, kw_only=True)
class MemoryCounters:
    """Gauges of the KV memory."""

    kv_asked_bytes: int = gauge("Bytes of KV memory that were asked for last; 0 while it is released.")
    resizes: int = counter("Times that another size of memory was asked for.", name="memory_resizes")


class ElasticMemory(ResizingPart):
    """The sizes of one engine. `floors` are asked before a size changes, and raise if it is too small for them."""

    def __init__(self, engine: EngineCore) -> None:
        super().__init__(engine.cache, self._resized)
        whole = engine.plan
        self._engine = engine
        self._whole = engine.capacity
        self._most = self._asked = engine.config.kv_memory or whole.pool_bytes
        self._least = engine.config.kv_memory_least or self._most
        self._num_bytes = whole.pool_bytes
        self._num_resizes = 0
        self.floors: list[Callable[[MemoryPlan], None]] = [self._fits_pins]
        self.floors += [part.fits for part in parts_for_tenants(engine.cache)]
        size_within(self._whole, self._least)
        self._resizing.provide = self._provide
        self._host = HostMemorySize(engine)

    # -- verbs

    def resize(self, request: ResizeRequest) -> Later[MemoryReport]:
        """Have other bytes. Raises InvalidInput or PlanError, with nothing changed, if they cannot be."""
        if not 0 <= request.wait_s <= _LONGEST_S:
            raise InvalidInput(f"wait_s is {request.wait_s:g}.", fix=f"wait from 0 to {_LONGEST_S:g} seconds.")
        if request.device_bytes is None and request.host_bytes is None:
            raise InvalidInput("no size was given.", fix="give device_bytes, host_bytes or both.")
        plan = self._resizing.plan if request.device_bytes is None else self._checked(request.device_bytes)
        if request.host_bytes is not None:
            self._host.check(request.host_bytes)
        preempts = request.preempt or (request.device_bytes is None and self.preempts)
        later = self._have(plan, released=self._resizing.is_released, preempts=preempts, wait_s=request.wait_s)
        self._asked = request.device_bytes or self._asked
        if request.host_bytes is not None:
            self._host.aim(request.host_bytes)
            self._go_on()
        return later

    def release(self, wait_s: float) -> Later[MemoryReport]:
        """Give all KV memory back; requests wait. Cached pages stay on lower tiers, where there are some."""
        return self._have(self._resizing.plan, released=True, preempts=True, wait_s=wait_s)

    def resume(self, wait_s: float) -> Later[MemoryReport]:
        """Have the size again that was asked for last."""
        preempts = self.preempts and not self._resizing.is_released
        return self._have(self._resizing.plan, released=False, preempts=preempts, wait_s=wait_s)

    def _have(self, plan: MemoryPlan, *, released: bool, preempts: bool, wait_s: float) -> Later[MemoryReport]:
        resizing, counted = self._resizing, self._cache.counters
        evicted, moved = resizing.num_evicted, counted.moved_frames
        plan_before, was_released, preempted = resizing.plan, resizing.is_released, self._preempts
        try:
            self.aim(plan, released=released, preempts=preempts)
        except PlanError:  # a GPU has no memory left, and no room has changed
            resizing.aim(plan_before, released=was_released)
            self._preempts = preempted
            raise
        self._num_resizes += 1

        def poll(waits: bool) -> MemoryReport | None:
            if waits and not self.is_done:
                return None
            return self.report(resizing.num_evicted - evicted, counted.moved_frames - moved)

        return Later(poll=poll, until_s=time.monotonic() + wait_s)

    @property
    def is_done(self) -> bool:
        return super().is_done and self._host.reached

    def report(self, evicted: int = 0, moved: int = 0) -> MemoryReport:
        """The sizes now."""
        resizing, done = self._resizing, self.is_done
        asked = 0 if resizing.is_released else self._asked
        return MemoryReport(
            done=done,
            released=resizing.is_released,
            device=MemorySize(asked=asked, reached=resizing.num_bytes, least=self._least, most=self._most),
            host=self._host.size(),
            evicted_pages=evicted,
            moved_frames=moved,
            holders=[] if done else self._holders(),
        )

    # -- inside

    def _checked(self, num_bytes: int) -> MemoryPlan:
        """The plan of so many bytes, if they can be."""
        if num_bytes > self._most or num_bytes < self._least:
            have = format_bytes(self._most) + " at most"
            if num_bytes < self._least:
                have = f"{format_bytes(self._least)} at least" if self._least < self._most else "a fixed size"
            most, least = exact_bytes(max(num_bytes, self._most)), exact_bytes(min(num_bytes, self._least))
            within = f"ask for {exact_bytes(self._least)} to {exact_bytes(self._most)}, or "
            raise InvalidInput(
                f"{format_bytes(num_bytes)} of KV memory were asked for, and this server was started with {have}.",
                fix=f"{within * (self._least < self._most)}start the server with --kv-memory {least}..{most}.",
            )
        plan = size_within(self._whole, num_bytes)
        for floor in self.floors:
            floor(plan)
        return plan

    def _fits_pins(self, plan: MemoryPlan) -> None:
        """The longest request must find room beside pinned retentions."""
        retention = offload_of(self._cache).retention
        pinned, most = retention.num_pinned, retention.most_pinned(plan)
        if pinned > most:
            raise PlanError(
                f"retentions have pinned {pinned} pages, and in {format_bytes(plan.pool_bytes)} of KV memory the "
                f"longest request leaves {most} of {plan.num_pages} to them.",
                fix="release pins (POST /v1/cache/release), or ask for more.",
            )

    def _resized(self) -> None:
        """Give back what no frame needs, and have the system provide what frames need again."""
        before, self._num_bytes = self._num_bytes, self._resizing.num_bytes
        for group, gone in self._resizing.released().items():
            backing = self._engine.pools[group].backing
            if backing.can_shrink and (num_bytes := len(backing.tensor) - gone) != backing.num_bytes:
                backing.resize(num_bytes)
        self._host.go_on()
        if self._num_bytes > before:
            threading.Thread(target=self._engine.populate, name="quire-populate", daemon=True).start()

    def _provide(self, gone: Mapping[int, int]) -> None:
        """Have memory for frames of all groups before they are handed out, or of none: a GPU may have none left."""
        with ExitStack() as undo:
            for group, without in gone.items():
                backing = self._engine.pools[group].backing
                if backing.can_shrink and (num_bytes := len(backing.tensor) - without) > backing.num_bytes:
                    undo.callback(backing.resize, backing.num_bytes)
                    backing.resize(num_bytes)
            undo.pop_all()

    def _holders(self) -> list[MemoryHolder]:
        cache, rows, plan = self._cache, self._cache.rows, self._cache.plan
        sizes = [each.layout.bytes_per_frame for each in plan.groups]
        sized = [(group, sizes[group.index]) for group in cache.groups if not group.frames.are_page_ids]
        requests = self._engine.scheduler.requests
        ends = {each.kv: plan.pages_of(each.num_prompt_tokens + each.max_tokens) for each in requests}
        found: list[MemoryHolder] = []
        for kv in rows.live.values():
            num_pages = len(rows.page_ids(kv))
            held = sum(size * group.num_of(kv.row, num_pages) for group, size in sized)
            most = sum(size * group.needs(max(num_pages, ends.get(kv, 0)), 0) for group, size in sized)
            name = kv.label if kv in ends else f"session of {kv.label}"
            found.append(MemoryHolder(name=name, num_bytes=held, most_bytes=max(held, most if kv in ends else 0)))
        pinned = offload_of(cache).retention.num_pinned * plan.bytes_per_page
        if pinned:
            found.append(MemoryHolder(name="pinned retentions", num_bytes=pinned, most_bytes=pinned))
        return sorted(found, key=lambda each: -each.most_bytes)[:_MOST_HOLDERS]

    def counters(self) -> list[Section]:
        asked = 0 if self._resizing.is_released else self._asked
        return [("", MemoryCounters(kv_asked_bytes=asked, resizes=self._num_resizes))]


class PressedMemory(ElasticMemory):
    """Sizes that follow the pressure of memory (`quire.engine.memory_pressure`)."""

    def __init__(self, engine: EngineCore) -> None:
        super().__init__(engine)
        self._sizes = PressureSizes(self._least, self._most)

    def resize(self, request: ResizeRequest) -> Later[MemoryReport]:
        later = super().resize(request)
        self._sizes.most = request.device_bytes or self._sizes.most
        return later

    @property
    def _looks(self) -> bool:
        return self._sizes.is_due and not self._resizing.is_released

    @property
    def is_due(self) -> bool:
        return super().is_due or self._looks

    def before_schedule(self) -> None:
        if self._looks:
            size = self._sizes.next(self._asked)
            if size != self._asked:
                self.follow(size)
        super().before_schedule()

    def follow(self, num_bytes: int) -> None:
        """Have so many bytes, unless they are too few for what has a floor."""
        try:
            super().resize(ResizeRequest(device_bytes=num_bytes, preempt=self.preempts))
        except QuireError as error:
            logger.warning("the KV memory stays as it is: %s", error)


def memory_parts(engine: EngineCore) -> Iterator[Part]:
    """The part for another size; none where the memory of a pool is fixed."""
    if not why_fixed(engine):
        yield PressedMemory(engine) if engine.config.kv_pressure else ElasticMemory(engine)
    elif engine.config.kv_memory_least is not None:
        raise RefusedCombination(
            f"--kv-memory from one size to another: {why_fixed(engine)}",
            fix="give one size, or on a GPU --elastic-gpu too.",
        )


def why_fixed(engine: EngineCore) -> str:
    """Why the KV memory of an engine is of fixed size; "" if it is not."""
    return next((pool.backing.why_fixed for pool in engine.pools if not pool.on_host and pool.backing.why_fixed), "")


def memory_report(engine: EngineCore) -> MemoryReport:
    """The size of an engine's memory, also if it is fixed."""
    part = engine.part(ElasticMemory)
    if part is not None:
        return part.report()
    size = engine.cache.resizing.num_bytes
    return MemoryReport(
        done=True,
        released=False,
        device=MemorySize(asked=size, reached=size, least=size, most=size),
        host=HostMemorySize(engine).size(),
        evicted_pages=0,
        moved_frames=0,
        holders=[],
    )


def memory_of(engine: EngineCore) -> ElasticMemory:
    """The part of an engine. Raises RefusedCombination if there is none."""
    part = engine.part(ElasticMemory)
    if part is None:
        raise RefusedCombination(
            f"the KV memory cannot change: {why_fixed(engine)}",
            fix="start the server with --kv-memory 1GiB..4GiB, and on a GPU with --elastic-gpu.",
        )
    return part
