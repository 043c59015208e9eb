"""What a cache has done and what it holds, in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from quire.cache.groups import NO_PAGES
from quire.cache.hold import REQUEST, SESSION, STEP, Reason, Retired
from quire.cache.states import GroupCache
from quire.counters import counter, gauge, labelled
from quire.observe.explain import Explanation


def in_state(state: str, tier: str = "device") -> int:
    """A field with the frames of a group that are in a state."""
    text = "Frames of a group in a tier by state; the states of a group add up to its pool."
    found: int = gauge(text, name="frames", tier=tier, state=state)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameCounts:
    """Frames of one (group, tier) by owner, and counters since the start. The owners sum to `total`; `evictable` frames
    are some of the `cached` ones. A frame that its request has read past counts as cached before its page is."""

    PREFIX: ClassVar = "frames_"
    total: int = 0
    free: int = in_state("free")
    private: int = in_state("private")
    cached: int = in_state("cached")
    evictable: int = 0  # part of `cached`
    moving: int = in_state("moving")  # released while a launched step could read them; free once it has settled
    quarantined: int = in_state("quarantined")
    released: int = in_state("released")  # their memory was given back to the system
    dropped: int = counter("Frames of cached pages that were dropped while their pages stayed.")
    revived: int = counter("Frames that such pages got back from requests that had computed them again.")
    left: int = counter("Frames that requests left for others to begin on.")
    skipped: int = counter("Places where a request left none, because no frame was to spare.")


@dataclass(kw_only=True)
class CacheCounters:
    """Counters of a cache since its start. *Shared* counts cached pages that two or more running requests hold."""

    prompt_tokens: int = counter("Prompt tokens of admitted requests.", vllm="prompt_tokens prefix_cache_queries")
    hit_tokens: int = counter("Prompt tokens that came from the cache.", vllm="prefix_cache_hits")
    explained_tokens: dict[str, int] = counter(
        "Prompt tokens by what became of them; the causes add up to quire_prompt_tokens.",
        "cause",
        start=dict,
        name="prompt_tokens_by_cause",
    )
    committed_pages: int = 0
    duplicate_pages: int = 0
    evicted_pages: int = counter("Cached pages given up for others.")
    evictions: int = 0
    peak_shared_pages: int = 0
    moved_frames: int = counter("Frames that were moved to make room for another group.")

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

    shared_pages: int = gauge("Pages that more than one request reads now.")
    cached_pages: int = 0
    evictable_pages: int = 0
    num_pages: int = 0
    held_pages: dict[str, int] = gauge(
        "Cached pages that eviction leaves, by what holds them; a page counts once for each holder.",
        "reason",
        start=dict,
        known=(*Reason, REQUEST, SESSION, STEP),
    )
    page_size: int = gauge("Tokens in a page.")
    usage: float = gauge(
        "Frames in use, of all, from 0 to 1, of the fullest group: frames that could be evicted count as free.",
        name="kv_cache_usage_ratio",
        vllm="kv_cache_usage_perc",
    )
    frames: dict[str, FrameCounts] = labelled("group", FrameCounts)


def usage_of(frames: Mapping[str, FrameCounts]) -> float:
    """The share of frames in use, of the fullest group. Frames that could be evicted count as free."""
    in_use = ((group, group.total - group.released) for group in frames.values())
    return max((total - group.free - group.evictable) / max(1, total) for group, total in in_use)


def count_frames(group: GroupCache, retired: Sequence[Retired]) -> FrameCounts:
    """A group's frames by owner. `retired` frames wait for steps in flight."""
    released = [part for item in retired for part in item.released if part.group == group.index]
    waiting = np.concatenate([NO_PAGES, *(item.pages for item in retired)])
    if group.table.reclaims:  # a page that was passed before is idle, or will be
        waiting = waiting[(group.table.ticket[waiting] == 0) & (group.table.pins[waiting] == 0)]
    moving = int(np.count_nonzero(group.table.frame[waiting])) + sum(len(part.frames) for part in released)
    return FrameCounts(
        total=group.num_free + group.frames.num_used + group.frames.num_released,
        free=group.num_free,
        private=group.frames.num_used - group.num_cached - moving - len(group.quarantined),
        cached=group.num_cached,
        evictable=group.num_evictable,
        moving=moving,
        quarantined=len(group.quarantined),
        released=group.frames.num_released,
        dropped=group.dropped_frames,
        revived=group.revived_frames,
        left=group.left,
        skipped=group.skipped,
    )
