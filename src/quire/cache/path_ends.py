"""PathEnds: after which cached pages requests can begin in an arena, and what that is worth for each byte.

pages     0   1   2   3   4   5   6   7          a state after pages 3 and 7: requests begin there
states                *               *          without the second one, pages 4 to 7 are worth nothing
"""

from __future__ import annotations

import numpy as np

from quire.cache.groups import resume_point
from quire.cache.offload import CacheParts, Offload
from quire.spec.ids import Ids


class PathEnds:
    """`quire.prefix.placement.Ends` of a cache with one shared room. A state takes the bytes of hundreds of pages, and
    pays for a long path alone. Where groups share nothing, pages without windows or states cost these no bytes, and
    tell where prompts diverge: they are evicted in the policy's order."""

    def __init__(self, parts: CacheParts, offload: Offload) -> None:
        self._hosts = offload.hosts
        self._groups = parts.groups
        self._partial = [group for group in parts.groups if not group.reach.whole]
        (self._room,) = parts.rooms

    def last(self, pages: Ids) -> int:
        """After how many pages of a path a request can begin, at most, if what the host has is loaded."""
        return resume_point(self._partial, pages, self._hosts)[0]

    def share(self, pages: Ids, first: int) -> float:
        """Pages that a request saves by the end of a path, times their bytes in groups that are read whole, for each
        byte that is free without the pages from `first` on that it needs."""
        if self.last(pages) < len(pages):
            return 0.0
        before = self.last(pages[:-1])
        gone = pages[max(first, before) :]
        pairs = [*zip(self._groups, self._room.strides, strict=True)]
        taken = sum([stride * int(np.count_nonzero(group.table.frame[gone])) for group, stride in pairs])
        return (len(pages) - before) * sum([stride * group.reach.whole for group, stride in pairs]) / taken
