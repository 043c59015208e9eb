"""What the cache has done and what it holds, as a frozen snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.cache.fences import Retired
from quire.cache.groups import NO_PAGES, GroupCache
from quire.observe.explain import Explanation


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


@dataclass(kw_only=True)
class CacheCounters:
    """What a cache counts as it goes, in tokens or pages.

    `hit_tokens` counts prompt tokens found cached when a request began; `prompt_tokens` all prompt tokens of those
    requests; `explained_tokens` are these by cause, where the cache explains. Shared are cached pages that two or more
    running requests hold.
    """

    prompt_tokens: int = 0
    hit_tokens: int = 0
    explained_tokens: dict[str, int] = field(default_factory=dict)
    committed_pages: int = 0
    duplicate_pages: int = 0
    evicted_pages: int = 0
    evictions: int = 0
    peak_shared_pages: int = 0

    def begun(self, prompt_tokens: int, hit_tokens: int, explanation: Explanation | None) -> None:
        """A request has begun that had not before."""
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += hit_tokens
        for reason in explanation.reasons if explanation is not None else ():
            self.explained_tokens[reason.cause] += reason.tokens

    def evicted(self, num_pages: int) -> None:
        """So many pages were forgotten at once, to make room or because that was asked for."""
        self.evicted_pages += num_pages
        self.evictions += bool(num_pages)


@dataclass(kw_only=True)
class CacheStatistics(CacheCounters):
    """A snapshot of these counters, and gauges of now."""

    shared_pages: int
    cached_pages: int
    evictable_pages: int
    num_pages: int
    page_size: int
    frames: dict[str, FrameCounts]


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
