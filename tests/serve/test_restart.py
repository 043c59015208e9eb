"""An engine that dies under a server: what its clients get, and that another takes its place."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire.client import async_engine
from quire.client.async_engine import AsyncEngine
from quire.client.changes import Changes
from quire.client.process import Core, EngineProcess, Progress
from quire.engine.config import EngineConfig, engine_config
from quire.engine.messages import ResizeRequest
from quire.errors import EngineDead
from quire.scheduler.sampling_params import SamplingParams
from tests import waits
from tests.serve.fake_core import ByteTokenizer, EchoCore
from tests.serve.live_server import LiveServer
from tests.serve.test_async_engine import text_of, until

forked = pytest.mark.usefixtures("forked_engines")


@asynccontextmanager
async def running(max_restarts: int) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.start(
        engine_config(), build=EchoCore, tokenizer=ByteTokenizer(), max_restarts=max_restarts
    )
    try:
        yield engine
    finally:
        await engine.shutdown()


def kill(engine: AsyncEngine) -> int:
    pid = engine._process.process.pid or 0
    os.kill(pid, signal.SIGKILL)
    return pid


def check_another_engine_takes_its_place(how: str = "kill") -> None:
    """Open streams end with an error that says when to come again; then requests are answered as before."""

    async def body() -> None:
        async with running(2) as engine:
            waiting = [asyncio.create_task(text_of(engine, "abc", max_tokens=None)) for _ in range(3)]
            await asyncio.sleep(0.05)
            if how == "kill":
                pid = kill(engine)
            else:
                pid = engine._process.process.pid or 0
                waiting.append(asyncio.create_task(text_of(engine, "crash")))
            for result in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60):
                assert isinstance(result, EngineDead) and "started again" in str(result)
            assert not engine.health().healthy
            with pytest.raises(EngineDead) as refused:
                await engine.submit("abc", SamplingParams())
            assert refused.value.status == 503 and (refused.value.retry_after_s or 0) >= 1

            async def well() -> bool:
                return engine.health().healthy

            await until(well, timeout_s=60)
            assert await text_of(engine, "ab", max_tokens=3) == "aba"
            assert engine.num_restarts == 1 and not psutil.pid_exists(pid)
            assert (await engine.statistics())["aborted_requests"] == 0, "a new core"

    asyncio.run(body())


@forked
@pytest.mark.parametrize("how", ["kill", "crash"])
def test_another_engine_takes_its_place(how: str) -> None:
    check_another_engine_takes_its_place(how)


def check_health_knows_a_death_at_once() -> None:
    """Before the event loop has heard of it."""

    async def body() -> None:
        async with running(0) as engine:
            assert engine.health().healthy
            os.waitid(os.P_PID, kill(engine), os.WEXITED | os.WNOWAIT)
            health = engine.health()
            assert not health.healthy and "SIGKILL" in health.reason

    asyncio.run(body())


def test_health_knows_a_death_at_once() -> None:
    check_health_knows_a_death_at_once()


def check_the_time_to_come_again_gets_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another engine starts, it is what is left of the time that the start should take."""
    monkeypatch.setattr(async_engine, "_FIRST_PAUSE_S", 60.0)

    async def body() -> None:
        async with running(1) as engine:
            kill(engine)

            async def refused() -> float:
                with pytest.raises(EngineDead) as told:
                    await engine.submit("abc", SamplingParams())
                return told.value.retry_after_s or 0.0

            async def is_told() -> bool:
                return engine._restarting is not None and engine._restarted_s != []

            await until(is_told)
            first = await refused()
            await asyncio.sleep(0.5)
            assert async_engine._LEAST_RETRY_S <= await refused() < first <= 30 + engine._start_s

    asyncio.run(body())


@forked
def test_the_time_to_come_again_gets_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    check_the_time_to_come_again_gets_shorter(monkeypatch)


def check_restarts_are_limited() -> None:
    async def body() -> None:
        async with running(2) as engine:

            async def is_ready() -> bool:
                return engine.health().healthy

            async def is_dead() -> bool:
                return "restart the server" in engine.health().reason

            for number in range(3):
                await until(is_ready, timeout_s=60)
                assert engine.num_restarts == number
                kill(engine)
                await until(lambda: _not(is_ready()), timeout_s=60)
            await until(is_dead, timeout_s=waits.SOON_S)
            with pytest.raises(EngineDead) as refused:
                await engine.submit("abc", SamplingParams())
            assert refused.value.retry_after_s is None

    asyncio.run(body())


