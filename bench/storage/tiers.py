"""What the tiers below the device cost and bring, part by part, beside what the hardware and other clients do.

    python -m bench.storage.tiers                           everything, about fifteen minutes
    python -m bench.storage.tiers --only copies,engine      parts whose names contain one of these
    python -m bench.storage.tiers --toy                     the same code at small sizes, in seconds
    python -m bench.storage.tiers --traces FOLDER           where the published traces are (lmcache_agent, mooncake)

Parts: `copies` (frames against a plain copy of memory, digests against copies), `directory` (the directory store
against plain reads and writes of one file, with O_DIRECT and without), `engine` (time to the first token in the real
engine, of sessions that come back and where all fits on the device), `simulator` (the same on published traces, with
the costs of an H100). See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bench.harness import SHARED, machine, new_parser, save
from bench.storage.bandwidth import Bandwidth, measure_directory, measure_disk
from bench.storage.copies import measure_copies
from bench.storage.report import FITS, RETURNING, print_report, verdicts
from rich.console import Console

from quire import LLM, SamplingParams
from quire.cli.replay import ReplayedCache, ReplayedEngine
from quire.cli.replay_grid import grid_of
from quire.settings.setting import parse_bytes
from quire.sim.comparison import Grid, compare
from quire.sim.hit_bounds import HitBounds
from quire.sim.settings import SimulatedTiers
from quire.sim.trace import Trace, open_trace

Row = dict[str, Any]
SEED = 20
PAGE = 16
TRACES = {
    "taubench": ("lmcache_agent/taubench.jsonl.xz", None),
    "miniswe": ("lmcache_agent/miniswe.jsonl.xz", 200),
    "mooncake conversation": ("mooncake/conversation_trace.jsonl", 600),
    "mooncake synthetic": ("mooncake/synthetic_trace.jsonl", 600),
}
"""File and number of requests. Tokens of texts are their bytes, as `quire replay` counts them."""
RETURNING_TRACE = "alternating:sessions=16,tokens=40000,turns=5,think=300"


class Skipped(Exception):
    """A part cannot be measured here; the message says why."""


def measure_frames(options: argparse.Namespace) -> list[Row]:
    """Copies and digests by page size; see `copies.py`."""
    found = []
    for size in ("64KiB",) if options.toy else ("16KiB", "64KiB", "256KiB", "1MiB", "4MiB"):
        page = parse_bytes(size)
        total, repeats = (2**22, 2) if options.toy else (2**28, 9)
        found.append(measure_copies(page, total=total, repeats=repeats))
        options.say(f"pages of {size}")
    return found


def measure_disks(options: argparse.Namespace) -> list[Row]:
    """The store and the plain disk under it take turns; medians, and medians of ratios of neighbours."""
    sizes, total, repeats = ((2**16,), 2**21, 1) if options.toy else ((2**16, 2**18, 2**20, 2**22), 2**28, 3)
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="quire-bench-") as folder:
        for direct in (True, False):
            for size in sizes:
                pairs = [_disk_and_store(Path(folder), size, total, direct=direct) for _ in range(repeats)]
                row: Row = {"record_bytes": size, "how": "direct" if direct else "buffered"}
                for verb in ("put", "get"):
                    rates = [[getattr(each, f"{verb}_bytes_per_second") for each in pair] for pair in pairs]
                    row[f"{verb}_disk_gb_per_s"] = statistics.median(disk for disk, _ in rates) / 1e9
                    row[f"{verb}_store_gb_per_s"] = statistics.median(store for _, store in rates) / 1e9
                    row[f"{verb}_of_disk"] = statistics.median(store / disk for disk, store in rates)
                rows.append(row)
                options.say(f"records of {size >> 10} KiB, {row['how']}")
    return rows


def _disk_and_store(folder: Path, size: int, total: int, *, direct: bool) -> tuple[Bandwidth, Bandwidth]:
    batch = max(1, min(64, (16 << 20) // size))
    disk = measure_disk(folder, size, total, 4, direct=direct)
    return disk, measure_directory(folder, size, total, batch, 4, direct=direct)


# -- time to the first token, in the engine


def measure_engine(options: argparse.Namespace) -> list[Row]:
    """Sessions take turns; a turn is the history and some more.

    They come back to a device pool that holds two of them, and only turns after a session's first count: with `restart`
    they come to another engine, which finds what the first one has stored. Where all of them fit on the device, tiers
    bring nothing, and all turns count: the first ones are computed while others are saved.
    """
    small, large = ("2MiB", "8MiB") if options.toy else ("8MiB", "64MiB")  # 8 MiB are 4,096 tokens
    back = _sessions(options, RETURNING, small, ("none", "host", "restart"))
    return back + _sessions(options, FITS, large, ("none", "host", "storage"))


def _sessions(options: argparse.Namespace, case: str, pool: str, modes: Sequence[str]) -> list[Row]:
    sessions, turns, history, repeats = (3, 2, 400, 1) if options.toy else (6, 3, 1500, 3)
    if case == FITS and not options.toy:
        repeats = 9  # what is looked for is small
    waits: dict[str, list[float]] = {mode: [] for mode in modes}
    uses: dict[str, Row] = {}
    for repeat in range(repeats):
        order = list(waits)
        random.Random(f"{SEED} {repeat}").shuffle(order)
        for mode in order:
            with tempfile.TemporaryDirectory(dir=options.folder, prefix="quire-bench-") as folder:
                taken, uses[mode] = _taken(mode, folder, pool, sessions, turns, history, repeat)
            waits[mode] += taken if case == FITS else taken[sessions:]
            options.say(f"{case}, repeat {repeat + 1} of {repeats}, {mode}: median {statistics.median(taken):.3f} s")
    times = {
        mode: {
            "p50": float(np.percentile(taken, 50)),
            "p95": float(np.percentile(taken, 95)),
            "mean": statistics.mean(taken),
        }
        for mode, taken in waits.items()
    }
    return [
        {
            "case": case,
            "tiers": mode,
            **{f"ttft_{key}_s": value for key, value in times[mode].items()},
            "of_without": {key: value / times["none"][key] for key, value in times[mode].items()},
            "times_faster_p50": times["none"]["p50"] / times[mode]["p50"],
            "times_faster_p95": times["none"]["p95"] / times[mode]["p95"],
            "use": uses[mode],
            "samples": [round(value, 4) for value in taken],
        }
        for mode, taken in waits.items()
    ]


def _taken(
    mode: str, folder: str, pool: str, sessions: int, turns: int, history: int, repeat: int
) -> tuple[list[float], Row]:
    draw = np.random.default_rng([SEED, repeat])
    said = [draw.integers(10, 250, size=history).tolist() for _ in range(sessions)]
    settings: dict[str, Any] = {"kv_memory": pool, "page_size": PAGE, "show_plan": False}
    if mode != "none":
        settings["host_memory"] = "64MiB"
    if mode in ("restart", "storage"):
        settings |= {"storage": folder, "storage_size": "256MiB"}
    engine = LLM(None, **settings)
    waits = []
    try:
        for turn in range(turns):
            if turn == 1 and mode == "restart":
                engine.close()
                engine = LLM(None, **settings)
                engine.generate([draw.integers(10, 250, size=200).tolist()], SamplingParams(max_tokens=1))  # warms up
            for session in range(sessions):
                began = time.perf_counter()
                engine.generate([said[session]], SamplingParams(max_tokens=1, temperature=0.0))
                waits.append(time.perf_counter() - began)
                said[session] = said[session] + draw.integers(10, 250, size=60).tolist()
        found = engine.statistics()
    finally:
        engine.close()
    tiers = found["tiers"] or {}
    names = ("host_hit_tokens", "storage_hit_tokens", "loaded_bytes", "fetched_bytes", "declined_tokens", "off")
    return waits, {"hit_tokens": found["hit_tokens"]} | {name: tiers[name] for name in names if name in tiers}


# -- and in the simulator


def measure_traces(options: argparse.Namespace) -> list[Row]:
    """Each trace without tiers, with a host, and with storage behind a host as small as the device; H100-like costs."""
    rows: list[Row] = []
    sources: dict[str, Trace | str] = {"returning sessions": open_trace(RETURNING_TRACE)}
    if options.toy:
        sources = {"returning sessions": open_trace("alternating:sessions=4,tokens=3000,turns=3,think=60")}
    for name, (path, limit) in TRACES.items():
        if options.toy:
            break
        file = options.traces / path
        sources[name] = open_trace(str(file), limit=limit) if file.exists() else f"{file.name} is not in --traces"
    for name, trace in sources.items():
        if isinstance(trace, str):
            rows.append({"trace": name, "skipped": trace})
            continue
        rows += _replayed(name, trace)
        options.say(f"{name}: {rows[-1]['wall_s']:.0f} s")
    return rows


def _replayed(name: str, trace: Trace) -> list[Row]:
    longest = max(sum(lengths) for lengths in trace.lengths)
    working_set = HitBounds(trace, PAGE).working_set_tokens
    pool = max(working_set // 8, longest * 5 // 4) // PAGE * PAGE
    cache = ReplayedCache(policies="density", pool_tokens=str(pool), page_sizes=str(PAGE))
    tiers = {
        "host": SimulatedTiers(host_tokens=2 * working_set),
        "host, 2 GB/s": SimulatedTiers(host_tokens=2 * working_set, host_bandwidth=2.0),
        "host and storage": SimulatedTiers(host_tokens=pool, storage_tokens=2 * working_set),
        "host and 50 GB/s storage": SimulatedTiers(
            host_tokens=pool, storage_tokens=2 * working_set, storage_bandwidth=50.0
        ),
    }
    rows: list[Row] = []
    for kind, asked in tiers.items():
        grid: Grid = grid_of(cache, ReplayedEngine(max_running_requests=64), asked)
        without, beside = compare(trace, replace(grid, pools=[pool]), lambda what, ended: None)
        use = beside.tiers
        assert use is not None
        times = {}
        for label, run in (("without", without), ("with", beside)):
            middle, late = run.first_token_seconds((50, 95))
            times[label] = {"p50_s": middle, "p95_s": late, "mean_s": run.mean_first_token_seconds}
        rows.append(
            {
                "trace": name,
                "requests": len(trace),
                "tiers": kind,
                "pool_tokens": pool,
                "working_set_tokens": working_set,
                "hit_rate": [without.hit_rate, beside.hit_rate],
                "ttft": times,
                "of_without": {key: times["with"][key] / max(1e-9, times["without"][key]) for key in times["with"]},
                "host_hit_tokens": use.host_hit_tokens,
                "storage_hit_tokens": use.storage_hit_tokens,
                "declined_tokens": use.declined_tokens,
                "loaded_gb": use.loaded_bytes / 1e9,
                "fetched_gb": use.fetched_bytes / 1e9,
                "off": use.off,
                "wall_s": without.wall_seconds + beside.wall_seconds,
            }
        )
    return rows


PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "copies": measure_frames,
    "directory": measure_disks,
    "engine": measure_engine,
    "simulator": measure_traces,
}


def run(options: argparse.Namespace) -> Row:
    """All parts that were asked for, and what they say of the goals. Written down after every part."""
    parts: dict[str, list[Row]] = {}
    found = _described(parts, 0.0)
    began = time.perf_counter()
    for name, measure in PARTS.items():
        if not any(word in name for word in options.only):
            continue

        def say(what: str, name: str = name) -> None:
            Console(stderr=True).print(f"[dim]{time.perf_counter() - began:5.0f} s  {name}: {what}[/]", highlight=False)

        options.say = say
        parts[name] = measure(options)
        found = _described(parts, time.perf_counter() - began)
        save(options.json, found)
    return found


def _described(parts: dict[str, list[Row]], seconds: float) -> Row:
    return {
        **machine(),
        "seconds": round(seconds),
        "parts": parts,
        "goals": verdicts(parts),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = new_parser(
        __doc__,
        toy="small sizes, in seconds; no published traces",
    )
    parser.add_argument("--only", default="", help="comma-separated parts of names of parts")
    parser.add_argument("--traces", type=Path, default=SHARED / "data" / "traces")
    parser.add_argument("--folder", type=Path, help="of the disk that is measured; default that of temporary files")
    parser.add_argument("--read", type=Path, metavar="FILE", help="a result that was written before")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    return options


def main() -> int:
    """Measure, show and write."""
    options = parse()
    result = json.loads(options.read.read_text()) if options.read else run(options)
    print_report(result, Console(highlight=False, width=None if sys.stdout.isatty() else 160))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
