"""What memory was: samples, marks and shortages, on a clock of the test."""

from __future__ import annotations

import json
from itertools import pairwise

from quire.observe.history import History


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def frames(used: int) -> dict[str, dict[str, dict[str, int]]]:
    return {"device": {"full": {"free": 10 - used, "private": used}}}


def test_a_day_is_kept_by_minutes_and_ten_minutes_by_seconds() -> None:
    clock = Clock()
    history = History(clock, clock)
    for second in range(1, 100_001):
        clock.now = second
        assert history.is_due
        history.sample(frames(second % 7), {"running": 1})
        assert not history.is_due
    found = history.to_dict()
    assert [each["at"] for each in found["seconds"]] == list(range(99_401, 100_001))
    minutes = [each["at"] for each in found["minutes"]]
    assert len(minutes) == 1440 and {b - a for a, b in pairwise(minutes)} == {60}
    assert minutes[-1] == 99_961
    json.dumps(found)


def test_the_highest_marks_have_the_time_when_they_were_reached_first() -> None:
    clock = Clock()
    history = History(clock, clock)
    for clock.now, used in ((1, 3), (2, 8), (3, 8), (4, 2)):
        history.sample(frames(used), {})
    history.mark("device", "full", "private", 9)
    assert {(each["state"], each["frames"], each["at"]) for each in history.highest()} == {
        ("free", 8, 4),
        ("private", 9, 4),
    }


def test_shortages_are_counted_and_recorded_once_in_a_second() -> None:
    clock = Clock()
    history = History(clock, clock)
    asked = []

    def holders() -> dict[str, object]:
        asked.append(clock.now)
        return {"requests": [{"request": "r1", "pages": 3}]}

    for step in range(40):
        clock.now = step / 10
        history.short("no pages", holders)
    found = history.to_dict()
    assert asked == [0, 1, 2, 3] == [each["at"] for each in found["shortages"]]
    assert found["num_shortages"] == 40
    assert found["shortages"][0]["requests"] == [{"request": "r1", "pages": 3}]
    for _ in range(1000):
        clock.now += 1
        history.short("no pages", holders)
    assert len(history.to_dict()["shortages"]) == 64
