"""Answers of each family of models: parsed in pieces, cut off, malformed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from quire.models.answer_parser import AnswerPart
from quire.models.response_template import families, find

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
            },
        },
    }
]
FIRST, SECOND = {"city": 'Paris, "x" {', "days": 3}, {"city": "Nîmes", "tags": ["a", "b"]}
ONE, TWO = json.dumps(FIRST), json.dumps(SECOND, ensure_ascii=False)

# Answers with reasoning, content and two calls where the family has them.
ANSWERS = {
    "hermes": (
        "<think>\nWhich city?\n</think>\n\nI look.\n"
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ONE}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_weather", "arguments": {TWO}}}\n</tool_call>'
    ),
    "qwen3_coder": (
        "<think>\nWhich city?\n</think>\n\nI look.\n"
        f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{FIRST['city']}\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nNîmes\n</parameter>\n"
        '<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>'
    ),
    "glm": (
        "\n<think>Which city?</think>\nI look.\n"
        f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{FIRST['city']}</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Nîmes</arg_value>\n"
        '<arg_key>tags</arg_key>\n<arg_value>["a", "b"]</arg_value>\n</tool_call>'
    ),
    "llama3": f'<|python_tag|>{{"name": "get_weather", "parameters": {ONE}}}',
    "mistral": (
        f'I look.[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ONE}}}, '
        f'{{"name": "get_weather", "arguments": {TWO}}}]'
    ),
    "mistral_args": (
        f"[THINK]Which city?[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{ONE}"
        f"[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{TWO}"
    ),
    "deepseek_v3": (
        "<think>\nWhich city?\n</think>\n\nI look.<｜tool▁calls▁begin｜>"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ONE}\n```<｜tool▁call▁end｜>\n"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{TWO}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        "<think>Which city?</think>I look.<｜tool▁calls▁begin｜>"
        f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ONE}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{TWO}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        "<think>Which city?</think>I look.<|tool_calls_section_begin|>"
        f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{ONE}<|tool_call_end|>"
        f"<|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{TWO}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "harmony": (
        "<|channel|>analysis<|message|>Which city?<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ONE}<|call|>"
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{TWO}"
    ),
}
CALLS = {"llama3": [FIRST]}
ONLY_CALLS = ("llama3",)
NO_REASONING = ("llama3", "mistral")

CHAT_TEMPLATES = {
    "hermes": '<|im_start|> <tool_call>\n{"name"',
    "qwen3_coder": "<|im_start|> <tool_call>\n<function=example",
    "glm": "<|assistant|> <tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "llama3": '<|start_header_id|> "parameters": dictionary of argument name and its value}',
    "mistral": "[INST] [TOOL_CALLS] [",
    "mistral_args": "[INST] [TOOL_CALLS]name[ARGS]",
    "deepseek_v3": "<｜tool▁calls▁begin｜> '```json'",
    "deepseek_v31": "<｜tool▁calls▁begin｜> <｜tool▁sep｜>",
    "kimi_k2": "<|im_middle|> <|tool_calls_section_begin|>",
    "harmony": "<|start|>assistant<|channel|>final<|message|>",
    "think": "<think></think>",
}


def parsed(
    family: str, text: str, size: int = 0, *, streams: bool = True, tools: object = TOOLS, prompt: str = ""
) -> list[AnswerPart]:
    parser = families()[family].template.parser(prompt, tools, streams=streams)  # type: ignore[arg-type]
    pieces = [text[i : i + size] for i in range(0, len(text), size)] if size else [text]
    return [*(part for piece in pieces for part in parser.feed(piece)), *parser.end()]


def joined(parts: list[AnswerPart]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and calls as (name, arguments)."""
    calls: list[tuple[str, str]] = []
    for kind, text in parts:
        if kind == "call":
            calls.append((text, ""))
        if kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + text)
    content, reasoning = ("".join(text for kind, text in parts if kind == each) for each in ("content", "reasoning"))
    return content, reasoning, calls


def test_each_family_has_its_answer() -> None:
    assert ANSWERS.keys() | {"think"} == families().keys() == CHAT_TEMPLATES.keys()


@pytest.mark.parametrize("family", CHAT_TEMPLATES)
def test_a_family_is_recognised_by_its_chat_template(family: str) -> None:
    found = find("auto", own=None, chat_template=CHAT_TEMPLATES[family])
    assert found is not None
    assert found.name == family


