"""The OpenAI API, with OpenAI's own client."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import APIStatusError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from quire import __version__
from tests.serve.live_server import LiveServer

MODEL = "tiny"
PROMPT = "It is a truth universally acknowledged, that a single man in possession"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
NO_TOOL = {"type": "function", "function": {"name": "time"}}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, who are you then?"}]


@pytest.fixture(scope="module")
def client(server: LiveServer) -> OpenAI:
    return server.client()


def complete(client: OpenAI, **options: object) -> Any:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0} | options
    create: Any = client.completions.create
    return create(**body)


def cached(completion: Any) -> int:
    return int(completion.usage.prompt_tokens_details.cached_tokens)


def test_a_repeated_prompt_comes_from_the_cache(client: OpenAI) -> None:
    prompt = "A prompt that no other test sends, and that is longer than a page. "
    first, again = (complete(client, prompt=prompt) for _ in range(2))
    assert (cached(first), cached(again)) == (0, len(prompt) // 16 * 16)
    assert first.choices[0].text == again.choices[0].text
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (len(prompt), 24)
    assert first.choices[0].finish_reason == "length"
    salted = complete(client, prompt=prompt, extra_body={"cache_salt": "another tenant"})
    assert cached(salted) == 0
    assert salted.choices[0].text == first.choices[0].text


def test_a_stream_is_the_same_text(client: OpenAI) -> None:
    whole = complete(client)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == 24


def test_a_stream_has_the_usage_so_far(client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    usages = [chunk.usage for chunk in complete(client, stream=True, stream_options=options)]
    counts = [usage.completion_tokens for usage in usages]
    # A chunk has all tokens that arrived since the last one.
    assert counts == sorted(counts)
    assert counts[-1] == 24 and counts[0] >= 1 and len(counts) > 1
    assert len({usage.prompt_tokens for usage in usages}) == 1


def test_chat_and_its_stream(client: OpenAI) -> None:
    options = {"model": MODEL, "messages": CHAT, "max_completion_tokens": 20, "temperature": 0}
    create: Any = client.chat.completions.create
    whole = create(**options)
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.completion_tokens == 20
    chunks = list(create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    plain = [{"role": "user", "content": "Hello"}]
    answers = [create(**(options | {"messages": messages})).choices[0].message.content for messages in (parts, plain)]
    assert answers[0] == answers[1]


def test_n_and_seed(client: OpenAI) -> None:
    drawn = [complete(client, n=2, temperature=1.0, seed=seed) for seed in (7, 7, 8)]
    texts = [[choice.text for choice in d.choices] for d in drawn]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert texts[0][0] != texts[0][1]
    assert [choice.index for choice in drawn[0].choices] == [0, 1]
    streamed: dict[int, str] = {0: "", 1: ""}
    for chunk in complete(client, n=2, temperature=1.0, seed=7, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == texts[0]


def test_logprobs_in_both_shapes(client: OpenAI) -> None:
    choice = complete(client, logprobs=3, max_tokens=6).choices[0]
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == 6
    assert choice.logprobs.text_offset[0] == 0
    create: Any = client.chat.completions.create
    chat = create(
        model=MODEL,
        messages=CHAT,
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=4,
    )
    content = chat.choices[0].logprobs.content or []
    assert len(content) == 6
    for position in content:
        top = position.top_logprobs
        assert len(top) == 4
        assert top[0].logprob == max(t.logprob for t in top) == position.logprob  # greedy takes the best
        assert sum(math.exp(t.logprob) for t in top) <= 1.0001


def test_stop_strings(client: OpenAI) -> None:
    text = complete(client, max_tokens=60).choices[0].text
    at = next(i for i in range(8, len(text) - 3) if "\ufffd" not in text[i : i + 3] and text.find(text[i : i + 3]) == i)
    stop = text[at : at + 3]
    choice = complete(client, max_tokens=60, stop=[stop, "never in there"]).choices[0]
    assert (choice.text, choice.finish_reason) == (text[:at], "stop")
    assert choice.stop_reason == stop
    chunks = complete(client, max_tokens=60, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[:at]
    kept = complete(client, max_tokens=60, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == text[:at] + stop


def test_prompts_of_every_kind(client: OpenAI) -> None:
    single = [complete(client, prompt=p).choices[0].text for p in ("abc", "wxyz")]
    many = complete(client, prompt=["abc", "wxyz"], n=2)
    assert [c.text for c in many.choices] == [single[0], single[0], single[1], single[1]]
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    assert (many.usage.prompt_tokens, many.usage.completion_tokens) == (7, 96)
    ids = [complete(client, prompt=p, extra_body={"return_token_ids": True}).choices[0] for p in ([40, 41], [[40, 41]])]
    assert ids[0].text == ids[1].text
    assert len(ids[0].token_ids) == 24


def test_models(client: OpenAI, server: LiveServer) -> None:
    [model] = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    assert server.request("/v1/models/nope")[0] == 404


def test_many_clients_get_their_solo_answers(client: OpenAI) -> None:
    prompts = [PROMPT[: 10 + 3 * i] for i in range(8)]
    solo = [complete(client, prompt=p).choices[0].text for p in prompts]
    with ThreadPoolExecutor(16) as threads:
        together = list(threads.map(lambda p: complete(client, prompt=p).choices[0].text, prompts * 2))
    assert together == solo * 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(server: LiveServer, stream: bool) -> None:
    before = server.wait_idle()
    body = {"prompt": "leaving", "max_tokens": 370, "stream": stream, "ignore_eos": True, "n": 2}
    connection = server.open_request("/v1/completions", body)
    if stream:
        assert b"200 OK" in connection.recv(64)
    while server.statistics()["running_requests"] == 0:
        time.sleep(0.005)
    connection.close()
    after = server.wait_idle()
    assert after["aborted_requests"] == before["aborted_requests"] + 2
    assert after["frames"]["full"]["private"] == 0


def test_metrics(server: LiveServer, client: OpenAI) -> None:
    complete(client)
    statistics = server.wait_idle()
    status, text = server.request("/metrics")
    assert status == 200
    samples = {
        (sample.name, *[value for name, value in sample.labels.items() if name != "model_name"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for key in ("prompt_tokens", "hit_tokens", "output_tokens", "evicted_pages", "preemptions"):
        assert samples[(f"quire_{key}_total",)] == statistics[key]
    frames = statistics["frames"]["full"]
    for state in ("free", "private", "cached", "moving", "quarantined"):
        assert samples[("quire_frames", "full", state, "device")] == frames[state]
    assert samples[("quire_healthy",)] == 1
    assert samples[("quire_time_to_first_token_seconds_count",)] > 0
    assert samples[("quire_http_responses_total", "/v1/completions", "200")] > 0


BAD_BODIES: list[tuple[str, bytes | dict[str, object], int, str | None, str]] = [
    ("completions", b"{not json", 400, None, "not JSON"),
    ("completions", b"[1, 2]", 400, None, "JSON object"),
    ("completions", b"", 400, None, ""),
    ("completions", {}, 400, "prompt", "prompt is required"),
    ("completions", {"prompt": 5}, 400, "prompt", "prompt should be"),
    ("completions", {"prompt": []}, 400, "prompt", "empty"),
    ("completions", {"prompt": [[]]}, 400, None, "empty"),
    ("completions", {"prompt": ""}, 400, None, "empty"),
    ("completions", {"prompt": [1, 300]}, 400, None, "vocabulary"),
    ("completions", {"prompt": [1, -1]}, 400, None, "token id"),
    ("completions", {"prompt": [2**40]}, 400, None, "token ids"),
    ("completions", {"prompt": [True]}, 400, "prompt[0]", "prompt[0] should be a valid string, or a valid integer"),
    ("completions", {"prompt": "a", "model": "gpt-4"}, 404, None, "use 'tiny'"),
    ("completions", {"prompt": "a", "max_tokens": "5"}, 400, "max_tokens", "integer"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature", "at least 0"),
    ("completions", {"prompt": "a", "top_p": 1.5}, 400, "top_p", "at most 1"),
    ("completions", {"prompt": "a", "n": 0}, 400, "n", "at least 1"),
    ("completions", {"prompt": ["a"] * 100, "n": 100}, 400, "n", "512"),
    ("completions", {"prompt": "a", "logprobs": 99}, 400, "logprobs", "at most 20"),
    ("completions", {"prompt": "a", "stop": [""]}, 400, "stop", "non-empty"),
    ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "token ids"),
    ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix", "leave suffix out"),
    ("completions", {"prompt": "a", "temprature": 0}, 400, "temprature", "use temperature"),
    ("completions", {"prompt": "a", "max_token": 5}, 400, "max_token", "use max_tokens"),
    ("completions", {"prompt": "a", "max_completion_tokens": 5}, 400, "max_completion_tokens", "use max_tokens"),
    ("completions", {"prompt": "a", "xyz": {}}, 400, "xyz", "leave it out"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "ask for echo or prompt_logprobs"),
    ("responses", {"input": "a", "max_tokens": 5}, 400, "max_tokens", "use max_output_tokens"),
    ("completions", {"prompt": "a", "typical_p": 0.5}, 400, "typical_p", "would change the answer"),
    ("chat/completions", {"messages": CHAT, "add_special_tokens": True}, 400, "add_special_tokens", "would change"),
    ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix", "not supported"),
    ("completions", {"prompt": "a", "best_of": 3}, 400, "best_of", "not supported"),
    ("completions", {"prompt": "a" * 600}, 400, None, "512"),
    ("completions", {"prompt": "a" * 500, "max_tokens": 100}, 400, None, "context"),
    ("completions", {"prompt": "a" * 420, "max_tokens": 20}, 413, None, "--kv-memory"),
    ("chat/completions", {}, 400, "messages", "messages is required"),
    ("chat/completions", {"messages": []}, 400, "messages", "messages should have at least 1 item, not 0"),
    ("chat/completions", {"messages": [{"role": "wizard", "content": "a"}]}, 400, "messages[0].role", "'system'"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0]", "should have content"),
    ("chat/completions", {"messages": [{"role": "assistant", "content": "a"}]}, 400, None, "before a question"),
    ("chat/completions", {"messages": CHAT, "tools": [{"type": "function"}]}, 400, "tools[0].function", "is required"),
    (
        "chat/completions",
        {"messages": CHAT, "tools": [TOOL], "tool_choice": NO_TOOL},
        400,
        "tool_choice",
        "no such tool. Fix: choose one of weather.",
    ),
    ("chat/completions", {"messages": CHAT, "tool_choice": NO_TOOL}, 400, "tool_choice", "add it to tools"),
    ("chat/completions", {"messages": CHAT, "tool_choice": "any"}, 400, "tool_choice", "or an object; got 'any'"),
    ("chat/completions", {"messages": CHAT, "tool_choice": ["a"]}, 400, "tool_choice", "; got a list."),
    (
        "chat/completions",
        {"messages": CHAT, "response_format": {"type": "json_schema", "schema": {}}},
        400,
        "response_format.schema",
        "use json_schema.schema",
    ),
    ("chat/completions", {"messages": CHAT, "response_format": {"type": "xml"}}, 400, "response_format.type", ""),
    (
        "chat/completions",
        {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        400,
        "response_format",
        "keyword 'not' at #",
    ),
    ("completions", {"prompt": "a", "guided_json": '{"a": '}, 400, "guided_json", "is not JSON"),
    (
        "completions",
        {"prompt": "a", "regex": "a", "guided_choice": ["a"]},
        400,
        "regex",
        "guided_choice and regex both say",
    ),
    ("completions", {"prompt": "a", "regex": "a", "min_tokens": 2}, 400, "min_tokens", "leave out min_tokens"),
    (
        "completions",
        {"prompt": "a", "structured_outputs": {"structural_tag": "{}"}},
        400,
        "structured_outputs.structural_tag",
        "is no field",
    ),
    ("completions", {"prompt": "a", "json_schema": {"title": "a" * 200_000}}, 400, "json_schema", "may have"),
    ("chat/completions", {"messages": CHAT, "top_logprobs": 2}, 400, "top_logprobs", "logprobs"),
    (
        "chat/completions",
        {"messages": [*CHAT, {"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[2].content[0].type",
        "messages[2].content[0]: type 'image_url' is not supported",
    ),
    ("chat/completions", {"messages": CHAT, "stream": True, "max_tokens": 600}, 400, None, "512"),
    (
        "completions",
        {"prompt": "a", "stream_options": {"include_usge": True}},
        400,
        "stream_options.include_usge",
        "use include_usage",
    ),
    (
        "completions",
        {"prompt": "a", "stream_options": {"usage_twice": True}},
        400,
        "stream_options.usage_twice",
        "is no field",
    ),
    ("chat/completions", {"messages": [{**CHAT[0], "rolle": "user"}]}, 400, "messages[0].rolle", "use role"),
    (
        "chat/completions",
        {"messages": [{**CHAT[0], "tool_calls": [{}]}]},
        400,
        "messages[0].tool_calls[0].function",
        "required",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txt": "b"}]}]},
        400,
        "messages[0].content[0].txt",
        "use text",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "text"), BAD_BODIES)
def test_bad_bodies(
    server: LiveServer, path: str, body: bytes | dict[str, object], status: int, param: str | None, text: str
) -> None:
    raw = body if isinstance(body, bytes) else None
    got, answer = server.request(f"/v1/{path}", None if raw is not None else body, raw=raw)
    assert got == status, answer
    error = answer["error"]
    assert set(error) - {"quire_code"} == {"message", "type", "param", "code"}
    assert error.get("quire_code", error["code"]).startswith("QUIRE-")
    assert error["param"] == param
    assert text in error["message"]
    assert server.wait_idle()["frames"]["full"]["private"] == 0


def test_harmless_fields_are_ignored(server: LiveServer) -> None:
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "tools": [], "typical_p": 1.0, "nothing": None}
    harmless |= {"reasoning_effort": "low", "verbosity": "low"}
    harmless |= {"add_special_tokens": False, "response_format": {"type": "text"}}
    status, answer = server.request("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2} | harmless)
    assert status == 200, answer


def test_harmless_fields_of_objects_in_a_body_are_ignored(server: LiveServer) -> None:
    """Those that clients send back from answers, or to every server."""
    answered = dict.fromkeys(("refusal", "tool_calls", "audio", "function_call", "parsed", "tool_call_id"))
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [part], "name": "ada"},
        {"role": "assistant", "content": "Hi", "annotations": [], "reasoning_content": "hm", **answered},
        {"role": "user", "content": "And?"},
    ]
    options = {"include_usage": False, "include_obfuscation": True, "continuous_usage_stats": False}
    body = {"messages": messages, "max_tokens": 2, "stream_options": options}
    status, answer = server.request("/v1/chat/completions", body)
    assert status == 200, answer


def test_the_client_sees_our_code_and_fix(client: OpenAI) -> None:
    with pytest.raises(APIStatusError, match="Fix: ") as refused:
        complete(client, prompt="a" * 420)
    assert (refused.value.status_code, refused.value.code) == (413, "QUIRE-FIT-02")


def test_unknown_routes_and_methods_have_the_same_shape(server: LiveServer) -> None:
    for path, status in (("/v1/nope", 404), ("/v1/completions", 405)):
        got, answer = server.request(path)
        assert (got, answer["error"]["code"]) == (status, "QUIRE-SERVE-05")
    assert "no such route" in server.request("/nope")[1]["error"]["message"]


def test_the_version(server: LiveServer) -> None:
    assert server.request("/version") == (200, {"version": __version__})


def test_a_huge_body_is_refused_before_it_is_read(server: LiveServer) -> None:
    status, answer = server.request("/v1/completions", raw=b"", headers={"Content-Length": str(2**30)})
    assert (status, answer["error"]["type"]) == (413, "request_too_large")
