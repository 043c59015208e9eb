"""Watchdogs: they say what is stuck and where, once, and when it goes on."""

from __future__ import annotations

import logging
import time
from contextlib import closing

import pytest

from quire.engine.watchdog import LaneWatch, Watchdog
from tests import waits


def stands_still(seconds: float) -> None:
    time.sleep(seconds)


def check_a_stuck_thread_is_told() -> None:
    with closing(Watchdog("the loop", 0.2)) as watchdog:
        until = time.monotonic() + waits.SOON_S
        while watchdog.num_stuck == 0:
            stands_still(0.05)
            assert time.monotonic() < until, "nothing was said"
        assert watchdog.stuck_s() > 0.2
        watchdog.tick()
        assert watchdog.stuck_s() == 0 and watchdog.longest_s > 0.2
        while watchdog.num_stuck == 1:
            stands_still(0.05)
            assert time.monotonic() < until, "the second time was not noticed"


def test_a_stuck_thread_is_told_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_a_stuck_thread_is_told()
    assert "the loop is stuck" in caplog.text and "stands_still" in caplog.text
    assert "the loop goes on" in caplog.text


def test_one_that_ticks_is_not_stuck(caplog: pytest.LogCaptureFixture) -> None:
    with closing(Watchdog("the loop", 30.0)) as watchdog:
        for _ in range(100):
            watchdog.tick()
        assert watchdog.num_stuck == 0 and watchdog.stuck_s() == 0
    assert not caplog.records


def check_lanes() -> None:
    now = 0.0
    marks: dict[str, object | None] = {"in": None, "out": None}
    watch = LaneWatch(["in", "out"], marks.__getitem__, limit_s=10.0, clock=lambda: now)
    for _ in range(5):
        now += 60
        assert watch.stuck() == {}, "nothing is in flight"
    marks["out"] = 1
    for _ in range(5):
        now += 60
        marks["in"] = now
        found = watch.stuck()
    assert found == {"out": 240.0}
    marks["out"] = 2
    assert watch.stuck() == {}
    now += 11
    assert watch.stuck() == {"in": 11.0, "out": 11.0}
    marks["out"] = None
    assert set(watch.stuck()) == {"in"}


def test_a_lane_is_stuck_that_has_something_and_finishes_nothing() -> None:
    check_lanes()
