"""Servers with an arena whose KV memory goes to half and back, while clients hold conversations.

    python -m bench.serving.resizes [--json FILE] [--models recurrent,window] [--resizes 100]

Each model serves the same conversations twice: with memory that keeps its size, and with memory that goes to half and
back, again and again. Host memory and a directory are below. It reports wrong tokens, lost requests, hit rates before,
while and after sizes change, how far the resident memory of the engine follows, and what turns of its loop take.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from bench.harness import SEED, machine, new_parser, save
from bench.serving.timed_server import FILE

MIB = 2**20
CLIENTS = 8
TURNS = 4
OWN, ANSWER = 120, 24
"""Tokens of a client and of the model in each turn. The first `SHARED` ones of all conversations are the same."""
SHARED = 64
VOCABULARY = 1000
WAIT_S = 60
ROUNDS = 3
"""Of the run that keeps its size: the first computes everything, and the others find it."""
_STAYS, _LOOKS = MIB // 4, 4  # resident memory is read once so many looks have seen no more change than that


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is served: bytes of KV memory, conversations, and how often the memory goes to half and back."""

    kv_bytes: int
    host_bytes: int
    conversations: int
    resizes: int


@dataclass(slots=True)
class Served:
    """What clients were answered: tokens by conversation and turn, and prompt tokens and cached ones in all."""

    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    wrong: int = 0
    lost: int = 0
    requests: int = 0
    tokens: Counter[str] = field(default_factory=Counter)

    def hit_rate(self) -> float:
        """Of the prompts since the last call, in per cent."""
        found, self.tokens = self.tokens, Counter()
        return round(100 * found["cached"] / max(1, found["prompt"]), 2)


class Clients:
    """Clients of one server, each with a conversation at a time. They can pause. Answers are compared with the first
    ones that `served` has."""

    def __init__(self, http: httpx.AsyncClient, served: Served, conversations: int) -> None:
        self._http, self._served = http, served
        draw = random.Random(SEED)
        shared = draw.choices(range(1, VOCABULARY), k=SHARED)
        own = [draw.choices(range(1, VOCABULARY), k=TURNS * (OWN + ANSWER)) for _ in range(conversations)]
        self._texts = [shared + each for each in own]
        self._may_ask = asyncio.Event()
        self._may_ask.set()
        self._asking = 0

    async def round(self) -> None:
        """All conversations once."""
        left = count()
        await self._all(lambda: next(left))

    async def until(self, done: asyncio.Event) -> None:
        """All conversations in turns, until it is `done`."""
        at = count()
        await self._all(lambda: next(at) % len(self._texts) if not done.is_set() else len(self._texts))

    async def paused(self) -> None:
        """No request runs until `go_on`."""
        self._may_ask.clear()
        while self._asking:
            await asyncio.sleep(0.01)

    def go_on(self) -> None:
        self._may_ask.set()

    async def _all(self, following: Any) -> None:
        async def talk() -> None:
            while (at := following()) < len(self._texts):
                for turn in range(TURNS):
                    await self._may_ask.wait()
                    await self._ask(at, turn)

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(talk())

    async def _ask(self, at: int, turn: int) -> None:
        """One turn. What the model said before is drawn as what its client said, so that a wrong answer counts once."""
        prompt = self._texts[at][: SHARED + OWN + turn * (OWN + ANSWER)]
        body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        served = self._served
        self._asking += 1
        served.requests += 1
        try:
            answer = (await self._http.post("/v1/completions", json=body)).raise_for_status().json()
        except httpx.HTTPError:
            served.lost += 1
            return
        finally:
            self._asking -= 1
        tokens = answer["choices"][0]["token_ids"]
        served.lost += len(tokens) != ANSWER
        expected = served.answers.setdefault((at, turn), tokens)
        served.wrong += sum(one != other for one, other in zip(expected, tokens, strict=False))
        served.tokens["prompt"] += len(prompt)
        served.tokens["cached"] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def resident(engine: psutil.Process) -> int:
    """Resident bytes of the engine without its heap, where what it remembers of prompts grows, once they stay."""
    until, seen = time.monotonic() + 20, list[int]()
    while time.monotonic() < until:
        seen.append(sum(each.rss for each in engine.memory_maps(grouped=False) if each.path != "[heap]"))
        if len(seen) >= _LOOKS and max(seen[-_LOOKS:]) - min(seen[-_LOOKS:]) <= _STAYS:
            break
        await asyncio.sleep(0.1)
    return seen[-1]