async def _not(found: object) -> bool:
    return not await found  # type: ignore[misc]


@forked
def test_restarts_are_limited() -> None:
    check_restarts_are_limited()


@forked
def test_a_shutdown_ends_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "_FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr(async_engine, "_LONGEST_PAUSE_S", 3600.0)

    async def body() -> None:
        async with running(2) as engine:
            started: list[EngineProcess] = []
            start = engine._start_again
            engine._start_again = lambda: started.append(start()) or started[-1]  # type: ignore[func-returns-value]
            kill(engine)

            async def pauses() -> bool:
                return engine._restarted_s != []

            await until(pauses, timeout_s=waits.SOON_S)
            restarting = engine._restarting
            assert restarting is not None and not restarting.done()
            await asyncio.wait_for(engine.shutdown(), 60)
            assert restarting.cancelled() and not started
            assert not engine._process.process.is_alive()

    asyncio.run(body())


@forked
@pytest.mark.parametrize("num_failures", [1, 9])
def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
    """The system may have no file, process or memory left for a moment, or for long."""
    monkeypatch.setattr(async_engine, "_FIRST_PAUSE_S", 0.01)

    async def body() -> None:
        async with running(3) as engine:
            start, starts = engine._start_again, 0

            def start_again() -> EngineProcess:
                nonlocal starts
                starts += 1
                if starts <= num_failures:
                    raise OSError(errno.EMFILE, "Too many open files")
                return start()

            engine._start_again = start_again
            kill(engine)
            while engine._process.process.is_alive():
                time.sleep(0.01)  # the event loop has not heard of it
            said = engine.health().reason
            assert "It is started again" in said and "restart the server" not in said

            async def has_ended() -> bool:
                return engine.num_restarts == 1 or "3 times" in engine.health().reason

            await until(has_ended, timeout_s=60)
            assert engine.health().healthy == (num_failures == 1), engine.health().reason
            if num_failures == 1:
                assert await text_of(engine, "ab", max_tokens=3) == "aba"
            else:
                assert "Too many open files" in engine.health().reason and starts == 3

    asyncio.run(body())


def test_the_last_changes_are_made_again() -> None:
    """Each size once, terms of a tenant together, and a release only if nothing has ended it."""
    changes = Changes()
    assert not changes.calls()
    for size in (7, 5):
        changes.done("resize", (ResizeRequest(device_bytes=size, wait_s=60),))
    changes.done("resize", (ResizeRequest(host_bytes=3, preempt=True),))
    changes.done("release_memory", (10.0,))
    changes.done("set_tenant", ("quiet", {"floor": "10%", "weight": 2}))
    changes.done("set_tenant", ("quiet", {"floor": "20%"}))
    changes.done("flush", (None,))
    sizes = [("resize", (ResizeRequest(**{name: size}, wait_s=0),)) for name, size in
             (("device_bytes", 5), ("host_bytes", 3))]  # fmt: skip
    terms = ("set_tenant", ("quiet", {"floor": "20%", "weight": 2}))
    assert changes.calls() == [terms, *sizes, ("release_memory", (0.0,))]
    changes.done("resume_memory", (10.0,))
    assert changes.calls() == [terms, *sizes]


