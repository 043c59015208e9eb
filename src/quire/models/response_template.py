"""Response templates: how a family of models writes reasoning and tool calls, as data for transformers' parser.

A tokenizer may carry one. `response_templates/` has those of families whose checkpoints carry none, each with a text
that occurs in the chat templates of the family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from quire.errors import ModelLoadError

FOLDER = Path(__file__).with_name("response_templates")


@dataclass(frozen=True)
class ResponseTemplate:
    """The form of a family's answers, under the family's name; `spec` is as transformers defines it. A model that
    `reasons` may write reasoning in each answer."""

    name: str
    spec: Mapping[str, Any]
    reasons: bool

    @classmethod
    def of(cls, name: str, spec: Mapping[str, Any], chat_template: str) -> ResponseTemplate:
        """A model reasons if its chat template has the text with which its family begins to."""
        opening = spec["fields"].get("reasoning_content", {}).get("open", [])
        marks = [opening] if isinstance(opening, str) else opening
        return cls(name, spec, any(mark in chat_template for mark in marks))

    def parser(self, prefix: str, tools: Sequence[Mapping[str, Any]]) -> ResponseParser:
        """A parser of one answer to the prompt `prefix`. Arguments of calls are cast to the types of these tools."""
        return ResponseParser(dict(self.spec), prefix, tools=list(map(dict, tools)))


@lru_cache(maxsize=1)
def families() -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Families by name: the text by which the family's chat templates are recognised, and its template."""
    found = {}
    for file in sorted(FOLDER.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        found[file.stem] = (content["recognised_by"], content["template"])
    return found


def find(chosen: str, *, own: Mapping[str, Any] | None, chat_template: str) -> ResponseTemplate | None:
    """The template of a tokenizer: the one `chosen` by name, of a JSON file with that path, or none for "none"; with
    "auto" its `own`, else that of the first family that its chat template is of."""
    if chosen == "none":
        return None
    if chosen == "auto":
        if own is not None:
            return ResponseTemplate.of("own", own, chat_template)
        names = (name for name, (mark, _) in families().items() if mark in chat_template)
        chosen = next(names, "none")
        return find(chosen, own=own, chat_template=chat_template)
    if chosen in families():
        return ResponseTemplate.of(chosen, families()[chosen][1], chat_template)
    try:
        found = ResponseTemplate.of(chosen, json.loads(Path(chosen).read_text(encoding="utf-8")), chat_template)
        found.parser("", ())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"the response template '{chosen}' cannot be read: {error}.",
            fix=f"use auto, none, {', '.join(families())}, or the path of a JSON file.",
        ) from error
    return found
