"""DamagedPages: cached pages whose bytes cannot be had any more, and what is to be forgotten because of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.cache.groups import GroupCache
from quire.prefix.node import Lease, Node
from quire.prefix.radix_cache import RadixCache
from quire.spec.ids import Bools, Ids


class DamagedPages:
    """A part of `Tiering`. Nobody begins on `bad` pages; `condemned` are paths, and from which page on they are to be
    forgotten once nobody holds them."""

    def __init__(
        self, num_pages: int, groups: Sequence[GroupCache], tree: RadixCache, forget: Callable[[Ids], None]
    ) -> None:
        self.bad: Bools = np.zeros(num_pages + 1, dtype=np.bool_)
        self.num_bad = 0
        self.condemned: list[tuple[Lease, int]] = []
        self._groups = groups
        self._tree = tree
        self._forget = forget
        self._num_condemned = 0

    def is_bad_from(self, pages: Ids) -> bool:
        """Whether frames of these cached pages hold what they should not: then nothing can be cached in their place or
        behind them."""
        return bool(self.num_bad and any(group.frames.resident(pages[self.bad[pages]]).any() for group in self._groups))

    def _mark_bad(self, pages: Ids) -> None:
        self.bad[pages] = True
        self.num_bad = int(np.count_nonzero(self.bad))
        self._num_condemned += 1

    def _mend(self, pages: Ids) -> None:
        """These pages have been computed again, or are no more."""
        if self.num_bad:
            self.bad[pages] = False
            self.num_bad = int(np.count_nonzero(self.bad))

    def _condemn(self, pages: Ids, node: Node, first: int) -> None:
        """These pages are bad; all from page `first` of the path on is forgotten once nobody holds it."""
        self._mark_bad(pages)
        self.condemned.append((self._tree.pin(node), first))

    def _discard(self) -> int:
        """Forget what was condemned and is held by nobody; how many paths that was. They may have pages in common, so
        that none is kept by what another one holds."""
        waiting = [(lease.node, first) for lease, first in self.condemned]
        for lease, _ in self.condemned:
            self._tree.unpin(lease)
        held = []
        for end, first in waiting:
            node = end
            while node.depth > first and node.parent is not None:
                node = node.parent
            if node.parent is None or node.depth + node.num_pages <= first:
                continue  # it went with another one
            pages = self._tree.discard(node, first - node.depth)
            if pages is None:
                held.append((end, first))
            else:
                self._forget(pages)
        self.condemned = [(self._tree.pin(end), first) for end, first in held]
        return len(waiting) - len(held)
