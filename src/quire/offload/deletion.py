"""StoreDeletion: flushed records that the store has to delete."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from quire.prefix.page_names import PageNames
from quire.spec.events import Namespace
from quire.tiers.mover import Mover
from quire.tiers.transfer import Lane, Transfer

_AGAIN_S = 1.0  # between two attempts, while the store cannot be listed or is down


class Stored(StrEnum):
    """State of flushed records in the store."""

    NONE = "none"  # there is no store
    KEPT = "kept"  # they stay, for engines that have these weights
    HELD = "held"  # still there: this engine ignores them until it restarts, other engines find them
    HIDDEN = "hidden"  # no engine finds them; their space is not free yet
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """Result of a flush. Running requests still use `held_tokens`; no other request finds them. `num_retentions` have
    ended. `storage` is the state of the flushed records."""

    flushed_tokens: int
    held_tokens: int
    num_retentions: int
    storage: Stored = Stored.NONE


class StoreDeletion:
    """Scopes, or prefixes of scopes, whose records the store has to delete. Failed deletions are tried again. A mover
    runs a deletion after the archives submitted before, so none of them restores a record."""

    def __init__(self, mover: Mover, names: PageNames, seconds: Callable[[], float]) -> None:
        self._mover = mover
        self._names = names
        self._seconds = seconds
        self._scopes: dict[bytes, Transfer | None] = {}  # and what deletes them, once submitted
        self._hidden: set[bytes] = set()  # scopes that an earlier transfer has hidden
        self._flushed_as: dict[Namespace | None, bytes] = {}  # the model may change before they are deleted
        self._due_at = -math.inf
        self._ends = False
        self.num_failed = 0

    def flush(self, namespace: Namespace | None) -> None:
        """Delete all records of a namespace, or of this model (None)."""
        self._flushed_as[namespace] = self._scope_of(namespace)
        self.begin(self._flushed_as[namespace])

    def flushed(self, namespace: Namespace | None) -> tuple[Stored, bool]:
        """State of a flush, and whether a transfer works on it now."""
        scope = self._flushed_as.get(namespace, self._scope_of(namespace))
        if scope not in self._scopes:
            self._flushed_as.pop(namespace, None)
            return Stored.GONE, False
        return self.scopes[scope], self._scopes[scope] is not None

    def begin(self, scope: bytes) -> None:
        """Delete a scope. A deletion in flight starts again, to include what was archived since."""
        self._scopes[scope] = None
        self._hidden.discard(scope)
        self._due_at = -math.inf
        self.go_on()

    def end(self) -> None:
        """The engine ends: transfers stop as soon as records are hidden, and no deletion is tried again."""
        self._ends = True
        for move in self._scopes.values():
            if move is not None:
                move.stop()

    def found(self, scopes: Iterable[bytes]) -> None:
        """Continue deletions that another engine did not finish: a lookup has found their tombstones in the store."""
        for scope in scopes:
            if scope not in self._scopes:
                self.begin(scope)

    def covers(self, scope: bytes, *, submitted: bool = True) -> bool:
        """Whether flushed records of a scope may still be in the store: do not look up this scope. If not `submitted`:
        whether a deletion of it waits for room on the lane: do not archive to it."""
        scopes = self._scopes.items()
        return any(scope.startswith(prefix) and (submitted or move is None) for prefix, move in scopes)

    def go_on(self) -> None:
        """Submit deletions that are due."""
        if not self.is_due:
            return
        for prefix in [prefix for prefix, move in self._scopes.items() if move is None]:
            move = Transfer(Lane.DELETE, (), prefix)
            if not self._mover.submit(move):
                self._due_at = self._seconds() + _AGAIN_S
                return
            self._scopes[prefix] = move

    def ended(self, move: Transfer) -> None:
        """Process an ended deletion. A failed one is tried again."""
        if self._scopes.get(move.scope) is not move:
            return  # `begin` has started it again
        if not move.error:
            del self._scopes[move.scope]
            self._hidden.discard(move.scope)
            return
        self._scopes[move.scope] = None
        if move.hidden:
            self._hidden.add(move.scope)
        self.num_failed += 1
        self._due_at = self._seconds() + _AGAIN_S

    @property
    def is_due(self) -> bool:
        """Whether `go_on` would submit a deletion now."""
        return None in self._scopes.values() and self._seconds() >= self._due_at and not self._ends

    @property
    def scopes(self) -> dict[bytes, Stored]:
        """Scopes that are not deleted yet, with their states."""
        hidden = self._hidden.union(prefix for prefix, move in self._scopes.items() if move is not None and move.hidden)
        return {prefix: Stored.HIDDEN if prefix in hidden else Stored.HELD for prefix in self._scopes}

    def _scope_of(self, namespace: Namespace | None) -> bytes:
        return self._names.scope_prefix if namespace is None else self._names.scope(namespace)
