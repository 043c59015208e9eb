"""What viewers of the page cost, and spans: tokens a second and the server's time, without them and with them.

    python -m bench.serving.viewers              20 viewers, and a server that is traced: four minutes
    python -m bench.serving.viewers --toy        seconds

Real servers run, and clients ask one of them without a pause. Windows with and without take turns, and each pair is
compared: tokens a second, and the time of a core that the server's process takes for a token, which depends less on
what else the machine does. Exits with 1 if the median of the shares of tokens that are left is less than 0.99, or if
viewers take more than 1 % of a core at rest, neither of which `--toy` judges. Viewers and the collector of spans are
processes of their own; on a small machine they take its time too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from bench.harness import machine, save
from bench.serving.connections import ask, at_rest, cpu_percent

from quire.cache.request_kv import CacheUse
from quire.engine.messages import SequenceTimes
from quire.engine.reporting import Reporting, TimesPart
from quire.serve.tracing import Tracing

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


def collect() -> None:
    """Be a collector of spans, until the standard input ends; says its port."""

    class Take(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    collector = ThreadingHTTPServer(("127.0.0.1", 0), Take)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    print(collector.server_port, flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[str]:
    """A process of this program, and what it says first."""
    command = [sys.executable, "-m", "bench.serving.viewers", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as found:
        assert found.stdin is not None
        assert found.stdout is not None
        yield found.stdout.readline().strip()
        found.stdin.close()


@contextlib.contextmanager
def serving(*options: str) -> Iterator[tuple[int, psutil.Process]]:
    """A server, and its port."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--json", "--kv-memory", "32MiB", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            yield int(json.loads(server.stdout.readline())["url"].rpartition(":")[2]), psutil.Process(server.pid)
        finally:
            server.terminate()


def under_load(where: tuple[int, psutil.Process], options: argparse.Namespace) -> tuple[float, float]:
    """Tokens a second that clients get that ask one request after the other, and milliseconds of a core that the
    server's process takes for each."""
    port, server = where
    seconds, tokens = options.seconds, options.tokens
    began, before = time.monotonic(), sum(server.cpu_times()[:2])

    def client(_: int) -> int:
        count = 0
        while time.monotonic() < began + seconds:
            ask(port, tokens)
            count += tokens
        return count

    with ThreadPoolExecutor(options.clients) as pool:
        total = sum(pool.map(client, range(options.clients)))
    took = time.monotonic() - began
    at_rest(port)
    return total / took, (sum(server.cpu_times()[:2]) - before) * 1e3 / total


