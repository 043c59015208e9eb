"""A server whose memory gets smaller and larger: over HTTP, on the command line, and as the system counts it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import Result
from typer.testing import CliRunner

from quire.cli.app import app
from quire.client.async_engine import AsyncEngine
from quire.client.process import Core
from quire.engine.config import engine_config
from quire.engine.messages import ResizeRequest
from quire.errors import InvalidInput
from quire.scheduler.sampling_params import SamplingParams
from tests.serve.live_server import LiveServer

MIB = 2**20
LEAST, MOST = 4 * MIB, 320 * MIB


def run(*arguments: str) -> Result:
    """`quire` with arguments, in this process."""
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    options = ("--kv-memory", "4MiB..320MiB", "--host-memory", "256MiB", "--load", "always", "--max-model-len", "2048")
    options += ("--stall-after", "2")
    with LiveServer.quire("--model", "quire-bundled", "--dtype", "float32", *options) as server:
        yield server


def asked(live: LiveServer, path: str, body: dict[str, Any] | None = None) -> Any:
    status, answer = live.request(path, body)
    assert status == 200, answer
    return answer


def resident(live: LiveServer) -> int:
    """Resident bytes of the engine's process without its heap, where what it remembers of prompts grows, once they have
    stayed for a while."""
    engine = max(live._children, key=lambda process: process.memory_info().rss)
    until, seen = time.monotonic() + 20, [0]
    while time.monotonic() < until and (len(seen) < 4 or max(seen[-4:]) - min(seen[-4:]) > MIB // 4):
        time.sleep(0.1)
        maps = engine.memory_maps(grouped=False)
        seen.append(sum(each.rss for each in maps if each.path != "[heap]"))
    return seen[-1]


def complete(live: LiveServer, number: int, tokens: int = 24) -> tuple[list[int], int]:
    """A prompt of two parts, of which others have the first; its tokens, and how many of the prompt were cached."""
    prompt = [*range(1, 200), *(7 + (number * 31 + at * at) % 900 for at in range(100))]
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    answer = asked(live, "/v1/completions", body)
    found = answer["choices"][0]["token_ids"]
    assert len(found) == tokens
    return found, int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("times", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_the_system_gets_its_memory_back_under_load(live: LiveServer, times: int) -> None:
    """By half and back: the resident memory of the engine follows within one per cent of the pools, and each request
    has the tokens that it has alone."""
    alone = [complete(live, number)[0] for number in range(6)]
    first, wrong, ends = 0, [], threading.Event()

    def load(number: int) -> None:
        while not ends.is_set():
            if complete(live, number)[0] != alone[number]:
                wrong.append(number)

    for turn in range(times + 1):
        threads = [threading.Thread(target=load, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        goal, preempt = (160 * MIB, LEAST)[turn % 2], turn % 4 > 1
        small = asked(live, "/v1/cache/resize", {"device_bytes": goal, "wait_s": 30, "preempt": preempt})
        assert small["done"] and small["device"]["reached"] <= goal, small
        ends.set()
        for thread in threads:
            thread.join()
        half = resident(live)
        if turn:  # the first load of an engine takes memory beside the pools
            assert first - half == pytest.approx(MOST - small["device"]["reached"], abs=MOST // 100)
        large = asked(live, "/v1/cache/resize", {"device_bytes": MOST})
        assert large["done"] and large["device"]["reached"] > MOST - MIB
        assert not turn or resident(live) == pytest.approx(first, abs=MOST // 100)
        first = first or resident(live)
        ends.clear()
    assert not wrong
    statistics = asked(live, "/v1/cache/statistics")
    assert statistics["failed_requests"] == statistics["refused_requests"] == 0
    assert statistics["resizes"] >= 2 * times


def test_what_was_cached_is_found_on_the_host_after_a_release(live: LiveServer) -> None:
    before = [complete(live, number) for number in range(6)]
    hits = [cached for _, cached in (complete(live, number) for number in range(6))]
    assert min(hits) > 250
    found = asked(live, "/v1/cache/memory/release", {"wait_s": 30})
    assert found["done"] and found["released"] and found["evicted_pages"] > 0
    assert found["device"]["reached"] < MIB
    waiting: list[tuple[list[int], int]] = []
    thread = threading.Thread(target=lambda: waiting.append(complete(live, 0)))
    thread.start()
    time.sleep(4)
    assert not waiting and asked(live, "/v1/cache/statistics")["waiting_requests"] == 1
    health = asked(live, "/health")
    assert health["status"] == "degraded" and "is released" in health["stuck"][0], "longer than --stall-after"
    found = asked(live, "/v1/cache/memory/resume", {})
    assert found["done"] and not found["released"] and found["device"]["reached"] > MOST - MIB
    thread.join(30)
    again = [complete(live, number) for number in range(6)]
    assert [waiting[0], *again[1:]] == [(tokens, cached) for (tokens, _), cached in zip(before, hits, strict=True)]


def test_the_command_line_shows_and_changes_the_size(live: LiveServer) -> None:
    def memory(*options: str) -> Any:
        done = run("memory", "--url", live.summary["url"], *options)
        assert done.exit_code == 0, done.output
        return done.stdout

    found = json.loads(memory("--json"))
    assert found["done"] and (found["device"]["least"], found["device"]["most"]) == (LEAST, MOST)
    assert MOST - MIB < found["device"]["reached"] <= MOST
    found = json.loads(memory("--resize", "64MiB", "--json"))
    assert found["done"] and 63 * MIB < found["device"]["reached"] <= 64 * MIB
    shown = memory()
    assert "the KV memory is in use" in shown and "64.00 MiB" in shown and "320.00 MiB" in shown
    assert json.loads(memory("--release", "--json"))["released"]
    assert "is released, and requests wait" in memory()
    assert not json.loads(memory("--resume", "--json"))["released"]
    assert json.loads(memory("--resize", "320MiB", "--json"))["done"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--release", "--resume"), "--release and --resume were given"),
        (("--preempt",), "add --resize 8GiB"),
        (("--resize", "1GiB"), "ask for 4MiB to 320MiB, or start the server with --kv-memory 4MiB..1GiB."),
        (("--resize", "1MiB"), "ask for 4MiB to 320MiB, or start the server with --kv-memory 1MiB..320MiB."),
        (("--resize-host", "1KiB"), "use --resize-host (host_bytes) "),
    ],
)
def test_what_cannot_be_is_told(live: LiveServer, options: tuple[str, ...], told: str) -> None:
    done = run("memory", "--url", live.summary["url"], *options)
    assert done.exit_code == 2
    assert told in " ".join(done.output.replace("│", " ").split())


def test_other_bodies_are_refused(live: LiveServer) -> None:
    for body in (
        {},
        {"device_bytes": "many"},
        {"device_bytes": -1},
        {"device_bytes": MOST, "wait_s": 1e9},
        {"bytes": 1},
    ):
        status, answer = live.request("/v1/cache/resize", body)
        assert status == 400 and answer["error"]["message"], answer
    for size in (-5, "-1MiB", 9000000.5):
        message = live.request("/v1/cache/resize", {"device_bytes": size})[1]["error"]["message"]
        assert message.startswith("device_bytes: ") and "QUIRE" not in message and "Fix: write a number" in message
    assert psutil.pid_exists(live.process.pid)


def test_released_memory_is_no_fault_of_the_engine() -> None:
    """What was sent waits until the memory is resumed, for longer than a stall may last, and says why."""

    async def check() -> None:
        config = engine_config(model="quire-bundled", kv_memory="1MiB..4MiB", max_model_len=512)
        engine = await AsyncEngine.start(config, stall_after_s=4.0)
        try:
            assert (await engine.ask(Core.release_memory, 0.0)).done
            waiting = asyncio.create_task(anext(engine.generate("Emma", SamplingParams(max_tokens=1))))
            deadline = time.monotonic() + 60
            while "released" not in (await engine.statistics())["waiting_reason"]:
                assert time.monotonic() < deadline, engine.last_statistics
            await asyncio.sleep(6.0)
            assert engine.health().healthy, engine.health()
            await engine.ask(Core.resume_memory, 0.0)
            await waiting
        finally:
            await engine.shutdown()

    asyncio.run(check())


def test_an_engine_that_is_started_again_has_the_sizes_and_terms_of_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    file.write_text(json.dumps({"quiet": {"floor": "60%"}, "noisy": {"floor": "30%"}}))

    async def check() -> None:
        config = engine_config(
            model="quire-bundled", kv_memory="1MiB..4MiB", host_memory="2MiB", max_model_len=256, tenants=file
        )
        engine = await AsyncEngine.start(config, max_restarts=2)

        async def dies() -> None:
            os.kill(engine._process.process.pid or 0, signal.SIGKILL)
            restarts = engine.num_restarts + 1
            deadline = time.monotonic() + 120
            while engine.num_restarts < restarts:
                assert time.monotonic() < deadline, engine.health()
                await asyncio.sleep(0.05)

        try:
            await engine.ask(Core.set_tenant, "noisy", {"weight": 3})
            await engine.ask(Core.set_tenant, "quiet", {"floor": "30%"})
            await engine.ask(Core.set_tenant, "noisy", {"floor": "60%"})  # only after that of the other
            await engine.ask(Core.resize, ResizeRequest(device_bytes=3 * MIB, wait_s=10))
            await engine.ask(Core.resize, ResizeRequest(device_bytes=2 * MIB, host_bytes=MIB, wait_s=10))
            with pytest.raises(InvalidInput):
                await engine.ask(Core.resize, ResizeRequest(device_bytes=5 * MIB))
            before = await engine.ask(Core.memory)
            await dies()
            found = await engine.ask(Core.memory)
            assert (found.device, found.host, found.released) == (before.device, before.host, False)
            assert found.device.asked == 2 * MIB and found.host.asked == MIB
            terms = {each.name: each for each in await engine.ask(Core.tenants)}
            assert (terms["quiet"].floor, terms["noisy"].floor, terms["noisy"].now.weight) == ("30%", "60%", 3)
            await engine.ask(Core.release_memory, 10.0)
            await dies()
            assert (await engine.ask(Core.memory)).released
            assert (await engine.ask(Core.resume_memory, 10.0)).device == before.device
        finally:
            await engine.shutdown()

    asyncio.run(check())
