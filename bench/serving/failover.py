"""Streams whose server is killed: whether each has the tokens of an undisturbed run, and how long it waits.

    python -m bench.serving.failover

Runs `quire up` with two engines of the bundled model, in float32. Clients stream; every few seconds one of the engines'
servers is killed by signal 9. A stream is `same` if its text and its usage are those of a run without kills.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from bench.harness import machine, new_parser, save

TEXT = "It was a fine autumn evening, and the whole party had walked out to see the new plantation. "
ENGINES = ("--decode", "2", "--dtype", "float32", "--kv-memory", "128MiB", "--max-model-len", "2048")


@dataclass
class Stream:
    """What a client got."""

    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    longest_s: float = 0.0  # between two events
    problem: str = ""


@contextmanager
def cluster(prefill: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`quire up`, and the address of its router."""
    command = [sys.executable, "-m", "quire", "up", "--json", "--port", "0", "--prefill", str(prefill), *ENGINES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            rows = iter(process.stdout.readline, "")
            yield next(row["url"] for line in rows if (row := json.loads(line))["role"] == "router"), process
        finally:
            process.send_signal(signal.SIGTERM)


def body(number: int, tokens: int) -> dict[str, Any]:
    """Half of them are drawn with a seed, half are greedy."""
    drawn = {"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": number}
    usage = {"stream_options": {"include_usage": True}}
    return (
        {"prompt": f"Chapter {number}. " + TEXT * 2, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        | drawn
        | usage
    )


async def stream(client: httpx.AsyncClient, given: dict[str, Any]) -> Stream:
    """Read one to its end."""
    found, last = Stream(), time.monotonic()
    is_done = False
    async with client.stream("POST", "/v1/completions", json=given) as answer:
        if answer.status_code != 200:
            return Stream(problem=f"status {answer.status_code}")
        async for line in answer.aiter_lines():
            now = time.monotonic()
            found.longest_s, last = max(found.longest_s, now - last), now
            is_done |= line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            found.problem = event.get("error", {}).get("message", found.problem)
            found.usage = event.get("usage") or found.usage
            found.text += "".join(choice["text"] for choice in event.get("choices", ()))
    found.problem = found.problem or ("" if is_done else "no [DONE]")
    return found


async def load(url: str, clients: int, tokens: int, until: asyncio.Event | None) -> dict[int, list[Stream]]:
    """By body, its streams; each client sends its own again and again, or once."""
    found: dict[int, list[Stream]] = {number: [] for number in range(clients)}

    async def client(number: int) -> None:
        while not found[number] or (until is not None and not until.is_set()):
            found[number].append(await stream(http, body(number, tokens)))

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        await asyncio.gather(*map(client, range(clients)))
    return found


async def kill(url: str, times: int, until: asyncio.Event) -> list[float]:
    """Kill one server after the other, each when all work; returns how long each was missing, in seconds."""
    missing = []
    async with httpx.AsyncClient(base_url=url, timeout=10) as http:
        for turn in range(times):
            await asyncio.sleep(2.0)
            rows = (await http.get("/health")).json()["processes"]
            os.kill(rows[turn % len(rows)]["pid"], signal.SIGKILL)
            began = time.monotonic()
            await asyncio.sleep(0.3)
            while (await http.get("/health")).json()["status"] != "ok":
                await asyncio.sleep(0.05)
            missing.append(time.monotonic() - began)
            print(f"kill {turn + 1} of {times}: whole again after {missing[-1]:.1f} s", file=sys.stderr, flush=True)
    until.set()
    return missing


async def measure(url: str, clients: int, tokens: int, times: int) -> dict[str, Any]:
    """The same streams without kills and with them."""
    expected = {number: streams[0] for number, streams in (await load(url, clients, tokens, None)).items()}
    until = asyncio.Event()
    found, missing = await asyncio.gather(load(url, clients, tokens, until), kill(url, times, until))
    streams = [(expected[number], each) for number, some in found.items() for each in some]
    gaps = sorted(each.longest_s for _, each in streams)
    used = ("prompt_tokens", "completion_tokens")
    return {
        "clients": clients,
        "tokens": tokens,
        "kills": times,
        "streams": len(streams),
        "same_text": sum(each.text == whole.text for whole, each in streams),
        "right_usage": sum(all(each.usage.get(name) == whole.usage[name] for name in used) for whole, each in streams),
        "problems": sorted({each.problem for _, each in streams if each.problem}),
        "longest_gap_s": {"p50": round(gaps[len(gaps) // 2], 2), "max": round(gaps[-1], 2)},
        "whole_again_s": {"p50": round(sorted(missing)[len(missing) // 2], 1), "max": round(max(missing), 1)},
    }


def main() -> None:
    """Measure, show and write."""
    parser = new_parser("Kill servers under streams, and compare what clients get.")
    parser.add_argument("--prefill", type=int, default=0, help="engines that compute prompts; they are killed, too")
    options = parser.parse_args()
    with cluster(options.prefill) as (url, _):
        found = asyncio.run(measure(url, *((4, 64, 1) if options.toy else (32, 400, 20))))
    print(json.dumps(found, indent=2))
    save(options.json, {**machine(), "prefill": options.prefill, **found})


if __name__ == "__main__":
    main()
