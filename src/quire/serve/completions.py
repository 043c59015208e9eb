"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from quire.engine.output import CompletionOutput, Logprob
from quire.errors import QuireError
from quire.serve.errors import error_body
from quire.serve.generation import Generation, Service
from quire.serve.openapi import CompletionAnswer
from quire.serve.protocol import CompletionBody
from quire.serve.sse import DONE, EventStream, event, while_connected


def completions_router(service: Service) -> APIRouter:
    """The route, for `service`."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None, responses={200: {"model": CompletionAnswer}})
    async def complete(body: CompletionBody, request: Request) -> Response:
        service.check_model(body.model)
        body.check()
        submit = Generation.submit(
            service, body.prompts(), body.params(), body, kind="cmpl", client_id=request.state.request_id
        )
        generation = await while_connected(request, submit)
        if body.stream:
            return EventStream(_events(service, body, generation), on_close=generation.close)
        try:
            return JSONResponse(await while_connected(request, _answer(service, body, generation)))
        finally:
            generation.close()

    return router


async def _answer(service: Service, body: CompletionBody, generation: Generation) -> dict[str, Any]:
    outputs = await generation.finish()
    choices: list[dict[str, Any]] = []
    for output in outputs:
        for completion in output.outputs:
            offsets = LogprobOffsets()
            choice = _choice(body, len(choices), completion.text, completion)
            choice["logprobs"] = offsets.shape(completion.logprobs, completion.token_ids, body.logprobs)
            choices.append(choice)
    return {**_head(service, generation), "choices": choices, "usage": generation.usage()}


async def _events(service: Service, body: CompletionBody, generation: Generation) -> AsyncGenerator[bytes, None]:
    head = _head(service, generation)
    if body.include_usage:
        head["usage"] = None
    offsets: dict[int, LogprobOffsets] = {}
    try:
        async for index, delta in generation.deltas():
            logprobs = offsets.setdefault(index, LogprobOffsets()).shape(delta.logprobs, delta.token_ids, body.logprobs)
            if delta.text or logprobs or delta.finish_reason or (body.return_token_ids and delta.token_ids):
                choice = _choice(body, index, delta.text, delta)
                choice["logprobs"] = logprobs
                yield event(head | {"choices": [choice]})
        if body.include_usage:
            yield event(head | {"choices": [], "usage": generation.usage()})
    except QuireError as error:
        yield event(error_body(error))
    finally:
        generation.close()
    yield DONE


def _head(service: Service, generation: Generation) -> dict[str, Any]:
    return {
        "id": generation.request_id,
        "object": "text_completion",
        "created": generation.created,
        "model": service.model_name,
    }


def _choice(body: CompletionBody, index: int, text: str, part: CompletionOutput | Any) -> dict[str, Any]:
    choice = {
        "index": index,
        "text": text,
        "finish_reason": part.finish_reason,
        "stop_reason": part.stop_reason,
        **body.explanation(part),
    }
    return choice | {"token_ids": list(part.token_ids)} if body.return_token_ids else choice


class LogprobOffsets:
    """OpenAI's old shape of logprobs: parallel lists, with each token's place in the text of its choice."""

    def __init__(self) -> None:
        self._num_characters = 0

    def shape(
        self, positions: Sequence[dict[int, Logprob]] | None, token_ids: Sequence[int], num_top: int | None
    ) -> dict[str, Any] | None:
        """The positions that follow those given before; None when logprobs were not asked for or there are none."""
        if not positions:
            return None
        drawn = [position[token_id] for position, token_id in zip(positions, token_ids, strict=True)]
        offsets = []
        for logprob in drawn:
            offsets.append(self._num_characters)
            self._num_characters += len(logprob.decoded_token)
        top = [
            _by_text(position, token_id, num_top or 0) for position, token_id in zip(positions, token_ids, strict=True)
        ]
        return {
            "tokens": [logprob.decoded_token for logprob in drawn],
            "token_logprobs": [logprob.logprob for logprob in drawn],
            "top_logprobs": top if num_top else None,
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
