"""The bodies of requests, and their meaning.

A field that Quire does not have is either harmless (`user`, `metadata`, `store`: ignored) or would change the answer
(`suffix`, `audio`): those are refused by name, because an answer that silently ignores them is a wrong answer.
An unknown field is refused with the nearest known name: it may be a typing error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from quire.cache.session import LONGEST_SESSION_ID
from quire.errors import InvalidInput
from quire.scheduler.sampling_params import SamplingParams
from quire.serve.closed_object import ClosedObject
from quire.serve.conversation import Conversation, Terms, Tool, ToolChoice, call_of, chosen_tool
from quire.serve.errors import BadField, unknown_field
from quire.serve.form import FormFields

T = TypeVar("T")

MAX_CHOICES = 512
"""Sequences one HTTP request may ask for: prompts times `n`."""

MOST_MESSAGES = 4096
"""Messages of a conversation, and parts of their contents."""

MOST_CALLS = 1024
"""Calls of tools in one message, and tools of a request."""

MOST_STOPS = 64
MOST_STOP_CHARACTERS = 256
MOST_IDS = 1024
"""Stop tokens, and tokens with a bias."""

MOST_VARIABLES = 64
MOST_SALT_CHARACTERS = 1024

NOTHING: tuple[object, ...] = (None, False, [], {}, "")

REFUSED: dict[str, tuple[object, ...]] = dict.fromkeys((
    "allowed_token_ids", "audio", "bad_words", "chat_template", "continue_final_message", "custom_logit_processor",
    "custom_params", "documents", "echo", "extra_key", "functions", "kv_transfer_params", "logits_processors",
    "logprob_token_ids", "lora_path", "media_io_kwargs", "mm_processor_kwargs", "moderation", "no_stop_trim",
    "prediction", "prompt_embeds", "return_hidden_states", "return_logprob", "return_prompt_text",
    "return_routed_experts", "return_tokens_as_token_ids", "session_params", "stop_regex", "suffix",
    "thinking_token_budget", "use_beam_search", "vllm_xargs", "web_search_options",
), NOTHING) | {
    "add_generation_prompt": (None, True),
    "add_special_tokens": (None, True),
    "best_of": (None, 1),
    "dry_multiplier": (None, 0, 0.0),
    "function_call": (*NOTHING, "none"),
    "include_reasoning": (None, True),
    "length_penalty": (None, 1, 1.0),
    "modalities": (*NOTHING, ["text"]),
    "separate_reasoning": (None, True),
    "stream_reasoning": (None, True),
    "sampling_seed": (None,),
    "typical_p": (None, 1, 1.0),
}  # fmt: skip
"""Fields that would change the answer, and the values with which they would not."""

IGNORED = frozenset((
    "detokenize", "guided_decoding_backend", "metadata", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "request_id", "rid", "safety_identifier", "service_tier", "skip_reading_prefix_cache",
    "spaces_between_special_tokens", "store", "user", "verbosity",
))  # fmt: skip
"""Fields of other servers that do not affect the answer of this one."""


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("lone_surrogate", "Input should be text without lone surrogates") from None
    return text


def _at_most(count: int) -> BeforeValidator:
    """For objects: pydantic counts their entries only after it has validated all of them."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_long", "Input should have at most {count} entries", {"count": count})
        return value

    return BeforeValidator(check)