@pytest.mark.parametrize("size", [0, 1, 3, 50])
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("family", ANSWERS)
def test_answers(family: str, streams: bool, size: int) -> None:
    content, reasoning, calls = joined(parsed(family, ANSWERS[family], size, streams=streams))
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("get_weather", each) for each in CALLS.get(family, [FIRST, SECOND])
    ]
    assert content == ("" if family in ONLY_CALLS else "I look.")
    assert reasoning == ("" if family in NO_REASONING else "Which city?")


@pytest.mark.parametrize("family", ANSWERS)
def test_an_answer_cut_off_anywhere_loses_nothing(family: str) -> None:
    """The parts are the same whatever the pieces; a whole answer has whole calls only, and the first calls of a stream
    are the same."""
    answer = ANSWERS[family]
    for length in range(0, len(answer), 2):
        text = answer[:length]
        content, reasoning, calls = joined(parsed(family, text, streams=False))
        for name, arguments in calls:
            assert name == "get_weather"
            assert isinstance(json.loads(arguments), dict)
        whole = joined(parsed(family, text, 1, streams=False))
        assert whole == (content, reasoning, calls)
        streamed = joined(parsed(family, text, 3))
        assert streamed == joined(parsed(family, text, 7))
        assert streamed[1] == reasoning
        for (name, arguments), (_, first) in zip(calls, streamed[2], strict=False):
            assert (name, arguments) == ("get_weather", first)


@pytest.mark.parametrize(
    "family", ["hermes", "qwen3_coder", "glm", "deepseek_v3", "kimi_k2", "harmony", "mistral_args"]
)
def test_a_whole_answer_cut_off_in_its_last_call_shows_it(family: str) -> None:
    """As content, with its marker."""
    answer = ANSWERS[family]
    cut = answer[: answer.rindex("Nîmes") + 2]
    content, _, calls = joined(parsed(family, cut, streams=False))
    assert len(calls) == 1
    assert content.startswith("I look.")
    assert cut.endswith(content.removeprefix("I look.").lstrip("\n"))


def test_a_call_that_is_no_json_is_content_and_those_around_it_are_calls() -> None:
    good, bad = '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>{oops}</tool_call>"
    for size in (0, 1, 3):
        content, _, calls = joined(parsed("hermes", f"a {good} b {bad} c {good} d", size))
        assert calls == [("f", "{}"), ("f", "{}")]
        assert content.split() == ["a", "b", bad, "c", "d"]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"'])
