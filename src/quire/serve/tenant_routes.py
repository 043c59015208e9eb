"""The routes of `/v1/tenants`: who holds what, and other terms for a tenant. They are the operator's."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from quire.client.process import Core
from quire.serve.closed_object import ClosedObject
from quire.serve.generation import Service
from quire.serve.protocol import Text, field

Part = Annotated[str | int, Field(union_mode="left_to_right")]


class TenantBody(ClosedObject):
    """A tenant, and those of its terms that change."""

    name: Text = field("The tenant.", ...)
    floor: Part | None = field("KV memory that no other tenant takes from it: a share, or bytes: 25%, 8GiB, 0.")
    ceiling: Part | None = field("KV memory that it may have; null is all.")
    weight: float | None = field("Its part of admissions where requests of several tenants wait.")


def tenant_router(service: Service) -> APIRouter:
    """The routes of tenants, for `service`."""
    router, engine = APIRouter(), service.engine

    @router.get("/v1/tenants")
    async def tenants() -> dict[str, Any]:
        """Each tenant: its keys, its terms, the bytes that it holds, and what became of its prompts."""
        return {"tenants": [asdict(each) for each in await engine.ask(Core.tenants)]}

    @router.post("/v1/tenants")
    async def change(body: TenantBody) -> dict[str, Any]:
        """Change terms of a tenant while requests run. What it has above a new ceiling is evicted when it next asks for
        room; what is above the floors of others goes when these need it. Terms that cannot be kept change nothing."""
        terms = {name: getattr(body, name) for name in body.model_fields_set - {"name"}}
        return {"tenants": [asdict(each) for each in await engine.ask(Core.set_tenant, body.name, terms)]}

    return router
