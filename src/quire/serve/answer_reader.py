"""The reader of an answer's text: content, reasoning and tool calls, as they come.

A model writes calls as text, in the form of its family. transformers' parser splits that text by the family's response
template; a call that is not whole, or is no JSON, stays text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A whole call of a tool; `number` counts the calls of an answer from 0, `arguments` is a JSON object."""

    number: int
    name: str
    arguments: str


Piece = Content | Reasoning | CalledTool


class Parser(Protocol):
    """transformers' `ResponseParser`."""

    def feed(self, text: str) -> list[dict[str, Any]]: ...
    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]: ...


@dataclass(slots=True)
class ReadAnswer:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[CalledTool] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> ReadAnswer:
        """The pieces joined."""
        found = cls()
        for piece in pieces:
            match piece:
                case Content(text):
                    found.content += text
                case Reasoning(text):
                    found.reasoning += text
                case CalledTool():
                    found.calls.append(piece)
        return found


class AnswerReader:
    """Reads the text of one choice. Without a parser all of it is content."""

    def __init__(self, parser: Parser | None = None) -> None:
        self._parser = parser
        self._number = 0
        self._has_content = False
        self._unread = ""  # text of a call that is not whole

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._number

    def read(self, text: str) -> list[Piece]:
        """The pieces that this text completes."""
        if self._parser is None:
            return [Content(text)] if text else []
        return self._parsed(lambda parser: parser.feed(text), text)

    def end(self) -> list[Piece]:
        """The pieces that end with the answer."""
        if self._parser is None:
            return []
        return self._parsed(lambda parser: parser.finalize()[1], "")

    def _parsed(self, step: Callable[[Parser], list[dict[str, Any]]], text: str) -> list[Piece]:
        assert self._parser is not None
        try:
            events = step(self._parser)
        except (ValueError, KeyError):  # a call that is no JSON, or lacks its name: what follows is text
            self._parser = None
            return [Content(self._unread + text)]
        return [piece for event in events for piece in self._pieces(event)]

    def _pieces(self, event: dict[str, Any]) -> list[Piece]:
        kind, name = event["type"], event["field"]
        if name == "content" and kind == "region_chunk":
            text = event["text"] if self._has_content else event["text"].lstrip()
            self._has_content = self._has_content or bool(text)
            return [Content(text)] if text else []
        if name == "reasoning_content" and kind == "region_chunk":
            return [Reasoning(event["text"])]
        if name == "tool_calls":
            self._unread = self._unread + event.get("text", "") if kind == "region_chunk" else ""
            if kind == "region_close":
                return [self._call(each) for each in _listed(event["value"])]
        return []

    def _call(self, value: dict[str, Any]) -> CalledTool:
        function = value.get("function", value)
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        self._number += 1
        return CalledTool(self._number - 1, str(function["name"]), text)


def _listed(value: Any) -> list[dict[str, Any]]:
    return value if isinstance(value, list) else [value]
