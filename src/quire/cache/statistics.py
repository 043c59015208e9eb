"""What the cache has done and what it holds, as a frozen snapshot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameCounts:
    """Frames of one (group, tier) by owner; they sum to `total`, always.

    `moving` frames were given up while a launched step could still touch them; they are free once it has settled.
    """

    total: int
    free: int
    private: int
    cached: int
    moving: int
    quarantined: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """Counters since the start, in tokens or pages, and gauges of now.

    `hit_tokens` counts prompt tokens found cached when a request began; `prompt_tokens` all prompt tokens of those
    requests. `shared_pages` are cached pages that two or more running requests hold now.
    """

    prompt_tokens: int
    hit_tokens: int
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
