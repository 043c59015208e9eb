"""`quire serve` with roles: prefill and decode engines as processes, for tests that kill and stop them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.serve.live_server import LiveServer

HAS_NIXL = bool(find_spec("nixl_cu12") or find_spec("nixl_cu13"))
CONNECTORS = [
    "tcp",
    pytest.param("nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed")),
]
SECONDS = 2.0  # that a request waits for the other engine
WAIT_S = 60.0
_COMMON = ("--dtype", "float32", "--kv-memory", "16MiB", "--host-memory", "64MiB", "--log-level", "warning")


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def start(model: Path, role: str, port: int, connector: str, *options: str) -> LiveServer:
    """A prefill engine that listens on this port for others, or a decode engine that asks the one there (0: none)."""
    where = ("--transfer-listen" if role == "prefill" else "--prefill-peers", f"127.0.0.1:{port}") if port else ()
    waits = ("--transfer-seconds", str(SECONDS), "--transfer-min-tokens", "16")
    chosen = ("--model", str(model), *_COMMON, "--role", role, "--transfer-connector", connector)
    with pytest.MonkeyPatch.context() as environment:  # a cluster that starts later makes its own
        environment.setenv("QUIRE_TRANSFER_SECRET", "a secret of these tests")
        return LiveServer.quire(*chosen, *where, *waits, *options)


@contextmanager
def apart(
    model: Path, connector: str, *options: str, num_decode: int = 1
) -> Iterator[tuple[LiveServer, list[LiveServer], int]]:
    """A prefill engine, decode engines that are connected to it, and its port."""
    port = free_port()
    with start(model, "prefill", port, connector, *options) as prefill:
        decodes: list[LiveServer] = []
        try:
            for _ in range(num_decode):
                decodes.append(start(model, "decode", port, connector, *options))
                connected(decodes[-1])
            yield prefill, decodes, port
        finally:
            for each in decodes:
                each.close()


def transfer(server: LiveServer) -> dict[str, Any]:
    """Its statistics of transfers, of now."""
    return dict(server.statistics()["transfer"])


def connected(server: LiveServer, *, is_so: bool = True) -> None:
    """Wait until it has a prefill engine to ask, or none."""
    until = time.monotonic() + WAIT_S
    while any(peer["state"] == "connected" for peer in transfer(server)["prefill_peers"]) is not is_so:
        assert time.monotonic() < until, server.statistics()["transfer"]
        time.sleep(0.02)


def prompt(seed: int, length: int = 300) -> list[int]:
    """One that shares nothing with those of other seeds."""
    return [(seed * 31 + at * (7 + seed % 11)) % 250 + 1 for at in range(length)]


def ask(server: LiveServer, tokens: list[int], **fields: Any) -> list[int]:
    """The tokens of an answer."""
    body = {"prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    status, answer = server.request("/v1/completions", {**body, **fields})
    assert status == 200, answer
    return list(answer["choices"][0]["token_ids"])


def at_rest(server: LiveServer) -> dict[str, Any]:
    """Its statistics when nothing moves: no host frame is in flight."""
    until = time.monotonic() + WAIT_S
    while True:
        found = server.statistics()
        hosts = found["tiers"]["host"].values()
        is_idle = found["running_requests"] == found["waiting_requests"] == 0
        if is_idle and not any(host["moving"] for host in hosts) and not found["transfer"]["held_bytes"]:
            return found
        assert time.monotonic() < until, found
        time.sleep(0.05)


def kill(server: LiveServer) -> None:
    """SIGKILL the engine and its server at once."""
    processes = [server.process.pid, server.engine().pid]
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)], timeout=0.2)


def stop(server: LiveServer) -> None:
    """SIGSTOP the engine."""
    server.engine().suspend()


def go_on(server: LiveServer) -> None:
    """SIGCONT the engine."""
    server.engine().resume()
