"""DeviceFrames: the pages of one cache, and their frames in each group of the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.memory.allocator.base import BaseTokenToKVPoolAllocator, token_allocator
from quire.memory.allocator.frames import PageFrames, PageIdFrames, SlotFrames
from quire.memory.allocator.host import HostedPages
from quire.memory.allocator.swa import GrowingAllocator, SWATokenToKVPoolAllocator
from quire.memory.residency import Residency
from quire.spec.ids import Tier


@dataclass(frozen=True, slots=True)
class FrameGroup:
    """One group: its frames, and what becomes of them. A page keeps the frames of a `whole` group for as long as it
    exists. Requests update frames `in_place`, or write one for each page. `on_host`: the frames are in host memory."""

    name: str
    num_frames: int
    whole: bool
    in_place: bool = False
    on_host: bool = False


class DeviceFrames:
    """`pages` allocates page ids, `growing` pages with frames in all groups that it covers, and `groups` has the frames
    of each group. `table` says which frames pages have."""

    def __init__(
        self, groups: Sequence[FrameGroup], num_pages: int, page_size: int, tiers: Sequence[Tier] = (Tier.DEVICE,)
    ) -> None:
        on_host = [index for index, group in enumerate(groups) if group.on_host]
        names, reclaims = [group.name for group in groups], [not group.whole for group in groups]
        self.table = Residency(num_pages, names, reclaims, tiers, on_host)
        self._page_size = page_size
        self.pages: BaseTokenToKVPoolAllocator = (
            HostedPages(num_pages, page_size)
            if on_host
            else token_allocator(num_pages * page_size, page_size, name="pages")
        )
        self.growing: GrowingAllocator = self.pages
        self.groups = tuple(self._frames(index, group) for index, group in enumerate(groups))

    def _frames(self, index: int, group: FrameGroup) -> PageFrames | SlotFrames:
        column, size = self.table.of(Tier.DEVICE, index), self._page_size
        if group.on_host:
            return PageIdFrames(column, self.pages)
        if group.in_place:
            return SlotFrames(column, group.num_frames)
        num_tokens = group.num_frames * size
        if group.whole or self.growing is not self.pages or self.pages.page_size != size:
            return PageFrames(column, token_allocator(num_tokens, size, name=group.name))
        self.growing = windows = SWATokenToKVPoolAllocator(
            self.pages.size, num_tokens, size, name=group.name, full=self.pages, table=column
        )
        return windows
