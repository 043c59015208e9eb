"""Answers that follow a schema, by the parsers and the helpers of streams of OpenAI's and Anthropic's own clients: the
bundled model, which knows nothing of schemas."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.serve.live_server import LiveServer

MODEL = "quire-bundled"


class Trip(BaseModel):
    city: Literal["Paris", "Bath"]
    days: Literal[1, 2, 3]  # limits of numbers would be left out by the client of Anthropic


ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Where to?"}], "max_tokens": 60}
GREEDY = {"temperature": 0}


def test_chats_of_openai(bundled: LiveServer) -> None:
    completions = bundled.client().chat.completions
    found = completions.parse(**ASKED, **GREEDY, response_format=Trip).choices[0]
    assert found.finish_reason == "stop" and isinstance(found.message.parsed, Trip)
    with completions.stream(**ASKED, **GREEDY, response_format=Trip) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == found.message.parsed
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_responses_of_openai(bundled: LiveServer) -> None:
    responses = bundled.client().responses
    asked: Any = {"model": MODEL, "input": "Where to?", "max_output_tokens": 60, "temperature": 0}
    found = responses.parse(**asked, text_format=Trip)
    assert isinstance(found.output_parsed, Trip)
    with responses.stream(**asked, text_format=Trip) as stream:
        assert stream.get_final_response().output_parsed == found.output_parsed


def test_messages_of_anthropic(bundled: LiveServer) -> None:
    messages = bundled.anthropic().messages
    found = messages.parse(**ASKED, output_format=Trip)
    assert found.stop_reason == "end_turn" and isinstance(found.parsed_output, Trip)
    with messages.stream(**ASKED, output_format=Trip) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Trip)


def test_async_clients_at_once(bundled: LiveServer) -> None:
    async def ask() -> list[object]:
        url = bundled.summary["url"]
        async with (
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai,
            AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as anthropic,
        ):
            chats = [openai.chat.completions.parse(**ASKED, response_format=Trip) for _ in range(3)]
            messages = [anthropic.messages.parse(**ASKED, output_format=Trip) for _ in range(3)]
            found = await asyncio.gather(asyncio.gather(*chats), asyncio.gather(*messages))
            return [*(each.choices[0].message.parsed for each in found[0]), *(each.parsed_output for each in found[1])]

    assert all(isinstance(each, Trip) for each in asyncio.run(ask()))
