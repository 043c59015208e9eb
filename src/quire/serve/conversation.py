"""A conversation as every dialect has it: messages for the model's chat template, tools, and which of them to call."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from quire.client.tokenising import Rendered, Tokenising
from quire.grammar import json_schema, lark
from quire.scheduler.sampling_params import SamplingParams
from quire.serve.answer_reader import AnswerReader
from quire.serve.errors import BadField, naming
from quire.spec.grammar import Grammar

TEMPLATE_ARGUMENTS = frozenset((
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations", "documents",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
))  # fmt: skip
"""Names that the tokenizer itself interprets, not the model's template: a client's own template would be a program that
runs here."""


BETWEEN = "\n\n"
"""What stands between two texts of one turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a request is served: its part of the cache, its place among others (the engine's `priority`: higher goes
    first; clients send the opposite, as to vLLM), and until when by the event loop's clock. With `echo`, the text of
    each answer begins with its prompt. `places` names the items of the client's conversation at a token of it."""

    cache_salt: str = ""
    session_id: str = ""
    last_turn: bool = False
    priority: int = 0
    explain: bool = False
    echo: bool = False
    deadline: float | None = None
    places: Callable[[int], Sequence[str]] = lambda token: ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that the model may call. `parameters` is a JSON schema of its arguments, which `strict` enforces."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    @classmethod
    def of(cls, name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool | None) -> Tool:
        """From fields of a body."""
        return cls(name=name, description=description or "", parameters=parameters or {}, strict=bool(strict))

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

    async def rendered(self, tokenising: Tokenising, salt: str | None = None) -> Rendered:
        """The prompt. Pieces of it are kept for conversations with the same `salt`; with None, none is. Raises BadField
        for variables that mean something to the tokenizer itself, and what `Tokenising.chat` does."""
        for name in self.variables:
            if name in TEMPLATE_ARGUMENTS:
                raise BadField(
                    f"chat_template_kwargs cannot set {name}; it is for variables of the model's own template.",
                    param="chat_template_kwargs",
                    fix=f"leave {name} out.",
                )
        if self.choice.mode == "required" and not self.tools:
            raise BadField("a call is required, and there are no tools.", param="tool_choice", fix="give tools.")
        if not self._offered:
            return await tokenising.chat(self.messages, self.variables, salt=salt)
        for name, count in Counter(tool.name for tool in self.tools).items():
            if count > 1:
                raise BadField(f"{count} tools have the name '{name}'.", param="tools", fix="give each its own name.")
        with naming("tools"):
            await tokenising.aside(tokenising.tokenizer.check_tools)
        tools = [tool.for_template() for tool in self._offered]
        return await tokenising.chat(self.messages, {**self.variables, "tools": tools}, salt=salt)

    def reader(self, tokenising: Tokenising, prompt: Rendered, params: SamplingParams) -> Callable[[], AnswerReader]:
        """Makes a reader for each answer to it. `params` get what it
        needs: special tokens that mark parts in some families are shown, and calls have the form that was asked for.
        An answer of calls alone has no content that a stop string or token could end: it has none.

        Raises BadField for a schema that cannot be enforced, and for stop strings or tokens that may end a strict call.
        """
        tools = [tool.for_template() for tool in self._offered]
        parser = tokenising.tokenizer.response_parser(prompt.text, tools)
        if parser is not None and params.skip_special_tokens:
            params.skip_special_tokens = "unmarked"
        if self.has_grammar(params):
            params.grammar = self._grammar(tokenising, prompt, params)
            if self.choice.mode == "required":
                params.stop, params.stop_token_ids = [], []
        return partial(AnswerReader, parser, is_parallel=self.is_parallel)

    @property
    def _offered(self) -> Sequence[Tool]:
        return () if self.choice.mode == "none" else self.tools

    def has_grammar(self, params: SamplingParams) -> bool:
        """Whether a grammar holds the calls to their form, or leaves them possible beside the form of the answer."""
        return bool(self._offered) and (
            self.choice.mode == "required" or params.grammar is not None or any(tool.strict for tool in self.tools)
        )

    def _grammar(self, tokenising: Tokenising, prompt: Rendered, params: SamplingParams) -> Grammar:
        is_required, form = self.choice.mode == "required", params.grammar
        if form is not None and (is_required or form.kind != "json"):
            raise BadField(
                "an answer cannot have this form of its own and that of calls of tools.",
                param="tool_choice" if is_required else "tools",
                fix="leave out one of them; JSON by a schema may stand beside tools with tool_choice auto.",
            )
        is_strict = any(tool.strict for tool in self.tools)
        if (params.stop or params.stop_token_ids) and is_strict and not is_required:
            raise BadField(
                "stop strings and tokens might end a call whose arguments are strict.",
                param="tools",
                fix="leave out stop and stop_token_ids, or strict.",
            )
        called = [tool for tool in self.tools if self.choice.name in ("", tool.name)]
        for number, tool in enumerate(self.tools):
            if tool in called and (is_required or tool.strict):
                about = f"the parameters of tool '{tool.name}' cannot be enforced: "
                with naming(f"tools[{number}].function.parameters", about):
                    json_schema({"type": "object", **tool.parameters})
        offered = [
            {"type": "function", "function": {**tool.for_template()["function"], "strict": tool.strict}}
            for tool in called
        ]
        choice: dict[str, Any] = {"is_required": is_required, "is_parallel": self.is_parallel}
        if form is not None:
            choice["schema"] = json.loads(form.text)
        with naming("tools"):
            text = tokenising.tokenizer.call_grammar(prompt.text, offered, **choice)
        if text is None:
            raise BadField(
                "the form of calls of tools cannot be enforced for this model: it is not known how it writes one, or "
                "they begin as the answer does, which has a form of its own.",
                param="tool_choice" if is_required else "tools",
                fix="use tool_choice auto without strict or a form, or choose a family by --response-template.",
            )
        with naming("tools", "the tools together: "):
            return lark(text)


def joined(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours of one role are one turn, but results of tools are not. Results have the names of their tools."""
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for kind, neighbours in groupby(turns, key=itemgetter("role")):
        if kind == "tool":
            found += [turn | {"name": names.get(turn["tool_call_id"], turn.get("name", ""))} for turn in neighbours]
        else:
            found.append(turn := _one_turn(list(neighbours)))
            names |= {call["id"]: call["function"]["name"] for call in turn.get("tool_calls", ())}
    return found


def _one_turn(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Its texts are joined once, so in linear time."""
    found = turns[0]
    for name in ("content", "reasoning_content"):
        if texts := [text for turn in turns if (text := turn.get(name))]:
            found[name] = BETWEEN.join(texts)
    if calls := [call for turn in turns for call in turn.get("tool_calls", ())]:
        found["tool_calls"] = calls
    return found


def chosen_tool(name: str, tools: Sequence[Tool]) -> ToolChoice:
    """The choice of the tool with this name. Raises BadField if there is none."""
    if all(tool.name != name for tool in tools):
        known = ", ".join(tool.name for tool in tools[:8]) + (", ..." if len(tools) > 8 else "")
        raise BadField(
            f"tool_choice names '{name[:60]}', and there is no such tool.",
            param="tool_choice",
            fix=f"choose one of {known}." if tools else "add it to tools.",
        )
    return ToolChoice(mode="required", name=name)


def call_of(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a history as chat templates take it: arguments as an object. That is empty for a call that was cut off:
    templates go through its items."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = None
    given = found if isinstance(found, dict) else {}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}
