"""The checks of every request before its route: its id, its key, the size limit; and the count of answers. Each 429 and
503 leaves with the time after which to come again.

Plain ASGI, so that a closed connection reaches the routes untouched.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections import Counter
from collections.abc import Sequence
from hmac import compare_digest

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import BodyTooLarge, InvalidInput
from quire.serve.config import MOST_BODY_BYTES
from quire.serve.errors import COME_AGAIN, RETRY_AFTER_S, error_response, form_of
from quire.serve.journal import GENERATING, JOURNAL, MOST_JOURNAL_BYTES, TOKENS, behind_journal
from quire.serve.keys import Keys

logger = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
"""Header that a client may send, and gets back; without it, it gets one of the server's."""

RETRY_AFTER = "Retry-After"

_IS_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """Wraps the app. `responses` counts by route and status. The state of a request has its `client` (`keys.Client`)
    and its `request_id`; and what its router wants (`quire.serve.journal`)."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        responses: Counter[tuple[str, str]],
        keys: Keys,
        most_body_bytes: int,
        router_secret: str | None,
    ) -> None:
        self._app = app
        self._responses = responses
        self._keys = keys
        self._most_body_bytes = most_body_bytes
        self._router_secret = router_secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_head = scope["method"] == "HEAD"
        if is_head:  # as GET, to the end of its head: the body may be events that do not end
            scope = {**scope, "method": "GET"}

        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        request_id = given if _IS_ID.fullmatch(given) else uuid.uuid4().hex
        id_header = form_of(scope["path"]).id_header

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                route, status = getattr(scope.get("route"), "path", "other"), str(message["status"])
                self._responses[route, status] += 1
                answered = MutableHeaders(scope=message)
                answered[REQUEST_ID] = answered[id_header] = request_id
                if message["status"] in COME_AGAIN:
                    answered.setdefault(RETRY_AFTER, str(RETRY_AFTER_S))
                if message["status"] >= 400:
                    logger.info("%s %s: %s [%s]", scope["method"], route, status, request_id)
            elif is_head:
                return
            await send(message)
            if is_head:  # the route sees a client that has left
                await send({"type": "http.response.body"})

        client, refusal = self._keys.refusal(scope["path"], _given_key(headers.raw))
        asks_tokens = self._asked(headers, TOKENS) is not None
        scope.setdefault("state", {}).update(request_id=request_id, client=client, asks_tokens=asks_tokens)
        if refusal is None and asks_tokens and scope["path"] not in GENERATING:
            refusal = InvalidInput(f"{TOKENS} is for routes that generate.", fix="leave it out.")
        length, most, journal = headers.get("content-length", "0"), self._most_body_bytes, self._asked(headers, JOURNAL)
        if journal is not None:
            receive, most = behind_journal(receive, journal, scope["state"]), most + journal
        if refusal is None and length.isdecimal() and int(length) > most:
            refusal = _too_large(int(length), most)
        if refusal is not None:
            await error_response(refusal, scope)(scope, receive, counted_send)
            return
        await self._app(scope, _limited(receive, most), counted_send)

    def _asked(self, headers: Headers, name: str) -> int | None:
        """The number in a header of the router; None if it does not send it."""
        number, _, secret = headers.get(name, "").partition(" ")
        known = self._router_secret is not None and compare_digest(secret.encode(), self._router_secret.encode())
        return min(int(number[:12]), MOST_JOURNAL_BYTES) if known and number.isdecimal() else None


def add_gate(
    app: FastAPI,
    responses: Counter[tuple[str, str]],
    *,
    keys: Keys,
    most_body_bytes: int = MOST_BODY_BYTES,
    cors_origins: Sequence[str],
    router_secret: str | None = None,
) -> None:
    """Put the gate before the routes of `app`. Pages of `cors_origins` may call it; "*" is any. It believes
    what a router with that secret says of answers that were begun elsewhere."""
    app.add_middleware(
        Gate,
        responses=responses,
        keys=keys,
        most_body_bytes=most_body_bytes,
        router_secret=router_secret,
    )
    if cors_origins:  # around the gate: a browser asks first, without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, RETRY_AFTER],
        )


def _given_key(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The key in either header that clients send, in the form of `Authorization`, as the bytes that came."""
    given = dict(headers)
    return given.get(b"authorization") or b"Bearer " + given.get(b"x-api-key", b"")


def _limited(receive: Receive, most_bytes: int) -> Receive:
    """`receive`, for bodies that do not say how long they are."""
    num_bytes = 0

    async def limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > most_bytes:
            raise _too_large(num_bytes, most_bytes)
        return message

    return limited


def _too_large(num_bytes: int, most_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has {num_bytes} bytes or more; this server takes {most_bytes}.",
        fix="send a shorter prompt, or raise --max-body.",
    )