def test_arguments_that_only_python_reads_are_those_of_a_stream(value: str) -> None:
    answer = f'<tool_call>{{"name": "f", "arguments": {{"x": {value}}}}}</tool_call>'
    for streams in (True, False):
        assert joined(parsed("hermes", answer, streams=streams)) == ("", "", [("f", f'{{"x": {value}}}')])
    mistral = joined(parsed("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {{"x": {value}}}}}]'))
    assert len(mistral[2]) == (0 if "ud800" in value else 1)  # written anew, it would have no UTF-8


@pytest.mark.parametrize("value", ["[" * 3000, "[" * 3000 + "]" * 3000])
def test_a_call_whose_arguments_cannot_be_read_is_content(value: str) -> None:
    for inner in (f'{{"name": "f", "arguments": {{"x": {value}}}}}', f'{{"name": "f", "parts": {value}}}', value):
        answer = f"<tool_call>{inner}</tool_call>"
        assert joined(parsed("hermes", answer, streams=False)) == (answer, "", [])
    answer = f'[TOOL_CALLS] [{{"name": "f", "arguments": {{"x": {value}}}}}]'
    assert joined(parsed("mistral", answer)) == (answer, "", [])


class Counted:
    """A pattern that counts the characters through which it is searched for."""

    def __init__(self, pattern: Any) -> None:
        self.pattern = pattern
        self.num_characters = 0

    def search(self, text: str, start: int, *, partial: bool) -> Any:
        self.num_characters += len(text) - start
        return self.pattern.search(text, start, partial=partial)

    def finditer(self, text: str) -> Any:
        return self.pattern.finditer(text)


@pytest.mark.parametrize("begun", ["a", "<|channel|>commentary to=functions.f", "[TOOL_CALLS]f[CALL_ID]"])
@pytest.mark.parametrize("size", [16, 0])
@pytest.mark.parametrize("family", CHAT_TEMPLATES)
def test_white_space_is_read_in_linear_time(family: str, size: int, begun: str) -> None:
    text = begun + " " * 100_000 + "b"
    template = families()[family].template
    counted = []
    fields = {}
    for name, field in template.form.fields.items():
        patterns = {key: getattr(field, key) and Counted(getattr(field, key)) for key in ("open_re", "close_re")}
        counted += [each for each in patterns.values() if each]
        fields[name] = replace(field, **patterns)
        assert not re.search(r"\\s[*+]", str([each.pattern.pattern for each in counted])), (
            "each place begins a long run"
        )
    template = replace(template, form=replace(template.form, fields=fields))
    parser = template.parser("", TOOLS, streams=True)
    pieces = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
    parts = [*(part for piece in pieces for part in parser.feed(piece)), *parser.end()]
    assert joined(parts)[0] == text
    assert max(each.num_characters for each in counted) < 100 * len(text)


def test_reasoning_that_the_prompt_opens() -> None:
    for prompt in ("<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>"):
        assert joined(parsed("hermes", "why\n</think>\n\nso", 1, prompt=prompt)) == ("so", "why", [])
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert joined(parsed("hermes", "so", prompt=closed)) == ("so", "", [])
    said = "<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
    assert joined(parsed("hermes", "so", prompt=said)) == ("so", "", [])
    assert joined(parsed("hermes", "cut o", prompt="<think>\n")) == ("", "cut o", [])


def test_without_tools_no_call_is_looked_for() -> None:
    answer = '<think>a</think>{"name": 1} <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    content, reasoning, calls = joined(parsed("hermes", answer, 2, tools=()))
    assert (content, reasoning, calls) == (answer.removeprefix("<think>a</think>"), "a", [])


def test_json_that_is_no_call_is_content() -> None:
    for answer in ('{"name": "Bob", "age": 5}', 'See {"name": "get_weather", "parameters": {}}'):
        assert joined(parsed("llama3", answer, 3)) == (answer, "", [])


def test_arguments_are_cast_by_the_schema_where_a_family_writes_none_of_their_types() -> None:
    answer = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>75001</arg_value></tool_call>"
    assert joined(parsed("glm", answer))[2] == [("get_weather", '{"city": "75001"}')]


def test_white_space_of_plain_content_is_kept() -> None:
    text = "a\n\n  b  \n\n"
    for size in (0, 1, 4):
        assert joined(parsed("hermes", text, size)) == (text, "", [])


def test_the_name_of_a_call_leaves_before_its_arguments_are_whole() -> None:
    parser = families()["hermes"].template.parser("", TOOLS, streams=True)
    assert parser.feed('<tool_call>\n{"name": "f", "arguments": {"a": "b') == [("call", "f"), ("arguments", '{"a": "b')]
    assert parser.feed('\\"}') == [("arguments", '\\"}')]
    assert parser.feed('"}') == [("arguments", '"}')]
    assert parser.feed("}\n</tool_call>") == parser.end() == []


def test_a_model_without_marks_of_reasoning_has_no_parser_but_for_tools() -> None:
    for text, reasons in (("<tool_call>", False), ("<tool_call> <think>", True), ("<tool_call> </think>", True)):
        found = find("auto", own=None, chat_template=text)
        assert found is not None
        assert found.reasons == reasons


def history(*ids: str) -> list[dict[str, object]]:
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}} for each in ids]
    results = [{"role": "tool", "tool_call_id": each, "content": "x"} for each in reversed(ids)]
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def test_ids_of_calls_are_those_that_a_chat_template_takes() -> None:
    def ids(family: str) -> list[str]:
        turns = families()[family].template.turns([*history("call_1", "call_2"), *history("abcdefgh9")])
        called = [call["id"] for turn in turns for call in turn.get("tool_calls", ())]
        return called + [turn["tool_call_id"] for turn in turns if turn["role"] == "tool"]

    assert ids("hermes") == ["call_1", "call_2", "abcdefgh9", "call_2", "call_1", "abcdefgh9"]
    numbered = [f"functions.f:{number}" for number in range(3)]
    assert ids("kimi_k2") == [*numbered, numbered[1], numbered[0], numbered[2]]
    nine = ids("mistral")
    assert all(len(each) == 9 and each.isalnum() for each in nine)
    assert nine[2] == "abcdefgh9"
    assert nine == [*nine[:3], nine[1], nine[0], nine[2]]
    assert len(set(nine)) == 3


def test_arguments_are_text_where_a_chat_template_joins_them() -> None:
    for family, arguments in (("deepseek_v3", '{"a": 1}'), ("hermes", {"a": 1})):
        [_, turn, *_] = families()[family].template.turns(history("1"))
        assert turn["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_form_of_the_checkpoint_wins_and_the_family_says_the_rest() -> None:
    own = {"start_anchor": "x", "fields": {"content": {}, "tool_calls": {"open": "<tool_call>", "content": "json"}}}
    found = find("auto", own=own, chat_template=CHAT_TEMPLATES["hermes"])
    assert found is not None
    assert (found.name, found.reasons, found.calls) == ("own", False, families()["hermes"].template.calls)
