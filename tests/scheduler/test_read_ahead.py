"""What the scheduler has fetched from storage for waiting requests, and for how long it is held."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from quire.offload import prefetcher as reading_ahead
from quire.scheduler.policy import scheduling_policy
from quire.scheduler.request import Request
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.spec.ids import Ids
from tests.offload.cached_bytes import ALICE, PAGE, asking, tokens_of
from tests.offload.tiered_cache import TieredCache


def prompt(number: int, pages: int = 3) -> Ids:
    return asking(tokens_of(range(10 * number, 10 * number + pages)))


class Queue:
    """A scheduler on a cache that was restarted: some prompts are in the store."""

    def __init__(self, stored: list[Ids], num_pages: int = 16, host: int = 64, max_running: int = 1) -> None:
        before = TieredCache(num_pages=64, host=256)
        for tokens in stored:
            before.compute(tokens)
        before.drain()
        self.world = TieredCache(num_pages=num_pages, host=host, store=before.store)
        self.scheduler = Scheduler(
            self.world.cache,
            scheduling_policy("fcfs"),
            max_running=max_running,
            max_tokens=16 * PAGE,
            ahead=self.world.ahead,
        )
        self.begun: list[str] = []

    def add(self, name: str, tokens: Ids, max_tokens: int = 2, priority: int = 0) -> Request:
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(name, tokens, params, max_tokens=max_tokens, namespace=ALICE, priority=priority)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        step = self.scheduler.schedule()
        self.begun += [request.request_id for request in step.admitted]
        self.scheduler.settle(step, np.full(len(step.draws), 7))
        if not len(step):
            self.world.advance()
        self.world.cache.audit()

    def run(self) -> None:
        for _ in range(2_000):
            if not self.scheduler.has_requests:
                break
            self.step()
        else:
            raise AssertionError([request.wait_reason for request in self.scheduler.waiting])
        self.world.drain()
        prefetcher = self.world.prefetcher
        assert prefetcher is not None and not prefetcher._holding and not prefetcher.in_flight
        assert self.world.cache.tree.num_protected == 0

    def num_held(self) -> int:
        assert self.world.prefetcher is not None
        return len(self.world.prefetcher._holding)


@pytest.fixture
def two() -> Iterator[None]:
    """Two requests read ahead at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_ahead, "_MOST_AT_ONCE", 2)
        yield


def test_what_was_fetched_is_there_when_its_turn_comes() -> None:
    queue = Queue([prompt(1)], num_pages=12, host=12)
    for number in range(20, 26):  # each as large as device and host
        queue.add(f"before {number}", prompt(number, 10))
    request = queue.add("a", prompt(1))
    queue.run()
    assert queue.begun[-1] == "a" and request.use.num_storage_tokens == 3 * PAGE


def test_those_that_are_next_read_ahead_and_others_when_they_come_near(two: None) -> None:
    queue = Queue([prompt(number) for number in range(1, 7)])
    queue.add("first", prompt(30, 8), max_tokens=20)
    requests = [queue.add(str(number), prompt(number)) for number in range(1, 7)]
    for _ in range(12):
        queue.step()
        assert queue.num_held() <= 2
    assert [bool(request.prefetch or request.prefetched) for request in requests] == [True, True] + [False] * 4
    queue.run()
    assert [request.use.num_storage_tokens for request in requests] == [3 * PAGE] * 6
    queue.world.close()


def test_who_comes_first_reads_ahead_before_who_came_before(two: None) -> None:
    queue = Queue([prompt(number) for number in range(1, 4)])
    early = [queue.add(str(number), prompt(number)) for number in (1, 2)]
    urgent = queue.add("3", prompt(3), priority=1)
    assert all(request.prefetch for request in early) and urgent.prefetch is None
    queue.step()
    assert early[0].prefetch is not None and early[1].prefetch is None, "the last gives way"
    queue.run()
    assert queue.begun[0] == "3"
    assert [request.use.num_storage_tokens for request in (urgent, *early)] == [3 * PAGE] * 3


def test_who_goes_away_holds_nothing() -> None:
    queue = Queue([prompt(1), prompt(2)])
    queue.add("first", prompt(30, 8), max_tokens=20)
    queue.add("a", prompt(1))
    queue.add("b", prompt(2))
    while queue.world.advance():
        pass
    assert queue.num_held() == 2
    queue.scheduler.abort("a")
    assert queue.num_held() == 1
    queue.world.cache.audit()
    queue.run()
    assert queue.begun == ["first", "b"]


def test_what_others_hold_keeps_no_request_waiting_for_ever() -> None:
    """They hold what they found on the device, too; the first in the queue needs nearly all of it."""
    stored = [prompt(number) for number in range(1, 6)]
    queue = Queue(stored, num_pages=12)
    for tokens in stored:
        queue.world.compute(tokens[: 2 * PAGE])
    queue.world.drain()
    for number, tokens in enumerate(stored):
        queue.add(str(number), tokens)
    while queue.world.advance():
        pass
    assert queue.num_held() == 5
    queue.add("large", prompt(40, 10), priority=1)
    queue.run()
    assert queue.begun[0] == "large" and len(queue.begun) == 6


def test_requests_that_begin_alike_hold_until_each_has_begun() -> None:
    queue = Queue([np.concatenate((tokens_of((1, 2)), tokens_of((number,)))) for number in (5, 6)])
    queue.add("first", prompt(30, 8), max_tokens=20)
    requests = [queue.add(str(n), asking(np.concatenate((tokens_of((1, 2)), tokens_of((n,)))))) for n in (5, 6)]
    queue.run()
    assert sum(request.use.num_storage_tokens for request in requests) >= 3 * PAGE
    assert [request.num_cached for request in requests] == [3 * PAGE] * 2


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_damaged_on_the_host_is_had_from_storage(place: int) -> None:
    queue = Queue([prompt(1)])
    world = queue.world
    assert world.fetch(prompt(1)[:-1]) == 3 * PAGE
    world.damage(prompt(1), place)
    request = queue.add("a", prompt(1))
    queue.run()
    assert world.tiers is not None and request.kv is None
    counters = world.tiers.counters
    assert dict(counters.defects) == {("host", "digest"): 1}
    assert counters.fetched_frames == 3 + 3 - place, "what is behind the good pages comes again"
    world.close()
