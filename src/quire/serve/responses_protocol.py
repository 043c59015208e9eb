"""The body of `/v1/responses`: OpenAI's newer fields, and the conversation that they are.

The server stores no answers, so a client sends the whole conversation each time, as agents do. A field is read, or
ignored because it changes no answer of this server, or refused by name.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from quire import grammar
from quire.scheduler.sampling_params import SamplingParams
from quire.serve.conversation import Conversation, Tool, ToolChoice, call_of, chosen_tool, joined
from quire.serve.errors import BadField, naming
from quire.serve.protocol import (
    MOST_CALLS,
    MOST_MESSAGES,
    NOTHING,
    TEMPLATE_ROLES,
    CalledName,
    Int32,
    ModelBody,
    Parts,
    Seed,
    TemplateVariables,
    Text,
    ToolName,
    drawn,
    field,
    only,
)

REFUSED: Mapping[str, tuple[object, ...]] = dict.fromkeys(
    ("background", "conversation", "moderation", "personality", "previous_response_id", "prompt"), NOTHING
)
"""Fields that would change the answer, and the values with which they would not."""

REPEATED = ("max_tool_calls", "metadata", "prompt_cache_key", "safety_identifier", "user")
"""Fields that do not affect the answer, and that it has again. `max_tool_calls` counts tools that run at OpenAI, not
functions."""

IGNORED = frozenset((
    *REPEATED, "access_programs", "background_options", "client_metadata", "context_management", "image",
    "prompt_cache_options", "prompt_cache_retention", "service_tier", "store", "stream_options", "truncation",
))  # fmt: skip
"""Fields that do not affect the answer of this server. A prompt that is too long is refused, whatever `truncation`
says."""

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

_OURS = "quire."  # the beginning of reasoning as `encrypted_content`
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_NAMES = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}  # names of fields of SamplingParams here


def encrypted(reasoning: str) -> str:
    """Reasoning as clients keep it that send no readable reasoning back. Nothing is secret in it."""
    return _OURS + base64.b64encode(reasoning.encode()).decode()


def _decrypted(text: str) -> str:
    """That reasoning; none of another service's."""
    try:
        return base64.b64decode(text.removeprefix(_OURS), validate=True).decode() if text.startswith(_OURS) else ""
    except ValueError:
        return ""


class OpenObject(BaseModel):
    """An object that may have more fields: clients send back what answers had, and marks of their own."""

    model_config = ConfigDict(strict=True, extra="ignore")


class InputPart(OpenObject):
    """A piece of text; there are no other kinds of content here."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


class RefusalPart(OpenObject):
    """What an assistant said in place of an answer."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """What it said."""
        return self.refusal


_TEXTS = ("input_text", "output_text", "text")
Part = Annotated[Annotated[InputPart | RefusalPart, Field(discriminator="type")], only(*_TEXTS, "refusal")]
ResultPart = Annotated[InputPart, only(*_TEXTS)]


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _with_type(item: Any) -> Any:
    """Messages may leave their type out."""
    return {"type": "message"} | item if isinstance(item, dict) and item.get("type") is None else item


class MessageItem(OpenObject):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts[Part] = field("Text, or parts.", ...)

    def turn(self) -> dict[str, Any]:
        """The turn as chat templates take it."""
        return {
            "role": TEMPLATE_ROLES.get(self.role, self.role),
            "content": "".join(part.text for part in self.content),
        }


class CallItem(OpenObject):
    """A call of a tool in an earlier turn."""

    type: Literal["function_call"]
    call_id: Text
    name: CalledName
    arguments: Text = field("A JSON object.", ...)

    def turn(self) -> dict[str, Any]:
        """The turn as chat templates take it."""
        return {"role": "assistant", "content": "", "tool_calls": [call_of(self.call_id, self.name, self.arguments)]}


class ResultItem(OpenObject):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Text = ""
    name: CalledName | None = field("The tool, where no call has this `call_id`.")
    output: Parts[ResultPart] = field("Text, or parts.", ...)

    def turn(self) -> dict[str, Any]:
        """The turn as chat templates take it."""
        content = "".join(part.text for part in self.output)
        return {"role": "tool", "tool_call_id": self.call_id, "name": self.name or "", "content": content}


class ReasoningPart(OpenObject):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(OpenObject):
    """Reasoning of an earlier turn: its text, or what this server gave as `encrypted_content`. That of other services
    is left out."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(max_length=MOST_MESSAGES, fail_fast=True)] | None = None
    encrypted_content: Text | None = None

    def turn(self) -> dict[str, Any]:
        """The turn as chat templates take it."""
        text = "".join(part.text for part in self.content or ()) or _decrypted(self.encrypted_content or "")
        return {"role": "assistant", "content": "", "reasoning_content": text}


Item = Annotated[
    Annotated[MessageItem | CallItem | ResultItem | ReasoningItem, Field(discriminator="type")],
    BeforeValidator(_with_type),
    only("message", "function_call", "function_call_output", "reasoning"),
]


class ToolItem(OpenObject):
    """A tool. Those that are no functions run elsewhere, or in another form: the model is not told of them, and the
    answer's `tools` do not have them."""

    type: Text
    name: ToolName | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = field("A JSON schema of its arguments.")
    strict: bool | None = field("Arguments follow the schema exactly; default false.")

    @model_validator(mode="after")
    def _has_name(self) -> Self:
        if self.type == "function" and self.name is None:
            raise PydanticCustomError("missing_name", "Input should have a name")
        return self


