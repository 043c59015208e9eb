"""DamagedPages: cached pages whose bytes cannot be had any more, and what is to be forgotten because of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quire.cache.groups import GroupCache
from quire.prefix.node import Lease, Node
from quire.prefix.tiered import TieredRadixCache
from quire.spec.ids import Bools, Ids


class DamagedPages:
    """A part of `Tiering`. Nobody begins on `bad` pages; `condemned` are paths, and from which page on they are to be
    forgotten once nobody holds them. `losing` hears of all bad pages, a mask by id, before more of them are."""

    def __init__(
        self, num_pages: int, groups: Sequence[GroupCache], tree: TieredRadixCache, forget: Callable[[Ids], None]
    ) -> None:
        self.bad: Bools = np.zeros(num_pages + 1, dtype=np.bool_)
        self.num_bad = 0
        self.condemned: list[tuple[Lease, int]] = []
        self.losing: Callable[[Bools], int] = _keeps_nothing
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
        self.losing(self.bad)
        self.condemned.append((self._tree.pin(node), first))

    def _discard(self) -> None:
        """Forget what is condemned and held by nobody."""
        waiting, self.condemned = self.condemned, []
        for lease, first in waiting:
            end = node = lease.node
            self._tree.unpin(lease)
            while node.depth > first and node.parent is not None:
                node = node.parent
            pages = self._tree.discard(node, first - node.depth) if node.num_pages else None
            if pages is None:
                self.condemned.append((self._tree.pin(end), first))
            else:
                self._forget(pages)


def _keeps_nothing(bad: Bools) -> int:
    return 0
