"""Runs a cluster: ports first, then the processes, each a `quire serve`, then the router; and its end.

    bind -> start processes -> decode engines connect -> route -> signal -> stop accepting -> processes finish -> exit

A second signal ends everything at once.

    start -> its first line: it is ready -> ends, or fails its health check -> pause -> start with the same ports

A process that ends before it was ever ready ends the cluster, with its error. One that starts again and takes much
longer than the first time is killed, and starts once more.
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
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import httpx
import uvloop

from quire.engine.cores import available_cores
from quire.errors import ConnectorError, NoServer, QuireError
from quire.routing.config import ClusterConfig, OnReady
from quire.routing.member import Member, Tell, behind_routers, environment_for
from quire.routing.router import CHECK_S, Router, open_client
from quire.routing.tracing import RouteTracing, open_routes
from quire.routing.upstream import Upstream
from quire.serve.config import ServerConfig
from quire.serve.server import HttpServer, bind, url_of, when_input_ends

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
_LASTS_S = 30.0  # a process that ran so long is restarted without a longer pause
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_LEAST_START_S, _STARTS = 60.0, 4.0  # a start may take so long, or so many times as long as the first one
_CONNECT_S, _POLL_S, _MARGIN_S = 60.0, 0.05, 5.0
_LONGEST_ANSWER = 300  # characters of an answer that an error repeats


def reserve_port() -> socket.socket:
    """A free port of the loopback address. While the socket is open, no other program is given the port, and a server
    that asks for it can listen there."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((HOST, 0))
    return reserved


class Supervisor:
    """Runs `members`. `stall_s` is for how long a server may not answer."""

    def __init__(self, members: Sequence[Member], *, stall_s: float, stop_s: float, tell: Tell) -> None:
        self._members = members
        self._stall_s = stall_s
        self._stop_s = stop_s
        self._tell = tell
        self._first_starts_s: dict[Member, float] = {}

    async def start(self) -> None:
        """Start all, however long they load. Raises the error of the first that does not start."""
        began = time.monotonic()
        await asyncio.gather(*(member.start(self._tell) for member in self._members))
        self._first_starts_s = {member: member.ready_s - began for member in self._members}

    async def keep(self) -> None:
        """Start each again whenever it has ended, until cancelled, which is before `stop` and `kill`."""
        await asyncio.gather(*map(self._keep, self._members))

    async def _keep(self, member: Member) -> None:
        upstream, num_short = member.upstream, 0
        while True:
            how = await self._end_of(member)
            upstream.fails("starts again")
            num_short = 0 if time.monotonic() - member.ready_s > _LASTS_S else num_short + 1
            pause_s = min(_FIRST_PAUSE_S * 2**num_short, _LONGEST_PAUSE_S)
            logger.warning("%s %s; it starts again in %g s", upstream.name, how, pause_s)
            await asyncio.sleep(pause_s)
            try:
                await member.start(self._tell, max(_LEAST_START_S, _STARTS * self._first_starts_s.get(member, 0.0)))
                logger.warning("%s is ready again", upstream.name)
            except QuireError as error:
                member.ready_s = time.monotonic()  # a process that never was ready did not last
                logger.error("%s did not start: %s", upstream.name, error)

    async def _end_of(self, member: Member) -> str:
        """Wait until the process has ended; one that fails its health checks is killed. Returns what happened."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(member.ended(), CHECK_S)
                return member.problem(self._stall_s)
            if problem := member.problem(self._stall_s):
                member.signal(signal.SIGKILL)
                await member.ended()
                return f"{problem}, and was killed"

    async def stop(self) -> None:
        """Let all finish what they do, for as long as they may take, and end them: those that compute prompts after
        those that wait for these."""
        for is_prefill in (False, True):
            group = [member for member in self._members if (member.upstream.role == "prefill") is is_prefill]
            for member in group:
                member.signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._stop_s):
                    await self._ended(group)
        await self.kill()

    async def kill(self) -> None:
        """End all at once. Their engines end with them."""
        for member in self._members:
            member.signal(signal.SIGKILL)
        await self._ended(self._members)

    async def _ended(self, members: Iterable[Member]) -> None:
        await asyncio.gather(*(member.ended() for member in members))


def run_cluster(config: ClusterConfig, server: ServerConfig, *, on_ready: OnReady, tell: Tell) -> int:
    """Run until SIGINT or SIGTERM. Returns the exit code: 0, or 130 or 143 for a signal before all is ready. Raises the
    errors of a start."""
    if server.api_keys is not None and server.admin_key is None:  # the router asks the processes
        server = server.model_copy(update={"admin_key": secrets.token_urlsafe(32)})
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(bind(server.host, server.port)))
        ports = [stack.enter_context(reserve_port()) for _ in range(2 * config.prefill + config.decode)]
        members = make_members(config, server, [port.getsockname()[1] for port in ports])
        tracing = stack.enter_context(contextlib.closing(open_routes(config)))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        return runner.run(_run(config, server, members, listener, on_ready, tell, tracing))


def make_members(config: ClusterConfig, server: ServerConfig, ports: Sequence[int]) -> list[Member]:
    """The processes of a cluster, on these ports: prefill engines have two. Raises InvalidInput."""
    free = iter(ports)
    secret = config.transfer_secret or secrets.token_urlsafe(32)
    listens = [f"{HOST}:{next(free)}" for _ in range(config.prefill)]
    chosen: list[dict[str, Any]]
    chosen = [{"role": "prefill", "transfer_secret": secret, "transfer_listen": address} for address in listens]
    decode = {"role": "decode", "transfer_secret": secret, "prefill_peers": ",".join(listens)} if listens else {}
    chosen += [decode | config.events_at(HOST)] * config.decode
    threads = config.threads or max(1, available_cores() // len(chosen))  # they would wait for each other
    members: list[Member] = []
    known = secrets.token_urlsafe(32)
    for each in chosen:
        port, role = next(free), each.get("role", "engine")
        own = behind_routers(server, HOST, port, known)
        name = f"{role}-{sum(member.upstream.role == role for member in members)}"
        engine = config.engine(**each, threads=threads, **({"transfer_name": name} if listens else {}))
        members.append(
            Member(
                upstream=Upstream(name=name, role=role, url=f"http://{HOST}:{port}", secret=known),
                options=(*(("--role", role) if listens else ()), "--port", str(port)),
                environment=environment_for(engine, own),
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
    tracing: RouteTracing,
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
            router = Router(
                upstreams,
                client,
                keys=server.keys(),
                cors_origins=server.origins,
                router=config.router,
                tracing=tracing,
            )
            http = HttpServer(router.app, server, files=2)
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
            logging.getLogger("uvicorn.error").disabled = True  # a second signal drops requests, and that is no fault
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
