"""`GET /v1/sessions` and `DELETE /v1/sessions/{id}`: what sessions hold, and their end.

A client sees and ends the sessions of the namespaces whose salt it knows, and of no other key.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from quire.engine.process import Core
from quire.serve.generation import Service
from quire.serve.protocol import SaltText
from quire.spec.events import Namespace

Salt = Annotated[SaltText, Query(description="The salt of the requests of these sessions.")]


def sessions_router(service: Service) -> APIRouter:
    """The routes, for `service`."""
    router, engine = APIRouter(), service.engine

    @router.get("/v1/sessions")
    async def sessions(request: Request, cache_salt: Salt = "") -> dict[str, Any]:
        """The sessions of a namespace, the one used last first: the tokens that each holds and has saved, and for how
        long it is kept."""
        found = await engine.ask(Core.sessions, Namespace(salt=request.state.client.salt(cache_salt)))
        held = sum(each.held_tokens for each in found.sessions)
        return {
            "sessions": [asdict(each) for each in found.sessions],
            "held_tokens": held,
            "budget_tokens": found.budget_tokens,
        }

    @router.delete("/v1/sessions/{session_id:path}")
    async def close(session_id: str, request: Request, cache_salt: Salt = "") -> dict[str, Any]:
        """End a session and free what it holds. Its turns that run go on. `closed` is false if there is none."""
        namespace = Namespace(salt=request.state.client.salt(cache_salt))
        return {"session_id": session_id, "closed": await engine.ask(Core.close_session, namespace, session_id)}

    return router
