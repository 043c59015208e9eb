"""Logs of requests to an OpenAI-style server: one body per line, alone or with its response.

    {"messages": [{"role": "user", "content": "Hi"}], "timestamp": 1700000000.5, "user": "ada"}
    {"body": {"prompt": "Once"}, "response": {"choices": [{"text": " upon"}]}}

`body` may also be called `request`, and a response may have a `body` around it, as in batch files. Without a response
the output is a synthetic text of as many tokens as `usage` says, or `max_tokens`, or 16. A timestamp is a date
in ISO form or a number of seconds, or of milliseconds or microseconds where it could not be a date otherwise. Messages
are joined with a mark for each role; a prompt may be a list of token ids.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.sim.formats.trace_format import Length, Timestamp, TokenId, TraceFormat, iso_seconds, rows_of
from quire.sim.trace_request import Content, Draft, Text, TraceRequest
from quire.spec.events import Namespace

_DEFAULT_OUTPUT_TOKENS = 16


class _ChatMessage(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] = []


class _Choice(msgspec.Struct):
    message: _ChatMessage | None = None
    text: str = ""


class _Usage(msgspec.Struct):
    completion_tokens: Length | None = None


class _Response(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    body: _Response | None = None


class _Body(msgspec.Struct):
    messages: list[_ChatMessage] = []
    tools: list[Any] = []
    prompt: str | list[TokenId] | None = None
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int | None = None


class _LogRow(_Body):
    body: _Body | None = None
    request: _Body | None = None
    response: _Response | None = None
    usage: _Usage | None = None
    timestamp: Timestamp | str | None = None

    def draft(self, number: int) -> Draft:
        body = self.body or self.request or self
        prompt = _conversation(body) if body.messages else body.prompt
        if not prompt:
            raise ValueError("there are no 'messages' and no 'prompt'")
        return TraceRequest(
            request_id=str(number),
            prompt=prompt,
            output=_output(number, self, body),
            arrival=_arrival(self.timestamp),
            session=body.user or "",
            namespace=Namespace(salt=body.cache_salt or ""),
            priority=-(body.priority or 0),
            calls_tool=_calls_tool(self, body),
        )


def _recognises(first: bytes, fields: dict[str, Any]) -> bool:
    bodies = (fields, fields.get("body"), fields.get("request"))
    return any(isinstance(body, dict) and ("messages" in body or "prompt" in body) for body in bodies)


REQUEST_LOG = TraceFormat("OpenAI request log", _recognises, rows_of(_LogRow), has_text=True)


def _output(number: int, row: _LogRow, body: _Body) -> Content:
    """The answer, or a synthetic text of its length, or of the requested length."""
    response = row.response or _Response()
    response = response.body or response
    if response.choices:
        choice = response.choices[0]
        return _said(choice.message) if choice.message else choice.text
    usage = response.usage or row.usage or _Usage()
    lengths = (usage.completion_tokens, body.max_completion_tokens, body.max_tokens, _DEFAULT_OUTPUT_TOKENS)
    length = next(length for length in lengths if length is not None)
    return (Text(("request log output", number), length),)


def _calls_tool(row: _LogRow, body: _Body) -> bool | None:
    """Whether the answer calls tools, if it is there and tools were offered."""
    response = row.response or _Response()
    choices = (response.body or response).choices
    message = choices[0].message if choices and body.tools else None
    return None if message is None else bool(message.tool_calls)


def _conversation(body: _Body) -> str:
    """Tools, then messages, each after a mark for its role, then the mark of the answer. The answer follows unchanged,
    so that the next turn's text begins with this one's and its answer."""
    tools = f"<|tools|>\n{_json(body.tools)}\n" if body.tools else ""
    messages = "".join(f"<|{message.role}|>\n{_said(message)}\n" for message in body.messages)
    return f"{tools}{messages}<|assistant|>\n"


def _said(message: _ChatMessage) -> str:
    """The text of a message; other parts, such as images, are included as JSON."""
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(str(part["text"]) if "text" in part else _json(part) for part in content)
    return content + (_json(message.tool_calls) if message.tool_calls else "")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _arrival(timestamp: float | str | None) -> float:
    """Seconds; lines without a timestamp arrive all at once."""
    if timestamp is None:
        return 0.0
    if isinstance(timestamp, str):
        try:
            return iso_seconds(timestamp)
        except ValueError as error:
            raise ValueError(f"'timestamp': {error}") from error
    return timestamp / (1.0 if timestamp < 1e11 else 1e3 if timestamp < 1e14 else 1e6)
