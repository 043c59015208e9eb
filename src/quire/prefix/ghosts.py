"""Ghosts: what was evicted, by whom and when. Tokens without pages, kept where they hung while they are few.

They answer why a prompt is not cached any more (`quire.prefix.trace`), and tell an eviction policy what came back. A
ghost hangs below the node, or the ghost, that its edge hung below; whoever inserts the same tokens again takes it away.

    node --[page page]--> node          the tree, which knows nothing of what is gone
       \\..[page page page]..> ghost      forgotten when all ghosts together exceed the tokens that are allowed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Eviction:
    """One call that made room: `cause` says for whom, `clock` is the tree's, `seconds` the clock's of the cache."""

    cause: str
    clock: int
    seconds: float


class Holder(Protocol):
    """What ghosts hang below: a node or a ghost."""

    ghosts: dict[bytes, Ghost]
    tail: bytes


class Ghost:
    """An evicted edge: its tokens, what it was evicted for, and what its node and the eviction policy knew of it."""

    __slots__ = ("eviction", "ghosts", "holder", "key", "memo", "tail", "turn")

    def __init__(
        self, holder: Holder, key: bytes, eviction: Eviction, turn: int, memo: object | None, tail: bytes = b""
    ) -> None:
        self.holder: Holder | None = holder  # None once it is gone
        self.key = key
        self.eviction = eviction
        self.turn = turn
        self.memo = memo
        self.tail = tail  # as of a node
        self.ghosts: dict[bytes, Ghost] = {}


class Ghosts:
    """All ghosts of a tree, oldest first, with at most `capacity` tokens' bytes between them; 0 keeps none."""

    def __init__(self, capacity: int, page_bytes: int, forgotten: Callable[[Holder], None]) -> None:
        self.capacity = capacity
        self._page_bytes = page_bytes
        self._forgotten = forgotten
        self._order: deque[Ghost] = deque()
        self.num_bytes = 0

    def leave(self, ghost: Ghost, below: dict[bytes, Ghost]) -> None:
        """An edge was evicted, and `below` are the ghosts that hung at its end."""
        if not self.capacity:
            return
        assert ghost.holder is not None
        self.hang(ghost, below)
        ghost.holder.ghosts[ghost.key[: self._page_bytes]] = ghost
        self._order.append(ghost)
        self.num_bytes += len(ghost.key)
        while self.num_bytes > self.capacity:
            oldest = self._order.popleft()
            if oldest.holder is not None:
                self._forget(oldest)

    def take(self, ghost: Ghost, num_bytes: int) -> dict[bytes, Ghost]:
        """The first `num_bytes` of a ghost's tokens, whole pages, are cached again; returns what hangs behind them:
        its own ghosts, or the rest of it. The caller hangs these below the new edge (`hang`)."""
        assert ghost.holder is not None
        del ghost.holder.ghosts[ghost.key[: self._page_bytes]]
        self.num_bytes -= num_bytes
        if num_bytes == len(ghost.key):
            ghost.holder = None
            return ghost.ghosts
        ghost.key = ghost.key[num_bytes:]
        return {ghost.key[: self._page_bytes]: ghost}

    def hang(self, holder: Holder, below: dict[bytes, Ghost]) -> None:
        """These ghosts hang below `holder` from now on, which has none yet."""
        holder.ghosts = below
        for ghost in below.values():
            ghost.holder = holder

    def clear(self) -> None:
        """Forget them all."""
        while self._order:
            oldest = self._order.popleft()
            if oldest.holder is not None:
                self._forget(oldest)

    def _forget(self, ghost: Ghost) -> None:
        """Ghosts below one are older, so it has none any more."""
        assert ghost.holder is not None
        assert not ghost.ghosts
        holder, ghost.holder = ghost.holder, None
        del holder.ghosts[ghost.key[: self._page_bytes]]
        self.num_bytes -= len(ghost.key)
        self._forgotten(holder)
