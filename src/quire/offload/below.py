"""Below: the tiers below the device of one cache, their transfers, and which copies are worth saving."""

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
"""The most bytes of a save that measures the speed of saving."""


@dataclass(slots=True)
class Part:
    """Pages of one group in a transfer: `at` are their places on the path, `device` and `host` their frames."""

    group: int
    pages: Ids
    at: np.ndarray
    device: Ids
    host: Ids
    ranks: np.ndarray | None = None


@dataclass(slots=True, eq=False)
class Moving:
    """A save or load under way. `hold` keeps its path, and its frames in groups that are read in part."""

    hold: Hold
    parts: list[Part]
    abandoned: bool = False  # flushed meanwhile: its pages are dropped when they arrive


class Below:
    """What all policies of the tiers share. `hosts` has the host frames of each group."""

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
        """A transfer of these parts on a lane, not submitted yet."""
        units = [Units(part.group, part.device, part.host, self.names.keys_of(part.pages)) for part in parts]
        num_bytes = sum(len(part.pages) * self.settings.record_bytes[part.group] for part in parts)
        return Transfer(link, units, scope, num_bytes)


def worth_saving(places: Sequence[np.ndarray], settings: TierSettings, page_size: int) -> list[np.ndarray]:
    """Which of these places of a path, by group, to copy to the host.

    All if loading them again, which takes as long as saving, would be quicker than computing them, else none; the first
    few if the speed is not known yet. A store needs all copies: they outlive this process.
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
