"""Eviction policies on recorded sessions of coding agents that run side by side and pin what they use.

    python -m bench.eviction.recorded --sessions 30,60,120 --spacing 30,90,300 --seed 1,2,3 --policy lru,density
    python -m bench.eviction.recorded --odd --seed 31,32 --columns lru,density,density:told,density:closes=1 --brief
    python -m bench.eviction.recorded --odd --seed 31 --columns density,density:flops,oracle:next --json RESULT.json
    python -m bench.eviction.recorded --odd --seed 33 --columns density,density:told --scheduled --json RESULT.json
    python -m bench.eviction.recorded --read RESULT.json [--plot recorded.svg] [--document docs/guides/eviction.md]

A column is a policy with marks: `told` (endings are told to it), `closes=0.5` (clients close that share of the
sessions), `flops` (pages are worth what they cost to compute, at Llama 3.1 8B's cost). `oracle:NAME` knows a part of
the future (`bench.eviction.oracles`). Each has its hit rate, and the share of the floating-point operations of prompts
that hits save. With `--json` cells are kept as they are measured: a run that was stopped goes on. Requests pin what
they use as in `bench.eviction.pinned`, or, `--scheduled`, as the scheduler of `quire replay` has it.

Sessions are drawn from one half of the data: even ones to design a policy, odd ones to judge it. They start at random
times. A block of 64 tokens is a page. An output does not come again: the next prompt has other ids there. A pool holds
at least the longest request. The data tells no endings: they are drawn (`bench.eviction.drawn_endings`), and hidden
unless a column is told.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from bench.eviction.drawn_endings import drawn_endings
from bench.eviction.oracles import Future, oracle
from bench.eviction.paged_trace import PagedTrace
from bench.eviction.pinned import optimal_pinned, replay_pinned
from bench.eviction.recorded_report import draw, lines, tables
from bench.eviction.report import write_section
from bench.eviction.scheduled import replay_scheduled
from bench.harness import SHARED, machine, save

from quire.cli.planned_model import planned_model
from quire.plan.step_cost import growth_of
from quire.prefix.evict import eviction_policy
from quire.sim.replay import ReplaySettings

PAGE = 64
PATH = SHARED / "data/coding-agents.jsonl.gz"
LONGEST = 120_000
ALL = ", longer prompts too"
SCHEDULED = ", scheduled"
MODEL = "llama-3.1-8b"
"""What prompts cost."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Which sessions run together. If the half has fewer, they are drawn again, as sessions of their own."""

    sessions: int
    spacing_s: float
    seed: int
    odd: bool = False
    longest_prompt: int = LONGEST

    def trace(self) -> PagedTrace:
        """The requests, by arrival."""
        draw = random.Random(self.seed)
        half = _sessions(PATH)[self.odd :: 2]
        chosen = [session for _ in range(-(-self.sessions // len(half))) for session in draw.sample(half, len(half))]
        rows: list[tuple[float, int, int, str, list[int]]] = []
        ids: dict[tuple[Any, ...], int] = {}
        start = 0.0
        for name, session in enumerate(chosen[: self.sessions]):
            shared, blocks = session["shared_tokens"] // PAGE, []
            for number, request in enumerate(session["requests"]):
                blocks = blocks[: request["same"]] + request["hash_ids"]
                prompt, output = request["in"], request["out"]
                if prompt > self.longest_prompt:
                    continue
                keys: list[tuple[Any, ...]] = [
                    (*session["shared_key"], block) if place < shared else (name, block)
                    for place, block in enumerate(blocks[: prompt // PAGE])
                ]
                keys += [(name, "output", number, place) for place in range(len(keys), (prompt + output) // PAGE)]
                pages = [ids.setdefault(key, len(ids)) for key in keys]
                rows.append((start + request["t"], prompt, output, str(name), pages))
            start += draw.expovariate(1 / self.spacing_s)
        rows.sort(key=lambda row: row[0])
        arrivals, prompts, outputs, names, paths = zip(*rows, strict=True)
        found = PagedTrace(
            page_size=PAGE,
            ids=np.concatenate([np.array(path, dtype=np.int32) for path in paths]),
            ends=np.cumsum([len(path) for path in paths]),
            prompt_tokens=np.array(prompts),
            output_tokens=np.array(outputs),
            arrivals=np.array(arrivals),
            priorities=np.zeros(len(rows), dtype=np.int64),
            endings=np.zeros(len(rows), dtype=np.int64),
            sessions=np.array(names),
            adapters=np.zeros(len(rows), dtype="U1"),
            salts=np.zeros(len(rows), dtype="U1"),
        )
        return replace(found, endings=drawn_endings(found))


@cache
def _sessions(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A policy, and what it is told."""

    policy: str
    told: bool = False
    flops: bool = False
    closes: float = 0.0

    @classmethod
    def of(cls, text: str) -> Column:
        """As `density:told:closes=0.5`, or `oracle:next`."""
        policy, *marks = text.split(":")
        if policy == "oracle":
            return cls(policy=text)
        known = dict(mark.partition("=")[::2] for mark in marks)
        unknown = known.keys() - {"told", "flops", "closes"}
        if unknown:
            raise SystemExit(f"{text}: unknown marks {', '.join(unknown)}")
        return cls(policy=policy, told="told" in known, flops="flops" in known, closes=float(known.get("closes", 0)))

    def replayed(self, trace: PagedTrace, pool: int, *, scheduled: bool = False) -> tuple[float, float]:
        """Its hit rate and the share of the work that it saves, in a pool of so many tokens."""
        kind, _, name = self.policy.partition(":")
        if scheduled:
            settings = ReplaySettings(
                policy=self.policy,
                endings="told" if self.told else "hidden",
                eviction_worth="flops" if self.flops else "tokens",
            )
            shown = trace if self.told else _hidden(trace)
            found = replay_scheduled(shown, pool, settings, growth=growth(), closes=self.closes)
        elif kind == "oracle":
            future = Future(trace)
            found = replay_pinned(_hidden(trace), pool, oracle(name, future), begun=future.begin)
        else:
            policy = eviction_policy(self.policy)
            policy.priced_by(growth() * PAGE if self.flops else 0.0)
            found = replay_pinned(
                trace if self.told else _hidden(trace), pool, policy, closes=self.closes, told=self.told
            )
        return found.hit_rate(trace), found.saved_share(trace, growth())


@cache
def growth() -> float:
    """`CostModel.growth` of the model."""
    model = planned_model(MODEL)
    assert model.weights is not None
    return growth_of(model.spec, model.weights.num_parameters)


def _hidden(trace: PagedTrace) -> PagedTrace:
    return replace(trace, endings=np.zeros(len(trace), dtype=np.int64))


def measured(
    kind: Composition, parts: list[str], columns: list[str], cells: dict[str, list[float]], *, scheduled: bool
) -> None:
    """Replay what `cells` do not have."""

    def place(part: str, column: str) -> str:
        half = "odd" if kind.odd else "even"
        half += ("" if kind.longest_prompt == LONGEST else ALL) + SCHEDULED * scheduled
        return f"{half}/{kind.sessions}/{kind.spacing_s:g}/{kind.seed}/{part}/{column}"

    wanted = [(part, column) for part in parts for column in (*columns, "lru", "optimum")]
    if all(place(*each) in cells for each in wanted):
        return
    trace = kind.trace()
    working_set = trace.bounds().working_set_tokens
    longest = PAGE * max(request.held_pages for request in trace)
    for part, column in wanted:
        if place(part, column) in cells:
            continue
        pool = max(longest, int(working_set * Fraction(part)))
        if column == "optimum":
            cells[place(part, column)] = [round(optimal_pinned(trace, pool) / float(trace.prompt_tokens.sum()), 6)]
        else:
            cells[place(part, column)] = [
                round(each, 6) for each in Column.of(column).replayed(trace, pool, scheduled=scheduled)
            ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", default="30,60,120")
    parser.add_argument("--spacing", default="30,90,300", help="mean seconds between starts (%(default)s)")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--odd", action="store_true", help="the half that a policy is judged by")
    parser.add_argument("--pool", default="1/32,1/16,1/8,1/4", help="parts of the working set (%(default)s)")
    parser.add_argument("--all", action="store_true", help=f"also prompts of more than {LONGEST:,} tokens")
    parser.add_argument("--scheduled", action="store_true", help="through the scheduler of `quire replay`")
    parser.add_argument("--columns", default="density", help="policies with marks (%(default)s)")
    parser.add_argument("--json", type=Path, help="keep cells in this file")
    parser.add_argument("--read", type=Path, help="show the cells of a file, and measure none")
    parser.add_argument("--document", type=Path, help="write the tables into this document")
    parser.add_argument("--plot", type=Path, help="draw the gaps into an SVG or PNG file")
    parser.add_argument("--brief", action="store_true", help="the summary alone")
    given = parser.parse_args()
    path = given.read or given.json
    result: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {"cells": {}}
    cells: dict[str, list[float]] = result["cells"]
    grid = itertools.product(*(each.split(",") for each in (given.sessions, given.spacing, given.seed)))
    for sessions, spacing, seed in () if given.read else grid:
        kind = Composition(
            sessions=int(sessions),
            spacing_s=float(spacing),
            seed=int(seed),
            odd=given.odd,
            longest_prompt=1 << 62 if given.all else LONGEST,
        )
        before = set(cells)
        measured(kind, given.pool.split(","), given.columns.split(","), cells, scheduled=given.scheduled)
        for key in [] if given.brief else cells.keys() - before:
            print(key, " ".join(f"{100 * value:.2f}" for value in cells[key]), flush=True)
        if given.json and cells.keys() - before:
            save(given.json, result | {"machine": machine()})
    print("\n".join(lines(cells)))
    if given.document:
        write_section(
            f"{result['machine']['cpu']}, {result['machine']['date']}.\n\n{tables(cells)}", given.document, "recorded"
        )
    if given.plot:
        draw(cells, given.plot)


if __name__ == "__main__":
    main()
