"""FrameTable: where each page's bytes are, per tier and group. The single truth about residency."""

from __future__ import annotations

import numpy as np

from quire.spec.ids import Bools, Ids, Tier


class FrameTable:
    """`frame[tier][group][page] -> frame id`, 0 where the page is not resident there. One int32 column for each pair.

    The table owns no frame: binding and unbinding say where bytes are, allocators say whose they are. Pages are ids
    from 1 to `num_pages`; entry 0 of every column stays 0, so padded tokens map to the padding frame. Behind the entry
    of the last page lies one that is always -1, so a place of -1, which is none, maps to -1.
    """

    def __init__(self, num_pages: int, num_groups: int, tiers: tuple[Tier, ...] = (Tier.DEVICE,)) -> None:
        self.num_pages = num_pages
        self._mappings = {(tier, group): _nothing(num_pages) for tier in tiers for group in range(num_groups)}
        self._columns = {place: mapping[:-1] for place, mapping in self._mappings.items()}

    def column(self, tier: Tier, group: int) -> Ids:
        """The live column, int32 `[num_pages + 1]`: index it with page ids. Callers read it and never write it."""
        return self._columns[tier, group]

    def mapping(self, tier: Tier, group: int) -> Ids:
        """The live column and the -1 behind it, int32 `[num_pages + 2]`: index it with page ids or -1."""
        return self._mappings[tier, group]

    def resident(self, tier: Tier, group: int, pages: Ids) -> Bools:
        """Per page: whether it has a frame there."""
        resident: Bools = self._columns[tier, group][pages] != 0
        return resident

    def bind(self, tier: Tier, group: int, pages: Ids, frames: Ids) -> None:
        """Say that these pages' bytes are in these frames. The pages were not resident there before."""
        column = self._columns[tier, group]
        assert not np.count_nonzero(column[pages]), "bind over a resident page"
        column[pages] = frames

    def unbind(self, tier: Tier, group: int, pages: Ids) -> Ids:
        """Say that these pages are no longer there, and return the frames they had (non-resident pages give none)."""
        column = self._columns[tier, group]
        frames: Ids = column[pages]
        column[pages] = 0
        found: Ids = frames[frames != 0]
        return found

    def unbind_all(self, tier: Tier, group: int, pages: Ids) -> None:
        """Say that these pages, all resident there, no longer are."""
        self._columns[tier, group][pages] = 0

    def move(self, tier: Tier, group: int, old_pages: Ids, new_pages: Ids) -> None:
        """The frames of `old_pages`, all resident there, become those of `new_pages`, none resident, in order."""
        assert len(old_pages) == len(new_pages), "a frame for each page"
        column = self._columns[tier, group]
        frames = column[old_pages]
        assert frames.all(), "move from a page that is not resident"
        assert not column[new_pages].any(), "move over a resident page"
        column[old_pages] = 0
        column[new_pages] = frames


def _nothing(num_pages: int) -> Ids:
    mapping = np.zeros(num_pages + 2, dtype=np.int32)
    mapping[-1] = -1
    return mapping
