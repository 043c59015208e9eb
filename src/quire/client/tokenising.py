"""Tokenising beside an event loop: bounded in length, in number and in time, and ended when no request waits.

    below 4,096 characters   at once: about a millisecond
    below 65,536             in one of few threads
    longer                   in one of few processes, which are killed when their text is not wanted any more

A text of more characters than the context's tokens can have is refused before anything reads it. A long conversation
that goes on is tokenised from its first new piece (`pieces`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from quire.client import token_worker
from quire.client.output import Decoder
from quire.client.pieces import Cutter, KnownPieces
from quire.errors import ContextTooLong, Overloaded, QuireError
from quire.spec.ids import Ids

T = TypeVar("T")

SHORT_CHARACTERS = 4096
LONG_CHARACTERS = 65536
NUM_THREADS = 4
NUM_PROCESSES = 2
MOST_WAITING = 256
"""Texts that may be in hand or wait for a thread or a process; those that come then are refused."""

MOST_KEPT_TOKENS = 1 << 22
"""Token ids of pieces of conversations, with what is kept beside them: about 16 to 20 MiB."""

_MOST_IN_ONE_PROCESS = 1 << 20  # characters; a process that had more ends, so that its memory is returned


class Rendered(NamedTuple):
    """A conversation through the model's template: its text, and its token ids int32."""

    text: str
    token_ids: Ids


