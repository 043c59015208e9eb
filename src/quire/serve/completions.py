"""`POST /v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.client.async_engine import Prompt
from quire.serve.answers import ChatAnswer, CompletionAnswer, generated
from quire.serve.choices import MessageChoices, TextChoices
from quire.serve.generation import ChatTurn, Service, answer, by
from quire.serve.protocol import ChatBody, CompletionBody
from quire.serve.sse import while_connected


def completions_router(service: Service) -> APIRouter:
    """The routes, for `service`. Without a tokenizer that of chats refuses every request and says so."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None, responses=generated(CompletionAnswer))
    async def complete(body: CompletionBody, request: Request) -> Response:
        service.check(body)
        form, terms = TextChoices(body), service.terms(request, body)
        prompts: list[Prompt] = list(body.prompts())
        if body.truncate_prompt_tokens is not None:
            async with by(terms.deadline):
                prompts = await while_connected(request.receive, _ends(service, prompts, body.truncate_prompt_tokens))
        return await answer(service, request, prompts, body.params(), terms, form, stream=body.stream)

    @router.post("/v1/chat/completions", response_model=None, responses=generated(ChatAnswer))
    async def chat(body: ChatBody, request: Request) -> Response:
        service.check(body)
        params, turn = body.params(), await ChatTurn.of(service, request, body, body.conversation())
        prompt = turn.prompt.token_ids
        if body.truncate_prompt_tokens is not None:
            prompt = prompt[-body.truncate_prompt_tokens :]
        reader = await turn.reader(service, request, params)
        form = MessageChoices(body, reader)
        return await answer(service, request, [prompt], params, turn.terms, form, stream=body.stream)

    return router


async def _ends(service: Service, prompts: Sequence[Prompt], num_tokens: int) -> list[Prompt]:
    """The last tokens of each prompt."""
    return [(await service.engine.token_ids(prompt))[-num_tokens:] for prompt in prompts]
