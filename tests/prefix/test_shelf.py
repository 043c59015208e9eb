"""The shelf: which frames go first when their pages stay."""

from __future__ import annotations

import numpy as np
import pytest

from quire.prefix.shelf import Rank, Shelf
from quire.spec.ids import Ids
from quire.testing.fuzz.choices import Choices


def ids(*pages: int) -> Ids:
    return np.array(pages, dtype=np.int32)


def check_shelf_order() -> None:
    """Lower ranks first, within a rank what was released first, and of one release the pages nearest the root."""
    shelf = Shelf(20)
    for pages, rank in (
        (ids(5, 6), Rank.USED),
        (ids(1, 2, 3), Rank.PASSED),
        (ids(8), Rank.MARKED),
        (ids(9), Rank.PASSED),
    ):
        shelf.pin(pages)
        shelf.unpin(pages, rank)
    assert shelf.evict(2).tolist() == [1, 2]
    assert shelf.evict(3, Rank.PASSED).tolist() == [3, 9]
    assert shelf.evict(9).tolist() == [8, 5, 6]
    assert shelf.num_pages == 0


def test_what_goes_first() -> None:
    check_shelf_order()


def test_use_makes_young_and_ranks_only_rise() -> None:
    shelf = Shelf(9)
    shelf.put(ids(1, 2), Rank.USED)
    shelf.put(ids(3), Rank.USED)
    shelf.pin(ids(1))
    assert (shelf.num_evictable, shelf.num_pinned, shelf.on_shelf(ids(1, 2, 3)).tolist()) == (2, 1, [False, True, True])
    shelf.unpin(ids(1), Rank.PASSED)  # it was a resume point, and one that was used
    assert shelf.evict(3).tolist() == [2, 3, 1]


def test_a_page_that_comes_back_is_worth_nothing_at_first() -> None:
    shelf = Shelf(9)
    shelf.put(ids(1), Rank.USED)
    shelf.remove(ids(1))
    shelf.put(ids(1), Rank.PASSED)
    shelf.put(ids(2), Rank.MARKED)
    assert shelf.evict(1).tolist() == [1]


def test_pins_are_counted() -> None:
    shelf = Shelf(4)
    shelf.pin(ids(1))
    shelf.pin(ids(1))
    shelf.unpin(ids(1), Rank.USED)
    assert shelf.evict(4).tolist() == []
    with pytest.raises(AssertionError, match="pinned page was removed"):
        shelf.remove(ids(1))
    shelf.unpin(ids(1), Rank.PASSED)
    with pytest.raises(AssertionError, match="nobody pins"):
        shelf.unpin(ids(1), Rank.PASSED)


def test_against_a_plain_model() -> None:
    """Random pins, releases, removals and evictions beside a list in order of use; queues stay in proportion."""
    for seed in range(60):
        choices = Choices.seeded(seed)
        num_pages = choices.between(3, 12)
        shelf = Shelf(num_pages)
        pins = dict.fromkeys(range(1, num_pages + 1), 0)
        ranks: dict[int, int] = {}
        order: list[int] = []  # on the shelf, longest unused first
        for _ in range(200):
            page = choices.between(1, num_pages)
            rank = choices.one_of(tuple(Rank))
            if choices.chance(40):
                shelf.pin(ids(page), rank)
                pins[page] += 1
                ranks[page] = max(ranks.get(page, 0), rank)
                order = [p for p in order if p != page]
            elif pins[page]:
                shelf.unpin(ids(page), rank)
                pins[page] -= 1
                ranks[page] = max(ranks[page], rank)
                order += [page] * (not pins[page])
            elif choices.chance(50):
                shelf.remove(ids(page))
                order = [p for p in order if p != page]
                ranks.pop(page, None)
            else:
                most, wanted = choices.one_of(tuple(Rank)), choices.between(0, 3)
                expected = sorted((p for p in order if ranks[p] <= most), key=lambda p: ranks[p])[:wanted]
                assert shelf.evict(wanted, most).tolist() == expected
                order = [p for p in order if p not in expected]
                for p in expected:
                    del ranks[p]
            assert shelf.num_evictable == len(order)
            assert shelf.num_pinned == sum(count > 0 for count in pins.values())
            assert sum(len(pages) for queue in shelf._queues for _, pages in queue) <= 65 + 4 * num_pages
