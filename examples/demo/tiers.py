"""The demo's tiers: a conversation that leaves the device, outlives its server twice, and finds a damaged record.

1  small pool, host memory and a new directory    the conversation leaves the device and comes back from the host
   SIGTERM, and one byte of one record is changed
2  the same directory                             it comes from storage up to that record; the rest is computed
   SIGKILL, while another conversation is being stored
3  the same directory                             all of it comes from storage
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli.server import Server
from quire.errors import start_error
from quire.plan.budget import format_bytes

PAGE_SIZE = 16
FLAGS = (  # 40 pages on the device; such a small model computes faster than any tier loads
    "--dtype float32 --page-size 16 --max-model-len 640 --eviction lru --kv-memory 2624KiB --host-memory 20MiB "
    "--storage-size 164MiB --prefetch wait_complete --load always"
)
SYSTEM_CHARACTERS = 900
DAMAGED_PAGE = 5  # of the conversation, counted from 0
TIERS = ("device", "host", "storage")
PATIENCE_S, STOP_S = 10.0, 20.0
RULES = (
    "Write in complete sentences, and end each of them with a full stop.",
    "Mention the person or the thing that the user asks about in the first sentence.",
    "Keep every answer between one and five sentences long, without lists, tables or headings.",
    "Use British spelling throughout: honour, favour, neighbour, colour, civilise.",
    "When the user asks you to go on, continue from the last sentence that you wrote.",
    "Never speak of yourself, and never apologise for an answer.",
    "Be civil to the user, whatever the manner of the question may be.",
    "Describe a house by its rooms, its grounds and the road that leads to it.",
    "Describe a person by what they say and do, and leave the judgement to the reader.",
    "The setting is a village in the south of England, with a town some ten miles away.",
    "Letters may be quoted, but never at a length of more than three sentences.",
)
FOLLOW_UPS = ("Go on.", "What happened next?", "Tell me more.", "And then?")

Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Tick:
    """A claim of the demo: whether it holds, and the numbers."""

    name: str
    passed: bool
    numbers: str = ""


@contextmanager
def server_process(*options: str) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """`quire serve` on a free port, without variables `QUIRE_NAME`: its summary and its process, stopped at the end."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--json", "--drain", "2", *options]
    env = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, env=env, stderr=log, **pipes) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                process.wait(STOP_S)
                log.seek(0)
                raise start_error(log.read(), process.returncode)
            yield json.loads(line), process
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def question(subject: str, number: int, seed: int) -> str:
    """Question `number` of a conversation about `subject`; conversations of other seeds go on in other words."""
    return FOLLOW_UPS[(number + seed) % len(FOLLOW_UPS)] if number else f"Tell me about {subject}."


