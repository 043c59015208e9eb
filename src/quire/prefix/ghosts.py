"""Ghosts: what was evicted, by whom and when. Tokens without pages, kept where they hung while they are few.

They answer why a prompt is not cached any more (`quire.prefix.parting`), and tell an eviction policy what came back. A
ghost hangs below the node, or the ghost, that its edge hung below; whoever inserts the same tokens again takes it away.

    node --[page page]--> node          the tree, which knows nothing of what is gone
       \\..[page page page]..> ghost      forgotten when all ghosts together exceed the tokens that are allowed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.lazy_queue import LazyQueue
from quire.prefix.token_bytes import common_pages


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
        self._order: LazyQueue[Ghost] = LazyQueue(_live)
        self.num_bytes = 0

    def leave(self, ghost: Ghost, below: dict[bytes, Ghost]) -> None:
        """An edge was evicted, and `below` are the ghosts that hung at its end."""
        if not self.capacity:
            return
        assert ghost.holder is not None
        self.hang(ghost, below)
        ghost.holder.ghosts[ghost.key[: self._page_bytes]] = ghost
        self._order.push(0, ghost)
        self.num_bytes += len(ghost.key)
        while self.num_bytes > self.capacity:
            self._forget_oldest()

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

    def returning(self, node: Holder, data: bytes) -> tuple[int, dict[bytes, Ghost], Ghost | None]:
        """How much of `data` goes below `node` as one edge, the ghosts that hang at its end, and the deepest of those
        that its tokens bring back, which is no ghost any more."""
        holder: Holder = node
        last: Ghost | None = None
        below: dict[bytes, Ghost] = {}
        size = 0
        while size < len(data):
            ghost = holder.ghosts.get(data[size : size + self._page_bytes])
            if ghost is None:
                return (size if below else len(data)), below, last
            if size and len(below) > 1:
                break
            last = ghost
            common = common_pages(data, size, ghost.key, self._page_bytes)
            whole = common == len(ghost.key)
            below = self.take(ghost, common)
            size += common
            holder = ghost
            if not whole:
                break
        return size, below, last

    def hang(self, holder: Holder, below: dict[bytes, Ghost]) -> None:
        """These ghosts hang below `holder` from now on, which has none yet."""
        holder.ghosts = below
        for ghost in below.values():
            ghost.holder = holder

    def clear(self) -> None:
        """Forget them all."""
        while self._forget_oldest():
            pass

    def __len__(self) -> int:
        """Ghosts there are, and some that are none any more."""
        return len(self._order)

    def _forget_oldest(self) -> bool:
        """Whether there was one. Ghosts below one are older, so it has none any more."""
        entry = self._order.pop()
        if entry is None:
            return False
        ghost = entry.item
        assert ghost.holder is not None and not ghost.ghosts
        holder, ghost.holder = ghost.holder, None
        del holder.ghosts[ghost.key[: self._page_bytes]]
        self.num_bytes -= len(ghost.key)
        self._forgotten(holder)
        return True


def _live(ticket: int, ghost: Ghost) -> Ghost | None:
    return ghost if ghost.holder is not None else None
