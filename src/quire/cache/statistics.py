"""What a cache has done and what it holds, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.cache.groups import NO_PAGES
from quire.cache.hold import Retired
from quire.cache.states import GroupCache
from quire.observe.explain import Explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameCounts:
    """Frames of one (group, tier) by owner, and counters since the start. The owners sum to `total`;
    `evictable` frames are some of the `cached` ones."""

    total: int
    free: int
    private: int
    cached: int
    evictable: int  # of the cached ones
    moving: int  # released while a launched step could read them; free once it has settled
    quarantined: int
    dropped: int = 0  # frames reclaimed from cached pages that stayed
    revived: int = 0  # frames that such pages got back from requests that computed them again
    left: int = 0  # frames stored as checkpoints, for other requests to begin on
    skipped: int = 0  # places without a checkpoint because no frame was free


@dataclass(kw_only=True)
class CacheCounters:
    """Counters of a cache since its start. *Shared* counts cached pages that two or more running requests hold."""

    prompt_tokens: int = 0  # of all requests that have begun
    hit_tokens: int = 0  # of them, tokens that were cached
    explained_tokens: dict[str, int] = field(default_factory=dict)  # by cause, if the cache explains
    committed_pages: int = 0
    duplicate_pages: int = 0
    evicted_pages: int = 0
    evictions: int = 0
    peak_shared_pages: int = 0

    def begun(self, prompt_tokens: int, hit_tokens: int, explanation: Explanation | None) -> None:
        """A request has begun for the first time."""
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += hit_tokens
        for reason in explanation.reasons if explanation is not None else ():
            self.explained_tokens[reason.cause] += reason.tokens

    def evicted(self, num_pages: int) -> None:
        """One eviction of `num_pages` pages."""
        self.evicted_pages += num_pages
        self.evictions += bool(num_pages)


@dataclass(kw_only=True)
class CacheStatistics(CacheCounters):
    """A copy of the counters, with gauges."""

    shared_pages: int
    cached_pages: int
    evictable_pages: int
    num_pages: int
    page_size: int
    frames: dict[str, FrameCounts]


def count_frames(group: GroupCache, retired: Sequence[Retired]) -> FrameCounts:
    """A group's frames by owner. `retired` frames wait for steps in flight."""
    released = [part for item in retired for part in item.released if part.group == group.index]
    pages = [item.pages for item in retired] + [part.dropped for part in released]
    waiting = np.unique(np.concatenate([NO_PAGES, *pages]))
    moving = int(np.count_nonzero(group.table.frame[waiting])) + sum(len(part.frames) for part in released)
    return FrameCounts(
        total=group.num_frames,
        free=group.num_free,
        private=group.num_frames - group.num_free - group.num_cached - moving - len(group.quarantined),
        cached=group.num_cached,
        evictable=group.num_evictable,
        moving=moving,
        quarantined=len(group.quarantined),
        dropped=group.dropped_frames,
        revived=group.revived_frames,
        left=group.left,
        skipped=group.skipped,
    )
