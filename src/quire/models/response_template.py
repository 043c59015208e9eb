"""Response templates: how a family of models writes reasoning and tool calls, as data.

A tokenizer may carry one. `response_templates/` has those of families whose checkpoints carry none, each with texts
that occur in the chat templates of the family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers.utils.chat_parsing.response_templates import ResponseTemplate as ResponseForm
from transformers.utils.chat_parsing.response_templates import load_response_template

from quire.errors import ModelLoadError
from quire.models.answer_parser import CALLS, AnswerParser

FOLDER = Path(__file__).with_name("response_templates")


@dataclass(frozen=True)
class ResponseTemplate:
    """The form of a family's answers, under the family's name."""

    name: str
    form: ResponseForm

    @classmethod
    def of(cls, name: str, spec: Mapping[str, Any]) -> ResponseTemplate:
        """`spec` is as transformers defines it. Raises ValueError where it is not."""
        return cls(name, load_response_template(dict(spec)))

    @property
    def has_calls(self) -> bool:
        """Whether it says how calls of tools are written."""
        return CALLS in self.form.fields

    @property
    def reasons(self) -> bool:
        """Whether an answer may have other parts than content and calls."""
        return bool(self.form.fields.keys() - {"content", CALLS})

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
        found[file.stem] = Family(content["recognised_by"], ResponseTemplate.of(file.stem, content["template"]))
    return found


def find(chosen: str, *, own: Mapping[str, Any] | None, chat_template: str) -> ResponseTemplate | None:
    """The template of a tokenizer: the one `chosen` by name, of a JSON file with that path, or none for "none"; with
    "auto" its `own`, else that of the family of which its chat template has most marks."""
    if chosen == "none":
        return None
    if chosen == "auto":
        if own is not None:
            return ResponseTemplate.of("own", own)
        fitting = [each for each in families().values() if all(mark in chat_template for mark in each.marks)]
        return max(fitting, key=lambda each: len(each.marks)).template if fitting else None
    if chosen in families():
        return families()[chosen].template
    try:
        return ResponseTemplate.of(chosen, json.loads(Path(chosen).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"the response template '{chosen}' cannot be read: {error}.",
            fix=f"use auto, none, {', '.join(families())}, or the path of a JSON file.",
        ) from error
