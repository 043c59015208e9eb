"""The residency table beside a plain dictionary, and the errors of a reader that meets a missing frame."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.errors import MissingFrame
from quire.memory.residency import Column, Residency, State
from quire.spec.ids import Ids, Tier
from quire.spec.rank import Rank

PAGES = 6
PLACES = [(tier, group) for tier in (Tier.DEVICE, Tier.HOST) for group in range(3)]
SOME_PAGES = st.lists(st.integers(1, PAGES), min_size=1, max_size=PAGES, unique=True)


def ids(*numbers: int) -> Ids:
    return np.array(numbers, dtype=np.int32)


class TableBesideDictionary(RuleBasedStateMachine):
    """Groups 1 and 2 lose frames before pages, group 0 does not."""

    @initialize(whole=st.booleans())
    def start(self, whole: bool) -> None:
        names, reclaims = ["full", "window", "state"], [not whole, True, True]
        self.table = Residency(PAGES, names, reclaims, (Tier.DEVICE, Tier.HOST))
        self.frames: dict[tuple[Tier, int, int], int] = {}
        self.states: dict[tuple[Tier, int, int], State] = {}
        self.pins: dict[tuple[Tier, int, int], int] = {}
        self.idle: dict[tuple[Tier, int], list[tuple[int, int]]] = {place: [] for place in PLACES}  # rank, page
        self.ranks: dict[tuple[Tier, int, int], int] = {}
        self.fresh = 0

    def column(self, place: tuple[Tier, int]) -> Column:
        return self.table.of(*place)

    @rule(place=st.sampled_from(PLACES), pages=SOME_PAGES)
    def bind(self, place: tuple[Tier, int], pages: list[int]) -> None:
        pages = [page for page in pages if (*place, page) not in self.frames]
        frames = list(range(self.fresh + 1, self.fresh + len(pages) + 1))
        self.fresh += len(pages)
        self.column(place).bind(ids(*pages), ids(*frames))
        for page, frame in zip(pages, frames, strict=True):
            self.frames[(*place, page)], self.states[(*place, page)] = frame, State.RESIDENT

    @rule(place=st.sampled_from(PLACES), pages=SOME_PAGES)
    def unbind(self, place: tuple[Tier, int], pages: list[int]) -> None:
        pages = [page for page in pages if not self.pins.get((*place, page))]
        had = [self.frames.pop((*place, page), 0) for page in pages]
        assert self.column(place).unbind(ids(*pages)).tolist() == [frame for frame in had if frame]
        for page, frame in zip(pages, had, strict=True):
            if frame:
                self.forget(place, page)

    def forget(self, place: tuple[Tier, int], page: int) -> None:
        self.states.pop((*place, page), None)
        self.ranks.pop((*place, page), None)
        self.idle[place] = [entry for entry in self.idle[place] if entry[1] != page]

    @rule(place=st.sampled_from(PLACES), pages=SOME_PAGES, state=st.sampled_from(list(State)), on=st.booleans())
    def mark(self, place: tuple[Tier, int], pages: list[int], state: State, on: bool) -> None:
        (self.column(place).mark if on else self.column(place).unmark)(ids(*pages), state)
        for page in pages:
            before = self.states.get((*place, page), State.ABSENT)
            self.states[(*place, page)] = before | state if on else before & ~state
        assert self.column(place).has(ids(*pages), state).all() == on

    @rule(place=st.sampled_from(PLACES), pages=SOME_PAGES)
    def move(self, place: tuple[Tier, int], pages: list[int]) -> None:
        """To pages that have none. What is pinned or idle does not move."""
        free = [page for page in range(1, PAGES + 1) if (*place, page) not in self.frames]
        still = {page for _, page in self.idle[place]} | {page for page in pages if self.pins.get((*place, page))}
        old = [page for page in pages if (*place, page) in self.frames and page not in still][: len(free)]
        new = free[: len(old)]
        self.column(place).move(ids(*old), ids(*new))
        for source, target in zip(old, new, strict=True):
            self.frames[(*place, target)] = self.frames.pop((*place, source))
            self.states[(*place, target)] = self.states.pop((*place, source), State.ABSENT)

    @rule(place=st.sampled_from(PLACES), pages=SOME_PAGES, rank=st.sampled_from(Rank))
    def pin(self, place: tuple[Tier, int], pages: list[int], rank: Rank) -> None:
        pages = [page for page in pages if (*place, page) in self.frames]
        self.column(place).pin(ids(*pages), rank)
        for page in pages if self.column(place).reclaims else ():
            self.pins[(*place, page)] = self.pins.get((*place, page), 0) + 1
            self.ranks[(*place, page)] = max(rank, self.ranks.get((*place, page), 0))
            self.idle[place] = [entry for entry in self.idle[place] if entry[1] != page]

    @rule(place=st.sampled_from(PLACES), pages=SOME_PAGES, rank=st.sampled_from(Rank))
    def unpin(self, place: tuple[Tier, int], pages: list[int], rank: Rank) -> None:
        pages = [page for page in pages if self.pins.get((*place, page))]
        self.column(place).unpin(ids(*pages), rank)
        for page in pages:
            self.pins[(*place, page)] -= 1
            self.ranks[(*place, page)] = max(rank, self.ranks[(*place, page)])
            if not self.pins[(*place, page)]:
                self.idle[place].append((self.ranks[(*place, page)], page))

    @rule(place=st.sampled_from(PLACES), count=st.integers(0, 3), most=st.sampled_from(Rank))
    def reclaim(self, place: tuple[Tier, int], count: int, most: Rank) -> None:
        expected = sorted([e for e in self.idle[place] if e[0] <= most], key=lambda entry: entry[0])[:count]
        pages = self.column(place).reclaim(count, most)
        assert pages.tolist() == [page for _, page in expected]
        self.column(place).unbind(pages)
        for _, page in expected:
            del self.frames[(*place, page)]
            self.forget(place, page)

    @invariant()
    def table_is_the_dictionary(self) -> None:
        if not hasattr(self, "table"):
            return
        for place in PLACES:
            column = self.column(place)
            pages = range(PAGES + 1)
            assert column.mapping.tolist() == [*(self.frames.get((*place, page), 0) for page in pages), -1]
            assert column.state.tolist() == [self.states.get((*place, page), State.ABSENT) for page in pages]
            assert column.reclaims != (column.name == "full" and self.table.anchor_group is not None)
            if column.reclaims:
                assert column.pins.tolist() == [self.pins.get((*place, page), 0) for page in pages]
                assert column.ticket.nonzero()[0].tolist() == sorted(page for _, page in self.idle[place])
                assert column.num_idle == len(self.idle[place])
                assert column.num_pinned == sum(1 for key, count in self.pins.items() if key[:2] == place and count)


TestTable = TableBesideDictionary.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_no_page_maps_to_no_frame() -> None:
    """Behind the last page is a -1, which no edit touches."""
    column = Column("window", 3, reclaims=False)
    column.bind(ids(1, 3), ids(5, 2))
    assert column.mapping[ids(-1, 3, 0)].tolist() == [-1, 2, 0]
    column.unbind(ids(3, 2))
    assert column.mapping.tolist() == [0, 5, 0, 0, -1], "the mapping is live"
    assert len(column.frame) == 4
    with pytest.raises(IndexError):
        column.bind(ids(4), ids(1))


@pytest.mark.parametrize(("old", "new"), [((3, 1), (4,)), ((4,), (5,)), ((1, 4), (4, 5)), ((1,), (2,)), ((0,), (4,))])
def test_a_frame_moves_from_a_page_that_has_it_to_one_that_has_none(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    column = Column("full", 5, reclaims=False)
    column.bind(ids(1, 2, 3), ids(9, 8, 7))
    with pytest.raises(AssertionError):
        column.move(ids(*old), ids(*new))
    assert column.mapping.tolist() == [0, 9, 8, 7, 0, 0, -1]


def test_a_page_that_has_a_frame_is_not_bound_again() -> None:
    column = Column("full", 2, reclaims=False)
    column.bind(ids(1), ids(1))
    with pytest.raises(AssertionError, match="has a frame"):
        column.bind(ids(2, 1), ids(2, 1))
    assert column.frame.tolist() == [0, 1, 0]


def test_a_reader_never_gets_the_padding_frame() -> None:
    column = Column("latent", 4, reclaims=False)
    column.bind(ids(1, 2, 4), ids(3, 1, 2))
    assert column.frames(ids(4, 1)).tolist() == [2, 3]
    assert column.frames(ids()).tolist() == []
    with pytest.raises(MissingFrame, match="page 3 is read in group 'latent'") as caught:
        column.frames(ids(1, 3))
    assert caught.value.code == "QUIRE-PAGES-03"


def test_without_a_group_that_keeps_its_frames_the_pages_say_where_they_are() -> None:
    table = Residency(4, ["window"], [True], (Tier.DEVICE, Tier.HOST))
    table.add_pages(ids(1, 2))
    table.add_pages(ids(2, 3), Tier.HOST)
    assert table.anchor(Tier.DEVICE).present(ids(1, 2, 3)).tolist() == [True, True, False]
    table.replace_pages(ids(1), ids(3))
    assert table.anchor(Tier.DEVICE).present(ids(1, 2, 3)).tolist() == [False, True, True]
    table.remove_pages(Tier.HOST, ids(1, 3))
    assert table.anchor(Tier.HOST).present(ids(1, 2, 3)).tolist() == [False, True, False]
    assert table.anchor_group is None
