"""`GET /v1/sessions` and `DELETE /v1/sessions/{id}`: what sessions hold, and their end.

A client sees and ends the sessions of its own key, in the namespaces whose salt it knows; the operator those of all.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from quire.engine.process import Core
from quire.serve.generation import Service
from quire.serve.keys import Client
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
        client: Client = request.state.client
        found = await engine.ask(Core.sessions, Namespace(salt=client.salt(cache_salt)), client.sees)
        held = sum(each.held_tokens for each in found.sessions)
        return {
            "sessions": [asdict(each) for each in found.sessions],
            "held_tokens": held,
            "budget_tokens": found.budget_tokens,
        }

    @router.delete("/v1/sessions/{session_id:path}")
    async def close(session_id: str, request: Request, cache_salt: Salt = "") -> dict[str, Any]:
        """End a session that no turn will follow, and free what it holds. Its turns that run go on. Cached pages that
        no other request has used are evicted first. `closed` is false if there is none."""
        client: Client = request.state.client
        namespace = Namespace(salt=client.salt(cache_salt))
        closed = await engine.ask(Core.close_session, namespace, session_id, client.sees)
        return {"session_id": session_id, "closed": closed}

    return router
