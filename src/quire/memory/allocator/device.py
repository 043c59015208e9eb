"""DeviceFrames: the pages of one cache, and their frames in each group of the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from quire.memory.allocator.arena import Arena
from quire.memory.allocator.base import BaseTokenToKVPoolAllocator, token_allocator
from quire.memory.allocator.frames import PageFrames, PageIdFrames, SlotFrames
from quire.memory.allocator.host import HostedPages
from quire.memory.allocator.swa import GrowingAllocator, SWATokenToKVPoolAllocator
from quire.memory.residency import Column, Residency
from quire.spec.arena import ArenaLayout
from quire.spec.group import GroupSpec
from quire.spec.ids import Tier


class DeviceFrames:
    """`pages` allocates page ids, `growing` pages with frames in all groups that it covers, and `groups` has the frames
    of each group, `num_frames[i]` of them, or those of an `arena`. Those of groups `on_host` are in host memory.
    `table` says which frames pages have, in columns that `column` makes."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        num_frames: Sequence[int],
        num_pages: int,
        page_size: int,
        *,
        tiers: Sequence[Tier],
        on_host: Collection[int],
        arena: ArenaLayout | None = None,
        column: Callable[..., Column] = Column,
    ) -> None:
        names, reclaims = [group.name for group in groups], [not group.reach.whole for group in groups]
        self.table = Residency(num_pages, names, reclaims, tiers, on_host, column)
        self._page_size = page_size
        self.pages: BaseTokenToKVPoolAllocator = (
            HostedPages(num_pages, page_size)
            if on_host
            else token_allocator(num_pages * page_size, page_size, name="pages")
        )
        self.growing: GrowingAllocator = self.pages
        self.arena = None if arena is None else Arena(arena, names)
        self.groups = tuple(
            self._frames(index, group, count, on_host=index in on_host)
            for index, (group, count) in enumerate(zip(groups, num_frames, strict=True))
        )

    def _frames(self, index: int, group: GroupSpec, num_frames: int, *, on_host: bool) -> PageFrames | SlotFrames:
        column = self.table.of(Tier.DEVICE, index)
        ids = None if self.arena is None else self.arena.pools[index]
        if on_host:
            return PageIdFrames(column, self.pages)
        if group.reach.in_place:
            return SlotFrames(column, num_frames, ids)
        size = self._page_size
        num_tokens = num_frames * size
        if group.reach.whole or self.growing is not self.pages or self.pages.page_size != size:
            return PageFrames(column, token_allocator(num_tokens, size, name=group.name, ids=ids))
        self.growing = windows = SWATokenToKVPoolAllocator(
            self.pages.size, num_tokens, size, name=group.name, full=self.pages, table=column, ids=ids
        )
        return windows
