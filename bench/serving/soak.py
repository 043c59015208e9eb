"""Many clients with random aborts against a real server: every answer whole and equal to its solo run, nothing leaked.

    python -m bench.serving.soak --clients 200 --seconds 60
    python -m bench.serving.soak --clients 40 --seconds 1800 --tiers --flush-every 200 --sessions

Solo runs come first, one request at a time, without prefix caching, in an engine of this process. Then the clients send
the same requests to `quire serve` with a pool far too small for them, read them as streams, and drop about a quarter of
them somewhere on the way. When the last request has ended, no page may be private; soon after, none may move in any
tier, and the audit must find nothing. Files, threads and processes must be as many as before. After ten minutes or
more, memory must be as large as after a third of the run. Exits with 1 where anything differs.

With `--sessions` a third of the clients hold conversations: they drop turns and send them again, edit what was said,
close sessions, or leave them to expire. The other clients rest half of the time, as sessions hold nothing while
requests wait for room. At the end no session may hold anything.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
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
MOST_TURNS = 3
REST_S = 2.0
SESSION_COUNTS = ("sessions_continued", "sessions_expired", "sessions_given_up", "session_resumed_tokens")
MOST_GROWTH = 0.05
GROWS_AFTER_S = 600.0  # shorter runs say nothing about memory
MORE_FILES = 16  # slabs of a directory
MORE_THREADS = 7 + (os.cpu_count() or 1)  # of pools: 4 tokenise, 3 of a directory, and the tokenizer's own
MORE_PROCESSES = 0
MUST_BE_NONE = (
    *("wrong", "errors", "requests_at_the_end", "sessions_at_the_end", "private_pages_at_idle"),
    *("moving_pages_at_the_end", "audit", "holds_more"),
)
AT_REST_S = 60.0  # for requests to end, then for pages to move, then for connections to close


def requests(max_tokens: int) -> list[dict[str, Any]]:
    """Every system prompt with every question, half of them greedy, half drawn with a seed."""
    made: list[dict[str, Any]] = []
    for i, (system, question) in enumerate((s, q) for s in SYSTEMS for q in QUESTIONS):
        sampling = {"temperature": 0} if i % 2 else {"temperature": 0.8, "seed": i}
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        made.append({"messages": messages, "max_tokens": max_tokens, **sampling})
    return made


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a conversation, with its solo answer."""

    body: dict[str, Any]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, each after the history of those before, and a last one with another word somewhere in its history."""

    turns: list[Turn]
    edited: Turn


def conversations(llm: LLM, max_tokens: int) -> list[Conversation]:
    """One for each question, half of them greedy, half drawn with a seed."""
    assert llm.tokenizer is not None

    def turn(prompt: list[int], sampling: dict[str, Any]) -> Turn:
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        answer = llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0]
        body = {"prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, **sampling}
        return Turn(body, list(answer.token_ids))

    made = []
    for i, question in enumerate(QUESTIONS):
        sampling = {"temperature": 0} if i % 2 else {"temperature": 0.8, "seed": i}
        history, turns = llm.tokenizer.encode(SYSTEMS[i % 3] + question).tolist(), []
        for more in range(1, MOST_TURNS + 1):
            turns.append(turn(history, sampling))
            new = llm.tokenizer.encode(QUESTIONS[(i + more) % len(QUESTIONS)]).tolist()
            history = [*history, *turns[-1].tokens, *new]
        middle = len(history) // 2
        made.append(Conversation(turns, turn([*history[:middle], history[0], *history[middle + 1 :]], sampling)))
    return made


def solo_answers(made: list[dict[str, Any]], llm: LLM) -> list[str]:
    """The text of each request alone on an engine of its own."""
    answers = []
    for request in made:
        params = SamplingParams(
            temperature=request["temperature"], seed=request.get("seed"), max_tokens=request["max_tokens"]
        )
        answers.append(llm.chat(request["messages"], params)[0].outputs[0].text)
    return answers


@dataclass(slots=True)
class Answer:
    """What a stream has brought so far. `start` is how a turn of a session began."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    start: str = ""
    chunks: int = 0