def checked_prompts(most: int, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Lists of token ids are checked by the types of their items alone, in no time: pydantic would visit each id for
    each of the four forms of a prompt. Others are validated up to a number of prompts."""
    if not isinstance(value, list):
        return handler(value)
    kinds = set(map(type, value))
    if kinds == {int}:
        return value
    if len(value) > most:
        raise PydanticCustomError(
            "too_long", "Input should be at most {count} prompts, or token ids alone", {"count": most}
        )
    if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in value):
        return value
    found = handler([ids[:most] for ids in value] if kinds == {list} else value)
    if kinds == {list}:  # those that were cut off are no token ids
        raise PydanticCustomError("int_type", "Input should be lists of integers alone")
    return found


def each_prompt(name: str, given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of a field of this name. Raises BadField if there is none."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise BadField(f"{name} is an empty list.", param=name, fix="give at least one.")
    return [given] if isinstance(given[0], int) else list(given)


def few_parts(messages: Any) -> Any:
    """Checked before anything in them is."""
    if not isinstance(messages, list) or len(messages) > MOST_MESSAGES:
        return messages  # refused by what follows
    contents = (each.get("content") if isinstance(each, dict) else None for each in messages)
    if sum(len(content) for content in contents if isinstance(content, list)) > MOST_MESSAGES:
        raise PydanticCustomError(
            "too_long", "Input should have at most {count} parts of content", {"count": MOST_MESSAGES}
        )
    return messages


def only(*known: str) -> BeforeValidator:
    """Refuses objects of other types by name, before their fields are looked at."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in known:
            found = {"kind": kind[:60], "known": ", ".join(known)}
            raise PydanticCustomError(
                "unsupported_type", "Input should be one of {known}: {kind} is not supported", found
            )
        return value

    return BeforeValidator(check)


Text = Annotated[str, AfterValidator(_encodable)]
StopText = Annotated[Text, Field(max_length=MOST_STOP_CHARACTERS)]
SaltText = Annotated[Text, Field(max_length=MOST_SALT_CHARACTERS)]
SessionId = Annotated[Text, Field(min_length=1, max_length=LONGEST_SESSION_ID)]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
CalledName = Annotated[Text, Field(max_length=1024)]
"""The tool of a call in a history: a name that a model wrote."""
ToolName = Annotated[Text, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
TemplateVariables = Annotated[
    dict[Text, Text | bool | int | float | None], Field(max_length=MOST_VARIABLES), _at_most(MOST_VARIABLES)
]
PromptForms = Text | list[Text] | list[int] | list[list[int]]
Prompts = Annotated[PromptForms, WrapValidator(partial(checked_prompts, MAX_CHOICES))]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


def field(about: str, default: Any = None, **rules: Any) -> Any:
    """A field that may be left out, and its meaning for the reference."""
    return Field(default, description=about, **rules)


class _TextOrParts:
    """A text in place of the parts is one part."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        parts = cast(core_schema.ListSchema, handler(source))
        described = core_schema.list_schema(parts["items_schema"])  # what bounds a body is its size
        either = core_schema.union_schema([core_schema.str_schema(), described])
        return core_schema.no_info_before_validator_function(_as_parts, parts, json_schema_input_schema=either)


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Parts = Annotated[list[T], Field(max_length=MOST_MESSAGES, fail_fast=True), _TextOrParts()]
"""Text, or parts of content."""


class StreamOptions(ClosedObject):
    """Options of a stream."""

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})
    neutral: ClassVar[tuple[object, ...]] = NOTHING

    include_usage: bool | None = field("End with a chunk that has the `usage`.")
    continuous_usage_stats: bool | None = field("With it, every chunk has the `usage` so far.")


class RequestBody(BaseModel):
    """What the bodies of all dialects share: how a request is served, and which fields of others are no error. None
    stands for the field's default."""

    model_config = ConfigDict(strict=True, extra="allow")

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[Mapping[str, str]] = {"last_turn": "session_id"}

    cache_salt: SaltText | None = field("Prompts share cached pages only with those of the same salt.")
    session_id: SessionId | None = field("A turn of this session: it computes only what the turn before has not.")
    last_turn: bool | None = field("No turn of the session follows: it is closed, and its own pages are evicted first.")
    priority: Int32 | None = field("Lower goes first, and is preempted last, as vLLM's; default 0.")
    timeout_s: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] | None = field(
        "Seconds in which it must be answered whole; then it ends with an error."
    )
    explain: bool | None = field("Say in an `explanation` why no more of the prompt was cached.")

    def terms(self, deadline: float | None) -> Terms:
        """How it is served, until that time of the event loop's clock."""
        given = {name: getattr(self, name) for name in ("cache_salt", "session_id", "last_turn", "explain")}
        found = {name: value for name, value in given.items() if value is not None}
        return Terms(deadline=deadline, priority=-(self.priority or 0), **found)

    def check(self) -> None:
        """Refuse fields that would change the answer if they were ignored, and those that need another one."""
        for name, value in (self.model_extra or {}).items():
            if name not in self.refused and name not in self.ignored and value is not None:
                raise unknown_field(name, type(self).model_fields)
            if value not in self.refused.get(name, (value,)):
                raise BadField(
                    f"{name} is not supported and would change the answer.", param=name, fix=f"leave {name} out."
                )
        for name, other in self.needs.items():
            if getattr(self, name) and not getattr(self, other):
                raise BadField(f"{name} needs a {other}.", param=name, fix=f"send the {other}, too.")


class ModelBody(RequestBody):
    """A body that may name the model."""

    model: Text | None = field("The model that is served; no other.")


def drawn(names: Mapping[str, str], **fields: Any) -> SamplingParams:
    """How tokens are drawn. Raises BadField for a wrong value, by the name that `names` has for the field here."""
    try:
        return SamplingParams(**fields)
    except InvalidInput as error:
        name = error.message.partition(" ")[0]
        if name not in fields:
            raise
        raise BadField(error.message, param=names.get(name, name), fix=error.fix) from None


class GenerationBody(ModelBody, FormFields):
    """What both endpoints of OpenAI share.

    With `explain`, each choice (in a stream its last chunk) has an `explanation`: why no more of its prompt was cached.
    With a `session_id` it has a `session`: what is held for the next turn.
    """

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = REFUSED
    ignored: ClassVar[frozenset[str]] = IGNORED

    stream: bool | None = field("Answer in events, as tokens come.")
    stream_options: StreamOptions | None = None
    n: Int32 | None = field("Sequences for each prompt; they share its pages.")
    temperature: float | None = field("0 takes the most likely token; default 1.")
    top_p: float | None = field("Draw from the tokens that make up this probability.")
    top_k: Int32 | None = field("Draw from so many tokens; 0 or -1: from all.")
    min_p: float | None = field("Leave out tokens below this share of the most likely one's probability.")
    seed: Seed | None = field("Same seed, same tokens, whatever else runs.")
    max_tokens: Int32 | None = field("Most tokens to generate: default 16, in a chat to the end of the context.")
    min_tokens: Int32 | None = field("Tokens before which nothing stops the sequence.")
    stop: StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = field(
        "Strings that end the sequence."
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_IDS)] | None = field(
        "Tokens that end it, beside the model's own."
    )
    include_stop_str_in_output: bool | None = field("Show what ended it.")
    skip_special_tokens: bool | None = field("Leave special tokens out of the text; default true.")
    ignore_eos: bool | None = field("Go on after the model's end-of-sequence token.")
    repetition_penalty: float | None = field("Above 1: tokens that were used, in the prompt too, are less likely.")
    presence_penalty: float | None = field("Taken from the logit of each token that was generated, -2 to 2.")
    frequency_penalty: float | None = field("The same, times how often it was.")
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MOST_IDS), _at_most(MOST_IDS)] | None = field(
        "Added to the logits of these token ids, -100 to 100."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = field(
        "Keep only so many tokens of each prompt, the last ones."
    )
    return_token_ids: bool | None = field("Give the `token_ids` of each choice.")
    prompt_logprobs: Int32 | None = field(
        "Most likely tokens to show at each position of the prompt; 0: the one there. Not in a stream."
    )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        super().check()
        if self.stream and self.prompt_logprobs is not None:
            raise BadField("prompt_logprobs cannot be streamed.", param="prompt_logprobs", fix="leave stream out.")

    def sampling_params(self, **more: Any) -> SamplingParams:
        """How to draw; `more` are the fields that the two endpoints name differently."""
        given = {name: getattr(self, name) for name in _SAMPLING}
        given |= {"logit_bias": self._logit_bias(), "grammar": self.grammar()}
        fields = {name: value for name, value in (given | more).items() if value is not None or name in more}
        return drawn({}, **fields)

    def _logit_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        for key in self.logit_bias:
            if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < 2**31):
                raise BadField(f"logit_bias must map token ids to numbers, got {key[:60]!r}.", param="logit_bias")
        return {int(key): bias for key, bias in self.logit_bias.items()}


