"""Failures of routes, and their answers in the form of the clients' dialect, which a path tells."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import reprlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from quire.errors import ContextTooLong, InvalidInput, QuireError, TooSlow, UnknownRoute
from quire.serve.sse import DONE, event

logger = logging.getLogger(__name__)

COME_AGAIN = (429, 503)
"""Statuses of answers that have a `Retry-After`."""

RETRY_AFTER_S = 5
"""What it says where no time is known at which a request would succeed."""

UNTOUCHED = "X-Quire-Untouched"
"""Header of an answer that says that the engine never had the request."""

_LIMITS = ("max_tokens", "max_output_tokens", "max_new_tokens", "max_completion_tokens")
_SAME = dict.fromkeys(_LIMITS, _LIMITS) | {
    "prompt": ("text", "messages", "input"),
    "response_format.schema": ("json_schema.schema",),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "text": ("prompt",),
}
"""Paths of fields of other routes and servers, with names here; the first is used that an object has."""

_REPR = reprlib.Repr()  # short texts of values of any size
_REPR.maxstring, _REPR.maxother, _REPR.maxlong = 80, 80, 80

UNKNOWN_FIELD = "unknown_field"
"""Pydantic's type of the error of an object with a field that it does not have; `ctx` has its `name`, and those
`known`."""


class BadField(InvalidInput):
    """A field of a body that is wrong; `param` names it."""

    def __init__(self, message: str, *, param: str, fix: str = "") -> None:
        self.param = param
        super().__init__(message, fix=fix)


@contextlib.contextmanager
def naming(param: str, about: str = "") -> Iterator[None]:
    """InvalidInput that is raised within is BadField of this field, whose message begins with `about`."""
    try:
        yield
    except InvalidInput as error:
        raise BadField(about + error.message, param=param, fix=error.fix) from None


def unknown_field(name: str, known: Iterable[str], *, param: str | None = None) -> BadField:
    """The error for an unknown field, with the nearest known name."""
    known = list(known)
    near = [each for each in _SAME.get(param or name, ()) if each.partition(".")[0] in known]
    near = near or get_close_matches(name[:60], known, n=1, cutoff=0.8)
    return BadField(
        f"{(param or name)[:120]} is no field of this request.",
        param=(param or name)[:120],
        fix=f"use {near[0]}, or leave it out." if near else "leave it out.",
    )


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
    message, code = _said(error), {"code": error.code}
    if isinstance(error, ContextTooLong):
        message = f"This model's maximum context length is {error.context} tokens. {message}"
        code = {"code": "context_length_exceeded", "quire_code": error.code}
    kind = _OPENAI_TYPES.get(error.status, "server_error")
    return {"error": {"message": message, "type": kind, "param": getattr(error, "param", None), **code}}


def anthropic_error(error: QuireError, request_id: str = "") -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`, where `error` has also Quire's `code`, and the
    `details` of one that has some. A prompt that is too long is told in the words that clients look for, without the
    one token of an answer that counts as well."""
    message = _said(error)
    if isinstance(error, ContextTooLong):
        message = f"prompt is too long: {error.tokens - 1} tokens > {error.context - 1} maximum. {message}"
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
    found = {"type": kind, "message": message, "code": error.code}
    if details := getattr(error, "details", None):
        found["details"] = details
    return {"type": "error", "error": found, "request_id": request_id or uuid.uuid4().hex}


def _said(error: QuireError) -> str:
    message = error.message + (f" Fix: {error.fix}" if error.fix else "")
    return message.encode(errors="backslashreplace").decode()  # messages may quote text that has no UTF-8


OPENAI = ErrorForm(openai_error, lambda body: event(body) + DONE, "X-Request-Id")
ANTHROPIC = ErrorForm(anthropic_error, lambda body: b"event: error\n" + event(body), "Request-Id")


def form_of(path: str) -> ErrorForm:
    """The form for the clients of this path."""
    return ANTHROPIC if f"{path}/".startswith("/v1/messages/") else OPENAI


def error_response(error: QuireError, scope: Scope) -> JSONResponse:
    """`error` as the whole answer to a request. One that may succeed later says when; one whose time is up need not be
    sent again."""
    headers = {}
    if (wait_s := getattr(error, "retry_after_s", None)) is not None:
        headers["Retry-After"] = str(max(1, math.ceil(wait_s)))
    if not getattr(error, "was_received", True):
        headers[UNTOUCHED] = "1"
    if isinstance(error, TooSlow):
        headers["X-Should-Retry"] = "false"
    body = form_of(scope["path"]).body(error, scope.get("state", {}).get("request_id", ""))
    return JSONResponse(body, status_code=error.status, headers=headers)


def install(app: FastAPI) -> None:
    """Make every failure of `app`'s routes answer in this shape."""

    def add(kind: type[Exception], told: Callable[[Any, Request], QuireError]) -> None:
        async def handler(request: Request, error: Exception) -> Response:
            return error_response(told(error, request), request.scope)

        app.add_exception_handler(kind, handler)

    async def on_http_error(request: Request, error: HTTPException) -> Response:
        methods = (error.headers or {}).get("Allow", "")
        if methods:  # those of the first route of that path alone
            methods = ", ".join(app.openapi()["paths"].get(request.url.path, ())).upper() or methods
        allowed = {"Allow": ", ".join(_allowed(methods))} if methods else {}
        if methods and request.method == "OPTIONS":
            return Response(status_code=204, headers=allowed)
        response = error_response(_http_error(error, request), request.scope)
        response.headers.update({**(error.headers or {}), **allowed})
        return response

    add(QuireError, lambda error, _: error)
    add(RequestValidationError, _bad_body)
    add(Exception, lambda error, _: defect(error))
    app.add_exception_handler(HTTPException, on_http_error)  # type: ignore[arg-type]


