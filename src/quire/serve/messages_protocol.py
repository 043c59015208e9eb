"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's fields, and the conversation that they are.

A field of Anthropic's API is read, or ignored because it changes no answer of this server (`IGNORED`), or refused by
name because the answer without it would be wrong (`REFUSED`, blocks that are no text, tools that run elsewhere).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from quire.errors import UnknownThread
from quire.grammar import json_schema
from quire.scheduler.sampling_params import SamplingParams
from quire.serve.closed_object import ClosedObject
from quire.serve.conversation import BETWEEN, Conversation, Tool, ToolChoice, chosen_tool, joined
from quire.serve.errors import BadField, naming
from quire.serve.protocol import (
    MOST_CALLS,
    MOST_MESSAGES,
    MOST_STOPS,
    NOTHING,
    CalledName,
    Int32,
    ModelBody,
    Parts,
    StopText,
    Text,
    ToolName,
    drawn,
    few_parts,
    field,
    only,
)

BILLING = "x-anthropic-billing-header"
"""How a system block of Claude Code begins that is for the billing of its service. It changes with each prompt, so it
would end the sharing of pages before the rest of the prompt: it is left out."""

LEAST_BUDGET = 1024
"""Tokens of thinking that Anthropic allows to ask for, at least."""

REFUSED: dict[str, tuple[object, ...]] = dict.fromkeys(("compaction", "container", "mcp_servers"), NOTHING)
"""Fields that would change the answer, and the values with which they would not."""

IGNORED = frozenset((
    "anthropic_beta", "anthropic_version", "betas", "billing_policy", "context_management", "diagnostics",
    "fallback_credit_token", "fallbacks", "inference_geo", "metadata", "service_tier", "speed", "user_profile_id",
    "workspace_id",
))  # fmt: skip
"""Fields that do not affect the answer of this server. `context_management` shortens a history that would be too long:
here that is refused, and the client shortens it. `fallbacks` are models for what a model refuses."""

_SAMPLING = ("temperature", "top_p", "top_k")
_NAMES = {"stop": "stop_sequences"}  # key: field of SamplingParams


class CacheControl(ClosedObject):
    """A mark up to which a prompt is worth keeping. Every prompt is cached here, up to its last whole page."""

    ignored: ClassVar[frozenset[str]] = frozenset({"scope"})

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        """For how long."""
        return 3600.0 if self.ttl == "1h" else 300.0


class Marked(ClosedObject):
    """An object that may have such a mark."""

    neutral: ClassVar[tuple[object, ...]] = NOTHING

    cache_control: CacheControl | None = None

    def kept_s(self) -> float:
        """The longest time of a mark in it, in seconds; 0 without one."""
        return self.cache_control.seconds if self.cache_control else 0.0


class TextBlock(Marked):
    """Text."""

    ignored: ClassVar[frozenset[str]] = frozenset({"citations"})

    type: Literal["text"]
    text: Text


class ThinkingBlock(Marked):
    """Reasoning of an earlier turn. The signature is not verified."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedBlock(Marked):
    """Reasoning of another service that nothing here can read; it is left out."""

    type: Literal["redacted_thinking"]
    data: Text | None = None


class UseBlock(Marked):
    """A call of a tool in an earlier turn."""

    ignored: ClassVar[frozenset[str]] = frozenset({"caller", "toolset_name"})

    type: Literal["tool_use"]
    id: Text
    name: CalledName
    input: dict[str, Any]


class ReferenceBlock(Marked):
    """The name of a tool that a client's search has found."""

    type: Literal["tool_reference"]
    tool_name: ToolName


SystemBlock = Annotated[TextBlock, only("text")]
ResultPart = Annotated[
    Annotated[TextBlock | ReferenceBlock, Field(discriminator="type")], only("text", "tool_reference")
]


class ResultBlock(Marked):
    """The result of a call."""

    ignored: ClassVar[frozenset[str]] = frozenset({"toolset_name"})

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Parts[ResultPart] = field("Text, or blocks of it.", [])
    is_error: bool | None = None

    def kept_s(self) -> float:
        """Also of the marks in its content."""
        return max([super().kept_s(), *(part.kept_s() for part in self.content)])

    @property
    def text(self) -> str:
        """The result as the model reads it. Templates have no place for failures of tools but the text."""
        parts = [part.text if isinstance(part, TextBlock) else part.tool_name for part in self.content]
        return ("Error: " if self.is_error else "") + BETWEEN.join(parts)


