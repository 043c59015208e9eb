"""Groups that share an arena beside pools that were split once, under loads that swing, in replays.

    python -m bench.arena [--json FILE] [--models gemma-3-27b,...] [--phases 2]
    python -m bench.arena --host [--seeds 20,21,22]         host memory behind an arena, in two mixes of groups
    python -m bench.arena --read FILE --plot FILE.svg       a picture of what was measured

Scheduler, cache and allocators are the production code. Both plans have the same bytes, and are made for the mean of
the load, which swings between many short requests and a few long ones; most begin with an earlier one, once it has
ended. There are two loads. One is more than fits: it says what running requests hold of the bytes when an allocation
fails, and in steps where one waits for room, which part of the allocated bytes was moved, and the steps that moved.
With the other, of turns, the engine keeps up, and the hit rate says what the cache is worth: with how many tokens are
cached, and how many of these a request can begin after.

With `--host` each arena has half of these bytes, and as many of host memory, from which everything is loaded. The load
is of turns. The host has the mix of the device, or that of what the load has cached at rest (`quire.plan.host`). With
`--ideal` it has several mixes, and the best one for each phase of the load bounds what a host would gain whose groups
share their bytes.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bench.harness import SEED, SHARED, machine, new_parser, save

from quire.cache import KVCache
from quire.cache.groups import resume_point
from quire.errors import OutOfPages
from quire.loop import Part
from quire.loop.part import Launched
from quire.memory.allocator.id_pool import IdPool
from quire.offload.host_groups import HostGroup
from quire.plan.budget import MemoryPlan
from quire.plan.mix import mix_of, uniform
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.plan.step_cost import CostModel
from quire.prefix.node import pages_to
from quire.scheduler.scheduler import Scheduler
from quire.sim.replay import Replay, ReplaySettings
from quire.sim.settings import SimulatedTiers
from quire.sim.trace_request import TraceRequest
from quire.spec.ids import Ids
from quire.spec.model import ModelSpec

GB = 10**9
MODELS = {
    "gemma-3-27b": ("google__gemma-3-27b-it", 24),
    "Nemotron-3-Nano": ("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 10),
    "Qwen3.5-35B": ("Qwen__Qwen3.5-35B-A3B", 16),
    "MiMo-V2-Flash": ("XiaomiMiMo__MiMo-V2-Flash", 12),
    "DeepSeek-V4-Flash": ("deepseek-ai__DeepSeek-V4-Flash", 4),
}
"""The configuration in `../shared/data/configs`, and the budget in GB."""
SHORT, LONG = (300, 2_000), (16_000, 100_000)
CHUNK = 8192
THINK_S = 10.0
"""The mean time between an answer and what goes on from it."""
MOST_TURNS = 8
"""Requests that run at once under the load of turns."""
MIXES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Frames in host memory of the group that is read in part, in times those at rest."""
_USABLE_EVERY = 50  # steps
COST = CostModel.from_flags(prefill_rate=20_000, decode_ms=5, key_ns=0)


def swinging(spec: ModelSpec, phases: int, tokens: int) -> list[TraceRequest]:
    """More than fits: requests of about so many tokens in each phase, short ones and long ones in turns, which arrive
    as fast as they are computed. Of three, two begin with an earlier one of their kind, up to their own length."""
    draw, now = random.Random(SEED), 0.0
    found: list[TraceRequest] = []
    numbers = np.random.default_rng(SEED)
    kinds: tuple[list[TraceRequest], ...] = ([], [])
    for phase in range(phases):
        left, earlier = tokens, kinds[phase % 2]
        while left > 0:
            length = _length(draw, spec, phase)
            before = draw.choice(earlier[-40:]) if earlier and draw.random() < 2 / 3 else None
            earlier.append(_request(draw, numbers, len(found), length, before, now))
            found.append(earlier[-1])
            own = len(found[-1].prompt) - (len(before.prompt) + len(before.output) if before is not None else 0)
            left -= len(found[-1].prompt) + len(found[-1].output)
            now += max(1, own) / 20_000
    return found


def turns(spec: ModelSpec, phases: int, scale: float, seed: int = SEED) -> list[TraceRequest]:
    """Requests that the engine keeps up with: 500 short ones or 80 long ones in each phase. Of three, two begin with
    all of an earlier one of their kind that is shorter, as a next turn does."""
    draw, now = random.Random(seed), 0.0
    found: list[TraceRequest] = []
    numbers = np.random.default_rng(seed)
    kinds: tuple[list[TraceRequest], ...] = ([], [])
    for phase in range(phases):
        earlier = kinds[phase % 2]
        for _ in range(int((500, 80)[phase % 2] * scale)):
            length = _length(draw, spec, phase)
            shorter = [each for each in earlier[-20:] if len(each.prompt) + len(each.output) < length]
            before = draw.choice(shorter) if shorter and draw.random() < 2 / 3 else None
            earlier.append(_request(draw, numbers, len(found), length, before, now))
            found.append(earlier[-1])
            now += (length - (len(before.prompt) + len(before.output) if before is not None else 0)) / 8_000
    return found


