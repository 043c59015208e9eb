"""A replica of an engine: a `quire serve` on its node, which it starts, watches, tells of its peers, and drains.

Requests reach the server over HTTP. So a replica that dies cuts no stream: its server finishes what it has, and ends.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import sys
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from quire.errors import NoServer, QuireError
from quire.fleet.config import FleetConfig
from quire.fleet.deployments import MARGIN_S
from quire.fleet.replicas import EVERY_S, keep_on_loopback, upstreams_of
from quire.fleet.scaling import IN_FLIGHT
from quire.routing.member import Member, behind_routers, environment_for
from quire.routing.router import check, open_client
from quire.routing.upstream import Upstream
from quire.serve.config import ServerConfig
from quire.transfer.address import format_address

logger = logging.getLogger(__name__)

START_ERROR = "quire-start-error: "
"""Before an error as JSON, in what Serve says of a replica that did not start."""

_ASK_S = 5.0


class Engine:
    """A deployment of it has engines of one role: prefill, decode, or None. Those that decode ask `prefill`."""

    async def __init__(  # type: ignore[misc]
        self, fleet: FleetConfig, server: ServerConfig, role: str | None, prefill: DeploymentHandle[Any] | None = None
    ) -> None:
        """Returns when the server is ready. Raises RuntimeError with the server's own error after `START_ERROR`."""
        keep_on_loopback()
        host = ray.util.get_node_ip_address()
        self._stop_s = server.drain_s + fleet.stop_seconds + MARGIN_S
        self._stall_s = server.stall_after_s
        self._prefill = prefill
        self._peers: list[str] = []
        name = f"{role or 'engine'}-{serve.get_replica_context().replica_tag}"
        known = secrets.token_urlsafe(32)
        own, key = _with_keys(behind_routers(server, host, 0, known, fleet.ingresses or 1))
        self._admin = {"authorization": f"Bearer {own.admin_key or own.api_key}"}
        upstream = Upstream(name=name, role=role or "engine", url="", key=key, secret=known)
        chosen = {"role": role, "transfer_name": name, "transfer_listen": format_address((host, 0))} if role else {}
        chosen |= fleet.events_at(host) if role != "prefill" else {}
        options = ("--role", role) if role else ()
        try:
            engine = fleet.engine(**chosen, threads=fleet.threads or max(1, int(fleet.cpus)))
            self._member = Member(upstream=upstream, options=options, environment=environment_for(engine, own))
            summary = await self._member.start(_tell)
        except QuireError as error:
            raise RuntimeError(START_ERROR + error.to_json()) from None
        upstream.url = summary["url"]
        upstream.listens = summary["transfer"]["address"]
        self._client = open_client()
        self._following = asyncio.create_task(self._follow_peers())

    async def upstream(self) -> Upstream:
        """Its server, for a router."""
        return replace(self._member.upstream, failing_since_s=None)

    async def check_health(self) -> None:
        """Raises NoServer if the server has ended, or has failed for longer than it may: Serve replaces the replica."""
        await check(self._member.upstream, self._client)
        if problem := self._member.problem(self._stall_s):
            raise NoServer(f"{self._member.upstream.name} {problem}.", fix="see its log.")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `wanted_replicas` decides by."""
        answer = await self._client.get(f"{self._member.upstream.url}/load", headers=self._admin, timeout=_ASK_S)
        return {IN_FLIGHT: float(answer.raise_for_status().json()["server_load"])}

    async def _follow_peers(self) -> None:
        """Tell the server which prefill engines there are, whenever they change."""
        while self._prefill is not None:
            found = await upstreams_of(self._prefill)
            peers = self._peers if found is None else sorted(each.listens for each in found if each.listens)
            if peers != self._peers:
                url = f"{self._member.upstream.url}/v1/cache/peers"
                try:
                    answer = await self._client.put(
                        url, json={"prefill_peers": peers}, headers=self._admin, timeout=_ASK_S
                    )
                    answer.raise_for_status()
                    self._peers = peers
                except Exception as error:  # the next round tells it
                    logger.warning("%s does not learn of its peers: %s", self._member.upstream.name, error)
            await asyncio.sleep(EVERY_S)

    async def __del__(self) -> None:
        """Let the server finish what it does, for as long as it may take, and end it. Serve calls it when requests go
        elsewhere."""
        self._following.cancel()
        self._member.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._stop_s):
                await self._member.ended()
        except TimeoutError:
            self._member.signal(signal.SIGKILL)
            await self._member.ended()
        await self._client.aclose()


def _with_keys(server: ServerConfig) -> tuple[ServerConfig, str | None]:
    """The server's settings with a key for its operator, and the key that its router sends in place of a client's.
    Without keys of clients it gets one that only this fleet has."""
    new = secrets.token_urlsafe(32)
    if server.api_key is None and server.api_keys is None and server.admin_key is None:
        return server.changed(api_key=new), new
    if server.api_keys is not None and server.admin_key is None:
        return server.changed(admin_key=new), None
    return server, None


def _tell(name: str, line: str) -> None:
    sys.stderr.write(f"{name} | {line}\n")
