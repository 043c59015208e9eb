"""`/v1/responses`, with OpenAI's own client: items, events, tools, and what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

from quire.serve.answer_reader import CallArguments, CallBegun, Content, Piece, Reasoning
from quire.serve.responses import Items
from quire.serve.responses_protocol import ResponsesBody, encrypted
from tests.serve.live_server import LiveServer

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bath"}}\n</tool_call>'
ANSWER = f"<think>Where?</think>A moment.\n{CALL}\n{CALL.replace('Bath', 'York')}"


class City(BaseModel):
    name: str
    people: int


@pytest.fixture(scope="module")
def client(scripted: LiveServer) -> OpenAI:
    return scripted.client()


def create(client: OpenAI, said: Any, **options: Any) -> Any:
    """The answer; the scripted engine says what is between the marks."""
    make: Any = client.responses.create
    return make(model="scripted", input=said, **options)


def script(answer: str) -> str:
    return f"@@@{answer}@@@"


def without_ids(response: Any) -> Any:
    """An answer in which ids and times are left out."""
    found = response if isinstance(response, dict) else response.model_dump(mode="json")
    found = {name: value for name, value in found.items() if name not in ("id", "created_at", "completed_at", "usage")}
    items = [
        {name: each[name] for name in each if name not in ("id", "call_id", "parsed_arguments")}
        for each in found["output"]
    ]
    for item in items:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return found | {"output": items}


def test_an_answer_has_what_clients_read(client: OpenAI) -> None:
    found = create(client, script("Hello there."), instructions="Be brief.", metadata={"a": "b"}, user="u", store=True)
    assert found.output_text == "Hello there."
    assert (found.status, found.object, found.model, found.error) == ("completed", "response", "scripted", None)
    assert found.id.startswith("resp_")
    [item] = found.output
    assert (item.type, item.role, item.status, item.id[:4]) == ("message", "assistant", "completed", "msg_")
    assert (found.store, found.metadata, found.instructions, found.user) == (False, {"a": "b"}, "Be brief.", "u")
    assert (found.tools, found.tool_choice, found.text.format.type) == ([], "auto", "text")
    usage = found.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens == len("Hello there.") + 1
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    required = type(found).model_fields
    assert {name for name, each in required.items() if each.is_required()} <= found.model_fields_set


def test_a_stream_makes_the_same_answer(client: OpenAI) -> None:
    for answer in (ANSWER, "Only text, and not little of it.", CALL, ""):
        options: Any = {"tools": [WEATHER], "include": ["reasoning.encrypted_content"]}
        whole = create(client, script(answer), **options)
        with client.responses.stream(model="scripted", input=script(answer), **options) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert without_ids(final) == without_ids(whole), answer
        assert [each.sequence_number for each in events] == list(range(len(events)))
        assert [each.type for each in events[:2]] == ["response.created", "response.in_progress"]
        assert events[0].response.output == []
        assert events[-1].type == "response.completed"
        assert all(each.id in str(events) for each in final.output)


def test_events_come_in_their_order(client: OpenAI) -> None:
    stream = create(client, script(ANSWER), tools=[WEATHER], stream=True)
    kinds: list[str] = []
    for each in stream:
        kind = each.type.removeprefix("response.")
        if not (kinds and kinds[-1] == kind and kind.endswith("delta")):
            kinds.append(kind)
    call = ["output_item.added", *(f"function_call_arguments.{each}" for each in ("delta", "done")), "output_item.done"]

    def text(kind: str) -> list[str]:
        part = ["content_part.added", f"{kind}.delta", f"{kind}.done", "content_part.done"]
        return ["output_item.added", *part, "output_item.done"]

    texts = [*text("reasoning_text"), *text("output_text")]
    assert kinds == ["created", "in_progress", *texts, *call, *call, "completed"]


def test_a_call_and_its_result(client: OpenAI) -> None:
    first = create(client, script(ANSWER), tools=[WEATHER], include=["reasoning.encrypted_content"])
    reasoning, message, *calls = first.output
    assert (reasoning.content[0].text, message.content[0].text) == ("Where?", "A moment.")
    assert reasoning.summary == []
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Bath"}, {"city": "York"}]
    assert len({call.call_id for call in calls}) == 2
    assert 0 < first.usage.output_tokens_details.reasoning_tokens < first.usage.output_tokens
    said: list[Any] = [{"role": "user", "content": "How is it?"}, *(each.model_dump() for each in first.output)]
    said += [{"type": "function_call_output", "call_id": call.call_id, "output": script("Rain.")} for call in calls]
    assert create(client, said, tools=[WEATHER]).output_text == "Rain."


def test_a_full_answer_is_incomplete(client: OpenAI) -> None:
    found = create(client, script("Hello there."), max_output_tokens=4)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.output_text, found.output[0].status) == ("Hell", "incomplete")
    *_, last = create(client, script("Hello there."), max_output_tokens=4, stream=True)
    assert last.type == "response.incomplete"
    assert without_ids(last.response) == without_ids(found)


def test_more_tokens_than_the_context_has_are_clamped(scripted: LiveServer) -> None:
    body = {"input": script("Yes."), "max_output_tokens": 2**30}
    status, headers, found = scripted.exchange("/v1/responses", body)
    assert status == 200
    assert int(headers["X-Quire-Max-Tokens"]) == found["max_output_tokens"] < 2**20
    assert found["status"] == "completed"


def test_text_that_follows_a_schema_is_parsed(client: OpenAI) -> None:
    answer = json.dumps({"name": "Bath", "people": 94782})
    found = client.responses.parse(model="scripted", input=script(answer), text_format=City)
    assert found.output_parsed == City(name="Bath", people=94782)
    with client.responses.stream(model="scripted", input=script(answer), text_format=City) as stream:
        assert stream.get_final_response().output_parsed == found.output_parsed


def test_async_clients(scripted: LiveServer) -> None:
    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{scripted.summary['url']}/v1", api_key="none", max_retries=0) as client:
            whole = client.responses.create(model="scripted", input=script("One."))
            async with client.responses.stream(model="scripted", input=script("Two.")) as stream:
                final = await stream.get_final_response()
            return [(await whole).output_text, final.output_text]

    assert asyncio.run(ask()) == ["One.", "Two."]


def test_what_is_not_there_is_refused_by_name(client: OpenAI) -> None:
    for name, value in (
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("background", True),
        ("prompt", {"id": "p"}),
        ("tool_choice", {"type": "web_search"}),
        ("tool_choice", {"type": "function", "name": "clock"}),
        ("temperature", 1000),
        ("top_logprobs", 99),
        ("tempreature", 1),
    ):
        with pytest.raises(BadRequestError) as caught:
            create(client, "x", include=["message.output_text.logprobs"], extra_body={name: value})
        assert caught.value.param == name, caught.value
    for item, place in (
        ({"type": "item_reference", "id": "msg_1"}, "input[1]"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}, "content[0]"),
        ({"role": "tool", "content": "x"}, "input[1]"),
    ):
        with pytest.raises(BadRequestError, match=r"input") as caught:
            create(client, [{"role": "user", "content": "x"}, item])
        assert place in str(caught.value)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(NotFoundError, match="resp_1"):
            ask("resp_1")


def test_tools_that_run_elsewhere_are_left_out(client: OpenAI) -> None:
    others = [{"type": "web_search"}, {"type": "namespace", "name": "agents", "description": "d", "tools": []}]
    found = create(client, script("Yes."), tools=[*others, WEATHER])
    assert [tool.name for tool in found.tools] == ["weather"]
    told = create(client, script("Yes."), tools=[WEATHER])
    assert told.usage.input_tokens == found.usage.input_tokens


def test_tokens_of_a_prompt_are_counted(client: OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="scripted", input=script("Yes."), tools=[WEATHER])  # type: ignore[list-item]
    found = create(client, script("Yes."), tools=[WEATHER])
    assert counted.input_tokens == found.usage.input_tokens


def test_logprobs_are_those_of_the_tokens(server: LiveServer) -> None:
    options: Any = {"temperature": 0, "max_output_tokens": 8, "top_logprobs": 2}
    options["include"] = ["message.output_text.logprobs"]
    client = server.client()
    client.responses.create(model="tiny", input="Hello", **options)  # a cold prompt may be rounded in another way
    whole = client.responses.create(model="tiny", input="Hello", **options)
    [item] = whole.output
    logprobs = item.content[0].logprobs  # type: ignore[union-attr]
    assert len(logprobs) == whole.usage.output_tokens == 8  # type: ignore[arg-type, union-attr]
    assert all(len(each.top_logprobs) == 2 and each.logprob <= 0 for each in logprobs)  # type: ignore[union-attr]
    *_, last = client.responses.create(model="tiny", input="Hello", stream=True, **options)
    assert without_ids(last.response)["output"] == without_ids(whole)["output"]  # type: ignore[union-attr]
    assert last.response.usage.input_tokens_details.cached_tokens > 0  # type: ignore[union-attr]


# -- the conversation that a body is


def turns(*items: object, **fields: Any) -> list[Any]:
    return list(ResponsesBody.model_validate({"input": list(items)} | fields).conversation().messages)


def test_a_history_is_as_templates_take_it() -> None:
    call = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "weather",
        "arguments": '{"city": "Bath"}',
    }
    parts = [{"type": "input_text", "text": "18"}, {"type": "input_text", "text": ", rain"}]
    found = turns(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Use tools."}]},
        {"role": "user", "content": "Hello"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": encrypted("Where?")},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "A moment.", "annotations": []}],
        },
        call,
        call | {"call_id": "call_2", "arguments": "not JSON"},
        {"type": "function_call_output", "call_id": "call_1", "output": parts},
        {"type": "function_call_output", "call_id": "call_2", "output": "error"},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "gAAAA of another service"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        instructions="Be brief.",
    )

    def called(call_id: str, arguments: object) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}

    calls = [called("call_1", {"city": "Bath"}), called("call_2", {})]
    assert found == [
        {"role": "system", "content": "Be brief.\n\nUse tools."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "A moment.", "reasoning_content": "Where?", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "18, rain"},
        {"role": "tool", "tool_call_id": "call_2", "name": "weather", "content": "error"},
        {"role": "assistant", "content": "No.", "reasoning_content": ""},
    ]


def test_allowed_tools_are_those_of_the_prompt() -> None:
    tools = [WEATHER, WEATHER | {"name": "clock"}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    body = ResponsesBody.model_validate({"input": "x", "tools": tools, "tool_choice": allowed})
    conversation = body.conversation()
    assert [tool.name for tool in conversation.tools] == ["clock"]
    assert (conversation.choice.mode, conversation.choice.name) == ("required", "")


# -- the items of an answer

texts = st.text(st.sampled_from("ab \n"), max_size=4)
calls = st.builds(
    lambda name, parts: [CallBegun(0, name), *(CallArguments(0, part) for part in parts)], texts, st.lists(texts)
)
pieces = st.lists(st.one_of(texts.map(lambda text: [Content(text)]), texts.map(lambda text: [Reasoning(text)]), calls))


@given(pieces)
def test_events_make_the_items(found: list[list[Piece]]) -> None:
    items = Items("k")
    events = [event for each in found for piece in each for event in items.add(piece)] + items.last("completed")
    made: list[dict[str, Any]] = []
    open_at = None
    for each in events:
        kind, place = each["type"].removeprefix("response."), each["output_index"]
        if kind == "output_item.added":
            assert open_at is None and place == len(made)
            open_at = place
            made.append({"text": ""} | each["item"])
        assert place == open_at
        assert each.get("item_id", made[place]["id"]) == made[place]["id"]
        if kind.endswith(".delta"):
            made[place]["text"] += each["delta"]
        if kind == "output_item.done":
            part = (each["item"].get("content") or [{"text": each["item"].get("arguments")}])[0]
            assert part["text"] == made[place]["text"]
            made[place], open_at = each["item"], None
    assert open_at is None and made
    assert made == items.items
    assert len({each["id"] for each in made}) == len(made)
    spoken = "".join(piece.text for each in found for piece in each if isinstance(piece, Content))
    shown = "".join(each["content"][0]["text"] for each in made if each["type"] == "message")
    assert "".join(shown.split()) == "".join(spoken.split())
    assert len(made) == 1 or all(each["content"][0]["text"] for each in made if each["type"] == "message")
