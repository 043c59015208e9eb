"""A conversation as every dialect has it: messages for the model's chat template, tools, and which of them to call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.client.tokenising import Rendered, Tokenising
from quire.errors import InvalidInput
from quire.serve.answer_reader import AnswerReader
from quire.serve.errors import BadField

TEMPLATE_ARGUMENTS = frozenset((
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations", "documents",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
))  # fmt: skip
"""Names that the tokenizer itself interprets, not the model's template: a client's own template would be a program that
runs here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a request is served: its part of the cache, its place among others, and until when by the event loop's
    clock."""

    cache_salt: str = ""
    session_id: str = ""
    priority: int = 0
    explain: bool = False
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that the model may call. `parameters` is a JSON schema of its arguments, which `strict` enforces."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether the model may call tools, has to, or has to call the one with this name."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What an answer continues. `messages` are as chat templates take them: `role`, a `content` that is text, perhaps
    `tool_calls` with arguments as objects, `tool_call_id`, `name`, `reasoning_content`. `variables` are those of the
    model's own template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    choice: ToolChoice = ToolChoice()
    is_parallel: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)

    async def rendered(self, tokenising: Tokenising) -> Rendered:
        """The prompt. Raises BadField for variables that mean something to the tokenizer itself, and what
        `Tokenising.chat` does."""
        for name in self.variables:
            if name in TEMPLATE_ARGUMENTS:
                raise BadField(
                    f"chat_template_kwargs cannot set {name}; it is for variables of the model's own template.",
                    param="chat_template_kwargs",
                    fix=f"leave {name} out.",
                )
        tools = {} if self._offers_none else {"tools": [tool.for_template() for tool in self.tools]}
        return await tokenising.chat(self.messages, {**self.variables, **tools})

    @property
    def _offers_none(self) -> bool:
        return not self.tools or self.choice.mode == "none"

    def reader(self, tokenising: Tokenising, prompt: Rendered) -> Callable[[], AnswerReader] | None:
        """Makes a reader for each answer to it; None where each answer is text and nothing else."""
        tools = () if self._offers_none else [tool.for_template() for tool in self.tools]
        parser = tokenising.response_parser(prompt.text, tools)
        return None if parser is None else lambda: AnswerReader(parser)


def able_to_chat(tokenising: Tokenising | None) -> Tokenising:
    """The server's tokenizer. Raises InvalidInput if there is none."""
    if tokenising is None:
        raise InvalidInput("this server has no tokenizer, so it cannot chat.", fix="send token ids to /v1/completions.")
    return tokenising


def chosen_tool(name: str, tools: Sequence[Tool]) -> ToolChoice:
    """The choice of the tool with this name. Raises BadField if there is none."""
    if all(tool.name != name for tool in tools):
        raise BadField(f"tool_choice names '{name[:60]}', and there is no such tool.", param="tool_choice")
    return ToolChoice(mode="required", name=name)


def call_of(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a history as chat templates take it: arguments as an object, or the text where it is none."""
    try:
        found = json.loads(arguments)
    except ValueError:
        found = None
    given = found if isinstance(found, dict) else arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}
