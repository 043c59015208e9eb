"""Connections: how long a client may take to send a request or to read an answer, and how many there may be.

    accepted --first byte--> head --headers complete--> body --message complete--> answer --> idle
             head_s             head_s                  body_s, and more for its length      (uvicorn closes it)

What takes longer is answered with 408 and closed; what stands behind an open answer has its time anew. An answer whose
waiting part is not read in write_s is dropped.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from inspect import isfunction, signature
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.errors import HeaderTooLarge, InvalidInput, Overloaded, QuireError, TooSlow
from quire.serve.errors import COME_AGAIN, UNTOUCHED, form_of

BODY_BYTES_PER_S = 128 * 1024
"""A body may take a second more for so many bytes."""
HEAD_S = 10.0
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`most_connections` may be open. A head may take `head_s`, and a body `body_s` beside its length, which is at most
    `most_body_bytes`. A client that has not read what waits for it after `write_s` loses its answer."""

    most_connections: int = 2048
    most_body_bytes: int = 32 << 20
    head_s: float = HEAD_S
    body_s: float = 30.0
    write_s: float = 60.0


class HttpConnection(HttpToolsProtocol):
    """One connection. Its limits are set by a subclass (`limited_to`)."""

    limits = Limits()

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._is_in_head = True
        self._is_refused = False
        self._answering: RequestResponseCycle | None = None  # uvicorn's `cycle` is the last one that arrived

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The client has until a deadline for its headers; too many connections are refused."""
        super().connection_made(transport)
        self._wait("the headers", self.limits.head_s)
        if len(self.connections) > self.limits.most_connections:
            error = Overloaded(f"{self.limits.most_connections} connections are open.", retry_after_s=1.0)
            error.status = 503
            self._refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """What it waited for, and what waited for it, ends."""
        self.pipeline.clear()  # no client reads their answers
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        if self._is_refused:
            return
        if self._is_in_head:
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._deadline is None and self.cycle is not None and self.cycle.response_complete:
            self._wait("the headers", self.limits.head_s)  # uvicorn waits no longer: a line end begins no request
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())

    def on_message_begin(self) -> None:
        """The parser meets the first byte of a request."""
        super().on_message_begin()
        if not self._is_in_head and not self._is_refused:  # not the first
            self._is_in_head, self._num_head_bytes = True, 0
            self._wait("the headers", self.limits.head_s)

    def on_headers_complete(self) -> None:
        """The parser has all headers; the body has a deadline of its own."""
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if len(self.headers) > MAX_HEADERS or num_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())
        self._is_in_head = False
        if self._is_refused:
            return
        length = next((value for name, value in self.headers if name == b"content-length"), b"")
        num_body_bytes = int(length) if length.isdigit() and len(length) < 19 else self.limits.most_body_bytes
        more_s = min(num_body_bytes, self.limits.most_body_bytes) / BODY_BYTES_PER_S
        self._wait("the body", self.limits.body_s + more_s)
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """The parser has a part of a body."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The parser has the whole request: no deadline is left."""
        if not self._is_refused:
            self._stop_waiting()
            super().on_message_complete()

    def pause_writing(self) -> None:
        """The client reads too slowly; it has a deadline too."""
        super().pause_writing()
        if self._write_deadline is None:
            self._write_deadline = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def send_400_response(self, msg: str) -> None:
        """The parser cannot read what arrived."""
        self._refuse(InvalidInput("this is no HTTP request that can be read.", fix="send HTTP/1.1."))

    def _wait(self, part: str, seconds: float) -> None:
        """Give the client so long for a part of its request."""
        self._stop_waiting()
        self._deadline = self.loop.call_later(seconds, self._on_deadline, part, seconds)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self, part: str, seconds: float) -> None:
        is_open = self.cycle is not None and not self.cycle.response_complete
        if self.pipeline or (self._is_in_head and is_open):  # an answer before it, which would end too
            self._wait(part, seconds)
            return
        self._refuse(TooSlow(f"{part} did not arrive within {seconds:.0f} s.", fix="send the request again."))

    def _may_answer(self) -> bool:
        """Whether the client would take what is written now for the answer to what is refused."""
        if self.pipeline:
            return False
        if self.cycle is None or self.cycle.response_complete:
            return self._is_in_head
        return not self._is_in_head and self.cycle.more_body and not self.cycle.response_started

    def _path(self) -> str:
        """The path of the request that arrives, "" before there is one."""
        path: bytes = vars(self).get("url", b"").partition(b"?")[0]
        return path.decode("latin-1")

    def _refuse(self, error: QuireError) -> None:
        """Answer, unless an answer has begun, and close."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._stop_waiting()
        if self._may_answer():
            body = json.dumps(form_of(self._path()).body(error, "")).encode()
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
                "content-type: application/json",
                f"content-length: {len(body)}",
                f"{UNTOUCHED}: 1",  # no engine has half a request
                *(["retry-after: 1"] if error.status in COME_AGAIN else ()),
                "connection: close",
                *("", ""),
            )
            self.transport.write("\r\n".join(head).encode() + body)
        self.transport.close()


_USED: dict[type, tuple[str, ...]] = {
    HttpToolsProtocol: ("connections", "cycle", "headers", "loop", "pipeline", "transport", "url"),
    RequestResponseCycle: ("disconnected", "message_event", "more_body", "response_complete", "response_started"),
}
"""Attributes of uvicorn's classes that its documents do not promise."""

_OVERRIDDEN = {"_start_asgi_task": ["self", "cycle", "app"]}
"""Methods with their parameters: where uvicorn calls none of that name, disconnects would go unseen."""


def check_uvicorn() -> None:
    """Raises InvalidInput if this release of uvicorn lacks what connections use of it."""
    lacks = [name for name, found in _OVERRIDDEN.items() if _parameters(HttpToolsProtocol, name) != found]
    for kind, names in _USED.items():
        functions = [each for each in vars(kind).values() if isfunction(each)]
        found = {name for function in functions for name in function.__code__.co_names}
        lacks += [f"{kind.__name__}.{name}" for name in names if name not in found]
    if lacks:
        raise InvalidInput(
            f"uvicorn {version('uvicorn')} has no {', '.join(lacks)}, which Quire needs to close slow connections.",
            fix='install a tested one: pip install "uvicorn>=0.30,<0.55".',
        )


def _parameters(kind: type, method: str) -> list[str]:
    found = getattr(kind, method, None)
    return list(signature(found).parameters) if found is not None else []


def limited_to(limits: Limits) -> type[HttpConnection]:
    """The class of the connections of a server. Raises InvalidInput as `check_uvicorn`."""
    check_uvicorn()
    return type("LimitedConnection", (HttpConnection,), {"limits": limits})


def _head_too_large() -> HeaderTooLarge:
    return HeaderTooLarge(
        f"the headers have more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} lines.", fix="send fewer of them."
    )