class ChoiceItem(OpenObject):
    """The tool to call, or with the type `allowed_tools` those of which the model may call."""

    type: Text
    name: ToolName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ToolItem], Field(max_length=MOST_CALLS, fail_fast=True)] | None = None


class TextFormat(OpenObject):
    """Text, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = field("The schema.", alias="schema")
    strict: bool | None = field("The schema is enforced, whatever this says.")

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise PydanticCustomError("missing_schema", "Input should have a schema")
        return self


class TextOptions(OpenObject):
    """The form of text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = field("Models here have no levels of it.")


class ReasoningOptions(OpenObject):
    """How much the model reasons, where its chat template lets that be chosen. No reasoning is summarised."""

    effort: Text | None = None
    summary: Text | None = None


class ResponsesBody(ModelBody):
    """The body of `/v1/responses`.

    With `explain`, the answer has an `explanation`: why no more of its prompt was cached. With a `session_id` it has a
    `session`: what is held for the next turn.
    """

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = REFUSED
    ignored: ClassVar[frozenset[str]] = IGNORED

    input: Annotated[
        list[Item],
        Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
        BeforeValidator(_as_items, json_schema_input_type=Text | list[Item]),
    ] = field("The conversation, for the model's chat template; a text is what the user says.", ...)
    instructions: Text | None = field("What the system says first.")
    tools: Annotated[list[ToolItem], Field(max_length=MOST_CALLS, fail_fast=True)] | None = field(
        "Tools that the model may call."
    )
    tool_choice: Literal["none", "auto", "required"] | ChoiceItem | None = field(
        "Whether it may call tools, has to, or has to call this one; default auto."
    )
    parallel_tool_calls: bool | None = field("Whether an answer may have several calls; default true.")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Text], Field(max_length=64)] | None = field(
        f"`{LOGPROBS}` and `{ENCRYPTED}` add to the answer."
    )
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = field(
        "Most tokens to generate; an answer ends at the end of the context, too."
    )
    stream: bool | None = field("Answer in events, as tokens come.")
    temperature: float | None = field("0 takes the most likely token; default 1.")
    top_p: float | None = field("Draw from the tokens that make up this probability.")
    top_k: Int32 | None = field("Draw from so many tokens; 0 or -1: from all.")
    min_p: float | None = field("Leave out tokens below this share of the most likely one's probability.")
    seed: Seed | None = field("Same seed, same tokens, whatever else runs.")
    top_logprobs: Int32 | None = field(f"Most likely tokens to show at each position, with `{LOGPROBS}`.")
    chat_template_kwargs: TemplateVariables | None = field("Variables of the model's chat template.")

    def check(self) -> None:
        for name in ("previous_response_id", "conversation"):
            if (self.model_extra or {}).get(name):
                fix = f"send the whole conversation as input, without {name}."
                raise BadField(
                    f"{name} names what this server does not have: it stores no answers.", param=name, fix=fix
                )
        super().check()

    def includes(self, what: str) -> bool:
        """Whether the answer is to have it."""
        return what in (self.include or ())

    @property
    def format(self) -> TextFormat:
        """The form of text; default is text."""
        return (self.text and self.text.format) or TextFormat(type="text")

    def params(self) -> SamplingParams:
        """How its tokens are drawn."""
        given: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.includes(LOGPROBS):
            given["logprobs"] = self.top_logprobs or 0
        with naming("text.format.schema"):
            if self.format.type == "json_schema":
                given["grammar"] = grammar.json_schema(self.format.schema_ or {})
            elif self.format.type == "json_object":
                given["grammar"] = grammar.json_object()
        return drawn(_NAMES, max_tokens=self.max_output_tokens, **given)

    def conversation(self) -> Conversation:
        """The conversation as every dialect has it."""
        begun = [{"role": "system", "content": self.instructions}] if self.instructions else []
        tools, choice = self._offered()
        return Conversation(
            messages=joined([*begun, *(item.turn() for item in self.input)]),
            tools=tools,
            choice=choice,
            is_parallel=self.parallel_tool_calls is not False,
            variables=self._variables(),
        )

    def _offered(self) -> tuple[list[Tool], ToolChoice]:
        """The tools of which the prompt tells, and which of them to call. Raises BadField for the name of none."""
        functions = [each for each in self.tools or () if each.type == "function"]
        tools = [Tool.of(each.name or "", each.description, each.parameters, each.strict) for each in functions]
        match self.tool_choice:
            case ChoiceItem(type="allowed_tools"):
                names = [chosen_tool(each.name or "", tools).name for each in self.tool_choice.tools or ()]
                return [tool for tool in tools if tool.name in names], ToolChoice(mode=self.tool_choice.mode or "auto")
            case ChoiceItem(type="function"):
                return tools, chosen_tool(self.tool_choice.name or "", tools)
            case ChoiceItem():
                raise BadField(
                    f"tool_choice has the type '{self.tool_choice.type[:60]}'; no such tool runs here.",
                    param="tool_choice",
                    fix="choose a function.",
                )
        return tools, ToolChoice(mode=self.tool_choice or "auto")

    def _variables(self) -> dict[str, Any]:
        effort = self.reasoning and self.reasoning.effort
        chosen: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
        return chosen | ({"enable_thinking": False} if effort == "none" else {}) | (self.chat_template_kwargs or {})
