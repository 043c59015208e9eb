"""Relay: one request on its way to servers, until one of them has answered it whole.

A server that is lost before the client has seen anything: another one gets the request. A server that is lost in the
middle of a stream: another one continues it, by its journal (`quire.serve.journal`), and the client sees one stream.
Answers that are no events are read whole before they are sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from quire.errors import NoServer, QuireError
from quire.routing.tracing import RouteSpan
from quire.routing.upstream import Preference, Upstream
from quire.serve.errors import COME_AGAIN, UNTOUCHED, error_response, form_of
from quire.serve.gate import REQUEST_ID
from quire.serve.journal import END, JOURNAL, LOST, MOST_JOURNAL_BYTES, PREFIX, TOKENS
from quire.serve.keys import LIVE

logger = logging.getLogger(__name__)

CONTINUE_S = 60.0
"""For how long a stream that has begun waits for a server that can go on with it."""

_PAUSE_S, _SILENT_S = 0.2, 10.0
_MOST_LOST = 2  # servers that may be lost with the same request: it may be its fault
_PROGRESS = 16  # lines of a journal after which it is not the cause of what happened before

SERVER = b"x-quire-server"
"""Header of an answer: the name of the server that made it, or began it."""

_OWN_HEADERS = (
    {b"host", b"content-length", b"date", b"server", b"accept-encoding", SERVER}
    | {REQUEST_ID.lower().encode(), JOURNAL.lower().encode(), TOKENS.lower().encode()}
    | {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
    | {b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"}
)
"""Headers that belong to one connection, and those that each side writes anew."""

_KEYS = {b"authorization", b"x-api-key"}

Headers = list[tuple[bytes, bytes]]


def passed_on(
    upstream: Upstream, request: Request, body: bytes, journal: bytes = b"", *, asks: str = JOURNAL
) -> dict[str, Any]:
    """The request for an upstream, as httpx takes it. It asks for what the header `asks` names."""
    path, query = request.scope["raw_path"].decode(), request.scope["query_string"].decode()
    left_out = _OWN_HEADERS | (_KEYS if upstream.key else set())
    headers: Headers = [pair for pair in request.headers.raw if pair[0].lower() not in left_out]
    headers += [(b"authorization", f"Bearer {upstream.key}".encode())] if upstream.key else []
    headers += [(b"accept-encoding", b"identity"), (REQUEST_ID.encode(), request.state.request_id.encode())]
    if upstream.secret:
        headers.append((asks.encode(), f"{len(journal)} {upstream.secret}".encode()))
    url = upstream.url + path + (f"?{query}" if query else "")
    return {"method": request.method, "url": url, "headers": headers, "content": journal + body or None}


def answered(upstream: Upstream, answer: httpx.Response, content: bytes) -> Response:
    """The answer of an upstream for the client."""
    response = Response(content, status_code=answer.status_code)
    response.raw_headers.extend(_passed(upstream, answer))
    return response


class Relay:
    """One request with its body, and the servers that it prefers. `send` takes what the client gets, `span` what
    became of it."""

    def __init__(
        self, client: httpx.AsyncClient, request: Request, body: bytes, choice: Preference, send: Send, span: RouteSpan
    ) -> None:
        self._client = client
        self._choice = choice
        self._request = request
        self._body = body
        self._send = send
        self._span = span
        self._has_begun = False  # the client has seen a part of a stream
        self._can_continue = True  # what it has seen is in the journal
        self._journal = bytearray()
        self._num_lines = 0
        self._num_lost = 0  # servers, without much progress in between
        self._lost_at = 0  # lines when the last one was lost
        self._num_expected = 0.0  # tokens that the server that is asked has to compute
        self._said: Response | None = None  # what the last server said that could not answer

    async def run(self, upstreams: Callable[[], Iterable[Upstream]], none_answers: Callable[[], QuireError]) -> None:
        """Ask one server after the other, of those there are. At the end the client has an answer, or an error."""
        tried: set[str] = set()
        until_s = said_s = 0.0
        while self._num_lost < _MOST_LOST and (self._can_continue or not self._has_begun):
            upstream = next((each for each in self._choice.order(upstreams()) if each.name not in tried), None)
            if upstream is None:
                now = time.monotonic()
                if not self._has_begun or now > until_s:
                    break
                if now > said_s + _SILENT_S:  # proxies end connections that say nothing
                    said_s = now
                    await self._send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
                tried.clear()
                await asyncio.sleep(_PAUSE_S)
                continue
            before = self._num_lines
            first = not tried and not self._num_lost
            why = partial(self._choice.why, upstream, upstreams()) if first else partial(dict, why="failover")
            self._span.note("asked", upstream.name, why)
            if await self._ask(upstream):
                return
            if self._num_lines > before or not until_s:
                tried.clear()
                said_s = time.monotonic()
                until_s = said_s + CONTINUE_S
            tried.add(upstream.name)
        error = none_answers()
        self._span.note("failed", "", partial(dict, why=error.message))
        if not self._has_begun:
            response = self._said or error_response(error, self._request.scope)
            await response(self._request.scope, self._request.receive, self._send)
            return
        if self._num_lost == _MOST_LOST or not self._can_continue:
            error = NoServer("the server that answered has ended, and none can go on.", fix="send the request again.")
        form = form_of(self._request.scope["path"])
        await self._end(form.last_events(form.body(error, self._request.state.request_id)))

    async def _ask(self, upstream: Upstream) -> bool:
        """Pass the request on, and the answer back. False if another server may be asked."""
        load = int(self._request.scope["path"] != LIVE)
        upstream.in_flight += load
        upstream.num_requests += 1
        self._expects(upstream, self._choice.cost(upstream))
        try:
            asked = passed_on(upstream, self._request, self._body, bytes(self._journal))
            async with self._client.stream(**asked) as answer:
                if answer.headers.get("content-type", "").startswith("text/event-stream"):
                    return await self._stream(upstream, answer)
                content = await answer.aread()
                if answer.status_code == 503 or (self._has_begun and answer.status_code in COME_AGAIN):
                    self._said = answered(upstream, answer, content)
                    self._num_lost += not self._has_begun and UNTOUCHED not in answer.headers
                    return False
                if self._has_begun:  # no server can continue the answer
                    form = form_of(self._request.scope["path"])
                    await self._end(form.last_events(msgspec.json.decode(content)))
                    return True
                await answered(upstream, answer, content)(self._request.scope, self._request.receive, self._send)
                return True
        except (httpx.TransportError, msgspec.DecodeError) as error:
            upstream.fails("does not answer")
            self._lost(upstream, str(error) or type(error).__name__)
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                self._num_lost -= 1  # the server has not seen the request
            return False
        finally:
            upstream.in_flight -= load
            self._expects(upstream, 0.0)

    def _expects(self, upstream: Upstream, num_tokens: float) -> None:
        """The server has so many tokens to compute before it shows any of this answer."""
        upstream.num_waiting += num_tokens - self._num_expected
        self._num_expected = num_tokens

    async def _stream(self, upstream: Upstream, answer: httpx.Response) -> bool:
        """Pass events on as soon as the journal has what they show."""
        is_journaled = self._can_continue = JOURNAL in answer.headers
        pending, shown = bytearray(), bytearray()
        async for chunk in answer.aiter_raw():
            looked = max(0, len(pending) - 1)
            pending += chunk
            if pending.find(b"\n\n", looked) < 0:  # a large event comes in many chunks
                continue
            *blocks, pending = pending.split(b"\n\n")
            for block in blocks:
                if not block.startswith(PREFIX):
                    shown += block + b"\n\n"
                    continue
                line = bytes(block[len(PREFIX) :])
                if line.startswith(LOST):
                    return self._is_lost(upstream, line)
                if line.startswith(END):
                    await self._show(upstream, answer, shown)
                    await self._end(b"")
                    return True
                self._note(line)
                if shown:
                    self._expects(upstream, 0.0)
                await self._show(upstream, answer, shown)
            if not is_journaled:
                await self._show(upstream, answer, shown)
        if is_journaled:
            self._lost(upstream, "its stream has no end")
            return False
        await self._show(upstream, answer, shown + pending)
        await self._end(b"")
        return True

    def _note(self, line: bytes) -> None:
        self._num_lines += 1
        self._can_continue &= len(self._journal) + len(line) < MOST_JOURNAL_BYTES
        if self._can_continue:
            self._journal += line + b"\n"

    async def _show(self, upstream: Upstream, answer: httpx.Response, shown: bytearray) -> None:
        """The client gets these events."""
        if not shown:
            return
        if not self._has_begun:
            self._has_begun = True
            start = {"type": "http.response.start", "status": answer.status_code, "headers": _passed(upstream, answer)}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": bytes(shown), "more_body": True})
        shown.clear()

    async def _end(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    def _is_lost(self, upstream: Upstream, line: bytes) -> bool:
        """The server says that it cannot go on."""
        told = msgspec.json.decode(line)
        self._lost(upstream, told["lost"])
        self._num_lost -= not told.get("is_cause")
        return False

    def _lost(self, upstream: Upstream, why: str) -> None:
        """Count a server that was lost while it had the request."""
        upstream.num_failures += 1
        self._span.note("lost", upstream.name, partial(dict, why=why))
        logger.warning("%s: %s [%s]", upstream.name, why, self._request.state.request_id)
        if self._num_lines - self._lost_at >= _PROGRESS:
            self._num_lost = 0
        self._num_lost += 1
        self._lost_at = self._num_lines


def _passed(upstream: Upstream, answer: httpx.Response) -> Headers:
    headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in _OWN_HEADERS]
    return [*headers, (SERVER, quote(upstream.name).encode())]
