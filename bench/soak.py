"""Many clients with random aborts against a real server: every answer whole and equal to its solo run, nothing leaked.

    python bench/soak.py --clients 200 --seconds 60

Solo runs come first, one request at a time, without prefix caching, in an engine of this process. Then the clients send
the same requests to `quire serve` with a pool far too small for them, read them as streams, and drop about a quarter of
them somewhere on the way. At the end the server must be idle with no private page, and its memory as large as it was
after the first third of the run. Exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from quire import LLM, SamplingParams

SYSTEMS = (
    "You are a narrator who speaks of people and their letters. " * 6,
    "Answer in the manner of a quiet country town. " * 5,
    "Be brief.",
)
QUESTIONS = (
    "Tell me about Mr. Darcy.",
    "Say something about Emma.",
    "What happened at the ball?",
    "Tell me about a letter.",
    "Say something about the weather in Bath.",
    "Tell me about Captain Wentworth.",
    "What did Elizabeth say to her sister?",
    "Tell me about money.",
)
MOST_GROWTH = 0.05


def requests(max_tokens: int) -> list[dict[str, Any]]:
    """Every system prompt with every question, half of them greedy, half drawn with a seed."""
    made: list[dict[str, Any]] = []
    for i, (system, question) in enumerate((s, q) for s in SYSTEMS for q in QUESTIONS):
        sampling = {"temperature": 0} if i % 2 else {"temperature": 0.8, "seed": i}
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        made.append({"messages": messages, "max_tokens": max_tokens, **sampling})
    return made


def solo_answers(made: list[dict[str, Any]], model: list[str]) -> list[str]:
    """The text of each request alone on an engine of its own."""
    llm = LLM(*model, dtype="float32", enable_prefix_caching=False)
    answers = []
    for request in made:
        params = SamplingParams(
            temperature=request["temperature"], seed=request.get("seed"), max_tokens=request["max_tokens"]
        )
        answers.append(llm.chat(request["messages"], params)[0].outputs[0].text)
    return answers


class Soak:
    """One run against a server that is up."""

    def __init__(self, url: str, made: list[dict[str, Any]], expected: list[str], seed: int) -> None:
        self.url = url
        self.made = made
        self.expected = expected
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[tuple[str, str]] = []

    async def run(self, clients: int, seconds: float, server: psutil.Process) -> dict[str, Any]:
        """Let `clients` clients send requests until `seconds` have passed; what there is to report."""
        limits = httpx.Limits(max_connections=clients + 8)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as http:
            until = time.monotonic() + seconds
            tasks = [asyncio.create_task(self._client(http, until)) for _ in range(clients)]
            early = await self._watch(seconds, server)
            await asyncio.gather(*tasks)
            statistics = await self._idle(http)
        late = _rss(server)
        return {
            "answers": self.counts["answers"],
            "aborted": self.counts["aborted"],
            "wrong": len(self.wrong),
            "errors": self.counts["errors"],
            "output_tokens": statistics["output_tokens"],
            "hit_tokens": statistics["hit_tokens"],
            "evicted_pages": statistics["evicted_pages"],
            "preemptions": statistics["preemptions"],
            "private_pages_at_idle": statistics["frames"]["full"]["private"] + statistics["frames"]["full"]["moving"],
            "rss_mib_after_a_third": round(early / 2**20, 1),
            "rss_mib_at_the_end": round(late / 2**20, 1),
        }

    async def _client(self, http: httpx.AsyncClient, until: float) -> None:
        while time.monotonic() < until:
            which = self.random.randrange(len(self.made))
            abort_after = (
                self.random.randrange(1, self.made[which]["max_tokens"] * 3 // 4)
                if self.random.random() < 0.25
                else None
            )
            try:
                text = await self._ask(http, which, abort_after)
            except httpx.HTTPError:
                self.counts["errors"] += 1
                continue
            if text is None:
                self.counts["aborted"] += 1
            else:
                self.counts["answers"] += 1
                if text != self.expected[which]:
                    self.wrong.append((self.expected[which], text))

    async def _ask(self, http: httpx.AsyncClient, which: int, abort_after: int | None) -> str | None:
        """The streamed answer; None where it was dropped after some chunks."""
        pieces: list[str] = []
        body = {**self.made[which], "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return "".join(pieces)
                choices = json.loads(line[6:])["choices"]
                pieces.extend(choice["delta"].get("content") or "" for choice in choices)
                if abort_after is not None and len(pieces) > abort_after:
                    return None
        raise httpx.ReadError("the stream ended before its end")

    async def _watch(self, seconds: float, server: psutil.Process) -> int:
        early = 0
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("soak", total=seconds)
            for tick in range(int(seconds * 2)):
                await asyncio.sleep(0.5)
                progress.update(task, completed=(tick + 1) / 2)
                if not early and tick / 2 >= seconds / 3:
                    early = _rss(server)
        return early or _rss(server)

    async def _idle(self, http: httpx.AsyncClient) -> dict[str, Any]:
        for _ in range(600):
            statistics: dict[str, Any] = (await http.get("/v1/cache/statistics")).json()
            if statistics["running_requests"] == statistics["waiting_requests"] == 0:
                return statistics
            await asyncio.sleep(0.1)
        raise SystemExit("the server was not idle a minute after its last client had left")


def _rss(server: psutil.Process) -> int:
    return sum(process.memory_info().rss for process in [server, *server.children(recursive=True)])


def main() -> None:
    """Parse arguments, start the server, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--max-tokens", type=int, default=40, help="of each answer (%(default)s)")
    parser.add_argument("--model", default=None, help="a folder or hub id; the bundled model by default")
    parser.add_argument("--kv-memory", default="4MiB", help="small on purpose")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args()
    model = [options.model] if options.model else []
    made = requests(options.max_tokens)
    expected = solo_answers(made, model)
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--json", "--dtype", "float32"]
    command += ["--kv-memory", options.kv_memory, "--max-running-requests", str(options.max_running_requests)]
    command += ["--model", options.model] if options.model else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            soak = Soak(url, made, expected, options.seed)
            report = asyncio.run(soak.run(options.clients, options.seconds, psutil.Process(server.pid)))
        finally:
            server.terminate()
    report = {"clients": options.clients, "seconds": options.seconds, **report}
    if options.json:
        print(json.dumps(report))
    else:
        table = Table("", "", title="soak", show_header=False)
        for name, value in report.items():
            table.add_row(name.replace("_", " "), f"{value:,}")
        Console().print(table)
    for want, got in soak.wrong[:3]:
        print(f"expected {want!r}\n     got {got!r}", file=sys.stderr)
    flat = report["rss_mib_at_the_end"] <= report["rss_mib_after_a_third"] * (1 + MOST_GROWTH) + 8
    failed = report["wrong"] or report["errors"] or report["private_pages_at_idle"] or not report["answers"] or not flat
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
