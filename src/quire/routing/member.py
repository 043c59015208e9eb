"""One `quire serve` behind the router: its process, from its start to its end.

Settings and secrets go by environment. The process ends when the pipe of its standard input does, so none is left if
this one is killed. A signal of a terminal does not reach it, because it has a session of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quire.engine.config import EngineConfig
from quire.errors import NoServer, start_error
from quire.routing.upstream import Upstream
from quire.serve.config import ServerConfig
from quire.settings.setting import environment_of, variable_of

Tell = Callable[[str, str], None]
"""Is called with the name of a process and each line of its standard error stream."""

_LONGEST_LINE = 16 * 2**20
_SPARE = 64  # connections for checks and scrapes
_BROKEN_S = 2.0  # for how long a server may say that it is unhealthy


@dataclass(slots=True, eq=False, kw_only=True)
class Member:
    """One process: how it is started, and what the router sees of it."""

    upstream: Upstream
    options: Sequence[str]
    environment: Mapping[str, str]
    process: Process | None = None
    ready_s: float = 0.0

    async def start(self, tell: Tell, within_s: float | None = None) -> dict[str, Any]:
        """Start it, until it is ready; kill it if it is not in time. Returns what it says of itself. Raises QuireError,
        its own if it has said one. A process whose start is cancelled goes on: `signal` ends it."""
        command = (sys.executable, "-m", "quire", "serve", "--json", "--until-eof", *self.options)
        self.process = process = await asyncio.create_subprocess_exec(
            *command,
            env=self.environment,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            limit=_LONGEST_LINE,
            start_new_session=True,
        )
        assert process.stdout is not None and process.stderr is not None
        self.upstream.pid = process.pid
        logs = asyncio.create_task(self._follow(process.stderr, tell))
        try:
            async with asyncio.timeout(within_s):
                is_ready = await process.stdout.readline()
                exit_code = 0 if is_ready else await process.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await process.wait()
            raise NoServer(f"it was not ready within {within_s:g} s, and was killed.", fix="see its log.") from None
        if not is_ready:
            raise start_error(await logs, exit_code)
        self.ready_s = time.monotonic()
        self.upstream.works()
        said: dict[str, Any] = json.loads(is_ready)
        self.upstream.events = tuple(said.get("kv_events") or ()) or None
        return said

    async def _follow(self, lines: asyncio.StreamReader, tell: Tell) -> str:
        """Pass the log on. Returns its last line, which is the error of a process that did not start."""
        last = ""
        async for line in lines:
            last = line.decode(errors="replace").rstrip()
            if not last.startswith('{"error"'):
                tell(self.upstream.name, last)
        return last

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def ended(self) -> None:
        """Wait for its end, if it was started."""
        if self.process is not None:
            await self.process.wait()

    def problem(self, stall_s: float) -> str:
        """What has happened to it, if it has ended or failed its health checks for longer than it may: `stall_s` for
        one that does not answer. Empty if nothing has."""
        assert self.process is not None
        code = self.process.returncode
        if code is not None:
            return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        since, patience_s = self.upstream.failing_since_s, _BROKEN_S if self.upstream.is_broken else stall_s
        return self.upstream.reason if since is not None and time.monotonic() - since > patience_s else ""


def behind_routers(server: ServerConfig, host: str, port: int, secret: str, routers: int = 1) -> ServerConfig:
    """The settings of a server behind routers, which have all its clients. Its health is asked for also while these
    have as many connections as they may."""
    most = min(routers * server.max_connections + _SPARE, 2**31 - 1)
    own = {"host": host, "port": port, "router_secret": secret, "max_connections": most}
    return server.changed(**own, cors_origins=None, max_restarts=0)


def environment_for(engine: EngineConfig, server: ServerConfig) -> dict[str, str]:
    """The environment of a process with these settings: this one's, without settings."""
    variables = set(map(variable_of, (*EngineConfig.model_fields, *ServerConfig.model_fields)))
    inherited = {name: value for name, value in os.environ.items() if name not in variables}
    return inherited | environment_of(engine) | environment_of(server)
