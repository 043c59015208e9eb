"""Stop strings: finds the one that is complete first, in time linear in the text, whatever the strings are.

An automaton of Aho and Corasick reads each character once. Its state is the longest suffix of the text so far that is
the beginning of some stop string: just what must be held back. Tokens repeat, so the moves by whole texts are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

_START = 0
_MOST_MOVES = 4096  # that are kept; then the table is emptied

Move = tuple[int, int, str | None]
"""The next state, the characters of the text that were read, and the stop string that is complete then, if one is."""


class StopAutomaton:
    """The states of a set of stop strings, shared by all sequences that have these (`of`). Building it takes time and
    memory linear in their characters. `depths[state]` is how many characters of the text a state holds back."""

    _in_use: ClassVar[WeakValueDictionary[tuple[str, ...], StopAutomaton]] = WeakValueDictionary()

    def __init__(self, stop: Sequence[str]) -> None:
        self.depths = [0]
        self.is_empty = not stop
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [_START]  # the state of the longest proper suffix that is a beginning too
        self._complete: list[str | None] = [None]  # the longest stop string that ends with the state's text
        self._moves: dict[tuple[int, str], Move] = {}
        for each in stop:
            self._add(each)
        self._link()

    @classmethod
    def of(cls, stop: Sequence[str]) -> StopAutomaton:
        """The one of these strings, which is built if no sequence has it: a request may have hundreds of prompts."""
        key = tuple(stop)
        found = cls._in_use.get(key)
        if found is None:
            found = cls._in_use[key] = cls(key)
        return found

    def move(self, state: int, text: str) -> Move:
        """Read `text`, or as much of it as the first complete stop string takes."""
        key = (state, text)
        found = self._moves.get(key)
        if found is None:
            found = self._read(state, text)
            if len(self._moves) >= _MOST_MOVES:
                self._moves.clear()
            self._moves[key] = found
        return found

    def _read(self, state: int, text: str) -> Move:
        following, shorter = self._next, self._shorter
        for at, character in enumerate(text):
            while state and character not in following[state]:
                state = shorter[state]
            state = following[state].get(character, _START)
            complete = self._complete[state]
            if complete is not None:
                return state, at + 1, complete
        return state, len(text), None

    def _add(self, stop: str) -> None:
        state = _START
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._shorter.append(_START)
                self._complete.append(None)
                self.depths.append(self.depths[state] + 1)
            state = self._next[state][character]
        self._complete[state] = stop

    def _link(self) -> None:
        """Breadth first: the state of a suffix is shorter, so it is linked before."""
        queue = deque(self._next[_START].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                suffix = self._shorter[state]
                while suffix and character not in self._next[suffix]:
                    suffix = self._shorter[suffix]
                self._shorter[child] = self._next[suffix].get(character, _START)
                self._complete[child] = self._complete[child] or self._complete[self._shorter[child]]
                queue.append(child)


class StopStrings:
    """Finds the stop string that is complete first in one sequence's text (of two that end together, the longer).

    The answer depends on the text alone, not on its division into tokens.
    """

    def __init__(self, automaton: StopAutomaton, *, include: bool) -> None:
        self._automaton = automaton
        self._include = include
        self._state = _START
        self._held = ""  # the suffix of the text so far that is the beginning of some stop string

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string that ended it, if one did."""
        if self._automaton.is_empty:
            return text, None
        self._state, num_read, stop = self._automaton.move(self._state, text)
        text = self._held + text[:num_read] if self._held else text[:num_read]
        if stop is not None:
            self._held = ""
            return text if self._include else text[: len(text) - len(stop)], stop
        num_shown = len(text) - self._automaton.depths[self._state]
        self._held = text[num_shown:]
        return text[:num_shown], None

    def flush(self) -> str:
        """The text that was held back: it ended before it could become a stop string."""
        held, self._held = self._held, ""
        return held
