"""What a generated token costs between the engine's step and the client's socket: CPU of both processes, and latency.

    python -m bench.serving.output_path                  everything, about a minute
    python -m bench.serving.output_path --only "64 rows" rows whose names contain it
    python -m bench.serving.output_path --toy            small sizes, in seconds; fails if a client misses a token

The real server runs, with its sockets, its tokenizer and an engine process in which a producer takes the place of the
model: it repeats each prompt, one token for each row and step, at a fixed pace. Clients are in this process, and their
CPU is not counted. Arrivals and ends of requests are outside of what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.harness import machine, new_parser, save

from quire.client.async_engine import AsyncEngine
from quire.client.process import Progress
from quire.engine.config import EngineConfig, engine_config
from quire.engine.messages import EngineRequest, Ready, StepOutputs, TokenOutput
from quire.serve.config import ServerConfig
from quire.serve.server import Running, serve

TEXT = (
    "A page is a fixed number of tokens, and a frame is the memory of a page. The table says which frame holds a page. "
    "When a request ends, its pages stay in the tree until others need the room, and a later prompt finds them there. "
)
EDGE = 8  # first and last steps of a case that are not measured
TIMEOUT_S = 120.0


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all threads: Linux has a clock for each process."""
    return time.clock_gettime((~pid << 3) | 2)


@dataclass(frozen=True)
class Case:
    """`rows` clients, each of which gets `tokens` at one for each `period_ms`. `fields` are others of the body."""

    name: str
    rows: int
    period_ms: float
    tokens: int
    route: str = "/v1/completions"
    fields: dict[str, Any] = field(default_factory=dict)


def cases(*, toy: bool) -> Iterator[Case]:
    """The rows of the table."""
    if toy:
        yield Case("1 row", 1, 2, 40)
        yield Case("4 rows", 4, 4, 40)
        yield Case("4 rows, stop strings", 4, 4, 40, fields={"stop": ["\n\n", "###"]})
        return
    for rows, period_ms, tokens in ((1, 4, 500), (16, 8, 300), (64, 25, 120), (200, 60, 80)):
        yield Case(f"{rows} row{'s' if rows > 1 else ''}", rows, period_ms, tokens)
    shown = {"skip_special_tokens": False}  # of the chat template: a token without text is no event
    yield Case("64 rows, chat", 64, 25, 120, "/v1/chat/completions", shown)
    yield Case("64 rows, stop strings", 64, 25, 120, fields={"stop": ["\n\n", "###"]})
    yield Case("64 rows, usage at the end", 64, 25, 120, fields={"stream_options": {"include_usage": True}})
    yield Case("64 rows, not streamed", 64, 25, 120, fields={"stream": False})


