"""What viewers of the page cost: tokens a second without them and with 20, and the time that the server takes for them.

    python -m bench.serving.viewers              20 viewers, two minutes
    python -m bench.serving.viewers --toy        seconds

The real server runs, and clients ask it without a pause. Windows with viewers and without take turns, and each pair is
compared. Exits with 1 if the median of the shares of tokens that are left is less than 0.99, or if viewers take more
than 1 % of a core at rest, neither of which `--toy` judges. The viewers are a process of their own, as browsers are; on
a small machine they take its time too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from bench.harness import machine, save
from bench.serving.connections import ask, at_rest, cpu_percent

LEAST = 0.99
"""Share of the tokens a second that viewers must leave."""

MOST_PERCENT = 1.0
"""Of a core, which viewers may take."""


def view(port: int, count: int) -> None:
    """Be so many viewers, until the standard input ends; says when all have had an event."""

    async def one(ready: asyncio.Semaphore) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/cache/live HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"event: begin")
        ready.release()
        while await reader.read(1 << 16):
            pass

    async def run() -> None:
        ready = asyncio.Semaphore(0)
        viewers = [asyncio.create_task(one(ready)) for _ in range(count)]
        for _ in viewers:
            await ready.acquire()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for viewer in viewers:
            viewer.cancel()

    asyncio.run(run())


@contextlib.contextmanager
def viewed(port: int, count: int) -> Iterator[None]:
    """With so many viewers."""
    command = [sys.executable, "-m", "bench.serving.viewers", "--view", str(port), "--viewers", str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.stdin.close()


def tokens_a_second(port: int, seconds: float, clients: int, tokens: int) -> float:
    """What clients that ask one request after the other get."""
    began = time.monotonic()

    def client(_: int) -> int:
        count = 0
        while time.monotonic() < began + seconds:
            ask(port, tokens)
            count += tokens
        return count

    with ThreadPoolExecutor(clients) as pool:
        total = sum(pool.map(client, range(clients)))
    return total / (time.monotonic() - began)


def measure(port: int, server: psutil.Process, options: argparse.Namespace) -> dict[str, Any]:
    """The result, without where it was measured."""
    load = (port, options.seconds, options.clients, options.tokens)
    rates: list[tuple[float, float]] = []
    percents: list[tuple[float, float]] = []
    tokens_a_second(*load)  # first calls do not count
    for at in range(options.windows):
        pair = [0.0, 0.0]
        idle = [0.0, 0.0]
        for count in (0, 1) if at % 2 else (1, 0):
            with viewed(port, options.viewers * count):
                pair[count] = tokens_a_second(*load)
                at_rest(port)
                idle[count] = cpu_percent(server, options.seconds / 2)
        rates.append((pair[0], pair[1]))
        percents.append((idle[0], idle[1]))
    shares = sorted(beside / alone for alone, beside in rates)
    return {
        "viewers": options.viewers,
        "tokens_a_second": [round(statistics.median(each), 1) for each in zip(*rates, strict=True)],
        "share_left": {"median": round(statistics.median(shares), 4), "all": [round(each, 3) for each in shares]},
        "cpu_percent_at_rest": [round(statistics.mean(each), 2) for each in zip(*percents, strict=True)],
    }


def main() -> int:
    """Measure, show and write; 1 if viewers cost too much."""
    parser = argparse.ArgumentParser(description="What viewers of the page cost.")
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--windows", type=int, default=9, help="with viewers, and as many without")
    parser.add_argument("--seconds", type=float, default=6, help="of each window")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--toy", action="store_true", help="seconds; nothing is judged")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--view", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.view is not None:
        view(options.view, options.viewers)
        return 0
    if options.toy:
        options.windows, options.seconds = 2, 0.5
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--json", "--kv-memory", "32MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(json.loads(server.stdout.readline())["url"].rpartition(":")[2])
            result = {**machine(), **measure(port, psutil.Process(server.pid), options)}
        finally:
            server.terminate()
    save(options.json, result)
    alone, beside = result["tokens_a_second"]
    print(f"{alone} tokens a second without viewers, {beside} with {options.viewers}: {result['share_left']}")
    print(f"at rest the server takes {result['cpu_percent_at_rest']} % of a core without and with them")
    without, beside = result["cpu_percent_at_rest"]
    is_dear = result["share_left"]["median"] < LEAST or beside - without > MOST_PERCENT
    return int(not options.toy and is_dear)


if __name__ == "__main__":
    raise SystemExit(main())
