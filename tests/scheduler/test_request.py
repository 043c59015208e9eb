"""Request: how its lengths move, and where its tokens are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.scheduler.request import Request
from quire.scheduler.sampling_params import SamplingParams


def a_request(prompt: int = 3, max_tokens: int = 4, **more: Any) -> Request:
    params = more.pop("params", SamplingParams(max_tokens=max_tokens))
    return Request("r", np.arange(prompt, dtype=np.int32), params, max_tokens=max_tokens, **more)


def test_tokens_grow_beyond_any_first_guess() -> None:
    request = a_request(prompt=3, max_tokens=2_000)
    for token in range(2_000):
        assert request.finish_reason is None
        request.append(token)
    assert request.finish_reason == "length"
    assert request.output_tokens.tolist() == list(range(2_000))
    assert request.tokens[:3].tolist() == [0, 1, 2]
    assert (request.num_tokens, request.num_outputs) == (2_003, 2_000)


@pytest.mark.parametrize(("min_tokens", "ends_after"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_a_stop_token_counts_from_min_tokens_on(min_tokens: int, ends_after: int) -> None:
    request = a_request(
        max_tokens=4, stop_ids=frozenset([7]), params=SamplingParams(max_tokens=4, min_tokens=min_tokens)
    )
    while request.finish_reason is None:
        request.append(7)
    assert (request.finish_reason, request.stop_token, request.num_outputs) == ("stop", 7, ends_after)


def test_what_can_be_launched() -> None:
    request = a_request(prompt=3, max_tokens=2)
    assert request.num_ready == 3
    request.num_launched, request.pending = 3, 1
    assert request.num_ready == 1, "the pending token can be launched before it is known"
    request.append(5)
    request.pending = 0
    request.num_launched, request.pending = 4, 1
    assert request.num_ready == 0, "the last token is on its way"


def test_a_penalty_waits_for_the_pending_token() -> None:
    request = a_request(params=SamplingParams(max_tokens=4, presence_penalty=1.0))
    request.num_launched, request.pending = 3, 1
    assert request.num_ready == 0
    request.append(5)
    request.pending = 0
    assert request.num_ready == 1


def test_the_order_is_priority_then_arrival() -> None:
    early, late, urgent = a_request(), a_request(), a_request(priority=1)
    early.arrival, late.arrival, urgent.arrival = 0, 1, 2
    assert sorted((late, urgent, early), key=lambda request: request.order) == [urgent, early, late]
