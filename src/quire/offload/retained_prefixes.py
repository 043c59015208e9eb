"""RetainedPrefixes: what callers asked to keep, and what of the device retentions alone keep from being evicted.

Nothing is counted beside the tree and the holds. The pages that are kept are those of the nodes up from the ends of the
leases, each once; the frames are those of the holds.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.cache.groups import NO_PAGES, GroupCache
from quire.cache.hold import Hold
from quire.prefix.node import Lease, Node
from quire.spec.events import Namespace
from quire.spec.ids import Ids, Tier


@dataclass(slots=True, eq=False)
class RetainedPrefix:
    """One retention: `hold` keeps its path until `expires_at`, in seconds of the clock. `order` tells those apart that
    are equal."""

    key: bytes
    namespace: Namespace
    order: int
    hold: Hold
    priority: int
    retention_id: str = field(default_factory=lambda: f"retention-{secrets.token_hex(16)}")
    expires_at: float = 0.0
    pinned: bool = False
    ticket: int = 0  # of the entry that says when it expires

    @property
    def lease(self) -> Lease:
        """The path that is kept."""
        return self.hold.path

    @property
    def rank(self) -> tuple[bool, int, float, int]:
        """The lowest is given up first. Pins are not given up."""
        return self.pinned, self.priority, self.expires_at, self.order


class RetainedPrefixes:
    """The retentions of one cache, `by_id` and `by_key`. *Soft* ones are those that are not pinned."""

    def __init__(self, groups: Sequence[GroupCache]) -> None:
        self.by_id: dict[str, RetainedPrefix] = {}
        self.by_key: dict[bytes, RetainedPrefix] = {}
        self._groups = groups

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[RetainedPrefix]:
        return iter(self.by_id.values())

    def add(self, kept: RetainedPrefix) -> None:
        """One more."""
        self.by_id[kept.retention_id] = self.by_key[kept.key] = kept

    def remove(self, kept: RetainedPrefix) -> None:
        """One less."""
        del self.by_id[kept.retention_id], self.by_key[kept.key]

    def soft(self) -> list[RetainedPrefix]:
        """What may be given up, in that order."""
        return sorted((kept for kept in self if not kept.pinned), key=lambda kept: kept.rank)

    # -- pages

    def nodes(self, *, pinned: bool = False) -> set[Node]:
        """The nodes whose pages are kept, or are `pinned`. O(these nodes)."""
        return _up_from(kept.lease.node for kept in self if kept.pinned or not pinned)

    def only_soft(self) -> set[Node]:
        """Nodes that soft retentions hold and nothing else does. O(nodes that they hold).

        A node is held by the leases that end at it and by the levels of its children. Where those of soft retentions
        make up all of that, and the same is so of these children, nothing else is there. From the leaves up.
        """
        own = Counter(kept.lease.node for kept in self if not kept.pinned)
        below: dict[Node | None, int] = {}
        only: set[Node] = set()
        for node in sorted(_up_from(own), key=lambda node: -node.depth):
            if node.held == own.get(node, 0) + below.get(node, 0):
                only.add(node)
                below[node.parent] = below.get(node.parent, 0) + node.level
        return only

    # -- frames of groups that are read in part

    def frames(self, group: int, *, pinned: bool) -> Ids:
        """Pages whose frames in a group pinned retentions, or else soft ones, hold on the device, once for each."""
        runs = [
            frames.pages
            for kept in self
            if kept.pinned is pinned
            for frames in kept.hold.frames
            if frames.group == group and frames.tier is Tier.DEVICE
        ]
        return np.concatenate(runs) if runs else NO_PAGES

    def only_soft_frames(self, group: int, others: int = 0) -> Ids:
        """Pages whose frames in a group soft retentions hold on the device, and at most so many `others`."""
        table = self._groups[group].table
        if not table.reclaims or not len(held := self.frames(group, pinned=False)):
            return NO_PAGES
        pages, counts = np.unique(held, return_counts=True)
        found: Ids = pages[table.pins[pages] - counts <= others]
        return found


def _up_from(ends: Iterable[Node]) -> set[Node]:
    """These nodes and all above them, without roots."""
    found: set[Node] = set()
    for end in ends:
        node = end
        while node.parent is not None and node not in found:
            found.add(node)
            node = node.parent
    return found
