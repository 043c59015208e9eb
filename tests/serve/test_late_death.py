"""Engine processes that die late in their start, or while what was started beside them fails: nothing waits for them,
nothing is left of them, and no other one is started for a caller that has got an error."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from quire.client import async_engine
from quire.client.async_engine import AsyncEngine
from quire.client.process import Core, EngineProcess, Progress
from quire.engine.config import EngineConfig, engine_config
from quire.errors import EngineDead, InvalidInput, PlanError
from quire.scheduler.sampling_params import SamplingParams
from tests import waits
from tests.serve.fake_core import ByteTokenizer, EchoCore
from tests.serve.test_async_engine import until
from tests.serve.test_restart import kill, running

NO_POOL = {"served_model_name": "no pool"}


def noted_starts(monkeypatch: pytest.MonkeyPatch) -> list[EngineProcess]:
    """The engine processes from now on. A restart follows at once."""
    found: list[EngineProcess] = []

    class Counted(EngineProcess):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            found.append(self)

    monkeypatch.setattr(async_engine, "EngineProcess", Counted)
    monkeypatch.setattr(async_engine, "_FIRST_PAUSE_S", 0.0)
    return found


def noted_engines(monkeypatch: pytest.MonkeyPatch) -> list[AsyncEngine]:
    """The engines from now on, before they are ready."""
    made: list[AsyncEngine] = []
    init = AsyncEngine.__init__

    def noted(engine: AsyncEngine, *arguments: Any, **options: Any) -> None:
        init(engine, *arguments, **options)
        made.append(engine)

    monkeypatch.setattr(AsyncEngine, "__init__", noted)
    return made


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EngineProcess]]:
    found = noted_starts(monkeypatch)
    yield found
    for each in found:
        each.stop(deadline_s=0)


async def nothing_is_left(started: list[EngineProcess], num_expected: int) -> None:
    """No task of an engine goes on, and none of its processes."""
    await asyncio.sleep(0.5)  # a restart would have begun, and another process
    assert len(started) == num_expected
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not any(each.process.is_alive() for each in started)


def check_a_start_that_dies_late_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has ended before its error is read: both arrive at once."""
    started, made = noted_starts(monkeypatch), noted_engines(monkeypatch)

    def when_it_has_ended(done: int, total: int) -> None:
        process = psutil.Process(started[0].process.pid)
        until_s = time.monotonic() + waits.SOON_S
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until_s:
            time.sleep(0.01)
        made[0]._on_exit()  # the event loop may come to it first

    async def body() -> None:
        with pytest.raises(PlanError, match="zero pages"):
            await AsyncEngine.start(
                engine_config(**NO_POOL),
                build=EchoCore,
                tokenizer=ByteTokenizer(),
                max_restarts=2,
                on_progress=when_it_has_ended,
            )
        await nothing_is_left(started, 1)

    try:
        asyncio.run(body())
    finally:
        for each in started:
            each.stop(deadline_s=0)


def test_a_start_that_dies_late_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    check_a_start_that_dies_late_starts_no_other(monkeypatch)


def test_a_tokenizer_that_fails_ends_a_restart(started: list[EngineProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is ready, dies and is started again while the tokenizer still loads."""
    may_fail = threading.Event()
    made = noted_engines(monkeypatch)

    def load(config: EngineConfig) -> Any:
        may_fail.wait(60)
        raise InvalidInput("no tokenizer.")

    monkeypatch.setattr(EngineConfig, "load_tokenizer", load)
    monkeypatch.setattr(async_engine, "_FIRST_PAUSE_S", 1.0)

    async def body() -> None:
        starting = asyncio.create_task(AsyncEngine.start(engine_config(), build=EchoCore, max_restarts=2))

        async def is_ready() -> bool:
            return bool(made) and made[0]._ready.done()

        async def restarts() -> bool:
            return made[0]._restarting is not None

        await until(is_ready, timeout_s=60)
        kill(made[0])
        await until(restarts, timeout_s=60)
        may_fail.set()
        with pytest.raises(InvalidInput, match="no tokenizer"):
            await starting
        await asyncio.sleep(1.0)
        await nothing_is_left(started, 1)

    asyncio.run(body())


def closes_its_channel(config: EngineConfig, progress: Progress) -> Core:
    """It lives on."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(number).st_mode)
        except OSError:
            continue
        if is_socket:
            os.close(number)
    time.sleep(3600)
    raise AssertionError


def test_a_process_that_closes_its_channel_and_does_not_end_is_killed(started: list[EngineProcess]) -> None:
    async def body() -> None:
        starting = AsyncEngine.start(engine_config(), build=closes_its_channel, tokenizer=ByteTokenizer())
        with pytest.raises(EngineDead, match="SIGKILL"):
            await asyncio.wait_for(starting, 60)
        await nothing_is_left(started, 1)

    asyncio.run(body())


def test_what_a_process_said_last_is_read_before_it_is_buried() -> None:
    """However late the event loop comes to it."""

    async def body() -> None:
        async with running(0) as engine:
            asyncio.get_running_loop().remove_reader(engine._process.channel)
            sending = asyncio.create_task(engine.submit("crash", SamplingParams()))

            async def has_ended() -> bool:
                return engine._death is not None

            await until(has_ended, timeout_s=60)
            assert "the engine stopped" in engine.health().reason
            await asyncio.gather(sending, return_exceptions=True)

    asyncio.run(body())


@pytest.mark.parametrize("turns", [1, 5, 50])
def test_a_start_that_is_cancelled_leaves_no_process(started: list[EngineProcess], turns: int) -> None:
    """Also one that is cancelled while a thread still makes the process."""

    async def body() -> None:
        starting = asyncio.create_task(
            AsyncEngine.start(engine_config(), build=EchoCore, tokenizer=ByteTokenizer(), max_restarts=2)
        )
        for _ in range(turns):
            await asyncio.sleep(0.001)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

        await nothing_is_left(started, len(started))
        assert all(each.channel.fileno() == -1 for each in started), "their sockets are closed"

    asyncio.run(body())
