"""The stream of one request's deltas: the engine pushes, one reader reads.

It ends when each sequence had its last delta, or with one error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from quire.client.output import SequenceDelta
from quire.client.request_assembler import RequestAssembler
from quire.engine.messages import TokenOutput
from quire.errors import QuireError

MOST_AT_ONCE = 64
"""Deltas that a reader takes at once, so that a client that reads slowly gets small parts."""


class RequestStream:
    """The deltas of one request, for all its sequences, in the order of their arrival. Made by `AsyncEngine.submit`.

    `request` has all that has arrived. Its owner calls `close` at the end; a stream closed early aborts what still
    runs. What an engine before this one said of a request that it has `begun` makes the deltas `before`, which are not
    in the stream.
    """

    def __init__(
        self,
        request: RequestAssembler,
        *,
        on_close: Callable[[RequestAssembler], None],
        begun: Sequence[TokenOutput] = (),
    ) -> None:
        self.request = request
        self._on_close = on_close
        self._arrived: list[SequenceDelta] = []
        self._error: QuireError | None = None
        self._has_news: asyncio.Future[None] | None = None  # the reader's, while it waits
        self.before = [request.push(output) for output in begun]
        self._num_open = request.params.n - sum(delta.finish_reason is not None for delta in self.before)
        if self._num_open > len(request.unfinished_ids()):  # a turn whose text has ended: its session is lost
            self.push(TokenOutput(request_id=begun[-1].request_id, finish_reason="abort"))

    async def take(self) -> list[SequenceDelta]:
        """The next deltas, all that have arrived or the first of many; none at the end. Raises the error."""
        while not self._arrived:
            if self._error is not None:
                self._num_open, error, self._error = 0, self._error, None
                raise error
            if self._num_open == 0:
                return []
            self._has_news = asyncio.get_running_loop().create_future()
            await self._has_news
        found = self._arrived[:MOST_AT_ONCE]
        del self._arrived[:MOST_AT_ONCE]
        for delta in found:
            self._num_open -= delta.finish_reason is not None
        return found

    async def __aiter__(self) -> AsyncGenerator[SequenceDelta, None]:
        while found := await self.take():
            for delta in found:
                yield delta

    def close(self) -> None:
        """Abort what still runs and remove the request. Idempotent."""
        self._on_close(self.request)
        self._num_open = 0

    def fail(self, error: QuireError) -> None:
        """The request ends with an error, which its reader gets after the deltas that have arrived."""
        self._error = self._error or error
        self._wake()

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
            self._arrived.append(delta)
            self._wake()
        return delta

    def _wake(self) -> None:
        if self._has_news is not None and not self._has_news.done():
            self._has_news.set_result(None)
