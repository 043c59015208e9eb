"""`POST /v1/embeddings`, `/v1/score` and `/v1/rerank`, for models that were made for them; others refuse them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.client.async_engine import Prompt
from quire.client.pooled import POOLED, pooled_of
from quire.errors import UnsupportedModel
from quire.serve.answers import PoolingAnswer, PoolingUsage
from quire.serve.errors import naming
from quire.serve.generation import Generation, Service
from quire.serve.pooling_protocol import EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from quire.serve.protocol import MAX_CHOICES
from quire.serve.sse import json_answer, while_connected
from quire.spec.pooling import Pair, Pooling, Vectors

_ROUTES = {
    "/v1/embeddings": "embeddings",
    "/v1/score": "scores of pairs",
    "/v1/rerank": "scores of documents",
    "/v1/moderations": "moderation",
}
"""What each route computes."""

_ANSWERS: dict[int | str, dict[str, Any]] = {200: {"model": PoolingAnswer}}


def pooling_router(service: Service) -> APIRouter:
    """The routes, for `service`: those that its model was made for. The others refuse every request."""
    router, gives = APIRouter(), "text"
    if (found := service.engine.last_statistics.get("pooling")) is not None:
        pooling, gives = Pooling(**found), found["gives"]
        _add_scores(router, service, pooling)
        if gives == "embeddings":
            _add_embeddings(router, service, pooling)
    for path in _ROUTES.keys() - {getattr(route, "path", "") for route in router.routes}:
        refuse = _refusing(service.model_name, gives, _ROUTES[path])
        router.post(path, response_model=None, include_in_schema=False)(refuse)
    return router


def _refusing(model: str, gives: str, what: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise UnsupportedModel(
            f"'{model}' generates {gives} and was not trained for {what}.",
            fix="send it to a server of such a model. Of texts, /v1/completions with echo and logprobs gives "
            "log-probabilities.",
        )

    return refuse


def _add_embeddings(router: APIRouter, service: Service, pooling: Pooling) -> None:
    @router.post("/v1/embeddings", response_model=None, responses=_ANSWERS)
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """The embedding of each input, as OpenAI's."""
        service.check(body)
        with naming("dimensions"):
            pooling.check_dimensions(body.dimensions)
        pooled, answer = await _pooled(service, request, body.prompts(), body, kind="embd-")
        found = pooling.embeddings(pooled, body.dimensions)

        def whole() -> Response:
            numbers: list[Any] = [*map(_base64, found)] if body.encoding_format == "base64" else found.tolist()
            data = [{"object": "embedding", "index": at, "embedding": each} for at, each in enumerate(numbers)]
            return json_answer(answer | {"data": data})

        return await asyncio.to_thread(whole)


def _add_scores(router: APIRouter, service: Service, pooling: Pooling) -> None:
    async def scored(
        body: ScoreBody | RerankBody, request: Request, pairs: Sequence[Pair], *, kind: str
    ) -> tuple[list[float], dict[str, Any]]:
        service.check(body)
        pooled, answer = await _pooled(service, request, pooling.prompts(pairs), body, kind=kind)
        return pooling.scores(pairs, pooled, activation=body.use_activation is not False).tolist(), answer

    @router.post("/v1/score", response_model=None, responses=_ANSWERS)
    async def score(body: ScoreBody, request: Request) -> Response:
        """How well the texts of each pair fit, as vLLM's."""
        scores, answer = await scored(body, request, body.pairs(), kind="score-")
        data = [{"object": "score", "index": at, "score": each} for at, each in enumerate(scores)]
        return json_answer(answer | {"data": data})

    @router.post("/v1/rerank", response_model=None, responses=_ANSWERS)
    async def rerank(body: RerankBody, request: Request) -> Response:
        """The documents that fit a query best, first, as Cohere's and vLLM's."""
        texts = body.texts()
        scores, answer = await scored(body, request, [(body.query, text) for text in texts], kind="rerank-")
        best = sorted(range(len(texts)), key=lambda at: -scores[at])[: body.top_n or None]
        results: list[dict[str, Any]] = [{"index": at, "relevance_score": scores[at]} for at in best]
        if body.return_documents is not False:
            results = [each | {"document": {"text": texts[each["index"]]}} for each in results]
        return json_answer(answer | {"results": results})


async def _pooled(
    service: Service, request: Request, prompts: Sequence[Prompt], body: PoolingBody, *, kind: str
) -> tuple[Vectors, dict[str, Any]]:
    """What the model gives for each prompt, float32 `[prompts, size]`, and the fields that all answers have. So many
    prompts are in the engine at once as a request may have sequences."""
    terms, parts = body.terms(service.deadline(body.timeout_s)), []
    answer: dict[str, Any] = {}
    num_tokens = num_cached = 0
    for at in range(0, len(prompts), MAX_CHOICES):
        some = prompts[at : at + MAX_CHOICES]
        submit = Generation.submit(service, request, some, POOLED, terms, kind=kind)
        generation = await while_connected(request.receive, submit)
        try:
            await while_connected(request.receive, generation.finish())
            parts.append(pooled_of(generation.outputs()))
        finally:
            generation.close()
        usage = generation.usage()
        num_tokens += usage["prompt_tokens"]
        num_cached += usage["prompt_tokens_details"]["cached_tokens"]
        answer = {"id": generation.request_id, "object": "list", "created": generation.created}
    usage_of_all: PoolingUsage = {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    return np.concatenate(parts), answer | {"model": service.model_name, "usage": usage_of_all}


def _base64(vector: Vectors) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