class DyingCore(EchoCore):
    """The second process that gets terms dies of them. Its model's name is a file, which says how many have."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        super().__init__(config, progress)
        self._asked = Path(config.served_model_name or "")

    def set_tenant(self, name: str, terms: dict[str, Any]) -> list[Any]:
        with self._asked.open("a") as file:
            file.write(f"{name} {terms}\n")
        if len(self._asked.read_text().splitlines()) == 2:
            os._exit(3)
        return []


@forked
def test_an_engine_that_dies_of_what_was_changed_is_started_again(tmp_path: Path) -> None:
    async def body() -> None:
        asked = tmp_path / "asked"
        config = engine_config(served_model_name=str(asked))
        engine = await AsyncEngine.start(config, build=DyingCore, tokenizer=ByteTokenizer(), max_restarts=3)
        try:
            await engine.ask(Core.set_tenant, "quiet", {"weight": 2})
            kill(engine)

            async def is_back() -> bool:
                return engine.num_restarts == 1

            await until(is_back, timeout_s=waits.SOON_S)
            assert asked.read_text() == 3 * "quiet {'weight': 2}\n"
            assert engine.health().healthy and await text_of(engine, "ab", max_tokens=3) == "aba"
        finally:
            await engine.shutdown()

    asyncio.run(body())


def check_a_silent_engine_fails_health() -> None:
    """One that is stopped while it has no work does not answer the next request either."""

    async def body() -> None:
        engine = await AsyncEngine.start(engine_config(), build=EchoCore, tokenizer=ByteTokenizer(), stall_after_s=1.5)
        try:
            pid = engine._process.process.pid or 0
            os.kill(pid, signal.SIGSTOP)

            async def is_unwell() -> bool:
                return not engine.health().healthy

            await until(is_unwell, timeout_s=waits.SOON_S)
            assert "not heard of" in engine.health().reason
            os.kill(pid, signal.SIGCONT)

            async def is_well() -> bool:
                return engine.health().healthy

            await until(is_well)
        finally:
            os.kill(pid, signal.SIGCONT)
            await engine.shutdown()

    asyncio.run(body())


@forked
def test_a_silent_engine_fails_health() -> None:
    check_a_silent_engine_fails_health()


def test_the_port_stays_and_clients_are_told_when_to_come_again() -> None:
    with LiveServer.echo(max_restarts=1) as live:
        assert 'quire_engine_restarts_total{model_name="echo"} 0.0' in live.request("/metrics")[1]
        stream = live.open_request("/v1/completions", {"prompt": "stall", "stream": True})
        with stream, stream.makefile("rb") as lines:
            assert b"200 OK" in lines.readline()
            live.engine().kill()
            rest = lines.read()
            assert b"QUIRE-ENGINE-01" in rest and b"service_unavailable_error" in rest and b"[DONE]" in rest
        deadline = time.monotonic() + 60
        while live.request("/health")[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        status, answer = live.request("/v1/completions", {"prompt": "ab", "max_tokens": 3})
        assert (status, answer["choices"][0]["text"]) == (200, "aba")
        assert 'quire_engine_restarts_total{model_name="echo"} 1.0' in live.request("/metrics")[1]
        live.terminate()
        assert live.wait() == 0, live.log()


def test_a_deadline_ends_a_request_and_says_so() -> None:
    with LiveServer.echo(request_timeout_s=2) as live:
        for body in ({"timeout_s": 0.3}, {"timeout_s": 0.3, "prompt": ["stall", "stall"]}, {}):
            status, answer = live.request("/v1/completions", {"prompt": "stall"} | body)
            assert (status, answer["error"]["code"]) == (408, "QUIRE-SERVE-04")
        live.wait_idle()
        connection = live.open_request("/v1/completions", {"prompt": "stall", "stream": True, "timeout_s": 0.3})
        with connection, connection.makefile("rb") as lines:
            assert b"QUIRE-SERVE-04" in lines.read()
        live.wait_idle()
        assert live.request("/v1/completions", {"prompt": "ab", "max_tokens": 2, "timeout_s": 60})[0] == 200


def test_a_full_queue_is_429_with_a_time() -> None:
    with LiveServer.echo(max_queue=0) as live:
        held = [live.open_request("/v1/completions", {"prompt": "stall", "stream": True}) for _ in range(8)]
        deadline = time.monotonic() + 60
        while live.statistics()["running_requests"] < 8:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        refused = live.open_request("/v1/completions", {"prompt": "ab"})
        with refused, refused.makefile("rb") as lines:
            answer = b""
            while b"QUIRE-SERVE-03" not in answer:
                part = lines.readline()
                assert part, answer
                answer += part
        assert b" 429 " in answer and b"retry-after: " in answer.lower()
        for connection in held:
            connection.close()
        live.wait_idle()
        assert live.request("/v1/completions", {"prompt": "ab", "max_tokens": 2})[0] == 200
