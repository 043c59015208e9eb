"""Retained prefixes, and what soft retentions alone keep from being evicted: counted from the tree and the holds."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from quire.cache.groups import NO_PAGES, GroupCache
from quire.cache.hold import Hold
from quire.prefix.node import Node
from quire.spec.events import Namespace
from quire.spec.ids import Ids, Tier


@dataclass(slots=True, eq=False)
class RetainedPrefix:
    """One retention: `hold` keeps its path until `expires_at`, in seconds of the clock. It is *soft* if not pinned."""

    key: bytes
    namespace: Namespace
    order: int  # in which retentions were made
    hold: Hold
    priority: int
    retention_id: str = field(default_factory=lambda: f"retention-{secrets.token_hex(16)}")
    expires_at: float = 0.0
    pinned: bool = False
    ticket: int = 0  # of its entry in the queue of expiries

    @property
    def rank(self) -> tuple[bool, int, float, int]:
        """The lowest is given up first; pinned ones come last."""
        return self.pinned, self.priority, self.expires_at, self.order

    def frames(self, group: int) -> list[Ids]:
        """Pages whose device frames in a group that is read in part it holds."""
        return [frames.pages for frames in self.hold.frames if (frames.group, frames.tier) == (group, Tier.DEVICE)]


def nodes_of(retained: Iterable[RetainedPrefix]) -> set[Node]:
    """The nodes whose pages these retentions keep, without roots. O(these nodes)."""
    found: set[Node] = set()
    for each in retained:
        node = each.hold.path.node
        while node.parent is not None and node not in found:
            found.add(node)
            node = node.parent
    return found


def only_held_by(retained: Iterable[RetainedPrefix]) -> set[Node]:
    """Nodes that these retentions hold and nothing else does. O(nodes that they hold).

    A node is held by leases that end at it and by the levels of its children. If these retentions account for both,
    and for these children likewise, nothing else holds it. From the leaves up.
    """
    retained = list(retained)
    own = Counter(each.hold.path.node for each in retained)
    below: dict[Node | None, int] = {}
    only: set[Node] = set()
    for node in sorted(nodes_of(retained), key=lambda node: -node.depth):
        if node.held == own[node] + below.get(node, 0):
            only.add(node)
            below[node.parent] = below.get(node.parent, 0) + node.level
    return only


def frames_of(retained: Iterable[RetainedPrefix], group: int) -> Ids:
    """Pages whose device frames in a group these retentions hold, once for each retention."""
    return np.concatenate([NO_PAGES, *(pages for each in retained for pages in each.frames(group))])


def frames_only_held_by(retained: Iterable[RetainedPrefix], group: GroupCache, others: int = 0) -> Ids:
    """Pages whose device frames in a group these retentions hold, and at most so many `others`."""
    if not group.table.reclaims or not len(held := frames_of(retained, group.index)):
        return NO_PAGES
    pages, counts = np.unique(held, return_counts=True)
    found: Ids = pages[group.table.pins[pages] - counts <= others]
    return found
