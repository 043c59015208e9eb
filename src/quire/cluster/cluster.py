"""Runs a cluster: ports first, then the processes, then the router; and its end.

    bind -> start processes -> decode engines connect -> route -> signal -> stop accepting -> processes finish -> exit

A second signal ends everything at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import uvloop

from quire.cluster.config import ClusterConfig
from quire.cluster.processes import HOST, Member, Supervisor, Tell, reserve_port
from quire.cluster.router import Router, open_client
from quire.cluster.upstream import Upstream
from quire.engine.config import EngineConfig
from quire.engine.cores import available_cores
from quire.engine.setting import environment_of, variable_of
from quire.errors import ConnectorError, NoServer
from quire.serve.config import ServerConfig
from quire.serve.server import HttpServer, bind, url_of, when_input_ends

logger = logging.getLogger(__name__)

_CONNECT_S = 60.0
_POLL_S = 0.05
_LONGEST_ANSWER = 300  # characters of an answer that an error repeats
_MARGIN_S = 5.0

OnReady = Callable[[list[dict[str, Any]]], None]
"""Is called with a row for each process, the router's last, when requests are answered."""


def run_cluster(config: ClusterConfig, server: ServerConfig, *, on_ready: OnReady, tell: Tell) -> int:
    """Run until SIGINT or SIGTERM. Returns the exit code: 0, or 130 or 143 for a signal before all is ready. Raises the
    errors of a start."""
    if server.api_keys is not None and server.admin_key is None:  # the router asks the processes
        server = server.model_copy(update={"admin_key": secrets.token_urlsafe(32)})
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(bind(server.host, server.port)))
        ports = [stack.enter_context(reserve_port()) for _ in range(2 * config.prefill + config.decode)]
        members = make_members(config, server, [port.getsockname()[1] for port in ports])
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        return runner.run(_run(config, server, members, listener, on_ready, tell))


def make_members(config: ClusterConfig, server: ServerConfig, ports: Sequence[int]) -> list[Member]:
    """The processes of a cluster, on these ports: prefill engines have two. Raises InvalidInput."""
    free = iter(ports)
    secret = config.transfer_secret or secrets.token_urlsafe(32)
    listens = [f"{HOST}:{next(free)}" for _ in range(config.prefill)]
    chosen: list[dict[str, Any]]
    chosen = [{"role": "prefill", "transfer_secret": secret, "transfer_listen": address} for address in listens]
    decode = {"role": "decode", "transfer_secret": secret, "prefill_peers": ",".join(listens)}
    chosen += [decode if listens else {}] * config.decode
    threads = config.threads or max(1, available_cores() // len(chosen))  # they would wait for each other
    variables = set(map(variable_of, (*EngineConfig.model_fields, *ServerConfig.model_fields)))
    inherited = {name: value for name, value in os.environ.items() if name not in variables}
    members: list[Member] = []
    for each in chosen:
        port, role = next(free), each.get("role", "engine")
        own = server.model_copy(update={"host": HOST, "port": port, "cors_origins": None, "max_restarts": 0})
        name = f"{role}-{sum(member.upstream.role == role for member in members)}"
        engine = config.engine(**each, threads=threads, **({"transfer_name": name} if each else {}))
        members.append(
            Member(
                upstream=Upstream(name=name, role=role, url=f"http://{HOST}:{port}"),
                options=(*(("--role", role) if each else ()), "--port", str(port)),
                environment=inherited | environment_of(engine) | environment_of(own),
            )
        )
    return members


async def _run(
    config: ClusterConfig,
    server: ServerConfig,
    members: Sequence[Member],
    listener: socket.socket,
    on_ready: OnReady,
    tell: Tell,
) -> int:
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, number)
    if server.until_eof:
        when_input_ends(lambda: signals.put_nowait(signal.SIGTERM))
    stop_s = server.drain_s + config.stop_seconds + _MARGIN_S
    supervisor = Supervisor(members, stall_s=server.stall_after_s, stop_s=stop_s, tell=tell)
    upstreams = [member.upstream for member in members]
    async with open_client() as client:
        try:
            starting = asyncio.create_task(_start(supervisor, config, server, client, upstreams))
            first = asyncio.create_task(signals.get())
            await asyncio.wait((starting, first), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                return 128 + first.result()
            starting.result()
            router = Router(upstreams, client, keys=server.keys(), cors_origins=server.origins)
            http = HttpServer(router.app, server)
            serving = await http.begin(listener)
            running = asyncio.create_task(_together(router.watch(), supervisor.keep()))
            if http.started:
                row = {"role": "router", "name": "router", "pid": os.getpid(), "url": url_of(listener), "healthy": True}
                on_ready([*(upstream.to_dict() for upstream in upstreams), row])
            await asyncio.wait((serving, running, first), return_when=asyncio.FIRST_COMPLETED)
            running.cancel()
            await asyncio.wait((running,))
            http.should_exit = True
            stopping = asyncio.create_task(_together(supervisor.stop(), serving))
            again = asyncio.create_task(signals.get())
            logger.warning("no new requests; open ones get %g s to finish (a signal: none)", server.drain_s)
            await asyncio.wait((stopping, again), return_when=asyncio.FIRST_COMPLETED)
            http.force_exit = True
            if not running.cancelled():
                running.result()  # raises what has ended it
            return 0
        finally:
            await supervisor.kill()


async def _together(*parts: Awaitable[None]) -> None:
    """A task of it may be cancelled; a cancelled future of `gather` would be logged."""
    await asyncio.gather(*parts)


async def _start(
    supervisor: Supervisor,
    config: ClusterConfig,
    server: ServerConfig,
    client: httpx.AsyncClient,
    upstreams: Sequence[Upstream],
) -> None:
    """Start all, and wait until decode engines are connected to all prefill engines."""
    await supervisor.start()
    key = server.admin_key or server.api_key
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    until = time.monotonic() + _CONNECT_S
    for upstream in (each for each in upstreams if each.role == "decode"):
        while problem := await _not_connected(upstream, config.prefill, client, headers):
            if time.monotonic() > until:
                raise ConnectorError(f"{upstream.name} is not connected to all prefill engines: {problem}.")
            await asyncio.sleep(_POLL_S)


async def _not_connected(
    upstream: Upstream, num_peers: int, client: httpx.AsyncClient, headers: list[tuple[bytes, bytes]]
) -> str:
    """The reason why a decode engine is not connected to `num_peers` prefill engines; empty if it is. Raises NoServer
    if its process has ended. A server whose engine still starts answers 503: it is not connected yet."""
    try:
        answer = await client.get(f"{upstream.url}/v1/cache/statistics", headers=headers)
    except httpx.TransportError:
        raise NoServer(f"{upstream.name} ended while the others started.", fix="see its log.") from None
    if answer.status_code != 200:
        return f"it answers {answer.status_code}: {answer.text[:_LONGEST_ANSWER]}"
    transfer = answer.json()["transfer"]
    if len(transfer["prefill_peers"]) == num_peers:
        return ""
    return "; ".join(transfer["problems"].values()) or "no answer from them yet"
