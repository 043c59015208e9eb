"""The stream of one request's deltas: the engine pushes, one reader reads.

It ends when each sequence had its last delta, or with one error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.engine.messages import TokenOutput
from quire.engine.output import RequestAssembler, RequestOutput, SequenceDelta
from quire.errors import QuireError


class RequestStream:
    """The deltas of one request, for all its sequences, in the order they came. Made by `AsyncEngine.submit`.

    Its owner calls `close` when done; a stream closed before its end aborts what still runs.
    """

    def __init__(self, assembler: RequestAssembler, *, forget: Callable[[RequestAssembler], None]) -> None:
        self._assembler = assembler
        self._forget = forget
        self._queue: asyncio.Queue[SequenceDelta | QuireError] = asyncio.Queue()
        self._num_open = assembler.params.n

    @property
    def request_id(self) -> str:
        """The id it was submitted under."""
        return self._assembler.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return len(self._assembler.prompt_token_ids)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> SequenceDelta:
        if self._num_open == 0 and self._queue.empty():
            raise StopAsyncIteration
        delta = await self._queue.get()
        if isinstance(delta, QuireError):
            self._num_open = 0
            raise delta
        if delta.finish_reason is not None:
            self._num_open -= 1
        return delta

    def output(self) -> RequestOutput:
        """All that has arrived so far, put together."""
        return self._assembler.output()

    def close(self) -> None:
        """Abort what still runs and forget the request. Idempotent."""
        self._forget(self._assembler)
        self._num_open = 0

    # The engine's side.

    def fail(self, error: QuireError) -> None:
        """The request ends with an error, which its reader gets."""
        self._queue.put_nowait(error)

    def push(self, output: TokenOutput) -> SequenceDelta:
        """Tokens arrived; returns what they add, which its reader gets too."""
        delta = self._assembler.push(output)
        if delta.finish_reason == "error":
            self.fail(_request_error(delta))
        else:
            self._queue.put_nowait(delta)
        return delta


def _request_error(delta: SequenceDelta) -> QuireError:
    code, _, message = delta.error.partition(": ")
    if not code.startswith("QUIRE-"):
        code, message = QuireError.code, delta.error
    error = QuireError(message)
    error.code, error.status = code, delta.status
    return error