class Soak:
    """One run against a server that is up."""

    def __init__(
        self,
        url: str,
        made: list[dict[str, Any]],
        expected: list[str],
        talks: list[Conversation],
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
        self.talks = talks
        self.session_ids = itertools.count()
        self.starts: Counter[str] = Counter()  # turns by how they began
        self.rss_by_minute: list[dict[str, float]] = []
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[tuple[str, str]] = []

    async def run(self, clients: int, seconds: float, server: psutil.Process) -> dict[str, Any]:
        """Let `clients` clients send requests until `seconds` have passed; what there is to report."""
        limits = httpx.Limits(max_connections=clients + 8)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as http:
            before = Held.of(server)
            until = time.monotonic() + seconds
            kinds = [self._talk if self.talks and index % 3 == 0 else self._question for index in range(clients)]
            tasks = [asyncio.create_task(self._client(http, kind, until)) for kind in kinds]
            early = await self._watch(seconds, server)
            await asyncio.gather(*tasks)
            ended = await self._statistics(http, lambda found: not requests_in(found) and not found["sessions"])
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
            "sessions": next(self.session_ids),
            "turns": dict(sorted(self.starts.items())),
            **{name: statistics[name] for name in SESSION_COUNTS},
            "sessions_at_the_end": ended["sessions"] + ended["sessions_held"] + ended["session_held_pages"],
            "audit": [*audit["faults"], *filter(None, [audit["violation"]])] if audit["ended"] else ["not ended"],
            "rss_mib_by_minute": self.rss_by_minute,
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

    async def _client(
        self, http: httpx.AsyncClient, ask: Callable[[httpx.AsyncClient], Awaitable[None]], until: float
    ) -> None:
        while time.monotonic() < until or self._is_short():
            try:
                await ask(http)
            except httpx.HTTPError:
                self.counts["errors"] += 1

    def _is_short(self) -> bool:
        """Whether more must be done, however long it takes."""
        counts, turns = self.counts, self.starts["continued"] or not self.talks
        return self.least_answers > 0 and not (counts["answers"] >= self.least_answers and counts["aborted"] and turns)

    async def _question(self, http: httpx.AsyncClient) -> None:
        """One request of a chat, which may be dropped."""
        while self.talks and time.monotonic() % (2 * REST_S) < REST_S:
            await asyncio.sleep(0.1)
        which = self.random.randrange(len(self.made))
        answer = await self._ask(http, "/v1/chat/completions", self.made[which])
        if answer is not None:
            await self._answered(http, self.expected[which], answer.text)

    async def _talk(self, http: httpx.AsyncClient) -> None:
        """One conversation. A turn that was dropped is sent again; sometimes one is that of another history."""
        talk, session_id = self.random.choice(self.talks), str(next(self.session_ids))
        edits_at = self.random.randrange(4 * len(talk.turns))
        for at, turn in enumerate(talk.turns):
            asked = [talk.edited, turn] if at == edits_at else [turn]
            for each in asked:
                answer = None
                while answer is None:
                    answer = await self._ask(http, "/v1/completions", {**each.body, "session_id": session_id})
                self.starts[answer.start] += 1
                await self._answered(http, str(each.tokens), str(answer.tokens))
            await asyncio.sleep(self.random.random() / 4)
        if self.random.random() < 0.5:
            (await http.delete(f"/v1/sessions/{session_id}")).raise_for_status()

    async def _answered(self, http: httpx.AsyncClient, expected: str, got: str) -> None:
        self.counts["answers"] += 1
        if got != expected:
            self.wrong.append((expected, got))
        if self.flush_every and self.counts["answers"] % self.flush_every == 0:
            (await http.post("/v1/cache/flush", json={"all": True})).raise_for_status()
            self.counts["flushes"] += 1

    async def _ask(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer | None:
        """The streamed answer; None where it was dropped after some chunks, as one of four is."""
        most = body["max_tokens"] * 3 // 4
        abort_after = self.random.randrange(most) if self.random.random() < 0.25 else None
        answer = Answer()
        async with http.stream("POST", path, json={**body, "stream": True}) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return answer
                for choice in json.loads(line[6:])["choices"]:
                    answer.text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
                    answer.tokens += choice.get("token_ids") or ()
                    answer.start = (choice.get("session") or {}).get("start", answer.start)
                    answer.chunks += 1
                if abort_after is not None and answer.chunks >= abort_after:
                    self.counts["aborted"] += 1
                    return None
        raise httpx.ReadError("the stream ended before its end")

    async def _watch(self, seconds: float, server: psutil.Process) -> Held:
        early: Held | None = None
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("soak", total=seconds)
            began = time.monotonic()
            while (passed := time.monotonic() - began) < seconds or self._is_short():
                await asyncio.sleep(0.5)
                progress.update(task, completed=min(passed, seconds))
                if passed >= 60 * len(self.rss_by_minute):
                    self.rss_by_minute.append(rss_mib(server))
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


def rss_mib(server: psutil.Process) -> dict[str, float]:
    """Memory of the front, of the engine, which has the most of its children, and of the others."""
    front, children = server.memory_info().rss, [each.memory_info().rss for each in server.children(recursive=True)]
    sizes = {"front": front, "engine": max(children), "others": sum(children) - max(children)}
    return {name: round(size / 2**20, 1) for name, size in sizes.items()}


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
    parser.add_argument("--sessions", action="store_true", help="a third of the clients hold conversations")
    parser.add_argument("--session-ttl", type=float, default=5.0, help="seconds (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args()
    model = [options.model] if options.model else []
    made = requests(options.max_tokens)
    llm = LLM(*model, dtype="float32", enable_prefix_caching=False)
    expected = solo_answers(made, llm)
    talks = conversations(llm, options.max_tokens) if options.sessions else []
    llm.close()
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--json", "--dtype", "float32"]
    command += ["--kv-memory", options.kv_memory, "--max-running-requests", str(options.max_running_requests)]
    command += ["--session-ttl", str(options.session_ttl), "--session-share", "0.5"]
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
                soak = Soak(url, made, expected, talks, options.seed, flush_every=flush_every, least_answers=least)
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
    faults = [name for name in MUST_BE_NONE if report[name]]
    most = report["rss_mib_after_a_third"] * (1 + MOST_GROWTH) + 8
    if options.seconds >= GROWS_AFTER_S and report["rss_mib_at_the_end"] > most:
        faults.append("rss_mib_at_the_end")
    if faults:
        print(f"not as they should be: {', '.join(faults)}", file=sys.stderr)
    sys.exit(1 if faults or not report["answers"] else 0)


if __name__ == "__main__":
    main()
