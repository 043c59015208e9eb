"""The demo's client: a few lines of HTTP, so that what it measures is the server. Blocking; a thread for each talk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quire.errors import QuireError

if TYPE_CHECKING:
    import http.client

TIMEOUT_S = 120.0


class Rejected(QuireError):
    """The server answered with an error; `body` is its error object."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        self.body = body
        super().__init__(str(body.get("message", body)))
        self.code = str(body.get("code") or self.code)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One question and its answer, as the client saw it and as the server's usage counted it."""

    question: str
    answer: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token_s: float
    total_s: float


@dataclass(slots=True)
class Conversation:
    """A conversation in progress. One thread writes it, another may show it."""

    name: str
    turns: list[Turn] = field(default_factory=list)
    text: str = ""  # the answer so far


class Client:
    """Speaks to one server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._address = (parts.hostname, parts.port or 80)

    def get(self, path: str) -> Any:
        """The JSON at `path`."""
        return self._json("GET", path, None)

    def chat(self, messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
        """One answer, whole. Raises Rejected."""
        answer: dict[str, Any] = self._json("POST", "/v1/chat/completions", {"messages": messages, **options})
        return answer

    def stream(self, messages: list[dict[str, str]], on_text: Callable[[str], None], **options: Any) -> Turn:
        """One answer, as it comes. Raises Rejected."""
        body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **options}
        started_s = time.perf_counter()
        first_token_s, pieces = 0.0, list[str]()
        usage: dict[str, Any] = {}
        for event in self._events("/v1/chat/completions", body):
            if "error" in event:
                raise Rejected(500, event["error"])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                if text:
                    first_token_s = first_token_s or time.perf_counter() - started_s
                    pieces.append(text)
                    on_text(text)
        return Turn(
            question=messages[-1]["content"],
            answer="".join(pieces),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            output_tokens=usage["completion_tokens"],
            first_token_s=first_token_s,
            total_s=time.perf_counter() - started_s,
        )

    def _connect(self) -> http.client.HTTPConnection:
        import http.client  # every command would pay for it at start

        return http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)

    def _json(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        connection = self._connect()
        try:
            return json.loads(self._open(connection, method, path, body).read())
        finally:
            connection.close()

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        connection = self._connect()
        try:
            for line in self._open(connection, "POST", path, body):
                payload = line.strip().removeprefix(b"data: ")
                if payload == b"[DONE]":
                    return
                if payload:
                    yield json.loads(payload)
        finally:
            connection.close()

    def _open(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        payload = None if body is None else json.dumps(body).encode()
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise Rejected(response.status, json.loads(response.read())["error"])
        return response
