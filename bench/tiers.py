"""What the tiers cost and what they bring: copies, digests, a directory, servers, and the time to a first token.

    python bench/tiers.py                          everything, about ten minutes
    python bench/tiers.py --only ttft --turns 4    the time to a first token, with each tier and without
    python bench/tiers.py --toy                    small sizes, in seconds

The time to a first token is that of a real engine on the bundled model: sessions whose histories do not fit on the
device together take turns. Engines take turns too, prompt by prompt, so that what else the machine does falls on all.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import copies
import numpy as np
import stores_network
from rich.console import Console

from quire import LLM, SamplingParams
from quire.plan.budget import format_bytes
from quire.tiers.stores.bandwidth import measure_directory, measure_disk

GOALS = {
    "copies": "at least 90 % of a plain copy from 64 KiB per frame on",
    "digest": "at most 10 % of the copy",
    "ttft": "never above that without tiers + 2 %; at least 3 times better for sessions that return",
}
MIB = 2**20
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
PARTS = ("copies", "directory", "servers", "ttft")


def measure_copies(options: argparse.Namespace) -> dict[str, Any]:
    """Copies between device and host beside a plain copy, and what digests cost: `bench/copies.py`."""
    return copies.run(copies.parse(["--toy"] if options.toy else []))


def measure_directories(options: argparse.Namespace) -> list[dict[str, Any]]:
    """GB/s of a directory beside the raw disk, with and without O_DIRECT, by bytes of a record."""
    rows = []
    total = (4 if options.toy else 256) * MIB
    for size in (64 * 1024, MIB) if options.toy else (64 * 1024, 256 * 1024, MIB, 4 * MIB):
        for direct in (True, False):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                raw = measure_disk(Path(folder), size, total, 4, direct=direct)
                store = measure_directory(Path(folder), size, total, max(1, 16 * MIB // size), 4, direct=direct)
            rows.append({"record_bytes": size, "direct": direct, "raw": asdict(raw), "store": asdict(store)})
    return rows


def measure_servers(options: argparse.Namespace) -> dict[str, Any]:
    """Valkey and Mooncake beside their own clients, where they are installed."""
    volume, repeats = (2 * MIB, 1) if options.toy else (64 * MIB, 5)
    found: dict[str, Any] = {}
    for name, measure in (("valkey", stores_network.measure_valkey), ("mooncake", stores_network.measure_mooncake)):
        try:
            found[name] = measure(volume, repeats) or "not measured: not installed here"
        except Exception as error:
            found[name] = f"not measured: {error}"
    return found


class Sessions:
    """Histories that grow by an answer and a question each turn."""

    def __init__(self, count: int, tokens: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._histories = [self._some(tokens) for _ in range(count)]

    def _some(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(5, 400, count)]

    def turn(self, index: int) -> list[int]:
        """The prompt of a session's next turn."""
        self._histories[index] += self._some(24)
        return list(self._histories[index])


