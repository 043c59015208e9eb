#!/usr/bin/env python
"""Eviction policies on recorded and generated traces: hits, recomputed work, first tokens, and CPU time.

    python -m bench.eviction.compare --json bench/results/eviction-0.7.json      all cells that the file does not have
    python -m bench.eviction.compare --seeds 11,12 --traces agent-sessions --policies lru,density --json RESULT.json
    python -m bench.eviction.compare --again density --json RESULT.json  measures the cells of one policy again
    python -m bench.eviction.compare --load --seeds 11 --json RESULT.json        the cells with requests side by side
    python -m bench.eviction.compare --read RESULT.json [--plot eviction.svg] [--document docs/guides/eviction.md]
    python -m bench.eviction.compare --toy  small workloads, in seconds; CI runs it

A cell is a trace, a seed, a page size, a pool (a part of the working set), a policy, and how requests run:

- `one`: one request at a time, through the tree of the cache (`bench.eviction.sequential`). The optimum is known here.
- `load`: through scheduler and cache, at the times of the trace, on a simulated node of 4 H100 (`quire.sim.replay`).

`recomputed` are floating-point operations on prompt tokens that were not hit, of Llama 3.1 8B: a token costs more the
later it comes. `ttft_s` is the mean time to the first token; with one request at a time nothing waits. `decision_us` is
CPU time in the policy for each leaf that is evicted, with all that it learned for that. Cells are kept in the file as
they are measured, so a run that was stopped goes on. Traces that are not on this machine are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from bench.eviction.cells import FILES, TRACES, Missing, Source, paged
from bench.eviction.paged_trace import PagedTrace
from bench.eviction.report import draw, tables, write_section
from bench.eviction.sequential import replay_in_order
from bench.eviction.timed_policy import TimedPolicy
from bench.harness import ROOT

from quire.cli.planned_model import planned_model
from quire.plan.step_cost import CostModel
from quire.prefix.evict import POLICIES, eviction_policy
from quire.sim.hit_bounds import HitBounds
from quire.sim.pools import plain_pools
from quire.sim.replay import Replay, ReplaySettings

Counts = npt.NDArray[np.int64]

MODEL, DEVICE, DEVICES = "llama-3.1-8b", "h100-80gb", 4
CHUNK, MAX_RUNNING = 2048, 64
COMPARED = ("lru", "slru", "lfu", "gdsf", "sieve", "s3fifo", "density")
OTHERS = ("fifo", "mru", "filo", "priority")
"""Policies of Quire that are not compared: no trace here is theirs."""
POOLS = ("1/16", "1/8", "1/4", "1/2")
PAGES = (64, 16)
TUNED, HELD_OUT = (1, 2, 3, 4, 5), (11, 12, 13, 14, 15)
"""Seeds that a policy may be tuned on, and seeds that were not looked at."""
LOADED = ("lru", "density")
LOAD_LIMIT = 1_000
"""Requests of a trace that is replayed under load."""
TOYS = {"chat": "chat:requests=40", "agent-sessions": "agent-sessions:sessions=1"}


class Cell(NamedTuple):
    """Where a row belongs."""

    mode: str
    trace: str
    seed: int
    page: int
    pool: str
    policy: str

    @property
    def key(self) -> str:
        """In the file."""
        return "/".join(
            map(str, (self.mode, self.trace, self.seed, self.page, self.pool.replace("/", ":"), self.policy))
        )


@dataclass(frozen=True, slots=True)
class Prices:
    """What prompts cost: the model's steps, and floating-point operations per second of them."""

    cost: CostModel
    flops: float

    def recomputed(self, starts: Counts, ends: Counts) -> float:
        """Operations on tokens `starts..ends - 1` of each prompt."""
        return self.flops * sum(map(self.cost.chunk_seconds, starts.tolist(), (ends - starts).tolist()))

    def first_token_s(self, starts: Counts, ends: Counts) -> float:
        """The mean time of prompts that are computed alone, in chunks."""
        return float(np.mean([self._alone(*each) for each in zip(starts.tolist(), ends.tolist(), strict=True)]))

    def _alone(self, start: int, end: int) -> float:
        whole, rest = divmod(end - start, CHUNK)
        cost = self.cost
        compute = whole * max(cost.weights, cost.token * CHUNK) + (max(cost.weights, cost.token * rest) if rest else 0)
        pairs = cost.chunk_seconds(start, end - start) - cost.token * (end - start)
        return compute + pairs + (whole + (rest > 0)) * cost.launch


