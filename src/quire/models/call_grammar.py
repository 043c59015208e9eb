"""Grammars, in Lark's syntax, of answers that call tools: calls alone, or text and calls whose arguments are strict.

A family says as data how it writes a call (`call` in its file). Texts that are tokens of their own stand as token ids:
in llguidance the letters of such a token are another text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidInput
from quire.spec.grammar import NOTES, WHITE_SPACE

_ANY = r"/(.|\n)*/"
_OF_PARAMETERS = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions"))
_OF_TEXT = frozenset(("type", "enum"))


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How a family writes calls. `begin` has `{name}` for the name of the tool, and perhaps `{number}`. Arguments
    follow as JSON, or by `parameter`: then a text before each value, with `{name}` for that of the parameter, and one
    after it. `section` and `section_end` are around all calls, the two of `reasoning` around what comes before."""

    begin: str
    end: str
    between: str = ""
    section: str = ""
    section_end: str = ""
    parameter: Mapping[str, str] | None = None
    reasoning: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Calling:
    """What an answer may call: functions with a `name`, `parameters` and `strict`, as chat templates take tools. With
    `is_required`, at least one of them. `reasons` says that the prompt has begun with reasoning. With a `schema`,
    an answer without calls is JSON that it allows, and no text stands beside calls."""

    functions: Sequence[Mapping[str, Any]]
    is_required: bool
    is_parallel: bool
    reasons: bool = False
    schema: Mapping[str, Any] | None = None


def call_grammar(form: CallForm, calling: Calling, added: Mapping[str, int], special: Collection[str]) -> str:
    """The grammar. `added` are the tokens that stand for a text of their own, with their ids. Those that are `special`
    are not in free text: some of them end a sequence."""
    return _CallGrammar(form, calling, added, special).text()