def show_tiers() -> tuple[dict[str, Any], list[Tick], Rows]:
    """Three servers on one directory, one after the other, and one question to each: findings, ticks and a table."""
    with tempfile.TemporaryDirectory(prefix="quire-demo-") as directory:
        flags = ["--storage", directory, *FLAGS.split()]
        with server_process(*flags) as (summary, _):
            messages = _messages("Emma", 0)
            for number in (1, 2):
                answer = _ask(summary["url"], messages)["answer"]
                messages.append({"role": "assistant", "content": answer})
                messages.append({"role": "user", "content": question("Emma", number, 0)})
            for seed in (1, 2):
                _ask(summary["url"], _messages("the house", seed))
            first = _ask_last(summary["url"], messages)
        _damage(Path(directory), DAMAGED_PAGE)
        with server_process(*flags) as (summary, process):
            second = _ask_last(summary["url"], messages)
            stranger = _ask(summary["url"], messages, salt="another")
            _wait_until_stored(summary["url"], (second["prompt_tokens"] - second["storage"]) // PAGE_SIZE)
            _ask(summary["url"], _messages("the house", 1))
            process.kill()
        with server_process(*flags) as (summary, _):
            third = _ask_last(summary["url"], messages)
    found = {name: summary[name] for name in ("model", "tiers")} | {"pool_tokens": summary["tokens_that_fit"]}
    found |= {"runs": [first, second, third], "stranger": stranger}
    return found, tier_ticks(found), _rows(found)


def _messages(subject: str, seed: int) -> list[dict[str, str]]:
    """The first question of a conversation, after a system prompt of half a context that no other seed shares."""
    rules = (f"Style {seed}.", *RULES[seed:], *RULES[:seed])
    system = {"role": "system", "content": " ".join(rules)[:SYSTEM_CHARACTERS]}
    return [system, {"role": "user", "content": question(subject, 0, seed)}]


def _ask(url: str, messages: Sequence[Mapping[str, str]], salt: str = "") -> dict[str, Any]:
    """One answer, and where its prompt came from."""
    body = {"messages": messages, "max_tokens": 16, "temperature": 0, "cache_salt": salt}
    answer = Server(url).ask("/v1/chat/completions", body)
    usage = answer["usage"]
    tiers = usage["prompt_tokens_details"]["cached_tokens_by_tier"]
    return {"answer": answer["choices"][0]["message"]["content"], "prompt_tokens": usage["prompt_tokens"], **tiers}


def _ask_last(url: str, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """The last answer of the conversation, and what the tiers of this server have done by then."""
    found, statistics = _ask(url, messages), Server(url).ask("/v1/cache/statistics")
    tiers = statistics["tiers"]
    moved = {name: counters["bytes"] for name, counters in tiers["links"].items() if counters["bytes"]}
    private = sum(frames["private"] for frames in statistics["frames"].values())
    return found | {"moved_bytes": moved, "defects": tiers["defects"], "private_frames": private}


def _wait_until_stored(url: str, frames: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while Server(url).ask("/v1/cache/statistics")["tiers"]["archived_frames"] < frames and time.monotonic() < until:
        time.sleep(0.02)


def _damage(directory: Path, number: int) -> None:
    """Change one byte in the middle of a record, by its number in the order in which they were stored."""
    with closing(sqlite3.connect(directory / "index.sqlite")) as index:
        pages = "FROM records WHERE substr(name, -2) = x'0000'"  # and not what they are of
        query = f"SELECT slab, slot * slot_bytes + num_bytes / 2 {pages} ORDER BY id LIMIT 1 OFFSET ?"
        slab, at = index.execute(query, (number,)).fetchone()
    with (directory / "slabs" / f"{slab:012x}.slab").open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def tier_ticks(found: Mapping[str, Any]) -> list[Tick]:
    """The claims about the findings of `show_tiers`."""
    first, second, third = found["runs"]
    reusable = (third["prompt_tokens"] - 1) // PAGE_SIZE * PAGE_SIZE
    loaded, fetched = first["moved_bytes"].get("load", 0), second["moved_bytes"].get("fetch", 0)
    damage = second["defects"] == {"storage:digest": 1} and second["storage"] == DAMAGED_PAGE * PAGE_SIZE
    answers = {run["answer"] for run in (first, second, third, found["stranger"])}
    strange = sum(found["stranger"][tier] for tier in TIERS)
    whole = third["storage"] == reusable and not third["defects"]
    from_store = f"{third['storage']:,} of {third['prompt_tokens']:,} tokens"
    return [
        Tick("what had left the device came back from host memory", first["host"] > 0 < loaded, format_bytes(loaded)),
        Tick("after a stop and a start, it came from storage", second["storage"] > 0 < fetched, format_bytes(fetched)),
        Tick("one damaged record was found and computed again", damage),
        Tick("a client with another cache_salt found nothing", not strange),
        Tick("after SIGKILL and a start, all of it came from storage", whole, from_store),
        Tick("every server gave the same answer", len(answers) == 1),
        Tick("no frame leaked", not any(run["private_frames"] for run in found["runs"])),
    ]


def _rows(found: Mapping[str, Any]) -> Rows:
    """Sizes of the tiers, and where the prompt of the last question came from, server by server."""
    host, storage = found["tiers"]["host"], found["tiers"]["storage"]
    sizes = {"Device": found["pool_tokens"], "Host memory": host["tokens"], "Storage": storage["tokens"]}
    rows = [(name, f"room for {tokens:,} tokens") for name, tokens in sizes.items()]
    for name, run in zip(("First server", "After SIGTERM", "After SIGKILL"), found["runs"], strict=True):
        places = ", ".join(f"{run[tier]:,} from {tier}" for tier in TIERS)
        rows.append((name, f"of {run['prompt_tokens']:,} prompt tokens {places}"))
    return rows
