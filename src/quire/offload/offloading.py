"""The offload of a cache, from settings: `KVCache(plan, offload=Offloads(tiers, retain_share=0.25))`."""

from __future__ import annotations

from dataclasses import dataclass

from quire.cache import KVCache
from quire.cache.offload import CacheParts, NoOffload
from quire.offload.read_ahead import NOTHING_TO_READ_AHEAD, ReadAhead
from quire.offload.retention import RETAIN_SHARE, Retention
from quire.offload.tier_settings import TierSettings
from quire.offload.tiered import Tiered
from quire.plan.budget import MemoryPlan
from quire.spec.events import Namespace
from quire.spec.ids import Tier


class DeviceOnly(NoOffload):
    """The device alone, of which callers may keep prefixes (`kept`)."""

    def __init__(self, parts: CacheParts, retain_share: float) -> None:
        super().__init__(parts)
        self.kept: Retention = Retention(parts, retain_share)
        self.ahead: ReadAhead = NOTHING_TO_READ_AHEAD
        self.tiers = self.prefetcher = None

    def abandon(self, namespace: Namespace | None) -> None:
        """Nothing is on its way."""


Offloading = Tiered | DeviceOnly


@dataclass(frozen=True, slots=True)
class Offloads:
    """Makes the offload of a cache: with `tiers`, hosts and stores as they say, and callers may keep `retain_share` of
    the plan's pages."""

    tiers: TierSettings | None = None
    retain_share: float = RETAIN_SHARE

    @property
    def below(self) -> tuple[Tier, ...]:
        """Tiers beside the device. In a store pages have names and no frames."""
        return (Tier.HOST, Tier.STORAGE) if self.tiers is not None else ()

    def num_pages(self, plan: MemoryPlan) -> int:
        """Ids for pages that are on the host only."""
        return self.tiers.num_pages(plan) if self.tiers is not None else 0

    def make(self, parts: CacheParts) -> Offloading:
        """The offload of the cache that has these parts."""
        if self.tiers is None:
            return DeviceOnly(parts, self.retain_share)
        return Tiered(parts, self.tiers, self.retain_share)


def offload_of(cache: KVCache) -> Offloading:
    """The offload of a cache that `Offloads` made."""
    assert isinstance(cache.offload, Tiered | DeviceOnly), "this cache was made without Offloads"
    return cache.offload
