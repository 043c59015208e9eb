"""Forgetting: what the store shall not have any more, until it has said that it has not."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum

from quire.tiers.mover import Mover
from quire.tiers.transfer import Lane, Transfer

_AGAIN_S = 1.0
"""Between two tries, where the store cannot be listed or is down."""


class Stored(StrEnum):
    """What is known of what was cached, as far as storage is concerned."""

    NONE = "none"  # there is no storage
    KEPT = "kept"  # it stays, for engines that have the weights it is of
    HELD = "held"  # it is there still. This engine does not look at it; others do, and this one after a restart
    HIDDEN = "hidden"  # the store knows that it is forgotten: no engine finds it, and what it takes is not free yet
    GONE = "gone"


class Forgetting:
    """Scopes, or the beginnings of scopes, of which the store is to forget every record.

    A mover forgets behind the archives that it was given before, so that none of them brings back what is to be
    forgotten. What cannot be forgotten now is tried again; until then nothing may be looked for there (`covers`), and
    nothing of it archived while the move that forgets has still to be submitted (`is_to_come`). A scope that a lookup
    found to be marked was flushed by an engine that did not come to the end of it, and is gone on with.
    """

    def __init__(self, mover: Mover, seconds: Callable[[], float]) -> None:
        self._mover = mover
        self._seconds = seconds
        self._moves: dict[bytes, Transfer | None] = {}  # the last for each scope; None: to be submitted
        self._hidden: set[bytes] = set()  # of those that are to be submitted again
        self._due_at = -math.inf
        self._ends = False
        self.num_failed = 0

    def begin(self, scope: bytes) -> None:
        """Forget this too, also where that is under way already: what was archived since goes as well."""
        self._moves[scope] = None
        self._hidden.discard(scope)
        self._due_at = -math.inf
        self.go_on()

    def state(self, scope: bytes) -> Stored:
        """What has become of a scope that was to be forgotten."""
        if scope not in self._moves:
            return Stored.GONE
        move = self._moves[scope]
        return Stored.HIDDEN if scope in self._hidden or (move is not None and move.hidden) else Stored.HELD

    def is_tried(self, scope: bytes) -> bool:
        """Whether a move is at it, so that its state may change soon."""
        return self._moves.get(scope) is not None

    def end(self) -> None:
        """The engine ends: what is under way stops once the store knows what is forgotten, and nothing is tried
        again."""
        self._ends = True
        for move in self._moves.values():
            if move is not None:
                move.stop()

    def found(self, scopes: tuple[bytes, ...]) -> None:
        """A lookup has met marks in the store. What was flushed there is forgotten now, before more is stored."""
        for scope in scopes:
            if scope not in self._moves:
                self.begin(scope)

    def covers(self, scope: bytes) -> bool:
        """Whether something of a scope may still be in the store that shall not be found."""
        return any(scope.startswith(wanted) for wanted in self._moves)

    def is_to_come(self, scope: bytes) -> bool:
        """Whether what is archived of a scope now would be forgotten with the rest."""
        return any(move is None and scope.startswith(wanted) for wanted, move in self._moves.items())

    def go_on(self) -> None:
        """Submit what is due."""
        if not self.is_due:
            return
        for scope, move in self._moves.items():
            if move is None:
                fresh = Transfer(Lane.FORGET, (), scope)
                if not self._mover.submit(fresh):
                    self._due_at = self._seconds() + _AGAIN_S
                    return
                self._moves[scope] = fresh

    def ended(self, move: Transfer) -> None:
        """A move that forgets has ended. Where it failed, there will be another one."""
        if self._moves.get(move.scope) is not move:
            return  # it was asked for again since
        if not move.error:
            del self._moves[move.scope]
            self._hidden.discard(move.scope)
            return
        if move.hidden:
            self._hidden.add(move.scope)
        self.num_failed += 1
        self._moves[move.scope] = None
        self._due_at = self._seconds() + _AGAIN_S

    @property
    def is_due(self) -> bool:
        """Whether something is to be tried now."""
        return None in self._moves.values() and self._seconds() >= self._due_at and not self._ends

    @property
    def scopes(self) -> tuple[bytes, ...]:
        """What has still to be forgotten."""
        return tuple(self._moves)
