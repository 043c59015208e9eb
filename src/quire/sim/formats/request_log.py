"""Logs of requests to an OpenAI-style server: one body a line, alone or beside its response.

    {"messages": [{"role": "user", "content": "Hi"}], "timestamp": 1700000000.5, "user": "ada"}
    {"body": {"prompt": "Once"}, "response": {"choices": [{"text": " upon"}]}}

`body` may also be called `request`, and a response may have a `body` around it, as in batch files. Without a response
the output has as many tokens as `usage` says, or `max_tokens`, or 16, and nothing else has them. A timestamp is a date
in ISO form or a number of seconds, or of milliseconds or microseconds where it could not be a date otherwise. Messages
are put together with a mark for each role; a prompt may be a list of token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from quire.sim.formats.lines import MOST_TOKENS, Line, lines, row_decoder
from quire.sim.formats.trace_format import Tokenize
from quire.sim.pieces import Piece, piece_key, tokens_of
from quire.sim.trace_request import Planned, TraceRequest
from quire.spec.events import Namespace
from quire.spec.ids import Ids

_Length = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]

DEFAULT_OUTPUT_TOKENS = 16


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] = []


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str = ""


class _Usage(msgspec.Struct):
    completion_tokens: _Length | None = None


class _Response(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    body: _Response | None = None


class _Body(msgspec.Struct):
    messages: list[_Message] = []
    tools: list[Any] = []
    prompt: str | list[_TokenId] | None = None
    max_tokens: _Length | None = None
    max_completion_tokens: _Length | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int | None = None


class _Row(_Body):
    body: _Body | None = None
    request: _Body | None = None
    response: _Response | None = None
    usage: _Usage | None = None
    timestamp: Annotated[float, Meta(ge=0)] | str | None = None


_ROWS = row_decoder(_Row)


class RequestLog:
    """Reader of logs of chat and completion requests."""

    name = "OpenAI request log"
    has_text = True

    def recognises(self, path: Path, line: bytes, fields: dict[str, object]) -> bool:
        """By its messages or prompt, which may be in a body."""
        bodies = (fields, fields.get("body"), fields.get("request"))
        return any(isinstance(body, dict) and ("messages" in body or "prompt" in body) for body in bodies)

    def read(self, path: Path, tokenize: Tokenize) -> Iterator[Planned]:
        """The requests, whose text is read from the file again when they are built."""
        for line in lines(path):
            row = line.decode(_ROWS)
            body = row.body or row.request or row
            if not body.messages and not body.prompt:
                line.refuse("there are no 'messages' and no 'prompt'")
            yield Planned(_arrival(line, row.timestamp), partial(_request, line, tokenize))


def _request(line: Line, tokenize: Tokenize, arrival: float) -> TraceRequest:
    row = line.decode(_ROWS)
    body = row.body or row.request or row
    if body.messages:
        prompt = tokenize(_conversation(body))
    elif isinstance(body.prompt, str):
        prompt = tokenize(body.prompt)
    else:
        prompt = np.array(body.prompt, dtype=np.int32)
    return TraceRequest(
        request_id=str(line.number),
        prompt=prompt,
        output=_output(line.number, row, body, tokenize),
        arrival=arrival,
        session=body.user or "",
        namespace=Namespace(salt=body.cache_salt or ""),
        priority=body.priority or 0,
    )


def _output(number: int, row: _Row, body: _Body, tokenize: Tokenize) -> Ids:
    """What was answered, or as many tokens of no meaning as were answered or asked for."""
    response = row.response or _Response()
    response = response.body or response
    if response.choices:
        choice = response.choices[0]
        return tokenize(_said(choice.message) if choice.message else choice.text)
    usage = response.usage or row.usage or _Usage()
    for length in (usage.completion_tokens, body.max_completion_tokens, body.max_tokens, DEFAULT_OUTPUT_TOKENS):
        if length is not None:
            return tokens_of([Piece(piece_key("request log output", number), length)])
    raise AssertionError("there is a default")


def _conversation(body: _Body) -> str:
    """Tools, then messages, each after a mark for its role, and the mark of the one to come. What is answered follows
    as it stands, so that the next turn's text begins with this one's and its answer."""
    tools = f"<|tools|>\n{_json(body.tools)}\n" if body.tools else ""
    messages = "".join(f"<|{message.role}|>\n{_said(message)}\n" for message in body.messages)
    return f"{tools}{messages}<|assistant|>\n"


def _said(message: _Message) -> str:
    """The text of a message; parts that are no text, such as images, stand in it as they were sent."""
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(str(part["text"]) if "text" in part else _json(part) for part in content)
    return content + (_json(message.tool_calls) if message.tool_calls else "")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _arrival(line: Line, timestamp: float | str | None) -> float:
    """Seconds; lines without a timestamp come all at once."""
    if timestamp is None:
        return 0.0
    if isinstance(timestamp, str):
        try:
            when = datetime.fromisoformat(timestamp)
        except ValueError as error:
            line.refuse(f"'timestamp': {error}")
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    return timestamp / (1.0 if timestamp < 1e11 else 1e3 if timestamp < 1e14 else 1e6)
