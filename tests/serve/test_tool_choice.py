"""Forms of calls that are enforced: the bundled model, which knows no tools, with a chat template of Hermes."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from quire.client.tokenising import Rendered, Tokenising
from quire.models.tokenizer import load_tokenizer
from quire.scheduler.sampling_params import SamplingParams
from quire.serve.conversation import Conversation, Tool, ToolChoice
from quire.serve.errors import BadField
from quire.spec.bundled import BUNDLED_MODELS
from tests.serve.live_server import LiveServer
from tests.serve.test_tools import CHAT, choice, tool

WEATHER = tool("get_weather", city={"enum": ["Paris", "Bath"]}, days={"type": "integer", "minimum": 1, "maximum": 9})
WEATHER["function"]["parameters"] |= {"required": ["city", "days"], "additionalProperties": False}
NOW = tool("now", zone={"enum": ["UTC"]})
NOW["function"]["parameters"] |= {"required": ["zone"], "additionalProperties": False}


def body(tool_choice: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is the weather?"}]
    return {"messages": messages, "tools": [WEATHER, NOW], "tool_choice": tool_choice, "max_tokens": 200} | more


def check(call: dict[str, Any]) -> None:
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "now":
        assert arguments == {"zone": "UTC"}
    else:
        assert call["function"]["name"] == "get_weather"
        assert arguments.keys() == {"city", "days"}
        assert arguments["city"] in ("Paris", "Bath")
        assert 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_follows_its_schema(bundled: LiveServer, seed: int) -> None:
    found = choice(bundled, body("required", parallel_tool_calls=False, seed=seed))
    assert found["finish_reason"] == "tool_calls"
    [call] = found["message"]["tool_calls"]
    check(call)


@pytest.mark.parametrize(
    ("path", "given"),
    [
        (CHAT, {"tool_choice": "required"}),
        ("/v1/responses", {"input": "a", "tool_choice": "required", "tools": [{"type": "web_search"}]}),
        ("/v1/messages", {"tool_choice": {"type": "any"}, "max_tokens": 9}),
    ],
)
def test_a_call_that_is_required_needs_tools(bundled: LiveServer, path: str, given: dict[str, Any]) -> None:
    given = {"model": "quire-bundled", "messages": [{"role": "user", "content": "a"}]} | given
    if path == "/v1/responses":
        del given["messages"]
    status, found = bundled.request(path, given)
    assert status == 400 and "a call is required" in found["error"]["message"], found


def test_stop_tokens_end_no_required_call(bundled: LiveServer) -> None:
    _, found = bundled.request("/tokenize", {"prompt": "<tool_call>", "add_special_tokens": False})
    found = choice(bundled, body("required", parallel_tool_calls=False, stop_token_ids=found["tokens"]))
    assert found["finish_reason"] == "tool_calls"


def test_a_call_by_name_is_of_that_tool_alone(bundled: LiveServer) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    found = choice(bundled, body(named, parallel_tool_calls=False, temperature=0))
    assert [call["function"]["name"] for call in found["message"]["tool_calls"]] == ["now"]


def test_several_choices_in_a_stream(bundled: LiveServer) -> None:
    status, text = bundled.request(CHAT, body("required", parallel_tool_calls=False, n=2, stream=True, seed=7))
    assert status == 200
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    calls: dict[int, dict[str, Any]] = {}
    for each in (found for chunk in chunks for found in chunk["choices"]):
        for call in each["delta"].get("tool_calls", ()):
            whole = calls.setdefault(each["index"], {"function": {"name": "", "arguments": ""}})["function"]
            whole["name"] += call["function"].get("name", "")
            whole["arguments"] += call["function"]["arguments"]
    assert calls.keys() == {0, 1}
    for call in calls.values():
        check(call)


def test_an_answer_has_one_form(bundled: LiveServer) -> None:
    status, found = bundled.request(CHAT, body("required", response_format={"type": "json_object"}))
    assert (status, found["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("calls", [False, True])
def test_an_answer_by_a_schema_leaves_calls_possible(bundled: LiveServer, calls: bool) -> None:
    """The first token is made likely; the grammar leaves no other on."""
    schema = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"schema": schema | {"additionalProperties": False}}}
    start = "<tool_call>" if calls else '{"'
    _, first = bundled.request("/tokenize", {"prompt": start, "add_special_tokens": False})
    strict = [each | {"function": each["function"] | {"strict": True}} for each in (WEATHER, NOW)]
    more = {"tools": strict, "response_format": form, "parallel_tool_calls": False}
    found = choice(bundled, body("auto", **more, logit_bias={str(first["tokens"][0]): 100}))
    if calls:
        check(found["message"]["tool_calls"][0])
    else:
        assert json.loads(found["message"]["content"])["a"] in ("b", "c")


def test_a_form_that_leaves_no_calls_possible_is_refused(bundled: LiveServer) -> None:
    status, found = bundled.request(CHAT, body("auto", structured_outputs={"regex": "a+"}))
    assert (status, found["error"]["param"]) == (400, "tools")


def test_tools_that_are_too_large_together_are_refused_by_name() -> None:
    tokenizer = load_tokenizer(str(BUNDLED_MODELS["quire-bundled-agent"]))
    long = {"type": "object", "description": "x" * 100_000}
    tools = [Tool(name=name, parameters=long) for name in "ab"]
    conversation = Conversation(messages=(), tools=tools, choice=ToolChoice(mode="required"))
    with closing(Tokenising(tokenizer, most_tokens=100)) as tokenising, pytest.raises(BadField) as caught:
        conversation.reader(tokenising, Rendered("", np.zeros(0, np.int32)), SamplingParams())
    assert caught.value.param == "tools"


@pytest.mark.parametrize("stop", ['"', "Paris", "<tool_call>", "</tool_call>"])
def test_stop_strings_end_no_required_call(bundled: LiveServer, stop: str) -> None:
    found = choice(bundled, body("required", parallel_tool_calls=False, stop=stop, temperature=0))
    assert found["finish_reason"] == "tool_calls"
    check(found["message"]["tool_calls"][0])


def test_stop_strings_and_strict_calls_are_refused_by_name(bundled: LiveServer) -> None:
    strict = {**NOW, "function": {**NOW["function"], "strict": True}}
    status, found = bundled.request(CHAT, body("auto", tools=[strict], stop="x"))
    assert (status, found["error"]["param"]) == (400, "tools")
    assert "stop" in found["error"]["message"]