def _length(draw: random.Random, spec: ModelSpec, phase: int) -> int:
    return min(draw.randint(*(SHORT, LONG)[phase % 2]), spec.context_length - 1_000)


def _request(
    draw: random.Random, numbers: np.random.Generator, at: int, length: int, before: TraceRequest | None, now: float
) -> TraceRequest:
    """A request that begins with as much of the one before it as it is long, once that has ended."""
    shared = np.empty(0, dtype=np.int32)
    if before is not None:
        shared = np.concatenate((before.prompt, before.output))[:length]
    own = numbers.integers(1, 50_000, size=max(1, length - len(shared)), dtype=np.int32)
    output = numbers.integers(1, 50_000, size=draw.randint(50, 400), dtype=np.int32)
    return TraceRequest(
        request_id=f"r{at}",
        prompt=np.concatenate((shared, own)),
        output=output,
        arrival=now,
        after=before.request_id if before is not None else "",
        think=draw.expovariate(1 / THINK_S),
    )


class Watching(Part):
    """What a cache holds, step by step."""

    def __init__(self, cache: KVCache, scheduler: Scheduler, plan: MemoryPlan, budget: int) -> None:
        self._cache, self._budget = cache, budget
        self._strides = [group.layout.bytes_per_frame for group in plan.groups]
        self._scheduler = scheduler
        self.failed: list[float] = []
        self.waited: list[float] = []
        self.cached: list[int] = []
        self.usable: list[int] = []
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
        if len(self.cached) % _USABLE_EVERY == 0:
            self.usable.append(self._usable())
        self.cached.append(self._cache.tree.num_pages * self._cache.page_size)
        if self._scheduler.lacks_room:
            self.waited.append(self._held())

    def _usable(self) -> int:
        """Cached tokens before the last place of their path where a request can begin."""
        partial = [group for group in self._cache.groups if not group.reach.whole]
        cache, seen = self._cache, np.zeros(self._cache.pages.num_pages + 1, dtype=np.bool_)
        for node in cache.tree.nodes():
            if not node.children and node.parent is not None:
                pages = pages_to(node)
                seen[pages[: resume_point(partial, pages)[0]]] = True
        return int(np.count_nonzero(seen)) * cache.page_size

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
        "usable_tokens": statistics.mean(watching.usable),
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
    """Both plans of one model, under both loads."""
    config, size = MODELS[name]
    spec = ModelSpec.from_config(json.loads((SHARED / "data" / "configs" / f"{config}.json").read_text()))
    budget = int(size * GB * scale)
    settings = PlanSettings(
        kv_memory=budget, max_model_len=min(spec.context_length, 110_000), max_num_batched_tokens=CHUNK
    )
    tokens = make_plan(spec, settings).memory.num_tokens
    found: dict[str, Any] = {"budget": budget}
    for load, trace in (
        ("", swinging(spec, phases, 3 * tokens)),
        (", turns", turns(spec, 2 * phases, min(1.0, scale * scale))),
    ):
        lengths = [len(each.prompt) + len(each.output) for each in trace]
        plan = make_plan(spec, settings.changed(mix=mix_of(lengths, "the load")))
        found |= {f"tokens{load}": plan.memory.num_tokens, f"requests{load}": len(trace)}
        for kind, each in (("static", plan.memory), ("arena", plan.floating)):
            most = min(each.max_requests, MOST_TURNS) if load else each.max_requests
            found[f"{kind}{load}"] = measured(replace(each, max_requests=most), budget, trace)
    return found


