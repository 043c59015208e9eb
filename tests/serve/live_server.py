"""`quire serve` in a child process, for tests."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import Any

import psutil
from anthropic import Anthropic
from openai import OpenAI

from tests.programs import ForkedProgram

START_S = 120.0


class LiveServer:
    """Started on a free port; ready when constructed. It owns the clients that it makes."""

    def __init__(self, *command: str, forks: bool = False) -> None:
        """Run a module with its arguments, in a process of its own or in one that is forked."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        self._clients = ExitStack()
        self.process: subprocess.Popen[str] | ForkedProgram
        with tempfile.TemporaryFile("w+") as engines:
            if forks:
                self.process = ForkedProgram(*command, errors=self._log, children=engines)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=self._log, text=True
                )
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            assert line, self.log()
            self.summary: dict[str, Any] = json.loads(line)
            self.port = int(self.summary["url"].rpartition(":")[2])
            engines.seek(0)
            self._children = [psutil.Process(int(pid)) for pid in engines]
        self._children += psutil.Process(self.process.pid).children(recursive=True)

    @classmethod
    def quire(cls, *options: str) -> LiveServer:
        """The real one."""
        return cls("quire", "serve", "--port", "0", "--json", *options, forks=True)

    @classmethod
    def drafting(cls, *options: str) -> LiveServer:
        """The real one, which drafts in every step: the times of steps choose nothing."""
        return cls("tests.serve.drafting_server", "serve", "--port", "0", "--json", *options, forks=True)

    @classmethod
    def echo(cls, **settings: object) -> LiveServer:
        """The real server and engine process around `EchoCore`, which starts much faster than a model."""
        return cls("tests.serve.echo_server", *(f"{name}={value}" for name, value in settings.items()), forks=True)

    @classmethod
    def scripted(cls, family: str = "hermes", **settings: object) -> LiveServer:
        """The real server around an engine that answers what the prompt says (`tests.serve.scripted_server`)."""
        words = (f"{name}={value}" for name, value in settings.items())
        return cls("tests.serve.scripted_server", family, *words, forks=True)

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, however it is."""
        self._clients.close()
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def client(self, api_key: str = "none") -> OpenAI:
        """It is closed with the server. Garbage, it may not close before a socket of it says that none did."""
        url = f"{self.summary['url']}/v1"
        return self._clients.enter_context(OpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=60))

    def anthropic(self, api_key: str = "none") -> Anthropic:
        """Likewise, Anthropic's."""
        url = self.summary["url"]
        return self._clients.enter_context(Anthropic(base_url=url, api_key=api_key, max_retries=0, timeout=60))

    def request(
        self,
        path: str,
        body: object = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
        method: str = "",
    ) -> tuple[int, Any]:
        """Status and decoded body of one request; a body makes it a POST."""
        status, _, answer = self.exchange(path, body, raw=raw, headers=headers, method=method)
        return status, answer

    def exchange(
        self,
        path: str,
        body: object = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
        method: str = "",
    ) -> tuple[int, http.client.HTTPMessage, Any]:
        """The same, with the headers of the answer."""
        payload = json.dumps(body).encode() if body is not None else raw
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            method = method or ("GET" if payload is None else "POST")
            connection.request(method, path, payload, {"Content-Type": "application/json"} | (headers or {}))
            response = connection.getresponse()
            text = response.read().decode()
            is_json = response.headers.get_content_type() == "application/json"
            return response.status, response.headers, json.loads(text) if is_json and text else text
        finally:
            connection.close()

    def open_request(self, path: str, body: object, *, headers: dict[str, str] | None = None) -> socket.socket:
        """A POST that was sent and not read yet."""
        payload = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        head = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(payload)}")
        head = (*head, *(f"{name}: {value}" for name, value in (headers or {}).items()))
        connection.sendall("\r\n".join((*head, "", "")).encode() + payload)
        return connection

    def statistics(self) -> dict[str, Any]:
        status, statistics = self.request("/v1/cache/statistics")
        assert status == 200, statistics
        return dict(statistics)

    def wait_idle(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """The statistics once nothing runs or waits."""
        deadline = time.monotonic() + timeout_s
        while True:
            statistics = self.statistics()
            if statistics["running_requests"] == statistics["waiting_requests"] == 0:
                return statistics
            assert time.monotonic() < deadline, statistics
            time.sleep(0.02)

    def engine(self) -> psutil.Process:
        """The engine's process: the largest child; the other is multiprocessing's resource tracker."""
        return max(self._children, key=lambda child: child.memory_info().rss)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 30.0) -> int:
        return self.process.wait(timeout_s)

    def children_left(self) -> list[psutil.Process]:
        """Children of the server that still run."""
        _, alive = psutil.wait_procs(self._children, timeout=30)
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
