"""Request: how its lengths move in the rows of those that run, and where its tokens are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.cache import KVCache
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.scheduler.policy import scheduling_policy
from quire.scheduler.request import Request
from quire.scheduler.rows import RunningRows
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.spec.catalogue import CATALOGUE
from quire.spec.model import ModelSpec
from quire.testing import small_plan


def a_request(prompt: int = 3, max_tokens: int = 4, **more: Any) -> Request:
    params = more.pop("params", SamplingParams(max_tokens=max_tokens))
    return Request("r", np.arange(prompt, dtype=np.int32), params, max_tokens=max_tokens, **more)


class Row:
    """A request that runs alone."""

    def __init__(self, request: Request) -> None:
        self.request = request
        cache = KVCache(small_plan(256, 16))
        request.kv = cache.begin(request.tokens)
        self.rows = RunningRows(cache.rows.serials, cache.plan.pages_per_row * 16)
        self.rows.bind(request)
        self.of = self.rows.of([request])

    @property
    def num_ready(self) -> int:
        return int(self.rows.ready(self.of)[0])

    def launch(self) -> Any:
        return self.rows.step(self.of, self.rows.ready(self.of))

    def draw(self, token: int) -> None:
        """Launch what is ready, and settle it: this token is drawn."""
        self.rows.settle(self.launch(), np.array([token]), None)


def test_tokens_grow_to_the_end_of_the_row() -> None:
    request = a_request(prompt=3, max_tokens=2_000)
    row = Row(request)
    for token in range(2_000):
        assert request.finish_reason is None
        row.draw(token)
    assert request.finish_reason == "length"
    row.rows.unbind(request)
    row.rows.tokens[:] = 0
    assert request.output_tokens.tolist() == list(range(2_000))
    assert request.tokens[:3].tolist() == [0, 1, 2]
    assert (request.num_tokens, request.num_outputs) == (2_003, 2_000)


@pytest.mark.parametrize(("min_tokens", "ends_after"), [(0, 1), (1, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("stops", [[7], [9, 7], range(3, 12)])
def test_a_stop_token_counts_from_min_tokens_on(stops: Any, min_tokens: int, ends_after: int) -> None:
    request = a_request(
        max_tokens=4, stop_ids=frozenset(stops), params=SamplingParams(max_tokens=4, min_tokens=min_tokens)
    )
    row = Row(request)
    while request.finish_reason is None:
        row.draw(7)
    assert (request.finish_reason, request.stop_token, request.num_outputs) == ("stop", 7, ends_after)


def test_what_can_be_launched() -> None:
    request = a_request(prompt=3, max_tokens=2)
    row = Row(request)
    assert row.num_ready == 3
    first = row.launch()
    assert (request.num_launched, request.pending) == (3, 1)
    assert row.num_ready == 1, "the pending token can be launched before it is known"
    second = row.launch()
    assert second.future.tolist() == [0] and second.continued(first).tolist() == [0]
    assert row.num_ready == 0, "the last token is on its way"
    row.rows.settle(first, np.array([5]), None)
    assert (request.num_launched, request.num_settled, request.pending) == (4, 3, 1)
    assert row.num_ready == 0, "the last token is on its way"


def test_a_penalty_waits_for_the_pending_token() -> None:
    row = Row(a_request(params=SamplingParams(max_tokens=4, presence_penalty=1.0)))
    step = row.launch()
    assert row.num_ready == 0
    row.rows.settle(step, np.array([5]), None)
    assert row.num_ready == 1


def test_the_order_is_priority_then_arrival() -> None:
    early, late, urgent = a_request(), a_request(), a_request(priority=1)
    for number, request in enumerate((early, late, urgent)):
        request.set_arrival(number)
    assert sorted((late, urgent, early), key=lambda request: request.order) == [urgent, early, late]


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_ledger_has_the_tables_of_requests(page_size: int) -> None:
    """The line "request tables" is what the cache and the scheduler keep for each request: its pages and its tokens."""
    spec = ModelSpec.from_config(CATALOGUE["llama-3.2-1b"].config)
    settings = PlanSettings(kv_memory=2**30, page_size=page_size, max_model_len=1000, max_running_requests=3)
    plan = make_plan(spec, settings)
    cache = KVCache(plan.memory)
    rows = Scheduler(cache, scheduling_policy("fcfs"), max_running=3, max_tokens=64)._rows
    (line,) = [line for line in plan.ledger if line.name == "request tables"]
    assert line.bytes == cache.rows.pages.nbytes + rows.tokens.nbytes > 0
