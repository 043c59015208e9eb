"""The demo's tiers: a conversation that leaves the device, outlives its server twice, and finds a damaged record.

    1  small pool, host memory and a new directory    the conversation leaves the device and comes back from the host
       SIGTERM, and one byte of one record is changed
    2  the same directory                             it comes from storage up to that record; the rest is computed
       SIGKILL, while another conversation is being stored
    3  the same directory                             all of it comes from storage

The last question is asked three times, once of each server, and has to be answered with the same words.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from quire.cli.demo_client import Client
from quire.cli.demo_pools import Tick
from quire.cli.demo_script import RULES, question
from quire.cli.demo_server import pool_bytes, read_config, server_process

PAGE_SIZE = 16
MOST_CONTEXT = 640
SYSTEM_SHARE = 0.5  # of the context: two others and this one are more than the pool
ANSWER_TOKENS = 16
PROBED = 200  # characters
HOST_POOLS, STORAGE_POOLS = 8, 64  # times the bytes of the device's pool
DAMAGED_PAGE = 5  # of the conversation, counted from 0
PATIENCE_S = 10.0

Messages = list[dict[str, str]]


def show_tiers(console: Console, folder: Path) -> dict[str, Any]:
    """Three servers on one directory, one after the other; the findings."""
    with tempfile.TemporaryDirectory(prefix="quire-demo-") as directory:
        flags = _flags(folder, Path(directory))
        with console.status("A server with host memory and storage ..."), server_process(*flags) as (summary, _):
            talk = _Talk(Client(summary["url"]), summary["context"])
            first = talk.until_the_last_question()
        _damage(Path(directory), talk.num_pages_before + DAMAGED_PAGE)
        with console.status("Stopped, and started again ..."), server_process(*flags) as (summary, process):
            talk.client = Client(summary["url"])
            second = talk.ask_again()
            stranger = talk.ask(talk.last, salt="another")
            _until_stored(talk.client, second)
            talk.push(1)
            process.kill()
        with console.status("Killed, and started again ..."), server_process(*flags) as (summary, _):
            talk.client = Client(summary["url"])
            third = talk.ask_again()
    found: dict[str, Any] = {
        "model": summary["model"],
        "tiers": summary["tiers"],
        "pool_tokens": summary["tokens_that_fit"],
        "runs": [first, second, third],
        "stranger": stranger,
    }
    return found | {"checks": {tick.name: tick.passed for tick in tier_ticks(found)}}


def _flags(folder: Path, directory: Path) -> list[str]:
    context = min(int(read_config(folder)["max_position_embeddings"]), MOST_CONTEXT)
    pool = pool_bytes(folder, num_tokens=context, page_size=PAGE_SIZE)
    options = {
        "--model": folder,
        "--dtype": "float32",
        "--page-size": PAGE_SIZE,
        "--max-model-len": context,
        "--eviction": "lru",
        "--kv-memory": pool,
        "--host-memory": HOST_POOLS * pool,
        "--storage": directory,
        "--storage-size": STORAGE_POOLS * pool,
        "--load": "always",  # such a small model computes sooner than any tier loads; the default would say so
        "--prefetch": "wait_complete",
    }
    return [str(part) for option in options.items() for part in option]


class _Talk:
    """One conversation, and others that push it out of the device."""

    def __init__(self, client: Client, context: int) -> None:
        self.client = client
        self.last: Messages = []
        # A short prompt says about how many characters make a token.
        probe = client.chat([{"role": "user", "content": " ".join(RULES)[:PROBED]}], max_tokens=1)
        num_tokens = probe["usage"]["prompt_tokens"]
        self.num_pages_before = num_tokens // PAGE_SIZE
        self._characters = int(SYSTEM_SHARE * context * PROBED / num_tokens)

    def until_the_last_question(self) -> dict[str, Any]:
        """Two turns, others meanwhile, and the third."""
        messages = self._begin(0)
        for number in range(2):
            messages.append({"role": "user", "content": question("Emma", number, 0)})
            messages.append({"role": "assistant", "content": self.ask(messages)["answer"]})
        for seed in (1, 2):
            self.push(seed)
        self.last = [*messages, {"role": "user", "content": question("Emma", 2, 0)}]
        return self.ask_again()

    def ask_again(self) -> dict[str, Any]:
        """The last question, and what the tiers of this server have done by then."""
        found = self.ask(self.last)
        statistics = self.client.get("/v1/cache/statistics")
        tiers = statistics["tiers"]
        moved = {link: counters["bytes"] for link, counters in tiers["links"].items() if counters["bytes"]}
        private = sum(frames["private"] for frames in statistics["frames"].values())
        return found | {"moved_bytes": moved, "defects": tiers["defects"], "private_frames": private}

    def push(self, seed: int) -> None:
        """One question of another conversation."""
        self.ask([*self._begin(seed), {"role": "user", "content": question("the house", 0, seed)}])

    def ask(self, messages: Messages, salt: str = "") -> dict[str, Any]:
        """One answer, and where its prompt came from."""
        answer = self.client.chat(messages, max_tokens=ANSWER_TOKENS, temperature=0, cache_salt=salt)
        usage = answer["usage"]
        return {
            "answer": answer["choices"][0]["message"]["content"],
            "prompt_tokens": usage["prompt_tokens"],
            **usage["prompt_tokens_details"]["cached_tokens_by_tier"],
        }

    def _begin(self, seed: int) -> Messages:
        """A system prompt that no other seed shares."""
        rules = " ".join((f"Edition {seed}.", *RULES[seed:], *RULES[:seed]))
        text = (rules + " ") * (self._characters // len(rules) + 1)
        return [{"role": "system", "content": text[: self._characters]}]


def _damage(directory: Path, number: int) -> None:
    """Change one byte in the middle of a record, by its number in the order in which they were stored."""
    with closing(sqlite3.connect(directory / "index.sqlite")) as index:
        query = "SELECT slab, slot * slot_bytes + num_bytes / 2 FROM records ORDER BY id LIMIT 1 OFFSET ?"
        slab, at = index.execute(query, (number,)).fetchone()
    with (directory / "slabs" / f"{slab:012x}.slab").open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def _until_stored(client: Client, run: Mapping[str, Any]) -> None:
    """What that run computed again has been stored again."""
    wanted = (run["prompt_tokens"] - run["storage"]) // PAGE_SIZE
    until = time.monotonic() + PATIENCE_S
    while client.get("/v1/cache/statistics")["tiers"]["archived_frames"] < wanted and time.monotonic() < until:
        time.sleep(0.02)


def tier_ticks(found: Mapping[str, Any]) -> list[Tick]:
    """What the findings of `show_tiers` have to show."""
    first, second, third = found["runs"]
    reusable = (third["prompt_tokens"] - 1) // PAGE_SIZE * PAGE_SIZE
    same = len({run["answer"] for run in (first, second, third, found["stranger"])}) == 1
    return [
        Tick(
            "what left the device came back from host memory",
            first["host"] > 0 and first["moved_bytes"].get("load", 0) > 0,
            f"{first['host']:,} of {first['prompt_tokens']:,} prompt tokens, "
            f"{first['moved_bytes'].get('load', 0):,} bytes loaded",
        ),
        Tick(
            "stopped and started again, it came from storage",
            second["storage"] > 0 and second["moved_bytes"].get("fetch", 0) > 0,
            f"{second['storage']:,} of {second['prompt_tokens']:,}, up to the damaged record",
        ),
        Tick(
            "one damaged record was found and computed again",
            second["defects"] == {"storage:digest": 1} and second["storage"] == DAMAGED_PAGE * PAGE_SIZE,
            f"corrupt {sum(second['defects'].values())}",
        ),
        Tick(
            "another salt found nothing",
            not any(found["stranger"][tier] for tier in ("device", "host", "storage")),
            f"0 of {found['stranger']['prompt_tokens']:,}",
        ),
        Tick(
            "killed and started again, all of it came from storage",
            third["storage"] == reusable and not third["defects"],
            f"{third['storage']:,} of {third['prompt_tokens']:,}",
        ),
        Tick("every server gave the same answer", same),
        Tick("no frame leaked", not any(run["private_frames"] for run in found["runs"])),
    ]
