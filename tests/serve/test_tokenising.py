"""Tokenising beside the event loop: what is refused, what is equal, and what ends when nobody waits."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any

import numpy as np
import psutil
import pytest

from quire.client import tokenising
from quire.client.tokenising import LONG_CHARACTERS, SHORT_CHARACTERS, Tokenising
from quire.errors import ContextTooLong, Overloaded
from quire.models.tokenizer import Tokenizer, load_tokenizer
from quire.spec.bundled import BUNDLED_MODELS, DEFAULT_MODEL
from quire.spec.ids import Ids
from tests import waits
from tests.serve.fake_core import ByteTokenizer

CONTEXT = 1 << 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(BUNDLED_MODELS[DEFAULT_MODEL]))


def workers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        try:
            if any("token_worker" in part for part in child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


async def until_gone() -> None:
    deadline = time.monotonic() + waits.SOON_S
    while workers():
        assert time.monotonic() < deadline, "a process goes on"
        await asyncio.sleep(0.02)


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 120))


class Held(ByteTokenizer):
    """One that takes until it is let on."""

    def __init__(self, patience_s: float = 60.0) -> None:
        self.patience_s = patience_s
        self.may_go = threading.Event()
        self.num_begun = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Ids:
        self.num_begun += 1
        assert self.may_go.wait(self.patience_s)
        return super().encode(text)


@pytest.mark.parametrize("length", [0, 10, SHORT_CHARACTERS - 1, SHORT_CHARACTERS, LONG_CHARACTERS, 100_000])
def test_the_ids_are_those_of_the_tokenizer_wherever_they_are_made(tokenizer: Tokenizer, length: int) -> None:
    draw = random.Random(length)
    words = ["the ", "Bath", "\n", "é", "😀", "  ", "<|endoftext|>", "x", "1"]
    text = "".join(draw.choices(words, k=length))[:length]

    async def body() -> None:
        with closing(Tokenising(tokenizer, most_tokens=CONTEXT)) as pool:
            for special in (True, False):
                expected = tokenizer.encode(text, add_special_tokens=special)
                found = await pool.encode(text, add_special_tokens=special)
                assert found.dtype == np.int32 and np.array_equal(found, expected)
            assert bool(workers()) == (length >= LONG_CHARACTERS)
        await until_gone()

    run(body())


@pytest.mark.parametrize("name", BUNDLED_MODELS)
def test_no_text_that_fits_is_refused_for_its_length(name: str) -> None:
    tokenizer = load_tokenizer(str(BUNDLED_MODELS[name]))
    longest = max(range(tokenizer.vocab_size), key=lambda token: len(tokenizer.decode([token])))
    for text in ("a" * 1000, " " * 1000, "é" * 1000, "e\u0301" * 1000, tokenizer.decode([longest]) * 50):
        assert len(text) <= len(tokenizer.encode(text)) * tokenizer.longest_token


def check_a_long_text_is_refused_unread() -> None:
    tokenizer = Held(0.1)  # it fails if it has to read

    async def body() -> None:
        with closing(Tokenising(tokenizer, most_tokens=100)) as pool:
            for text in ("x" * 101, "x" * 10_000_000):
                with pytest.raises(ContextTooLong, match="characters"):
                    await pool.encode(text)
            with pytest.raises(ContextTooLong, match="characters"):
                await pool.chat([{"role": "user", "content": "x" * 60}] * 2, {})
        assert tokenizer.num_begun == 0

    run(body())


def test_a_text_longer_than_the_context_is_refused_unread() -> None:
    check_a_long_text_is_refused_unread()


def check_a_client_that_leaves_ends_the_work(tokenizer: Tokenizer) -> None:
    """The process that reads its text is killed, and texts that waited are never begun."""

    async def body() -> None:
        with closing(Tokenising(tokenizer, most_tokens=100 * CONTEXT)) as pool:
            tasks = [asyncio.create_task(pool.encode("ab " * 1_000_000)) for _ in range(4)]
            stopped: set[int] = set()  # these do not end by themselves, however short the text is
            while len(stopped) < tokenising.NUM_PROCESSES:
                for process in workers():
                    process.suspend()
                    stopped.add(process.pid)
                await asyncio.sleep(0.02)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            await until_gone()
            assert len(await pool.encode("ab " * LONG_CHARACTERS)) > 0, "the next one is served"

    run(body())


def test_a_client_that_leaves_ends_the_work(tokenizer: Tokenizer) -> None:
    check_a_client_that_leaves_ends_the_work(tokenizer)


async def _refused(pool: Tokenising, text: str) -> None:
    try:
        await pool.encode(text)
    except asyncio.CancelledError:
        raise AssertionError("it waits beside as many as may") from None


def check_threads_are_few_and_the_queue_bounded() -> None:
    tokenizer = Held()

    async def body() -> None:
        with closing(Tokenising(tokenizer, most_tokens=CONTEXT)) as pool:
            text = "x" * SHORT_CHARACTERS
            tasks = [asyncio.create_task(pool.encode(text)) for _ in range(tokenising.MOST_WAITING)]
            while tokenizer.num_begun < tokenising.NUM_THREADS:
                await asyncio.sleep(0.01)
            with pytest.raises(Overloaded) as refused:
                async with asyncio.timeout(5):
                    await _refused(pool, text)
            assert refused.value.status == 429
            for task in tasks[tokenising.NUM_THREADS :]:
                task.cancel()
            await asyncio.sleep(0.1)
            tokenizer.may_go.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(isinstance(result, np.ndarray) for result in results) == tokenising.NUM_THREADS
            assert tokenizer.num_begun == tokenising.NUM_THREADS, "a text was read that nobody waits for"
            assert len(await pool.encode(text)) == SHORT_CHARACTERS

    try:
        run(body())
    finally:
        tokenizer.may_go.set()


def test_threads_are_few_and_the_queue_is_bounded() -> None:
    check_threads_are_few_and_the_queue_bounded()


def test_a_process_that_ends_is_an_error_and_the_next_is_well(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        with closing(Tokenising(tokenizer, most_tokens=100 * CONTEXT)) as pool:
            task = asyncio.create_task(pool.encode("ab " * 1_000_000))
            while not (found := workers()):
                await asyncio.sleep(0.02)
            os.kill(found[0].pid, 9)
            with pytest.raises(Exception, match="has ended"):
                await task
            assert len(await pool.encode("ab " * LONG_CHARACTERS)) > 0

    run(body())


def test_a_process_that_is_killed_without_work_fails_no_text(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        text = "ab " * LONG_CHARACTERS
        with closing(Tokenising(tokenizer, most_tokens=CONTEXT)) as pool:
            before = await pool.encode(text)
            [process] = workers()
            process.kill()
            assert np.array_equal(await pool.encode(text), before)

    run(body())


def test_processes_start_and_end_beside_the_event_loop(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either may take a tenth of a second."""
    threads: list[threading.Thread] = []

    def noted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            threads.append(threading.current_thread())
            return real(*arguments, **more)

        return call

    for name in ("__init__", "wait"):
        monkeypatch.setattr(subprocess.Popen, name, noted(getattr(subprocess.Popen, name)))

    async def body() -> None:
        with closing(Tokenising(tokenizer, most_tokens=CONTEXT)) as pool:
            await pool.encode("Bath " * 300_000)
            await until_gone()

    run(body())
    assert len(threads) >= 2 and threading.main_thread() not in threads


def test_a_text_of_a_million_characters_leaves_no_memory_behind(tokenizer: Tokenizer) -> None:
    async def body() -> None:
        with closing(Tokenising(tokenizer, most_tokens=100 * CONTEXT)) as pool:
            before = psutil.Process().memory_info().rss
            ids = await pool.encode("Bath " * 400_000)
            assert len(ids) > 100_000
            await until_gone()
            assert psutil.Process().memory_info().rss - before < 200 << 20

    run(body())