Block = Annotated[
    Annotated[
        TextBlock | ThinkingBlock | RedactedBlock | UseBlock | ResultBlock,
        Field(discriminator="type"),
    ],
    only("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]


class MessageTurn(ClosedObject):
    """One turn. A system message may stand between others; with `clear_at` it is gone at the next user's turn."""

    ignored: ClassVar[frozenset[str]] = frozenset({"output_config"})
    neutral: ClassVar[tuple[object, ...]] = NOTHING

    role: Literal["user", "assistant", "system"]
    content: Parts[Block] = field("Text, or blocks.", [])
    clear_at: Literal["next_user_message", "never"] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.model_fields_set <= {"role"} and not (self.model_extra or {}).get("output_config"):
            raise PydanticCustomError("missing_content", "Input should have content")
        return self

    def turns(self) -> Iterator[dict[str, Any]]:
        """The message as chat templates take it, a turn for each block; `joined` joins them."""
        for block in self.content:
            match block:
                case TextBlock():
                    yield {"role": self.role, "content": block.text}
                case ThinkingBlock():
                    yield {"role": self.role, "content": "", "reasoning_content": block.thinking}
                case UseBlock():
                    function = {"name": block.name, "arguments": block.input}
                    call = {"id": block.id, "type": "function", "function": function}
                    yield {"role": self.role, "content": "", "tool_calls": [call]}
                case ResultBlock():
                    yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}


def _has_input_schema(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "custom":
        text = "Input should be a tool with an input_schema: {kind} tools are not supported"
        raise PydanticCustomError("unsupported_tool", text, {"kind": kind[:60]})
    return tool


class ToolDefinition(Marked):
    """A tool that the client runs. One whose loading is deferred is offered from the beginning."""

    ignored: ClassVar[frozenset[str]] = frozenset({
        "allowed_callers", "defer_loading", "eager_input_streaming", "input_examples"
    })  # fmt: skip

    name: ToolName
    input_schema: dict[str, Any] = field("A JSON schema of its input.", ...)
    description: Text | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = field("Inputs follow the schema exactly.")

    def tool(self) -> Tool:
        """The tool as every dialect has it."""
        return Tool.of(self.name, self.description, self.input_schema, self.strict)


class ChoiceOfTools(ClosedObject):
    """Whether the model may call tools, has to call any, has to call the one of this `name`, or must not."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = field("At most one call in an answer.")

    def choice(self, tools: Sequence[Tool]) -> ToolChoice:
        """The choice as every dialect has it. Raises BadField for the name of no tool."""
        if self.type == "tool":
            return chosen_tool(self.name or "", tools)
        return ToolChoice(mode="required" if self.type == "any" else self.type)


class Thinking(ClosedObject):
    """Whether the model reasons before it answers, where its chat template lets that be chosen. A budget is not
    enforced: `max_tokens` bounds reasoning and answer together."""

    ignored: ClassVar[frozenset[str]] = frozenset({"block_binding"})

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Field(ge=LEAST_BUDGET, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted", "updates"] | None = field("`omitted`: blocks of thinking are empty.")


class JsonFormat(ClosedObject):
    """Text that is JSON and follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = field("The schema.", ..., alias="schema")


class OutputConfig(ClosedObject):
    """The form of an answer."""

    ignored: ClassVar[frozenset[str]] = frozenset({"effort", "task_budget"})
    neutral: ClassVar[tuple[object, ...]] = NOTHING

    format: JsonFormat | None = None


class ThreadBody(ClosedObject):
    """The conversations that Anthropic stores. Here none is: one that continues has to be sent whole."""

    type: Literal["create", "continue"]
    previous_message_id: Text | None = None


class CountBody(ModelBody):
    """The body of `/v1/messages/count_tokens`: a conversation."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = REFUSED
    ignored: ClassVar[frozenset[str]] = IGNORED | {
        "max_tokens",
        "output_format",
        "stop_sequences",
        "stream",
        *_SAMPLING,
    }

    messages: Annotated[
        list[MessageTurn], Field(max_length=MOST_MESSAGES, fail_fast=True), BeforeValidator(few_parts)
    ] = field("The conversation, for the model's chat template.", ...)
    system: Parts[SystemBlock] | None = field("The system prompt.")
    tools: (
        Annotated[
            list[Annotated[ToolDefinition, BeforeValidator(_has_input_schema)]],
            Field(max_length=MOST_CALLS, fail_fast=True),
        ]
        | None
    ) = field("Tools that the model may call.")
    tool_choice: ChoiceOfTools | None = field("Whether it may call tools; default auto.")
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    def conversation(self) -> Conversation:
        """The conversation as every dialect has it. Raises BadField for one that ends with the assistant's turn."""
        turns = self._turns()
        if not turns or turns[-1]["role"] == "assistant":
            what = "end with a turn of the assistant, which is to be continued" if turns else "say nothing"
            raise BadField(f"messages {what}; that is not supported.", param="messages", fix="end with the user's.")
        tools = [each.tool() for each in self.tools or ()]
        return Conversation(
            messages=turns,
            tools=tools,
            choice=self.tool_choice.choice(tools) if self.tool_choice else ToolChoice(),
            is_parallel=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            variables=self._variables(),
        )

    def kept_s(self) -> float:
        """The longest time of its marks, in seconds; 0 without any."""
        blocks = (block for message in self.messages for block in message.content)
        found: list[float] = [each.kept_s() for each in (*(self.system or ()), *(self.tools or ()), *blocks)]
        return max([*found, self.cache_control.seconds if self.cache_control else 0.0])

    def _turns(self) -> list[dict[str, Any]]:
        system = [block.text for block in self.system or () if not block.text.startswith(BILLING)]
        begun = [{"role": "system", "content": BETWEEN.join(system)}] if any(system) else []
        roles = [each.role for each in self.messages]
        last_user = max((at for at, name in enumerate(roles) if name == "user"), default=-1)
        stay = (each for at, each in enumerate(self.messages) if each.clear_at != "next_user_message" or at > last_user)
        return begun + joined(turn for each in stay for turn in each.turns())

    def _variables(self) -> dict[str, bool]:
        match self.thinking:
            case Thinking(type="enabled"):
                return {"enable_thinking": True}
            case Thinking(type="disabled"):
                return {"enable_thinking": False}
        return {}


class MessagesBody(CountBody):
    """The body of `/v1/messages`.

    With `explain`, the answer (in a stream its `message_delta`) has an `explanation`: why no more of its prompt was
    cached. With a `session_id` it has a `session`: what is held for the next turn.
    """

    ignored: ClassVar[frozenset[str]] = IGNORED

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] = field(
        "Most tokens to generate; an answer ends at the end of the context, too.", ...
    )
    stream: bool | None = field("Answer in events, as tokens come.")
    stop_sequences: Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = field(
        "Strings that end the answer."
    )
    temperature: float | None = field("0 takes the most likely token; default 1.")
    top_p: float | None = field("Draw from the tokens that make up this probability.")
    top_k: Int32 | None = field("Draw from so many tokens; 0 or -1: from all.")
    output_format: JsonFormat | None = field("The older name of `output_config.format`.")
    thread: ThreadBody | None = None

    def check(self) -> None:
        """Also refuse the rest of a conversation that began elsewhere. Raises UnknownThread."""
        super().check()
        if self.thread is not None and self.thread.type == "continue":
            raise UnknownThread("this server stores no conversations.", fix="send all messages, without thread.")

    def params(self) -> SamplingParams:
        """How its tokens are drawn."""
        given: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        form = self.output_format or (self.output_config.format if self.output_config else None)
        if form is not None:
            with naming("output_format" if self.output_format else "output_config.format.schema"):
                given["grammar"] = json_schema(form.schema_)
        return drawn(_NAMES, max_tokens=self.max_tokens, stop=self.stop_sequences or [], **given)
