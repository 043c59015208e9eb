"""What idle and slow connections cost a client that is neither: its waiting time alone, and beside them.

    python -m bench.serving.connections                        500 idle and 100 slow ones, two minutes
    python -m bench.serving.connections --idle 0 --slow 400    other crowds
    python -m bench.serving.connections --toy                  a small crowd, in seconds

The real server runs. The client connects anew for each request and reads its stream; windows with the crowd and without
take turns. Of the slow connections a third send a byte of their headers now and then, a third one of their body, and a
third read a byte of an answer. Of the idle ones half have never sent anything and half have had an answer. Connections
that the server closes are opened again. Exits with 1 if the client waits more than twice as long, which `--toy` does
not judge, or is not answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from bench.harness import machine, save

MOST = 2.0
"""Times as long as alone that the client may wait."""

BYTE_EVERY_S = 0.2
AGAIN_AFTER_S = 0.5  # a connection that was closed
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
TEXT = "It was a fine evening, and the whole party had walked out. "


# -- the crowd, in a process of its own


class Crowd:
    """Connections of one event loop. `ready` is set when each has been open once."""

    def __init__(self, port: int, *, idle: int, slow: int) -> None:
        self.ready = asyncio.Event()
        self.num_opened = 0
        self._port = port
        kinds = [self._silent, self._quiet]
        self._tasks = [kinds[number % 2] for number in range(idle)]
        kinds = [self._slow_head, self._slow_body, self._slow_reader]
        self._tasks += [kinds[number % 3] for number in range(slow)]

    async def run(self) -> None:
        """Until it is cancelled."""
        await asyncio.gather(*(self._again(kind) for kind in self._tasks))

    async def _again(self, kind: Any) -> None:
        has_been_open = False
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1024)
                if not has_been_open:
                    has_been_open = True
                    self.num_opened += 1
                    if self.num_opened == len(self._tasks):
                        self.ready.set()
                try:
                    await kind(reader, writer)
                finally:
                    writer.close()
            await asyncio.sleep(AGAIN_AFTER_S)

    @staticmethod
    async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    @staticmethod
    async def _quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        while await reader.read(1024):
            pass

    @staticmethod
    async def _slow_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _drip(writer, HEAD * 100)

    @staticmethod
    async def _slow_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Content-Length: 100000\r\n\r\n")
        await _drip(writer, b" " * 100_000)

    @staticmethod
    async def _slow_reader(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = json.dumps({"prompt": TEXT, "max_tokens": 64, "stream": True, "ignore_eos": True}).encode()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        while await reader.read(1):
            await asyncio.sleep(BYTE_EVERY_S)


async def _drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    for at in range(len(data)):
        writer.write(data[at : at + 1])
        await writer.drain()
        await asyncio.sleep(BYTE_EVERY_S)


def crowd(port: int, idle: int, slow: int) -> None:
    """Be the crowd until the standard input ends; says when all are connected, and at the end how many ever were."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    async def run() -> None:
        made = Crowd(port, idle=idle, slow=slow)
        running = asyncio.create_task(made.run())
        await made.ready.wait()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


