"""DamagedPages: cached pages whose bytes are lost, as the residency table marks them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.cache.states import GroupCache
from quire.memory.residency import Column, State
from quire.spec.ids import Bools, Ids


class DamagedPages:
    """No request begins on damaged pages. `num_marked` counts calls of `mark`. `pages` is the device's anchor."""

    def __init__(self, pages: Column, groups: Sequence[GroupCache]) -> None:
        self._pages = pages
        self.num_damaged = self.num_marked = 0
        self._groups = groups

    def are(self, pages: Ids) -> Bools:
        """Per page: whether it is damaged."""
        return self._pages.has(pages, State.DAMAGED)

    def before(self, pages: Ids) -> int:
        """How many of these pages precede the first damaged one."""
        return int(np.argmax(np.append(self.are(pages), True))) if self.num_damaged else len(pages)

    def have_frames(self, pages: Ids) -> bool:
        """Whether a damaged page among these has frames: then nothing can be cached in its place or after it."""
        damaged = pages[self.are(pages)] if self.num_damaged else pages[:0]
        return any(group.table.present(damaged).any() for group in self._groups)

    def mark(self, pages: Ids) -> None:
        """Mark these pages: their bytes are lost."""
        self._pages.mark(pages, State.DAMAGED)
        self._count()
        self.num_marked += 1

    def mend(self, pages: Ids) -> None:
        """Unmark these pages: they were computed again, or have left the cache."""
        if self.num_damaged:
            self._pages.unmark(pages, State.DAMAGED)
            self._count()

    def _count(self) -> None:
        self.num_damaged = int(np.count_nonzero(self._pages.state & np.uint8(State.DAMAGED)))
