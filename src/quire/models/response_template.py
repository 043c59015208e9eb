"""Response templates: how a family of models writes reasoning and tool calls, as data.

A tokenizer may carry one. `response_templates/` has those of families whose checkpoints carry none, each with texts
that occur in the chat templates of the family.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from transformers.utils.chat_parsing.response_templates import ResponseTemplate as ResponseForm
from transformers.utils.chat_parsing.response_templates import load_response_template

from quire.errors import ModelLoadError
from quire.models.answer_parser import CALLS, AnswerParser, opened
from quire.models.call_grammar import CallForm, Calling, call_grammar

FOLDER = Path(__file__).with_name("response_templates")


@dataclass(frozen=True)
class ResponseTemplate:
    """The form of a family's answers, under the family's name. `calls` says how to write one, where that is known. An
    answer of a model that `reasons` may have other parts than content and calls.

    `ids` says which ids of calls its chat templates take: "nine" letters and digits, "numbered" by tool, or any. Those
    that `takes_text` want arguments as JSON, not as objects.
    """

    name: str
    form: ResponseForm
    reasons: bool = False
    calls: CallForm | None = None
    ids: Literal["any", "nine", "numbered"] = "any"
    takes_text: bool = False

    @classmethod
    def of(cls, name: str, spec: Mapping[str, Any], **more: Any) -> ResponseTemplate:
        """`spec` is as transformers defines it, but for runs of white space in patterns, which are short: each place of
        a long one would be a beginning. Raises ValueError where it is not."""
        bounded = json.loads(json.dumps(spec).replace(r"\\s*", r"\\s{0,64}").replace(r"\\s+", r"\\s{1,64}"))
        return cls(name, load_response_template(bounded), **more)

    @property
    def has_calls(self) -> bool:
        """Whether it says how calls of tools are written."""
        return CALLS in self.form.fields

    @property
    def marks(self) -> str:
        """All texts that mark parts of an answer; patterns without their escapes."""
        patterns = [each for field in self.form.fields.values() for each in (field.open_re, field.close_re) if each]
        return "\n".join(each.pattern.replace("\\", "") for each in patterns)

    def for_model(self, chat_template: str) -> ResponseTemplate:
        """This template for one model, which reasons if its chat template has a marker of such a part. Patterns are
        taken to be in it."""
        others = [each for each in self.form.fields.values() if each.name not in ("content", CALLS)]
        marks = [(each.open_literals or [""]) + (each.close_literals or []) for each in others]
        return replace(self, reasons=any(mark in chat_template for mark in chain.from_iterable(marks)))

    def grammar(self, prompt: str, calling: Calling, added: Mapping[str, int], special: Collection[str]) -> str | None:
        """The grammar of answers to this prompt (`call_grammar`), where it is known how a call is written, and where
        that differs at once from JSON that may stand in its place."""
        if self.calls is None:
            return None
        if calling.schema is not None and (self.calls.section or self.calls.begin).startswith("{"):
            return None
        ends = tuple(self.calls.reasoning[1:])
        may_reason = self.reasons and not prompt.rstrip().endswith(ends or "\n")
        calls = self.calls if may_reason else replace(self.calls, reasoning=())
        reasons = opened(self.form, prompt) is not None
        return call_grammar(calls, replace(calling, reasons=reasons), added, special)

    def turns(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Messages with calls as the chat templates of the family take them."""
        if self.ids == "any" and not self.takes_text:
            return list(messages)
        ids: dict[str, str] = {}
        found: list[Mapping[str, Any]] = []
        for message in messages:
            if calls := message.get("tool_calls"):
                found.append({**message, "tool_calls": [self._turned(call, ids) for call in calls]})
            elif "tool_call_id" in message:
                call_id = message["tool_call_id"]
                found.append({**message, "tool_call_id": ids.get(call_id) or self._id(call_id, "", len(ids))})
            else:
                found.append(message)
        return found

    def _turned(self, call: Mapping[str, Any], ids: dict[str, str]) -> dict[str, Any]:
        """The call, whose id is added to `ids`: by that which the client has for it, in order."""
        function = call["function"]
        ids[call["id"]] = self._id(call["id"], function["name"], len(ids))
        if self.takes_text and not isinstance(function["arguments"], str):
            function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        return {**call, "id": ids[call["id"]], "function": function}

    def _id(self, call_id: str, name: str, number: int) -> str:
        if self.ids == "numbered":
            return f"functions.{name}:{number}"
        if self.ids == "any" or (len(call_id) == 9 and call_id.isascii() and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]

    def parser(self, prompt: str, tools: Sequence[Mapping[str, Any]], *, streams: bool) -> AnswerParser:
        """A parser of one answer to this prompt, which offered these tools."""
        return AnswerParser(self.form, prompt, tools, streams=streams)


@dataclass(frozen=True)
class Family:
    """Models that write alike: the texts that all occur in their chat templates, and their response template."""

    marks: Sequence[str]
    template: ResponseTemplate


@lru_cache(maxsize=1)
def families() -> dict[str, Family]:
    """Families by name."""
    found = {}
    for file in sorted(FOLDER.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        more = {name: content[name] for name in ("ids", "takes_text") if name in content}
        calls = CallForm(**content["call"]) if "call" in content else None
        template = ResponseTemplate.of(file.stem, content["template"], calls=calls, **more)
        found[file.stem] = Family(content["recognised_by"], template)
    return found


def find(chosen: str, *, own: Mapping[str, Any] | None, chat_template: str) -> ResponseTemplate | None:
    """The template of a tokenizer: the one `chosen` by name, of a JSON file with that path, or none for "none"; with
    "auto" that of the family of which its chat template has most marks, in which its `own` form, if any, stands."""
    found = _found(chosen, own, chat_template)
    return None if found is None else found.for_model(chat_template)


def _found(chosen: str, own: Mapping[str, Any] | None, chat_template: str) -> ResponseTemplate | None:
    if chosen == "none":
        return None
    if chosen == "auto":
        fitting = [each for each in families().values() if all(mark in chat_template for mark in each.marks)]
        family = max(fitting, key=lambda each: len(each.marks)).template if fitting else None
        if own is None:
            return family
        template = ResponseTemplate.of("own", own)
        return template if family is None else replace(family, name="own", form=template.form)
    if chosen in families():
        return families()[chosen].template
    try:
        return ResponseTemplate.of(chosen, json.loads(Path(chosen).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"the response template '{chosen}' cannot be read: {error}.",
            fix=f"use auto, none, {', '.join(families())}, or the path of a JSON file.",
        ) from error
