"""Tools in chats, through the real server: definitions, calls, results, streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

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
