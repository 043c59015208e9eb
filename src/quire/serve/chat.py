"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from quire.engine.async_engine import Tokenizer
from quire.engine.output import Logprob
from quire.errors import InvalidInput, QuireError
from quire.serve.completions import most_likely
from quire.serve.errors import BadField, error_body
from quire.serve.generation import Generation, Service
from quire.serve.openapi import ChatAnswer
from quire.serve.protocol import ChatBody, Message
from quire.serve.sse import DONE, EventStream, event, while_connected
from quire.spec.ids import Ids

TEMPLATE_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that mean something to the tokenizer itself, not to the model's template: a client's own template would be a
program of theirs, run here."""


def chat_router(service: Service) -> APIRouter:
    """The route, for `service`. Without a tokenizer it refuses every request and says so."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None, responses={200: {"model": ChatAnswer}})
    async def chat(body: ChatBody, request: Request) -> Response:
        service.check_model(body.model)
        body.check()
        params = body.params()
        prompt = await chat_prompt(service.engine.tokenizer, body.messages, body.chat_template_kwargs or {})
        submit = Generation.submit(service, [prompt], params, body, kind="chatcmpl", client_id=request.state.request_id)
        generation = await while_connected(request, submit)
        if body.stream:
            return EventStream(_events(service, body, generation), on_close=generation.close)
        try:
            return JSONResponse(await while_connected(request, _answer(service, body, generation)))
        finally:
            generation.close()

    return router


async def chat_prompt(tokenizer: Tokenizer | None, messages: Sequence[Message], variables: Mapping[str, Any]) -> Ids:
    """The tokens of a conversation, through the model's template with these variables of its own. Raises InvalidInput
    where there is no tokenizer, and BadField for variables that mean something to the tokenizer itself."""
    if tokenizer is None:
        raise InvalidInput("this server has no tokenizer, so it cannot chat.", fix="send token ids to /v1/completions.")
    for name in variables:
        if name in TEMPLATE_ARGUMENTS:
            raise BadField(
                f"chat_template_kwargs cannot set {name}; it is for variables of the model's own template.",
                param="chat_template_kwargs",
                fix=f"leave {name} out.",
            )
    plain = [message.plain() for message in messages]
    # In a thread always: how long a template takes is up to its author and the messages.
    return await asyncio.to_thread(partial(tokenizer.apply_chat_template, plain, **variables))


async def _answer(service: Service, body: ChatBody, generation: Generation) -> dict[str, Any]:
    outputs = await generation.finish()
    choices = []
    for completion in outputs[0].outputs:
        choice = {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": _logprobs(completion.logprobs, completion.token_ids, body.num_top_logprobs),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            **body.explanation(completion),
        }
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        choices.append(choice)
    head = _head(service, generation, "chat.completion")
    return {**head, "choices": choices, "usage": generation.usage()}


async def _events(service: Service, body: ChatBody, generation: Generation) -> AsyncGenerator[bytes, None]:
    head = _head(service, generation, "chat.completion.chunk")
    if body.include_usage:
        head["usage"] = None
    try:
        for index in range(body.n or 1):
            yield event(head | {"choices": [_chunk(index, {"role": "assistant", "content": ""})]})
        async for index, delta in generation.deltas():
            logprobs = _logprobs(delta.logprobs, delta.token_ids, body.num_top_logprobs)
            if not (delta.text or logprobs or delta.finish_reason or (body.return_token_ids and delta.token_ids)):
                continue
            chunk = _chunk(index, {"content": delta.text} if delta.text else {})
            chunk |= {
                "logprobs": logprobs,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
                **body.explanation(delta),
            }
            if body.return_token_ids:
                chunk["token_ids"] = list(delta.token_ids)
            yield event(head | {"choices": [chunk]})
        if body.include_usage:
            yield event(head | {"choices": [], "usage": generation.usage()})
    except QuireError as error:
        yield event(error_body(error))
    finally:
        generation.close()
    yield DONE


def _head(service: Service, generation: Generation, kind: str) -> dict[str, Any]:
    return {
        "id": generation.request_id,
        "object": kind,
        "created": generation.created,
        "model": service.model_name,
    }


def _chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _logprobs(
    positions: Sequence[dict[int, Logprob]] | None, token_ids: Sequence[int], num_top: int
) -> dict[str, Any] | None:
    """OpenAI's newer shape of logprobs: one object for each token."""
    if not positions:
        return None
    content = [
        _token(position[token_id])
        | {"top_logprobs": [_token(logprob) for _, logprob in most_likely(position, num_top)]}
        for position, token_id in zip(positions, token_ids, strict=True)
    ]
    return {"content": content, "refusal": None}


def _token(logprob: Logprob) -> dict[str, Any]:
    return {
        "token": logprob.decoded_token,
        "logprob": logprob.logprob,
        "bytes": list(logprob.decoded_token.encode()),
    }
