"""Below: what is below the device of one cache: the host's frames, under which names pages are known, who moves bytes,
and what has been counted."""

from __future__ import annotations

from collections.abc import Sequence

from quire.cache.offload import CacheParts
from quire.memory.host_pool import HostTokenToKVPoolAllocator
from quire.offload.forgetting import Forgetting
from quire.offload.host_groups import HostGroup
from quire.offload.moving import Part
from quire.offload.page_names import PageNames
from quire.offload.tier_counters import TierCounters
from quire.offload.tier_settings import TierSettings
from quire.spec.ids import Tier
from quire.tiers.transfer import Lane, Transfer, Units


class Below:
    """Of the cache that has these parts. `hosts` has one for each group."""

    def __init__(self, settings: TierSettings, parts: CacheParts) -> None:
        plan, table = parts.plan, parts.frames
        self.settings = settings
        self.table = table
        self.mover = settings.mover
        self.break_even = settings.break_even
        self.counters = TierCounters()
        self.names = PageNames(table.num_pages, plan.page_size, parts.identity)
        self.damaged = parts.damaged
        self.forgetting = Forgetting(settings.mover, parts.seconds)
        self.hosts = tuple(
            HostGroup(
                group.index,
                table.of(Tier.HOST, group.index),
                _host_allocator(frames, plan.page_size, group.name),
            )
            for group, frames in zip(parts.groups, settings.host_frames, strict=True)
        )

    def move_of(self, link: Lane, parts: Sequence[Part], scope: bytes) -> Transfer:
        """Of these pages, between the tiers of that link."""
        units = [Units(part.group, part.device, part.host, self.names.keys_of(part.pages)) for part in parts]
        num_bytes = sum(len(part.pages) * self.settings.record_bytes[part.group] for part in parts)
        return Transfer(link, units, scope, num_bytes)


def _host_allocator(num_frames: int, page_size: int, name: str) -> HostTokenToKVPoolAllocator:
    return HostTokenToKVPoolAllocator(num_frames * page_size, page_size, name=name)