_SAMPLING = GenerationBody.model_fields.keys() & set(SamplingParams.__struct_fields__)


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`: one prompt or several, as text or token ids."""

    prompt: Prompts = field("Text or token ids, of one prompt or several.", ...)
    logprobs: Int32 | None = field("Most likely tokens to show at each position; 0: the one drawn.")
    echo: bool | None = field(
        "Begin the text, and with `logprobs` the lists, with the prompt's; `max_tokens` may be 0."
    )

    def check(self) -> None:
        """Also refuse a stream of several sequences behind a prompt that is scored: one has it computed for all."""
        super().check()
        if self.stream and (self.n or 1) > 1 and self.echo and (self.logprobs is not None or self.max_tokens == 0):
            raise BadField("an echo with logprobs cannot be streamed with n > 1.", param="n", fix="leave stream out.")

    def terms(self, deadline: float | None) -> Terms:
        return replace(super().terms(deadline), echo=bool(self.echo))

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one for each request of the engine."""
        return each_prompt("prompt", self.prompt)

    def params(self) -> SamplingParams:
        """How its tokens are drawn. An echo without tokens has the prompt computed, too."""
        asked = [self.prompt_logprobs]
        if self.echo:
            asked += [self.logprobs, 0 if self.max_tokens == 0 else None]
        most = max((each for each in asked if each is not None), default=None)
        if self.max_tokens == 0 and most is None:
            raise BadField(
                "max_tokens must be an integer of at least 1, got 0.",
                param="max_tokens",
                fix="for no tokens, ask for echo or prompt_logprobs.",
            )
        return self.sampling_params(logprobs=self.logprobs, prompt_logprobs=most)


class TextPart(ClosedObject):
    """A piece of a message's content; text is the only kind there is here."""

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control", "prompt_cache_breakpoint"})
    neutral: ClassVar[tuple[object, ...]] = NOTHING

    type: Literal["text"]
    text: Text


class CalledFunction(ClosedObject):
    """The function of a call, with its arguments as JSON."""

    name: CalledName
    arguments: Text


class ToolCall(ClosedObject):
    """A call of a tool in an earlier turn."""

    ignored: ClassVar[frozenset[str]] = frozenset({"index"})

    id: Text = ""
    type: Literal["function"] = "function"
    function: CalledFunction


TEMPLATE_ROLES = {"developer": "system", "function": "tool"}  # templates have no other names for them
_TURN_FIELDS = {"tool": ("tool_call_id", "name"), "assistant": ("reasoning_content",)}


class Message(ClosedObject):
    """One turn. An assistant's may have calls of tools in place of content; a tool's is the result of one."""

    ignored: ClassVar[frozenset[str]] = frozenset({"annotations", "cache_control"})
    neutral: ClassVar[tuple[object, ...]] = NOTHING

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_CALLS, fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = field("A newer name of `reasoning_content`.")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing_content", "Input should have content, or tool_calls")
        return self

    def turn(self) -> dict[str, Any]:
        """The turn as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        found: dict[str, Any] = {"role": TEMPLATE_ROLES.get(self.role, self.role), "content": text}
        if self.tool_calls:
            found["tool_calls"] = [
                call_of(each.id, each.function.name, each.function.arguments) for each in self.tool_calls
            ]
        more = {name: getattr(self, name) for name in _TURN_FIELDS.get(found["role"], ())}
        if found["role"] == "assistant" and self.reasoning:
            more["reasoning_content"] = more["reasoning_content"] or self.reasoning
        found |= {name: value for name, value in more.items() if value}
        return found


Messages = Annotated[
    list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True), BeforeValidator(few_parts)
]
"""A conversation."""


class FunctionBody(ClosedObject):
    """A function that the model may call."""

    neutral: ClassVar[tuple[object, ...]] = NOTHING

    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = field("A JSON schema of its arguments.")
    strict: bool | None = field("Arguments follow the schema exactly.")


class ToolBody(ClosedObject):
    """A tool; functions are the only kind there is here."""

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["function"]
    function: FunctionBody

    def tool(self) -> Tool:
        """The tool as every dialect has it."""
        function = self.function
        return Tool.of(function.name, function.description, function.parameters, function.strict)


class ChosenFunction(ClosedObject):
    """The name of a tool."""

    name: ToolName


class ChosenTool(ClosedObject):
    """The tool to call."""

    type: Literal["function"]
    function: ChosenFunction


Tools = Annotated[list[ToolBody], Field(max_length=MOST_CALLS, fail_fast=True)]
"""Definitions of tools."""


class ThinkingSwitch(ClosedObject):
    """Whether the model reasons before it answers, where its template can say so."""

    type: Literal["enabled", "disabled"]


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`."""

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = REFUSED | {"add_special_tokens": (None, False)}

    messages: Messages = field("The conversation, for the model's chat template.", ...)
    tools: Tools | None = field("Tools that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = field(
        "Whether it may call tools, has to, or has to call this one; default auto."
    )
    parallel_tool_calls: bool | None = field("Whether an answer may have several calls; default true.")
    max_completion_tokens: Int32 | None = field("The newer name of `max_tokens`; it wins.")
    logprobs: bool | None = field("Show log-probabilities.")
    top_logprobs: Int32 | None = field("Most likely tokens to show at each position; needs `logprobs`.")
    chat_template_kwargs: TemplateVariables | None = field("Variables of the model's chat template.")
    enable_thinking: bool | None = field("The variable of that name of the model's chat template.")
    thinking: ThinkingSwitch | None = field("The same, as an object.")
    reasoning_effort: Text | None = field("The variable of that name of the template; none also turns thinking off.")

    def params(self) -> SamplingParams:
        """Without a limit, an answer may go on to the end of the context."""
        if self.top_logprobs is not None and not self.logprobs:
            raise BadField("top_logprobs needs logprobs to be true.", param="top_logprobs")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling_params(max_tokens=limit, logprobs=logprobs)

    def conversation(self) -> Conversation:
        """The conversation as every dialect has it."""
        tools = [each.tool() for each in self.tools or ()]
        return Conversation(
            messages=[message.turn() for message in self.messages],
            tools=tools,
            choice=self._choice(tools),
            is_parallel=self.parallel_tool_calls is not False,
            variables=self._thinking() | (self.chat_template_kwargs or {}),
        )

    def _thinking(self) -> dict[str, Any]:
        asked = self.enable_thinking
        if self.thinking is not None:
            asked = self.thinking.type == "enabled"
        effort = self.reasoning_effort
        found: dict[str, Any] = {"reasoning_effort": effort} if effort else {}
        if asked is None and effort == "none":
            asked = False
        return found if asked is None else found | {"enable_thinking": asked}

    def _choice(self, tools: Sequence[Tool]) -> ToolChoice:
        if isinstance(self.tool_choice, ChosenTool):
            return chosen_tool(self.tool_choice.function.name, tools)
        return ToolChoice(mode=self.tool_choice or "auto")
