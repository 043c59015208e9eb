"""`POST /v1/embeddings`, `/v1/score` and their like, which need a model that was trained for them: refused by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter

from quire.errors import UnsupportedModel
from quire.serve.generation import Service

_ROUTES = {
    "/v1/embeddings": "embeddings",
    "/v1/score": "scores of pairs",
    "/v1/rerank": "scores of documents",
    "/v1/moderations": "moderation",
}
"""What each route computes."""


def pooling_router(service: Service) -> APIRouter:
    """The routes, for `service`."""
    router = APIRouter()
    for path, what in _ROUTES.items():
        router.post(path, response_model=None, include_in_schema=False)(_refusing(service.model_name, what))
    return router


def _refusing(model: str, what: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise UnsupportedModel(
            f"'{model}' generates text and was not trained for {what}; this version serves no model that was.",
            fix="send it to a server of such a model. Of texts, /v1/completions with echo and logprobs gives "
            "log-probabilities.",
        )

    return refuse
