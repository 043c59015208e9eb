"""Groups that share an arena beside pools that were split once, under loads that swing, in replays.

    python -m bench.arena [--json FILE] [--models gemma-3-27b,...] [--phases 4]

The load swings between many short requests and a few long ones; most go on from an earlier one, once it has ended.
Scheduler, cache and allocators are the production code. Both plans have the same bytes, and are made for the mean of
the load. For both it says what running requests hold of the bytes when an allocation fails, and in steps where one
waits for room; how many tokens are cached, and the hit rate; for the arena also which part of the allocated bytes was
moved, and the steps that moved. The load is more than fits, so an arena runs more requests, which leave less to the
cache. Two more replays run at most half as many as split pools can.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from bench.harness import SEED, SHARED, machine, new_parser, save

from quire.cache import KVCache
from quire.errors import OutOfPages
from quire.loop import Part
from quire.loop.part import Launched
from quire.memory.allocator.id_pool import IdPool
from quire.plan.budget import MemoryPlan
from quire.plan.mix import mix_of
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.plan.step_cost import CostModel
from quire.scheduler.scheduler import Scheduler
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.trace_request import TraceRequest
from quire.spec.ids import Ids
from quire.spec.model import ModelSpec

GB = 10**9
MODELS = {
    "gemma-3-27b": ("google__gemma-3-27b-it", 24),
    "Nemotron-3-Nano": ("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 10),
    "Qwen3.5-35B": ("Qwen__Qwen3.5-35B-A3B", 16),
    "MiMo-V2-Flash": ("XiaomiMiMo__MiMo-V2-Flash", 12),
}
"""The configuration in `../shared/data/configs`, and the budget in GB."""
SHORT, LONG = (300, 2_000), (16_000, 100_000)
CHUNK = 8192
THINK_S = 10.0
"""The mean time between an answer and what goes on from it."""
COST = CostModel.from_flags(prefill_rate=20_000, decode_ms=5, key_ns=0)


def swinging(spec: ModelSpec, phases: int, tokens: int) -> list[TraceRequest]:
    """Requests of about so many tokens in each phase, short ones and long ones in turns. Of three, two begin with all
    of an earlier one of their kind, if that leaves them within the model's context."""
    draw, now = random.Random(SEED), 0.0
    found: list[TraceRequest] = []
    numbers = np.random.default_rng(SEED)
    kinds: tuple[list[TraceRequest], ...] = ([], [])
    for phase in range(phases):
        low, high = (SHORT, LONG)[phase % 2]
        left, earlier = tokens, kinds[phase % 2]
        while left > 0:
            length, shared = min(draw.randint(low, high), spec.context_length - 1_000), np.empty(0, dtype=np.int32)
            after, think = "", draw.expovariate(1 / THINK_S)
            if earlier and draw.random() < 2 / 3:
                before = draw.choice(earlier[-40:])
                after = before.request_id
                shared = np.concatenate((before.prompt, before.output))[:length]
            own = numbers.integers(1, 50_000, size=max(1, length - len(shared)), dtype=np.int32)
            output = numbers.integers(1, 50_000, size=draw.randint(50, 400), dtype=np.int32)
            prompt = np.concatenate((shared, own))
            found.append(
                TraceRequest(
                    request_id=f"r{len(found)}", prompt=prompt, output=output, arrival=now, after=after, think=think
                )
            )
            earlier.append(found[-1])
            left -= len(prompt) + len(output)
            now += len(own) / 20_000  # as fast as they are computed
    return found