async def resized(http: httpx.AsyncClient, num_bytes: int, *, preempt: bool) -> dict[str, Any]:
    """The answer to another size, once it is reached."""
    body = {"device_bytes": num_bytes, "wait_s": WAIT_S, "preempt": preempt}
    answer = await http.post("/v1/cache/resize", json=body)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


async def half_and_back(
    http: httpx.AsyncClient, clients: Clients, engine: psutil.Process, size: Size
) -> dict[str, Any]:
    """Sizes change under load, which pauses only for a look at resident memory."""
    steps, late, seconds, evicted, moved = list[tuple[int, int]](), 0, list[float](), 0, 0

    async def look(reached: int) -> None:
        await clients.paused()
        steps.append((reached, await resident(engine)))
        clients.go_on()

    await look((await http.get("/v1/cache/memory")).json()["device"]["reached"])
    for at in range(2 * size.resizes):
        await asyncio.sleep(0.5)  # under load
        asked, began = size.kv_bytes // (2 - at % 2), time.monotonic()
        found = await resized(http, asked, preempt=at % 8 == 0)
        seconds.append(time.monotonic() - began)
        late += not found["done"]
        evicted += found["evicted_pages"]
        moved += found["moved_frames"]
        await look(found["device"]["reached"])
    follows = [100 * abs((one[1] - two[1]) - (one[0] - two[0])) / size.kv_bytes for one, two in pairwise(steps)]
    return {
        "sizes": 2 * size.resizes,
        "not_reached_in_time": late,
        "seconds_to_reach_median": round(statistics.median(seconds), 3),
        "seconds_to_reach_longest": round(max(seconds), 3),
        "evicted_pages": evicted,
        "moved_frames": moved,
        "resident_differs_percent_median": round(statistics.median(follows), 3),
        "resident_differs_percent_most": round(max(follows), 3),
        "resident_grows_percent": round(100 * (steps[-1][1] - steps[0][1]) / size.kv_bytes, 3),
    }


def turn_times(path: Path) -> dict[str, Any]:
    """Milliseconds of turns: those in which nothing moved, those in which frames moved, and those with a new size. Most
    frames move where prompts begin, so turns that move compute more: `move_ms` is what moves take of a turn."""
    rows = np.load(path)
    moved, asked = rows[:, 4] > 0, rows[:, 5] > 0
    found: dict[str, Any] = {"moves_percent_of_cpu": round(100 * rows[:, 2].sum() / max(1e-9, rows[:, 1].sum()), 2)}
    for name, chosen in (("plain", ~moved & ~asked), ("moving", moved & ~asked), ("new_size", asked)):
        some = rows[chosen]
        found[name] = {"turns": len(some)}
        if len(some):
            found[name] |= {"tokens_mean": round(float(some[:, 3].mean()), 1)}
            for at, kind in enumerate(("ms", "cpu_ms", "move_ms")):
                found[name] |= {
                    f"{kind}_median": round(1e3 * float(np.median(some[:, at])), 3),
                    f"{kind}_99": round(1e3 * float(np.quantile(some[:, at], 0.99)), 3),
                    f"{kind}_longest": round(1e3 * float(some[:, at].max()), 3),
                }
    return found


