"""The scheduler's decisions one by one, on caches small enough to follow by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.cache import KVCache
from quire.errors import ContextTooLong, InvalidInput, RequestTooLarge
from quire.offload import Offloads
from quire.scheduler.policy import scheduling_policy
from quire.scheduler.request import Request, RequestState
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.step import Step
from quire.spec.events import Namespace
from quire.testing import FakeModel, small_plan
from tests.clear import clear


class Engine:
    """A scheduler that runs to the end, one step after the other."""

    def __init__(self, num_pages: int, page_size: int, *, policy: str = "fcfs", **limits: Any) -> None:
        settings = {"max_running": 4, "max_tokens": 64} | limits
        rows = max(8, settings["max_running"])
        plan = small_plan(num_pages, page_size, context=settings.pop("context", 0), max_requests=rows)
        self.cache = KVCache(plan, offload=Offloads())
        self.scheduler = Scheduler(self.cache, scheduling_policy(policy), **settings)
        self.model = FakeModel(self.cache)

    def add(self, name: str, prompt: list[int], max_tokens: int = 4, **more: Any) -> Request:
        params = SamplingParams(max_tokens=max(1, max_tokens))
        request = Request(name, np.array(prompt, dtype=np.int32), params, max_tokens=max_tokens, **more)
        self.scheduler.add(request)
        return request

    def step(self) -> dict[str, int]:
        """One step; returns the tokens computed per request."""
        step = self.scheduler.schedule()
        names = [request.request_id for request in step.requests]
        computed = dict(zip(names, step.counts.tolist(), strict=True))
        self.finish_step(step)
        return computed

    def finish_step(self, step: Step) -> None:
        if len(step):
            launched = self.model.launch(step)
            self.scheduler.settle(step, self.model.execute(launched))
            self.cache.close_fence(launched.fence)

    def run(self) -> None:
        for _ in range(1_000):
            if not self.scheduler.has_requests:
                return
            self.step()
        raise AssertionError("it never ends")


def test_prompts_are_chunked_and_decodes_go_first() -> None:
    engine = Engine(32, 4, max_tokens=6)
    engine.add("a", list(range(4)))
    assert engine.step() == {"a": 4}
    engine.add("b", list(range(10, 20)))
    assert engine.step() == {"a": 1, "b": 5}
    assert engine.step() == {"a": 1, "b": 5}
    assert engine.step() == {"a": 1, "b": 1}


def test_the_second_request_waits_for_the_first_ones_prefix() -> None:
    engine = Engine(32, 2, max_tokens=8)
    first = engine.add("first", [1, 2, 3, 4, 5, 6])
    second = engine.add("second", [1, 2, 3, 4, 9, 9])
    other = engine.add("other", [1, 2, 3, 4, 9, 9], namespace=Namespace(salt="x"))
    assert engine.step() == {"first": 6, "other": 2}
    assert second.wait_reason == "waits for the prefix that first is computing"
    assert "second" in engine.step()
    assert (first.num_cached, second.num_cached, other.num_cached) == (0, 4, 0)
    engine.run()
    for request in (first, second, other):
        assert request.output_tokens.tolist() == engine.model.solo(request)


def test_who_waits_says_why_with_numbers() -> None:
    engine = Engine(6, 2, max_running=1)
    engine.add("a", [1, 2, 3])
    b = engine.add("b", [4, 5, 6])
    engine.step()
    assert b.wait_reason == "1 requests run, which is the limit"
    engine = Engine(6, 2)
    engine.add("a", [1, 2, 3, 4, 5, 6, 7])
    b = engine.add("b", [4, 5, 6])
    engine.step()
    assert (
        b.wait_reason == "needs 2 pages of 'full' and 1 in reserve; 2 are available, 1 running requests hold the rest"
    )
    engine.run()
    assert b.finish_reason == "length"


def test_the_last_in_order_is_preempted_and_keeps_what_it_committed() -> None:
    engine = Engine(8, 1)
    first = engine.add("first", [1, 2], max_tokens=6)
    second = engine.add("second", [3, 4], max_tokens=6)
    engine.run()
    assert first.num_preemptions == 0
    assert second.num_preemptions == engine.scheduler.num_preemptions > 0
    assert second.num_cached == 0, "what it reports is the hit it began with"
    for request in (first, second):
        assert request.output_tokens.tolist() == engine.model.solo(request)


def test_priority_comes_before_arrival() -> None:
    engine = Engine(32, 2, max_running=1)
    late = engine.add("low", [1, 2])
    first = engine.add("high", [3, 4], priority=1)
    assert list(engine.step()) == ["high"]
    assert (first.state, late.state) == (RequestState.RUNNING, RequestState.WAITING)


def test_longest_prefix_first_reuses_before_it_is_evicted() -> None:
    for policy, expected in (("fcfs", ["cold"]), ("lpm", ["warm"])):
        engine = Engine(32, 2, policy=policy, max_running=1)
        engine.add("seed", [1, 2, 3, 4, 5], max_tokens=1)
        engine.run()
        engine.add("cold", [9, 9, 9, 9])
        engine.add("warm", [1, 2, 3, 4, 7])
        assert list(engine.step()) == expected


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match=r"'sjf'.*fcfs, lpm"):
        scheduling_policy("sjf")


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_at_any_step_leaves_nothing_behind(steps: int) -> None:
    engine = Engine(8, 2, max_tokens=3)
    request = engine.add("a", list(range(7)))
    for _ in range(steps):
        engine.step()
    ended = request.state is RequestState.FINISHED
    assert engine.scheduler.abort("a") is (None if ended else request)
    assert request.state is RequestState.FINISHED
    assert not engine.scheduler.has_requests
    clear(engine.cache)
    assert engine.cache.pages.num_free_pages == 8
    assert engine.scheduler.abort("a") is engine.scheduler.abort("unknown") is None


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
@pytest.mark.parametrize("offset", [-2, -1, 0, 1, 2])
def test_a_request_around_the_limit_runs_alone_or_is_refused(page_size: int, offset: int) -> None:
    for context in (1_000, 6, 4):
        engine = Engine(5, page_size, context=context, max_tokens=3)
        total = engine.cache.plan.largest_request + offset
        for prompt in range(1, total):
            request = (str(prompt), [prompt] * prompt, total - prompt)
            if offset > 0:
                kind = ContextTooLong if total > context else RequestTooLarge
                with pytest.raises(kind, match=rf"{prompt} prompt tokens? and {total - prompt} output tokens?"):
                    engine.add(*request)
            else:
                added = engine.add(*request)
                engine.run()
                assert added.num_outputs == total - prompt
                assert added.num_preemptions == 0


def test_an_id_in_use_is_refused() -> None:
    engine = Engine(8, 2)
    engine.add("a", [1])
    with pytest.raises(InvalidInput, match="'a' is in use"):
        engine.add("a", [2])
    engine.run()
    engine.add("a", [2])


def test_a_request_that_may_draw_nothing_is_refused_instead_of_waiting_for_ever() -> None:
    engine = Engine(8, 2)
    with pytest.raises(InvalidInput):
        engine.add("a", [1], max_tokens=0)
    assert not engine.scheduler.has_requests


def test_a_request_that_ends_by_a_stop_token_keeps_it_as_its_last() -> None:
    engine = Engine(8, 2)
    request = engine.add("a", [1, 2], max_tokens=8, stop_ids=frozenset(range(3)))
    engine.run()
    assert (request.finish_reason, request.num_outputs) == ("stop", 1)
    assert request.stop_token == request.output_tokens[0]


def test_a_request_that_is_preempted_as_it_begins_is_admitted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(6, 1)
    engine.add("first", [1, 2, 3, 4], max_tokens=2)
    engine.step()
    late = engine.add("late", [5, 6, 7], max_tokens=1)
    admission = engine.cache.admission
    with monkeypatch.context() as patch:
        patch.setattr(admission, "why_not", lambda *asked: "")
        step = engine.scheduler.schedule()
    assert late.state is RequestState.WAITING and late.num_preemptions == 1
    assert step.admitted == [] and late not in step.requests
    engine.finish_step(step)
    admitted = []
    while engine.scheduler.has_requests:
        step = engine.scheduler.schedule()
        admitted += step.admitted
        engine.finish_step(step)
    assert admitted == [late] and late.finish_reason == "length"


def test_the_decodes_that_fit_beside_a_step_in_flight_are_found_in_few_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(32 + 32 + 20, 1, max_running=32)
    requests = [engine.add(str(at), [at + 1], max_tokens=4) for at in range(32)]
    engine.step()
    engine.scheduler.schedule()
    fence = engine.cache.open_fence()
    real, attempts = engine.cache.extend, []
    monkeypatch.setattr(engine.cache, "extend", lambda kvs, counts: (attempts.append(len(kvs)), real(kvs, counts)))
    step = engine.scheduler.schedule()
    assert step.requests == requests[:20] and engine.scheduler.num_preemptions == 0
    assert len(attempts) <= 2 + 5, attempts
    engine.cache.close_fence(fence)
    engine.cache.audit()
