"""TenantGrowth: growth within floors and ceilings. What is wanted is counted by tenant, and so is what goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.cache.groups import NO_PAGES
from quire.cache.growth import Grown, Growth
from quire.cache.request_kv import RequestKV
from quire.cache.room import Room
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
        """As `Growth.shrink`. What is above floors goes first, and what is below them only where that is not enough."""
        self._claims = self._tenants.pages_by([NO_PAGES] * (len(self._parts.groups) + 1))
        try:
            super().shrink(reserved, cause)
        except OutOfPages:
            self._all_end = True
            try:
                super().shrink(reserved, cause)
            finally:
                self._all_end = False

    def _make_room(self, rows: Rows, num_new: int, kvs: Batch, ends: Lengths | None, grown: Grown) -> None:
        self._claims = self._tenants.wanted_by(rows, grown[2] - grown[1], grown[0])
        super()._make_room(rows, num_new, kvs, ends, grown)

    def _give(self, rows: Rows, grown: Grown, pages: Ids) -> None:
        super()._give(rows, grown, pages)
        self._tenants.owners.give(pages, self._tenants.of_row[np.repeat(grown[0], grown[2] - grown[1])])

    def _wanted(self, kvs: Sequence[RequestKV], rows: Rows, num_new: int, ends: Lengths | None) -> list[int]:
        least = [group.wanted(rows, num_new) for group in self._parts.groups]
        wanted = super()._wanted(kvs, rows, num_new, ends)
        more = np.subtract([*wanted, 0], [*least, 0])  # for checkpoints, which no floor gives way to
        return wanted if wanted == least or self._tenants.has_beside(self._claims, more) else least

    def _reclaim_for(self, rows: Rows, num_new: int, num_rows: int) -> bool:
        return False

    def _evict_for(self, num_new: int, cause: str) -> bool:
        return False

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

    def _evict(self, wanted: Sequence[int], num_new: int, cause: str, rooms: Sequence[Room]) -> None:
        """Tenants that would pass a ceiling lose what is idle of their own, then all what they may, in each room."""
        tenants = self._tenants
        before: int | None = None
        try:
            while before != (before := self._num_out()) and (found := next(tenants.overflows(), None)) is not None:
                tenants.begin_eviction(*found)
                tenants.evict_all_frames(Rank.PASSED)
                self._evict_pages(int(found[1].sum()), num_new, cause)
                tenants.evict_all_frames(max(Rank))
                tenants.end_eviction()
            for at, room in enumerate(tenants.rooms):
                tenants.begin_eviction(at)
                super()._evict(wanted, num_new * (at == tenants.at_ids), cause, rooms[at : at + 1])
                if room is not None and (room.is_shared or self._all_end):
                    tenants.begin_eviction(at, tenants.idle[at])  # what frames that cannot move, or run, keep from it
                    super()._evict(wanted, 0, cause, (room,))
        finally:
            tenants.end_eviction()

    def _evict_pages(self, num_pages: int, num_new: int, cause: str) -> None:
        lost = 1
        while lost and num_pages > 0:
            super()._evict_pages(num_pages, num_new, cause)
            num_pages -= (lost := self._tenants.count_lost())

    def _reclaim(self, group: int, num_frames: int, most: Rank) -> None:
        self._tenants.evict_frames(group, num_frames, most)
