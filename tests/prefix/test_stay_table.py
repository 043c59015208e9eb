"""StayTable: hazards and worth against plain sums over stays, and that memory and the time of a call are bounded."""

from __future__ import annotations

import numpy as np
import pytest

from quire.prefix import stay_table
from quire.prefix.stay_table import CLASSES, FIRST_S, OPEN, PER_OCTAVE, PRIOR, StayTable, worth

GROUPS, SIZE = 3, 4
EDGES = [0.0, *(FIRST_S * 2 ** (at / PER_OCTAVE) for at in range(CLASSES))]


def class_of(age: float) -> int:
    return next(at for at in range(CLASSES) if age < EDGES[at + 1] or at == CLASSES - 1)


def fitted(table: StayTable, now: float) -> StayTable:
    table._fit_at = 0
    table.fit(now)
    while table.stale:
        table.refresh()
    return table


def table_of(records: dict[int, list[float | None]], now: float = 10_000.0) -> StayTable:
    """A table of stays by kind: ages at which they ended, or None: open until now."""
    table = StayTable(GROUPS, SIZE)
    for kind, ages in records.items():
        for age in ages:
            number = table.begin(kind, 0.0, 0.0)
            if age is not None:
                table.end(number, age)
    return fitted(table, now)


def check_hazards(seed: int) -> None:
    """Each hazard is what the drawn stays say, counted one by one."""
    draw = np.random.default_rng(seed)
    stays = []
    table = StayTable(GROUPS, SIZE)
    for _ in range(400):
        kind, since = int(draw.integers(GROUPS * SIZE)), float(draw.random() * 1_000)
        end = since + float(draw.exponential(20 * (kind + 1)))
        number = table.begin(kind, since, since)
        if end < 1_000:
            table.end(number, end)
        stays.append((kind, min(end, 1_000) - since, end < 1_000))
    fitted(table, 1_000.0)

    def counts(kinds: range) -> list[tuple[float, float]]:
        """Smoothed ends, and stays at risk, by class."""
        own = [(class_of(age), ended) for kind, age, ended in stays if kind in kinds]
        found = []
        for at in range(CLASSES):
            ends = [sum(ended and place == at + by for place, ended in own) for by in (-1, 0, 1)]
            risk = sum(place >= at for place, _ in own) - sum(place == at and not ended for place, ended in own) / 2
            found.append((min((ends[0] + 2 * ends[1] + ends[2]) / 4, risk), risk))
        return found

    each = [counts(range(kind, kind + 1)) for kind in range(GROUPS * SIZE)]
    above = 0.0
    for at in range(CLASSES):
        ends, risk = (sum(own[at][which] for own in each) for which in (0, 1))
        before = (0.3, 0.2 / PER_OCTAVE)[at] if at < 2 else stay_table.FADES * above
        above = (ends + PRIOR * before) / (risk + PRIOR)
        for kind in range(GROUPS * SIZE):
            group = each[kind // SIZE * SIZE : (kind // SIZE + 1) * SIZE]
            ends, risk = (sum(own[at][which] for own in group) for which in (0, 1))
            lent = (ends + PRIOR * above) / (risk + PRIOR)
            expected = (each[kind][at][0] + PRIOR * lent) / (each[kind][at][1] + PRIOR)
            assert table._hazards[kind, at] == pytest.approx(expected), (kind, at)


@pytest.mark.parametrize("seed", range(3))
def test_hazards_are_shrunk_to_those_of_related_kinds(seed: int) -> None:
    check_hazards(seed)


def check_worth(seed: int) -> None:
    """Worth at each edge is the greatest ratio of hits to time, in plain loops."""
    hazards = np.random.default_rng(seed).random(CLASSES) ** 3
    found = worth(hazards)
    for start in range(CLASSES):
        left, hits, held, best = 1.0, 0.0, 0.0, 0.0
        for at in range(start, CLASSES):
            ended = left * hazards[at]
            held += (left - ended / 2) * (EDGES[at + 1] - EDGES[at])
            left, hits = left - ended, hits + ended
            best = max(best, hits / held)
        assert found[start] == pytest.approx(best)


@pytest.mark.parametrize("seed", range(3))
def test_worth_is_the_greatest_ratio_of_hits_to_time(seed: int) -> None:
    check_worth(seed)


def test_with_no_record_the_older_is_worth_less() -> None:
    table = StayTable(GROUPS, SIZE)
    ages = [0.0, 0.1, 1.0, 10.0, 100.0, 1_000.0, 10_000.0]
    found = [table.of(kind, age) for kind in (0, 5) for age in ages]
    assert found[:7] == found[7:] == sorted(found[:7], reverse=True), "not LRU at the start"
    assert len(set(found)) == 7


def check_return() -> None:
    """A leaf is worth most shortly before its kind returns, and little after that."""
    table = table_of({0: [float(age) for age in range(90, 110)] * 40})
    assert table.of(0, 20) < table.of(0, 50) < table.of(0, 85)
    assert table.of(0, 400) < table.of(0, 20) / 3
    assert table.of_all(np.array([0, 0]), np.array([20.0, 400.0])).tolist() == [table.of(0, 20), table.of(0, 400)]


def test_a_leaf_is_worth_most_shortly_before_its_kind_returns() -> None:
    check_return()


def check_outlook(seed: int) -> None:
    """The chance of a use, and the median time to it, of many drawn stays with these hazards."""
    draw = np.random.default_rng(seed)
    table = table_of({0: [float(age) for age in draw.exponential(40, 400)] + [None] * 100})
    hazards, age = table._hazards[0], 20.0
    low = class_of(age)
    times = []
    for _ in range(4_000):
        at = next((at for at in range(low, CLASSES) if draw.random() < hazards[at]), None)
        if at is not None:
            times.append(EDGES[at] + draw.random() * (EDGES[at + 1] - EDGES[at]) - age)
    chance, seconds = table.outlook(0, age)
    assert chance == pytest.approx(len(times) / 4_000, abs=0.03)
    assert seconds == pytest.approx(float(np.median(times)), rel=0.1, abs=1.0)
    assert table.outlook(0, 1e9) == (pytest.approx(hazards[-1]), 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_the_outlook_is_that_of_drawn_stays(seed: int) -> None:
    check_outlook(seed)


def test_a_stay_changes_its_kind_while_it_is_open() -> None:
    table = StayTable(GROUPS, SIZE)
    first, second = table.begin(0, 0.0, 0.0), table.begin(0, 0.0, 0.0)
    table.change(first, 5)
    table.end(first, 3.0)
    table.end(second, 4.0)
    table.change(second, 5)
    assert (table._ended[5].sum(), table._ended[0].sum()) == (1, 1) and (table._kinds < 0).all()
    for number in range(OPEN):
        table.begin(1, float(number), float(number))
    table.change(first, 7)
    assert 7 not in table._kinds, "a stay that is not watched any more changes another one"


def check_open() -> None:
    """Stays that are open make a kind worth less, and only up to their age."""
    ended: list[float | None] = [30.0] * 100
    often, seldom = table_of({0: ended}).of(0, 10), table_of({0: [*ended, *[None] * 300]}).of(0, 10)
    young = table_of({0: [*ended, *[None] * 300]}, now=5.0).of(0, 10)
    assert seldom < often / 2 and young > 0.9 * often


def test_a_stay_that_is_open_counts_up_to_its_age() -> None:
    check_open()


def check_bounded_table(patch: pytest.MonkeyPatch) -> None:
    """Of more stays than are watched, the oldest count up to the age that they have reached."""
    patch.setattr(stay_table, "MEMORY", 3_000)
    table = StayTable(GROUPS, SIZE)
    first = table.begin(0, 0.0, 0.0)
    for number in range(3 * OPEN):
        table.begin(1, number / 100, number / 100)
        if number % 500 == 0:
            table.fit(number / 100)
    assert table._left[0].sum() > 0 and np.flatnonzero(table._left[0]).tolist() == [class_of(OPEN / 100)]
    table.end(first, 1_000.0)
    assert table._ended.sum() == 0, "a stay that is not watched any more is counted"
    assert table._left.sum() < 2 * OPEN, "nothing fades"


def test_the_oldest_stays_are_not_watched_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    check_bounded_table(monkeypatch)


def test_what_is_dropped_or_reset_counts_no_more() -> None:
    table = table_of({0: [5.0] * 30, SIZE: [7.0] * 20})
    table.drop(table.begin(1, 0.0, 0.0))
    table.reset(range(SIZE))
    open_of_reset = table.begin(2, 0.0, 0.0)
    table.reset(range(SIZE))
    table.end(open_of_reset, 3.0)
    assert table._ended.sum() == table._ended[SIZE].sum() == 20
    assert table._left.sum() == 0 and (table._kinds < 0).all()


def check_bounded() -> None:
    with pytest.MonkeyPatch.context() as patch:
        check_bounded_table(patch)


TABLE = [
    lambda: check_hazards(0),
    lambda: check_worth(0),
    lambda: check_outlook(0),
    check_return,
    check_open,
    check_bounded,
]
