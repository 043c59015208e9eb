"""What a fleet of one engine costs beside `quire serve` and `quire up` of one engine: start, memory, and each token.

python -m bench.fleet.overhead                  all three run, and are asked in turns
python -m bench.fleet.overhead --toy            few requests
python -m bench.fleet.overhead --proxies        also a fleet behind Serve's own proxies, as on several machines

Each has the same settings, and one thread. Only one computes at a time. Memory is the proportional share (PSS) of
all its processes, and of those by kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from bench.harness import SEED, machine, new_parser, save, shuffled

_SETTINGS = ("--kv-memory", "64MiB", "--max-model-len", "1024", "--threads", "1", "--json", "--until-eof")
_COMMANDS = {
    "serve": ("serve", "--port", "0"),
    "up": ("up", "--port", "0", "--prefill", "0", "--decode", "1"),
    "fleet": ("fleet", "--port", "0", "--replicas", "1"),
}
_PROXIED_PORT = 8123
_CLIENTS, _TOKENS = 8, 64


class Running:
    """A server that runs: its address, the seconds of its start, and its processes."""

    def __init__(self, words: tuple[str, ...], **environment: str) -> None:
        began = time.monotonic()
        command = [sys.executable, "-m", "quire", *words, *_SETTINGS]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | environment,
        )
        assert self._process.stdout is not None
        row = json.loads(self._process.stdout.readline())
        while row.get("role") not in (None, "router"):
            row = json.loads(self._process.stdout.readline())
        self.start_s = time.monotonic() - began
        self.url = row["url"]

    def pss_mib(self) -> dict[str, float]:
        """Of each kind of process, and of all."""
        found: dict[str, float] = {}
        first = psutil.Process(self._process.pid)
        for process in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError, IndexError):
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                kind = _kind(process)
                found[kind] = found.get(kind, 0.0) + int(text.partition("\nPss:")[2].split()[0]) / 1024
        return {"all": sum(found.values())} | found

    def end(self) -> None:
        """Its input ends, and it does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(90)


def _kind(process: psutil.Process) -> str:
    words = process.cmdline()
    if words[0].startswith("ray::"):
        return words[0]
    if "quire" in words:
        return f"quire {words[words.index('quire') + 1]}"
    if "ray" in " ".join(words):
        return next(
            (name for name in ("gcs_server", "raylet", "dashboard", "monitor") if name in " ".join(words)), "ray"
        )
    return "engine"


def _request(number: int, tokens: int, **more: Any) -> dict[str, Any]:
    prompt = f"Chapter {number}. It was a fine autumn evening, and the whole party had walked out."
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True} | more


def one_token_ms(client: httpx.Client, url: str, number: int) -> float:
    """Until the answer of one token is there."""
    began = time.perf_counter()
    client.post(f"{url}/v1/completions", json=_request(number, 1)).raise_for_status()
    return (time.perf_counter() - began) * 1e3


def stream_ms(client: httpx.Client, url: str, number: int) -> tuple[float, list[float]]:
    """Until the first event, and between events."""
    began = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=_request(number, _TOKENS, stream=True)) as answer:
        times = [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
    return (times[0] - began) * 1e3, [(after - before) * 1e3 for before, after in itertools.pairwise(times)]


async def tokens_per_s(url: str, rounds: int) -> float:
    """Of clients that each send one request after the other."""
    async with httpx.AsyncClient(timeout=120) as client:

        async def send(number: int) -> None:
            for each in range(rounds):
                request = _request(1000 * number + each, _TOKENS, stream=True)
                async with client.stream("POST", f"{url}/v1/completions", json=request) as answer:
                    async for _ in answer.aiter_raw():
                        pass

        began = time.perf_counter()
        await asyncio.gather(*map(send, range(_CLIENTS)))
        return _CLIENTS * rounds * _TOKENS / (time.perf_counter() - began)


@contextlib.contextmanager
def _proxied(there: bool) -> Iterator[dict[str, Running]]:
    """A fleet in a Ray cluster that runs already, so behind Serve's proxies."""
    if not there:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        own = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        own |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        head = (
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            "--include-dashboard=false",
            "--port=6399",
        )
        with subprocess.Popen(
            [*head, "--block"], env=os.environ | own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as ray:
            try:
                time.sleep(15)
                cores = str(os.cpu_count())
                words = ("fleet", "--address", "127.0.0.1:6399", "--port", str(_PROXIED_PORT), "--num-cpus", cores)
                proxied = Running(words, **own)
                yield {"fleet, proxies": proxied}
                proxied.end()
            finally:
                ray.terminate()


def measure(running: dict[str, Running], repeats: int) -> dict[str, Any]:
    """Each is asked as often as the others, in turns."""
    singles: dict[str, list[float]] = {name: [] for name in running}
    firsts, between = ({name: list[float]() for name in running} for _ in range(2))
    rates: dict[str, list[float]] = {name: [] for name in running}
    with httpx.Client(timeout=120) as client:
        for number in range(8 * repeats):
            for name in shuffled(running, SEED, number):
                singles[name].append(one_token_ms(client, running[name].url, number))
        for number in range(2 * repeats):
            for name in shuffled(running, SEED, number):
                first, gaps = stream_ms(client, running[name].url, number)
                firsts[name].append(first)
                between[name] += gaps
    for number in range(repeats):
        for name in shuffled(running, SEED, number):
            rates[name].append(asyncio.run(tokens_per_s(running[name].url, 2)))
    return {
        name: {
            "start_s": each.start_s,
            "pss_mib": each.pss_mib(),
            "one_token_ms": statistics.median(singles[name][len(singles[name]) // 8 :]),
            "first_event_ms": statistics.median(firsts[name]),
            "between_tokens_ms": statistics.median(between[name]),
            "between_tokens_p99_ms": statistics.quantiles(between[name], n=100)[98],
            "tokens_per_s": statistics.median(rates[name]),
        }
        for name, each in running.items()
    }


def main() -> None:
    """Start all, ask them in turns, and print what the fleet costs."""
    parser = new_parser(__doc__ or "", toy="few requests")
    parser.add_argument("--proxies", action="store_true")
    options = parser.parse_args()
    with _proxied(options.proxies) as more:
        running = {name: Running(words) for name, words in _COMMANDS.items()} | more
        try:
            found = measure(running, 1 if options.toy else 6)
        finally:
            for name in _COMMANDS:
                running[name].end()
    for name, figures in found.items():
        print(f"{name:15}", ", ".join(f"{what} {value:.2f}" for what, value in figures.items() if what != "pss_mib"))
        print(" " * 15, ", ".join(f"{kind} {mib:.0f} MiB" for kind, mib in figures["pss_mib"].items()))
    save(options.json, {"machine": machine(), "servers": found})


if __name__ == "__main__":
    main()
