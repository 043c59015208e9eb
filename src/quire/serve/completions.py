"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.engine.output import CompletionOutput, Logprob
from quire.serve.generation import Service, answer
from quire.serve.openapi import CompletionAnswer, generated
from quire.serve.protocol import CompletionBody


def completions_router(service: Service) -> APIRouter:
    """The route, for `service`."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None, responses=generated(CompletionAnswer))
    async def complete(body: CompletionBody, request: Request) -> Response:
        service.check_model(body.model)
        body.check()
        choices, deadline = TextChoices(body.logprobs), service.deadline(body)
        return await answer(service, request, body, body.params(), body.prompts(), choices, deadline=deadline)

    return router


class TextChoices:
    """Choices with a text, and OpenAI's old shape of logprobs: parallel lists, with each token's place in the text."""

    kind = "cmpl"
    answer_object = chunk_object = "text_completion"
    opening: dict[str, Any] | None = None

    def __init__(self, num_top: int | None) -> None:
        self._num_top = num_top or 0
        self._num_characters: dict[int, int] = {}  # of the tokens shown, by choice

    def content(self, part: CompletionOutput, *, whole: bool) -> dict[str, Any]:
        """The text of a choice, or the new part of it."""
        return {"text": part.text}

    def logprobs(self, index: int, part: CompletionOutput) -> dict[str, Any] | None:
        """Of the positions that follow those given before."""
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