def compared(windows: Sequence[Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """Pairs of windows, without and with."""
    shares = sorted(beside[0] / alone[0] for alone, beside in windows)
    times = sorted(beside[1] / alone[1] for alone, beside in windows)
    rates, costs = ([[each[which] for each in pair] for pair in windows] for which in (0, 1))
    return {
        "tokens_a_second": [round(statistics.median(each), 1) for each in zip(*rates, strict=True)],
        "share_left": {"median": round(statistics.median(shares), 4), "all": [round(each, 3) for each in shares]},
        "cpu_ms_a_token": [round(statistics.median(each), 3) for each in zip(*costs, strict=True)],
        "cpu_share": {"median": round(statistics.median(times), 4), "all": [round(each, 3) for each in times]},
    }


def with_viewers(where: tuple[int, psutil.Process], options: argparse.Namespace) -> dict[str, Any]:
    """What viewers cost."""
    windows, percents = [], []
    under_load(where, options)  # first calls do not count
    for at in range(options.windows):
        pair, idle = [(0.0, 0.0)] * 2, [0.0] * 2
        for count in (0, 1) if at % 2 else (1, 0):
            with process("--view", str(where[0]), "--viewers", str(options.viewers * count)) as said:
                assert said == "ready"
                pair[count] = under_load(where, options)
                idle[count] = cpu_percent(where[1], options.seconds / 2)
        windows.append(pair)
        percents.append(idle)
    at_rest_percent = [round(statistics.mean(each), 2) for each in zip(*percents, strict=True)]
    return {"viewers": options.viewers, **compared(windows), "cpu_percent_at_rest": at_rest_percent}


def with_spans(plain: tuple[int, psutil.Process], options: argparse.Namespace) -> dict[str, Any]:
    """What spans cost: a server without them, and one whose spans a collector gets."""
    with (
        process("--collect") as port,
        serving("--otlp-traces-endpoint", f"http://127.0.0.1:{port}/v1/traces") as traced,
    ):
        under_load(traced, options)
        windows = []
        for at in range(options.windows):
            pair = [(0.0, 0.0)] * 2
            for which in (0, 1) if at % 2 else (1, 0):
                pair[which] = under_load(traced if which else plain, options)
            windows.append(pair)
        return {**compared(windows), **alone(f"http://127.0.0.1:{port}/v1/traces")}


def alone(collector: str) -> dict[str, Any]:
    """What spans cost in this process, by the time of its threads, which other work changes little: a request's to the
    thread that ends it and with the exporter's, in milliseconds, and the hooks of a step without prompts, in us."""
    tracing, part = Tracing(collector, "m"), TimesPart(Reporting())
    usage = {"prompt_tokens": 9, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    told = {"id": "cmpl-1", "client_id": "1", "usage": usage, "seconds": 1.0, "ends": "length"}
    headers = {"traceparent": f"00-{1:032x}-{1:016x}-01"}
    times = SequenceTimes(queued=1.0, matched=1.1, admitted=1.2, launched=1.3, first_token=1.4)
    own, every, count = time.thread_time(), time.process_time(), 300
    for _ in range(count):
        tracing.ended(tracing.parent(headers), told, 1.0, [(times, CacheUse(), 0.9)])
    own = time.thread_time() - own
    tracing.close()
    every = time.process_time() - every
    step: Any = SimpleNamespace(admitted=[])
    began, steps = time.thread_time(), 100_000
    for _ in range(steps):
        part.before_schedule()
        part.scheduled(step)
        part.launched(step)
        part.settled(step)
    us = (time.thread_time() - began) / steps * 1e6
    each = {"end_ms": own / count * 1e3, "with_export_ms": every / count * 1e3, "step_us": us}
    return {name: round(value, 3) for name, value in each.items()}


def main() -> int:
    """Measure, show and write; 1 if viewers or spans cost too much."""
    parser = argparse.ArgumentParser(description="What viewers of the page cost, and spans.")
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--windows", type=int, default=9, help="with viewers, and as many without")
    parser.add_argument("--seconds", type=float, default=6, help="of each window")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--toy", action="store_true", help="seconds; nothing is judged")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--view", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.collect:
        collect()
        return 0
    if options.view is not None:
        view(options.view, options.viewers)
        return 0
    if options.toy:
        options.windows, options.seconds = 2, 0.5
    with serving() as server:
        found = with_viewers(server, options)
        result = {**machine(), **found, "spans": with_spans(server, options)}
    save(options.json, result)
    for name, each in ((f"{options.viewers} viewers", result), ("spans", result["spans"])):
        print(f"{name}: {each['tokens_a_second']} tokens a second without and with them, {each['share_left']}")
        print(f"{name}: {each['cpu_ms_a_token']} ms of a core for a token, {each['cpu_share']}")
    print("spans: " + ", ".join(f"{name} {result['spans'][name]}" for name in ("end_ms", "with_export_ms", "step_us")))
    without, beside = result["cpu_percent_at_rest"]
    print(f"at rest the server takes {without} % of a core without viewers, {beside} % with them")
    is_dear = min(each["share_left"]["median"] for each in (result, result["spans"])) < LEAST
    is_dear |= beside - without > MOST_PERCENT
    return int(not options.toy and is_dear)


if __name__ == "__main__":
    raise SystemExit(main())
