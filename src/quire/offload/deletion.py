"""What is deleted, until it is gone: flushed records of the store, and paths of the tree that are damaged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from quire.cache.hold import Hold, Holds, Reason
from quire.prefix.node import Node
from quire.prefix.page_names import PageNames
from quire.prefix.radix_cache import RadixCache
from quire.spec.events import Namespace
from quire.spec.ids import Ids
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


@dataclass(slots=True)
class _Scope:
    """Records to be deleted. `move` does that; None: it has to be submitted. `hidden`: an earlier one hid them."""

    move: Transfer | None = None
    hidden: bool = False

    @property
    def state(self) -> Stored:
        return Stored.HIDDEN if self.hidden or (self.move is not None and self.move.hidden) else Stored.HELD


class StoreDeletion:
    """Scopes, or the beginnings of scopes, of which the store is to delete every record.

    A mover deletes behind the archives that it was given before, so that none of them brings back what is to be gone.
    What cannot be deleted now is tried again; until then nothing may be looked for there (`covers`), and nothing of it
    archived while the move that deletes has still to be submitted (`is_to_come`). A scope that a lookup found to be
    marked was flushed by an engine that did not come to the end of it, and is gone on with.
    """

    def __init__(self, mover: Mover, names: PageNames, seconds: Callable[[], float]) -> None:
        self._mover = mover
        self._names = names
        self._seconds = seconds
        self._scopes: dict[bytes, _Scope] = {}
        self._flushed_as: dict[Namespace | None, bytes] = {}  # until that is gone: the model may change meanwhile
        self._due_at = -math.inf
        self._ends = False
        self.num_failed = 0

    def flush(self, namespace: Namespace | None) -> None:
        """Delete all records of a namespace, or of this model."""
        self._flushed_as[namespace] = self._scope_of(namespace)
        self.begin(self._flushed_as[namespace])

    def flushed(self, namespace: Namespace | None) -> tuple[Stored, bool]:
        """What has become of a flush, and whether a move is at it, so that this may change soon."""
        scope = self._scopes.get(self._flushed_as.get(namespace, self._scope_of(namespace)))
        if scope is None:
            self._flushed_as.pop(namespace, None)
            return Stored.GONE, False
        return scope.state, scope.move is not None

    def begin(self, scope: bytes) -> None:
        """Delete this too, also where that is under way already: what was archived since goes as well."""
        self._scopes[scope] = _Scope()
        self._due_at = -math.inf
        self.go_on()

    def end(self) -> None:
        """The engine ends: what is under way stops once the store knows what is forgotten, and nothing is tried
        again."""
        self._ends = True
        for scope in self._scopes.values():
            if scope.move is not None:
                scope.move.stop()

    def found(self, scopes: tuple[bytes, ...]) -> None:
        """A lookup has met marks in the store. What was flushed there is deleted now, before more is stored."""
        for scope in scopes:
            if scope not in self._scopes:
                self.begin(scope)

    def covers(self, scope: bytes) -> bool:
        """Whether something of a scope may still be in the store that shall not be found."""
        return any(scope.startswith(beginning) for beginning in self._scopes)

    def is_to_come(self, scope: bytes) -> bool:
        """Whether what is archived of a scope now would be deleted with the rest."""
        return any(each.move is None and scope.startswith(beginning) for beginning, each in self._scopes.items())

    def go_on(self) -> None:
        """Submit what is due."""
        if not self.is_due:
            return
        for beginning, scope in self._scopes.items():
            if scope.move is None:
                move = Transfer(Lane.FORGET, (), beginning)
                if not self._mover.submit(move):
                    self._due_at = self._seconds() + _AGAIN_S
                    return
                scope.move = move

    def ended(self, move: Transfer) -> None:
        """A move that deletes has ended. Where it failed, there will be another one."""
        scope = self._scopes.get(move.scope)
        if scope is None or scope.move is not move:
            return  # it was asked for again since
        if not move.error:
            del self._scopes[move.scope]
            return
        scope.move, scope.hidden = None, scope.hidden or move.hidden
        self.num_failed += 1
        self._due_at = self._seconds() + _AGAIN_S

    @property
    def is_due(self) -> bool:
        """Whether something is to be tried now."""
        waits = any(scope.move is None for scope in self._scopes.values())
        return waits and self._seconds() >= self._due_at and not self._ends

    @property
    def scopes(self) -> dict[bytes, Stored]:
        """What has still to be deleted, each with how far that is."""
        return {beginning: scope.state for beginning, scope in self._scopes.items()}

    def _scope_of(self, namespace: Namespace | None) -> bytes:
        return self._names.edition if namespace is None else self._names.scope(namespace)


class DamagedPaths:
    """Paths that are deleted from a damaged page on, once nothing else holds them. `give_back` takes pages that have
    left the tree."""

    def __init__(self, tree: RadixCache, holds: Holds, give_back: Callable[[Ids], None]) -> None:
        self._paths: list[tuple[Hold, int]] = []
        self._tree = tree
        self._holds = holds
        self._give_back = give_back

    def __len__(self) -> int:
        return len(self._paths)

    def add(self, node: Node, first: int) -> None:
        """All from page `first` of the path to a node on is to go."""
        self._paths.append((self._holds.add(Reason.DAMAGE, lease=self._tree.pin(node)), first))

    def delete(self) -> int:
        """Delete what nothing else holds; returns how many paths that was. They may have pages in common, so that none
        is kept by what another one holds."""
        waiting = [(hold.path.node, first) for hold, first in self._paths]
        for hold, _ in self._paths:
            self._holds.release(hold)
        self._paths = []
        for end, first in waiting:
            node = end
            while node.depth > first and node.parent is not None:
                node = node.parent
            if node.parent is None or node.depth + node.num_pages <= first:
                continue  # it went with another one
            pages = self._tree.discard(node, first - node.depth)
            if pages is None:
                self.add(end, first)
            else:
                self._give_back(pages)
        return len(waiting) - len(self._paths)