class Producer:
    """In place of the engine's core: repeats the prompts. The priority of a request says how many come with it."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        self._requests: dict[str, list[int]] = {}
        self._left = self._total = self._expected = self._rows = 0
        self._period_s = self._due_s = 0.0
        self._sent_s: list[float] = []
        self._spent: list[tuple[float, float]] = []
        self._found: dict[str, Any] = {}

    def add(self, request: EngineRequest) -> None:
        self._requests[request.request_id] = request.tokens().tolist()
        self._expected, self._total = request.priority, request.params.max_tokens or 0
        self._period_s = float(request.params.presence_penalty)
        if len(self._requests) == self._expected:
            self._left, self._rows, self._sent_s, self._spent, self._found = self._total, self._expected, [], [], {}
            self._due_s = time.perf_counter()

    def abort(self, request_id: str, *, stopped: bool = False) -> None:
        self._requests.pop(request_id, None)

    def has_work(self) -> bool:
        return self._left > 0

    def is_due(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def step(self) -> StepOutputs:
        self._due_s += self._period_s
        time.sleep(max(0.0, self._due_s - time.perf_counter()))
        at = len(self._sent_s)
        if at in (EDGE, self._total - EDGE):
            self._spent.append((cpu_s(os.getpid()), cpu_s(os.getppid())))
        self._left -= 1
        ids = list(self._requests)
        tokens = [prompt[at % len(prompt)] for prompt in self._requests.values()]
        outputs = StepOutputs(request_ids=ids, token_ids=tokens)
        if at == 0 or self._left == 0:
            reason = None if self._left else "length"
            both = zip(ids, tokens, strict=True)
            noted = [TokenOutput(request_id=name, token_ids=[token], finish_reason=reason) for name, token in both]
            outputs = StepOutputs(noted=noted)
        self._sent_s.append(time.perf_counter())
        if self._left == 0:
            count = (self._total - 2 * EDGE) * self._rows
            shares = zip(*self._spent, strict=True)
            self._found = {"us": [(end - begin) / count * 1e6 for begin, end in shares], "sent_s": self._sent_s}
            self._requests = {}
        return outputs

    def ready(self) -> Ready:
        return Ready(context_length=4096, eos_token_ids=[], counters=self.counters())

    def counters(self) -> dict[str, Any]:
        return {"steps": 0, "running_requests": len(self._requests), "waiting_requests": 0, "found": self._found}


def front() -> None:
    """The server, whose URL is printed once it answers."""

    def on_ready(running: Running) -> None:
        print(running.url, flush=True)

    serve(
        engine_config(served_model_name="quire-bundled"),
        ServerConfig(port=0),
        on_ready=on_ready,
        start=partial(AsyncEngine.start, build=Producer),
    )


class Client:
    """One connection that reads a stream."""

    def __init__(self, port: int, case: Case, number: int) -> None:
        body = {
            **({"messages": [{"role": "user", "content": TEXT}]} if "chat" in case.route else {"prompt": TEXT}),
            "max_tokens": case.tokens,
            "priority": -case.rows,
            "presence_penalty": case.period_ms / 1e3,
            "stream": True,
            **case.fields,
        }
        payload = json.dumps(body).encode()
        head = f"POST {case.route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(head.encode() + f"Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        self.arrived_s: list[float] = []
        self.received = bytearray()

    def read(self) -> bool:
        """What has arrived; whether the connection is open."""
        found = self.socket.recv(65536)
        now = time.perf_counter()
        self.arrived_s += [now] * found.count(b'"finish_reason":')  # an event is one write, so it comes whole
        self.received += found
        return bool(found)


def measure(url: str, case: Case) -> dict[str, Any]:
    """One row of the table."""
    port = int(url.rpartition(":")[2])
    clients = [Client(port, case, number) for number in range(case.rows)]
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.socket, selectors.EVENT_READ, client)
        until = time.monotonic() + TIMEOUT_S
        while selector.get_map():
            assert time.monotonic() < until, f"{case.name}: no end"
            for key, _ in selector.select(1.0):
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
    found: dict[str, Any] = {}
    while "us" not in found:
        assert time.monotonic() < until, f"{case.name}: nothing was measured"
        with urllib.request.urlopen(f"{url}/v1/cache/statistics") as answer:
            found = json.load(answer)["found"]
    latencies: list[float] = []
    problems = set()
    for client in clients if case.fields.get("stream", True) else ():
        arrived = client.arrived_s["chat" in case.route :]  # a chat begins with an event of its own
        if b"data: [DONE]" not in client.received or len(arrived) != case.tokens:
            problems.add(f"{case.name}: {len(arrived)} events for {case.tokens} tokens")
        else:
            pairs = list(zip(arrived, found["sent_s"], strict=True))[EDGE:-EDGE]
            latencies += [(got - sent) * 1e6 for got, sent in pairs]
    engine_us, front_us = found["us"]
    latency = {}
    if latencies:
        latency = {"median": statistics.median(latencies), "p99": sorted(latencies)[len(latencies) * 99 // 100]}
    return {
        "name": case.name,
        "engine_us": round(engine_us, 2),
        "front_us": round(front_us, 2),
        "total_us": round(engine_us + front_us, 2),
        "latency_us": {name: round(value, 1) for name, value in latency.items()},
        "problems": sorted(problems),
    }


def best(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The repeat with the least CPU, with the least of the latencies."""
    row = min(found, key=lambda each: each["total_us"])
    if row["latency_us"]:
        row["latency_us"] = {name: min(each["latency_us"][name] for each in found) for name in row["latency_us"]}
    row["problems"] = [problem for each in found for problem in each["problems"]]
    return row


def table(result: dict[str, Any]) -> str:
    """The result as text, one line for each case."""
    lines = [
        f"{result['date']}, {result['cores']} cores, load {result['load']}; microseconds for a token",
        f"{'':34} {'engine':>8} {'front':>8} {'CPU':>8}   {'latency':>8} {'p99':>8}",
    ]
    for row in result["rows"]:
        latency = row["latency_us"]
        shown = f"{latency['median']:8.0f} {latency['p99']:8.0f}" if latency else ""
        lines.append(
            f"{row['name']:34} {row['engine_us']:8.1f} {row['front_us']:8.1f} {row['total_us']:8.1f}   {shown}"
        )
    return "\n".join([*lines, *(f"WRONG: {problem}" for problem in result["problems"])])


def main() -> int:
    """Measure, show and write; 1 if a client missed a token."""
    parser = new_parser(
        "Measure the way of a token from the engine to the client.",
        toy="small sizes; exits 1 if a client misses a token",
    )
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--repeats", type=int, default=3, help="of each row; the best one is shown")
    parser.add_argument("--front", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.front:
        front()
        return 0
    chosen = [case for case in cases(toy=options.toy) if options.only in case.name]
    command = [sys.executable, __file__, "--front"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            measure(url, next(cases(toy=True)))  # imports and first calls do not count
            repeats = range(1 if options.toy else options.repeats)
            rows = [best([measure(url, case) for _ in repeats]) for case in chosen]
        finally:
            server.terminate()
    result = {
        **machine(),
        "rows": rows,
        "problems": [problem for row in rows for problem in row.pop("problems")],
    }
    print(table(result))
    save(options.json, result)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
