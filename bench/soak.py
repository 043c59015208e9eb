"""Many clients with random aborts against a real server: every answer whole and equal to its solo run, nothing leaked.

    python bench/soak.py --clients 200 --seconds 60
    python bench/soak.py --clients 60 --seconds 1800 --tiers --flush-every 200

Solo runs come first, one request at a time, without prefix caching, in an engine of this process. Then the clients send
the same requests to `quire serve` with a pool far too small for them, read them as streams, and drop about a quarter of
them somewhere on the way. When the last request has ended, no page may be private; soon after, none may move in any
tier, and the audit must find nothing. Files, threads and processes must be as many as before. After ten minutes or
more, memory must be as large as after a third of the run. Exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
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
GROWS_AFTER_S = 600.0  # shorter runs say nothing about memory
MORE_FILES = 16  # slabs of a directory
MORE_THREADS = 8  # of pools that grow when they are needed, up to the number of cores and 4
MORE_PROCESSES = 0
AT_REST_S = 60.0  # for requests to end, then for pages to move, then for connections to close


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

    def __init__(
        self,
        url: str,
        made: list[dict[str, Any]],
        expected: list[str],
        seed: int,
        *,
        flush_every: int | None,
        least_answers: int,
    ) -> None:
        self.url = url
        self.flush_every = flush_every
        self.least_answers = least_answers
        self.made = made
        self.expected = expected
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[tuple[str, str]] = []

    async def run(self, clients: int, seconds: float, server: psutil.Process) -> dict[str, Any]:
        """Let `clients` clients send requests until `seconds` have passed; what there is to report."""
        limits = httpx.Limits(max_connections=clients + 8)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as http:
            before = Held.of(server)
            until = time.monotonic() + seconds
            tasks = [asyncio.create_task(self._client(http, until)) for _ in range(clients)]
            early = await self._watch(seconds, server)
            await asyncio.gather(*tasks)
            ended = await self._statistics(http, lambda found: not requests_in(found))
            statistics = await self._statistics(http, lambda found: not pages_in(found, "moving"))
            audit = (await http.get("/v1/cache/audit")).json()
        late = Held.of(server)
        until = time.monotonic() + AT_REST_S
        while late.more_than(before) and time.monotonic() < until:  # connections of clients that have left close
            await asyncio.sleep(0.1)
            late = Held.of(server)
        tiers = statistics.get("tiers") or {}
        return {
            "answers": self.counts["answers"],
            "aborted": self.counts["aborted"],
            "wrong": len(self.wrong),
            "errors": self.counts["errors"],
            "output_tokens": statistics["output_tokens"],
            "hit_tokens": statistics["hit_tokens"],
            "evicted_pages": statistics["evicted_pages"] + tiers.get("demoted_pages", 0),
            "preemptions": statistics["preemptions"],
            "flushes": self.counts["flushes"],
            "from_lower_tiers": tiers.get("host_hit_tokens", 0) + tiers.get("storage_hit_tokens", 0),
            "requests_at_the_end": requests_in(ended),
            "private_pages_at_idle": pages_in(ended, "private"),
            "moving_pages_at_idle": pages_in(ended, "moving"),
            "moving_pages_at_the_end": pages_in(statistics, "moving"),
            "audit": [*audit["faults"], *filter(None, [audit["violation"]])] if audit["ended"] else ["not ended"],
            "rss_mib_after_a_third": round(early.rss / 2**20, 1),
            "rss_mib_at_the_end": round(late.rss / 2**20, 1),
            "files_before": before.files,
            "files_at_the_end": late.files,
            "threads_before": before.threads,
            "threads_at_the_end": late.threads,
            "processes_before": before.processes,
            "processes_at_the_end": late.processes,
            "holds_more": late.more_than(before),
        }

    async def _client(self, http: httpx.AsyncClient, until: float) -> None:
        while time.monotonic() < until or self.counts["answers"] < self.least_answers:
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
                if self.flush_every and self.counts["answers"] % self.flush_every == 0:
                    (await http.post("/v1/cache/flush", json={"all": True})).raise_for_status()
                    self.counts["flushes"] += 1

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

    async def _watch(self, seconds: float, server: psutil.Process) -> Held:
        early: Held | None = None
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("soak", total=seconds)
            began = time.monotonic()
            while (passed := time.monotonic() - began) < seconds or self.counts["answers"] < self.least_answers:
                await asyncio.sleep(0.5)
                progress.update(task, completed=min(passed, seconds))
                if early is None and passed >= seconds / 3 and self.counts["answers"] >= self.least_answers / 2:
                    early = Held.of(server)
        return early or Held.of(server)

    async def _statistics(self, http: httpx.AsyncClient, rests: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """As soon as the server rests in that way, or as they are at a deadline."""
        until = time.monotonic() + AT_REST_S
        while True:
            found: dict[str, Any] = (await http.get("/v1/cache/statistics")).json()
            if rests(found) or time.monotonic() > until:
                return found
            await asyncio.sleep(0.05)


def requests_in(statistics: dict[str, Any]) -> int:
    """Requests that run or wait."""
    return int(statistics["running_requests"] + statistics["waiting_requests"])


def pages_in(statistics: dict[str, Any], state: str) -> int:
    """Frames with this kind of owner, in all tiers."""
    tiers = statistics.get("tiers") or {"host": {}}
    return sum(group.get(state, 0) for group in (*statistics["frames"].values(), *tiers["host"].values()))


@dataclass(frozen=True, slots=True)
class Held:
    """What a server and its children hold: bytes of memory, open files, threads."""

    rss: int
    files: int
    threads: int
    processes: int

    @classmethod
    def of(cls, server: psutil.Process) -> Held:
        family = [server, *server.children(recursive=True)]
        return cls(
            rss=sum(process.memory_info().rss for process in family),
            files=sum(process.num_fds() for process in family),
            threads=sum(process.num_threads() for process in family),
            processes=len(family),
        )

    def more_than(self, before: Held) -> bool:
        """Whether there are more files, threads or processes than may be."""
        return (
            self.files > before.files + MORE_FILES
            or self.threads > before.threads + MORE_THREADS
            or self.processes > before.processes + MORE_PROCESSES
        )


def main() -> None:
    """Parse arguments, start the server, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--max-tokens", type=int, default=40, help="of each answer (%(default)s)")
    parser.add_argument("--model", default=None, help="a folder or hub id; the bundled model by default")
    parser.add_argument("--kv-memory", default="4MiB", help="small on purpose")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--tiers", action="store_true", help="with host memory and a directory below the device")
    parser.add_argument("--flush-every", type=int, metavar="ANSWERS", help="flush the whole cache after so many")
    parser.add_argument("--least-answers", type=int, default=0, help="go on until there are so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args()
    model = [options.model] if options.model else []
    made = requests(options.max_tokens)
    expected = solo_answers(made, model)
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--json", "--dtype", "float32"]
    command += ["--kv-memory", options.kv_memory, "--max-running-requests", str(options.max_running_requests)]
    command += ["--model", options.model] if options.model else []
    with tempfile.TemporaryDirectory(prefix="quire-soak-") as folder:
        if options.tiers:
            command += ["--host-memory", "8MiB", "--storage", f"{folder}/store", "--storage-size", "32MiB"]
            command += ["--load", "always"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
            try:
                assert server.stdout is not None
                url = json.loads(server.stdout.readline())["url"]
                least, flush_every = options.least_answers, options.flush_every
                soak = Soak(url, made, expected, options.seed, flush_every=flush_every, least_answers=least)
                report = asyncio.run(soak.run(options.clients, options.seconds, psutil.Process(server.pid)))
            finally:
                server.terminate()
    report = {"clients": options.clients, "seconds": options.seconds, **report}
    if options.json:
        print(json.dumps(report))
    else:
        table = Table("", "", title="soak", show_header=False)
        for name, value in report.items():
            table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int | float) else str(value))
        Console().print(table)
    for want, got in soak.wrong[:3]:
        print(f"expected {want!r}\n     got {got!r}", file=sys.stderr)
    names = ("wrong", "errors", "requests_at_the_end", "private_pages_at_idle", "moving_pages_at_the_end", "audit")
    faults = [name for name in (*names, "holds_more") if report[name]]
    most = report["rss_mib_after_a_third"] * (1 + MOST_GROWTH) + 8
    if options.seconds >= GROWS_AFTER_S and report["rss_mib_at_the_end"] > most:
        faults.append("rss_mib_at_the_end")
    if faults:
        print(f"not as they should be: {', '.join(faults)}", file=sys.stderr)
    sys.exit(1 if faults or not report["answers"] else 0)


if __name__ == "__main__":
    main()
