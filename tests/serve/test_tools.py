"""Tools in chats, through the real server: definitions, calls, results, streams."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from openai import OpenAI

from quire.client.output import SequenceDelta
from quire.errors import QuireError
from quire.serve.conversation import call_of
from quire.serve.errors import OPENAI
from quire.serve.generation import _events
from quire.serve.journal import NO_JOURNAL
from tests.serve.live_server import LiveServer

CHAT = "/v1/chat/completions"


def tool(name: str = "get_weather", **parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters or {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}


def called(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def asked(answer: str, **more: Any) -> dict[str, Any]:
    """A request to which the model answers this."""
    return {"messages": [{"role": "user", "content": f"say @@@{answer}@@@"}], "tools": [tool()]} | more


def choice(server: LiveServer, body: dict[str, Any]) -> dict[str, Any]:
    status, found = server.request(CHAT, body)
    assert status == 200, found
    return dict(found["choices"][0])


@pytest.fixture(scope="module")
def client(scripted: LiveServer) -> OpenAI:
    return scripted.client()


def test_a_call_and_its_result(client: OpenAI) -> None:
    messages: list[Any] = [
        {"role": "user", "content": f"@@@Let me look.\n{called('get_weather', {'city': 'Paris'})}@@@"}
    ]
    first = client.chat.completions.create(model="scripted", messages=messages, tools=[tool()])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me look."
    [call] = message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "@@@Sun.@@@"},
    ]
    last = client.chat.completions.create(model="scripted", messages=messages, tools=[tool()])
    assert (last.choices[0].finish_reason, last.choices[0].message.content) == ("stop", "Sun.")
    assert last.choices[0].message.tool_calls is None


def test_tools_are_tokenised_with_their_conversation(scripted: LiveServer) -> None:
    body = asked("ok")
    _, found = scripted.request("/tokenize", body)
    _, answered = scripted.request(CHAT, body)
    assert found["count"] == answered["usage"]["prompt_tokens"]
    _, found = scripted.request("/detokenize", {"tokens": found["tokens"]})
    assert "get_weather" in found["prompt"]
    status, error = scripted.request("/tokenize", {"prompt": "a", "tools": [tool()]})
    assert status == 400 and error["error"]["param"] == "tools"


def test_a_stream_has_the_name_and_then_the_arguments(client: OpenAI) -> None:
    answer = f"Both:\n{called('a', {'x': 1})}\n{called('b', {'y': 'z' * 20})}"
    stream = client.chat.completions.create(
        model="scripted", **asked(answer), stream=True, stream_options={"include_usage": True}
    )
    names, arguments, content, reasons, usage = [], ["", ""], "", [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for each in chunk.choices:
            content += each.delta.content or ""
            reasons += [each.finish_reason] * bool(each.finish_reason)
            for call in each.delta.tool_calls or ():
                assert call.function is not None
                if call.function.name:
                    assert call.id and call.function.arguments == ""
                    names.append(call.function.name)
                arguments[call.index] += call.function.arguments or ""
    assert (names, content, reasons) == (["a", "b"], "Both:", ["tool_calls"])
    assert [json.loads(each) for each in arguments] == [{"x": 1}, {"y": "z" * 20}]
    assert usage is not None
    assert usage.completion_tokens == len(answer) + 1


def test_arguments_leave_as_they_come(client: OpenAI) -> None:
    answer = called("a", {"text": "w" * 300})
    stream = client.chat.completions.create(model="scripted", **asked(answer), stream=True)
    chunks = list(stream)
    calls = [call for chunk in chunks for each in chunk.choices for call in each.delta.tool_calls or ()]
    assert len(calls) > 20, chunks


@pytest.mark.parametrize(
    "answer",
    [
        "<tool_call>\n{not json}\n</tool_call> and text",
        '<tool_call>\n{"name": "a"}\n</tool_call>',
        '<tool_call>\n{"name": "a", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "a", "arguments": {"b": ',
    ],
)
def test_what_is_no_call_is_content(scripted: LiveServer, answer: str) -> None:
    found = choice(scripted, asked(answer))
    assert (found["finish_reason"], found["message"]["content"]) == ("stop", answer)
    assert "tool_calls" not in found["message"]


def test_a_call_of_a_tool_that_does_not_exist_is_a_call(scripted: LiveServer) -> None:
    [call] = choice(scripted, asked(called("nope", {})))["message"]["tool_calls"]
    assert call["function"] == {"name": "nope", "arguments": "{}"}


def test_the_input_of_a_message_is_json(scripted: LiveServer) -> None:
    arguments = '{"x": NaN, "y": [-Infinity, 1e999, 1.5], "z": "\\ud800"}'
    answer = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    tools = [{"name": "get_weather", "input_schema": {"type": "object"}}]
    body = {"messages": [{"role": "user", "content": f"@@@{answer}@@@"}], "tools": tools, "max_tokens": 500}
    status, found = scripted.request("/v1/messages", body)
    assert status == 200
    assert found["content"][0]["input"] == {"x": None, "y": [None, None, 1.5], "z": "?"}
    [whole] = choice(scripted, asked(answer))["message"]["tool_calls"]
    assert whole["function"]["arguments"] == arguments


def test_the_bytes_of_all_tokens_are_the_text(scripted: LiveServer) -> None:
    """Each byte of the character is a token."""
    said = [{"role": "user", "content": "@@@a€b@@@"}]
    found = choice(scripted, {"messages": said, "logprobs": True, "top_logprobs": 1})
    content = found["logprobs"]["content"]
    assert [each["token"] for each in content] == ["a", *["\ufffd"] * 3, "b", "<|end|>"]
    assert bytes(byte for each in content for byte in each["bytes"]) == "a€b<|end|>".encode()
    assert all(each["top_logprobs"][0]["bytes"] == each["bytes"] for each in content)


class _Broken:
    """An answer, and its form, that a defect ends."""

    is_closed = False

    def before(self) -> list[Any]:
        return []

    async def deltas(self) -> AsyncGenerator[list[Any], None]:
        yield [(0, SequenceDelta(index=0, text="a", token_ids=[1]))]

    def close(self) -> None:
        self.is_closed = True

    def events(self, *_: object) -> bytes:
        raise RuntimeError("a defect")

    def failure(self, _generation: object, error: QuireError) -> bytes:
        return OPENAI.last_events(OPENAI.body(error, ""))


def test_a_defect_ends_a_stream_with_an_error() -> None:
    broken: Any = _Broken()

    async def read() -> list[bytes]:
        return [each async for each in _events(broken, broken, NO_JOURNAL, is_scored=False) if each]

    [last] = asyncio.run(read())
    assert b"RuntimeError" in last
    assert broken.is_closed


def test_a_call_with_any_name_can_be_sent_back(scripted: LiveServer) -> None:
    """A model writes names of its own, and a call that was cut off has half an object."""
    name, user = "get weather!", {"role": "user", "content": "@@@fine@@@"}
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": '{"city": "Pa'}}
    result = {"role": "tool", "tool_call_id": "1", "content": "@@@fine@@@"}
    chat = {"messages": [user, {"role": "assistant", "tool_calls": [call]}, result], "tools": [tool()]}
    assert choice(scripted, chat)["message"]["content"] == "fine"
    use = {"type": "tool_use", "id": "1", "name": name, "input": {}}
    given = {"type": "tool_result", "tool_use_id": "1", "content": "@@@fine@@@"}
    turns = [user, {"role": "assistant", "content": [use]}, {"role": "user", "content": [given]}]
    assert scripted.request("/v1/messages", {"messages": turns, "max_tokens": 9})[0] == 200
    items = [user, {"type": "function_call", "call_id": "1", "name": name, "arguments": ""}, user]
    assert scripted.request("/v1/responses", {"input": items})[0] == 200


def test_a_call_in_a_history_has_an_object() -> None:
    for arguments, found in (('{"a": 1}', {"a": 1}), ('{"a": "b', {}), ("", {}), ("[1]", {}), ("[" * 100_000, {})):
        assert call_of("1", "f", arguments)["function"]["arguments"] == found


def refused(server: LiveServer, body: dict[str, Any]) -> dict[str, Any]:
    status, found = server.request(CHAT, body)
    assert status == 400, found
    return dict(found["error"])


def test_tools_that_cannot_be_used_are_refused(scripted: LiveServer) -> None:
    equal = refused(scripted, asked("", tools=[tool("a"), tool("b"), tool("a")]))
    assert (equal["param"], "2 tools have the name 'a'" in equal["message"]) == ("tools", True)
    unknown = refused(scripted, asked("", tool_choice={"type": "function", "function": {"name": "b"}}))
    assert unknown["param"] == "tool_choice"
    odd = tool(city={"type": "string", "fancy": 1})
    wrong = refused(scripted, asked("", tools=[tool("a"), odd], tool_choice="required"))
    assert wrong["param"] == "tools[1].function.parameters"
    assert "fancy" in wrong["message"]
    assert choice(scripted, asked("fine", tools=[odd]))["message"]["content"] == "fine"


def test_a_model_that_is_shown_no_tools_refuses_them(server: LiveServer) -> None:
    error = refused(server, {"messages": [{"role": "user", "content": "a"}], "tools": [tool()]})
    assert error["param"] == "tools"
    assert "--response-template" in error["message"]
    plain = {"messages": [{"role": "user", "content": "a"}], "tools": [tool()], "tool_choice": "none", "max_tokens": 1}
    assert choice(server, plain)["finish_reason"] == "length"


def test_without_a_choice_of_tools_a_call_is_text(scripted: LiveServer) -> None:
    answer = called("get_weather", {})
    assert choice(scripted, asked(answer, tool_choice="none"))["message"]["content"] == answer


def test_reasoning_has_a_field_of_its_own(client: OpenAI) -> None:
    body = asked("why\n</think>\n\nso", chat_template_kwargs={"enable_thinking": True})
    more = {"chat_template_kwargs": body["chat_template_kwargs"]}
    stream = client.chat.completions.create(model="scripted", messages=body["messages"], stream=True, extra_body=more)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(each.content or "" for each in deltas) == "so"
    for name in ("reasoning_content", "reasoning"):
        assert "".join(getattr(each, name, None) or "" for each in deltas) == "why"


def test_special_tokens_are_in_no_content(scripted: LiveServer) -> None:
    """But where they are asked for."""
    answer = f"a<|end|>b{called('get_weather', {'city': 'x'})}"
    assert choice(scripted, asked(answer))["message"]["content"] == "ab"
    assert choice(scripted, asked("a<|end|>b", tools=[]))["message"]["content"] == "ab"
    assert choice(scripted, asked(answer, skip_special_tokens=False))["message"]["content"] == "a<|end|>b"


def test_histories(scripted: LiveServer) -> None:
    """No content, results in a row, as parts, before the assistant speaks again; a system message in between."""
    call = {"type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call | {"id": "1"}, call | {"id": "2"}]},
        {
            "role": "tool",
            "tool_call_id": "2",
            "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "z"},
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "tool_calls": [call | {"id": "3"}], "reasoning": "why"},
        {"role": "tool", "tool_call_id": "3", "content": "@@@end@@@"},
    ]
    assert choice(scripted, {"messages": messages, "tools": [tool()]})["message"]["content"] == "end"
    results = [{"role": "tool", "tool_call_id": str(i), "content": f"result {i}"} for i in range(1000)]
    messages = [*messages[:2], *results, messages[-1]]
    assert choice(scripted, {"messages": messages, "tools": [tool()]})["message"]["content"] == "end"


def test_several_choices_logprobs_and_stops(scripted: LiveServer) -> None:
    answer = f"{called('a', {'x': 1})}"
    status, found = scripted.request(CHAT, asked(answer, n=3))
    assert status == 200
    assert [each["finish_reason"] for each in found["choices"]] == ["tool_calls"] * 3
    assert len({each["message"]["tool_calls"][0]["id"] for each in found["choices"]}) == 3
    stopped = choice(scripted, asked(f"so{answer}", stop="<tool_call>"))
    assert (stopped["finish_reason"], stopped["message"]["content"]) == ("stop", "so")
    cut = choice(scripted, asked(answer, max_tokens=30))
    assert (cut["finish_reason"], cut["message"]["content"]) == ("length", answer[:30])


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SAY = f"say @@@{called('get_weather', {'city': 'Paris'})}@@@"
USER = {"role": "user", "content": SAY}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "tools": [tool()]},
    MESSAGES: {
        "messages": [USER],
        "max_tokens": 500,
        "tools": [{"name": "get_weather", "input_schema": tool()["function"]["parameters"]}],
    },
    RESPONSES: {"input": SAY, "tools": [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]},
}


def told_endings(server: LiveServer, prefix: str) -> dict[str, str]:
    """What the engine was told of sequences of a request, or those before; it may come a little later."""
    deadline = time.monotonic() + 10
    while True:
        told = server.request("/v1/cache/statistics")[1]["told_endings"]
        found = {name: ending for name, ending in told.items() if name.startswith(prefix)}
        if found or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_the_engine_is_told_that_an_output_calls_a_tool(scripted: LiveServer, route: str, stream: bool) -> None:
    for answer, ending in ((SAY, "tool"), ("say @@@No.@@@", "answer")):
        body = json.loads(json.dumps(BODIES[route]).replace(json.dumps(SAY), json.dumps(answer)))
        before = set(told_endings(scripted, ""))
        status, found = scripted.request(route, body | {"stream": stream})
        assert status == 200, found
        deadline = time.monotonic() + 10
        while not (new := {name: each for name, each in told_endings(scripted, "").items() if name not in before}):
            assert time.monotonic() < deadline, "nothing is told"
        assert list(new.values()) == [ending]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_calls_after_the_first_are_left_out_for_a_client_that_takes_one(
    scripted: LiveServer, route: str, stream: bool
) -> None:
    answer = f"say @@@{called('get_weather', {'city': 'Paris'})}\n{called('now', {'zone': 'UTC'})}Last.@@@"
    body = json.loads(json.dumps(BODIES[route]).replace(json.dumps(SAY), json.dumps(answer))) | {"stream": stream}
    one: dict[str, Any] = {"parallel_tool_calls": False}
    if route == MESSAGES:
        one = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    for more, names in (({}, ["get_weather", "now"]), (one, ["get_weather"])):
        status, found = scripted.request(route, body | more)
        assert status == 200, found
        text = json.dumps(found)
        assert [name for name in ("get_weather", "now") if f'"{name}"' in text.replace("\\", "")] == names
        assert stream or ("zone" in text) is ("now" in names), "its arguments, which a stream has in parts"


def test_each_choice_is_told_of_and_what_is_cut_off_is_not(scripted: LiveServer) -> None:
    before = set(told_endings(scripted, ""))
    _, found = scripted.request(CHAT, BODIES[CHAT] | {"n": 3})
    assert set(told_endings(scripted, found["id"]).values()) == {"tool"}
    _, cut = scripted.request(CHAT, BODIES[CHAT] | {"max_tokens": 5})
    _, plain = scripted.request("/v1/completions", {"prompt": SAY, "max_tokens": 500})
    _, last = scripted.request(CHAT, BODIES[CHAT])
    assert told_endings(scripted, last["id"])
    new = [name for name in told_endings(scripted, "") if name not in before]
    assert len(new) == 4 and not any(name.startswith((cut["id"], plain["id"])) for name in new)
