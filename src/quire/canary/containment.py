"""Containment: damaged pages leave the cache with all that was computed from them, and their frames are set aside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from quire.cache.hold import Hold, Reason
from quire.cache.offload import CacheParts
from quire.cache.request_kv import RequestKV
from quire.cache.states import GroupCache
from quire.canary.finding import Finding
from quire.prefix.node import Node, path_to
from quire.spec.ids import Ids

QUARANTINE_SHARE = 64
"""At most one frame in so many is quarantined, and at least one; then the oldest is used again."""


class Containment:
    """Takes damaged pages out of one cache. Pages that something still holds stay in the tree, and no request begins on
    them, until it is released: call `go_on` after each step."""

    def __init__(self, parts: CacheParts) -> None:
        self._parts = parts
        self._damaged: dict[int, set[tuple[int, int]]] = {}  # damaged frames of each page, as (group, frame)
        self._holds: list[Hold] = []  # so that they stay in the tree until their frames can be quarantined
        self._tried = -1  # `num_releases` of the tree after the last attempt to delete them
        self.num_quarantined = 0
        parts.fixed.append(self._waiting_for)

    @property
    def is_waiting(self) -> bool:
        """Whether damaged pages are still in the tree."""
        return bool(self._damaged)

    def readers(self, pages: Sequence[int]) -> list[RequestKV]:
        """The running requests that began on one of these pages, or have computed it."""
        rows = self._parts.rows
        return [kv for kv in rows.live.values() if np.isin(rows.pages[kv.row, : kv.lease.num_pages], pages).any()]

    def add(self, findings: Sequence[Finding]) -> None:
        """Frames of cached pages are damaged: no request begins on these pages from now on. O(pages)."""
        parts = self._parts
        for finding in findings:
            self._damaged.setdefault(finding.page, set()).add((finding.index, finding.frame))
        parts.damaged.mark(np.array([finding.page for finding in findings], dtype=np.int32))
        found = self._found(parts.tree.nodes())
        self._holds += [parts.holds.add(Reason.DAMAGE, lease=parts.tree.pin(node)) for node, _ in found]
        self._drop_others(found)
        self._tried = -1

    def go_on(self) -> int:
        """Delete damaged pages, and those after them, that nothing holds. Returns the number of deleted pages. O(1)
        where no lease was released since the last call, else O(pages of the paths to damaged ones)."""
        parts = self._parts
        if not self._damaged or parts.tree.num_releases == self._tried:
            return 0
        parts.damaged.release_holds()
        nodes = {node for hold in self._holds for node in path_to(hold.path.node)}
        found = self._found(sorted(nodes, key=lambda node: node.depth))
        for hold in self._holds:  # all first: paths with common pages must not hold each other
            parts.holds.release(hold)
        removed = [self._delete(node, first) for node, first in found]
        held = [each for each, count in zip(found, removed, strict=True) if count is None]
        self._holds = [parts.holds.add(Reason.DAMAGE, lease=parts.tree.pin(node)) for node, _ in held]
        self._drop_others(held)
        self._tried = parts.tree.num_releases
        return sum(count or 0 for count in removed)

    def _waiting_for(self, group: int) -> list[Ids]:
        """Frames of a group that are to be set apart: the bytes are wrong where they lie now."""
        frames = [frame for found in self._damaged.values() for index, frame in found if index == group]
        return [np.array(frames, dtype=np.int32)] if frames else []

    def _found(self, nodes: Iterable[Node]) -> list[tuple[Node, int]]:
        """Those of these nodes that have damaged pages, and the first of these pages of each."""
        damaged = list(self._damaged)
        bad = [(node, np.flatnonzero(np.isin(node.pages, damaged))) for node in nodes]
        return [(node, int(at[0])) for node, at in bad if len(at)]

    def _drop_others(self, cached: Sequence[tuple[Node, int]]) -> None:
        """Damaged pages that are in none of these nodes have left the cache: they are damaged no more."""
        gone = self._damaged.keys() - {page for node, _ in cached for page in node.pages.tolist()}
        for page in gone:
            del self._damaged[page]
        self._parts.damaged.mend(np.array(list(gone), dtype=np.int32))

    def release_oldest(self) -> bool:
        """Use a quarantined frame again, because a request fits in no other way. False if there is none."""
        for group in self._parts.groups:
            if group.quarantined:
                group.use_again(group.quarantined[0])
                self._parts.changed()
                return True
        return False

    def _delete(self, node: Node, first: int) -> int | None:
        """Delete a node's pages from page `first` on, and those below it; None if something holds them."""
        parts = self._parts
        if first >= node.num_pages:
            return 0  # deleted with a page before it
        removed = parts.tree.discard(node, first)
        if removed is None:
            return None
        parts.damaged.mend(removed)
        for page in removed.tolist():
            for index, frame in self._damaged.get(page, ()):
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
            return  # another page has the frame too, and keeps it
        self.num_quarantined += 1
        group.set_apart(frame)
        most = max(1, group.num_frames // QUARANTINE_SHARE)
        if len(group.quarantined) > most:
            group.use_again(group.quarantined[0])
