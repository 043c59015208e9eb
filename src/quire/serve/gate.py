"""The checks of every request before its route: its id, the API key, the size limit; and the count of answers.

Plain ASGI, so that a closed connection reaches the routes untouched.
"""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections import Counter
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import BodyTooLarge, QuireError, WrongKey
from quire.serve.errors import error_response

logger = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
"""Header that a client may send, and gets back; without it, it gets one of the server's."""

_IS_ID = re.compile(r"[\x21-\x7e]{1,128}")

MAX_BODY_BYTES = 32 * 1024 * 1024


class Gate:
    """Wraps the app. With an `api_key`, everything under /v1 needs it. `responses` counts by route and status."""

    def __init__(self, app: ASGIApp, *, responses: Counter[tuple[str, str]], api_key: str | None) -> None:
        self._app = app
        self._responses = responses
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        request_id = given if _IS_ID.fullmatch(given) else uuid.uuid4().hex

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                route, status = getattr(scope.get("route"), "path", "other"), str(message["status"])
                self._responses[route, status] += 1
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
                if message["status"] >= 400:
                    logger.info("%s %s: %s [%s]", scope["method"], route, status, request_id)
            await send(message)

        scope.setdefault("state", {})["request_id"] = request_id
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await error_response(refusal)(scope, receive, counted_send)
            return
        await self._app(scope, _limited(receive), counted_send)

    def _refusal(self, path: str, headers: Headers) -> QuireError | None:
        if self._expected is not None and path.startswith("/v1/"):
            given = next((value for name, value in headers.raw if name == b"authorization"), b"")  # bytes, as they came
            if not hmac.compare_digest(given, self._expected):
                return WrongKey("the API key is missing or wrong.", fix="send 'Authorization: Bearer <key>'.")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            return _too_large(int(length))
        return None


def add_gate(
    app: FastAPI, responses: Counter[tuple[str, str]], *, api_key: str | None, cors_origins: Sequence[str]
) -> None:
    """Put the gate before the routes of `app`. Pages of `cors_origins` may call it; "*" is any."""
    app.add_middleware(Gate, responses=responses, api_key=api_key)
    if cors_origins:  # around the gate: a browser asks first, without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )


def _limited(receive: Receive) -> Receive:
    """`receive`, for bodies that do not say how long they are."""
    num_bytes = 0

    async def limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > MAX_BODY_BYTES:
            raise _too_large(num_bytes)
        return message

    return limited


def _too_large(num_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has {num_bytes} bytes or more; this server takes {MAX_BODY_BYTES}.", fix="send a shorter prompt."
    )
