"""Runs the server: address first, then the model, then HTTP; and its shutdown.

    bind -> start engine -> serve -> signal -> stop accepting -> open requests finish or are aborted -> exit

The port is taken, and listened on, before the model is loaded, so that a port in use costs nothing: two sockets that
only bound a port may share it. Clients that connect while the model loads are answered after the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from quire.client.async_engine import AsyncEngine
from quire.client.process import Progress
from quire.engine.config import EngineConfig
from quire.engine.watchdog import Watchdog
from quire.errors import AddressInUse, InvalidInput
from quire.serve.app import create_app
from quire.serve.config import MOST_BODY_BYTES, ServerConfig
from quire.serve.connections import HEAD_S, Limits, limited_to
from quire.serve.tracing import Tracing, open_tracing
from quire.settings.tenants import read_tenants

logger = logging.getLogger(__name__)

LOOP_STUCK_AFTER_S = 4.0
"""Time without a turn of the event loop after which the log has where it is."""

_BACKLOG = 128
_OTHER_FILES = 128  # that a server may have open, beside its connections
_STDIN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that answers from now on."""

    url: str
    engine: AsyncEngine
    model_name: str


def bind(host: str, port: int) -> socket.socket:
    """Take the address: connections to it queue from now on. Raises `AddressInUse` or `InvalidInput`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, OverflowError, UnicodeError) as error:
        raise InvalidInput(f"cannot listen on {host}:{port}: {error}.", fix="use --host 127.0.0.1.") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)  # two that share a port are told apart only here
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"{host}:{port} is in use by another process.", fix=f"--port {port + 1}, or --port 0 for any free one."
            ) from None
        raise InvalidInput(f"cannot listen on {host}:{port}: {error.strerror}.", fix="use --host 127.0.0.1.") from None
    return listener


def serve(
    config: EngineConfig,
    server: ServerConfig,
    *,
    on_ready: Callable[[Running], None] | None = None,
    on_progress: Progress | None = None,
    start: Callable[..., Coroutine[Any, Any, AsyncEngine]] = AsyncEngine.start,
) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code: 0, or 130 or 143 for a signal before the engine is ready.

    Raises the errors of a start, but never `EngineDead`: /health reports it. `on_progress` is called while host memory
    is touched, `on_ready` once requests are answered. After a signal during the start, a thread may still load
    the tokenizer.
    """
    server.keys().check_tenants(read_tenants(config.tenants))  # refused before the model is loaded
    tracing = open_tracing(config)
    listener = bind(server.host, server.port)
    with contextlib.closing(listener), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        starting = start(
            config, stall_after_s=server.stall_after_s, on_progress=on_progress, max_restarts=server.max_restarts
        )
        return runner.run(_serve(config, server, tracing, listener, on_ready, starting))


async def _serve(
    config: EngineConfig,
    server: ServerConfig,
    tracing: Tracing | None,
    listener: socket.socket,
    on_ready: Callable[[Running], None] | None,
    starting: Coroutine[Any, Any, AsyncEngine],
) -> int:
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[signal.Signals] = loop.create_future()
    dropping: asyncio.Future[None] = loop.create_future()  # done at the second signal
    http: HttpServer | None = None

    def on_signal(number: signal.Signals) -> None:
        if http is None:
            logger.warning("%s: the start ends", number.name)
        elif stopping.done():
            logger.warning("%s again: open requests are dropped", number.name)
            http.force_exit = True
            if not dropping.done():
                dropping.set_result(None)
        else:
            logger.warning(
                "%s: no new requests; open ones get %g s to finish (again: none)", number.name, server.drain_s
            )
        if not stopping.done():
            stopping.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    if server.until_eof:
        when_input_ends(lambda: on_signal(signal.SIGTERM))
    task = asyncio.create_task(starting)
    await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return 128 + stopping.result()
    engine = task.result()
    watchdog = Watchdog("the event loop", LOOP_STUCK_AFTER_S)
    ticking = asyncio.create_task(_tick(watchdog))
    try:
        app = create_app(engine, model_name=config.model_name, server=server, keys=server.keys(), tracing=tracing)
        http = HttpServer(app, server, most_body_bytes=server.body_bytes(engine.context_length))
        serving = await http.begin(listener)
        gc.freeze()  # else a full collection visits all that a start made: half a second in which nothing is answered
        if on_ready is not None and http.started:
            on_ready(Running(url=url_of(listener), engine=engine, model_name=config.model_name))
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        http.should_exit = True
        await _drain(engine, server.drain_s, dropping)
        await serving
        return 0
    finally:
        await engine.shutdown()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
        ticking.cancel()
        watchdog.close()


async def _tick(watchdog: Watchdog) -> None:
    while True:
        watchdog.tick()
        await asyncio.sleep(LOOP_STUCK_AFTER_S / 8)


async def _drain(engine: AsyncEngine, seconds: float, dropping: asyncio.Future[None]) -> None:
    """Let open requests finish for so long, or until `dropping` is done."""
    draining = asyncio.create_task(engine.shutdown(drain_s=seconds))
    await asyncio.wait((draining, dropping), return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        await engine.shutdown()


def when_input_ends(call: Callable[[], None]) -> None:
    """Call it at the end of the standard input. The running loop reads what is there before."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(_STDIN, 4096):
            loop.remove_reader(_STDIN)
            call()

    loop.add_reader(_STDIN, read)


def url_of(listener: socket.socket) -> str:
    """The URL of the server that listens there."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _allow_files(num_connections: int, each: int) -> int:
    """Raise this process' limit of open files for so many connections, with so many files for `each`. Returns how many
    they may be, at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = each * num_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        logger.warning("%d connections are not possible: this process may open %d files", num_connections, soft)
        return max(1, (soft - _OTHER_FILES) // each)
    return num_connections


class HttpServer(uvicorn.Server):
    """uvicorn, with signals left to the caller, which drains before it stops the server."""

    def __init__(
        self, app: ASGIApp, server: ServerConfig, *, most_body_bytes: int = MOST_BODY_BYTES, files: int = 1
    ) -> None:
        """A connection needs so many `files`: that of a router one more, to the server that it asks."""
        limits = Limits(
            most_connections=_allow_files(server.max_connections, files),
            most_body_bytes=most_body_bytes,
            head_s=min(HEAD_S, server.read_timeout_s),
            body_s=server.read_timeout_s,
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=limited_to(limits),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=int(server.drain_s) + 5,
            )
        )

    async def begin(self, listener: socket.socket) -> asyncio.Task[None]:
        """Start; the result ends when the server has. It has not `started` if it failed."""
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        while not self.started and not serving.done():
            await asyncio.sleep(0.01)
        return serving

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
