"""Prefill and decode in one engine or apart: how smoothly requests run while long prompts arrive, on the same cores.

    python -m bench.transfer.engines  one engine with two threads; prefill and decode with one thread each
    python -m bench.transfer.engines --toy         the same code in seconds
    python -m bench.transfer.engines --read RESULT.json --readme docs/benchmarks.md     the table of what --json wrote

Every setup is the real server, over HTTP, with a random model and defaults otherwise. Requests with short prompts run
all the time, and are replaced as they end. Meanwhile long prompts arrive at fixed times. What is measured: seconds
between two tokens of a running request, and seconds from the arrival of a long prompt to its first token. The setups
run all the time and take turns; one that rests takes no time. Answers of all setups are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from bench.engine.compare import Shape, save_model
from bench.harness import ROOT, machine, new_parser, save

ONE, APART = "one engine, 2 threads", "prefill and decode, 1 thread each"
_MARKS = ("<!-- roles -->", "<!-- end of roles -->")
_START_S = 180.0


@dataclass
class Load:
    """What runs, and what arrives."""

    running: int
    new: int
    prompt: int
    arrivals: int
    every_s: float
    seed: int = 0
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


def start(stack: ExitStack, model: Path, log: Path, core: int | None, *more: str, **environment: str) -> dict[str, Any]:
    """Start a server on a core, or on all; returns what it says when it is ready."""
    threads = "2" if core is None else "1"
    command = [
        *(["taskset", "-c", str(core)] if core is not None else []),
        *(sys.executable, "-m", "quire", "serve", str(model), "--skip-tokenizer-init", "--port", "0", "--json"),
        *("--threads", threads, "--dtype", "float32", "--kv-memory", "512MiB", "--max-model-len", "4096"),
        *("--served-model-name", "bench", *more),
    ]
    source = str(ROOT / "src")
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
        env={**os.environ, "PYTHONPATH": source, **environment},
    )

    def end() -> None:
        process.terminate()
        process.wait(60)

    stack.callback(end)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a server did not start: {log.read_text()[-2000:]}")
    ready: dict[str, Any] = json.loads(line)
    return ready


async def stream(client: Any, url: str, prompt: list[int], new: int) -> tuple[list[float], list[int]]:
    """The times at which tokens came, and the tokens."""
    body = {
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "model": "bench",
        "return_token_ids": True,
    }
    times: list[float] = []
    tokens: list[int] = []
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"]
                got = choice[0].get("token_ids") or [] if choice else []
                if got:
                    times.append(time.perf_counter())
                    tokens += got
    return times, tokens


async def run(url: str, load: Load, vocabulary: int) -> None:
    """Run the load; fills what it measured."""
    import httpx

    rng = np.random.default_rng(load.seed)
    stop = asyncio.Event()
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=100)) as client:

        async def keep_running() -> None:
            while not stop.is_set():
                times, _ = await stream(client, url, rng.integers(1, vocabulary, 32).tolist(), load.new)
                load.gaps.extend(after - before for before, after in itertools.pairwise(times))

        async def arrive(prompt: list[int]) -> None:
            began = time.perf_counter()
            times, tokens = await stream(client, url, prompt, 8)
            load.first.append(times[0] - began)
            load.answers.append(tokens)

        prompts = np.random.default_rng(1000 + load.seed).integers(1, vocabulary, (load.arrivals, load.prompt)).tolist()
        async with asyncio.TaskGroup() as running:
            for _ in range(load.running):
                running.create_task(keep_running())
            await asyncio.sleep(load.every_s)
            load.gaps.clear()
            async with asyncio.TaskGroup() as arriving:
                for prompt in prompts:
                    arriving.create_task(arrive(prompt))
                    await asyncio.sleep(load.every_s)
            stop.set()


def connected(url: str) -> bool:
    """Whether a decode engine has its prefill engine."""
    import httpx

    return bool(httpx.get(f"{url}/v1/cache/statistics", timeout=10).json()["transfer"]["prefill_peers"])


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each setup."""
    import httpx

    shape = Shape(hidden=options.hidden, layers=options.layers, intermediate=2 * options.hidden, vocab=4096)
    save_model(shape, folder / "model")
    secret = {"QUIRE_TRANSFER_SECRET": secrets.token_hex(16)}
    with ExitStack() as stack:
        urls = {ONE: start(stack, folder / "model", folder / "one.log", None)["url"]}
        transfer = ("--transfer-connector", options.connector)
        prefill = start(
            stack,
            *(folder / "model", folder / "prefill.log", 0, "--role", "prefill", "--transfer-listen", "127.0.0.1:0"),
            *transfer,
            **secret,
        )
        peers = ("--role", "decode", "--prefill-peers", prefill["transfer"]["address"])
        urls[APART] = start(stack, folder / "model", folder / "decode.log", 1, *peers, *transfer, **secret)["url"]
        until = time.monotonic() + _START_S
        while not connected(urls[APART]):
            if time.monotonic() > until:
                raise RuntimeError("the engines did not connect")
            time.sleep(0.2)
        samples: dict[str, list[Load]] = {name: [] for name in urls}
        for turn in range(options.rounds + 1):
            for name in list(urls)[:: 1 if turn % 2 else -1]:
                load = Load(options.running, options.new, options.prompt, options.arrivals, options.every, turn)
                asyncio.run(run(urls[name], load, shape.vocab))
                if turn:  # the first compiles and measures steps
                    samples[name].append(load)
        moved = httpx.get(f"{urls[APART]}/v1/cache/statistics", timeout=10).json()["transfer"]
    answers = {name: [sorted(load.answers) for load in loads] for name, loads in samples.items()}
    rows = []
    for name, loads in samples.items():
        gaps = [[percentile(load.gaps, share) for load in loads] for share in (0.5, 0.99)]
        first = [[percentile(load.first, share) for load in loads] for share in (0.5, 0.99)]
        rows.append(
            {
                "setup": name,
                "gap_p50_ms": 1e3 * statistics.median(gaps[0]),
                "gap_p99_ms": 1e3 * statistics.median(gaps[1]),
                "gap_most_ms": 1e3 * max(max(load.gaps) for load in loads),
                "first_p50_ms": 1e3 * statistics.median(first[0]),
                "first_p99_ms": 1e3 * statistics.median(first[1]),
                "received_tokens": moved["received_tokens"] if name == APART else 0,
                "fallbacks": moved["fallbacks"] if name == APART else 0,
                "same_answers": answers[name] == answers[ONE],
            }
        )
    return rows


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of values lies."""
    return float(np.quantile(np.array(values), share))


def table(result: dict[str, Any]) -> str:
    """In Markdown."""
    lines = [
        "| setup | between tokens, p50 | p99 | longest | to the first token of a long prompt, p50 | p99 |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [row[key] for key in ("gap_p50_ms", "gap_p99_ms", "gap_most_ms", "first_p50_ms", "first_p99_ms")]
        lines.append(f"| {row['setup']} | " + " | ".join(f"{cell:,.0f} ms" for cell in cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Measure, print, write."""
    parser = new_parser("Measure roles apart against one engine.", toy="tiny sizes")
    parser.add_argument("--running", type=int, default=4, help="requests that run all the time (%(default)s)")
    parser.add_argument("--new", type=int, default=200, help="tokens of each of these (%(default)s)")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a long prompt (%(default)s)")
    parser.add_argument("--arrivals", type=int, default=8, help="long prompts in a round (%(default)s)")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two of them (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (%(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="its layers (%(default)s)")
    parser.add_argument("--connector", default="auto", help="(%(default)s)")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing: read what --json wrote")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="write the table into this file, between its marks")
    options = parser.parse_args()
    if options.toy:
        options.running, options.new, options.prompt, options.arrivals = 2, 20, 256, 2
        options.every, options.rounds, options.hidden, options.layers = 0.5, 1, 64, 2
    if options.read:
        result = json.loads(options.read.read_text())
    else:
        before = os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
            rows = measure(options, Path(folder))
        result = {
            **machine(),
            "load_before": before,
            **{key: getattr(options, key) for key in ("running", "new", "prompt", "arrivals", "every", "rounds")},
            **{key: getattr(options, key) for key in ("hidden", "layers", "connector")},
            "rows": rows,
        }
    print(table(result))
    save(options.json, result)
    if options.readme:
        text = options.readme.read_text()
        before_mark, _, rest = text.partition(_MARKS[0])
        rest = rest.partition(_MARKS[1])[2]
        options.readme.write_text(f"{before_mark}{_MARKS[0]}\n{table(result)}\n{_MARKS[1]}{rest}")
    for row in result["rows"]:
        if not row["same_answers"]:
            print(f"wrong: {row['setup']}: answers are not those of one engine")
    return any(not row["same_answers"] for row in result["rows"])


if __name__ == "__main__":
    sys.exit(main())
