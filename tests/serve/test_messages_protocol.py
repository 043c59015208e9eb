"""Bodies of `/v1/messages`: the conversation that they are, and the blocks of an answer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from quire.errors import QuireError
from quire.serve.answer_reader import CallArguments, CallBegun, Content, Piece, Reasoning
from quire.serve.messages import SIGNATURE, MessageBlocks, content_of
from quire.serve.messages_protocol import MessagesBody

TOOL = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object"}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.fa0; cc_entrypoint=cli;"


def body(*messages: object, **fields: Any) -> MessagesBody:
    turns = [each if isinstance(each, dict) else {"role": "user", "content": each} for each in messages]
    return MessagesBody.model_validate({"max_tokens": 8, "messages": turns} | fields)


def turns(*messages: object, **fields: Any) -> list[Any]:
    return list(body(*messages, **fields).conversation().messages)


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": each} for each in texts]


def test_a_history_is_as_templates_take_it() -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bath"}}
    thinking = {"type": "thinking", "thinking": "Ask for it.", "signature": "quire"}
    hidden = {"type": "redacted_thinking", "data": "EmwKAhgB"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": text("18", "rain"), "is_error": True}
    found = turns(
        "Hello",
        {"role": "assistant", "content": [hidden, thinking, *text("A moment."), use]},
        [result, *text("And now?")],
        {"role": "system", "content": "Be brief."},
        tools=[TOOL],
    )
    function = {"name": "weather", "arguments": {"city": "Bath"}}
    call = {"id": "toolu_1", "type": "function", "function": function}
    assert found == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "A moment.", "reasoning_content": "Ask for it.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": "Error: 18\n\nrain"},
        {"role": "user", "content": "And now?"},
        {"role": "system", "content": "Be brief."},
    ]


def test_neighbours_of_one_role_are_one_turn() -> None:
    said = {"role": "assistant", "content": "a"}
    assert turns("x", text("y", "z"), said, said | {"content": ""}, "w") == [
        {"role": "user", "content": "x\n\ny\n\nz"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "w"},
    ]


def test_the_billing_header_is_no_part_of_the_prompt() -> None:
    prompts = [turns("Hello", system=[*text(BILLING + str(number)), *text("Be brief.")]) for number in (1, 2)]
    assert prompts[0] == prompts[1] == turns("Hello", system="Be brief.")
    assert turns("Hello", system=text(BILLING)) == turns("Hello")


def test_a_system_message_may_be_gone_at_the_next_turn() -> None:
    now = {"role": "system", "content": "It is noon.", "clear_at": "next_user_message"}
    assert [each["role"] for each in turns("a", now)] == ["user", "system"]
    assert turns("a", now, "b") == [{"role": "user", "content": "a\n\nb"}]


@pytest.mark.parametrize(
    ("choice", "mode", "name", "is_parallel"),
    [
        ({"type": "auto"}, "auto", "", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", "", False),
        ({"type": "tool", "name": "weather"}, "required", "weather", True),
        ({"type": "none"}, "none", "", True),
        (None, "auto", "", True),
    ],
)
def test_choices_of_tools(choice: Any, mode: str, name: str, is_parallel: bool) -> None:
    found = body("Hello", tools=[TOOL | {"type": "custom", "strict": True}], tool_choice=choice).conversation()
    assert (found.choice.mode, found.choice.name, found.is_parallel) == (mode, name, is_parallel)
    [tool] = found.tools
    assert (tool.name, tool.description, tool.parameters, tool.strict) == (*TOOL.values(), True)


def test_thinking_is_a_variable_of_the_template() -> None:
    kinds = [{"type": "enabled", "budget_tokens": 2048}, {"type": "disabled"}, {"type": "adaptive"}]
    found = [body("Hello", thinking=kind).conversation().variables for kind in kinds]
    assert found == [{"enable_thinking": True}, {"enable_thinking": False}, {}]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "messages say nothing"),
        ({"messages": [{"role": "assistant", "content": "The answer is ("}]}, "end with a turn of the assistant"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"stop_sequence": ["x"]}, "use stop_sequences"),
        ({"tool_choice": {"type": "tool", "name": "weather"}}, "no such tool"),
        ({"stop_sequences": [""]}, "stop must be non-empty"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}, "messages": []}, "QUIRE-REQUEST-02"),
    ],
)
def test_what_would_be_lost_in_silence_is_refused(fields: Any, said: str) -> None:
    def read() -> None:
        found = body("Hello", **fields)
        found.check()
        found.params()
        found.conversation()

    with pytest.raises(QuireError, match=said):
        read()


@pytest.mark.parametrize(
    ("content", "where", "said"),
    [
        ([*text("a"), {"type": "image", "source": {}}], ("messages", 0, "content", 1), "image is not supported"),
        ([{"type": "document"}], ("messages", 0, "content", 0), "document is not supported"),
    ],
)
def test_blocks_that_are_no_text_are_refused_by_name_and_place(content: Any, where: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said) as caught:
        body(content)
    assert caught.value.errors()[0]["loc"] == where


def test_harmless_fields_are_no_error() -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    found = body(
        [*text("a"), {"type": "text", "text": "b", "cache_control": mark, "citations": None}],
        metadata={"user_id": "u"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        service_tier="auto",
        system=[{"type": "text", "text": "c", "cache_control": mark | {"scope": "global"}}],
        tools=[TOOL | {"cache_control": mark, "eager_input_streaming": True, "input_examples": [{}]}],
        thread={"type": "create"},
        mcp_servers=[],
    )
    found.check()
    assert found.params().max_tokens == 8


CALL: list[Piece] = [CallBegun(0, "weather"), CallArguments(0, '{"a"'), CallArguments(0, ": 1}")]
PIECES: Any = st.one_of(
    st.builds(Content, st.text(min_size=1)).map(lambda piece: [piece]),
    st.builds(Reasoning, st.text(min_size=1)).map(lambda piece: [piece]),
    st.just(CALL),
)


@given(st.lists(PIECES, max_size=8))
def test_blocks_of_an_answer_are_well_formed(parts: list[list[Piece]]) -> None:
    pieces = [piece for part in parts for piece in part]
    blocks = MessageBlocks()
    events = [event for piece in pieces for event in blocks.add(piece)] + blocks.end()
    is_open, index = False, -1
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            is_open, index = True, index + 1
        assert is_open and event["index"] == index
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    found = content_of(events)
    assert len(found) == index + 1
    assert [each["input"] for each in found if each["type"] == "tool_use"] == [{"a": 1}] * parts.count(CALL)
    thought = "".join(each.text for each in pieces if isinstance(each, Reasoning))
    assert "".join(each["thinking"] for each in found if each["type"] == "thinking") == thought
    assert all(each["signature"] == SIGNATURE for each in found if each["type"] == "thinking")
    said = "".join(each.text for each in pieces if isinstance(each, Content))
    assert "".join("".join(each["text"].split()) for each in found if each["type"] == "text") == "".join(said.split())
    for before, after in itertools.pairwise(found):
        assert before["type"] != after["type"] or before["type"] == "tool_use"


def test_thinking_may_be_omitted() -> None:
    blocks = MessageBlocks(shows_thinking=False)
    events = [*blocks.add(Reasoning("secret")), *blocks.add(Content("\n\nHello")), *blocks.end()]
    assert content_of(events) == [
        {"type": "thinking", "thinking": "", "signature": SIGNATURE},
        {"type": "text", "text": "Hello"},
    ]
