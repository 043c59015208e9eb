"""TenantGrowth: growth within floors and ceilings. What is wanted is counted by tenant, and so is what goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.cache.groups import NO_PAGES, pages_between
from quire.cache.growth import Growth
from quire.cache.running import Batch, Lengths, Rows
from quire.cache.tenants import Tenants
from quire.errors import OutOfPages
from quire.spec.ids import Ids
from quire.spec.rank import Rank


class TenantGrowth(Growth):
    """Growth of the cache of these tenants."""

    def __init__(self, tenants: Tenants, *given: Any) -> None:
        super().__init__(*given)
        self._tenants = tenants
        self._claims: Lengths = np.zeros((0, 0), dtype=np.int64)  # frames that are asked for, by group and tenant
        self._all_end = False  # what any tenant keeps may end

    def reclaim(self, wanted: Sequence[int], cause: str, pages: Sequence[Ids]) -> None:
        self._claims = self._tenants.pages_by([*pages, pages[0]])
        super().reclaim(wanted, cause, pages)

    def shrink(self, reserved: Sequence[int], cause: str) -> None:
        """As `Growth.shrink`. No tenant asks: what each has above its floor goes first, and what sessions and
        retentions keep below it only where that is not enough."""
        self._claims = self._tenants.pages_by([NO_PAGES] * (len(self._parts.groups) + 1))
        try:
            super().shrink(reserved, cause)
        except OutOfPages:
            self._all_end = True
            try:
                super().shrink(reserved, cause)
            finally:
                self._all_end = False
        super()._evict(reserved, 0, cause)

    def _grow(self, kvs: Batch, rows: Rows, num_new: int, longer: Rows, before: Lengths, after: Lengths) -> None:
        starts, ends = -(-before // self._size), -(-after // self._size)
        self._claims = self._tenants.wanted_by(rows, ends - starts, longer)
        super()._grow(kvs, rows, num_new, longer, before, after)
        if num_new:
            pages, owners = pages_between(self._rows.pages, longer, starts, ends)
            self._tenants.owners.give(pages, self._tenants.of_row[longer[owners]])

    def _is_bound(self) -> bool:
        return bool(self._tenants.refusal(self._claims)) or any(self._tenants.overflows())

    def _short(self, wanted: Sequence[int], num_new: int) -> OutOfPages | None:
        free = self._parts.pages.num_free_pages
        why, self._lack_pages = self._tenants.refusal(self._claims), self._tenants.lack_pages
        if self._all_end:
            self._tenants.over = np.ones_like(self._tenants.over)
        elif why:
            return OutOfPages(group="pages", wanted=num_new, free=free, evictable=0, held_by=why)
        return super()._short(wanted, num_new)

    def _evict(self, wanted: Sequence[int], num_new: int, cause: str) -> None:
        """Tenants that would pass their ceilings lose idle pages of their own, and then all what they may lose."""
        tenants, claims = self._tenants, self._claims
        before: int | None = None
        try:
            tenants.begin_eviction()
            while before != (before := self._num_out()) and (found := next(tenants.overflows(), None)) is not None:
                if num_pages := tenants.cut(*found):
                    self._evict_pages(num_pages, num_new, cause)
                tenants.end_eviction()
                tenants.refusal(claims)
                tenants.begin_eviction()
            super()._evict(wanted, num_new, cause)
        finally:
            tenants.end_eviction()

    def _evict_pages(self, num_pages: int, num_new: int, cause: str) -> None:
        idle = self._tenants.num_unheld.copy()
        super()._evict_pages(num_pages, num_new, cause)
        self._tenants.lost(idle)

    def _reclaim(self, group: int, num_frames: int, most: Rank) -> None:
        self._tenants.evict_frames(group, num_frames, most)
