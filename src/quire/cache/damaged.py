"""DamagedPages: cached pages whose bytes cannot be had any more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.cache.groups import GroupCache
from quire.spec.ids import Bools, Ids


class DamagedPages:
    """Nobody begins on `bad` pages. `num_marked` counts how often some became so."""

    def __init__(self, num_pages: int, groups: Sequence[GroupCache]) -> None:
        self.bad: Bools = np.zeros(num_pages + 1, dtype=np.bool_)
        self.num_bad = self.num_marked = 0
        self._groups = groups

    def is_bad_from(self, pages: Ids) -> bool:
        """Whether frames of these cached pages hold what they should not: then nothing can be cached in their place or
        behind them."""
        return bool(self.num_bad and any(group.frames.resident(pages[self.bad[pages]]).any() for group in self._groups))

    def mark(self, pages: Ids) -> None:
        """These cannot be had."""
        self.bad[pages] = True
        self.num_bad = int(np.count_nonzero(self.bad))
        self.num_marked += 1

    def mend(self, pages: Ids) -> None:
        """These have been computed again, or are no more."""
        if self.num_bad:
            self.bad[pages] = False
            self.num_bad = int(np.count_nonzero(self.bad))