@cache
def prices(page: int) -> Prices:
    """Of Llama 3.1 8B on the simulated node."""
    model = planned_model(MODEL)
    assert model.weights is not None
    active = model.weights.num_parameters
    cost = CostModel.from_device(
        DEVICE,
        model.spec,
        model.spec.groups(page),
        weight_bytes=model.weights.bytes_on_rank(),
        active_parameters=active,
        ranks=DEVICES,
    )
    return Prices(cost, 2 * active / cost.token)


def row_of(hits: Counts, prompts: Counts, page: int) -> dict[str, Any]:
    """What requests that hit so many tokens of their prompts cost, one at a time."""
    starts = np.minimum(hits, prompts - 1)
    return {
        "hit": round(float(hits.sum() / prompts.sum()), 5),
        "recomputed": float(f"{prices(page).recomputed(starts, prompts):.4g}"),
        "ttft_s": round(prices(page).first_token_s(starts, prompts), 5),
    }


class Grid:
    """The cells of one result file, and what is measured so far."""

    def __init__(self, path: Path | None, sources: list[Source], *, toy: bool) -> None:
        self.path, self._sources, self._toy = path, sources, toy
        self.result: dict[str, Any] = {"traces": {}, "cells": {}, "skipped": {}}
        if path is not None and path.exists():
            self.result = json.loads(path.read_text())
        self._commit = _output("git", "rev-parse", "--short", "HEAD")
        self._saved = time.monotonic()

    def forget(self, policies: list[str]) -> None:
        """Measure these again."""
        for key in [key for key in self.result["cells"] if key.rsplit("/", 1)[1] in policies]:
            del self.result["cells"][key]

    def run(self, mode: str, pages: list[int], pools: list[str], policies: list[str]) -> None:
        """Measure every cell that is missing."""
        for source in self._sources:
            for page in pages:
                missing = [cell for cell in self._cells(mode, source, page, pools, policies) if not self._has(cell)]
                if not missing:
                    continue
                try:
                    (self._one if mode == "one" else self._load)(source, page, missing)
                except Missing as why:
                    self.result["skipped"][source.name] = str(why)
                    print(f"{source.name}: skipped, {why}", flush=True)
                    break
                if time.monotonic() - self._saved > 20:
                    self.save()
        self.save()

    def save(self) -> None:
        """Write the file."""
        self.result["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        self.result["date"] = time.strftime("%Y-%m-%d")
        self._saved = time.monotonic()
        if self.path is not None:
            part = self.path.with_suffix(".part")
            part.write_text(_lines(self.result))
            part.rename(self.path)

    def _has(self, cell: Cell) -> bool:
        return cell.key in self.result["cells"]

    def _cells(self, mode: str, source: Source, page: int, pools: list[str], policies: list[str]) -> Iterator[Cell]:
        for pool in pools:
            for policy in (*policies, *(("optimum",) if mode == "one" else ())):
                yield Cell(mode, source.name, source.seed, page, pool, policy)

    def _one(self, source: Source, page: int, cells: list[Cell]) -> None:
        trace = PagedTrace.of(source.open(), page) if self._toy else paged(source, page)
        bounds = trace.bounds()
        self._about(source, page, len(trace), bounds)
        for cell in cells:
            pool = int(bounds.working_set_tokens * Fraction(cell.pool))
            if cell.policy == "optimum":
                hits = np.zeros(len(trace), dtype=np.int64)
                held = np.array([each.held_pages for each in trace])
                hits[held <= pool // page] = bounds.optimal_hits(pool)
                self._add(cell, row_of(hits, trace.prompt_tokens, page))
                continue
            found = replay_in_order(trace, pool, eviction_policy(cell.policy))
            row = row_of(found.hit_tokens, trace.prompt_tokens, page)
            if source.seed in (0, HELD_OUT[0]) and cell.pool == "1/8":
                timed = TimedPolicy(eviction_policy(cell.policy))
                replay_in_order(trace, pool, timed)
                row["decision_us"] = round(timed.seconds * 1e6 / max(1, timed.num_victims), 2)
            if found.refused.any():
                row["refused"] = int(found.refused.sum())
            self._add(cell, row)

    def _load(self, source: Source, page: int, cells: list[Cell]) -> None:
        trace = source.open(limit=LOAD_LIMIT)
        bounds = HitBounds(trace, page)
        longest = max(map(sum, trace.lengths))
        prompts = {each.request_id: len(each.prompt) for each in trace}
        for cell in cells:
            pool = max(int(bounds.working_set_tokens * Fraction(cell.pool)), longest + page)
            plan = plain_pools(pool, page, context=longest + 1, max_running=MAX_RUNNING)
            result = Replay(plan, prices(page).cost, ReplaySettings(policy=cell.policy, chunk=CHUNK)).run(trace)
            hits = np.array([record.hit_tokens for record in result.records])
            row = row_of(hits, np.array([prompts[record.request_id] for record in result.records]), page)
            row["ttft_s"] = round(result.mean_first_token_seconds, 5)
            row["pool_tokens"], row["preemptions"] = pool, result.preemptions
            self._add(cell, row)

    def _about(self, source: Source, page: int, requests: int, bounds: HitBounds) -> None:
        self.result["traces"][f"{source.name}/{source.seed}/{page}"] = {
            "requests": requests,
            "prompt_tokens": bounds.prompt_tokens,
            "working_set": bounds.working_set_tokens,
            "ideal": round(bounds.ideal_hit_rate, 5),
        }

    def _add(self, cell: Cell, row: dict[str, Any]) -> None:
        self.result["cells"][cell.key] = row | {"commit": self._commit}
        print(cell.key, json.dumps(row), flush=True)


def _lines(result: dict[str, Any]) -> str:
    """JSON with a line for each cell."""
    parts = []
    for name, value in result.items():
        if isinstance(value, dict):
            inner = ",\n".join(f" {json.dumps(key)}: {json.dumps(value[key])}" for key in sorted(value))
            parts.append(f"{json.dumps(name)}: {{\n{inner}\n}}")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--json", type=Path, help="the file of results, which is added to")
    parser.add_argument("--read", type=Path, help="print the tables of a file and measure nothing")
    parser.add_argument("--document", type=Path, help="a document whose tables are replaced")
    parser.add_argument("--plot", type=Path, help="draw hit rates by pool into an SVG or PNG file")
    parser.add_argument("--load", action="store_true", help="requests side by side, on a simulated node")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--seeds", default=",".join(map(str, (*HELD_OUT, *TUNED))), help="of generated traces")
    parser.add_argument("--pages", default=",".join(map(str, PAGES)))
    parser.add_argument("--pools", default=",".join(POOLS), help="parts of the working set")
    parser.add_argument("--policies", help="(all that are compared)")
    parser.add_argument("--again", default="", help="policies whose cells are measured again")
    given = parser.parse_args()
    if given.read is not None:
        result = json.loads(given.read.read_text())
        print(tables(result))
        if given.document is not None:
            write_section(tables(result, largest_only=True), given.document)
        if given.plot is not None:
            draw(result, given.plot)
        return
    new = tuple(name for name in POLICIES if name not in (*COMPARED, *OTHERS))
    policies = given.policies.split(",") if given.policies else [*(LOADED if given.load else COMPARED), *new]
    seeds, names = list(map(int, given.seeds.split(","))), given.traces.split(",")
    if given.toy:
        names, seeds = list(TOYS), [HELD_OUT[0]]
    sources = [
        Source(name, 0 if name in FILES else seed, TOYS[name] if given.toy else "") for seed in seeds for name in names
    ]
    grid = Grid(given.json, list(dict.fromkeys(sources)), toy=given.toy)
    grid.forget(given.again.split(","))
    pages, pools = list(map(int, given.pages.split(","))), given.pools.split(",")
    if not given.load:
        grid.run("one", pages, pools, policies)
    if given.load or given.toy:
        grid.run("load", pages[:1] if given.toy else pages, pools[-1:] if given.toy else pools, policies)
    print(tables(grid.result))


if __name__ == "__main__":
    main()
