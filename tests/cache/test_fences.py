"""Fences: what is given up while steps are in flight waits for exactly those."""

from __future__ import annotations

import numpy as np
import pytest

from quire.cache.hold import Fences, Retired


def retired(page: int) -> Retired:
    return Retired(np.array([page], dtype=np.int32))


def test_with_no_step_open_nothing_waits() -> None:
    fences = Fences()
    assert fences.retire(retired(1))
    assert fences.waiting == ()


def test_what_is_retired_waits_for_every_step_open_then() -> None:
    fences = Fences()
    one, two = fences.open(), fences.open()
    assert not fences.retire(retired(1))
    assert fences.num_open == 2
    assert fences.close(one) == []
    assert [item.pages.tolist() for item in fences.close(two)] == [[1]]
    assert fences.waiting == ()


def test_a_later_step_is_not_waited_for() -> None:
    fences = Fences()
    one = fences.open()
    fences.retire(retired(1))
    two = fences.open()
    fences.retire(retired(2))
    assert [item.pages.tolist() for item in fences.close(one)] == [[1]]
    assert [item.pages.tolist() for item in fences.close(two)] == [[2]]


def test_steps_may_settle_out_of_order() -> None:
    fences = Fences()
    one, two, three = fences.open(), fences.open(), fences.open()
    fences.retire(retired(1))
    assert fences.close(three) == []
    fences.retire(retired(2))
    assert fences.close(one) == []
    assert [item.pages.tolist() for item in fences.close(two)] == [[1], [2]]


def test_a_fence_closes_once() -> None:
    fences = Fences()
    fence = fences.open()
    fences.close(fence)
    with pytest.raises(KeyError):
        fences.close(fence)


def test_what_a_step_takes_is_known_from_the_last_ones() -> None:
    now = [0.0]
    fences = Fences(lambda: now[0])
    for took in (1.0, 2.0):
        fence = fences.open()
        now[0] += took
        fences.close(fence)
    assert fences.step_seconds == 1.2
