"""The reader of an answer's text: content, reasoning and tool calls, as they come.

A model writes calls as text, in the form of its family (`quire.models.answer_parser`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The beginning of a call of a tool; `number` counts the calls of an answer from 0. `CallArguments` follow."""

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the last call. Together they are a JSON object; in a stream that was cut off, its
    beginning."""

    number: int
    text: str


Piece = Content | Reasoning | CallBegun | CallArguments


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A call of a tool; `arguments` is a JSON object."""

    name: str
    arguments: str


class Parser(Protocol):
    """`quire.models.answer_parser.AnswerParser`."""

    def feed(self, text: str) -> Sequence[tuple[str, str]]: ...
    def end(self) -> Sequence[tuple[str, str]]: ...


@dataclass(slots=True)
class ReadAnswer:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[CalledTool] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> ReadAnswer:
        """The pieces joined."""
        texts: dict[type, list[str]] = {Content: [], Reasoning: []}
        calls: list[tuple[str, list[str]]] = []
        for piece in pieces:
            match piece:
                case Content(text) | Reasoning(text):
                    texts[type(piece)].append(text)
                case CallBegun():
                    calls.append((piece.name, []))
                case CallArguments():
                    calls[-1][1].append(piece.text)
        called = [CalledTool(name, "".join(arguments)) for name, arguments in calls]
        return cls("".join(texts[Content]), "".join(texts[Reasoning]), called)


class AnswerReader:
    """Reads the text of one choice. Without a parser it `is_plain`: all of it is content.

    `parser` makes one. Its argument says whether arguments are wanted as they come: else a call that is cut off is
    content.
    """

    def __init__(self, parser: Callable[[bool], Parser] | None = None) -> None:
        self.is_plain = parser is None
        self.num_calls = 0
        """Calls so far."""
        self._make = parser
        self._parser: Parser | None = None

    def read(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """The pieces that this text of a stream adds."""
        if self._make is None:
            return [Content(text)] if text else []
        if self._parser is None:
            self._parser = self._make(True)
        pieces = self._pieces(self._parser.feed(text))
        return pieces + self._pieces(self._parser.end()) if is_last else pieces

    def whole(self, text: str) -> list[Piece]:
        """The pieces of a whole answer."""
        self._parser = self._make and self._make(False)
        return self.read(text, is_last=True)

    def _pieces(self, parts: Iterable[tuple[str, str]]) -> list[Piece]:
        return [self._piece(kind, text) for kind, text in parts]

    def _piece(self, kind: str, text: str) -> Piece:
        match kind:
            case "reasoning":
                return Reasoning(text)
            case "call":
                self.num_calls += 1
                return CallBegun(self.num_calls - 1, text)
            case "arguments":
                return CallArguments(self.num_calls - 1, text)
        return Content(text)