async def run(url: str, engine: psutil.Process, served: Served, size: Size) -> dict[str, Any]:
    """The load of one server. Sizes change if there are `resizes`."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        clients, found = Clients(http, served, size.conversations), dict[str, Any]()
        for name in ("cold", "before"):
            await clients.round()
            found[f"hit_rate_{name}"] = served.hit_rate()
        if size.resizes:
            done = asyncio.Event()
            load = asyncio.create_task(clients.until(done))
            found |= await half_and_back(http, clients, engine, size)
            done.set()
            await load
        else:
            for _ in range(ROUNDS - 2):
                await clients.round()
        found["hit_rate_while"] = served.hit_rate()
        await clients.round()
        found["hit_rate_after"] = served.hit_rate()
        counted = (await http.get("/v1/cache/statistics")).json()
        found |= {
            name: counted[name] for name in ("failed_requests", "refused_requests", "preemptions", "moved_frames")
        }
        found |= {"audit": (await http.get("/v1/cache/audit")).json()}
    return found


def serve(model: str, size: Size, served: Served, folder: Path) -> dict[str, Any]:
    """One server from its start to its end."""
    command = [sys.executable, "-m", "bench.serving.timed_server", "serve", "--port", "0", "--json", "--model", model]
    command += ["--arena", "--kv-memory", f"{size.kv_bytes // 4}..{size.kv_bytes}", "--dtype", "float32"]
    command += ["--host-memory", str(size.host_bytes), "--storage", str(folder / "store"), "--storage-size", "8GiB"]
    command += ["--load", "always", "--threads", "1", "--max-running-requests", str(CLIENTS)]
    turns = folder / "turns.npy"
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {FILE: str(turns)}
        )
    before = served.requests, served.wrong, served.lost
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            raise RuntimeError((folder / "log").read_text()[-800:])
        children = psutil.Process(server.pid).children(recursive=True)
        engine = max(children, key=lambda each: each.memory_info().rss)
        found = asyncio.run(run(json.loads(line)["url"], engine, served, size))
    finally:
        server.terminate()
        server.wait(60)
        complaints = [line for line in (folder / "log").read_text().splitlines() if " INFO " not in line]
        print("\n".join(complaints[-60:]), file=sys.stderr, flush=True)
    names = ("requests", "wrong_tokens", "lost_requests")
    now = served.requests, served.wrong, served.lost
    found |= {name: after - n for name, after, n in zip(names, now, before, strict=True)}
    return found | {"turns": turn_times(turns)}


def compare(model: str, size: Size) -> dict[str, Any]:
    """The same conversations with a size that stays, and with sizes that change."""
    served, found = Served(), dict[str, Any]()
    for name, resizes in (("fixed", 0), ("resized", size.resizes)):
        each = Size(
            kv_bytes=size.kv_bytes, host_bytes=size.host_bytes, conversations=size.conversations, resizes=resizes
        )
        with tempfile.TemporaryDirectory(prefix="quire-resizes-") as folder:
            found[name] = serve(f"quire-bundled-{model}", each, served, Path(folder))
        print(model, name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    parser = new_parser(__doc__ or "")
    parser.add_argument("--models", default="recurrent,window", help="bundled ones (%(default)s)")
    parser.add_argument("--resizes", type=int, help="how often to half and back; 100 by default")
    parser.add_argument("--kv-mib", type=int, help="of KV memory at most; 64 by default")
    parser.add_argument("--conversations", type=int, help="120 by default, which are more than fit")
    options = parser.parse_args()
    usual = (2, 24, 10) if options.toy else (100, 64, 120)
    given = (options.resizes, options.kv_mib, options.conversations)
    resizes, mib, conversations = (own or default for own, default in zip(given, usual, strict=True))
    size = Size(kv_bytes=mib * MIB, host_bytes=2 * mib * MIB, conversations=conversations, resizes=resizes)
    result: dict[str, Any] = machine(kv_mib=mib, conversations=conversations, models={})
    for model in options.models.split(","):
        result["models"][model] = compare(model, size)
    save(options.json, result)
    faults = [
        f"{model}: {name}"
        for model, runs in result["models"].items()
        for name in ("wrong_tokens", "lost_requests", "failed_requests", "refused_requests", "not_reached_in_time")
        if runs["resized"][name]
    ]
    faults += [each for runs in result["models"].values() if (each := runs["resized"]["audit"]["violation"])]
    if faults:
        sys.exit(f"not as they should be: {', '.join(faults)}")


if __name__ == "__main__":
    main()
