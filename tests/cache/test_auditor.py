"""The audit in pieces beside the audit of tests: it finds what that finds, and nothing while the cache changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quire.cache import KVCache
from quire.cache import audit as audits
from quire.cache.audit import Audit, Auditor, broken_law
from quire.cache.hold import Reason
from quire.canary.parts import AuditPart
from quire.errors import OutOfPages
from quire.spec.group import ReachSpec
from quire.testing import small_plan
from quire.testing.choices import Choices
from tests.changes import CORE, unless_changed
from tests.covering import each_of

pytestmark = unless_changed(__name__, *CORE)


@pytest.fixture(autouse=True, params=[4, 1 << 15])
def pages_in_a_piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small caches in many pieces, and in few."""
    monkeypatch.setattr(audits, "_TABLE_PAGES", request.param)
    monkeypatch.setattr(audits, "_EDGE_PAGES", request.param)


class Life:
    """Random requests of one cache with windows and states, and an auditor."""

    def __init__(self, seed: int, num_pages: int = 24) -> None:
        self.choices = Choices.seeded(seed)
        reaches = (ReachSpec(), ReachSpec(kind="window", tokens=6))
        frames = num_pages, num_pages // 2
        self.cache = KVCache(small_plan(num_pages, 2, groups=("full", "window"), reaches=reaches, frames=frames))
        self.changes = 0
        self.auditor = Auditor(self.cache.parts, lambda: self.changes)
        self.open: list[tuple[object, np.ndarray]] = []

    def change(self) -> None:
        choices, cache = self.choices, self.cache
        self.changes += 1
        if len(self.open) < 4 and choices.chance(50):
            tokens = np.array([choices.below(2) for _ in range(choices.between(3, 14))], dtype=np.int32)
            self.open.append((cache.begin(tokens), tokens))
        elif self.open:
            kv, tokens = self.open.pop(choices.below(len(self.open)))
            try:
                cache.extend([kv], [len(tokens) - cache.rows.allocated(kv)])  # type: ignore[list-item,arg-type]
                cache.finish(kv, tokens)  # type: ignore[arg-type]
            except OutOfPages:
                cache.finish(kv)  # type: ignore[arg-type]

    def audit(self, pieces: int = 10**6) -> Audit:
        for _ in range(pieces):
            done = self.auditor.advance(0.0)
            if done is not None:
                return done
        raise AssertionError("it never ends")


@pytest.mark.parametrize("seed", range(10))
def test_a_cache_that_is_well_passes(seed: int) -> None:
    life = Life(seed)
    for _ in range(150):
        life.change()
        life.cache.audit()
        assert broken_law(life.cache.parts) == ""
        if life.choices.chance(30):
            done = life.audit()
            assert done.whole and not done.faults, done.faults
            assert done.pages >= life.cache.tree.num_pages and done.pieces >= 4


def check_changes_between_pieces(seed: int) -> None:
    life = Life(seed, num_pages=40)
    ended = whole = 0
    for _ in range(400):
        life.change()
        done = life.auditor.advance(0.0)
        assert broken_law(life.cache.parts) == ""
        if done is not None:
            assert not done.faults, done.faults
            ended, whole = ended + 1, whole + done.whole
    assert ended >= 8 and not whole


def _lose_a_page(cache: KVCache) -> None:
    cache.evict(1)
    cache.pages.ids.take(1)


def _share_a_frame(cache: KVCache) -> None:
    column = cache.groups[0].table
    pages = column.frame.nonzero()[0]
    column.frame[pages[0]] = column.frame[pages[1]]


def _share_a_frame_far_apart(cache: KVCache) -> None:
    column = cache.groups[0].table
    pages = column.frame.nonzero()[0]
    column.frame[pages[-1]] = column.frame[pages[0]]


def _invent_a_frame(cache: KVCache) -> None:
    column = cache.groups[0].table
    column.frame[column.frame.nonzero()[0][0]] = 10_000


def _free_a_frame(cache: KVCache) -> None:
    column = cache.groups[0].table
    cache.groups[0].frames.allocator.free_pages(column.frame[column.frame.nonzero()[0][:1]])  # type: ignore[union-attr]


def _lengthen_a_node(cache: KVCache) -> None:
    next(cache.tree.nodes()).key += b"\0\0\0\0"


def _count_a_lease(cache: KVCache) -> None:
    next(cache.tree.nodes()).leases += 1


