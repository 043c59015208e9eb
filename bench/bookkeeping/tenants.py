"""What tenants cost a step: scheduler and cache, while memory is short and many requests wait.

    python -m bench.bookkeeping.tenants                                    1,000 tenants, 10,000 waiting requests
    python -m bench.bookkeeping.tenants --tenants 0                        the same load without tenants
    python -m bench.bookkeeping.tenants --kind window --pages 1048576

Each tenant is promised its part of half the memory. Prompts are new and the pool is full, so that each one evicts.
There is no model. Times are CPU milliseconds of whole steps: schedule, launch and settle.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass

import numpy as np

from quire.cache import KVCache
from quire.scheduler.policy import scheduling_policy
from quire.scheduler.request import Request
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.settings.tenants import Amount, TenantTerms
from quire.spec.events import Namespace
from quire.spec.group import ReachSpec
from quire.testing import small_plan

PAGE, PROMPT, OUTPUTS = 4, 1_024, 64


@dataclass(frozen=True, kw_only=True)
class Load:
    """Tenants, waiting requests, page ids, and rows of running requests; `kind` is that of a second group, or full."""

    tenants: int = 1_000
    waiting: int = 10_000
    pages: int = 131_072
    running: int = 512
    kind: str = "full"


class Server:
    """A scheduler and a cache whose queue stays as long as it is."""

    def __init__(self, load: Load) -> None:
        reaches = (ReachSpec(),) if load.kind == "full" else (ReachSpec(), ReachSpec(load.kind, 512))
        frames = (load.pages, load.pages if load.kind == "window" else 4 * load.running)[: len(reaches)]
        plan = small_plan(
            load.pages,
            PAGE,
            max_requests=load.running,
            context=PROMPT + OUTPUTS + PAGE,
            groups=("full", load.kind)[: len(reaches)],
            reaches=reaches,
            frames=frames,
        )
        share = Amount(share=0.5 / max(1, load.tenants))
        names = [f"t{number}" for number in range(1, load.tenants)]
        terms = [TenantTerms(name="default"), *(TenantTerms(name=n, keys=(n,), floor=share) for n in names)]
        self.cache = KVCache(plan, tenants=terms if load.tenants else ())
        policy = scheduling_policy("fcfs", self.cache.parts.tenants)
        self.scheduler = Scheduler(self.cache, policy, max_running=load.running, max_tokens=8_192)
        self._load = load
        self._random = np.random.default_rng(1)
        self._arrived = self.ended = 0

    def step(self, waiting: int) -> float:
        """One step, with so many waiting requests. Returns its CPU milliseconds."""
        while len(self.scheduler.waiting) < waiting:
            self._add()
        began = time.process_time_ns()
        step = self.scheduler.schedule()
        fence = self.cache.open_fence()
        for group in range(len(self.cache.groups)):
            self.cache.launch(group, step.batch, step.ends, step.draw_counts)
        self.scheduler.settle(step, np.ones(len(step.draws), dtype=np.int64))
        self.cache.close_fence(fence)
        taken = (time.process_time_ns() - began) / 1e6
        self.ended = self._arrived - self.scheduler.num_requests
        return taken

    def _add(self) -> None:
        tenant = self._arrived % max(1, self._load.tenants)
        prompt = self._random.integers(1, 1_000_000, PROMPT, dtype=np.int32)
        self.scheduler.add(
            Request(
                f"r{self._arrived}",
                prompt,
                SamplingParams(max_tokens=OUTPUTS),
                max_tokens=OUTPUTS,
                namespace=Namespace(salt=f"t{tenant}/" if tenant else ""),
            )
        )
        self._arrived += 1


def measured(load: Load, steps: int) -> str:
    """One line: what steps take once the pool is full of cached pages."""
    server = Server(load)
    while server.ended * (PROMPT + OUTPUTS) // PAGE < load.pages or not server.cache.counters.evicted_pages:
        server.step(2 * load.running)
    server.step(load.waiting)
    gc.collect()
    gc.disable()
    ended, taken = server.ended, sorted(server.step(load.waiting) for _ in range(steps))
    gc.enable()
    ended = server.ended - ended
    return (
        f"{load.tenants:,} tenants, {load.waiting:,} wait, {load.pages:,} page ids, {load.kind}: "
        f"median {taken[len(taken) // 2]:.2f}, of ten the slowest {taken[9 * len(taken) // 10]:.2f}, "
        f"longest {taken[-1]:.2f} ms; {server.scheduler.num_running} run, {ended} ended in {steps} steps"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What tenants cost a step.")
    for name in ("tenants", "waiting", "pages", "running"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Load, name))
    parser.add_argument("--kind", default="full", choices=("full", "window", "state"))
    parser.add_argument("--steps", type=int, default=200)
    options = vars(parser.parse_args())
    steps = options.pop("steps")
    print(measured(Load(**options), steps))


if __name__ == "__main__":
    main()