class HostUse(Part):
    """The host frames in use, by group, after each step."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.hosts: Sequence[HostGroup] = ()

    def after_step(self, *, idle: bool) -> None:
        self.rows.append([host.num_used for host in self.hosts])


def arena_of_server(name: str, scale: float) -> tuple[ModelSpec, int, MemoryPlan]:
    """A model, the bytes of its arena, and the plan of a server, which is not told of its load."""
    config, size = MODELS[name]
    spec = ModelSpec.from_config(json.loads((SHARED / "data" / "configs" / f"{config}.json").read_text()))
    budget = int(size * GB * scale)
    settings = PlanSettings(
        kv_memory=budget, max_model_len=min(spec.context_length, 110_000), max_num_batched_tokens=CHUNK
    )
    plan = make_plan(spec, settings.changed(mix=uniform(8192, "requests of 8,192 tokens"))).floating
    return spec, budget, replace(plan, max_requests=min(plan.max_requests, MOST_TURNS))


def behind(name: str, seeds: Sequence[int], scale: float) -> list[dict[str, Any]]:
    """An arena with host memory of the same bytes behind it, in both mixes, for each seed of the load. The plan is that
    of a server, which is not told of its load."""
    spec, budget, plan = arena_of_server(name, scale)
    found: list[dict[str, Any]] = []
    for seed in seeds:
        trace = turns(spec, 4, scale * scale, seed)
        found.append({"seed": seed, "requests": len(trace)})
        for kind, each in (("device", replace(plan, at_rest=())), ("at_rest", plan)):
            use = HostUse()
            tiers = SimulatedTiers(host_memory=budget, load="always")
            replay = Replay(each, COST, ReplaySettings(chunk=CHUNK, tiers=tiers), parts=[use])
            use.hosts = replay.tiers.on_host.tiering.hosts
            result = replay.run(trace)
            used = np.mean(use.rows, axis=0)
            frames = np.array([host.num_frames for host in use.hosts])
            found[-1][kind] = {
                "hit_rate": result.hit_rate,
                "host_frames": frames.tolist(),
                "frames_used": (used / frames).tolist(),
                "bytes_used": float(used @ np.array([host.record_bytes for host in use.hosts])) / budget,
            }
    return found


def ideal(name: str, seeds: Sequence[int], scale: float) -> list[dict[str, Any]]:
    """As `behind`, with the frames of the other group `times` those at rest, and the bytes that this frees or takes
    from the group that is read whole. For each mix the tokens hit in each phase; and their sums: of the mix at rest, of
    the best one mix, and of the best one in each phase, as if the host had changed between them at no cost."""
    spec, budget, plan = arena_of_server(name, scale)
    found: list[dict[str, Any]] = []
    for seed in seeds:
        trace = turns(spec, 4, scale * scale, seed)
        sizes = [int((500, 80)[phase % 2] * scale * scale) for phase in range(4)]
        phase_of = {f"r{at}": phase for at, phase in enumerate(np.repeat(range(4), sizes).tolist())}
        hits: dict[str, list[int]] = {}
        for times in MIXES:
            at_rest = tuple(
                count if group.reach.whole else max(1, round(count * times))
                for group, count in zip(plan.groups, plan.at_rest, strict=True)
            )
            tiers = SimulatedTiers(host_memory=budget, load="always")
            replay = Replay(replace(plan, at_rest=at_rest), COST, ReplaySettings(chunk=CHUNK, tiers=tiers))
            by_phase = [0] * 4
            for record in replay.run(trace).records:
                by_phase[phase_of[record.request_id]] += record.hit_tokens
            hits[str(times)] = by_phase
        now, best = sum(hits["1.0"]), max(sum(each) for each in hits.values())
        oracle = sum(max(each[phase] for each in hits.values()) for phase in range(4))
        tokens = sum(len(each.prompt) for each in trace)
        found.append(
            {"seed": seed, "prompt_tokens": tokens, "hits": hits, "now": now, "best_mix": best, "best_by_phase": oracle}
        )
    return found


def draw(models: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Usable tokens and hit rates of both loads, in split pools and in an arena, of each model."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "quire", "svg.fonttype": "none"}  # text stays text
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 5.5), layout="constrained", sharex=True)
    figures = ("usable_tokens", "cached tokens of use, thousands", 1e-3), ("hit_rate", "hit rate, %", 100)
    for axis, title in zip(axes[0], ("more than fits", "turns of conversations"), strict=True):
        axis.set_title(title, fontsize=10)
    for row, (name, label, scale) in zip(axes, figures, strict=True):
        row[0].set_ylabel(label, fontsize=9)
        for axis, load in zip(row, ("", ", turns"), strict=True):
            for at, (kind, color) in enumerate((("static", "#b8c4d6"), ("arena", "#2f6fde"))):
                values = [scale * found[kind + load][name] for found in models.values()]
                places = [place + 0.4 * at - 0.2 for place in range(len(models))]
                bars = axis.bar(places, values, 0.38, color=color, label="split pools" if kind == "static" else kind)
                axis.bar_label(bars, fmt="%.0f", fontsize=8)
            axis.set_xticks(range(len(models)), models, fontsize=8)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = new_parser(__doc__ or "")
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    parser.add_argument("--phases", type=int, default=2, help="of short and long requests, in turns")
    parser.add_argument("--host", action="store_true", help="host memory behind an arena, in two mixes of groups")
    parser.add_argument("--ideal", action="store_true", help="host memory in the best mix for each phase of the load")
    parser.add_argument("--seeds", default="20,21,22", help="of the loads with --host and --ideal (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw both plans there")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing; draw what --json wrote")
    options = parser.parse_args()
    if options.read is not None:
        draw(json.loads(options.read.read_text())["models"], options.plot)
        return
    result: dict[str, Any] = machine(models={})
    for name in options.models.split(","):
        if options.host or options.ideal:
            seeds, compared = [int(each) for each in options.seeds.split(",")], ideal if options.ideal else behind
            result["models"][name] = compared(name, seeds, 0.25 if options.toy else 0.5)
            print(name, json.dumps(result["models"][name]), flush=True)
            continue
        found = result["models"][name] = compare(name, options.phases, 0.5 if options.toy else 1.0)
        for kind in [each for each in found if isinstance(found[each], dict)]:
            print(name, kind, json.dumps(found[kind]), flush=True)
    save(options.json, result)
    if options.plot is not None:
        draw(result["models"], options.plot)


if __name__ == "__main__":
    main()
