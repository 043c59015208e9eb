"""Server-sent events, and noticing a client that has gone.

A client that leaves must free its pages at once, also while nothing is being sent to it; so both kinds of answers watch
the connection next to producing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


def event(body: object) -> bytes:
    """One event carrying `body` as JSON."""
    return b"data: " + _encoder.encode(body) + b"\n\n"


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first (then `ClientGone`)."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(until_gone(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _end(task, watch)


class EventStream(Response):
    """Sends `events` as they come. They are closed in every case: at their end, on an error, when the client leaves.

    So is what they read from, by `on_close`: a generator that was never started runs none of its own clean-up.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, on_close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(send))
        watch = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait((pump, watch), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            try:
                await _end(pump, watch)
                await self._events.aclose()
            finally:
                self._on_close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._events:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
