"""The processes of a cluster: each is a `quire serve` that is started, restarted when it has ended, and stopped.

    start -> its first line: it is ready -> ends, or fails its health check -> pause -> start with the same ports

A process that ends before it was ever ready ends the cluster, with its error. One that starts again and takes much
longer than the first time is killed, and starts once more. Settings and secrets go by environment. Processes end when
the pipe of their standard input does, so none is left if this process is killed. A signal of a terminal reaches only
this process, because the others have sessions of their own.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from quire.cluster.router import CHECK_S
from quire.cluster.upstream import Upstream
from quire.errors import NoServer, QuireError, start_error

logger = logging.getLogger(__name__)

Tell = Callable[[str, str], None]
"""Is called with the name of a process and each line of its standard error stream."""

HOST = "127.0.0.1"
_LONGEST_LINE = 16 * 2**20
_LASTS_S = 30.0  # a process that ran so long is restarted without a longer pause
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
_LEAST_START_S, _STARTS = 60.0, 4.0  # a start may take so long, or so many times as long as the first one
_BROKEN_S = 2.0  # for how long a server may say that it is unhealthy


def reserve_port() -> socket.socket:
    """A free port of the loopback address. While the socket is open, no other program is given the port, and a server
    that asks for it can listen there."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((HOST, 0))
    return reserved


@dataclass(slots=True, eq=False, kw_only=True)
class Member:
    """One process: how it is started, and what the router sees of it."""

    upstream: Upstream
    options: Sequence[str]
    environment: Mapping[str, str]
    process: Process | None = None
    ready_s: float = 0.0
    first_start_s: float = 0.0

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


class Supervisor:
    """Runs `members`. `stall_s` is for how long a server may not answer."""

    def __init__(self, members: Sequence[Member], *, stall_s: float, stop_s: float, tell: Tell) -> None:
        self._members = members
        self._stall_s = stall_s
        self._stop_s = stop_s
        self._tell = tell

    async def start(self) -> None:
        """Start all, however long they load. Raises the error of the first that does not start."""
        began = time.monotonic()
        await asyncio.gather(*(self._start(member, None) for member in self._members))
        for member in self._members:
            member.first_start_s = member.ready_s - began

    async def keep(self) -> None:
        """Start each again whenever it has ended, until cancelled, which is before `stop` and `kill`."""
        await asyncio.gather(*map(self._keep, self._members))

    async def _start(self, member: Member, within_s: float | None) -> None:
        """Start one, until it is ready; kill it if it is not in time. Raises QuireError."""
        command = (sys.executable, "-m", "quire", "serve", "--json", "--until-eof", *member.options)
        member.process = process = await asyncio.create_subprocess_exec(
            *command,
            env=member.environment,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            limit=_LONGEST_LINE,
            start_new_session=True,
        )
        assert process.stdout is not None and process.stderr is not None
        member.upstream.pid = process.pid
        logs = asyncio.create_task(self._follow(member.upstream.name, process.stderr))
        try:
            async with asyncio.timeout(within_s):
                is_ready = await process.stdout.readline()
                exit_code = 0 if is_ready else await process.wait()
        except TimeoutError:
            member.signal(signal.SIGKILL)
            await process.wait()
            raise NoServer(f"it was not ready within {within_s:g} s, and was killed.", fix="see its log.") from None
        if not is_ready:
            raise start_error(await logs, exit_code)
        member.ready_s = time.monotonic()
        member.upstream.works()

    async def _follow(self, name: str, lines: asyncio.StreamReader) -> str:
        """Pass the log on. Returns its last line, which is the error of a process that did not start."""
        last = ""
        async for line in lines:
            last = line.decode(errors="replace").rstrip()
            if not last.startswith('{"error"'):
                self._tell(name, last)
        return last

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
                await self._start(member, max(_LEAST_START_S, _STARTS * member.first_start_s))
                logger.warning("%s is ready again", upstream.name)
            except QuireError as error:
                member.ready_s = time.monotonic()  # a process that never was ready did not last
                logger.error("%s did not start: %s", upstream.name, error)

    async def _end_of(self, member: Member) -> str:
        """Wait until the process has ended; one that fails its health checks is killed. Returns what happened."""
        upstream, process = member.upstream, member.process
        assert process is not None
        while True:
            with suppress(TimeoutError):
                code = await asyncio.wait_for(process.wait(), CHECK_S)
                return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            since, patience_s = upstream.failing_since_s, _BROKEN_S if upstream.is_broken else self._stall_s
            if since is not None and time.monotonic() - since > patience_s:
                member.signal(signal.SIGKILL)
                await process.wait()
                return f"{upstream.reason}, and was killed"

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
        await asyncio.gather(*(member.process.wait() for member in members if member.process is not None))
