"""KeptFrames: single frames that callers asked to keep, in groups of which a request reads a part.

A prefix is kept by a lease on its path. Where a group's frames may go before their pages, that is not enough: those
that a request needs to begin behind the prefix are pinned too, on the device or, if they are there only, on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.cache.damaged import DamagedPages
from quire.cache.groups import GroupCache
from quire.cache.resuming import resume_point
from quire.offload.host_groups import HostGroup
from quire.spec.ids import Bools, Ids, Tier
from quire.spec.rank import Rank


@dataclass(frozen=True, slots=True)
class PinnedFrames:
    """Pages of one group whose frames one retention pins, in one tier."""

    group: int
    tier: Tier
    pages: Ids


class KeptFrames:
    """Pins frames of `groups`, and of `hosts` where there are any. `largest` is a number of pages: what pins do not
    take leaves room for a request of that length."""

    def __init__(
        self, groups: Sequence[GroupCache], damaged: DamagedPages, hosts: Sequence[HostGroup], *, largest: int
    ) -> None:
        self._partial = [group for group in groups if not group.reach.whole]
        self._damaged = damaged
        self._hosts = hosts
        self._soft: dict[int, Counter[int]] = {group.index: Counter() for group in self._partial}  # pins by page
        self._hard: dict[int, Counter[int]] = {group.index: Counter() for group in self._partial}
        self._room = {group.index: max(0, group.num_frames - group.reach.held(largest)) for group in self._partial}
        self._num_held = 0

    def end(self, pages: Ids) -> tuple[int, str]:
        """The most pages of a cached path behind which a request could begin, wherever the frames are, and the group
        that stood in the way of more, "" where none did."""
        return resume_point(self._partial, pages[: self._damaged.before(pages)], self._hosts)

    def has_room(self, pages: Ids) -> bool:
        """Whether what a request needs to begin behind these pages may be pinned for good."""
        for group in self._partial:
            hard = self._hard[group.index]
            if len(hard.keys() | set(self._needed(group, pages).tolist())) > self._room[group.index]:
                return False
        return True

    def pin(self, pages: Ids, *, hard: bool) -> list[PinnedFrames]:
        """Keep what a request needs to begin behind these pages."""
        pinned = []
        for group in self._partial:
            needed = self._needed(group, pages)
            here = group.frames.resident(needed)
            if here.any():
                group.table.pin(needed[here], Rank.USED)
                pinned.append(PinnedFrames(group.index, Tier.DEVICE, needed[here]))
            if not here.all():
                self._hosts[group.index].pin(needed[~here])
                pinned.append(PinnedFrames(group.index, Tier.HOST, needed[~here]))
        self._count(pinned, self._hard if hard else self._soft, 1)
        return pinned

    def harden(self, pinned: Sequence[PinnedFrames]) -> None:
        """They are not let go of for running requests any more."""
        self._count(pinned, self._soft, -1)
        self._count(pinned, self._hard, 1)

    def unpin(self, pinned: Sequence[PinnedFrames], *, hard: bool) -> None:
        """Keep them no longer."""
        self._count(pinned, self._hard if hard else self._soft, -1)
        for each in pinned:
            if each.tier is Tier.HOST:
                self._hosts[each.group].unpin(each.pages)
            else:
                self._group(each.group).table.unpin(each.pages)

    def num_soft(self, group: int) -> int:
        """Frames of a group that could be evicted but for soft pins. O(pages) where there are any."""
        if not self._num_held or group not in self._soft:
            return 0
        pages = np.fromiter(self._soft[group], dtype=np.int32)
        return int(np.count_nonzero(self._only_soft(group, pages)))

    def num_soft_of(self, group: int, pages: Ids) -> int:
        """Which of these a request would pin itself that begins behind `pages`."""
        if not self._num_held or group not in self._soft or self._group(group).reach.carried:
            return 0
        return int(np.count_nonzero(self._only_soft(group, self._needed(self._group(group), pages))))

    def gain(self, pinned: Sequence[PinnedFrames], group: int) -> int:
        """Of these soft pins, how many frames of a group would be to be had if all soft pins on them went. A request
        takes over a frame that it alone pins, where frames are carried along."""
        most = int(self._group(group).reach.carried)
        return sum(
            int(np.count_nonzero(self._pins(group, each.pages) - self._counted(self._soft[group], each.pages) <= most))
            for each in pinned
            if each.group == group and each.tier is Tier.DEVICE
        )

    def gained(self, pinned: Sequence[PinnedFrames], group: int) -> int:
        """Of frames that were unpinned, how many of a group's are to be had now."""
        most = int(self._group(group).reach.carried)
        runs = [each.pages for each in pinned if each.group == group and each.tier is Tier.DEVICE]
        return sum(int(np.count_nonzero(self._pins(group, pages) <= most)) for pages in runs)

    # -- inside

    def _count(self, pinned: Sequence[PinnedFrames], counts: dict[int, Counter[int]], change: int) -> None:
        for each in pinned:
            if each.tier is Tier.DEVICE:
                pages = each.pages.tolist()
                counts[each.group].update(dict.fromkeys(pages, change))
                counts[each.group] = +counts[each.group] if change < 0 else counts[each.group]
                self._num_held += change

    def _counted(self, counts: Counter[int], pages: Ids) -> Ids:
        return np.array([counts[page] for page in pages.tolist()], dtype=np.int32)

    def _group(self, index: int) -> GroupCache:
        return next(group for group in self._partial if group.index == index)

    def _pins(self, group: int, pages: Ids) -> Ids:
        idle = self._group(group).table.idle
        assert idle is not None
        return idle.pins[pages]

    def _only_soft(self, group: int, pages: Ids) -> Bools:
        soft = self._counted(self._soft[group], pages)
        found: Bools = (soft > 0) & (self._pins(group, pages) == soft)
        return found

    def _needed(self, group: GroupCache, pages: Ids) -> Ids:
        needed = group.reach.needed(len(pages))
        return pages[needed.start : needed.stop]