class _CallGrammar:
    def __init__(self, form: CallForm, calling: Calling, added: Mapping[str, int], special: Collection[str]) -> None:
        self._form = form
        self._calling = calling
        self._added = added
        self._in_text = [text for text in added if text not in special or text in form.reasoning]
        longest_first = sorted(added, key=len, reverse=True)
        self._tokens = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if added else r"(?!)")
        self._rules: list[str] = []

    def text(self) -> str:
        form = self._form
        first = form.section or form.begin
        found = re.match(r"[^\n{]+", first)
        marker = found[0] if found else first.partition("{name}")[0]
        is_alone = self._calling.is_required or self._calling.schema is not None
        if is_alone or self._tokens.match(first):
            marker = ""  # nothing else begins so
        section, begin = form.section.removeprefix(marker), form.begin
        if not form.section:
            begin = begin.removeprefix(marker)
        names = [self._call(number, begin, each) for number, each in enumerate(self._calling.functions)]
        self._rules.append("call: " + " | ".join(names))
        more = (
            f"({self._said(form.between)} call)*" if self._calling.is_parallel and (form.section or not marker) else ""
        )
        self._rules.append(f"calls: {self._said(section)} call {more} {self._said(form.section_end)}")
        start = self._alone() if is_alone else self._free(marker, first)
        return "\n".join([f"start: {start}", *self._rules])

    def _alone(self) -> str:
        """Calls without text beside them, or an answer by the schema, perhaps after reasoning."""
        answer = "calls"
        if self._calling.schema is not None:
            self._rules.append(f"answer: {_json(self._calling.schema)}")
            answer = "(answer | calls)"
        if not self._form.reasoning:
            return answer
        opening, closing = self._form.reasoning
        self._until("until", closing)
        self._rules.append("reasoned: until /\\s*/")
        return f"reasoned {answer}" if self._calling.reasons else f"({self._said(opening)} reasoned)? {answer}"

    def _until(self, rule: str, end: str) -> None:
        """The rule of any text and this end."""
        if self._tokens.match(end):
            self._any()
            self._rules.append(f"{rule}: {self._with_others('ANY', end)} {self._said(end)}")
        else:
            self._rules.append(f"{rule}[suffix={json.dumps(end, ensure_ascii=False)}]: {_ANY}")

    def _any(self) -> None:
        if (rule := f"ANY: {_ANY}") not in self._rules:
            self._rules.append(rule)

    def _free(self, marker: str, first: str) -> str:
        """Text, and calls, which begin with the marker, or else with a token of their own: that in `first`."""
        often = "*" if self._calling.is_parallel else "?"
        if not marker:
            self._any()
            self._rules.append(f"free: {self._with_others('ANY', first)}")
            return f"free (calls free){often}"
        escaped = re.escape(marker).replace("\\ ", " ").replace("/", "\\/")
        self._rules.append(f"TEXT: {_ANY} & ~/(.|\\n)*{escaped}(.|\\n)*/")
        self._rules.append(f"begun[suffix={json.dumps(marker, ensure_ascii=False)}]: {_ANY}")
        return f"(begun calls){often} TEXT"

    def _with_others(self, rule: str, end: str) -> str:
        """Text of this rule and added tokens, but for the one with which `end` begins."""
        begun = self._tokens.match(end)
        ids = ",".join(str(self._added[text]) for text in self._in_text if begun is None or text != begun[0])
        return f"{rule} (<[{ids}]> {rule})*" if ids else rule

    def _call(self, number: int, begin: str, function: Mapping[str, Any]) -> str:
        """The rule of calls of this function, which begin so: its name."""
        is_enforced = self._calling.is_required or function.get("strict")
        schema = {"type": "object", **(function.get("parameters", {}) if is_enforced else {})}
        begin = self._said(begin, function["name"])
        if self._form.parameter is None:
            arguments = f"arguments_{number}"
            self._rules.append(f"{arguments}: {_json(schema)}")
        elif not is_enforced:
            arguments = self._any_parameters(number, self._form.parameter)
        else:
            arguments = self._parameters(number, schema, self._form.parameter)
        self._rules.append(f"call_{number}: {begin} {arguments} {self._said(self._form.end)}")
        return f"call_{number}"

    def _any_parameters(self, number: int, around: Mapping[str, str]) -> str:
        before, after = around["begin"].split("{name}")
        self._until(f"value_{number}", around["end"])
        return f"({self._said(before)} /[^<>\\n]+/ {self._said(after)} value_{number})*"

    def _parameters(self, number: int, schema: Mapping[str, Any], around: Mapping[str, str]) -> str:
        tool = self._calling.functions[number]["name"]
        _check_keywords(tool, "#", schema, _OF_PARAMETERS)
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        properties = schema.get("properties", {})
        if missing := [name for name in schema.get("required", ()) if name not in properties]:
            raise InvalidInput(
                f"the parameters of tool '{tool}' require '{missing[0]}', and it is no property of them."
            )
        found = []
        for place, (name, one) in enumerate(properties.items()):
            rule, after = f"value_{number}_{place}", around["end"]
            if isinstance(one, Mapping) and one.get("type") == "string":
                _check_keywords(tool, f"#/properties/{name}", one, _OF_TEXT)
            if isinstance(one, Mapping) and one.get("type") == "string" and "enum" not in one:
                self._until(rule, after)
            elif isinstance(one, Mapping) and one.get("type") == "string":
                texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in one["enum"])
                self._rules.append(f"{rule}: ({texts}) {self._said(after)}")
            else:
                inner = {**one, **shared} if isinstance(one, Mapping) else {}
                self._rules.append(f"{rule}_json: {_json(inner)}")
                self._rules.append(f"{rule}: {rule}_json {self._said(after)}")
            mark = "" if name in schema.get("required", ()) else "?"
            found.append(f"({self._said(around['begin'], name)} {rule}){mark}")
        return " ".join(found)

    def _said(self, text: str, name: str = "") -> str:
        """The text as Lark has it."""
        parts = re.split(r"(\{number\})", text.replace("{name}", name))
        return " ".join("/[0-9]+/" if part == "{number}" else self._literal(part) for part in parts if part)

    def _literal(self, text: str) -> str:
        pieces = self._tokens.split(text)
        return " ".join(
            f"<[{self._added[piece]}]>" if piece in self._added else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )


def _check_keywords(tool: str, path: str, schema: Mapping[str, Any], enforced: Collection[str]) -> None:
    """Raise InvalidInput for a keyword that calls with each parameter on its own cannot enforce."""
    for keyword in schema:
        if keyword not in enforced and keyword not in NOTES:
            raise InvalidInput(
                f"the parameters of tool '{tool}' have the keyword '{keyword}' at {path}, which cannot be enforced in "
                "the form in which this model writes calls.",
                fix="leave it out, or strict and tool_choice.",
            )


def _json(schema: Mapping[str, Any]) -> str:
    """JSON that a schema allows, as Lark has it."""
    return f"%json {json.dumps({'x-guidance': {'whitespace_pattern': WHITE_SPACE}, **schema}, ensure_ascii=False)}"