class ServingTokenizer(Decoder, Protocol):
    """The methods of a tokenizer that the engine and the server use. `longest_token` is the most characters of a text
    that one token can stand for. `portable` is the JSON of the tokenizers library that gives the same token ids, or
    None where nothing but this object does. `names` are those of tokens in the vocabulary. `token_bytes` are what a
    token adds to a text. `description` says which special tokens and which chat template there are. `response_parser`
    makes parsers of answers to a prompt by the template of the model's family, or is None where each answer is text.
    `call_grammar` is the grammar of answers that call tools, None where it is not known. `check_tools` raises
    InvalidInput where tools would change nothing."""

    @property
    def longest_token(self) -> int: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> Ids: ...
    def chat_text(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str: ...
    def portable(self) -> str | None: ...
    def names(self, token_ids: Sequence[int]) -> list[str]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def description(self) -> dict[str, Any]: ...
    def response_parser(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> Callable[[bool], Any] | None: ...
    def call_grammar(self, prompt: str, tools: Sequence[Mapping[str, Any]], **choice: Any) -> str | None: ...
    def check_tools(self) -> None: ...


class Tokenising:
    """A tokenizer with its threads and processes, for one event loop. `close` ends them."""

    def __init__(self, tokenizer: ServingTokenizer, *, most_tokens: int) -> None:
        """A prompt has at most `most_tokens`."""
        self.most_characters = most_tokens * tokenizer.longest_token
        self.tokenizer = tokenizer
        self._most_tokens = most_tokens
        self._num_waiting = 0
        self._threads = concurrent.futures.ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="quire-tokenise")
        self._long = asyncio.Semaphore(NUM_PROCESSES)
        self._talkers = concurrent.futures.ThreadPoolExecutor(2 * NUM_PROCESSES, thread_name_prefix="quire-tokeniser")
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._is_closed = False
        self._json: str | None = None
        self._is_portable = True
        self._cutter: Cutter | None = None
        self._pieces = KnownPieces(MOST_KEPT_TOKENS)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Ids:
        """Token ids int32 of `text`. Raises ContextTooLong if they cannot fit the context, Overloaded if too many
        texts wait. Cancelling it ends the work."""
        self._check_length(len(text))
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        if len(text) < SHORT_CHARACTERS:
            return encode()
        async with self._counted():
            if len(text) < LONG_CHARACTERS:
                return await self._in_thread(encode)
            async with self._long:
                if (content := await self._portable()) is None:
                    return await self._in_thread(encode)
                return await self._in_process(content, text, add_special_tokens=add_special_tokens)

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, salt: str | None = None
    ) -> Rendered:
        """A conversation through the model's template. Pieces of it are kept for conversations with the same `salt`;
        with None, none is kept or used. Raises what `encode` does, and InvalidInput if the template refuses it."""
        self._check_length(sum(len(message["content"]) for message in messages))
        async with self._counted():  # in a thread always: how long a template takes is up to its author
            text = await self._in_thread(partial(self.tokenizer.chat_text, messages, **variables))
        if salt is None or len(text) < SHORT_CHARACTERS or (content := await self._portable()) is None:
            return Rendered(text, await self.encode(text, add_special_tokens=False))
        if self._cutter is None:
            self._cutter = await self._in_thread(partial(Cutter, content))
        return Rendered(text, await self._continued(text, self._cutter, salt))

    async def _continued(self, text: str, cutter: Cutter, salt: str) -> Ids:
        """Token ids of a text whose first pieces may be known."""
        starts, keys = await self._in_thread(partial(cutter.cut, text, salt))
        known = self._pieces.leading(keys)
        if len(known) == len(keys):
            return np.concatenate(known)
        rest = await self.encode(text[starts[len(known)] :], add_special_tokens=False)
        pieces = cutter.split(rest)
        if len(pieces) == len(keys) - len(known):  # else a model's own token is an added one too
            self._pieces.keep(keys[len(known) :], pieces)
        return np.concatenate([*known, rest])

    def close(self) -> None:
        """End all work; the threads end with the text that they have, the processes now."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            worker.end()
        self._idle.clear()
        self._talkers.shutdown(wait=False)

    def _check_length(self, num_characters: int) -> None:
        if num_characters > self.most_characters:
            raise ContextTooLong(
                f"the prompt has {num_characters:,} characters; the context has {self._most_tokens:,} tokens, of at "
                f"most {self.most_characters:,} characters.",
                tokens=-(-num_characters * self._most_tokens // self.most_characters),
                context=self._most_tokens,
                fix="shorten it.",
            )

    @contextlib.asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        if self._num_waiting >= MOST_WAITING:
            raise Overloaded(f"{self._num_waiting} prompts wait to be tokenised.", retry_after_s=1.0)
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    async def aside(self, function: Callable[[], T]) -> T:
        """The result of a function that may take long, in a thread. Raises Overloaded if too many texts wait."""
        async with self._counted():
            return await self._in_thread(function)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Its result; it never begins if it is cancelled before."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def _portable(self) -> str | None:
        if self._json is None and self._is_portable:
            self._json = await self._in_thread(self.tokenizer.portable)
            self._is_portable = self._json is not None
        return self._json

    async def _in_process(self, content: str, text: str, *, add_special_tokens: bool) -> Ids:
        while self._idle:
            with contextlib.suppress(_HasEnded):  # killed while it had no work
                return await self._by(self._idle.pop(), text, add_special_tokens=add_special_tokens)
        return await self._by(_Worker(content), text, add_special_tokens=add_special_tokens)

    async def _by(self, worker: _Worker, text: str, *, add_special_tokens: bool) -> Ids:
        self._workers.add(worker)
        is_well = False
        try:
            encode = partial(worker.encode, text, add_special_tokens=add_special_tokens)
            ids = await asyncio.get_running_loop().run_in_executor(self._talkers, encode)
            is_well = len(text) <= _MOST_IN_ONE_PROCESS
        finally:
            if is_well:
                self._idle.append(worker)
            else:  # cancelled, failed or large
                self._end(worker)
        return ids

    def _end(self, worker: _Worker) -> None:
        """In a thread: the system takes long to free the memory of a long text. There are twice as many threads as
        processes that work, and an end is queued before the next text, so it never waits for one."""
        self._workers.discard(worker)
        if self._is_closed:
            worker.end()
        else:
            self._talkers.submit(worker.end)


class _HasEnded(QuireError):
    """A process has ended within a text, or before it."""


class _Worker:
    """A process that has a tokenizer (`token_worker`), from the first text on. One thread talks to it; any may end it,
    and waits until it has."""

    def __init__(self, content: str) -> None:
        """`content` is the tokenizer's JSON."""
        self._content: str | None = content  # until it is sent
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = False
        self._starting = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool) -> Ids:
        """Token ids int32. Raises `_HasEnded` if the process ends."""
        try:
            process = self._started()
            if self._content is not None:
                _send(process, self._content.encode())
                self._content = None
            _send(process, bytes([add_special_tokens]) + text.encode())
            (length,) = token_worker.LENGTH.unpack(_read(process, token_worker.LENGTH.size))
            return np.frombuffer(_read(process, length), dtype=np.int32)
        except (OSError, EOFError) as error:
            raise _HasEnded("the process that tokenised the prompt has ended; its memory may have run out.") from error

    def end(self) -> None:
        """Kill the process, or start none."""
        with self._starting:
            self._has_ended = True
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was to be written
                pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._starting:
            if self._has_ended:
                raise EOFError
            if self._process is None:
                path = str(Path(token_worker.__file__))
                self._process = subprocess.Popen(
                    (sys.executable, "-P", path),  # -P: what lies beside that file is not imported
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for this process, which drains first
                )
            return self._process


def _read(process: subprocess.Popen[bytes], num_bytes: int) -> bytes:
    assert process.stdout is not None
    found = process.stdout.read(num_bytes)
    if len(found) < num_bytes:
        raise EOFError
    return found


def _send(process: subprocess.Popen[bytes], message: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(token_worker.LENGTH.pack(len(message)) + message)
    process.stdin.flush()
