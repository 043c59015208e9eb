"""How a server starts, loses its engine and ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from openai import APIStatusError, AuthenticationError

from quire.errors import AddressInUse, InvalidInput
from quire.serve.config import ServerConfig
from quire.serve.server import bind
from tests import waits
from tests.serve.live_server import LiveServer


def test_the_api_key_comes_before_everything_else() -> None:
    with LiveServer.echo(api_key="secret") as live:
        assert live.client("secret").models.list().data
        with pytest.raises(AuthenticationError, match="API key"):
            live.client("wrong").models.list()
        status, answer = live.request("/v1/completions", raw=b"{bad")
        assert (status, answer["error"]["code"]) == (401, "QUIRE-AUTH-01")
        assert live.request("/health")[0] == 200
        assert live.request("/metrics")[0] == 200


def test_an_api_key_may_be_any_text() -> None:
    with LiveServer.echo(api_key="schlüssel") as live:
        headers = {"Authorization": "Bearer schlüssel".encode().decode("latin-1")}  # http.client sends latin-1
        assert live.request("/v1/models", headers=headers)[0] == 200
        assert live.request("/v1/models", headers={"Authorization": "Bearer schlussel"})[0] == 401
        assert live.request("/v1/models")[0] == 401


@pytest.mark.parametrize("key", ["", "  ", " key", "a\nb"])
def test_a_key_that_no_client_could_send_is_refused(key: str) -> None:
    with pytest.raises(InvalidInput, match="API key"):
        ServerConfig.read({"api_key": key})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_graceful_end_finishes_open_streams(number: signal.Signals) -> None:
    with LiveServer.echo() as live:
        options = {"model": "echo", "prompt": "abc", "max_tokens": 200}
        chunks = live.client().completions.create(**options, stream=True)  # type: ignore[call-overload]
        next(chunks)
        live.process.send_signal(number)
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons[-1] == "length", "the open stream was cut"
        assert len(reasons) == 199
        assert live.wait() == 0, live.log()
        assert not live.children_left()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", live.port), timeout=1)


SLOW_START = """
import time
from quire.engine.config import EngineConfig
EngineConfig.load_tokenizer = lambda self: time.sleep(1e6)
from quire.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_start_that_fetches_is_stopped_at_once(number: signal.Signals) -> None:
    """The tokenizer stands for what is fetched from a hub that is slow."""
    server = subprocess.Popen([sys.executable, "-c", SLOW_START, "serve", "--port", "0"], stderr=subprocess.PIPE)
    with server:
        process = psutil.Process(server.pid)
        deadline = time.monotonic() + 60
        while not (children := process.children()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        server.send_signal(number)
        assert server.wait(waits.SOON_S) == 128 + number
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive


def test_at_the_deadline_open_requests_are_aborted_and_told() -> None:
    with LiveServer.echo(drain_s=0.3) as live:
        connection = live.open_request("/v1/completions", {"prompt": "stall", "stream": True})
        chat = {"messages": [{"role": "user", "content": "stall"}], "stream": True}
        chatting = live.open_request("/v1/chat/completions", chat)
        with connection, chatting, connection.makefile("rb") as lines, chatting.makefile("rb") as chat_lines:
            assert b"200 OK" in lines.readline() and b"200 OK" in chat_lines.readline()
            live.terminate()
            assert b"shutting down" in lines.read()
            told = chat_lines.read()
            assert b"shutting down" in told and b"assistant" not in told  # the role leaves with the first token
        assert live.wait() == 0, live.log()
        assert not live.children_left()


def test_a_second_signal_drops_open_requests() -> None:
    with LiveServer.echo(drain_s=waits.FOR_EVER_S) as live:
        connection = live.open_request("/v1/completions", {"prompt": "stall", "stream": True})
        with connection, connection.makefile("rb") as lines:
            assert b"200 OK" in lines.readline()
            live.terminate()
            time.sleep(0.5)
            live.terminate()
            lines.read()
        assert live.wait() == 0, live.log()
        assert not live.children_left()


def test_a_dead_engine_fails_health_and_every_request() -> None:
    with LiveServer.echo(max_restarts=0) as live:
        live.engine().kill()
        deadline = time.monotonic() + 60
        while (answer := live.request("/health"))[0] == 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert answer[0] == 503
        assert "SIGKILL" in answer[1]["reason"]
        with pytest.raises(APIStatusError, match="SIGKILL") as failed:
            live.client().completions.create(model="echo", prompt="abc")
        assert (failed.value.status_code, failed.value.code) == (503, "QUIRE-ENGINE-01")
        assert live.request("/v1/cache/statistics")[0] == 503
        status, metrics = live.request("/metrics")
        assert status == 200
        assert 'quire_healthy{model_name="echo"} 0.0' in metrics
        live.terminate()
        assert live.wait() == 0, live.log()


def test_the_engine_ends_with_a_killed_server() -> None:
    with LiveServer.echo() as live:
        live.process.kill()
        live.wait()
        assert not live.children_left()


def test_two_servers_that_load_at_once_do_not_share_a_port() -> None:
    with bind("127.0.0.1", 0) as first, pytest.raises(AddressInUse, match="in use"):
        bind("127.0.0.1", first.getsockname()[1])


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
