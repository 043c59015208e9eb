"""Routes that clients of vLLM and SGLang call by their names there: state, flushes, and verbs that are refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from quire import __version__
from quire.client.process import Core
from quire.errors import InvalidInput
from quire.serve.answers import Health
from quire.serve.generation import Service

_REFUSED = {
    "/start_profile": "start the server under a profiler, for example py-spy.",
    "/stop_profile": "start the server under a profiler, for example py-spy.",
    "/sleep": "give the KV memory back with POST /v1/cache/memory/release: the weights stay.",
    "/wake_up": "have the KV memory again with POST /v1/cache/memory/resume.",
    "/pause": "end the server: it lets open requests finish.",
    "/resume": "this server does not pause.",
}
"""Verbs of other servers that this version does not have, with what to do."""


def names_router(service: Service) -> APIRouter:
    """The routes, for `service`."""
    router, engine = APIRouter(), service.engine

    def health(request: Request) -> Response:
        """200 while a request could be answered; 503 with the reason when none can progress."""
        state = engine.health()
        body = state.to_dict(for_operator=request.state.client.is_admin)
        return JSONResponse(body, status_code=200 if state.healthy else 503)

    responses: dict[int | str, dict[str, Any]] = {200: {"model": Health}, 503: {"model": Health}}
    for path in ("/health", "/ping"):
        router.add_api_route(path, health, response_model=None, responses=responses)

    @router.get("/load")
    async def load() -> dict[str, int]:
        """Requests that run or wait, as vLLM's."""
        found = await engine.statistics()
        return {"server_load": found["running_requests"] + found["waiting_requests"]}

    async def server_info() -> dict[str, Any]:
        """The engine's counters as they are now, as SGLang's: one entry of `internal_states`."""
        return {
            "version": __version__,
            "model_path": service.model_name,
            "internal_states": [await engine.statistics()],
        }

    async def model_info() -> dict[str, Any]:
        """The model that is served, as SGLang's."""
        return {
            "model_path": service.model_name,
            "is_generation": "pooling" not in engine.last_statistics,
            "max_context_length": engine.context_length,
        }

    async def flush() -> dict[str, Any]:
        """Delete all cached pages, in every tier, as `/v1/cache/flush` with `all`."""
        service.texts.clear()
        return asdict(await engine.ask(Core.flush, None))

    for name in ("/server_info", "/get_server_info"):
        router.add_api_route(name, server_info)
    for name in ("/model_info", "/get_model_info"):
        router.add_api_route(name, model_info)
    for name in ("/flush_cache", "/reset_prefix_cache"):
        router.add_api_route(name, flush, methods=["POST"])

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """False: this server does not sleep."""
        return {"is_sleeping": False}

    for path in _REFUSED:
        router.add_api_route(path, _refused, methods=["POST"])
    return router


async def _refused(request: Request) -> None:
    """Refused: this server has no such verb. The answer says what to do."""
    path = request.url.path
    raise InvalidInput(f"{path} is not supported by this version.", fix=_REFUSED[path])
