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


@dataclass(slots=True)
class _Scope:
    """Records to delete. `move` deletes them (None: not submitted); an earlier one may have `hidden` them."""

    move: Transfer | None = None
    hidden: bool = False

    @property
    def state(self) -> Stored:
        return Stored.HIDDEN if self.hidden or (self.move is not None and self.move.hidden) else Stored.HELD


class StoreDeletion:
    """Scopes, or prefixes of scopes, whose records the store has to delete. Failed deletions are tried again. A mover
    runs a deletion after the archives submitted before, so none of them restores a record."""

    def __init__(self, mover: Mover, names: PageNames, seconds: Callable[[], float]) -> None:
        self._mover = mover
        self._names = names
        self._seconds = seconds
        self._scopes: dict[bytes, _Scope] = {}
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
        scope = self._scopes.get(self._flushed_as.get(namespace, self._scope_of(namespace)))
        if scope is None:
            self._flushed_as.pop(namespace, None)
            return Stored.GONE, False
        return scope.state, scope.move is not None

    def begin(self, scope: bytes) -> None:
        """Delete a scope. A deletion in flight starts again, to include what was archived since."""
        self._scopes[scope] = _Scope()
        self._due_at = -math.inf
        self.go_on()

    def end(self) -> None:
        """The engine ends: transfers stop as soon as records are hidden, and no deletion is tried again."""
        self._ends = True
        for scope in self._scopes.values():
            if scope.move is not None:
                scope.move.stop()

    def found(self, scopes: Iterable[bytes]) -> None:
        """Continue deletions that another engine did not finish: a lookup has found their tombstones in the store."""
        for scope in scopes:
            if scope not in self._scopes:
                self.begin(scope)

    def covers(self, scope: bytes, *, submitted: bool = True) -> bool:
        """Whether flushed records of a scope may still be in the store: do not look up this scope. If not `submitted`:
        whether a deletion of it waits for room on the lane: do not archive to it."""
        scopes = self._scopes.items()
        return any(scope.startswith(prefix) and (submitted or each.move is None) for prefix, each in scopes)

    def go_on(self) -> None:
        """Submit deletions that are due."""
        if not self.is_due:
            return
        for prefix, scope in self._scopes.items():
            if scope.move is None:
                move = Transfer(Lane.DELETE, (), prefix)
                if not self._mover.submit(move):
                    self._due_at = self._seconds() + _AGAIN_S
                    return
                scope.move = move

    def ended(self, move: Transfer) -> None:
        """Process an ended deletion. A failed one is tried again."""
        scope = self._scopes.get(move.scope)
        if scope is None or scope.move is not move:
            return  # `begin` has started it again
        if not move.error:
            del self._scopes[move.scope]
            return
        scope.move, scope.hidden = None, scope.hidden or move.hidden
        self.num_failed += 1
        self._due_at = self._seconds() + _AGAIN_S

    @property
    def is_due(self) -> bool:
        """Whether `go_on` would submit a deletion now."""
        waits = any(scope.move is None for scope in self._scopes.values())
        return waits and self._seconds() >= self._due_at and not self._ends

    @property
    def scopes(self) -> dict[bytes, Stored]:
        """Scopes that are not deleted yet, with their states."""
        return {prefix: scope.state for prefix, scope in self._scopes.items()}

    def _scope_of(self, namespace: Namespace | None) -> bytes:
        return self._names.scope_prefix if namespace is None else self._names.scope(namespace)
