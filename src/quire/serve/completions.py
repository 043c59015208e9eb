"""`POST /v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.client.output import CompletionOutput, Logprob
from quire.client.tokenising import Tokenising
from quire.errors import InvalidInput
from quire.serve.answers import ChatAnswer, CompletionAnswer, generated
from quire.serve.errors import BadField
from quire.serve.generation import Service, answer, by
from quire.serve.protocol import ChatBody, CompletionBody, Message
from quire.serve.sse import while_connected
from quire.spec.ids import Ids

TEMPLATE_ARGUMENTS = frozenset((
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations", "documents",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
))  # fmt: skip
"""Names that the tokenizer itself interprets, not the model's template: a client's own template would be a program that
runs here."""


def completions_router(service: Service) -> APIRouter:
    """The routes, for `service`. Without a tokenizer that of chats refuses every request and says so."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None, responses=generated(CompletionAnswer))
    async def complete(body: CompletionBody, request: Request) -> Response:
        service.check_model(body.model)
        body.check()
        choices, deadline = TextChoices(body.logprobs), service.deadline(body)
        return await answer(service, request, body, body.params(), body.prompts(), choices, deadline=deadline)

    @router.post("/v1/chat/completions", response_model=None, responses=generated(ChatAnswer))
    async def chat(body: ChatBody, request: Request) -> Response:
        service.check_model(body.model)
        body.check()
        params = body.params()
        work = chat_prompt(service.engine.tokenising, body.messages, body.chat_template_kwargs or {})
        deadline = service.deadline(body)
        async with by(deadline):
            prompt = await while_connected(request.receive, work)
        choices = MessageChoices(body.top_logprobs or 0)
        return await answer(service, request, body, params, [prompt], choices, deadline=deadline)

    return router


async def chat_prompt(tokenising: Tokenising | None, messages: Sequence[Message], variables: Mapping[str, Any]) -> Ids:
    """The tokens of a conversation, through the model's template with these variables of its own. Raises InvalidInput
    where there is no tokenizer, and BadField for variables that mean something to the tokenizer itself."""
    if tokenising is None:
        raise InvalidInput("this server has no tokenizer, so it cannot chat.", fix="send token ids to /v1/completions.")
    for name in variables:
        if name in TEMPLATE_ARGUMENTS:
            raise BadField(
                f"chat_template_kwargs cannot set {name}; it is for variables of the model's own template.",
                param="chat_template_kwargs",
                fix=f"leave {name} out.",
            )
    return await tokenising.chat([message.plain() for message in messages], variables)


class TextChoices:
    """Choices with a text, and OpenAI's old shape of logprobs: parallel lists, with each token's place in the text."""

    kind = "cmpl"
    answer_object = chunk_object = "text_completion"
    opening: dict[str, Any] | None = None

    def __init__(self, num_top: int | None) -> None:
        self._num_top = num_top or 0
        self._num_characters: dict[int, int] = {}  # key: choice; characters of the tokens shown

    def content(self, part: CompletionOutput, *, whole: bool) -> dict[str, Any]:
        """The text of a choice, or the new part of it."""
        return {"text": part.text}

    def logprobs(self, index: int, part: CompletionOutput) -> dict[str, Any] | None:
        """Log probabilities of the positions that follow those given before."""
        if not part.logprobs:
            return None
        drawn = [position[token_id] for position, token_id in zip(part.logprobs, part.token_ids, strict=True)]
        offsets = []
        for logprob in drawn:
            offsets.append(self._num_characters.get(index, 0))
            self._num_characters[index] = offsets[-1] + len(logprob.decoded_token)
        top = [_by_text(*each, self._num_top) for each in zip(part.logprobs, part.token_ids, strict=True)]
        return {
            "tokens": [logprob.decoded_token for logprob in drawn],
            "token_logprobs": [logprob.logprob for logprob in drawn],
            "top_logprobs": top if self._num_top else None,
            "text_offset": offsets,
        }


def most_likely(position: dict[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The `num_top` most likely tokens of a position and their log-probabilities, best first."""
    return sorted(position.items(), key=lambda item: item[1].rank)[:num_top]


def _by_text(position: dict[int, Logprob], drawn: int, num_top: int) -> dict[str, float]:
    """The most likely tokens' log-probabilities by text, best first.

    Of tokens with the same text (halves of characters have none of their own) the one drawn has it, else the best; the
    others are called "token_id:<id>".
    """
    top = most_likely(position, num_top)
    owners = {logprob.decoded_token: token_id for token_id, logprob in reversed(top)}
    if any(token_id == drawn for token_id, _ in top):
        owners[position[drawn].decoded_token] = drawn
    return {
        lp.decoded_token if owners[lp.decoded_token] == token_id else f"token_id:{token_id}": lp.logprob
        for token_id, lp in top
    }


class MessageChoices:
    """Choices with a message, in chunks a delta, and OpenAI's newer shape of logprobs: an object for each token."""

    kind = "chatcmpl"
    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    opening: dict[str, Any] | None = {"role": "assistant", "content": ""}  # noqa: RUF012 - nothing changes it

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top

    def content(self, part: CompletionOutput, *, whole: bool) -> dict[str, Any]:
        """The message of a choice, or the new part of it."""
        if whole:
            return {"message": {"role": "assistant", "content": part.text, "refusal": None}}
        return {"delta": {"content": part.text} if part.text else {}}

    def logprobs(self, index: int, part: CompletionOutput) -> dict[str, Any] | None:
        """One object for each token."""
        if not part.logprobs:
            return None
        content = [
            _token(position[token_id])
            | {"top_logprobs": [_token(logprob) for _, logprob in most_likely(position, self._num_top)]}
            for position, token_id in zip(part.logprobs, part.token_ids, strict=True)
        ]
        return {"content": content, "refusal": None}


def _token(logprob: Logprob) -> dict[str, Any]:
    return {
        "token": logprob.decoded_token,
        "logprob": logprob.logprob,
        "bytes": list(logprob.decoded_token.encode()),
    }
