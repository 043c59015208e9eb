"""Containment: damaged pages leave the cache with all that was computed from them, and their frames are set aside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from quire.cache.hold import Hold, Reason
from quire.cache.offload import CacheParts
from quire.cache.request_kv import RequestKV
from quire.cache.states import GroupCache
from quire.memory.allocator import SlotFrames
from quire.prefix.node import Node
from quire.spec.ids import Ids

QUARANTINE_SHARE = 64
"""At most one frame in so many is quarantined, and at least one; then the oldest is used again."""


class Containment:
    """Of one cache. Pages that something still holds stay in the tree, and no request begins on them, until it is
    released: call `go_on` now and then."""

    def __init__(self, parts: CacheParts) -> None:
        self._parts = parts
        self._damaged: dict[int, set[tuple[int, int]]] = {}  # by page: its damaged frames, as (group, frame)
        self._holds: list[Hold] = []  # so that they stay in the tree until their frames can be quarantined
        self.num_quarantined = 0

    @property
    def is_waiting(self) -> bool:
        """Whether damaged pages are still in the tree."""
        return bool(self._damaged)

    def readers(self, pages: Sequence[int]) -> list[RequestKV]:
        """The running requests that began on one of these pages, or have computed it."""
        rows = self._parts.rows
        return [kv for kv in rows.live.values() if np.isin(rows.pages[kv.row, : kv.lease.num_pages], pages).any()]

    def add(self, page: int, group: int, frame: int) -> None:
        """The frame of a cached page is damaged. No request begins on the page from now on."""
        self._damaged.setdefault(page, set()).add((group, frame))
        self._parts.damaged.mark(np.array([page], dtype=np.int32))
        self._hold()

    def go_on(self) -> int:
        """Delete damaged pages, and those after them, that nothing holds. Returns the number of deleted pages."""
        if not self._damaged:
            return 0
        parts, removed = self._parts, 0
        for hold in self._holds:  # all first: paths with common pages must not hold each other
            parts.holds.release(hold)
        self._holds = []
        for node, first in self._found():
            removed += self._delete(node, first)
        self._hold()
        return removed

    def _found(self) -> list[tuple[Node, int]]:
        """The nodes with damaged pages, parents first, and the first of these pages of each."""
        nodes = [(node, np.flatnonzero(np.isin(node.pages, list(self._damaged)))) for node in self._parts.tree.nodes()]
        return [(node, int(bad[0])) for node, bad in nodes if len(bad)]

    def _hold(self) -> None:
        """Hold the damaged pages that are cached, and forget the others."""
        parts, held = self._parts, {hold.path.node for hold in self._holds}
        cached: set[int] = set()
        for node, _ in self._found():
            cached.update(node.pages.tolist())
            if node not in held:
                self._holds.append(parts.holds.add(Reason.DAMAGE, lease=parts.tree.pin(node)))
        for page in self._damaged.keys() - cached:
            del self._damaged[page]
            parts.damaged.mend(np.array([page], dtype=np.int32))

    def release_oldest(self) -> bool:
        """Use a quarantined frame again, because a request fits in no other way. False if there is none."""
        for group in self._parts.groups:
            if group.quarantined:
                _free(group, [group.quarantined.pop(0)])
                self._parts.changed()
                return True
        return False

    def _delete(self, node: Node, first: int) -> int:
        parts = self._parts
        if first >= node.num_pages:
            return 0  # deleted with a page before it
        removed = parts.tree.discard(node, first)
        if removed is None:
            return 0
        parts.damaged.mend(removed)
        for page in removed.tolist():
            for index, frame in self._damaged.pop(page, ()):
                self._quarantine(parts.groups[index], page, frame)
        parts.free(removed)
        parts.changed()
        return len(removed)

    def _quarantine(self, group: GroupCache, page: int, frame: int) -> None:
        column = group.table
        if column.frame[page] != frame:
            return  # the page has lost it
        column.unbind(np.array([page], dtype=np.int32))
        if (column.frame == frame).any():
            return  # it serves another page too, which goes on with it
        self.num_quarantined += 1
        group.quarantined.append(frame)
        most = max(1, group.num_frames // QUARANTINE_SHARE)
        if len(group.quarantined) > most:
            _free(group, [group.quarantined.pop(0)])


def _free(group: GroupCache, frames: Iterable[int]) -> None:
    ids: Ids = np.array(list(frames), dtype=np.int32)
    if isinstance(group.frames, SlotFrames):
        group.frames.allocator.free(ids)
    else:
        group.frames.allocator.free_pages(ids)