class Watching(Part):
    """What a cache holds, step by step."""

    def __init__(self, cache: KVCache, scheduler: Scheduler, plan: MemoryPlan, budget: int) -> None:
        self._cache, self._budget = cache, budget
        self._strides = [group.layout.bytes_per_frame for group in plan.groups]
        self._scheduler = scheduler
        self.failed: list[float] = []
        self.waited: list[float] = []
        self.cached: list[int] = []
        self.moved = self.allocated = self.largest_move = 0
        self._moved_now = 0
        self.seconds: list[tuple[float, int]] = []
        self._began = time.thread_time()
        cache.parts.moved.append(self._copied)
        self._extend = cache.extend
        cache.extend = self.extend  # type: ignore[method-assign]
        for group, stride in zip(cache.groups, self._strides, strict=True):
            self._count(group.frames.allocator.ids, stride)

    def extend(self, kvs: Any, counts: Any) -> None:
        """As the cache's, and what running requests hold where it fails."""
        try:
            self._extend(kvs, counts)
        except OutOfPages:
            self.failed.append(self._held())
            raise

    def _count(self, ids: IdPool, stride: int) -> None:
        """Add up the bytes of frames that are allocated."""
        real = ids.set_aside

        def set_aside(count: int) -> Ids:
            found = real(count)
            self.allocated += stride * count
            return found

        ids.set_aside = set_aside  # type: ignore[method-assign]

    def launched(self, launched: Launched) -> None:
        self.cached.append(self._cache.tree.num_pages * self._cache.page_size)
        if self._scheduler.lacks_room:
            self.waited.append(self._held())

    def _held(self) -> float:
        """What running requests hold of the bytes."""
        held = sum(stride * g.num_held for g, stride in zip(self._cache.groups, self._strides, strict=True))
        return held / self._budget

    def after_step(self, *, idle: bool) -> None:
        now = time.thread_time()
        self.seconds.append((now - self._began, self._moved_now))
        self._began, self._moved_now = now, 0

    def _copied(self, group: int, sources: Ids, targets: Ids) -> None:
        size = len(sources) * self._strides[group]
        self.moved += size
        self._moved_now += size
        self.largest_move = max(self.largest_move, size)


def measured(plan: MemoryPlan, budget: int, trace: Sequence[TraceRequest]) -> dict[str, Any]:
    """One replay."""
    settings = ReplaySettings(chunk=CHUNK)
    parts: list[Part] = []
    replay = Replay(plan, COST, settings, parts=parts)
    watching = Watching(replay.cache, replay.scheduler, plan, budget)
    replay.loop.parts += (watching,)
    replay.loop._launched += (watching.launched,)
    replay.loop._after_step += (watching.after_step,)
    result = replay.run(trace)
    steps = [seconds for seconds, _ in watching.seconds]
    moving = [seconds for seconds, moved in watching.seconds if moved]
    return {
        "used_mean": statistics.mean(watching.failed) if watching.failed else None,
        "used_min": min(watching.failed, default=None),
        "waited_mean": statistics.mean(watching.waited) if watching.waited else None,
        "failures": len(watching.failed),
        "preemptions": result.preemptions,
        "hit_rate": result.hit_rate,
        "cached_tokens": statistics.mean(watching.cached),
        "seconds": result.seconds,
        "steps": result.steps,
        "most_running": result.most_running,
        "moved_of_allocated": watching.moved / max(1, watching.allocated),
        "moved_bytes": watching.moved,
        "largest_move": watching.largest_move,
        "manager_ms": 1e3 * statistics.median(steps),
        "moving_steps": len(moving),
        "moving_ms": 1e3 * statistics.median(moving) if moving else None,
    }


def compare(name: str, phases: int, scale: float) -> dict[str, Any]:
    """Both plans of one model."""
    config, size = MODELS[name]
    spec = ModelSpec.from_config(json.loads((SHARED / "data" / "configs" / f"{config}.json").read_text()))
    budget = int(size * GB * scale)
    settings = PlanSettings(
        kv_memory=budget, max_model_len=min(spec.context_length, 110_000), max_num_batched_tokens=CHUNK
    )
    tokens = make_plan(spec, settings).memory.num_tokens
    trace = swinging(spec, phases, 3 * tokens)
    lengths = [len(each.prompt) + len(each.output) for each in trace]
    plan = make_plan(spec, settings.changed(mix=mix_of(lengths, "the load")))
    plans = {"static": plan.memory, "arena": plan.floating}
    found: dict[str, Any] = {"tokens": plan.memory.num_tokens, "requests": len(trace), "budget": budget}
    found |= {kind: measured(each, budget, trace) for kind, each in plans.items()}
    few = max(1, found["static"]["most_running"] // 2)
    return found | {
        f"{kind}, few": measured(replace(each, max_requests=few), budget, trace) for kind, each in plans.items()
    }


def main() -> None:
    parser = new_parser(__doc__ or "")
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    parser.add_argument("--phases", type=int, default=4, help="of short and long requests, in turns")
    options = parser.parse_args()
    result: dict[str, Any] = machine(models={})
    for name in options.models.split(","):
        found = result["models"][name] = compare(
            name, 2 if options.toy else options.phases, 0.5 if options.toy else 1.0
        )
        for kind in [each for each in found if isinstance(found[each], dict)]:
            print(name, kind, json.dumps(found[kind]), flush=True)
    save(options.json, result)


if __name__ == "__main__":
    main()
