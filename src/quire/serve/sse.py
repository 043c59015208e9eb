"""Server-sent events, and detection of a client that has left.

A client that leaves must free its pages at once, also while nothing is being sent to it; so both kinds of answers watch
the connection next to producing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


def event(body: object, *, name: bytes = b"") -> bytes:
    """One event carrying `body` as JSON, perhaps with a name."""
    return (b"event: %b\n" % name if name else b"") + b"data: " + _encoder.encode(body) + b"\n\n"


def json_answer(body: object, headers: Mapping[str, str] | None = None) -> Response:
    """A whole answer with `body` as JSON."""
    return Response(_encoder.encode(body), media_type="application/json", headers=headers)


class EventTemplate:
    """Events that differ in one text only. `body` has `hole` in its place, which must occur nowhere else in it."""

    def __init__(self, body: object, hole: str, *, name: bytes = b"") -> None:
        self._before, _, self._after = event(body, name=name).partition(_encoder.encode(hole))

    def event(self, text: str) -> bytes:
        """The event with `text`."""
        return self._before + _encoder.encode(text) + self._after


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first (then `ClientGone`)."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = (asyncio.create_task(work), asyncio.create_task(until_gone()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientGone
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Sends `events` as they come. They are closed in every case: at their end, on an error, when the client leaves.

    So is what they read from, by `on_close`: a generator that was never started runs none of its own clean-up.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        on_close: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone):
                await while_connected(receive, self._pump(send))
        finally:
            try:
                await self._events.aclose()
            finally:
                self._on_close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._events:
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
