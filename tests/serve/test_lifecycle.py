"""How a server starts, loses its engine and ends."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from live_server import LiveServer
from openai import APIStatusError, AuthenticationError


def test_api_key_then_a_graceful_end(tiny_model: Path) -> None:
    live = LiveServer("--model", str(tiny_model), "--kv-memory", "1MiB", "--api-key", "secret", "--drain", "20")
    assert live.client("secret").models.list().data
    with pytest.raises(AuthenticationError, match="API key"):
        live.client("wrong").models.list()
    assert live.request("/v1/completions", raw=b"{bad")[0] == 401, "the key comes before the body"
    assert live.request("/health")[0] == 200
    assert live.request("/metrics")[0] == 200

    pieces: list[str] = []
    reasons: list[str | None] = []
    started = threading.Event()

    def read() -> None:
        options = {"model": "tiny", "prompt": "abc", "max_tokens": 400, "extra_body": {"ignore_eos": True}}
        for chunk in live.client("secret").completions.create(**options, stream=True):  # type: ignore[call-overload]
            pieces.append(chunk.choices[0].text)
            reasons.append(chunk.choices[0].finish_reason)
            started.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(20)
    live.terminate()
    reader.join(30)
    assert reasons[-1] == "length", "the open stream was not cut"
    assert live.wait() == 0, live.log()
    assert not live.children_left()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", live.port), timeout=1)


def test_a_dead_engine_fails_health_and_every_request(tiny_model: Path) -> None:
    live = LiveServer("--model", str(tiny_model), "--kv-memory", "1MiB")
    live.engine().kill()
    deadline = time.monotonic() + 10
    while (answer := live.request("/health"))[0] == 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert answer[0] == 503
    assert "SIGKILL" in answer[1]["reason"]
    with pytest.raises(APIStatusError, match="SIGKILL") as failed:
        live.client().completions.create(model="tiny", prompt="abc")
    assert (failed.value.status_code, failed.value.code) == (503, "QUIRE-ENGINE-01")
    assert live.request("/v1/cache/statistics")[0] == 503
    status, metrics = live.request("/metrics")
    assert status == 200
    assert "quire_healthy 0.0" in metrics
    live.terminate()
    assert live.wait() == 0, live.log()


def test_the_engine_ends_with_a_killed_server(tiny_model: Path) -> None:
    live = LiveServer("--model", str(tiny_model), "--kv-memory", "1MiB")
    live.process.kill()
    live.wait()
    assert not live.children_left()


def test_a_port_in_use_costs_no_model(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "quire", "serve", "--model", str(tiny_model), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "QUIRE-SERVE-01" in done.stderr
    assert f"--port {port + 1}" in done.stderr
    assert "Traceback" not in done.stderr
