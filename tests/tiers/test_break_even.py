"""BreakEven: what is worth moving follows from what was measured, and a link that loses gets another chance."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quire.tiers.break_even import BreakEven, Rate
from quire.tiers.transfer import LANES, Lane

GB = 10**9
BYTES = 227_500  # of a token: break-even at 9.1 GB/s for 40,000 tokens/s

rates = st.floats(1e3, 1e6)
bandwidths = st.floats(1e6, 1e12)
latencies = st.floats(0.0, 1.0)
sizes = st.lists(st.integers(1, 100_000), min_size=1, max_size=12)


class Bench:
    """A clock, and the log of what links say."""

    def __init__(self, **settings: float) -> None:
        self.now = 0.0
        self.said: list[tuple[Lane, str]] = []
        self.even = BreakEven(
            lambda: self.now,
            on_change=lambda link, why: self.said.append((link, why)),
            **settings,  # type: ignore[arg-type]
        )

    def measure(self, link: Lane, bandwidth: float, latency: float = 0.0, tokens: int = 1000) -> None:
        self.even.moved(link, tokens * BYTES, latency + tokens * BYTES / bandwidth)

    def worth(self, link: Lane = Lane.LOAD, tokens: int = 1000) -> bool:
        return self.even.decide(link, tokens, tokens * BYTES)


def slow(**settings: float) -> Bench:
    """40,000 tokens/s beside a host link of 8 GB/s."""
    bench = Bench(**settings)
    bench.even.computed(4000, 0.1)
    bench.measure(Lane.LOAD, 8 * GB)
    return bench


def test_while_nothing_is_known_moving_is_tried() -> None:
    bench = Bench()
    assert bench.worth()
    assert (bench.even.compute_seconds(1000), bench.even.load_seconds(Lane.LOAD, 1000)) == (None, None)
    bench.even.computed(4000, 0.1)
    assert bench.worth()
    bench.measure(Lane.LOAD, 2 * GB)
    assert not bench.worth()


def test_tiny_steps_say_nothing() -> None:
    bench = Bench()
    bench.even.computed(8, 1.0)
    assert bench.even.compute_seconds(100) is None
    bench.even.computed(1000, 0.5)
    assert bench.even.compute_seconds(100) == pytest.approx(0.05)


def test_a_load_that_was_never_measured_is_as_fast_as_a_save() -> None:
    bench = Bench(losses=2)
    bench.even.computed(4000, 0.1)
    bench.measure(Lane.SAVE, 2 * GB)
    assert not bench.even.is_measured(Lane.LOAD)
    assert bench.even.load_seconds(Lane.LOAD, 2 * GB) == pytest.approx(1.0)
    assert not bench.worth()
    assert not bench.worth()
    assert bench.even.why_off(Lane.LOAD) == "recompute is cheaper below 9.1 GB/s; measured 2.0 GB/s"
    bench.now = 290.0
    assert not bench.worth()  # no trial so soon: a load would have to be faster than any save
    for _ in range(80):
        bench.measure(Lane.SAVE, 50 * GB)
    assert bench.worth()
    assert bench.even.why_off(Lane.LOAD), "as fast as a save is no measurement"
    assert not any(bench.worth() for _ in range(9)), "one request tries it"
    bench.measure(Lane.LOAD, 2 * GB)
    assert not bench.worth()  # what was measured counts
    bench.now = 1e6
    assert bench.worth()
    bench.measure(Lane.LOAD, 20 * GB)
    assert bench.worth()
    assert not bench.even.why_off(Lane.LOAD)


def test_a_link_that_loses_turns_itself_off_and_says_so_once() -> None:
    bench = slow(losses=5)
    assert [bench.worth() for _ in range(4)] == [False] * 4
    assert not bench.even.why_off(Lane.LOAD)
    assert not bench.worth()
    why = "recompute is cheaper below 9.1 GB/s; measured 8.0 GB/s"
    assert bench.even.why_off(Lane.LOAD)
    assert bench.even.why_off(Lane.LOAD) == why
    assert bench.said == [(Lane.LOAD, why)]
    assert [bench.worth() for _ in range(50)] == [False] * 50
    assert (len(bench.said), bench.even.turned_off_count) == (1, 1)
    assert not bench.even.why_off(Lane.FETCH)
    assert bench.even.why_off(Lane.FETCH) == ""


def test_a_win_ends_the_row_of_losses() -> None:
    bench = Bench(losses=3)
    bench.even.computed(4000, 0.1)
    for tokens in (1000, 3000) * 3:
        bench.measure(Lane.LOAD, 20 * GB, latency=0.02, tokens=tokens)
    for _ in range(10):
        assert [bench.worth(tokens=100), bench.worth(tokens=100), bench.worth(tokens=4000)] == [False, False, True]
    assert bench.even.turned_off_count == 0


def test_a_queue_is_waited_for_and_is_not_the_links_fault() -> None:
    bench = Bench(losses=2)
    bench.even.computed(4000, 0.1)
    bench.measure(Lane.LOAD, 40 * GB)
    for _ in range(10):
        assert not bench.even.decide(Lane.LOAD, 1000, 1000 * BYTES, queued_bytes=10_000 * BYTES)
        assert bench.even.decide(Lane.LOAD, 1000, 1000 * BYTES, queued_bytes=1000 * BYTES)
    assert not bench.even.why_off(Lane.LOAD)


def test_it_is_tried_again_after_a_time_that_doubles() -> None:
    bench = slow(losses=1)
    assert not bench.worth()
    trials = []
    for _ in range(1000):
        bench.now = round(bench.now + 0.1, 1)
        if bench.worth():
            trials.append(bench.now)
            assert not bench.worth(), "one at a time"
            bench.measure(Lane.LOAD, 8 * GB)
    gaps = [later - earlier for earlier, later in zip([0.0, *trials], trials, strict=False)]
    assert gaps[0] == pytest.approx(1.0)
    assert all(later >= 1.9 * earlier for earlier, later in pairwise(gaps))
    assert 4 <= len(trials) <= 7
    assert bench.even.turned_off_count == len(trials) + 1
    assert len(bench.said) == 1


def test_a_trial_that_was_never_measured_is_repeated() -> None:
    bench = slow(losses=1)
    assert not bench.worth()
    bench.now = 1.0
    assert bench.worth()
    assert [bench.worth() for _ in range(5)] == [False] * 5
    bench.now = 10.0
    assert bench.worth()


def test_a_link_that_became_fast_recovers_with_one_measurement() -> None:
    bench = slow(losses=3)
    for _ in range(20):
        bench.measure(Lane.LOAD, 8 * GB)
        assert not bench.worth()
    bench.now = 1.0
    assert bench.worth()
    bench.measure(Lane.LOAD, 40 * GB)
    assert bench.worth()
    assert not bench.even.why_off(Lane.LOAD)
    assert all(bench.worth() for _ in range(20))
    assert len(bench.said) == 1, "a word a minute"
    bench.now = 60.0
    assert bench.worth()
    assert bench.said[1:] == [(Lane.LOAD, "")]


def test_while_a_trial_is_under_way_no_other_request_takes_part() -> None:
    """Its SAVE is fast, as is what it was before: neither says anything about what it is now."""
    bench = slow(losses=1)
    for _ in range(9):
        bench.measure(Lane.SAVE, 100 * GB)
    assert not bench.worth()
    bench.now = 1.0
    assert bench.worth()
    for _ in range(100):
        bench.now += 0.001
        assert not bench.worth()
    assert bench.even.why_off(Lane.LOAD) and bench.even.turned_off_count == 1
    bench.measure(Lane.LOAD, 8 * GB)
    assert not bench.worth()
    assert bench.even.turned_off_count == 2
    bench.now += 1.0
    assert not bench.worth(), "the rest is two seconds now"


def test_who_asks_changes_nothing() -> None:
    bench = slow(losses=1)
    even = bench.even
    assert not any(even.pays(Lane.LOAD, 1000, 1000 * BYTES) for _ in range(50))
    assert not even.why_off(Lane.LOAD)
    assert not bench.worth()
    bench.now = 1.0
    assert all(even.pays(Lane.LOAD, 1000, 1000 * BYTES) for _ in range(50)), "it would be tried"
    assert bench.worth()
    assert not even.pays(Lane.LOAD, 1000, 1000 * BYTES)
    even.untried(Lane.LOAD)
    assert bench.worth(), "by another one"


def test_what_a_trial_would_lose_says_how_long_it_has_to_wait() -> None:
    bench = slow(losses=1)
    for _ in range(50):
        bench.measure(Lane.LOAD, 0.1 * GB)
    assert not bench.worth()
    bench.now = 100.0
    assert not bench.worth(), "2.25 s are 2 % of 112"
    assert bench.worth(tokens=500)


def test_moves_that_bring_nothing_turn_their_link_off() -> None:
    bench = Bench()
    even = bench.even
    even.computed(4000, 0.1)
    bench.measure(Lane.FETCH, 100 * GB)
    for count in range(3):
        assert bench.worth(Lane.FETCH)
        assert not even.why_off(Lane.FETCH), count
        even.failed(Lane.FETCH, 0.2)
    why = "3 in a row brought less than half of what they were for, the last after 200.00 ms"
    assert (even.why_off(Lane.FETCH), bench.said) == (why, [(Lane.FETCH, why)])
    assert not bench.worth(Lane.FETCH), "how fast it was when it worked says nothing"
    trials = []
    for _ in range(1000):
        bench.now += 0.1
        if bench.worth(Lane.FETCH):
            trials.append(bench.now)
            assert not bench.worth(Lane.FETCH)
            even.failed(Lane.FETCH, 0.2)
    assert 4 <= len(trials) <= 7 and even.turned_off_count == len(trials) + 1
    while not bench.worth(Lane.FETCH):
        bench.now += 0.1
    bench.measure(Lane.FETCH, 100 * GB)
    assert bench.worth(Lane.FETCH)
    assert not even.why_off(Lane.FETCH)


def test_a_failure_between_others_is_none() -> None:
    bench = Bench()
    for _ in range(10):
        bench.even.failed(Lane.FETCH, 0.2)
        bench.even.failed(Lane.FETCH, 0.2)
        bench.even.moved(Lane.FETCH, 50, 0.2)
    assert not bench.even.why_off(Lane.FETCH)


def test_the_look_before_a_fetch_is_counted_in() -> None:
    bench = Bench()
    bench.even.computed(4000, 0.1)
    bench.measure(Lane.FETCH, 100 * GB)
    assert bench.worth(Lane.FETCH)
    bench.even.moved(Lane.LOOK, 1, 0.1)
    assert not bench.worth(Lane.FETCH)
    assert bench.worth(Lane.FETCH, tokens=10_000)


@pytest.mark.parametrize("often", [True, False])
def test_a_link_that_won_often_starts_afresh(often: bool) -> None:
    bench = slow(losses=3)
    for _ in range(5):  # trials that fail, so that the rest grows
        for _ in range(3):
            assert not bench.worth()
        bench.now += 1000.0
        assert bench.worth()
        bench.measure(Lane.LOAD, 8 * GB)
    assert not bench.worth()
    bench.now += 1000.0
    assert bench.worth()
    for _ in range(8 if often else 2):
        bench.measure(Lane.LOAD, 40 * GB)
        assert bench.worth()
        assert bench.worth(), "the same measurement, which counts once"
    for _ in range(50):
        bench.measure(Lane.LOAD, 8 * GB)
    assert not bench.worth()
    assert not bench.even.why_off(Lane.LOAD), "one loss is no row"
    assert [bench.worth(), bench.worth(), bool(bench.even.why_off(Lane.LOAD))] == [False, False, True]
    bench.now += 1.0
    assert bench.worth() is often, "the first rest is short again"


def test_a_fetch_is_followed_by_a_load() -> None:
    bench = Bench(losses=1)
    bench.even.computed(4000, 0.1)  # 25 ms for 1000 tokens
    bench.measure(Lane.FETCH, 12 * GB)  # 19 ms
    assert bench.worth(Lane.FETCH)
    bench.measure(Lane.LOAD, 20 * GB)  # 11 ms
    assert not bench.worth(Lane.FETCH)
    assert bench.worth(Lane.LOAD)
    assert bench.even.why_off(Lane.FETCH) == "recompute is cheaper below 16.7 GB/s; measured 12.0 GB/s"


def test_where_no_bandwidth_would_do_it_says_that() -> None:
    bench = Bench(losses=1)
    bench.even.computed(1000, 0.01)
    for tokens in (100, 400, 1000):
        bench.measure(Lane.LOAD, 40 * GB, latency=0.25, tokens=tokens)
    assert not bench.worth()
    assert "at any bandwidth: 10.00 ms, and 250.00 ms before" in bench.even.why_off(Lane.LOAD)


def test_a_deadline_is_what_computing_takes_longer_than_the_load_behind_it() -> None:
    bench = Bench()
    assert bench.even.deadline(1000, 1000 * BYTES) > 0
    bench.even.computed(4000, 0.1)
    assert bench.even.deadline(1000, 1000 * BYTES) == pytest.approx(0.025)
    bench.measure(Lane.LOAD, 22.75 * GB)
    assert bench.even.deadline(1000, 1000 * BYTES) == pytest.approx(0.015)
    bench.measure(Lane.LOAD, 0.1 * GB)
    assert bench.even.deadline(1000, 1000 * BYTES) == 0.0


# -- whatever was measured


def learned(rate: float, bandwidth: float, latency: float, seen: list[int]) -> Bench:
    bench = Bench()
    bench.even.computed(10_000, 10_000 / rate)
    for tokens in seen:
        bench.measure(Lane.LOAD, bandwidth, latency, tokens)
    return bench


@given(rates, bandwidths, latencies, sizes, st.integers(1, 100_000), st.floats(1.01, 100))
def test_faster_links_and_slower_devices_only_make_moving_better(
    rate: float, bandwidth: float, latency: float, seen: list[int], tokens: int, factor: float
) -> None:
    here = learned(rate, bandwidth, latency, seen)
    faster = learned(rate, bandwidth * factor, latency, seen)
    sooner = learned(rate, bandwidth, latency / factor, seen)
    slower = learned(rate / factor, bandwidth, latency, seen)
    assume(abs((here.even.load_seconds(Lane.LOAD, tokens * BYTES) or 0) * rate / tokens - 1) > 1e-6)
    if here.worth(tokens=tokens):
        assert faster.worth(tokens=tokens)
        assert sooner.worth(tokens=tokens)
        assert slower.worth(tokens=tokens)


@given(st.data())
def test_nothing_is_moved_that_is_estimated_to_cost_more(data: st.DataObject) -> None:
    bench = Bench(losses=data.draw(st.integers(1, 4)))
    links = st.sampled_from([Lane.LOAD, Lane.FETCH])
    for _ in range(data.draw(st.integers(1, 60))):
        bench.now += data.draw(st.sampled_from([0.0, 0.1, 1.0, 50.0]))
        link, tokens = data.draw(links), data.draw(st.integers(1, 20_000))
        match data.draw(st.integers(0, 2)):
            case 0:
                bench.measure(link, data.draw(bandwidths), data.draw(latencies), tokens)
            case 1:
                bench.even.computed(tokens, tokens / data.draw(rates))
            case _:
                queued = data.draw(st.integers(0, 10**9))
                if bench.even.decide(link, tokens, tokens * BYTES, queued):
                    load = bench.even.load_seconds(link, tokens * BYTES, queued)
                    compute = bench.even.compute_seconds(tokens)
                    is_trial = bench.even.why_off(link) and not bench.even.is_measured(link)
                    assert load is None or compute is None or load <= compute or is_trial
    changes = {link: [bool(why) for said, why in bench.said if said is link] for link in LANES}
    for found in changes.values():
        assert found == [place % 2 == 0 for place in range(len(found))], "off and on take turns"


@given(rates, st.floats(1e6, 1e10), sizes, st.integers(100, 20_000))
def test_whatever_was_slow_recovers_when_it_is_fast(
    rate: float, bandwidth: float, seen: list[int], tokens: int
) -> None:
    bench = learned(rate, bandwidth, 0.0, seen)
    for _ in range(40):
        bench.worth(tokens=tokens)
        bench.now += 0.01
    for _ in range(3):
        bench.now += 300_000.0
        if bench.worth(tokens=tokens):
            bench.measure(Lane.LOAD, 1000 * rate * BYTES, 0.0, tokens)
    assert bench.worth(tokens=tokens)
    assert not bench.even.why_off(Lane.LOAD)


# -- rates


def test_a_rate_tells_a_start_from_the_rest() -> None:
    rate = Rate()
    assert (rate.per_second, rate.start, rate.mean, rate.seconds(1)) == (None, None, None, None)
    for amount in (10, 1000, 100, 500) * 3:
        rate.add(amount, 0.5 + amount / 200)
    assert rate.per_second == pytest.approx(200)
    assert rate.start == pytest.approx(0.5)
    assert rate.seconds(2000) == pytest.approx(10.5)


def test_from_one_size_no_start_can_be_told() -> None:
    rate = Rate()
    for _ in range(5):
        rate.add(100, 1.5)
    assert (rate.start, rate.seconds(100)) == (0.0, pytest.approx(1.5))
    rate.add(0, 1.0)
    rate.add(1, 0.0)
    assert rate.seconds(100) == pytest.approx(1.5)


def test_a_rate_forgets() -> None:
    rate = Rate()
    for _ in range(50):
        rate.add(100, 10.0)
    for _ in range(50):
        rate.add(100, 1.0)
    assert rate.per_second == pytest.approx(100, rel=0.1)


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1e3)), min_size=1, max_size=30), st.floats(0, 1e9))
def test_an_estimate_is_never_negative_nor_less_for_more(seen: list[tuple[float, float]], amount: float) -> None:
    rate = Rate()
    for size, seconds in seen:
        rate.add(size, seconds)
    less, more = rate.seconds(amount), rate.seconds(2 * amount + 1)
    assert less is not None
    assert more is not None
    assert 0 <= less <= more
    assert (rate.start or 0) >= 0
    assert (rate.per_second or 0) > 0
