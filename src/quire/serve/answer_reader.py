"""The reader of an answer's text: content, reasoning and tool calls, as they come, and the blocks that these are.

A model writes calls as text, in the form of its family (`quire.models.answer_parser`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
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
    content. Unless it `is_parallel`, calls after the first are left out.
    """

    def __init__(self, parser: Callable[[bool], Parser] | None = None, *, is_parallel: bool = True) -> None:
        self.is_plain = parser is None
        self.num_calls = 0
        """Calls so far, with those that are left out."""
        self._make = parser
        self._is_parallel = is_parallel
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
        pieces = [self._piece(kind, text) for kind, text in parts]
        if self._is_parallel:
            return pieces
        return [piece for piece in pieces if not isinstance(piece, CallBegun | CallArguments) or piece.number == 0]

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


Event = dict[str, Any]


class AnswerBlocks(ABC):
    """Reads pieces. One continues the open block, or ends it and begins another. White space between two blocks is in
    neither. A dialect says by which events a block begins, grows and ends."""

    def __init__(self) -> None:
        self.num_begun = 0
        self._open: type[Piece] | None = None  # the kind of the open block; CallBegun is that of a call

    def add(self, piece: Piece, logprobs: Sequence[Event] = ()) -> list[Event]:
        """The events of a piece, whose tokens have these log-probabilities."""
        match piece:
            case Content(text):
                if self.num_begun and self._open is not Content:
                    text = text.lstrip()
                return [*self._in(Content), *self._grown(text, logprobs)] if text or logprobs else []
            case Reasoning(text):
                return [*self._in(Reasoning), *self._grown(text)]
            case CallBegun(_, name):
                return [*self.end(), *self._in(CallBegun, name)]
            case CallArguments(_, text):
                return self._grown(text)

    def end(self, status: str = "completed") -> list[Event]:
        """The events after which no block is open."""
        found = [] if self._open is None else self._ended(status)
        self._open = None
        return found

    def _in(self, kind: type[Piece], name: str = "") -> list[Event]:
        """The events after which a block of this kind is open."""
        if self._open is kind:
            return []
        ended, self._open = self.end(), kind
        self.num_begun += 1
        return [*ended, *self._begun(kind, name)]

    @abstractmethod
    def _begun(self, kind: type[Piece], name: str) -> list[Event]:
        """The beginning of a block, of a call of the tool `name`."""

    @abstractmethod
    def _grown(self, text: str, logprobs: Sequence[Event] = ()) -> list[Event]:
        """More text in the open block."""

    @abstractmethod
    def _ended(self, status: str) -> list[Event]:
        """The end of the open block."""
