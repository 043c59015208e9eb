"""Clients that people have, against the real server: a chat, a call and its result, streams, errors.

openai is always here; the others come with the extra `clients`, and their tests say so where they are not installed.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI

from tests.serve.live_server import LiveServer
from tests.serve.test_tools import asked, called, tool

pytestmark = pytest.mark.filterwarnings("ignore")  # some leave connections open, and warn of their own imports

CALL = called("get_weather", {"city": "Paris"})


def url(server: LiveServer) -> str:
    return f"{server.summary['url']}/v1"


@pytest.fixture(autouse=True)
def left_connections() -> Iterator[None]:
    """They are closed while their warnings are ignored."""
    yield
    gc.collect()


def test_openai_async(scripted: LiveServer) -> None:
    async def turns() -> None:
        async with AsyncOpenAI(base_url=url(scripted), api_key="none", max_retries=0) as client:
            ask = client.chat.completions.create
            found: Any = await asyncio.gather(*(ask(model="scripted", **asked(CALL)) for _ in range(4)))
            assert all(each.choices[0].message.tool_calls[0].function.name == "get_weather" for each in found)
            text = ""
            async for chunk in await ask(model="scripted", **asked("so it is"), stream=True):
                text += chunk.choices[0].delta.content or ""
            assert text == "so it is"
            with pytest.raises(APIStatusError, match="no_such"):
                await ask(model="scripted", **asked(""), extra_body={"no_such": 1})

    asyncio.run(turns())


@pytest.mark.slow
def test_openai_runs_tools(scripted: LiveServer) -> None:
    """Its helper of streams gives each call whole, as parsed arguments."""
    with scripted.client().chat.completions.stream(model="scripted", **asked(f"Look: {CALL}")) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= set(kinds)
    [call] = message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"city": "Paris"}


@pytest.mark.slow
def test_litellm(scripted: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm", reason="it comes with the extra clients")
    common = {"model": "openai/scripted", "api_base": url(scripted), "api_key": "none", "num_retries": 0}
    found = litellm.completion(**common, **asked(CALL))
    assert found.choices[0].finish_reason == "tool_calls"
    assert json.loads(found.choices[0].message.tool_calls[0].function.arguments) == {"city": "Paris"}
    chunks = list(litellm.completion(**common, **asked(CALL), stream=True))
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert json.loads(rebuilt.choices[0].message.tool_calls[0].function.arguments) == {"city": "Paris"}
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**common, **asked("", tools=[tool(), tool()]))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**common, messages=[{"role": "user", "content": "a" * 300_000}])


@pytest.mark.slow
def test_langchain(scripted: LiveServer) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="it comes with the extra clients")
    model = langchain.ChatOpenAI(model="scripted", base_url=url(scripted), api_key="none", max_retries=0)
    able = model.bind_tools([tool()])
    first = able.invoke(f"@@@{CALL}@@@")
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [("get_weather", {"city": "Paris"})]
    result = {"role": "tool", "content": "@@@Sun.@@@", "tool_call_id": first.tool_calls[0]["id"]}
    assert able.invoke([{"role": "user", "content": "weather?"}, first, result]).content == "Sun."
    gathered: Any = None
    for chunk in able.stream(f"@@@{CALL}@@@"):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered.tool_calls[0]["args"] == {"city": "Paris"}


@pytest.mark.slow
def test_pydantic_ai(scripted: LiveServer) -> None:
    pytest.importorskip("pydantic_ai", reason="it comes with the extra clients")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url(scripted), api_key="none")
    agent: Any = Agent(OpenAIChatModel("scripted", provider=provider))
    asked_for: list[str] = []

    @agent.tool_plain  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        asked_for.append(city)
        return "@@@Sun.@@@"

    assert agent.run_sync(f"@@@{CALL}@@@").output == "Sun."
    assert asked_for == ["Paris"]


@pytest.mark.slow
def test_smolagents(scripted: LiveServer) -> None:
    smolagents = pytest.importorskip("smolagents", reason="it comes with the extra clients")
    model = smolagents.OpenAIServerModel("scripted", api_base=url(scripted), api_key="none")

    @smolagents.tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """The weather.

        Args:
            city: A city.
        """
        return "@@@" + called("final_answer", {"answer": f"Sun in {city}."}) + "@@@"

    agent = smolagents.ToolCallingAgent(tools=[get_weather], model=model, max_steps=3, verbosity_level=0)
    assert agent.run(f"@@@{CALL}@@@") == "Sun in Paris."


@pytest.mark.slow
def test_instructor(scripted: LiveServer) -> None:
    instructor = pytest.importorskip("instructor", reason="it comes with the extra clients")
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str
        degrees: int

    client = instructor.from_openai(scripted.client(), mode=instructor.Mode.TOOLS)
    answer = called("Weather", {"city": "Paris", "degrees": 21})
    messages = [{"role": "user", "content": f"@@@{answer}@@@"}]
    found = client.chat.completions.create(model="scripted", response_model=Weather, messages=messages, max_retries=0)
    assert found.model_dump() == {"city": "Paris", "degrees": 21}
