"""The routes of the size of an engine's memory. They are the operator's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from pydantic import Field

from quire.client.async_engine import ANSWER_TIMEOUT_S
from quire.client.process import Core
from quire.engine.memory_report import MemoryReport, ResizeRequest
from quire.engine.messages import Later
from quire.serve.closed_object import ClosedObject
from quire.serve.generation import Service
from quire.serve.protocol import field
from quire.settings.setting import Bytes

_WAIT_S = 10.0


class WaitBody(ClosedObject):
    """How long an answer may take."""

    wait_s: float = field("Seconds until it is answered in any case.", _WAIT_S, ge=0, le=600, allow_inf_nan=False)


class ResizeBody(WaitBody):
    """What the memory should be."""

    device_bytes: Bytes | None = Field(None, description="KV memory on the device: 8GiB, or a number of bytes.")
    host_bytes: Bytes | None = Field(None, description="Host memory for pages.")
    preempt: bool = field("Requests that run give their memory back, wait, and go on later.", False)


def memory_router(service: Service) -> APIRouter:
    """The routes, for `service`."""
    router, engine = APIRouter(), service.engine

    async def answered(verb: Callable[..., Later[MemoryReport]], asked: Any, wait_s: float) -> dict[str, Any]:
        return asdict(await engine.ask(verb, asked, timeout_s=wait_s + ANSWER_TIMEOUT_S))

    @router.get("/v1/cache/memory")
    async def memory() -> dict[str, Any]:
        """The size of the KV memory and of host memory for pages, and between what they can be."""
        return asdict(await engine.ask(Core.memory))

    @router.post("/v1/cache/resize")
    async def resize(body: ResizeBody) -> dict[str, Any]:
        """Make the memory smaller or larger while requests run. Cached pages leave first, to lower tiers where there
        are some. Unless it is `done`, the `holders` keep the rest, and it goes on as they end."""
        request = ResizeRequest(**{name: getattr(body, name) for name in ResizeRequest.__struct_fields__})
        return await answered(Core.resize, request, body.wait_s)

    @router.post("/v1/cache/memory/release")
    async def release(body: WaitBody) -> dict[str, Any]:
        """Give all KV memory back until it is resumed; the weights stay. Requests that run are preempted, and all wait.
        Cached pages stay on lower tiers, where there are some."""
        return await answered(Core.release_memory, body.wait_s, body.wait_s)

    @router.post("/v1/cache/memory/resume")
    async def resume(body: WaitBody) -> dict[str, Any]:
        """Have the KV memory again. Requests that wait go on."""
        return await answered(Core.resume_memory, body.wait_s, body.wait_s)

    return router
