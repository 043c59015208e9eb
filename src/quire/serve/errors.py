"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from quire.errors import InvalidInput, QuireError
from quire.serve.answers import ErrorAnswer

logger = logging.getLogger(__name__)

_TYPES = {
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

COME_AGAIN = (429, 503)
"""Statuses of answers that have a `Retry-After`."""

RETRY_AFTER_S = 5
"""What it says if nothing is known of when a request would succeed."""

_SAME = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens"}
"""Names of other servers, with the names here."""

_REPR = reprlib.Repr()  # short texts of bodies of any size
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, 80, 80, 80
_REPR.maxlist = _REPR.maxdict = 20

UNKNOWN_FIELD = "unknown_field"
"""Pydantic's type of the error of an object with a field that it does not have; `ctx` has its `name`, and those
`known`."""


class BadField(InvalidInput):
    """A field of a body that is wrong; `param` names it."""

    def __init__(self, message: str, *, param: str, fix: str = "") -> None:
        self.param = param
        super().__init__(message, fix=fix)


def unknown_field(name: str, known: Iterable[str], *, param: str | None = None) -> BadField:
    """The error for an unknown field, with the nearest known name."""
    near = [_SAME[name]] if name in _SAME else get_close_matches(name[:60], known, n=1)
    return BadField(
        f"{name[:60]} is no field of this request.",
        param=(param or name)[:120],
        fix=f"use {near[0]}, or leave it out." if near else "leave it out.",
    )


def error_body(error: QuireError, *, param: str | None = None) -> ErrorAnswer:
    """The JSON body that tells a client about `error`."""
    message = error.message + (f" Fix: {error.fix}" if error.fix else "")
    return {
        "error": {
            "message": message.encode(errors="backslashreplace").decode(),  # may quote text that has no UTF-8
            "type": _TYPES.get(error.status, "server_error"),
            "param": param or getattr(error, "param", None),
            "code": error.code,
        }
    }


def error_response(error: QuireError) -> JSONResponse:
    """`error` as a whole response. One that may succeed later says when."""
    wait_s = getattr(error, "retry_after_s", None)
    headers = None if wait_s is None else {"Retry-After": str(max(1, math.ceil(wait_s)))}
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def install(app: FastAPI) -> None:
    """Make every failure of `app`'s routes answer in this shape."""

    def on_http_error(error: HTTPException) -> Response:
        if isinstance(error.__cause__, QuireError):  # raised while the body was being received
            return error_response(error.__cause__)
        wrapped = _unreadable(error.__cause__) or _no_route(error) or InvalidInput(f"{error.detail}.")
        wrapped.status = error.status_code
        return JSONResponse(error_body(wrapped), status_code=error.status_code, headers=error.headers)

    def on_defect(error: Exception) -> Response:
        logger.error("a request failed", exc_info=error)
        return error_response(QuireError(f"{type(error).__name__} while serving the request; see the server's log."))

    def add(kind: type[Exception], answer: Callable[[Any], Response]) -> None:
        async def handler(_: Request, error: Exception) -> Response:
            return answer(error)

        app.add_exception_handler(kind, handler)

    add(QuireError, error_response)
    add(RequestValidationError, lambda error: error_response(_bad_body(error)))
    add(HTTPException, on_http_error)
    add(Exception, on_defect)


def _no_route(error: HTTPException) -> InvalidInput | None:
    if error.status_code != 404:
        return None
    return InvalidInput("this server has no such route.", fix="GET /docs lists its routes.")


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


def _bad_body(error: RequestValidationError) -> BadField | InvalidInput:
    """Name the first wrong field; for a field with several types, list what each of them requires."""
    problems = error.errors()
    for problem in problems:
        if problem["type"] == UNKNOWN_FIELD:
            name, known = problem["ctx"]["name"], problem["ctx"]["known"]
            return unknown_field(name, known, param=_path([*problem["loc"][1:], name]))
    first = problems[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return InvalidInput(f"the body is not JSON: {reason} at character {first['loc'][-1]}.")
    if len(first["loc"]) < 2:
        return InvalidInput(f"the body must be a JSON object, sent as application/json: {first['msg']}.")
    field = str(first["loc"][1])
    if first["type"] == "missing":
        return BadField(f"{field} is required.", param=field)
    reasons = dict.fromkeys(str(p["msg"]).removeprefix("Input should be ") for p in problems if p["loc"][1] == field)
    got = _REPR.repr(first.get("input"))
    got = got if len(got) <= 60 else got[:57] + "..."
    return BadField(f"{field} should be {', or '.join(list(reasons)[:4])}; got {got}.", param=field)


def _path(loc: Sequence[int | str]) -> str:
    """`messages[0].content`; what pydantic adds to tell the types of a union apart is left out."""
    fields = [step for step in loc[:-1] if isinstance(step, int) or step.isidentifier()]
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in fields]
    return "".join([*steps, f".{loc[-1]}"]).removeprefix(".")
