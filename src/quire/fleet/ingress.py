"""The ingress: Quire's router as a deployment, whose servers are those of the engines' replicas."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

import uvloop
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from quire.fleet.config import FleetConfig
from quire.fleet.replicas import EVERY_S, keep_on_loopback, upstreams_of
from quire.routing.router import Router, open_client
from quire.routing.tracing import open_routes
from quire.routing.upstream import Upstream
from quire.serve.config import ServerConfig
from quire.serve.server import HttpServer, bind

_FIRST_S, _AGAIN_S = 5.0, 0.2


@serve.ingress()
class Ingress:
    """Answers over Serve's proxies, in Serve's loop. With `listens` it answers at the server's own address, in a thread
    whose loop is faster."""

    async def __init__(  # type: ignore[misc]
        self, server: ServerConfig, engines: Sequence[DeploymentHandle[Any]], fleet: FleetConfig, listens: bool
    ) -> None:
        keep_on_loopback()
        self._loop = uvloop.new_event_loop() if listens else asyncio.get_running_loop()
        if listens:
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._upstreams: dict[str, dict[str, Upstream]] = {}
        self._http: HttpServer | None = None
        await self._there(self._begin(server, engines, fleet, listens))

    async def _there(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it in the loop of the router."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _begin(
        self, server: ServerConfig, engines: Sequence[DeploymentHandle[Any]], fleet: FleetConfig, listens: bool
    ) -> None:
        """Listen when the engines are known; those that start beside this one are not waited for."""
        self._client = open_client()
        name = None if listens else f"router-{serve.get_replica_context().replica_tag}"  # one of several, perhaps
        self._tracing = open_routes(fleet)
        self._router = Router(
            (),
            self._client,
            keys=server.keys(),
            cors_origins=server.origins,
            router=fleet.router,
            name=name,
            tracing=self._tracing,
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_S):
                for each in engines:
                    while not await self._look(each):
                        await asyncio.sleep(_AGAIN_S)
        self._tasks = [asyncio.create_task(self._router.watch()), *map(asyncio.create_task, map(self._follow, engines))]
        if listens:
            self._http = HttpServer(self._router.app, server, files=2)
            self._tasks.append(await self._http.begin(bind(server.host, server.port)))

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._router.app

    async def processes(self) -> list[dict[str, Any]]:
        """The servers that it knows."""
        return [upstream.to_dict() for known in list(self._upstreams.values()) for upstream in list(known.values())]

    async def _follow(self, engines: DeploymentHandle[Any]) -> None:
        while True:
            await self._look(engines)
            await asyncio.sleep(EVERY_S)

    async def _look(self, engines: DeploymentHandle[Any]) -> bool:
        """Let the servers of these replicas be those of the router. They stay while replicas are not known. Returns
        whether there is any."""
        known = self._upstreams.setdefault(engines.deployment_name, {})
        found = await upstreams_of(engines)
        if found is not None and known.keys() != {each.name for each in found}:
            known = self._upstreams[engines.deployment_name] = {each.name: known.get(each.name, each) for each in found}
            self._router.use([upstream for each in self._upstreams.values() for upstream in each.values()])
        return bool(known)

    async def check_health(self) -> None:
        """Raises what has ended one of its tasks."""
        for task in self._tasks:
            if task.done():
                task.result()
                raise RuntimeError("a task of the ingress has ended.")

    async def __del__(self) -> None:
        """Take no new requests, and let open ones finish."""
        await self._there(self._end())

    async def _end(self) -> None:
        if self._http is not None:
            self._http.should_exit = True
            await asyncio.wait((self._tasks.pop(),))
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._client.aclose()
        await asyncio.to_thread(self._tracing.close)