def measure_ttft(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds to the first token of every prompt, by scenario and by what is below the device."""
    sessions, tokens, turns = (3, 200, 2) if options.toy else (8, 1500, options.turns)
    device = f"{max(1, tokens * 2 * 512 * 8 // MIB)}MiB"
    tiers: dict[str, dict[str, Any]] = {
        "none": {},
        "host": {"host_memory": "256MiB"},
        "host and directory": {"host_memory": "256MiB", "storage": str(folder / "kv"), "storage_size": "1GiB"},
    }
    common = {"kv_memory": device, "show_plan": False, "threads": 1}
    returning = _scenario(tiers, common, [Sessions(sessions, tokens, 7) for _ in tiers], turns, sessions)
    fresh = {"none": {}, "host": tiers["host"], "host and directory": {**tiers["host and directory"]}}
    fresh["host and directory"]["storage"] = str(folder / "new")
    others = _scenario(fresh, common, [_Strangers(tokens, 11) for _ in fresh], 1, sessions * turns)
    again = _restarted(tiers, common, Sessions(sessions, tokens, 7), sessions)
    return {"returning": returning, "never seen before": others, "after a restart": again, "device": device}


class _Strangers:
    """Prompts that have nothing in common."""

    def __init__(self, tokens: int, seed: int) -> None:
        self._random, self._tokens = np.random.default_rng(seed), tokens

    def turn(self, index: int) -> list[int]:
        """Another one."""
        return [int(token) for token in self._random.integers(5, 400, self._tokens)]


def _scenario(
    tiers: Mapping[str, dict[str, Any]], common: dict[str, Any], prompts: Sequence[Any], turns: int, count: int
) -> dict[str, Any]:
    engines = {name: LLM(None, **common, **settings) for name, settings in tiers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in tiers}
    for turn in range(turns + (turns > 1)):
        for index in range(count):
            for (name, llm), source in zip(engines.items(), prompts, strict=True):
                taken = _first_token(llm, source.turn(index))
                if turn or turns == 1:  # in the first turn nobody returns
                    seconds[name].append(taken)
    found = {name: _figures(seconds[name], llm.statistics()) for name, llm in engines.items()}
    for llm in engines.values():
        llm.close()
    return found


def _restarted(
    tiers: Mapping[str, dict[str, Any]], common: dict[str, Any], source: Sessions, count: int
) -> dict[str, Any]:
    """Engines that begin with nothing on the device and the host; the directory has what earlier ones stored."""
    found = {}
    prompts = [source.turn(index) for index in range(count)]
    for name in ("none", "host and directory"):
        with LLM(None, **common, **tiers[name]) as llm:
            _first_token(llm, [9] * 32)
            found[name] = _figures([_first_token(llm, prompt) for prompt in prompts], llm.statistics())
    return found


def _first_token(llm: LLM, prompt: list[int]) -> float:
    started = time.perf_counter()
    llm.generate({"prompt_token_ids": prompt}, ONE)
    return time.perf_counter() - started


def _figures(seconds: list[float], statistics_: Mapping[str, Any]) -> dict[str, Any]:
    found = statistics_["tiers"] or {}
    return {
        "p50": statistics.median(seconds),
        "mean": statistics.fmean(seconds),
        "p95": float(np.quantile(seconds, 0.95)),
        "hit_tokens": statistics_["hit_tokens"],
        "prompt_tokens": statistics_["prompt_tokens"],
        "host_hit_tokens": found.get("host_hit_tokens", 0),
        "storage_hit_tokens": found.get("storage_hit_tokens", 0),
        "off": found.get("off", {}),
    }


def table(result: Mapping[str, Any]) -> str:
    """The figures for people, with the goals."""
    lines = []
    if "copies" in result:
        lines += [copies.table(result["copies"]), f"goals: {GOALS['copies']}; digest {GOALS['digest']}", ""]
    for row in result.get("directory", ()):
        how, raw, store = "direct" if row["direct"] else "buffered", row["raw"], row["store"]
        pairs = [(verb, store[f"{verb}_bytes_per_second"], raw[f"{verb}_bytes_per_second"]) for verb in ("put", "get")]
        cells = [f"{verb} {mine / 1e9:.2f} of {disk / 1e9:.2f} GB/s" for verb, mine, disk in pairs]
        lines.append(f"directory, {format_bytes(row['record_bytes'])}, {how}: {', '.join(cells)}")
    for name, rows in result.get("servers", {}).items():
        lines += [f"{name}: {row}" for row in ([rows] if isinstance(rows, str) else rows)]
    for scenario, by_tier in result.get("ttft", {}).items():
        if isinstance(by_tier, str):
            continue
        base = by_tier["none"]
        for name, row in by_tier.items():
            lines.append(
                f"first token, {scenario}, {name}: p50 {row['p50'] * 1e3:.1f} ms, mean {row['mean'] * 1e3:.1f} ms, "
                f"{base['mean'] / row['mean']:.2f} times as fast; hits {row['hit_tokens']:,} of "
                f"{row['prompt_tokens']:,} tokens, host {row['host_hit_tokens']:,}, storage "
                f"{row['storage_hit_tokens']:,}"
            )
    if "ttft" in result:
        lines.append(f"goal: {GOALS['ttft']}")
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="Measure what tiers cost and bring.")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be given again")
    parser.add_argument("--turns", type=int, default=3, help="turns of each session (%(default)s)")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default the system's for temporary files")
    parser.add_argument("--toy", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, show and write."""
    options = parse()
    wanted = options.only or list(PARTS)
    console = Console(stderr=True)
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "toy": options.toy,
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        parts: dict[str, Callable[[], Any]] = {
            "copies": lambda: measure_copies(options),
            "directory": lambda: measure_directories(options),
            "servers": lambda: measure_servers(options),
            "ttft": lambda: measure_ttft(options, Path(folder)),
        }
        for name in wanted:
            with console.status(f"measuring {name}"):
                result[name] = parts[name]()
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
