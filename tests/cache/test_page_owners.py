"""Counts by owner, beside a plain model that counts anew."""

from __future__ import annotations

import numpy as np
import pytest

from quire.cache.page_owners import PageOwners
from quire.spec.ids import Ids
from quire.spec.rank import Rank
from tests.choices import Choices

OWNERS = 3


def ids(*pages: int) -> Ids:
    return np.array(pages, dtype=np.int32)


@pytest.mark.parametrize("seed", range(30))
def test_counts_follow_each_change(seed: int) -> None:
    choices = Choices.seeded(seed)
    num_pages = choices.between(4, 12)
    owners = PageOwners(num_pages, OWNERS)
    window = owners.column("window", num_pages, reclaims=True)
    whole = owners.column("full", num_pages, reclaims=False)
    owner = dict.fromkeys(range(1, num_pages + 1), 0)
    has = {"window": set[int](), "full": set[int]()}
    pins = dict.fromkeys(owner, 0)
    rank = dict.fromkeys(owner, 0)
    idle: list[int] = []  # the longest idle first
    for _ in range(300):
        column = choices.one_of((window, whole))
        page, other = choices.between(1, num_pages), choices.between(1, num_pages)
        here, act = has[column.name], choices.below(7)
        free = [p for p in owner if p not in here]
        if act == 0 and free:
            column.bind(ids(*free[:2]), ids(*free[:2]))
            here |= set(free[:2])
        elif act == 1 and not pins[page]:
            gone = page in here
            assert len(column.unbind(ids(page))) == gone
            here.discard(page)
            if column is window:
                idle = [p for p in idle if p != page]
                rank[page] *= not gone
        elif act == 2 and page in here and other not in here and not pins[page] and page not in idle:
            column.move(ids(page), ids(other))
            here ^= {page, other}
        elif act == 3 and page not in idle:
            pages = [p for p in {page, other} if p not in idle]
            new = [choices.below(OWNERS) for _ in pages]
            owners.give(ids(*pages), np.array(new) if choices.chance(50) else new[0])
            owner |= dict(zip(pages, owners.of_page[pages].tolist(), strict=True))
        elif act == 4 and page in has["window"]:
            rank[page] = max(rank[page], found := choices.one_of(tuple(Rank)))
            window.pin(ids(page), found)
            pins[page] += 1
            idle = [p for p in idle if p != page]
        elif act == 5:
            held = [p for p in owner if pins[p]][:3]
            window.unpin(ids(*held), Rank.PASSED)
            for p in held:
                pins[p] -= 1
            for level in Rank:
                idle += [p for p in held if not pins[p] and rank[p] == level]
        elif act == 6 and has["window"]:
            mine, most, count = choices.below(OWNERS), choices.one_of(tuple(Rank)), choices.below(4)
            expected = sorted((p for p in idle if owner[p] == mine and rank[p] <= most), key=rank.__getitem__)[:count]
            taken = window.reclaim(count, most, mine)
            assert taken.tolist() == expected, "those of this owner, the lowest rank first, then the longest idle"
            window.unbind(taken)
            has["window"] -= set(expected)
            idle = [p for p in idle if p not in expected]
            for p in expected:
                rank[p] = 0
        for each in (window, whole):
            counted = [sum(owner[p] == number for p in has[each.name]) for number in range(OWNERS)]
            assert each.frames_by.tolist() == counted
        by_rank = [[sum(owner[p] == n and rank[p] == level for p in idle) for n in range(OWNERS)] for level in Rank]
        assert window.idle_by.tolist() == by_rank and window.num_idle == len(idle)
        assert owners.counts(ids(*owner)).tolist() == [list(owner.values()).count(n) for n in range(OWNERS)]