@contextlib.contextmanager
def beside(port: int, idle: int, slow: int) -> Iterator[None]:
    """With a crowd that is connected."""
    command = [sys.executable, __file__, "--crowd", str(port), "--idle", str(idle), "--slow", str(slow)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.stdin.close()


# -- the client


def get(port: int, path: str) -> Any:
    """The decoded answer of a GET."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return json.load(connection.getresponse())


def at_rest(port: int) -> None:
    """Wait until nothing runs: what slow readers have asked for is computed."""
    until = time.monotonic() + 120
    while (found := get(port, "/v1/cache/statistics"))["running_requests"] + found["waiting_requests"]:
        assert time.monotonic() < until, "no rest"
        time.sleep(0.05)


def ask(port: int, tokens: int) -> tuple[float, float]:
    """Milliseconds to the first token of an answer and to its end, from before the connection."""
    body = {"prompt": TEXT, "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    began, first = time.perf_counter(), 0.0
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        text = b""
        while part := answer.read1():
            first = first or time.perf_counter()
            text += part
    assert text.count(b'"finish_reason":') == tokens and b"[DONE]" in text, text[-500:]
    return (first - began) * 1e3, (time.perf_counter() - began) * 1e3


def window(port: int, seconds: float, tokens: int) -> list[tuple[float, float]]:
    """The requests of one client, one after the other, for so long."""
    until, found = time.monotonic() + seconds, []
    while time.monotonic() < until:
        found.append(ask(port, tokens))
    return found


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile."""
    ordered = sorted(values)
    shares = {"median": statistics.median(ordered)}
    shares |= {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (95, 99)}
    return {name: round(value, 2) for name, value in shares.items()}


def cpu_percent(server: psutil.Process, seconds: float) -> float:
    """Of a core that a server takes for connections that ask for nothing."""
    family = [server, *server.children(recursive=True)]
    began, before = time.monotonic(), sum(sum(each.cpu_times()[:2]) for each in family)
    time.sleep(seconds)
    after = sum(sum(each.cpu_times()[:2]) for each in family)
    return (after - before) / (time.monotonic() - began) * 100


def measure(port: int, server: psutil.Process, options: argparse.Namespace) -> dict[str, Any]:
    """The result, without where it was measured."""
    alone: list[tuple[float, float]] = []
    crowded: list[tuple[float, float]] = []
    percents: list[float] = []
    window(port, options.seconds / 4, options.tokens)  # first calls do not count
    for _ in range(options.windows):
        alone += window(port, options.seconds, options.tokens)
        with beside(port, options.idle, options.slow):
            at_rest(port)
            percents.append(cpu_percent(server, options.seconds / 2))
            crowded += window(port, options.seconds, options.tokens)
        at_rest(port)
    found: dict[str, Any] = {"idle": options.idle, "slow": options.slow, "requests": [len(alone), len(crowded)]}
    found["cpu_percent"] = round(statistics.median(percents), 1)
    for index, name in enumerate(("first_token_ms", "whole_ms")):
        rows = [quantiles([each[index] for each in found]) for found in (alone, crowded)]
        times = {share: round(rows[1][share] / rows[0][share], 2) for share in rows[0]}
        found[name] = {"alone": rows[0], "beside": rows[1], "times": times}
    return found


def main() -> int:
    """Measure, show and write; 1 if the client waits too long."""
    parser = argparse.ArgumentParser(description="What idle and slow connections cost a good client.")
    parser.add_argument("--idle", type=int, default=500)
    parser.add_argument("--slow", type=int, default=100)
    parser.add_argument("--windows", type=int, default=5, help="with the crowd, and as many without")
    parser.add_argument("--seconds", type=float, default=10, help="of each window")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--model", help="a folder or hub id; the bundled model by default")
    parser.add_argument(
        "--toy", action="store_true", help="a small crowd; nothing is judged but that the client is answered"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--crowd", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.crowd is not None:
        crowd(options.crowd, options.idle, options.slow)
        return 0
    if options.toy:
        options.idle, options.slow, options.windows, options.seconds = 50, 12, 3, 0.5
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--json", "--kv-memory", "8MiB"]
    command += ["--model", options.model] if options.model else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(json.loads(server.stdout.readline())["url"].rpartition(":")[2])
            result = measure(port, psutil.Process(server.pid), options)
        finally:
            server.terminate()
    result = {
        **machine(),
        **result,
    }
    print(
        f"{result['idle']} idle and {result['slow']} slow connections; {result['cores']} cores, load {result['load']}"
    )
    print(f"{'milliseconds':16} {'':8} {'median':>8} {'p95':>8} {'p99':>8}")
    for name in ("first_token_ms", "whole_ms"):
        for row, shares in result[name].items():
            print(f"{name:16} {row:8} " + " ".join(f"{value:8.2f}" for value in shares.values()))
    save(options.json, result)
    print(f"the server takes {result['cpu_percent']} % of a core for connections that ask for nothing")
    if options.toy:
        return 0  # its windows are too short for times on a machine that does other things
    times = [result[name]["times"][share] for name in ("first_token_ms", "whole_ms") for share in ("median", "p95")]
    return int(max(times) > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
