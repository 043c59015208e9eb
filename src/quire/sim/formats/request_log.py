"""Logs of requests to an OpenAI-style server: one body per line, alone or with its response.

    {"messages": [{"role": "user", "content": "Hi"}], "timestamp": 1700000000.5, "user": "ada"}
    {"body": {"prompt": "Once"}, "response": {"choices": [{"text": " upon"}]}}

`body` may also be called `request`, and a response may have a `body` around it, as in batch files. Without a response
the output is a synthetic text of as many tokens as `usage` says, or `max_tokens`, or 16. A timestamp is a date
in ISO form or a number of seconds, or of milliseconds or microseconds where it could not be a date otherwise. Messages
are joined with a mark for each role; a prompt may be a list of token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.sim.formats.trace_format import Length, Line, Timestamp, TokenId, Tokenize, TraceFormat, iso_seconds, lines
from quire.sim.synthetic_text import Text, text_seed, tokens_of
from quire.sim.trace_request import Planned, TraceRequest
from quire.spec.events import Namespace
from quire.spec.ids import Ids

_DEFAULT_OUTPUT_TOKENS = 16


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] = []


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str = ""


class _Usage(msgspec.Struct):
    completion_tokens: Length | None = None


class _Response(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    body: _Response | None = None


class _Body(msgspec.Struct):
    messages: list[_Message] = []
    tools: list[Any] = []
    prompt: str | list[TokenId] | None = None
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int | None = None


class _Row(_Body):
    body: _Body | None = None
    request: _Body | None = None
    response: _Response | None = None
    usage: _Usage | None = None
    timestamp: Timestamp | str | None = None


_ROWS = msgspec.json.Decoder(_Row)


def _recognises(path: Path, first: bytes, fields: dict[str, Any]) -> bool:
    bodies = (fields, fields.get("body"), fields.get("request"))
    return any(isinstance(body, dict) and ("messages" in body or "prompt" in body) for body in bodies)


def _read(path: Path, tokenize: Tokenize) -> Iterator[Planned]:
    """The text of a request is read from the file again when it is built."""
    for line in lines(path):
        row = line.decode(_ROWS)
        body = row.body or row.request or row
        if not body.messages and not body.prompt:
            line.refuse("there are no 'messages' and no 'prompt'")
        yield Planned(_arrival(line, row.timestamp), partial(_request, line, tokenize))


REQUEST_LOG = TraceFormat("OpenAI request log", _recognises, _read, has_text=True)


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
    """The answer, or a synthetic text of its length, or of the requested length."""
    response = row.response or _Response()
    response = response.body or response
    if response.choices:
        choice = response.choices[0]
        return tokenize(_said(choice.message) if choice.message else choice.text)
    usage = response.usage or row.usage or _Usage()
    for length in (usage.completion_tokens, body.max_completion_tokens, body.max_tokens, _DEFAULT_OUTPUT_TOKENS):
        if length is not None:
            return tokens_of([Text(text_seed("request log output", number), length)])
    raise AssertionError("there is a default")


def _conversation(body: _Body) -> str:
    """Tools, then messages, each after a mark for its role, then the mark of the answer. The answer follows unchanged,
    so that the next turn's text begins with this one's and its answer."""
    tools = f"<|tools|>\n{_json(body.tools)}\n" if body.tools else ""
    messages = "".join(f"<|{message.role}|>\n{_said(message)}\n" for message in body.messages)
    return f"{tools}{messages}<|assistant|>\n"


def _said(message: _Message) -> str:
    """The text of a message; other parts, such as images, are included as JSON."""
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(str(part["text"]) if "text" in part else _json(part) for part in content)
    return content + (_json(message.tool_calls) if message.tool_calls else "")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _arrival(line: Line, timestamp: float | str | None) -> float:
    """Seconds; lines without a timestamp arrive all at once."""
    if timestamp is None:
        return 0.0
    if isinstance(timestamp, str):
        try:
            return iso_seconds(timestamp)
        except ValueError as error:
            line.refuse(f"'timestamp': {error}")
    return timestamp / (1.0 if timestamp < 1e11 else 1e3 if timestamp < 1e14 else 1e6)
