"""`GET /v1/cache/audit` and `/v1/cache/history`: what the engine checks about itself, and how full its memory was."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from quire.engine.process import Core
from quire.serve.generation import Service


def proof_router(service: Service) -> APIRouter:
    """The routes, for `service`. For operators: they tell of requests of all namespaces, without tokens or salts."""
    router, engine = APIRouter(), service.engine

    @router.get("/v1/cache/audit")
    async def audit() -> dict[str, Any]:
        """Audit the whole cache beside the steps, and what the canary has found. With `ended` false the engine is so
        busy that the audit goes on; `whole` says that nothing changed meanwhile, so that no page can be lost."""
        return await engine.ask(Core.audit_cache)

    @router.get("/v1/cache/history")
    async def history() -> dict[str, Any]:
        """Frames by tier, group and state: each second of ten minutes and each minute of a day, the highest marks, and
        what held memory when it was short."""
        return await engine.ask(Core.history)

    return router
