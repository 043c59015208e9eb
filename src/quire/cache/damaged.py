"""DamagedPages: cached pages whose bytes cannot be had any more, as the residency table has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.cache.groups import GroupCache
from quire.memory.residency import Column, State
from quire.spec.ids import Bools, Ids


class DamagedPages:
    """No request begins on damaged pages. `num_marked` counts how often some became so. `pages` is the column that says
    which pages are on the device."""

    def __init__(self, pages: Column, groups: Sequence[GroupCache]) -> None:
        self._pages = pages
        self.num_damaged = self.num_marked = 0
        self._groups = groups

    def are(self, pages: Ids) -> Bools:
        """Per page: whether it is damaged."""
        return self._pages.has(pages, State.DAMAGED)

    def before(self, pages: Ids) -> int:
        """How many of these pages come before the first damaged one."""
        return int(np.argmax(np.append(self.are(pages), True))) if self.num_damaged else len(pages)

    def have_frames(self, pages: Ids) -> bool:
        """Whether frames of damaged ones among these cached pages are there: then nothing can be cached in their place
        or behind them."""
        damaged = pages[self.are(pages)] if self.num_damaged else pages[:0]
        return any(group.frames.resident(damaged).any() for group in self._groups)

    def mark(self, pages: Ids) -> None:
        """These cannot be had."""
        self._pages.mark(pages, State.DAMAGED)
        self._count()
        self.num_marked += 1

    def mend(self, pages: Ids) -> None:
        """These have been computed again, or are no more."""
        if self.num_damaged:
            self._pages.unmark(pages, State.DAMAGED)
            self._count()

    def _count(self) -> None:
        self.num_damaged = int(np.count_nonzero(self._pages.state & np.uint8(State.DAMAGED)))
