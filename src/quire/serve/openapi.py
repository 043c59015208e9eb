"""The answers in the OpenAPI document: their fields, and the errors of every route."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What failed, and how to mend it."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    """Every failure."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    """Prompt tokens that came from the cache; with tiers also from which."""

    cached_tokens: int
    cached_tokens_by_tier: dict[str, int] | None = None


class CompletionDetails(BaseModel):
    """With speculation: drafts that are completion tokens, and those that are not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class Choice(BaseModel):
    """The common fields of choices of both endpoints."""

    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: dict[str, Any] | None
    token_ids: list[int] | None = None
    explanation: dict[str, Any] | None = None
    session: dict[str, Any] | None = None


class TextChoice(Choice):
    """One continuation."""

    text: str


class AnswerMessage(BaseModel):
    """One turn of the assistant."""

    role: str
    content: str
    refusal: str | None


class MessageChoice(Choice):
    """One answer."""

    message: AnswerMessage


class Answer(BaseModel):
    """The common fields of answers of both endpoints."""

    id: str
    object: str
    created: int
    model: str
    usage: Usage


class CompletionAnswer(Answer):
    """The answer of `/v1/completions`; a stream has events with choices of this form."""

    choices: list[TextChoice]


class ChatAnswer(Answer):
    """The answer of `/v1/chat/completions`; in a stream `delta` stands for `message`."""

    choices: list[MessageChoice]


class Health(BaseModel):
    """Whether a request could be answered; if not, why not. A server that answers and is `degraded` says what is
    `stuck`."""

    status: str
    reason: str | None = None
    stuck: list[str] | None = None


class ModelCard(BaseModel):
    """The model that is served."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """All models: one."""

    object: str
    data: list[ModelCard]


class Version(BaseModel):
    """The version of Quire."""

    version: str


def generated(answer: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The answers of a route that generates: whole, or a stream of events."""
    events = {"schema": {"type": "string", "description": "Events, each with a part of such an answer."}}
    return {200: {"model": answer, "content": {"text/event-stream": events}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "The request is wrong; the message says which field, and what to do."},
    401: {"model": ErrorAnswer, "description": "The API key is missing or wrong."},
    403: {"model": ErrorAnswer, "description": "The API key may not do this."},
    404: {"model": ErrorAnswer, "description": "No such model, request or route."},
    408: {"model": ErrorAnswer, "description": "The request was not sent, or not answered, by its deadline."},
    413: {"model": ErrorAnswer, "description": "More than this server has memory for, or a body that is too large."},
    429: {"model": ErrorAnswer, "description": "More than the server takes at once; `Retry-After` says when to come."},
    503: {"model": ErrorAnswer, "description": "No engine, or the server shuts down; `Retry-After` says when to come."},
}


def describe(app: FastAPI) -> None:
    """Take out of the document what FastAPI says of itself: bodies that are wrong are answered with 400 here."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        for methods in document["paths"].values():
            for route in methods.values():
                route["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
