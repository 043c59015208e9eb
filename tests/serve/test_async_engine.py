"""The engine process and the async engine, with a core that misbehaves on request."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from quire.client.async_engine import AsyncEngine
from quire.client.process import Core
from quire.client.request_assembler import RequestAssembler
from quire.client.request_stream import MOST_AT_ONCE, RequestStream
from quire.engine.config import engine_config
from quire.engine.messages import ENCODER, EXIT_DEFECT, TokenOutput, WireError
from quire.errors import ContextTooLong, EngineDead, InvalidInput, ModelLoadError, PlanError, QuireError
from quire.scheduler.sampling_params import SamplingParams
from tests import waits
from tests.serve.fake_core import CONTEXT, ByteTokenizer, EchoCore
from tests.transfer.connector_contract import activity

pytestmark = pytest.mark.usefixtures("forked_engines")


@asynccontextmanager
async def running(*, stall_after_s: float = 60.0) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.start(
        engine_config(), build=EchoCore, tokenizer=ByteTokenizer(), stall_after_s=stall_after_s
    )
    try:
        yield engine
    finally:
        await engine.shutdown()


async def text_of(engine: AsyncEngine, prompt: str, **params: object) -> str:
    return "".join([delta.text async for delta in engine.generate(prompt, SamplingParams(**params))])  # type: ignore[arg-type]


async def until(condition: Callable[[], Awaitable[bool]], *, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.01)


def has_stream(engine: AsyncEngine) -> Callable[[], Awaitable[bool]]:
    """Whether a request has been submitted."""

    async def found() -> bool:
        return bool(engine._streams)

    return found


def test_answers_refusals_and_aborts() -> None:
    async def body() -> None:
        async with running() as engine:
            assert engine.context_length == CONTEXT
            answers = await asyncio.gather(*(text_of(engine, f"prompt {i} ", max_tokens=30) for i in range(30)))
            assert answers == [(f"prompt {i} " * 5)[:30] for i in range(30)]
            with pytest.raises(ContextTooLong, match="shorten it"):
                await engine.submit("x" * CONTEXT, SamplingParams())
            with pytest.raises(QuireError, match="a defect in add"):
                await engine.submit("defect", SamplingParams(n=3))
            with pytest.raises(QuireError, match="it failed") as failed:
                await text_of(engine, "fail")
            assert (failed.value.code, failed.value.status) == ("QUIRE-ENGINE-02", 500)
            with pytest.raises(InvalidInput, match="token ids"):
                await engine.submit([2**40], SamplingParams())
            assert await text_of(engine, "abcdef", max_tokens=100, stop=["fab"]) == "abcde"
            stream = await engine.submit("ab", SamplingParams(n=2, max_tokens=3))
            assert sorted([d.index async for d in stream]) == [0, 0, 0, 1, 1, 1]
            assert [o.text for o in stream.request.output().outputs] == ["aba", "aba"]
            before = (await engine.statistics())["aborted_requests"]
            generator = engine.generate("abc", SamplingParams(max_tokens=None, n=2))
            await anext(generator)
            await generator.aclose()
            task = asyncio.create_task(text_of(engine, "abc", max_tokens=None))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

            async def idle() -> bool:
                statistics = await engine.statistics()
                return bool(statistics["running_requests"] == 0 and statistics["aborted_requests"] == before + 3)

            await until(idle)
            assert engine.health().healthy

    asyncio.run(body())


def check_a_slow_reader() -> None:
    """It takes parts of what has arrived, in order, and then the error."""

    async def body() -> None:
        prompt = np.array([1], dtype=np.int32)
        params = SamplingParams(max_tokens=None)
        request = RequestAssembler(
            request_id="r", prompt=None, prompt_token_ids=prompt, params=params, decoder=ByteTokenizer()
        )
        stream = RequestStream(request, on_close=lambda _: None)
        count = 2 * MOST_AT_ONCE + 1
        for token_id in range(count):
            stream.push(TokenOutput(request_id="r-0", token_ids=[token_id % 128]))
        stream.fail(EngineDead("gone."))
        parts = [await stream.take() for _ in range(3)]
        assert [len(part) for part in parts] == [MOST_AT_ONCE, MOST_AT_ONCE, 1]
        assert [delta.token_ids for part in parts for delta in part] == [[at % 128] for at in range(count)]
        with pytest.raises(EngineDead):
            await stream.take()

    asyncio.run(body())


def test_a_slow_reader_takes_parts() -> None:
    check_a_slow_reader()


def test_a_stop_string_is_an_end_not_an_abort() -> None:
    async def body() -> None:
        async with running() as engine:
            assert await text_of(engine, "abcdef", max_tokens=None, stop=["fab"]) == "abcde"

            async def idle() -> bool:
                return bool((await engine.statistics())["running_requests"] == 0)

            await until(idle)
            statistics = await engine.statistics()
            assert (statistics["stopped_requests"], statistics["aborted_requests"]) == (1, 0)

    asyncio.run(body())


def test_what_cannot_be_sent_leaves_nothing_open() -> None:
    async def body() -> None:
        async with running() as engine:
            with pytest.raises(InvalidInput, match="cannot be sent"):
                await engine.submit("abc", SamplingParams(), priority=2**64)
            with pytest.raises(InvalidInput, match="salt must be text without lone surrogates"):
                await engine.submit("abc", SamplingParams(), salt="\ud800")
            with pytest.raises(InvalidInput, match="prompt must be text without lone surrogates"):
                await engine.submit("\ud800", SamplingParams())
            with pytest.raises(InvalidInput, match="stop must be text without lone surrogates"):
                await engine.submit("abc", SamplingParams(stop=["\ud800"]))
            assert not engine._streams
            await engine.shutdown(drain_s=waits.FOR_EVER_S)  # it waits for no request that never was

    asyncio.run(body())


def test_a_command_that_cannot_be_read_ends_only_itself() -> None:
    async def body() -> None:
        async with running() as engine:
            open_stream = await engine.submit("abc", SamplingParams(max_tokens=100))
            params = SamplingParams()
            params.temperature = -1.0  # past the check on construction; the engine's own finds it
            with pytest.raises(InvalidInput, match="temperature"):
                await engine.submit("abc", params)
            with pytest.raises(InvalidInput, match="cannot read"):
                await engine.ask(Core.release, 5)  # type: ignore[arg-type]
            for junk in (b"", b"\xc1", b"\x81\xa4type\xa4Nope", ENCODER.encode({"type": "Ask", "number": "x"})):
                engine._process.channel.send(junk)
            assert len([delta async for delta in open_stream]) == 100
            assert engine.health().healthy

    asyncio.run(body())


def test_an_error_of_a_class_the_owner_does_not_know_is_still_an_error() -> None:
    class Local(QuireError):
        pass

    assert WireError.of(Local("no.")).rebuild().message == "no."


def test_a_broken_law_in_add_ends_the_engine() -> None:
    async def body() -> None:
        async with running() as engine:
            with pytest.raises(EngineDead, match="stopped after an error"):
                await engine.submit("broken law", SamplingParams())
            assert not engine.health().healthy and "a law does not hold" in engine.health().detail

    asyncio.run(body())


def test_an_error_of_the_loop_is_a_defect_whatever_its_class() -> None:
    """Exit codes of refusals are for starts that were refused."""

    async def body() -> None:
        async with running() as engine:
            with pytest.raises(QuireError, match="stopped after an error"):
                await text_of(engine, "free twice")
            assert "a page is freed twice" in engine.health().detail
            engine._process.process.join(30)
            assert engine._process.process.exitcode == EXIT_DEFECT

    asyncio.run(body())


def test_start_errors_keep_their_class() -> None:
    async def start(name: str) -> AsyncEngine:
        return await AsyncEngine.start(engine_config(served_model_name=name), build=EchoCore, tokenizer=ByteTokenizer())

    with pytest.raises(PlanError, match="raise --kv-memory") as refused:
        asyncio.run(start("no pool"))
    assert refused.value.code == PlanError.code
    with pytest.raises(QuireError, match="broken weights"):
        asyncio.run(start("broken"))


def test_the_engines_error_comes_before_the_tokenizers() -> None:
    async def start(name: str) -> AsyncEngine:
        config = engine_config(model="/no/such/folder", served_model_name=name)
        return await AsyncEngine.start(config, build=EchoCore)

    with pytest.raises(PlanError, match="raise --kv-memory"):
        asyncio.run(start("no pool"))
    with pytest.raises(ModelLoadError, match="/no/such/folder"):
        asyncio.run(start("well"))


@pytest.mark.parametrize("how", ["crash", "kill"])
def test_a_dead_engine_ends_every_request_and_health(how: str) -> None:
    async def body() -> None:
        async with running() as engine:
            waiting = [asyncio.create_task(text_of(engine, "abc", max_tokens=None)) for _ in range(3)]
            await asyncio.sleep(0.05)
            if how == "crash":
                waiting.append(asyncio.create_task(text_of(engine, "crash")))
            else:
                engine._process.process.kill()
            results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
            assert all(isinstance(result, EngineDead) for result in results)
            assert not engine.health().healthy
            with pytest.raises(EngineDead):
                await engine.submit("abc", SamplingParams())
            with pytest.raises(EngineDead):
                await engine.statistics()

    asyncio.run(body())


def test_health_tells_waiting_from_stuck() -> None:
    async def body() -> None:
        async with running(stall_after_s=1.0) as engine:
            await asyncio.sleep(1.3)
            assert engine.health().healthy, "idle is not stuck"
            stream = await engine.submit("stall", SamplingParams())

            async def stuck() -> bool:
                return not engine.health().healthy

            await until(stuck)
            assert "no progress" in engine.health().reason
            stream.close()

            async def well() -> bool:
                return engine.health().healthy

            await until(well)
            os.kill(engine._process.process.pid or 0, signal.SIGSTOP)
            task = asyncio.create_task(text_of(engine, "abc"))
            await until(stuck)
            os.kill(engine._process.process.pid or 0, signal.SIGCONT)
            assert await task
            assert engine.health().healthy

    asyncio.run(body())


def test_shutdown_drains_then_aborts() -> None:
    async def body() -> None:
        async with running() as engine:
            task = asyncio.create_task(text_of(engine, "abc", max_tokens=40))
            await until(has_stream(engine))
            stopping = asyncio.create_task(engine.shutdown(drain_s=60.0))
            await asyncio.sleep(0.01)
            with pytest.raises(EngineDead, match="shutting down"):
                await engine.submit("abc", SamplingParams())
            assert await task == ("abc" * 14)[:40]
            await stopping
        async with running() as engine:
            stuck = asyncio.create_task(text_of(engine, "stall"))
            await until(has_stream(engine))
            await engine.shutdown(drain_s=0.2)
            with pytest.raises(EngineDead, match="aborted"):
                await stuck
            assert not psutil.pid_exists(engine._process.process.pid or 0)

    asyncio.run(body())


def test_the_folder_for_temporary_files_may_have_a_long_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the name of a socket may be."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async def body() -> None:
        async with running() as engine:
            assert await text_of(engine, "abc", max_tokens=3) == "abc"

    asyncio.run(body())


def test_an_idle_engine_does_not_spin() -> None:
    async def body() -> None:
        async with running() as engine:
            wakes_per_s, restless = await asyncio.to_thread(activity, engine._process.process.pid)
            assert not restless and wakes_per_s < 50, f"{wakes_per_s:.0f} wake-ups a second"

    asyncio.run(body())
