"""One cell of `eviction.py`: a trace and a seed, a page size, a pool and a policy, replayed.

python -m bench.eviction.cells --trace mooncake-conversation --pool 1/8 --page 64 --policy lru,density
python -m bench.eviction.cells --trace agent-sessions --seed 1,2,3 --pool 1/16,1/4 --page 16,64 --policy density

    from bench.eviction.cells import Source, paged          # with bench/ on sys.path
    pages = paged(Source("agent-sessions", 1), 64)    # a PagedTrace, from a file after the first time
    replay_in_order(pages, pool_tokens, policy).hit_rate(pages)    # of bench.eviction.sequential
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import itertools
import os
import tempfile
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.bookkeeping.workloads import Arrival, arrivals, module_of
from bench.eviction import paged_trace
from bench.eviction.paged_trace import PagedTrace
from bench.eviction.sequential import replay_in_order
from bench.eviction.sieve import Sieve
from bench.harness import SHARED

from quire.prefix.evict import eviction_policy, register_eviction
from quire.sim import hit_bounds, trace_request, workloads
from quire.sim.trace import Trace, TraceRequest, open_trace
from quire.sim.trace_request import Planned

STEP_S = 0.02
"""Of the generators whose times are steps."""

FILES = {
    "mooncake-conversation": "mooncake/conversation_trace.jsonl",
    "mooncake-synthetic": "mooncake/synthetic_trace.jsonl",
    "tau-bench": "lmcache_agent/taubench.jsonl.xz",
    "mini-swe": "lmcache_agent/miniswe.jsonl.xz",
    "ragpulse": "ragpulse",
    "azure-code": "azure",
}
"""Recorded traces, below `../shared/data/traces`."""
GENERATORS = {"documents": "trace.py", "returning": "trace_sessions.py"}
"""Generators of `../shared/bench`, run as they are with a seed."""
WORKLOADS = {
    "chat": "chat:requests=2000",
    "sessions": "sessions:requests=2000",
    "scan": "rag-scan:requests=2000",
    "agent-sessions": "agent-sessions:sessions=40",
}
"""Workloads of `quire.sim.workloads`."""
TRACES = (*WORKLOADS, *GENERATORS, *FILES)


class Missing(Exception):
    """A trace that is not on this machine."""


class Source(NamedTuple):
    """A trace by its name in `TRACES`, the seed of generated ones, and other settings of a workload."""

    name: str
    seed: int = 0
    settings: str = ""

    def open(self, limit: int | None = None) -> Trace:
        """The trace, or its first requests. Raises Missing."""
        if self.name in WORKLOADS:
            return open_trace(self.settings or WORKLOADS[self.name], limit=limit, seed=self.seed)
        path = self.path()
        if self.name in FILES:
            return open_trace(str(path), limit=limit)
        requests = arrivals(module_of(path).make_trace(seed=self.seed), steps_apart=4)
        return _trace_of(self.name, requests, limit)

    def path(self) -> Path:
        """The file or folder that it comes from. Raises Missing."""
        path = SHARED / ("data/traces" if self.name in FILES else "bench") / {**FILES, **GENERATORS}[self.name]
        path = next(path.glob("*.csv*"), path) if self.name == "azure-code" else path
        if not path.exists():
            raise Missing(f"{path} is not here")
        return path

    def version(self) -> str:
        """Changes with the trace."""
        if self.name in WORKLOADS:
            text = "".join(map(inspect.getsource, (workloads, trace_request, hit_bounds, paged_trace)))
            return hashlib.sha256((WORKLOADS[self.name] + text).encode()).hexdigest()[:12]
        path = self.path()
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return hashlib.sha256(repr([(each.name, each.stat().st_size) for each in files]).encode()).hexdigest()[:12]


def _trace_of(name: str, requests: list[Arrival], limit: int | None) -> Trace:
    """Requests whose times are steps: a follow-up arrives after the turn before it."""
    begins: list[float] = []
    sessions: list[str] = []
    planned = []
    for at, each in enumerate(requests):
        first = each.previous < 0
        ended = begins[each.previous] + len(requests[each.previous].output) if not first else 0
        begins.append(max(each.at, 0 if first else ended + each.after))
        sessions.append(str(at) if first else sessions[each.previous])
        request = TraceRequest(
            request_id=str(at),
            prompt=each.prompt,
            output=each.output,
            session=sessions[at],
            after="" if first else str(each.previous),
            think=each.after * STEP_S,
        )
        planned.append(Planned(begins[at] * STEP_S, partial(_arrived, request)))
    return Trace(name, f"generator {name}", planned, limit=limit)


def _arrived(request: TraceRequest, arrival: float) -> TraceRequest:
    return replace(request, arrival=arrival)


CACHE = Path(tempfile.gettempdir()) / "quire-eviction"


def paged(source: Source, page_size: int) -> PagedTrace:
    """The pages of a trace. They are in a file of `CACHE` from the first time on. Raises Missing."""
    path = CACHE / f"{source.name}-{source.seed}-{page_size}-{source.version()}.npz"
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.npz")
        PagedTrace.of(source.open(), page_size).save(part)
        part.rename(path)
    return PagedTrace.load(path)


register_eviction("sieve", Sieve)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, help=", ".join(TRACES))
    parser.add_argument("--seed", default="1")
    parser.add_argument("--pool", default="1/16,1/8,1/4,1/2", help="parts of the working set (%(default)s)")
    parser.add_argument("--page", default="64")
    parser.add_argument("--policy", default="lru,density", help="sieve, or one of quire replay --list")
    parser.add_argument("--closes", type=float, default=0.0, help="also with this share of sessions closed at the end")
    parser.add_argument("--told", action="store_true", help="endings are told, and last tokens do not say them")
    parser.add_argument(
        "--no-optimum", action="store_true", help="leave out the optimum and the closed part of the gap"
    )
    given = parser.parse_args()
    grid = itertools.product(given.trace.split(","), given.seed.split(","), given.page.split(","))
    for name, seed, page in grid:
        pages = paged(Source(name, int(seed)), int(page))
        bounds = pages.bounds()
        print(f"{name}, seed {seed}, pages of {page}: {len(pages):,} requests, ideal {bounds.ideal_hit_rate:.4f}")
        for part in map(Fraction, given.pool.split(",")):
            pool = int(bounds.working_set_tokens * part)
            best = 0.0 if given.no_optimum else bounds.optimal_hit_tokens(pool) / bounds.prompt_tokens
            lru = 0.0
            for policy, closes in itertools.product(given.policy.split(","), sorted({0.0, given.closes})):
                found = replay_in_order(pages, pool, eviction_policy(policy), closes=closes, told=given.told)
                rate = found.hit_rate(pages)
                lru = rate if policy == "lru" and not closes else lru
                gap = f"{(rate - lru) / (best - lru):6.1%} of the gap" if lru < best and rate != lru else ""
                name = f"{policy:10}{' closed' * bool(closes):7}"
                print(f"  {part!s:5} {name} {rate:.4f} {found.cpu_seconds:7.2f} s  {gap}", flush=True)
            print(f"  {part!s:5} optimum    {best:.4f}" if best else "", flush=True)


if __name__ == "__main__":
    main()
