"""Eviction policies on recorded sessions of coding agents that run side by side and pin what they use.

    python -m bench.eviction.recorded --sessions 30,60,120 --spacing 30,90,300 --seed 1,2,3 --policy lru,density
    python -m bench.eviction.recorded --odd --seed 21,22,23,24,25 --closes 0,0.5,1 --brief

Sessions are drawn from one half of the data: even ones to design a policy, odd ones to judge it. They start at random
times. A block of 64 tokens is a page. An output does not come again: the next prompt has other ids there. A pool holds
at least the longest request. Endings are told where the data has them.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from bench.eviction.paged_trace import PagedTrace
from bench.eviction.pinned import optimal_pinned, replay_pinned
from bench.harness import SHARED

from quire.prefix.evict import eviction_policy

PAGE = 64
PATH = SHARED / "data/coding-agents.jsonl.gz"
ENDINGS = {"answer": 1, "tool": 2}
"""Of the `ending` of a request, in `PagedRequest`."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Which sessions run together. If the half has fewer, they are drawn again, as sessions of their own."""

    sessions: int
    spacing_s: float
    seed: int
    odd: bool = False
    longest_prompt: int = 120_000

    def trace(self) -> PagedTrace:
        """The requests, by arrival."""
        draw = random.Random(self.seed)
        half = _sessions(PATH)[self.odd :: 2]
        chosen = [session for _ in range(-(-self.sessions // len(half))) for session in draw.sample(half, len(half))]
        rows: list[tuple[float, int, int, int, str, list[int]]] = []
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
                ending = ENDINGS.get(request.get("ending", ""), 0)
                rows.append((start + request["t"], prompt, output, ending, str(name), pages))
            start += draw.expovariate(1 / self.spacing_s)
        rows.sort(key=lambda row: row[0])
        arrivals, prompts, outputs, endings, names, paths = zip(*rows, strict=True)
        return PagedTrace(
            page_size=PAGE,
            ids=np.concatenate([np.array(path, dtype=np.int32) for path in paths]),
            ends=np.cumsum([len(path) for path in paths]),
            prompt_tokens=np.array(prompts),
            output_tokens=np.array(outputs),
            arrivals=np.array(arrivals),
            priorities=np.zeros(len(rows), dtype=np.int64),
            endings=np.array(endings),
            sessions=np.array(names),
            adapters=np.zeros(len(rows), dtype="U1"),
            salts=np.zeros(len(rows), dtype="U1"),
        )


@cache
def _sessions(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", default="30,60,120")
    parser.add_argument("--spacing", default="30,90,300", help="mean seconds between starts (%(default)s)")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--odd", action="store_true", help="the half that a policy is judged by")
    parser.add_argument("--pool", default="1/32,1/16,1/8,1/4", help="parts of the working set (%(default)s)")
    parser.add_argument("--policy", default="lru,density")
    parser.add_argument("--closes", default="0", help="shares of the sessions that are closed at their end")
    parser.add_argument("--brief", action="store_true", help="the summary alone")
    given = parser.parse_args()
    columns = [*itertools.product(given.policy.split(","), map(float, given.closes.split(",")))]
    found: dict[str, list[list[float]]] = defaultdict(list)
    grid = itertools.product(*(each.split(",") for each in (given.sessions, given.spacing, given.seed)))
    for sessions, spacing, seed in grid:
        kind = Composition(sessions=int(sessions), spacing_s=float(spacing), seed=int(seed), odd=given.odd)
        trace = kind.trace()
        working_set = trace.bounds().working_set_tokens
        longest = PAGE * max(request.held_pages for request in trace)
        for part in given.pool.split(","):
            pool = max(longest, int(working_set * Fraction(part)))
            lru = replay_pinned(trace, pool, eviction_policy("lru")).hit_rate(trace)
            best = optimal_pinned(trace, pool) / float(trace.prompt_tokens.sum())
            rates = [
                replay_pinned(trace, pool, eviction_policy(policy), closes=closes).hit_rate(trace)
                for policy, closes in columns
            ]
            found[part].append([lru, best, *rates])
            if not given.brief:
                shown = " ".join(f"{100 * rate:6.2f}" for rate in (lru, best, *rates))
                print(f"{sessions:>4} every {spacing:>3} s, seed {seed}, {part:5} {shown}", flush=True)
    print("pool, then means: LRU, optimum; and by policy and share of closed sessions: mean, gap closed, worst cell")
    for part, rows in found.items():
        lru, best, *means = np.mean(rows, axis=0).tolist()
        worst = (np.array(rows)[:, 2:] - np.array(rows)[:, :1]).min(axis=0).tolist()
        shown = [
            f"{policy} {closes:g}: {100 * mean:.2f} {(mean - lru) / (best - lru):.1%} {100 * least:+.2f}"
            for (policy, closes), mean, least in zip(columns, means, worst, strict=True)
        ]
        print(f"{part:5} {100 * lru:.2f} {100 * best:.2f}  {'; '.join(shown)}")


if __name__ == "__main__":
    main()
