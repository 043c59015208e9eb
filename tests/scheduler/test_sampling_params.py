"""SamplingParams: defaults, and every wrong value refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import InvalidInput
from quire.scheduler.sampling_params import SamplingParams, eos_or_stop
from tests.covering import each_of


@each_of(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 2),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", 2**64),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stop", [""]),
        ("stop", [1]),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=field):
        SamplingParams(**{field: value})


def test_limits_themselves_are_allowed() -> None:
    params = SamplingParams(
        n=128, temperature=0, top_p=1, top_k=-1, min_p=1.0, max_tokens=1, min_tokens=1, logprobs=20, seed=2**64 - 1
    )
    assert params.greedy
    assert not params.needs_history
    assert SamplingParams(max_tokens=None, min_tokens=10_000).max_tokens is None


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ["end"]  # type: ignore[arg-type]
    assert SamplingParams(stop=None, stop_token_ids=None).stop == []  # type: ignore[arg-type]


def test_lists_are_not_shared_between_requests() -> None:
    stop = ["a"]
    one, other = SamplingParams(stop=stop), SamplingParams(stop=stop)
    one.stop.append("b")
    assert (stop, other.stop) == (["a"], ["a"])
    SamplingParams().stop.append("c")
    assert SamplingParams().stop == []


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_need_history(field: str) -> None:
    assert SamplingParams(**{field: 0.5}).needs_history


def test_what_ends_a_sequence() -> None:
    assert eos_or_stop(SamplingParams(stop_token_ids=[7]), [2]) == {2, 7}
    assert eos_or_stop(SamplingParams(stop_token_ids=[7], ignore_eos=True), [2]) == {7}


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidInput, match=r"'max_tokenz' is no field of SamplingParams.*did you mean 'max_tokens'"):
        SamplingParams(max_tokenz=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="use some of n, temperature"):
        SamplingParams(zzz=3)  # type: ignore[call-arg]
