"""Idle frames: which go first when their pages stay."""

from __future__ import annotations

import numpy as np
import pytest

from quire.memory.residency import Column
from quire.spec.ids import Ids
from quire.spec.rank import Rank
from quire.testing.choices import Choices


def ids(*pages: int) -> Ids:
    return np.array(pages, dtype=np.int32)


def column_of(num_pages: int) -> Column:
    """Every page has the frame of its number."""
    column = Column("window", num_pages, reclaims=True)
    pages = np.arange(1, num_pages + 1, dtype=np.int32)
    column.bind(pages, pages)
    return column


def rebind(column: Column, page: int) -> None:
    """The page loses its frame and gets it back."""
    column.bind(ids(page), column.unbind(ids(page)))


def check_idle_order() -> None:
    """Lower ranks first, within a rank what was released first, and of one release the pages nearest the root."""
    column = column_of(20)
    for pages, rank in (
        (ids(5, 6), Rank.USED),
        (ids(1, 2, 3), Rank.PASSED),
        (ids(8), Rank.MARKED),
        (ids(9), Rank.PASSED),
    ):
        column.pin(pages)
        column.unpin(pages, rank)
    assert column.reclaim(2).tolist() == [1, 2]
    assert column.reclaim(3, Rank.PASSED).tolist() == [3, 9]
    assert column.reclaim(9).tolist() == [8, 5, 6]
    assert column.num_idle + column.num_pinned == 0


def test_what_goes_first() -> None:
    check_idle_order()


def test_use_makes_young_and_ranks_only_rise() -> None:
    column = column_of(9)
    column.put(ids(1, 2), Rank.USED)
    column.put(ids(3), Rank.USED)
    column.pin(ids(1))
    assert (column.num_idle, column.num_pinned, column.ticket[1:4].astype(bool).tolist()) == (2, 1, [False, True, True])
    column.unpin(ids(1), Rank.PASSED)  # it was a resume point, and one that was used
    assert column.reclaim(3).tolist() == [2, 3, 1]


def test_a_page_that_comes_back_is_worth_nothing_at_first() -> None:
    column = column_of(9)
    column.put(ids(1), Rank.USED)
    rebind(column, 1)
    column.put(ids(1), Rank.PASSED)
    column.put(ids(2), Rank.MARKED)
    assert column.reclaim(1).tolist() == [1]


def test_pins_are_counted() -> None:
    column = column_of(4)
    column.pin(ids(1))
    column.pin(ids(1))
    column.unpin(ids(1), Rank.USED)
    assert column.reclaim(4).tolist() == []
    with pytest.raises(AssertionError, match="pinned page was removed"):
        rebind(column, 1)
    column.unpin(ids(1), Rank.PASSED)
    with pytest.raises(AssertionError, match="nothing pins"):
        column.unpin(ids(1), Rank.PASSED)


def test_against_a_plain_model() -> None:
    """Random pins, releases, removals and evictions beside a list in order of use; queues stay in proportion."""
    for seed in range(60):
        choices = Choices.seeded(seed)
        num_pages = choices.between(3, 12)
        column = column_of(num_pages)
        pins = dict.fromkeys(range(1, num_pages + 1), 0)
        ranks: dict[int, int] = {}
        order: list[int] = []  # idle, longest unused first
        for _ in range(200):
            page = choices.between(1, num_pages)
            rank = choices.one_of(tuple(Rank))
            if choices.chance(40):
                column.pin(ids(page), rank)
                pins[page] += 1
                ranks[page] = max(ranks.get(page, 0), rank)
                order = [p for p in order if p != page]
            elif pins[page]:
                column.unpin(ids(page), rank)
                pins[page] -= 1
                ranks[page] = max(ranks[page], rank)
                order += [page] * (not pins[page])
            elif choices.chance(50):
                rebind(column, page)
                order = [p for p in order if p != page]
                ranks.pop(page, None)
            else:
                most, wanted = choices.one_of(tuple(Rank)), choices.between(0, 3)
                expected = sorted((p for p in order if ranks[p] <= most), key=lambda p: ranks[p])[:wanted]
                assert column.reclaim(wanted, most).tolist() == expected
                order = [p for p in order if p not in expected]
                for p in expected:
                    del ranks[p]
            assert column.num_idle == len(order)
            assert column.num_pinned == sum(count > 0 for count in pins.values())
            assert sum(map(len, column._queues[0])) <= 65 * len(Rank) + 4 * num_pages
