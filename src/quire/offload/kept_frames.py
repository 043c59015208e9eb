"""KeptFrames: single frames that callers asked to keep, in groups of which a request reads a part.

A prefix is kept by a lease on its path. Where a group's frames may go before their pages, that is not enough: those
that a request needs to begin behind the prefix are pinned too, on the device or, if they are there only, on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from quire.cache.damaged import DamagedPages
from quire.cache.groups import GroupCache
from quire.cache.hold import HeldFrames
from quire.cache.resuming import resume_point
from quire.offload.host_groups import HostGroup
from quire.spec.ids import Bools, Ids, Tier


class KeptFrames:
    """Which frames of `groups`, and of `hosts` where there are any, are kept. `largest` is a number of pages: what
    pins do not take leaves room for a request of that length."""

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

    def needed_by(self, pages: Ids) -> list[HeldFrames]:
        """What a request needs to begin behind these pages, where it is."""
        found = []
        for group in self._partial:
            needed = self._needed(group, pages)
            here = group.frames.resident(needed)
            found.append(HeldFrames(group.index, Tier.DEVICE, needed[here]))
            if not here.all():
                found.append(HeldFrames(group.index, Tier.HOST, needed[~here]))
        return found

    def count(self, frames: Sequence[HeldFrames], change: int, *, hard: bool) -> None:
        """These are kept by so many more. `hard`: running requests cannot have them."""
        counts = self._hard if hard else self._soft
        for each in frames:
            if each.tier is Tier.DEVICE:
                counts[each.group].update(dict.fromkeys(each.pages.tolist(), change))
                counts[each.group] = +counts[each.group] if change < 0 else counts[each.group]
                self._num_held += change

    def harden(self, frames: Sequence[HeldFrames]) -> None:
        """Running requests cannot have them any more."""
        self.count(frames, -1, hard=False)
        self.count(frames, 1, hard=True)

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

    def gain(self, pinned: Sequence[HeldFrames], group: int) -> int:
        """Of these soft pins, how many frames of a group would be to be had if all soft pins on them went. A request
        takes over a frame that it alone pins, where frames are carried along."""
        most = int(self._group(group).reach.carried)
        return sum(
            int(np.count_nonzero(self._pins(group, each.pages) - self._counted(self._soft[group], each.pages) <= most))
            for each in pinned
            if each.group == group and each.tier is Tier.DEVICE
        )

    def gained(self, pinned: Sequence[HeldFrames], group: int) -> int:
        """Of frames that were unpinned, how many of a group's are to be had now."""
        most = int(self._group(group).reach.carried)
        runs = [each.pages for each in pinned if each.group == group and each.tier is Tier.DEVICE]
        return sum(int(np.count_nonzero(self._pins(group, pages) <= most)) for pages in runs)

    # -- inside

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
