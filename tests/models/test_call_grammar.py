"""Grammars of calls: each family's own answers follow them, and others do not."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from quire.errors import InvalidInput
from quire.models.call_grammar import Calling
from quire.models.response_template import families
from tests.models.test_answer_parser import joined, parsed
from tests.serve.tiny_model import byte_tokenizer

TOOL = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"], "type": "string"},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
}
OTHER = {"name": "now", "parameters": {}}
FAMILIES = [name for name, family in families().items() if family.template.calls]
MARKS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>"),
    *("<|call|>", "<|start|>", "<|end|>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>"),
)


def tokenizer(*, has_marks: bool) -> Tokenizer:
    found = Tokenizer.from_str(byte_tokenizer().to_str().replace("<|end|>", "<|eos|>"))
    if has_marks:
        found.add_tokens([AddedToken(mark, special=mark[1] in "|T") for mark in MARKS])
    return found


class Grammar:
    def __init__(
        self,
        family: str,
        *,
        has_marks: bool = False,
        prompt: str = "",
        chat_template: str = "</think> [/THINK]",
        **choice: Any,
    ) -> None:
        self.tokens = tokenizer(has_marks=has_marks)
        tokens = self.tokens.get_added_tokens_decoder()
        added = {token.content: i for i, token in tokens.items()}
        special = {token.content for token in tokens.values() if token.special}
        given: dict[str, Any] = {"functions": [TOOL, OTHER], "is_required": True, "is_parallel": True} | choice
        template = families()[family].template.for_model(chat_template)
        self.text = template.grammar(prompt, Calling(**given), added, special)
        assert self.text is not None
        llg = LLTokenizer(self.tokens.to_str(), n_vocab=self.tokens.get_vocab_size(), eos_token=[256])
        self.matcher = LLMatcher(llg, LLMatcher.grammar_from_lark(self.text))
        assert not self.matcher.is_error(), self.matcher.get_error()

    def allows(self, text: str) -> bool:
        """Whether an answer may end with this."""
        self.matcher.reset()
        ids = self.tokens.encode(text, add_special_tokens=False).ids
        return bool(self.matcher.try_consume_tokens(ids) == len(ids) and self.matcher.is_accepting())


def said(family: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as the family writes them."""
    form = families()[family].template.calls
    assert form is not None
    texts = []
    for number, (name, arguments) in enumerate(calls):
        if form.parameter is None:
            body = json.dumps(arguments)
        else:
            before, after = form.parameter["begin"], form.parameter["end"]
            values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
            body = "".join(before.replace("{name}", key) + value + after for key, value in values.items())
        begin = form.begin.replace("{name}", name).replace("{number}", str(number))
        texts.append(begin + body + form.end)
    return form.section + form.between.join(texts) + form.section_end


@pytest.mark.parametrize("has_marks", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_required_calls(family: str, has_marks: bool) -> None:
    grammar = Grammar(family, has_marks=has_marks)
    good = said(family, ("get_weather", {"city": "Paris", "days": 3}))
    assert grammar.allows(good), grammar.text
    assert grammar.allows(said(family, ("now", {})))
    assert grammar.allows(said(family, ("get_weather", {"city": "P", "unit": "F"}), ("get_weather", {"city": "Q"})))
    assert not grammar.allows("I cannot.")
    assert not grammar.allows(good.replace("3", " " * 30 + "3"))
    assert not grammar.allows(said(family, ("other", {})))
    assert not grammar.allows(said(family, ("get_weather", {"days": 3})))
    assert not grammar.allows(said(family, ("get_weather", {"city": "P", "days": "x"})))
    tools = [{"type": "function", "function": TOOL}]
    assert joined(parsed(family, good, 3, tools=tools))[2][0][0] == "get_weather"
    assert json.loads(joined(parsed(family, good, 3, tools=tools))[2][0][1]) == {"city": "Paris", "days": 3}


@pytest.mark.parametrize("has_marks", [False, True])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama3"])
def test_calls_or_an_answer_by_a_schema(family: str, has_marks: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"]}
    schema |= {"$defs": {"A": {"type": "integer"}}, "additionalProperties": False}
    grammar = Grammar(family, has_marks=has_marks, is_required=False, schema=schema)
    assert grammar.allows('{"a": 1}'), grammar.text
    assert grammar.allows(said(family, ("now", {})))
    for wrong in ("I cannot.", '{"a": "b"}', 'So: {"a": 1}', '{"a": 1}' + said(family, ("now", {}))):
        assert not grammar.allows(wrong)


def test_calls_that_begin_as_json_stand_beside_no_schema() -> None:
    calling = Calling(functions=[OTHER], is_required=False, is_parallel=True, schema={})
    assert families()["llama3"].template.grammar("", calling, {}, ()) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_alone(family: str) -> None:
    grammar = Grammar(family, is_parallel=False)
    assert grammar.allows(said(family, ("now", {})))
    assert not grammar.allows(said(family, ("now", {}), ("now", {})))


@pytest.mark.parametrize("has_marks", [False, True])
@pytest.mark.parametrize("family", [name for name in FAMILIES if families()[name].template.calls.reasoning])  # type: ignore[union-attr]
def test_reasoning_before_a_required_call(family: str, has_marks: bool) -> None:
    form = families()[family].template.calls
    assert form is not None
    opening, closing = form.reasoning
    call = said(family, ("now", {}))
    grammar = Grammar(family, has_marks=has_marks)
    assert grammar.allows(f"{opening}\nso < or so\n{closing}\n\n{call}"), grammar.text
    assert not grammar.allows(f"{opening}\nso\n{closing}\n")
    begun = Grammar(family, has_marks=has_marks, prompt=f"x{opening}\n")
    assert begun.allows(f"so\n{closing}\n{call}")
    assert not begun.allows(call)
    if opening == "<think>":
        for other in (Grammar(family, prompt="<think>\n\n</think>\n\n"), Grammar(family, chat_template="")):
            assert other.allows(call)
            assert not other.allows(f"{opening}\nso\n{closing}\n{call}")


@pytest.mark.parametrize("has_marks", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_strict_tools_beside_text(family: str, has_marks: bool) -> None:
    functions = [TOOL | {"strict": True}, OTHER]
    grammar = Grammar(family, has_marks=has_marks, is_required=False, functions=functions)
    assert grammar.allows("Hello, [a] <b> {c}!")
    assert grammar.allows("")
    assert grammar.allows("I look. " + said(family, ("get_weather", {"city": "P"})))
    assert not grammar.allows("I look. " + said(family, ("get_weather", {"town": "P"})))
    assert grammar.allows(said(family, ("now", {"any": 1, "more": "text"})))


@pytest.mark.parametrize("family", [name for name in FAMILIES if families()[name].template.calls.parameter])  # type: ignore[union-attr]
@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"properties": {"city": {"type": "string", "maxLength": 3}}}, "maxLength"),
        ({"properties": {"city": {"type": "string", "const": "P"}}}, "const"),
        ({"anyOf": [{"required": ["city"]}]}, "anyOf"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, "$ref"),
        ({"minProperties": 1}, "minProperties"),
        ({"required": ["city"]}, "require 'city'"),
    ],
)
def test_what_parameters_of_their_own_cannot_enforce(family: str, parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(named)):
        Grammar(family, functions=[{"name": "f", "parameters": parameters}])
    Grammar(family, is_required=False, functions=[TOOL | {"strict": True}, {"name": "f", "parameters": parameters}])
