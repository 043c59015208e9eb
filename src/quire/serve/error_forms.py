"""The bodies of errors as the clients of each dialect read them. A path says which dialect its clients speak."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ContextTooLong, QuireError
from quire.serve.sse import DONE, event

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "request_timeout",
    413: "request_too_large",
    431: "request_too_large",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}

_ANTHROPIC_TYPES = _OPENAI_TYPES | {408: "timeout_error", 503: "overloaded_error"}


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How a dialect tells of an error: in a whole answer, with the id of the request, and as the last events of a
    stream. Answers repeat the id in the header `id_header`."""

    body: Callable[[QuireError, str], Mapping[str, Any]]
    last_events: Callable[[Mapping[str, Any]], bytes]
    id_header: str


def openai_error(error: QuireError, _request_id: str = "") -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`. Of a prompt that is too long, `code` and the message are those
    that clients look for, and `quire_code` is Quire's."""
    message, code = _text(error), {"code": error.code}
    if isinstance(error, ContextTooLong):
        message = f"This model's maximum context length is {error.context} tokens. {message}"
        code = {"code": "context_length_exceeded", "quire_code": error.code}
    kind = _OPENAI_TYPES.get(error.status, "server_error")
    return {"error": {"message": message, "type": kind, "param": getattr(error, "param", None), **code}}


def anthropic_error(error: QuireError, request_id: str = "") -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`, where `error` has also Quire's `code`, and the
    `details` of one that has some. A prompt that is too long is told in the words that clients look for, without the
    one token of an answer that counts as well."""
    message = _text(error)
    if isinstance(error, ContextTooLong):
        message = f"prompt is too long: {error.tokens - 1} tokens > {error.context - 1} maximum. {message}"
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
    found = {"type": kind, "message": message, "code": error.code}
    if details := getattr(error, "details", None):
        found["details"] = details
    return {"type": "error", "error": found, "request_id": request_id or uuid.uuid4().hex}


def _text(error: QuireError) -> str:
    message = error.message + (f" Fix: {error.fix}" if error.fix else "")
    return message.encode(errors="backslashreplace").decode()  # messages may quote text that has no UTF-8


OPENAI = ErrorForm(openai_error, lambda body: event(body) + DONE, "X-Request-Id")
ANTHROPIC = ErrorForm(anthropic_error, lambda body: b"event: error\n" + event(body), "Request-Id")


def form_of(path: str) -> ErrorForm:
    """The form for the clients of this path."""
    return ANTHROPIC if f"{path}/".startswith("/v1/messages/") else OPENAI
