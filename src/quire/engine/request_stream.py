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
    """The deltas of one request, for all its sequences, in the order of their arrival. Made by `AsyncEngine.submit`.

    `request` has all that has arrived. Its owner calls `close` at the end; a stream closed early aborts what still
    runs.
    """

    def __init__(self, request: RequestAssembler, *, on_close: Callable[[RequestAssembler], None]) -> None:
        self.request = request
        self._on_close = on_close
        self._queue: asyncio.Queue[SequenceDelta | QuireError] = asyncio.Queue()
        self._num_open = request.params.n

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
        """All deltas so far, joined."""
        return self.request.output()

    def close(self) -> None:
        """Abort what still runs and remove the request. Idempotent."""
        self._on_close(self.request)
        self._num_open = 0

    def fail(self, error: QuireError) -> None:
        """The request ends with an error, which its reader gets."""
        self._queue.put_nowait(error)

    def push(self, output: TokenOutput) -> SequenceDelta:
        """Tokens arrived; returns what they add, which its reader gets too."""
        delta = self.request.push(output)
        if delta.finish_reason == "error":
            code, _, message = delta.error.partition(": ")
            has_code = code.startswith("QUIRE-")
            error = QuireError(message if has_code else delta.error)
            error.code, error.status = code if has_code else error.code, delta.status
            self.fail(error)
        else:
            self._queue.put_nowait(delta)
        return delta
