"""A router in a thread of the test, in front of real servers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import uvloop

from quire.routing.config import RouterKind
from quire.routing.router import Router, open_client
from quire.routing.tracing import RouteTracing
from quire.routing.upstream import Upstream
from quire.serve.config import ServerConfig
from quire.serve.keys import Keys
from quire.serve.server import HttpServer, bind, url_of
from tests.serve.live_server import LiveServer

SECRET = "of a router in a test"


def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Poll until `holds()`, or fail."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


class LiveRouter(LiveServer):
    """Ready when all `servers` are healthy. It ends in `close`, they do not."""

    def __init__(
        self,
        servers: Sequence[LiveServer],
        *,
        keys: Keys | None = None,
        router: RouterKind = "prefix",
        name: str | None = None,
        tracing: RouteTracing | None = None,
    ) -> None:
        self.upstreams = [
            Upstream(
                name=f"decode-{index}",
                role="decode",
                url=server.summary["url"],
                secret=SECRET,
                events=tuple(server.summary.get("kv_events") or ()) or None,
            )
            for index, server in enumerate(servers)
        ]
        self._keys, self._router, self._name, self._tracing = keys or Keys(), router, name, tracing
        self._listener = bind("127.0.0.1", 0)
        self.summary = {"url": url_of(self._listener)}
        self.port = self._listener.getsockname()[1]
        self._clients = ExitStack()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        wait_until(lambda: all(upstream.is_healthy for upstream in self.upstreams))

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        async with open_client() as client:
            self.router = router = Router(
                self.upstreams, client, keys=self._keys, router=self._router, name=self._name, tracing=self._tracing
            )
            self._http = HttpServer(router.app, ServerConfig(drain_s=0))
            serving = await self._http.begin(self._listener)
            watching = asyncio.create_task(router.watch())
            await serving
            watching.cancel()
            await asyncio.wait((watching,))

    def close(self) -> None:
        self._clients.close()
        self._http.should_exit = self._http.force_exit = True
        self._thread.join(10)
        self._listener.close()
