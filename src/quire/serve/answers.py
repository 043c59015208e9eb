"""The answers: their fields, as they are sent and as the OpenAPI document has them, and the errors of every route."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from fastapi import FastAPI
from pydantic import TypeAdapter
from typing_extensions import TypedDict


class ErrorDetail(TypedDict):
    """What failed, and how to mend it. If OpenAI has a `code` for it, Quire's own is the `quire_code`."""

    message: str
    type: str
    param: str | None
    code: str
    quire_code: NotRequired[str]


class ErrorAnswer(TypedDict):
    """Every failure."""

    error: ErrorDetail


class MessageErrorDetail(TypedDict):
    """What failed, and how to mend it, with Quire's code."""

    type: str
    message: str
    code: str
    details: NotRequired[dict[str, str]]


class MessageError(TypedDict):
    """Every failure below `/v1/messages`."""

    type: str
    error: MessageErrorDetail
    request_id: str


class PromptDetails(TypedDict):
    """Prompt tokens that came from the cache; with tiers also from which."""

    cached_tokens: int
    cached_tokens_by_tier: NotRequired[dict[str, int] | None]


class CompletionDetails(TypedDict):
    """With speculation: drafts that are completion tokens, and those that are not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: NotRequired[CompletionDetails | None]


class ChoiceFields(TypedDict):
    """The common fields of choices of both endpoints."""

    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: dict[str, Any] | None
    token_ids: NotRequired[list[int] | None]
    explanation: NotRequired[dict[str, Any] | None]
    session: NotRequired[dict[str, Any] | None]


class TextChoice(ChoiceFields):
    """One continuation. `prompt_logprobs` has for each position of the prompt an object by token id, null for the
    first one."""

    text: str
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]


class AnswerFunction(TypedDict):
    """The function that is called; its arguments are a JSON object."""

    name: str
    arguments: str


class AnswerCall(TypedDict):
    """A call of a tool."""

    id: str
    type: str
    function: AnswerFunction


class AnswerMessage(TypedDict):
    """One turn of the assistant: text, or calls of tools, or both."""

    role: str
    content: str | None
    refusal: str | None
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    tool_calls: NotRequired[list[AnswerCall] | None]


class MessageChoice(ChoiceFields):
    """One answer."""

    message: AnswerMessage


class AnswerFields(TypedDict):
    """The common fields of answers of both endpoints."""

    id: str
    object: str
    created: int
    model: str
    usage: Usage


class CompletionAnswer(AnswerFields):
    """The answer of `/v1/completions`; a stream has events with choices of this form."""

    choices: list[TextChoice]


class ChatAnswer(AnswerFields):
    """The answer of `/v1/chat/completions`; in a stream `delta` stands for `message`. `prompt_logprobs` are as in a
    completion."""

    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]
    choices: list[MessageChoice]


class PoolingUsage(TypedDict):
    """Tokens of the texts of a request; none are generated."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class PoolingAnswer(TypedDict):
    """The answer of a model that generates no text. `data` are embeddings, each numbers or the base64 of float32, or
    scores, in the order of the request; `results` are documents, the best first."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PoolingUsage
    data: NotRequired[list[dict[str, Any]] | None]
    results: NotRequired[list[dict[str, Any]] | None]


class TextAnswer(TypedDict):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingAnswer(TypedDict):
    """Reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class UseAnswer(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(TypedDict):
    """Tokens of a request. `input_tokens` were computed, `cache_read_input_tokens` came from the cache: together they
    are the prompt. Nothing is charged for a place in the cache, so no tokens are counted as its creation."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(TypedDict):
    """The answer of `/v1/messages`; a stream has events with parts of it."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextAnswer | ThinkingAnswer | UseAnswer]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    explanation: NotRequired[dict[str, Any] | None]
    session: NotRequired[dict[str, Any] | None]


class TokenCount(TypedDict):
    """Tokens of a prompt."""

    input_tokens: int


class OutputText(TypedDict):
    """Text for the user."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[dict[str, Any]]


class ReasoningText(TypedDict):
    """Text of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class MessageOutput(TypedDict):
    """What the assistant says."""

    type: Literal["message"]
    id: str
    status: str
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningOutput(TypedDict):
    """Reasoning before it. `encrypted_content` is the text in a form that clients send back."""

    type: Literal["reasoning"]
    id: str
    status: str
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: NotRequired[str]


class CallOutput(TypedDict):
    """A call of a tool; its arguments are a JSON object."""

    type: Literal["function_call"]
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(TypedDict):
    """Prompt tokens that came from the cache. Nothing is charged for a place in it, so none count as written."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """Tokens of reasoning, by its share of the answer's characters."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseAnswer(TypedDict):
    """The answer of `/v1/responses`; a stream has events in which it grows. Fields of the request are repeated as the
    server read them: `tools` are those in the prompt, `max_output_tokens` is what the context has room for."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: str
    model: str
    output: list[MessageOutput | ReasoningOutput | CallOutput]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: ResponseUsage | None
    background: bool
    conversation: None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: NotRequired[Any]
    metadata: Any
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: NotRequired[Any]
    reasoning: dict[str, Any]
    safety_identifier: NotRequired[Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: NotRequired[Any]
    explanation: NotRequired[dict[str, Any] | None]
    session: NotRequired[dict[str, Any] | None]


class InputTokens(TypedDict):
    """Tokens of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Health(TypedDict):
    """Whether a request could be answered; if not, why not. A server that answers and is `degraded` says what is
    `stuck`."""

    status: str
    reason: NotRequired[str | None]
    stuck: NotRequired[list[str] | None]


class ModelCard(TypedDict):
    """The model that is served, with the fields of OpenAI's and Anthropic's clients."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    type: str
    display_name: str
    created_at: str


class ModelList(TypedDict):
    """All models: one."""

    object: str
    data: list[ModelCard]
    has_more: bool
    first_id: str
    last_id: str


class Tokens(TypedDict):
    """Token ids of a text or a conversation, perhaps with their names in the vocabulary."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """The text of token ids, special tokens too."""

    prompt: str


class TokenizerInfo(TypedDict):
    """The special tokens of the model's tokenizer, and its chat template."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class Version(TypedDict):
    """The version of Quire."""

    version: str


def generated(answer: type) -> dict[int | str, dict[str, Any]]:
    """The answers of a route that generates: whole, or a stream of events."""
    events = {"schema": {"type": "string", "description": "Events, each with a part of such an answer."}}
    return {200: {"model": answer, "content": {"text/event-stream": events}}}


_FAILURES = {
    400: "The request is wrong; the message says which field, and what to do.",
    401: "The API key is missing or wrong.",
    403: "The API key may not do this.",
    404: "No such model, request or route.",
    408: "The request was not sent, or not answered, by its deadline.",
    413: "More than this server has memory for, or a body that is too large.",
    429: "More than the server takes at once; `Retry-After` says when to come.",
    503: "No engine, or the server shuts down; `Retry-After` says when to come.",
}


_SCHEMAS = "#/components/schemas/"


def failures(answer: type) -> dict[int | str, dict[str, Any]]:
    """The failures of routes that tell of them by such an answer, which `describe` adds to the document.

    A reference, not a `model`: FastAPI builds a validator of a model for each route and status, a quarter of a start.
    """
    content = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{answer.__name__}"}}}
    return {status: {"description": about, "content": content} for status, about in _FAILURES.items()}


def describe(app: FastAPI) -> None:
    """Add the errors to the document, and take out what FastAPI says of itself: wrong bodies are answered with 400."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        for methods in document["paths"].values():
            for route in methods.values():
                route["responses"].pop("422", None)
        schemas = document["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for answer in (ErrorAnswer, MessageError):
            schema = TypeAdapter(answer).json_schema(ref_template=_SCHEMAS + "{model}")
            schemas |= schema.pop("$defs") | {answer.__name__: schema}
        return document

    app.openapi = openapi  # type: ignore[method-assign]