def defect(error: Exception) -> QuireError:
    """What a client is told of an error of our own; it is logged."""
    logger.error("a request failed", exc_info=error)
    return QuireError(f"{type(error).__name__} while serving the request; see the server's log.")


def _allowed(methods: str) -> list[str]:
    """The methods of a route, with those that the server answers of itself."""
    found = [each.strip() for each in methods.split(",")]
    return sorted({*found, *(["HEAD"] if "GET" in found else []), "OPTIONS"})


def _http_error(error: HTTPException, request: Request) -> QuireError:
    if isinstance(error.__cause__, QuireError):  # raised while the body was being received
        return error.__cause__
    if error.status_code == 404:
        return UnknownRoute("this server has no such route.", fix="GET /openapi.json lists its routes.")
    if error.status_code == 405:
        found: QuireError = UnknownRoute(
            f"{request.method} is no method of this route.", fix="GET /openapi.json has its methods."
        )
    else:
        found = _unreadable(error.__cause__) or InvalidInput(f"{error.detail}.")
    found.status = error.status_code
    return found


def _unreadable(cause: BaseException | None) -> InvalidInput | None:
    """Why a body is no JSON, if that is more than a syntax error."""
    match cause:
        case RecursionError():
            return InvalidInput("the body is not JSON that can be read: it is nested too deeply.")
        case UnicodeDecodeError():
            return InvalidInput(f"the body is not UTF-8: {cause.reason} at byte {cause.start}.", fix="send UTF-8.")
        case ValueError():
            return InvalidInput(f"the body is not JSON that can be read: {cause}.")
    return None


def _bad_body(error: RequestValidationError, request: Request) -> QuireError:
    """Name the first wrong field, and where in it the fault is."""
    problems = error.errors()
    for problem in problems:
        if problem["type"] == UNKNOWN_FIELD:
            name, known = problem["ctx"]["name"], problem["ctx"]["known"]
            return unknown_field(name, known, param=f"{_path(problem['loc'])}.{name}".removeprefix("."))
    first = problems[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return InvalidInput(f"the body is not JSON: {reason} at character {first['loc'][-1]}.")
    if len(first["loc"]) < 2:
        return _no_object(first, request.headers.get("content-type", ""))
    return _wrong_field([each for each in problems if each["loc"][1] == first["loc"][1]])


def _no_object(problem: Mapping[str, Any], content_type: str) -> InvalidInput:
    if isinstance(problem.get("input"), bytes):
        sent = f"as {content_type[:60]}" if content_type else "without a Content-Type"
        return InvalidInput(f"the body was sent {sent}.", fix="send JSON, with 'Content-Type: application/json'.")
    return InvalidInput("the body must be a JSON object, sent as application/json.")


def _wrong_field(problems: Sequence[Mapping[str, Any]]) -> BadField:
    """The error for a field. Of the types that it may have, the one that fits furthest says what is wrong; of those
    that fit equally far, each says what it requires."""
    paths = [_path(each["loc"]) for each in problems]
    deepest = max(range(len(problems)), key=lambda at: (_depth(problems[at]["loc"]), -at))
    path, worst = paths[deepest], problems[deepest]
    if isinstance(cause := worst.get("ctx", {}).get("error"), InvalidInput):
        return BadField(f"{path}: {cause.message}", param=path, fix=cause.fix)
    if worst["type"] == "union_tag_not_found":
        path += ".type"
    if worst["type"] in ("missing", "union_tag_not_found"):
        return BadField(f"{path} is required.", param=path)
    parent, _, name = path.rpartition(".")
    if name == "type" and parent and worst["type"] == "literal_error" and isinstance(worst["input"], str):
        kind, known = worst["input"][:40], worst["ctx"]["expected"]
        return BadField(f"{parent}: type '{kind}' is not supported here; it should be {known}.", param=path)
    messages = dict.fromkeys(str(each["msg"]) for each, at in zip(problems, paths, strict=True) if at == path)
    reasons = [_GARBLED.sub("", each).replace("a valid dictionary", "an object") for each in list(messages)[:4]]
    if all(each.startswith("be ") for each in reasons):
        reasons = [reasons[0], *(each.removeprefix("be ") for each in reasons[1:])]
    return BadField(f"{path} should {', or '.join(reasons)}; got {_short(worst.get('input'))}.", param=path)


def _short(given: Any) -> str:
    """A value of a body in few characters, as JSON has it."""
    if isinstance(given, dict | list):
        return "an object" if isinstance(given, dict) else "a list"
    if given is None or isinstance(given, bool):
        return json.dumps(given)
    found = _REPR.repr(given)
    return found if len(found) <= 60 else found[:57] + "..."


_GARBLED = re.compile(r"^\w+ should | after validation| or object to extract fields from")


def _steps(loc: Sequence[int | str]) -> list[int | str]:
    """The fields and indices of a place in a body, without what pydantic adds to tell the types of a union apart."""
    return [step for step in loc[1:] if isinstance(step, int) or (_FIELD.fullmatch(step) and step not in _KINDS)]


_FIELD = re.compile(r"[a-z_][a-z0-9_]*")
_KINDS = ("str", "int", "bool", "float")


def _depth(loc: Sequence[int | str]) -> int:
    return len(_steps(loc))


def _path(loc: Sequence[int | str]) -> str:
    """`messages[0].content` for ("body", "messages", 0, "content")."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in _steps(loc)).removeprefix(".")[:120]
