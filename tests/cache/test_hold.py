"""Holds: what they keep, that each is released once, and that a refusal names their reasons."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.cache import KVCache
from quire.cache.hold import HeldFrames, Hold, Reason
from quire.errors import LeaseError, OutOfPages
from quire.spec.events import Namespace
from quire.spec.group import ReachSpec
from quire.spec.ids import Ids, Tier
from quire.testing import small_plan
from tests.memory.test_residency import test_a_reader_never_gets_the_padding_frame as check_missing_frames

PAGE = 2
FULL, WINDOW = ReachSpec(), ReachSpec("window", 3)


def tokens(text: str) -> Ids:
    return np.array([ord(letter) for letter in text], dtype=np.int32)


def cache_of(num_pages: int, *, window: bool = False) -> KVCache:
    groups, reaches = (("full", "window"), (FULL, WINDOW)) if window else (("full",), (FULL,))
    plan = small_plan(num_pages, PAGE, context=40, max_requests=4, groups=groups, reaches=reaches)
    return KVCache(plan)


def compute(cache: KVCache, text: str) -> None:
    kv = cache.begin(tokens(text))
    cache.extend([kv], [len(text) - kv.num_cached])
    cache.finish(kv, tokens(text))


def path(cache: KVCache, text: str) -> Hold:
    match = cache.tree.match(Namespace(), tokens(text))
    lease = cache.tree.pin_path(match, match.num_pages)
    return cache.parts.holds.add(Reason.SAVE, lease=lease)


def test_a_held_path_is_not_evicted_and_its_holder_is_named() -> None:
    cache = cache_of(4)
    compute(cache, "abcd")
    hold = path(cache, "abcd")
    assert cache.evict(9) == 0
    kv = cache.begin(tokens("uvwxyz"))
    with pytest.raises(OutOfPages, match="beside 1 save"):
        cache.extend([kv], [6])
    cache.audit()
    cache.parts.holds.release(hold)
    cache.extend([kv], [6])
    cache.audit()


def test_steps_in_flight_that_keep_what_was_given_up_are_named() -> None:
    cache = cache_of(2)
    other = cache.begin(tokens("abcd"))
    cache.extend([other], [4])
    fences = [cache.open_fence(), cache.open_fence()]
    kv = cache.begin(tokens("uv"))
    with pytest.raises(OutOfPages, match=r"2 running requests hold the rest\. Fix:"):
        cache.extend([kv], [2])
    cache.finish(other)
    for still_open in (2, 1):
        steps = f"{still_open} launched step{'s' if still_open > 1 else ''}"
        with pytest.raises(OutOfPages, match=rf"1 running requests hold the rest, beside {steps}\. Fix:"):
            cache.extend([kv], [2])
        cache.close_fence(fences.pop(0))
    cache.extend([kv], [2])
    cache.audit()


def test_a_hold_is_released_once() -> None:
    cache = cache_of(4)
    compute(cache, "ab")
    hold = path(cache, "ab")
    cache.parts.holds.release(hold)
    with pytest.raises(LeaseError, match="save was released twice"):
        cache.parts.holds.release(hold)


def test_held_frames_are_not_reclaimed() -> None:
    cache = cache_of(6, window=True)
    compute(cache, "abcdefgh")
    pages = cache.tree.match(Namespace(), tokens("abcdefgh")).pages.copy()
    hold = cache.parts.holds.add(Reason.LOAD, frames=[HeldFrames(1, Tier.DEVICE, pages)])
    assert cache.groups[1].num_evictable == 0
    cache.audit()
    cache.parts.holds.change(hold, [HeldFrames(1, Tier.DEVICE, pages[:1])])
    assert cache.groups[1].num_evictable == len(pages) - 1
    cache.audit()
    cache.parts.holds.release(hold)
    assert cache.groups[1].num_evictable == len(pages)
    cache.audit()


def test_what_is_held_is_counted_by_what_holds_it() -> None:
    cache = cache_of(8, window=True)
    compute(cache, "abcd")
    holds = [path(cache, "abcd"), path(cache, "ab")]
    pages = cache.tree.match(Namespace(), tokens("abcd")).pages.copy()
    holds.append(cache.parts.holds.add(Reason.LOAD, frames=[HeldFrames(1, Tier.DEVICE, pages)]))
    kv = cache.begin(tokens("abcdef"))
    assert cache.statistics().held_pages == {"running request": 2, "save": 3, "load": 2}
    fence = cache.open_fence()
    cache.finish(kv)
    assert cache.statistics().held_pages == {"launched step": 2, "save": 3, "load": 2}
    cache.close_fence(fence)
    for hold in holds:
        cache.parts.holds.release(hold)
    assert cache.statistics().held_pages == {}


def check_holds() -> None:
    """All of the above."""
    test_a_held_path_is_not_evicted_and_its_holder_is_named()
    test_a_hold_is_released_once()
    test_held_frames_are_not_reclaimed()
    check_missing_frames()


class HoldsBesideCounts(RuleBasedStateMachine):
    """Random holds on cached paths, beside a running request and the pages that they should keep."""

    @initialize()
    def start(self) -> None:
        self.cache = cache_of(12)
        self.kv = self.cache.begin(tokens("0123456789"))
        self.cache.extend([self.kv], [10])
        self.running = True
        self.holds: list[tuple[Hold, set[int]]] = []

    @rule(text=st.text("ab", min_size=2, max_size=6).filter(lambda text: len(text) % PAGE == 0))
    def compute(self, text: str) -> None:
        try:
            compute(self.cache, text)
        except OutOfPages:
            assert self.holds or self.running
            for kv in list(self.cache.rows.live.values()):
                if kv is not self.kv:
                    self.cache.finish(kv)

    @rule(text=st.text("ab", min_size=2, max_size=6))
    def hold_path(self, text: str) -> None:
        hold = path(self.cache, text)
        self.holds.append((hold, set(self.cache.tree.match(Namespace(), tokens(text)).pages.tolist())))

    @precondition(lambda self: self.running)
    @rule()
    def finish(self) -> None:
        self.cache.finish(self.kv)
        self.running = False

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hold, _ = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.cache.parts.holds.release(hold)

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        self.cache.evict(count)

    @invariant()
    def what_is_held_is_out(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.audit()
        held = np.array(sorted(set().union(*(pages for _, pages in self.holds))), dtype=np.int32)
        assert self.cache.pages.ids.is_out(held).all(), "a held page is free"
        assert len(self.cache.parts.holds._live) == len(self.holds)
        counted = self.cache.statistics().held_pages
        assert counted.get(Reason.SAVE, 0) == sum(len(pages) for _, pages in self.holds)


HoldsBesideCounts.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHolds = HoldsBesideCounts.TestCase
