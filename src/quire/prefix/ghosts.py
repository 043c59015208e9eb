"""Ghosts: what was evicted, by whom and when. Tokens without pages, kept where they hung while they are few.

They answer why a prompt is not cached any more (`quire.prefix.divergence`), and tell an eviction policy what came back.
A ghost hangs below the node, or the ghost, that its edge hung below; whoever inserts the same tokens again takes it
away.

    node --[page page]--> node          the tree, which knows nothing of what is gone
       \\..[page page page]..> ghost      forgotten when all ghosts together exceed the tokens that are allowed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.lazy_queue import LazyQueue
from quire.prefix.node import Node, common_pages


class Ghosts:
    """All ghosts of a tree, oldest first, with at most `capacity` tokens' bytes between them; 0 keeps none. `forgotten`
    hears of what a forgotten ghost hung below."""

    def __init__(self, capacity: int, page_bytes: int, forgotten: Callable[[Node], None]) -> None:
        self.capacity = capacity
        self._page_bytes = page_bytes
        self._forgotten = forgotten
        self._order: LazyQueue[Node] = LazyQueue(lambda _, ghost: ghost if ghost.eviction is not None else None)
        self.num_bytes = 0

    def leave(self, ghost: Node, parent: Node) -> None:
        """An edge below `parent` was evicted."""
        parent.ghosts[ghost.key[: self._page_bytes]] = ghost
        self._order.push(0, ghost)
        self.num_bytes += len(ghost.key)
        while self.num_bytes > self.capacity:
            self._forget_oldest()

    def returning(self, node: Node, data: bytes) -> tuple[int, dict[bytes, Node], Node | None]:
        """How much of `data` goes below `node` as one edge, the ghosts that hang at its end, and the deepest of those
        that its tokens bring back, which is no ghost any more."""
        last: Node | None = None
        below: dict[bytes, Node] = {}
        size = 0
        while size < len(data):
            ghost = node.ghosts.get(data[size : size + self._page_bytes])
            if ghost is None:
                return (size if below else len(data)), below, last
            if size and len(below) > 1:
                break
            last = ghost
            common = common_pages(data, size, ghost.key, self._page_bytes)
            whole = common == len(ghost.key)
            below = self._take(ghost, common)
            size += common
            node = ghost
            if not whole:
                break
        return size, below, last

    def forget_below(self, nodes: Iterable[Node]) -> None:
        """Forget all that hangs below these nodes, and below these ghosts."""
        ghosts = [ghost for node in nodes for ghost in node.ghosts.values()]
        for ghost in ghosts:  # grows while it is walked
            ghosts += self._take(ghost, len(ghost.key)).values()

    def clear(self) -> None:
        """Forget them all."""
        while self._forget_oldest():
            pass

    def __len__(self) -> int:
        """Ghosts there are, and some that are none any more."""
        return len(self._order)

    def _take(self, ghost: Node, num_bytes: int) -> dict[bytes, Node]:
        """The first `num_bytes` of a ghost's tokens, whole pages, are cached again; returns what hangs behind them:
        its own ghosts, or the rest of it. The caller hangs these below the new edge."""
        assert ghost.parent is not None and ghost.eviction is not None
        del ghost.parent.ghosts[ghost.key[: self._page_bytes]]
        self.num_bytes -= num_bytes
        if num_bytes == len(ghost.key):
            ghost.eviction = None
            return ghost.ghosts
        ghost.key = ghost.key[num_bytes:]
        return {ghost.key[: self._page_bytes]: ghost}

    def _forget_oldest(self) -> bool:
        """Whether there was one. Ghosts below one are older, so it has none any more."""
        entry = self._order.pop()
        if entry is None:
            return False
        ghost = entry.item
        assert ghost.parent is not None and not ghost.ghosts
        ghost.eviction = None
        del ghost.parent.ghosts[ghost.key[: self._page_bytes]]
        self.num_bytes -= len(ghost.key)
        self._forgotten(ghost.parent)
        return True


def hang(node: Node, ghosts: dict[bytes, Node]) -> None:
    """These ghosts hang below a node from now on, which has none yet."""
    node.ghosts = ghosts
    for ghost in ghosts.values():
        ghost.parent = node