def _cache_a_page_twice(cache: KVCache) -> None:
    node = max(cache.tree.nodes(), key=lambda each: each.num_pages)
    node.run = node.run[:4] * node.num_pages


def _unpin(cache: KVCache) -> None:
    cache.groups[1].table.pins[int(cache.groups[1].table.frame.nonzero()[0][0])] -= 5


def _count_pages(cache: KVCache) -> None:
    cache.tree.num_pages += 1


def _bind_the_padding(cache: KVCache) -> None:
    cache.groups[0].table.frame[0] = 1


DAMAGE = (
    *(_lose_a_page, _share_a_frame, _free_a_frame, _lengthen_a_node, _count_a_lease, _cache_a_page_twice),
    *(_unpin, _count_pages, _bind_the_padding, _share_a_frame_far_apart, _invent_a_frame),
)


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_broken_is_found(damage: Callable[[KVCache], None]) -> None:
    life = Life(3)
    for _ in range(40):
        life.change()
    while life.open:
        kv, _ = life.open.pop()
        life.cache.finish(kv)  # type: ignore[arg-type]
    assert life.cache.tree.num_pages > 3
    assert not life.audit().faults
    damage(life.cache)
    assert life.audit().faults or broken_law(life.cache.parts)


def test_a_page_of_two_edges_is_found_while_the_cache_changes() -> None:
    life = Life(3)
    while len(edges := [node for node in life.cache.tree.nodes() if not node.children]) < 2:
        life.change()
    edges[0].run = edges[1].run[:4] * edges[0].num_pages
    for _ in range(1000):
        life.changes += 1
        if (done := life.auditor.advance(0.0)) is not None:
            break
    assert done is not None and not done.whole
    assert any("is cached twice" in fault for fault in done.faults)


@each_of("seed", range(20))
def test_changes_between_pieces_are_no_faults(seed: int) -> None:
    check_changes_between_pieces(seed)


def check_frames_that_move() -> None:
    """In pieces of 4 pages: a frame or page of two pieces is found, one that moved between them is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audits, "_TABLE_PAGES", 4)
        patch.setattr(audits, "_EDGE_PAGES", 4)
        test_what_is_broken_is_found(_share_a_frame_far_apart)
        test_a_page_of_two_edges_is_found_while_the_cache_changes()
        for seed in range(6):
            check_changes_between_pieces(seed)


def test_a_piece_is_small() -> None:
    """However many pages there are: the tables of 96 pages and of their windows, and the edges of all."""
    life = Life(4, num_pages=96)
    for _ in range(200):
        life.change()
    done = life.audit()
    assert done.pieces >= 2 * 97 // audits._TABLE_PAGES + done.pages // max(audits._EDGE_PAGES, 16)


def test_faults_are_named_and_bounded() -> None:
    life = Life(1, num_pages=100)
    for _ in range(200):
        life.change()
    for node in life.cache.tree.nodes():
        node.leases += 1
    done = life.audit()
    assert 1 <= len(done.faults) <= 32
    assert "leases is held" in done.faults[0]


def test_an_audit_is_due_after_a_change() -> None:
    life = Life(2)
    assert life.auditor.is_due
    life.audit()
    assert not life.auditor.is_due
    life.change()
    assert life.auditor.is_due


@pytest.mark.parametrize("comes", [True, False])
def test_a_hold_that_comes_or_goes_during_an_audit_is_no_fault(comes: bool) -> None:
    """Transfers begin and end while an engine rests, between two pieces of its audit."""
    cache = KVCache(small_plan(32, 2))
    for number in range(4):
        tokens = np.arange(12, dtype=np.int32) + 100 * number
        kv = cache.begin(tokens)
        cache.extend([kv], [12])
        cache.finish(kv, tokens)
    part: Any = AuditPart(cache, None, None)  # type: ignore[arg-type]
    nodes = [node for node in cache.tree.nodes() if not node.children]
    for pieces in range(12):
        hold = cache.parts.holds.add(Reason.SAVE, lease=cache.tree.pin(nodes[0])) if not comes else None
        for _ in range(pieces):
            if (done := part.auditor.advance(0.0)) is not None:
                break
        if hold is not None:
            cache.parts.holds.release(hold)
        else:
            hold = cache.parts.holds.add(Reason.SAVE, lease=cache.tree.pin(nodes[0]))
        while pieces and done is None:
            done = part.auditor.advance(0.0)
        assert not pieces or not done.faults, done.faults
        if comes:
            cache.parts.holds.release(hold)
    cache.audit()
