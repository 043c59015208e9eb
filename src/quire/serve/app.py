"""The FastAPI app: the OpenAI routes, and those for health, metrics and the cache."""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from quire import __version__
from quire.client.async_engine import AsyncEngine
from quire.errors import EngineDead
from quire.observe.metrics import ServerMetrics
from quire.serve import errors
from quire.serve.answers import ErrorAnswer, ModelCard, ModelList, Version, describe, failures
from quire.serve.cache_routes import cache_router, insight_router, memory_router, tenant_router
from quire.serve.choices import completions_router
from quire.serve.config import ServerConfig
from quire.serve.gate import add_gate
from quire.serve.generation import Service
from quire.serve.keys import Keys
from quire.serve.live import Live
from quire.serve.messages import messages_router
from quire.serve.other_names import names_router
from quire.serve.page import page_router
from quire.serve.pooling_routes import pooling_router
from quire.serve.responses import responses_router
from quire.serve.sglang_generate import generate_router
from quire.serve.shares import Shares
from quire.serve.sse import ClientGone
from quire.serve.texts import PromptTexts
from quire.serve.tokenizer_routes import tokenizer_router
from quire.serve.tracing import Tracing

LEAST_RUNNING = 8
"""Sequences that an engine runs at once which does not say how many."""


def create_app(
    engine: AsyncEngine,
    *,
    model_name: str,
    server: ServerConfig | None = None,
    keys: Keys | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The app that serves `engine`, which must be started and is not shut down by the app. `keys` are those of the
    server's configuration, and `tracing` is the caller's."""
    server, keys = server or ServerConfig(), keys or Keys()
    metrics = ServerMetrics(
        engine.metrics,
        lambda: engine.last_statistics,
        lambda: engine.health().healthy,
        restarts=lambda: engine.num_restarts,
        model_name=model_name,
        version=__version__,
    )
    running = int(engine.last_statistics.get("max_running_requests", LEAST_RUNNING))
    service = Service(
        engine=engine,
        metrics=metrics,
        model_name=model_name,
        started_at=int(time.time()),
        shares=Shares(most_open=running + server.max_queue, most_begun=2 * running, have_names=keys.have_names),
        request_timeout_s=server.request_timeout_s,
        retains_marked=server.retain_marked,
        texts=PromptTexts(server.kept_texts or 0),
        live=Live(engine, metrics.counters, model_name=model_name),
        tracing=tracing,
        tenants=keys.tenants,
    )
    app = FastAPI(
        title="Quire",
        summary="OpenAI-compatible server on a paged, prefix-shared KV cache.",
        version=__version__,
        responses=failures(ErrorAnswer),
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    describe(app)
    errors.install(app)
    app.add_exception_handler(ClientGone, _client_gone)
    for routes in _ROUTES:
        app.include_router(routes(service))
    add_gate(
        app,
        metrics.counters.responses,
        keys=keys,
        most_body_bytes=server.body_bytes(engine.context_length),
        cors_origins=server.origins,
        router_secret=server.router_secret,
    )
    return app


async def _client_gone(_request: Any, _error: Exception) -> Response:
    return Response(status_code=499)  # what proxies log for it; no client reads it


def _router(service: Service) -> APIRouter:
    """The model that is served, the version and the metrics."""
    router = APIRouter()
    model: ModelCard = {
        "id": service.model_name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "quire",
        "max_model_len": service.engine.context_length,
        "type": "model",
        "display_name": service.model_name,
        "created_at": datetime.fromtimestamp(service.started_at, UTC).isoformat(),
    }

    @router.get("/v1/models")
    async def models() -> ModelList:
        name = service.model_name
        return {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> ModelCard:
        service.check_model(name)
        return model

    @router.get("/version")
    async def version() -> Version:
        """The version of Quire."""
        return {"version": __version__}

    @router.get("/metrics", response_model=None, response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus' text format. An engine that is dead or in a long step shows its last counters."""
        with contextlib.suppress(EngineDead):
            await service.engine.statistics(timeout_s=1.0)
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router


_ROUTES = (
    completions_router, messages_router, generate_router, tokenizer_router, pooling_router, responses_router, _router,
    names_router, cache_router, memory_router, insight_router, tenant_router, page_router,
)  # fmt: skip
