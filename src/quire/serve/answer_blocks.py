"""AnswerBlocks: the parts of an answer that follow one another, such as text, reasoning and calls, as events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from quire.serve.answer_reader import CallArguments, CallBegun, Content, Piece, Reasoning

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
