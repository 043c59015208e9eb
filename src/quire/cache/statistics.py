"""What the cache has done and what it holds, as a frozen snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.cache.fences import Retired
from quire.cache.groups import NO_PAGES, GroupCache

if TYPE_CHECKING:
    from quire.cache.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameCounts:
    """Frames of one (group, tier) by owner; they sum to `total`, always.

    `moving` frames were given up while a launched step could still touch them; they are free once it has settled.

    Counters since the start: `dropped` frames of cached pages that stayed, `revived` ones that such pages got back from
    requests that had computed them again; frames that requests `left` for others to begin on, and places where they
    `skipped` that because no frame was to spare.
    """

    total: int
    free: int
    private: int
    cached: int
    moving: int
    quarantined: int
    dropped: int = 0
    revived: int = 0
    left: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """Counters since the start, in tokens or pages, and gauges of now.

    `hit_tokens` counts prompt tokens found cached when a request began; `prompt_tokens` all prompt tokens of those
    requests; `explained_tokens` are these by cause, where the cache explains. `shared_pages` are cached pages that two
    or more running requests hold now.
    """

    prompt_tokens: int
    hit_tokens: int
    explained_tokens: dict[str, int]
    committed_pages: int
    duplicate_pages: int
    evicted_pages: int
    evictions: int
    shared_pages: int
    peak_shared_pages: int
    cached_pages: int
    evictable_pages: int
    num_pages: int
    page_size: int
    frames: dict[str, FrameCounts]
    tiers: dict[str, Any] | None = None


def cache_statistics(cache: KVCache) -> CacheStatistics:
    """A snapshot of a cache's counters and gauges."""
    tree, retired = cache.tree, cache.retired
    return CacheStatistics(
        prompt_tokens=cache._prompt_tokens,
        hit_tokens=cache._hit_tokens,
        explained_tokens=dict(cache._causes) if cache.explains else {},
        committed_pages=cache._committed_pages,
        duplicate_pages=cache._duplicate_pages,
        evicted_pages=cache._evicted_pages,
        evictions=cache._evictions,
        shared_pages=tree.num_shared,
        peak_shared_pages=cache._peak_shared,
        cached_pages=tree.num_pages,
        evictable_pages=tree.num_evictable,
        num_pages=cache.plan.num_pages,
        page_size=cache.page_size,
        frames={group.name: count_frames(group, retired) for group in cache.groups},
        tiers=cache.tiers.statistics() if cache.tiers is not None else None,
    )


def count_frames(group: GroupCache, retired: Sequence[Retired]) -> FrameCounts:
    """A group's frames by owner; `retired` is what waits for steps in flight."""
    given = [part for item in retired for part in item.given if part.group == group.index]
    pages = [item.pages for item in retired] + [part.dropped for part in given]
    waiting = np.unique(np.concatenate(pages)) if pages else NO_PAGES
    moving = int(np.count_nonzero(group.frames.column[waiting])) + sum(len(part.frames) for part in given)
    return FrameCounts(
        total=group.num_frames,
        free=group.num_free,
        private=group.num_frames - group.num_free - group.num_cached - moving,
        cached=group.num_cached,
        moving=moving,
        quarantined=0,
        dropped=group.dropped_frames,
        revived=group.revived_frames,
        left=group.left,
        skipped=group.skipped,
    )
