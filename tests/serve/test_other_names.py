"""Routes by the names that vLLM and SGLang give them, and fields of their requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.routing.live_router import LiveRouter
from tests.serve.live_server import LiveServer

CHAT = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def echo() -> Iterator[LiveServer]:
    with LiveServer.echo() as server:
        yield server


@pytest.fixture(scope="module", params=["server", "router"])
def live(request: pytest.FixtureRequest, echo: LiveServer) -> Iterator[LiveServer]:
    if request.param == "server":
        yield echo
    else:
        with LiveRouter([echo]) as router:
            yield router


def test_state_is_told_by_every_name(live: LiveServer) -> None:
    assert live.request("/")[1]["model"] == "echo"
    assert live.request("/ping")[0] == live.request("/health")[0] == 200
    assert live.request("/load") == (200, {"server_load": 0})
    for path in ("/server_info", "/get_server_info"):
        status, answer = live.request(path)
        assert status == 200 and "running_requests" in answer["internal_states"][0]
    for path in ("/model_info", "/get_model_info"):
        assert live.request(path)[1]["model_path"] == "echo"
    assert live.request("/is_sleeping") == (200, {"is_sleeping": False})
    for path in ("/sleep", "/wake_up", "/pause", "/resume", "/start_profile", "/stop_profile"):
        status, answer = live.request(path, {})
        assert status == 400 and f"{path} is not supported" in answer["error"]["message"]


def test_a_model_has_the_fields_of_both_dialects(live: LiveServer) -> None:
    found = live.request("/v1/models")[1]
    assert found["data"][0]["type"] == "model" and found["first_id"] == found["data"][0]["display_name"] == "echo"


def test_a_long_stream_of_generate_is_not_the_square_of_its_answer(live: LiveServer) -> None:
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    _, text = live.request("/generate", {"text": "abc", "sampling_params": sampling, "stream": True})
    found = [json.loads(each.removeprefix("data: ")) for each in text.strip().split("\n\n")[:-1]]
    lengths = [len(each["output_ids"]) for each in found]
    assert lengths[:200] == list(range(1, 201))
    assert lengths[-1] == 4000
    assert sum(lengths) < 256 * 2 * 4000


def test_generate_answers_as_sglang(live: LiveServer) -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
    asked = {"text": "abc", "sampling_params": sampling, "return_logprob": False, "logprob_start_len": -1}
    status, whole = live.request("/generate", asked | {"stream": False, "lora_path": None})
    assert status == 200, whole
    assert (whole["text"], whole["output_ids"]) == ("abcabc", list(b"abcabc"))
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    assert (whole["meta_info"]["prompt_tokens"], whole["meta_info"]["completion_tokens"]) == (3, 6)
    status, text = live.request("/generate", asked | {"stream": True})
    *events, end = text.strip().split("\n\n")
    assert end == "data: [DONE]"
    found: list[dict[str, Any]] = [json.loads(each.removeprefix("data: ")) for each in events]
    assert all(whole["text"].startswith(each["text"]) for each in found) and found[-1]["text"] == whole["text"]
    assert found[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    ids = {"input_ids": list(b"abc"), "sampling_params": sampling}
    assert live.request("/generate", ids)[1]["text"] == "abcabc"
    for wrong in (
        {},
        asked | {"input_ids": [1]},
        asked | {"image_data": "x"},
        {"text": "a", "sampling_params": {"x": 1}},
    ):
        assert live.request("/generate", wrong)[0] == 400


def test_a_prompt_may_be_cut_to_its_last_tokens(echo: LiveServer) -> None:
    for prompt in ("abcdef", list(b"abcdef"), ["abcdef", "zzdef"]):
        body = {"prompt": prompt, "max_tokens": 3, "truncate_prompt_tokens": 3}
        answer = echo.request("/v1/completions", body)[1]
        assert {choice["text"] for choice in answer["choices"]} == {"def"}
        assert answer["usage"]["prompt_tokens"] == 3 * len(answer["choices"])
    chat = {"messages": CHAT, "max_tokens": 3, "truncate_prompt_tokens": 2}
    assert echo.request("/v1/chat/completions", chat)[1]["usage"]["prompt_tokens"] == 2
    assert echo.request("/v1/completions", {"prompt": "ab", "truncate_prompt_tokens": 0})[0] == 400


def test_fields_with_values_that_change_nothing_are_no_error(echo: LiveServer) -> None:
    harmless: tuple[dict[str, Any], ...] = (
        {"best_of": 1, "include_reasoning": True, "separate_reasoning": True, "return_prompt_text": False},
        {"return_logprob": False, "return_hidden_states": False, "suffix": None, "logprob_token_ids": []},
    )
    for more in harmless:
        assert echo.request("/v1/completions", {"prompt": "ab", "max_tokens": 2} | more)[0] == 200
    of_chats: tuple[dict[str, Any], ...] = ({"thinking": {"type": "disabled"}}, {"enable_thinking": False})
    for more in of_chats:
        assert echo.request("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2} | more)[0] == 200
    status, answer = echo.request("/v1/completions", {"prompt": "ab", "logprob_token_ids": [1]})
    assert status == 400 and answer["error"]["message"].endswith("leave logprob_token_ids out.")
