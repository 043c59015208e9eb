"""`/v1/messages`, with Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool

from tests.routing.live_router import wait_until
from tests.serve.live_server import LiveServer

MODEL = "scripted"
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bath", "days": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(scripted: LiveServer) -> Anthropic:
    return scripted.anthropic()


def asked(answer: str, **options: Any) -> Any:
    """The arguments of a request that is answered so."""
    return {"model": MODEL, "max_tokens": 400, "messages": [{"role": "user", "content": f"@@@{answer}@@@"}]} | options


def as_sent(message: Any) -> dict[str, Any]:
    """A message without what differs from one answer to the next."""
    found = message.model_dump(exclude_none=True)
    del found["id"]
    for block in found["content"]:
        block.pop("id", None)
    return dict(found)


@pytest.mark.parametrize(
    ("answer", "tools", "content", "stop_reason"),
    [
        ("Hello there. How?", [], [("text", "Hello there. How?")], "end_turn"),
        (f"A moment.\n{CALL}", [TOOL], [("text", "A moment."), ("tool_use", "weather")], "tool_use"),
        (f"{CALL}\n{CALL}", [TOOL], [("tool_use", "weather"), ("tool_use", "weather")], "tool_use"),
        (f"{CALL}", [], [("text", CALL)], "end_turn"),
    ],
)
def test_a_stream_is_the_same_message(
    client: Anthropic, answer: str, tools: Any, content: Any, stop_reason: str
) -> None:
    whole = client.messages.create(**asked(answer, tools=tools))
    with client.messages.stream(**asked(answer, tools=tools)) as stream:
        streamed = stream.get_final_message()
    assert as_sent(whole) == as_sent(streamed)
    assert [
        (block.type, getattr(block, "text", "") or getattr(block, "name", "")) for block in whole.content
    ] == content
    assert all(block.input == {"city": "Bath", "days": 2} for block in whole.content if block.type == "tool_use")
    assert (whole.stop_reason, whole.type, whole.role) == (stop_reason, "message", "assistant")
    assert whole.id.startswith("msg_") and streamed.id != whole.id
    assert whole.usage.output_tokens == len(answer) + 1
    assert whole.usage.cache_creation_input_tokens == whole.usage.cache_read_input_tokens == 0
    assert whole.usage.input_tokens > len(answer)


def test_the_events_of_a_stream(scripted: LiveServer) -> None:
    _, text = scripted.request("/v1/messages?beta=true", asked(f"One moment.{CALL}", tools=[TOOL], stream=True))
    events = [each.split("\n") for each in text.removesuffix("\n\n").split("\n\n")]
    found = [json.loads(lines[1].removeprefix("data: ")) for lines in events]
    assert [lines[0] for lines in events] == [f"event: {each['type']}" for each in found]
    kinds = [each["type"].removeprefix("content_block_") for each in found]
    joined = [kind for at, kind in enumerate(kinds) if kind != "delta" or kinds[at - 1] != "delta"]
    block = ["start", "delta", "stop"]
    assert joined == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert found[0]["message"]["content"] == []
    assert found[0]["message"]["stop_reason"] is None
    assert found[0]["message"]["usage"]["input_tokens"] > 0
    begun = next(each for each in found if each.get("content_block", {}).get("type") == "tool_use")
    assert begun["content_block"]["input"] == {}
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_why_an_answer_stops(client: Anthropic) -> None:
    cut = client.messages.create(**asked("Hello there.", max_tokens=5))
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "Hello")
    ended = client.messages.create(**asked("Hello there.", stop_sequences=["zzz", " the"]))
    assert (ended.stop_reason, ended.stop_sequence, ended.content[0].text) == ("stop_sequence", " the", "Hello")
    more = client.messages.with_raw_response.create(**asked("Hello there.", max_tokens=1 << 30))
    assert 0 < int(more.headers["x-quire-max-tokens"]) < 1 << 18
    assert more.parse().stop_reason == "end_turn"


def test_a_tool_is_called_and_its_result_is_read(client: Anthropic) -> None:
    cities: list[str] = []

    @beta_tool
    def weather(city: str, days: int = 1) -> str:
        """The weather of a city.

        Args:
            city: Its name.
            days: How many.
        """
        cities.append(city)
        return f"It rains. @@@It rains in {city}.@@@" if len(cities) == 2 else f"Ask again. @@@{CALL}@@@"

    runner = client.beta.messages.tool_runner(**asked(CALL), tools=[weather])  # in threads, which end at once
    found = list(runner)
    assert [message.stop_reason for message in found] == ["tool_use", "tool_use", "end_turn"]
    assert cities == ["Bath", "Bath"]
    assert found[-1].content[0].text == "It rains in Bath."


def test_many_at_once(scripted: LiveServer) -> None:
    async def ask_all() -> list[str]:
        async with AsyncAnthropic(base_url=scripted.summary["url"], auth_token="none", max_retries=0) as client:

            async def ask(number: int) -> str:
                async with client.messages.stream(**asked(f"answer {number}")) as stream:
                    return await stream.get_final_text()

            return await asyncio.gather(*map(ask, range(8)))

    assert asyncio.run(ask_all()) == [f"answer {number}" for number in range(8)]


def test_tokens_are_counted_as_they_will_be_read(client: Anthropic) -> None:
    given = asked("Hello", system="Be brief.", tools=[TOOL])
    whole = client.messages.create(**given)
    del given["max_tokens"]
    assert client.messages.count_tokens(**given).input_tokens == whole.usage.input_tokens
    del given["tools"]
    assert client.messages.count_tokens(**given).input_tokens < whole.usage.input_tokens


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"model": "claude"}, anthropic.NotFoundError, "claude"),
        ({"max_tokens": -1}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * (1 << 18)}]}, anthropic.BadRequestError, "prompt is too long"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image"}]}]},
            anthropic.BadRequestError,
            r"messages\[1\].content\[0\].*image",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, anthropic.BadRequestError, "web_search_20250305"),
    ],
)
def test_errors_are_those_of_the_client(client: Anthropic, options: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        client.messages.create(**asked("Hello", **options))


def test_failures_of_the_server_are_those_of_the_client() -> None:
    def failure(client: Anthropic, prompt: str, **options: Any) -> tuple[int, str]:
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(**asked("") | {"model": "echo", "messages": said(prompt)} | options)
        return kind_of(caught.value)

    def failure_in_stream(client: Anthropic, prompt: str, *, dies: bool = False) -> tuple[int, str]:
        with client.messages.stream(**asked("") | {"model": "echo", "messages": said(prompt)}) as stream:
            if dies:
                live.engine().kill()
            with pytest.raises(anthropic.APIStatusError) as caught:
                stream.get_final_text()
        return kind_of(caught.value)

    def kind_of(error: Any) -> tuple[int, str]:
        return error.status_code, error.body["error"]["type"]

    def said(prompt: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": prompt}]

    def complete() -> int:
        return live.request("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=key)[0]

    key = {"X-Api-Key": "secret"}
    with LiveServer.echo(api_key="secret", max_queue=0, max_restarts=0) as live:
        client = live.anthropic("secret")
        assert failure(client.with_options(api_key="wrong"), "a") == (401, "authentication_error")
        assert failure_in_stream(client, "fail") == (200, "api_error")
        patient = client.with_options(max_retries=2)
        assert failure(patient, "stall", extra_body={"timeout_s": 0.1}) == (408, "timeout_error")
        assert live.log().count("/v1/messages: 408") == 1, "it was tried again"
        with live.open_request("/v1/completions", {"prompt": ["stall"] * 256, "max_tokens": 9}, headers=key):
            wait_until(lambda: complete() == 429)
            assert failure(client, "a") == (429, "rate_limit_error")
        wait_until(lambda: complete() == 200)
        assert failure_in_stream(client, "stall", dies=True) == (200, "overloaded_error")
        assert failure(client, "a") == (503, "overloaded_error")
