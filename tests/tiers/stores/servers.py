"""Real servers for the tests of stores: found or installed once, started on free addresses of this machine, killed.

Valkey or Redis: from PATH; else, for root with apt, installed once (not with QUIRE_INSTALL_SERVERS=0). S3: moto's
server, a development dependency. Mooncake: where its package can be imported, from the environment or from the
directory QUIRE_MOONCAKE_SITE (`pip install --no-deps --target DIR mooncake-transfer-engine-non-cuda`, `apt-get install
libibverbs1`). What is not to be had skips its tests and says why.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

START_SECONDS = 20.0


class NotHere(Exception):
    """A server that cannot run on this machine; says why."""


class Server:
    """One server process of the tests: `command` makes its command line. Its user closes it."""

    def __init__(self, command: Sequence[str], answers: Callable[[], bool], port: int = 0):
        self.port = port
        self._command = list(command)
        self._answers = answers
        self.process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.process = subprocess.Popen(
            self._command,
            stdout=self._said,
            stderr=self._said,
            stdin=subprocess.DEVNULL,
            preexec_fn=_die_with_the_tests,
        )
        give_up = time.monotonic() + START_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > give_up:
                self.kill()
                self._said.seek(0)
                raise NotHere(f"{self._command[0]} did not start: {self._said.read()[-600:].decode(errors='replace')}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill it for good."""
        self.kill()
        self._said.close()


def started(make: Callable[[], Server]) -> Server:
    """A server that runs; skips the test where there is none to be had."""
    try:
        server = make()
        server.start()
    except NotHere as reason:
        pytest.skip(str(reason))
    return server


def _die_with_the_tests() -> None:
    """In the child: SIGKILL when the process that started it ends, however that happens (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@cache
def valkey_program() -> str:
    """The server's program, installed if need be. Raises NotHere."""
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return found
    if os.environ.get("QUIRE_INSTALL_SERVERS") == "0":
        raise NotHere("neither valkey-server nor redis-server is on PATH, and installing is off")
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NotHere("neither valkey-server nor redis-server is on PATH, and only root can install one, with apt-get")
    _install("redis-server")
    found = shutil.which("redis-server")
    if not found:
        raise NotHere("redis-server could not be installed")
    return found


def _install(package: str) -> None:
    """Try apt-get once on this machine, in the first of several test runs."""
    tried = Path(tempfile.gettempdir()) / f"quire-installed-{package}"
    with tried.open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if lock.tell():
            return
        lock.write("tried\n")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # 1: start no service
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package]
        for command in (install, ["apt-get", "update", "-qq"], install):
            try:
                done = subprocess.run(command, env=environment, capture_output=True, timeout=90)
            except subprocess.TimeoutExpired:
                return
            if command is install and done.returncode == 0:
                return


def valkey(directory: Path, *options: str) -> Server:
    """A server on `directory/valkey.sock` that keeps nothing on disk unless `options` say so. Raises NotHere."""
    path = directory / "valkey.sock"
    command = [valkey_program(), "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(directory)]
    return Server([*command, *options], lambda: _greets(path))


def _greets(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(1.0)
        try:
            line.connect(str(path))
            line.sendall(b"PING\r\n")
            return line.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


def s3(port: int) -> Server:
    """Moto's S3 on 127.0.0.1. What it holds is gone when it ends."""
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    return Server([sys.executable, "-W", "ignore", "-c", code], lambda: listens(port), port)


def free_port() -> int:
    """A port of 127.0.0.1 without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def listens(port: int) -> bool:
    """Whether a server accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@cache
def mooncake_master() -> str:
    """The program of Mooncake's master, its library importable from now on. Raises NotHere."""
    site = os.environ.get("QUIRE_MOONCAKE_SITE")
    if site and site not in sys.path:
        sys.path.append(site)
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        import mooncake.store
    except (ImportError, OSError) as error:
        raise NotHere(f"Mooncake's client library cannot be imported: {error}") from error
    program = Path(mooncake.store.__file__).with_name("mooncake_master")
    if not program.exists():
        raise NotHere(f"Mooncake's master is not at {program}")
    return str(program)


def mooncake(port: int, metrics: int, *options: str) -> Server:
    """Mooncake's master, on 127.0.0.1 alone. It holds no records: `mooncake_node` does. Raises NotHere."""
    listening = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}"]
    command = [mooncake_master(), *listening, "--metrics_host=127.0.0.1", "--default_kv_lease_ttl=500", *options]
    return Server(command, lambda: listens(port) and listens(metrics))


NODE = """
import os, sys, time
sys.path.append(sys.argv[1])
os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[3]), 1 << 20, "tcp", "", "127.0.0.1:" + sys.argv[2]) == 0
open(sys.argv[4], "w").close()
time.sleep(3600)
"""


def mooncake_node(port: int, num_bytes: int, ready: Path) -> Server:
    """A process that gives so much memory to the pool of a master; it says so by making the file `ready`."""
    ready.unlink(missing_ok=True)
    site = str(Path(mooncake_master()).parents[1])
    return Server([sys.executable, "-c", NODE, site, str(port), str(num_bytes), str(ready)], ready.exists)
