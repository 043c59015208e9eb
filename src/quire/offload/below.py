"""Below: what is below the device of one cache, what moves between it and the device, and which copies are worth it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from quire.cache.hold import Hold
from quire.cache.offload import CacheParts
from quire.memory.host_pool import HostTokenToKVPoolAllocator
from quire.offload.deletion import StoreDeletion
from quire.offload.host_groups import HostGroup
from quire.offload.tier_counters import TierCounters
from quire.offload.tier_settings import TierSettings
from quire.spec.ids import Ids, Tier
from quire.tiers.transfer import Lane, Transfer, Units

TRIAL_BYTES: Final = 16 << 20
"""Saved at most while it is not known how fast that is: one save, which others do not wait for long."""


@dataclass(slots=True)
class Part:
    """Pages of one group: `at` are their places on the path, `device` and `host` their frames there, where the transfer
    touches them."""

    group: int
    pages: Ids
    at: np.ndarray
    device: Ids
    host: Ids
    ranks: np.ndarray | None = None


@dataclass(slots=True, eq=False)
class Moving:
    """The pages of a save or a load. `hold` keeps their path and, where groups are read in part, their frames."""

    hold: Hold
    parts: list[Part]
    abandoned: bool = False  # flushed meanwhile: what arrives counts for nothing


class Below:
    """The host's frames, one group of the cache each (`hosts`), the names of its pages, the mover and the counters."""

    def __init__(self, settings: TierSettings, parts: CacheParts) -> None:
        plan, table = parts.plan, parts.frames
        self.settings = settings
        self.table = table
        self.mover = settings.mover
        self.break_even = settings.break_even
        self.counters = TierCounters()
        self.names = parts.tree.names
        self.damaged = parts.damaged
        self.deletion = StoreDeletion(settings.mover, self.names, parts.seconds)
        self.hosts = tuple(
            HostGroup(
                group.index,
                table.of(Tier.HOST, group.index),
                HostTokenToKVPoolAllocator(num_frames * plan.page_size, plan.page_size, name=group.name),
            )
            for group, num_frames in zip(parts.groups, settings.host_frames, strict=True)
        )

    def move_of(self, link: Lane, parts: Sequence[Part], scope: bytes) -> Transfer:
        """Of these pages, between the tiers of that link."""
        units = [Units(part.group, part.device, part.host, self.names.keys_of(part.pages)) for part in parts]
        num_bytes = sum(len(part.pages) * self.settings.record_bytes[part.group] for part in parts)
        return Transfer(link, units, scope, num_bytes)


def worth_saving(places: Sequence[np.ndarray], settings: TierSettings, page_size: int) -> list[np.ndarray]:
    """Which of these places of a path, by group, to copy to the host. Nothing of them can be evicted meanwhile.

    All, where the way to the host is fast enough that to load them again, which takes as long, would be quicker than to
    compute them; none, where it is not; and the first few, to learn that. Copies for a store outlive this process and
    its device, and are always made.
    """
    if settings.always or settings.stores:
        return list(places)
    even, most = settings.break_even, max(map(len, places))
    num_bytes = settings.num_bytes(map(len, places))
    if not num_bytes or not even.decide(Lane.SAVE, most * page_size, num_bytes):
        most = 0
    elif not even.knows(Lane.SAVE):
        most = 0 if settings.mover.in_flight(Lane.SAVE) else max(1, most * TRIAL_BYTES // num_bytes)
    return [at[:most] for at in places]
